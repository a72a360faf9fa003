"""Priorities that a writer gives with its rows."""

import re

import numpy as np
import pytest

import conduit
from conduit.errors import FieldError

SCHEMA = conduit.Schema.from_example({"obs": np.zeros(1, np.float32), "action": 0})


@pytest.fixture
def engine(engine_name):
    table = conduit.Table(SCHEMA, 400, page_rows=40, priorities=conduit.Priorities(alpha=1.0, eps=0.0))
    plain = conduit.Table(SCHEMA, 400)
    with conduit.Engine.create(engine_name, {"replay": table, "plain": plain}) as engine:
        yield engine


def step(action, **more):
    return {"obs": np.float32([action]), "action": action, **more}


def test_rows_are_drawn_by_the_priorities_that_their_writer_gave(engine):
    with engine.writer("replay", keep_final=False) as writer:
        for action in range(120):
            writer.append(**step(action, priority=float(action % 3)))
        writer.append(**step(120, terminated=True, priority=0))
    loader = engine.loader(
        "replay", batch_size=3000, min_rows=50, sampling=conduit.Prioritized(stratified=False), format="numpy"
    )
    drawn = np.bincount(loader.next()["action"] % 3, minlength=3)
    assert drawn[0] == 0
    assert drawn[2] / drawn[1] == pytest.approx(2, rel=0.2)


def test_each_environment_has_its_own_priority_and_later_rows_have_the_default_again(engine):
    with engine.writer("replay", num_envs=2, autoreset="next_step") as writer:
        obs, action = np.zeros((2, 1), np.float32), np.array([0, 1])
        writer.append(obs=obs, action=action, priority=np.array([0.0, 4.0]))
        writer.append(obs=obs, action=action)
        table = engine._views["replay"]
        assert (table.priorities[:4] / 2**20).tolist() == [0.0, 4.0, 1.0, 1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, [1.0, 2.0], "high"])
def test_a_priority_that_is_none_is_refused_and_nothing_is_written(engine, bad):
    with engine.writer("replay", keep_final=False) as writer:
        writer.append(**step(0))
        with pytest.raises((FieldError, ValueError)):
            writer.append(**step(1, priority=bad))
        assert engine._views["replay"].rows_visible() == 1
        writer.append(**step(1))
        assert (engine._views["replay"].priorities[:2] == 2**20).all()


def test_a_table_without_priorities_says_how_to_get_them(engine):
    with engine.writer("plain", keep_final=False) as writer:
        with pytest.raises(FieldError, match=re.escape("priorities=conduit.Priorities(...)")):
            writer.append(**step(0, priority=1.0))
        assert engine._views["plain"].rows_visible() == 0
