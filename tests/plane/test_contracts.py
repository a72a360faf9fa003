"""The control points: each is swapped for another policy without touching the other two."""

from collections.abc import Sequence

import numpy as np
import pytest

import conduit
from conduit.contracts.placement import Placement, Pool, Request
from conduit.errors import ConfigError, DataTimeout
from conduit.plane.deliver.batch import Batch
from conduit.plane.ingest.placement import HostPlacement
from conduit.plane.ingest.policy import CommitPerStep

OBS = np.zeros(4, np.float32)


def fill(writer, ticks, start=0):
    for k in range(start, start + ticks):
        writer.append(obs=OBS + k, action=k, reward=float(k))


def visible(engine):
    return engine._views["replay"].rows_visible()


# ingestion


class Bursts(conduit.Ingestion):
    def __init__(self, ticks):
        self.ticks = ticks
        self.asked = []

    def publish_every(self, table, num_envs):
        self.asked.append((table, num_envs))
        return self.ticks


def test_an_ingestion_policy_is_asked_once_per_writer_and_decides_when_rows_are_seen(make):
    engine = make()
    policy = Bursts(3)
    writer = engine.writer("replay", ingestion=policy)
    other = engine.writer("replay", num_envs=2, autoreset="next_step", ingestion=policy)
    assert policy.asked == [("replay", 1), ("replay", 2)]
    seen = []
    for k in range(7):
        fill(writer, 1, k)
        seen.append(visible(engine))
    assert seen == [0, 0, 3, 3, 3, 6, 6]
    tick = {"obs": np.zeros((2, 4), np.float32), "action": np.zeros(2, np.int64), "reward": np.zeros(2)}
    for _ in range(3):
        other.append(**tick)
    assert visible(engine) == 12
    assert policy.asked == [("replay", 1), ("replay", 2)]


@pytest.mark.parametrize("how", ["flush", "close", "page turn", "client close"])
def test_what_an_ingestion_policy_holds_back_is_published_by(make, how):
    engine = make(capacity=60, page_rows=20)
    client = conduit.attach(engine.name)
    writer = client.writer("replay", ingestion=conduit.CommitEvery(1000))
    fill(writer, 5)
    assert visible(engine) == 0
    if how == "flush":
        writer.flush()
    elif how == "close":
        writer.close()
    elif how == "client close":
        client.close()
    else:
        fill(writer, 20, 5)
        assert visible(engine) >= 19
        return
    assert visible(engine) == 5
    client.close()


def test_rows_that_are_held_back_die_with_their_writer_and_those_published_stay(make):
    engine = make()
    client = conduit.attach(engine.name)
    writer = client.writer("replay", ingestion=conduit.CommitEvery(4))
    fill(writer, 10)
    client._participants.forget()
    assert engine.recover() == 1
    assert visible(engine) == 8
    with engine.loader("replay", batch_size=100, min_rows=1, format="numpy", timeout=0) as loader:
        assert set(loader.next()["action"].tolist()) == set(range(7))


def test_every_form_of_writing_keeps_to_the_ingestion_policy(make):
    engine = make()
    writer = engine.writer("replay", ingestion=conduit.CommitEvery(5))
    fill(writer, 1)
    with writer.step() as row:
        row.obs, row.action, row.reward = OBS, 1, 1.0
    with writer.unchecked() as unchecked:
        at = unchecked.row
        for _ in range(2):
            unchecked.obs[at], unchecked.action[at], unchecked.reward[at] = 0, 0, 0
            at = unchecked.commit()
    assert visible(engine) == 0
    with writer.rollout(3) as rollout:
        rollout.obs[:], rollout.action[:], rollout.reward[:] = 0, 0, 0
    assert visible(engine) == 7


@pytest.mark.parametrize("ticks", [0, -1, 1.5, "2", None])
def test_a_policy_that_answers_with_no_number_of_ticks_is_refused(make, ticks):
    with pytest.raises(ConfigError, match="ticks of at least 1"):
        conduit.CommitEvery(ticks)
    engine = make()
    with pytest.raises(ConfigError, match=r"Bursts.publish_every.*at least 1.*'replay'"):
        engine.writer("replay", ingestion=Bursts(ticks))


def test_the_default_makes_each_commit_visible_at_once(make):
    engine = make()
    writer = engine.writer("replay")
    for k in range(5):
        fill(writer, 1, k)
        assert visible(engine) == k + 1
    assert CommitPerStep().publish_every("any", 8) == 1


# placement


class Recording(Placement):
    def __init__(self, answer=None):
        self.answer = answer
        self.requests = []

    def choose(self, request: Request, pools: Sequence[Pool]) -> Pool:
        self.requests.append((request, tuple(pools)))
        return self.answer or pools[-1]


def test_a_placement_policy_is_asked_once_per_stream_with_the_pools_there_are(make):
    engine = make()
    policy = Recording()
    writer = engine.writer("replay", num_envs=3, autoreset="next_step", placement=policy)
    for _ in range(3):
        writer.append(obs=np.zeros((3, 4), np.float32), action=np.zeros(3, np.int64), reward=np.zeros(3))
    ((request, pools),) = policy.requests
    assert request == Request("replay", writer.stream, 3, 4 * 4 + 8 + 4)
    assert [(pool.name, pool.tier, pool.device) for pool in pools] == [("host", "host", "cpu")]
    assert pools[0].capacity >= engine._views["replay"].layout.rows * request.row_bytes
    assert HostPlacement().choose(request, pools) is pools[0]


