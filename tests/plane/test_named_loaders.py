"""A named loader's place in its sequence of batches outlives it, its process, and the engine's checkpoint."""

import numpy as np
import pytest

import conduit
from conduit.errors import Busy, ConfigError
from conduit.store.format.layout import MAX_NAMED_LOADERS
from conduit.store.tables.loader_cursors import LONGEST_NAME
from conduit.testing.puppets import Puppet, attach

SCHEMA = conduit.Schema([conduit.Field("obs", "float32", (2,), observation=True), conduit.Field("action", "int64")])
OPTIONS = {"batch_size": 16, "format": "numpy", "timeout": 0}


@pytest.fixture
def engine(engine_name):
    tables = {name: conduit.Table(SCHEMA, 1000) for name in ("replay", "other")}
    with conduit.Engine.create(engine_name, tables, max_participants=4) as made:
        for name in tables:
            with made.writer(name, keep_final=False) as writer:
                for k in range(300):
                    writer.append(obs=np.zeros(2, np.float32), action=k)
        yield made


def actions(loader, count=1):
    return [loader.next()["action"].tolist() for _ in range(count)]


def plain(client, seed, count):
    with client.loader("replay", seed=seed, **OPTIONS) as loader:
        return actions(loader, count)


def test_a_loader_of_the_name_goes_on_where_the_last_one_was(engine):
    expected = plain(engine, 7, 5)
    with engine.loader("replay", name="learner", seed=7, **OPTIONS) as loader:
        assert actions(loader, 2) == expected[:2]
    with engine.loader("replay", name="learner", **OPTIONS) as loader:
        assert loader.sampler.batch == 2
        assert actions(loader) == expected[2:3]
        loader.sampler.batch = 0
        assert actions(loader) == expected[:1]
    with engine.loader("replay", name="learner", seed=7, **OPTIONS) as loader:
        assert actions(loader) == expected[1:2]
    with engine.loader("replay", name="another", seed=-1, **OPTIONS) as loader:
        assert actions(loader) == plain(engine, -1, 1)
    with engine.loader("replay", name="another", seed=2**64 - 1, **OPTIONS) as loader:
        assert loader.sampler.batch == 1


def _load(own, count):
    own.loader = own.client.loader("replay", name="learner", **OPTIONS)
    return actions(own.loader, count)


def _forget(own):
    own.client.close()


def test_a_killed_processs_loader_is_free_at_once_and_its_place_is_kept(engine):
    expected = plain(engine, 0, 4)
    with Puppet() as first:
        first.do(attach, engine.name)
        assert first.do(_load, 3) == expected[:3]
        with pytest.raises(Busy, match="participant 1 has it open"):
            engine.loader("replay", name="learner", **OPTIONS)
        first.kill()
    with engine.loader("replay", name="learner", **OPTIONS) as loader:
        assert actions(loader) == expected[3:]


def test_the_next_holder_of_a_dead_ones_seat_does_not_have_its_names(engine):
    with Puppet() as first, Puppet() as second:
        first.do(attach, engine.name)
        first.do(_load, 1)
        first.kill()
        second.do(attach, engine.name)
        with engine.loader("replay", name="learner", **OPTIONS) as loader:
            assert loader.sampler.batch == 1
        second.do(_load, 1)
        second.do(_forget)
        with engine.loader("replay", name="learner", **OPTIONS) as loader:
            assert loader.sampler.batch == 2


def test_a_name_is_free_again_when_its_loader_is_dropped_or_could_not_be_made(engine):
    loader = engine.loader("replay", name="learner", **OPTIONS)
    with pytest.raises(Busy):
        engine.loader("replay", name="learner", **OPTIONS)
    loader.next()
    del loader
    with pytest.raises(ConfigError, match="min_rows"):
        engine.loader("replay", name="learner", min_rows=0, **OPTIONS)
    with engine.loader("replay", name="learner", **OPTIONS) as loader:
        assert loader.sampler.batch == 1


def test_a_failed_next_keeps_the_place(engine_name):
    with conduit.Engine.create(engine_name, {"replay": conduit.Table(SCHEMA, 100)}) as engine:
        with engine.loader("replay", name="learner", **OPTIONS) as loader, pytest.raises(conduit.errors.DataTimeout):
            loader.next()
        with engine.loader("replay", name="learner", **OPTIONS) as loader:
            assert loader.sampler.batch == 0


def test_another_seed_or_table_and_bad_names_are_refused(engine):
    engine.loader("replay", name="learner", seed=7, **OPTIONS).close()
    with pytest.raises(ConfigError, match=r"seed 7 for loader 'learner'.*got 8"):
        engine.loader("replay", name="learner", seed=8, **OPTIONS)
    with pytest.raises(ConfigError, match=r"on table 'replay'.*got 'other'"):
        engine.loader("other", name="learner", **OPTIONS)
    for name in ("", "ö" * (LONGEST_NAME // 2 + 1), 5):
        with pytest.raises(ConfigError, match=f"1 to {LONGEST_NAME} bytes"):
            engine.loader("replay", name=name, **OPTIONS)
    engine.loader("replay", name="ö" * (LONGEST_NAME // 2), **OPTIONS).close()


def test_there_is_a_limit_to_names_and_known_ones_can_be_used_again(engine):
    for number in range(MAX_NAMED_LOADERS):
        engine.loader("replay", name=f"{number}", **OPTIONS).close()
    with pytest.raises(ConfigError, match=f"at most {MAX_NAMED_LOADERS}"):
        engine.loader("replay", name="more", **OPTIONS)
    engine.loader("replay", name="5", **OPTIONS).close()
