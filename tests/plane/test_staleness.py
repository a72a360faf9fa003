"""max_staleness: rows of policies too old are never delivered, and are counted by age."""

import threading
import time

import numpy as np
import pytest

import conduit
from conduit.errors import ConfigError, DataTimeout

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "int64", (), observation=True),
        conduit.Field("reward", "float32", casting="same_kind"),
    ]
)


@pytest.fixture
def world(engine_name):
    """An engine with priorities, windows and a policy slot."""
    table = conduit.Table(
        SCHEMA, 2000, page_rows=150, max_n_step=3, max_length=4, max_stack=2, priorities=conduit.Priorities(eps=0.0)
    )
    with conduit.Engine.create(engine_name, {"replay": table}, policies={"policy": {"w": np.zeros(2)}}) as engine:
        yield engine


def publish(slot, versions):
    for _ in range(versions):
        slot.publish({"w": np.zeros(2)})


def fill(engine, per_version, versions, writer=None):
    """Rows whose obs is 1000 * version + number, `per_version` under each of `versions`."""
    writer = writer or engine.writer("replay")
    for version in versions:
        writer.version = version
        for number in range(per_version):
            writer.append(obs=1000 * version + number, reward=1.0)
    return writer


def open_loader(engine, size=64, **options):
    options = {"min_rows": 1, "format": "numpy", "timeout": 0.0, "policy": engine.policy(), "seed": 3} | options
    return engine.loader("replay", batch_size=size, **options)


WINDOWS = [
    None,
    conduit.Transition(n_step=3, stack=2),
    conduit.Sequence(4),
    conduit.Sequence(4, overlap=2, across=True),
    conduit.Rollout(4, 1, stride=1),
]


@pytest.mark.parametrize("sampling", [None, conduit.Prioritized()], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: type(window).__name__)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_row_older_than_asked_for_is_delivered(world, window, sampling, staleness):
    writer = fill(world, 30, range(8))
    slot = world.policy()
    publish(slot, 7)
    assert slot.version == 7
    with open_loader(world, window=window, sampling=sampling, max_staleness=staleness) as loader:
        seen = set()
        for _ in range(30):
            batch = loader.next()
            assert batch.versions.min() >= 7 - staleness
            obs = batch["obs"].reshape(64, -1)
            # a frame of a stack is only what was seen before: its step is not what is learnt from
            acted = obs[:, -1] if isinstance(window, conduit.Transition) else obs.min(1)
            assert (acted // 1000 >= 7 - staleness).all()
            seen |= set(batch.versions.tolist())
        assert seen == set(range(7 - staleness, 8))
    writer.close()


def test_refused_draws_are_counted_by_age(world):
    """Equal rows per version: each age is refused about as often as it is drawn."""
    writer = fill(world, 40, range(6))
    publish(world.policy(), 5)
    with open_loader(world, 256, max_staleness=2) as loader:
        assert loader.stats.stale == {}
        for _ in range(100):
            loader.next().release()
        stale = loader.stats.stale
        assert stale.keys() == {3, 4, 5}
        counts = np.array(list(stale.values()))
        # as many as of each age that was delivered: 100 * 256 / 3
        np.testing.assert_allclose(counts, 100 * 256 / 3, rtol=0.1)
        kept = loader.stats.stale
    assert loader.stats.stale == kept
    writer.close()


def test_very_old_rows_share_the_last_count(world):
    writer = fill(world, 40, [0, 400])
    slot = world.policy()
    publish(slot, 400)
    with open_loader(world, max_staleness=1) as loader:
        loader.next()
        assert loader.stats.stale.keys() == {63}
    writer.close()


def test_what_counts_is_the_version_at_delivery(world):
    """A batch asked for after a publication is held to the new version, the one before to the old one."""
    writer = fill(world, 40, [1, 2, 3])
    slot = world.policy()
    publish(slot, 3)
    with open_loader(world, 256, max_staleness=1) as loader:
        assert set(loader.next().versions.tolist()) == {2, 3}
        publish(slot, 1)
        assert set(loader.next().versions.tolist()) == {3}
        publish(slot, 1)
        with pytest.raises(DataTimeout, match=r"older than max_staleness=1: \{"):
            loader.next()
        fill(world, 10, [5], writer)
        assert set(loader.next().versions.tolist()) == {5}
    writer.close()


def test_a_publication_during_the_wait_counts_too(world):
    """A loader that waits while the policy moves on does not take what has become too old meanwhile."""
    slot = world.policy()
    publish(slot, 1)
    writer = world.writer("replay")

    def later():
        time.sleep(0.15)
        publish(slot, 5)
        fill(world, 20, [1, 2], writer)
        time.sleep(0.15)
        fill(world, 20, [6], writer)

    thread = threading.Thread(target=later)
    with open_loader(world, max_staleness=1, timeout=10.0) as loader:
        thread.start()
        try:
            assert set(loader.next().versions.tolist()) == {6}
        finally:
            thread.join()
    writer.close()


@pytest.mark.parametrize("bad", [-1, 1.5, "2"])
def test_a_staleness_that_is_none_is_refused(world, bad):
    with pytest.raises(ConfigError, match="max_staleness of at least 0"):
        open_loader(world, max_staleness=bad)


def test_staleness_needs_the_slot_it_counts_in(world):
    with pytest.raises(ConfigError, match="policy=<the slot"):
        open_loader(world, max_staleness=1, policy=None)
