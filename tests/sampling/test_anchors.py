"""The count of rows that a window could be drawn at, against what loaders draw."""

import numpy as np
import pytest

import conduit
from conduit.errors import ConfigError

SCHEMA = conduit.Schema.from_example({"obs": np.zeros(2, np.float32), "action": 0, "reward": 0.0})

WINDOWS = [
    conduit.Transition(),
    conduit.Transition(n_step=3, stack=2),
    conduit.Transition(n_step=3, newest="bootstrap"),
    conduit.Sequence(4),
    conduit.Sequence(4, next_obs=True),
    conduit.Sequence(5, overlap=2, pad=False),
    conduit.Episode(8),
    conduit.Sequence(4, across=True),
    conduit.Rollout(3, num_envs=2),
]


def ids_drawn(engine, window, **options):
    """Every row that a loader draws in so many batches that none is left out."""
    found = set()
    with engine.loader("t", batch_size=256, window=window, min_rows=1, format="numpy", timeout=0, **options) as loader:
        for _ in range(60):
            found |= set(loader.next().ids.tolist())
    return found


def fill(engine, ticks, *, autoreset, seed=0):
    """Two environments whose episodes are 1 to 9 steps long; some ends are truncations without a final observation."""
    random = np.random.default_rng(seed)
    writer = engine.writer("t", num_envs=2, autoreset=autoreset, keep_final=False)
    ended = np.zeros(2, bool)
    for _ in range(ticks):
        flags = random.random((2, 2)) < 0.15
        if autoreset == "next_step":
            flags[:, ended] = False
        finals = np.ones((2, 2), np.float32) if autoreset == "same_step" and random.random() < 0.5 else None
        writer.append(
            obs=np.zeros((2, 2), np.float32),
            action=np.zeros(2, np.int64),
            reward=np.zeros(2),
            terminated=flags[0],
            truncated=flags[1],
            final=finals,
        )
        ended = flags.any(0)
    return writer


@pytest.mark.parametrize("window", WINDOWS, ids=repr)
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize("closed", [False, True], ids=["writing", "closed"])
def test_as_many_rows_are_counted_as_a_loader_draws(engine_name, window, autoreset, closed):
    table = conduit.Table(
        SCHEMA, 400, page_rows=64, max_n_step=3, max_stack=2, max_length=9, num_envs=2, within_episodes=False
    )
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        assert engine.table("t").sampleable(window) == 0
        writer = fill(engine, 150, autoreset=autoreset)
        if closed:
            writer.close()
        assert engine.table("t").sampleable(window) == len(ids_drawn(engine, window)) > 0


def test_rows_that_were_delivered_as_often_as_they_may_be_are_left_out(engine_name):
    table = conduit.Table(SCHEMA, 400, page_rows=64, num_envs=2, max_times_sampled=1)
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        fill(engine, 60, autoreset="same_step").close()
        handle = engine.table("t")
        before = handle.sampleable()
        loader = engine.loader("t", batch_size=10, format="numpy")
        for count in range(1, 5):
            loader.next()
            assert handle.sampleable() == before - 10 * count


def test_a_window_that_the_table_was_not_made_for_is_refused(engine_name):
    with conduit.Engine.create(engine_name, {"t": conduit.Table(SCHEMA, 400)}) as engine:
        with pytest.raises(ConfigError, match="max_n_step=5"):
            engine.table("t").sampleable(conduit.Transition(n_step=5))
        with pytest.raises(ConfigError, match="Expected a window"):
            engine.table("t").sampleable("transitions")