def test_a_pool_that_is_not_on_offer_is_refused_and_names_the_policy(make, unchanged):
    engine = make()
    strange = Pool("gpu", "host", "cuda:0", 1)
    with unchanged(engine), pytest.raises(ConfigError, match=r"Recording.choose.*\['host'\].*'replay'.*cuda:0"):
        engine.writer("replay", placement=Recording(strange))


# delivery


class Fresh(conduit.Delivery):
    """Hands out each batch of another delivery only if it holds a row of the newest `window` steps."""

    def __init__(self, inner: conduit.Delivery, newest: int):
        self.inner, self.newest, self.closed = inner, newest, False

    def next(self, timeout: float | None = None) -> Batch:
        for _ in range(1000):
            batch = self.inner.next(timeout)
            if int(batch["action"].max()) >= self.newest:
                return batch
        raise DataTimeout("no fresh row came")

    def close(self) -> None:
        self.closed = True
        self.inner.close()


def test_a_delivery_policy_stands_in_for_the_loader(make):
    engine = make()
    fill(engine.writer("replay"), 200)
    with Fresh(engine.loader("replay", batch_size=4, format="numpy"), 190) as delivery:
        for count, batch in enumerate(delivery):
            assert batch["action"].max() >= 190
            if count == 5:
                break
    assert delivery.closed
    assert isinstance(engine.loader("replay", batch_size=1), conduit.Delivery)


def test_the_contracts_cannot_be_made_without_their_methods():
    for contract in (conduit.Ingestion, Placement, conduit.Delivery):
        with pytest.raises(TypeError, match="abstract"):
            contract()


def test_all_three_are_swapped_at_once(make):
    engine = make()
    ingestion, placement = Bursts(4), Recording()
    writer = engine.writer("replay", ingestion=ingestion, placement=placement)
    fill(writer, 18)
    with Fresh(engine.loader("replay", batch_size=64, min_rows=1, format="numpy"), 14) as delivery:
        assert set(delivery.next()["action"].tolist()) <= set(range(15))
    assert len(placement.requests) == len(ingestion.asked) == 1


# weights and versions


def test_rows_carry_the_version_that_acted(make):
    weights = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float64)}
    engine = make(policies={"policy": weights})
    client = conduit.attach(engine.name)
    learner, actor = engine.policy(), client.policy("policy")
    bound = client.writer("replay", policy=actor)
    vector = client.writer("replay", num_envs=2, autoreset="next_step", policy=actor)
    free = client.writer("replay")
    tick = {"obs": np.zeros((2, 4), np.float32), "action": np.zeros(2, np.int64), "reward": np.zeros(2)}

    def write():
        fill(bound, 1)
        vector.append(**tick)
        fill(free, 1)

    write()
    assert actor.poll() is None
    assert learner.publish({"w": weights["w"] + 1, "b": weights["b"]}) == 1
    assert (learner.version, actor.version, actor.held) == (1, 1, 0)
    write()  # published, but the actor has not taken it yet
    polled = actor.poll()
    assert polled.version == actor.held == 1
    np.testing.assert_array_equal(polled.arrays["w"], weights["w"] + 1)
    assert actor.poll() is None
    write()
    learner.publish(weights)
    learner.publish(weights)
    actor.poll()
    free.version = 77
    late = client.writer("replay", policy=actor)
    write()
    fill(late, 1)
    meta = {writer.stream: [] for writer in (bound, vector, free, late)}
    view = engine._views["replay"]
    for page, words in enumerate(view.pages().tolist()):
        if words[1]:
            base = page * view.layout.page_rows
            meta[words[6]] = view.meta["version"][base : base + words[1]].tolist()
    assert meta[bound.stream] == [0, 0, 1, 3]
    assert meta[vector.stream] == [0, 0, 0, 0, 1, 1, 3, 3]
    assert meta[free.stream] == [0, 0, 0, 77]
    assert meta[late.stream] == [3]
    assert bound.version == 3
    with pytest.raises(ConfigError, match="a version from 0 to 2147483647, got -1"):
        bound.version = -1
    for wrong in (2**31, 1.5, "2", None):
        with pytest.raises(ConfigError, match="a version from 0"):
            bound.version = wrong
    bound.version = np.int64(5)
    assert bound.version == 5
    client.close()


def test_versions_come_out_with_the_batch(make):
    engine = make(policies={"policy": {"w": np.zeros(2, np.float32)}})
    slot = engine.policy()
    writer = engine.writer("replay", policy=slot)
    for version in range(1, 6):
        slot.publish({"w": np.full(2, version, np.float32)})
        slot.poll()
        fill(writer, 10, 10 * version)
    batch = engine.loader("replay", batch_size=256, min_rows=1, format="numpy").next()
    np.testing.assert_array_equal(batch.versions, batch["action"] // 10)
    assert set(batch.versions.tolist()) == {1, 2, 3, 4, 5}
