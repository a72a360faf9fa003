"""Queue tables as one process sees them: what a claim holds, how it ends, rollouts and what follows them, what is refused."""

import gc
import weakref

import numpy as np
import pytest
import torch

import conduit
from conduit.errors import Closed, ConfigError, DataTimeout, FieldError, SpaceTimeout
from conduit.store.format import words as w
from conduit.testing.invariants import check_nothing_leaked, hazards, kinds, slots_in_use
from tests.plane.conftest import CARTPOLE


@pytest.fixture
def queue(make):
    """Create an engine with a queue: `queue(**options of its table)`."""

    def create(schema=CARTPOLE, capacity=1000, **options):
        return make(schema, capacity, kind="queue", **options)

    return create


def steps(writer, first, count, **more):
    """Append `count` ticks whose values are their number, environments apart by 1000."""
    lead = () if writer.num_envs is None else (writer.num_envs,)
    for number in range(first, first + count):
        value = number + 1000 * np.arange(writer.num_envs or 1).reshape(lead)
        obs = np.broadcast_to(np.asarray(value)[..., None], (*lead, 4)).astype(np.float32)
        writer.append(obs=obs, action=value if lead else int(value), reward=value.astype(np.float32), **more)


def observation(value, envs=None):
    lead = () if envs is None else (envs,)
    return np.full((*lead, 4), value, np.float32)


def ticks(claim):
    return claim["action"][:, 0].tolist()


# -- what a claim holds


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_claim_s_arrays_lie_where_the_writer_wrote_and_have_axes_of_ticks_and_environments(queue, kind):
    engine = queue(rollout_length=5, num_envs=3)
    view = engine._views["replay"]
    steps(engine.writer("replay", num_envs=3, autoreset="next_step"), 0, 10)
    consumer = engine.consumer("replay", format=kind)
    consumer.next().ack()
    claim = consumer.next()
    assert list(claim) == ["obs", "action", "reward", "terminated", "truncated"]
    for name, value in claim.items():
        column = view.columns[name] if name in view.columns else getattr(view, name)
        address = value.data_ptr() if kind == "torch" else value.ctypes.data
        assert address == column[claim._row :].ctypes.data
        assert tuple(value.shape) == (5, 3, *column.shape[1:])
        assert type(value) is (torch.Tensor if kind == "torch" else np.ndarray)
    assert np.asarray(claim["action"]).tolist() == [[n, n + 1000, n + 2000] for n in range(5, 10)]
    assert (claim.ticks, claim.num_envs, claim.first_tick, claim.complete) == (5, 3, 5, True)
    assert not claim.delivered_before


def test_one_environment_without_an_axis_is_delivered_with_one(queue):
    engine = queue()
    steps(engine.writer("replay"), 0, 3)
    claim = engine.consumer("replay").next()
    assert claim["obs"].shape == (3, 1, 4)
    assert claim.bootstrap is None


def test_padded_rows_and_nested_observations_are_views_too(make):
    schema = conduit.Schema.from_example(
        {"obs": {"pixels": np.zeros((9, 20), np.uint8), "speed": np.float32(0)}, "action": 0}, observation="obs"
    )
    engine = make(schema, 100, kind="queue", rollout_length=4, num_envs=2)
    writer = engine.writer("replay", num_envs=2, autoreset="next_step")
    for number in range(4):
        obs = {"pixels": np.full((2, 9, 20), number, np.uint8), "speed": np.full(2, number, np.float32)}
        writer.append(obs=obs, action=np.full(2, number))
    claim = engine.consumer("replay").next()
    pixels = claim["obs.pixels"]
    assert pixels.shape == (4, 2, 9, 20)
    assert pixels.stride() == (384, 192, 20, 1)
    assert (pixels == torch.arange(4, dtype=torch.uint8)[:, None, None, None]).all()
    assert set(claim.nest()["obs"]) == {"pixels", "speed"}


def test_meta_are_views_of_the_rows_and_say_what_loaders_say(queue):
    engine = queue(rollout_length=6, num_envs=2)
    writer = engine.writer("replay", num_envs=2, autoreset="same_step")
    writer.version = 7
    for number in range(6):
        ended = np.array([number == 2, False])
        final = observation(-1, 2) if number == 2 else None
        writer.append(
            obs=observation(number, 2), action=np.zeros(2, int), reward=np.zeros(2), terminated=ended, final=final
        )
    claim = engine.consumer("replay", format="numpy").next()
    assert (claim.versions == 7).all()
    assert claim.versions.dtype == np.int32
    assert np.shares_memory(claim.versions, claim.steps) is False  # other words of the same rows
    assert claim.versions.strides == (32, 16)
    assert claim.steps[:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert claim.steps[:, 1].tolist() == [0, 1, 2, 3, 4, 5]
    assert claim.is_first.tolist() == [[n in {0, 3}, n == 0] for n in range(6)]
    assert len(np.unique(claim.episodes)) == 3
    assert claim.mask.all()
    generation = engine._views["replay"].pages()[0, 0] >> 16
    assert (claim.ids >> 40 == generation).all()
    assert (np.diff(claim.ids.ravel()) == 1).all()


def test_rows_that_are_only_an_observation_are_masked(queue):
    engine = queue(rollout_length=4, num_envs=2)
    writer = engine.writer("replay", num_envs=2, autoreset="next_step")
    for number in range(4):
        ends = np.array([number == 1, False])
        writer.append(obs=observation(number, 2), action=np.zeros(2, int), reward=np.zeros(2), truncated=ends)
    claim = engine.consumer("replay", format="numpy").next()
    assert claim.mask.tolist() == [[True, True], [True, True], [False, True], [True, True]]
    assert claim.is_first.tolist() == [[True, True], [False, False], [False, False], [True, False]]
    assert claim["truncated"].tolist() == [[False, False], [True, False], [False, False], [False, False]]


def test_ragged_fields_come_as_a_list_of_views(make):
    schema = conduit.Schema(
        [conduit.Field("tokens", "int32", (20,), observation=True, ragged=True), conduit.Field("reward", "float32")]
    )
    engine = make(schema, 100, kind="queue", rollout_length=3, num_envs=2)
    writer = engine.writer("replay", num_envs=2, autoreset="next_step")
    for number in range(3):
        tokens = [np.arange(number, dtype=np.int32), np.arange(10 + number, dtype=np.int32)]
        last = [np.full(4, 9, np.int32), np.full(5, 8, np.int32)] if number == 2 else None
        writer.append(tokens=tokens, reward=np.zeros(2, np.float32), bootstrap=last)
    claim = engine.consumer("replay").next()
    assert [len(one) for one in claim["tokens"]] == [0, 10, 1, 11, 2, 12]
    assert claim["tokens"][5].tolist() == list(range(12))
    assert [one.tolist() for one in claim.bootstrap["tokens"]] == [[9] * 4, [8] * 5]
    assert "tokens" not in claim.batch()


def test_bfloat16_comes_as_bfloat16(make):
    engine = make(conduit.Schema([conduit.Field("x", "bfloat16", (2,))]), 10, kind="queue")
    engine.writer("replay").append(x=torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    value = engine.consumer("replay").next()["x"]
    assert value.dtype == torch.bfloat16
    assert value.tolist() == [[[1.5, -2.0]]]


def test_numpy_arrays_cannot_be_written_to(queue):
    engine = queue()
    steps(engine.writer("replay"), 0, 1)
    claim = engine.consumer("replay", format="numpy").next()
    with pytest.raises(ValueError, match="read-only"):
        claim["obs"][0] = 1


# -- order, and how claims end


def test_rows_are_delivered_once_in_their_order_and_a_page_to_one_consumer_at_a_time(queue):
    engine = queue(capacity=60, page_rows=21)
    writer = engine.writer("replay")
    one, other = (engine.consumer("replay", format="numpy") for _ in range(2))
    steps(writer, 0, 50)
    first = one.next(max_ticks=5)
    # the rest of the page waits for the end of the claim, the next page for the rest
    assert other.poll() is None
    first.ack()
    rest = other.next(max_ticks=100)
    second = one.next(max_ticks=100)
    assert [ticks(claim) for claim in (first, rest, second)] == [
        list(range(5)),
        list(range(5, 20)),
        list(range(20, 40)),
    ]
    found = []
    for claim in (rest, second):
        claim.ack()
    while (claim := other.poll(max_ticks=3)) is not None:
        found += ticks(claim)
        claim.ack()
    assert found == list(range(40, 50))


def test_the_page_that_was_opened_first_comes_first_whichever_is_sealed_first(queue):
    engine = queue(rollout_length=4)
    slow, fast = engine.writer("replay"), engine.writer("replay")
    steps(slow, 0, 1)
    steps(fast, 100, 8)
    steps(slow, 1, 3)
    consumer = engine.consumer("replay", format="numpy")
    held = [consumer.next() for _ in range(3)]
    assert [ticks(claim)[0] for claim in held] == [0, 100, 104]


def test_a_claim_ends_once(queue):
    engine = queue()
    writer = engine.writer("replay")
    steps(writer, 0, 4)
    consumer = engine.consumer("replay", format="numpy")
    claim = consumer.next(max_ticks=2)
    claim.ack()
    claim.ack()
    with pytest.raises(Closed, match="its rows are done"):
        claim.give_back()
    claim = consumer.next()
    assert ticks(claim) == [2, 3]
    claim.give_back()
    claim.give_back()
    with pytest.raises(Closed, match="given back: its rows are delivered again"):
        claim.ack()
    with pytest.raises(Closed, match="others may work on its rows"):
        claim["reward"]
    again = consumer.next()
    assert ticks(again) == [2, 3]
    assert again.delivered_before
    stats = consumer.stats
    assert (stats.claims, stats.rows, stats.acknowledged, stats.given_back, stats.delivered_before) == (3, 6, 1, 1, 1)


def test_only_rows_that_came_back_are_said_to_have_been_delivered_before(queue):
    engine = queue()
    steps(engine.writer("replay"), 0, 9)
    consumer = engine.consumer("replay", format="numpy")
    consumer.next(max_ticks=6).give_back()
    seen = []
    for _ in range(3):
        with consumer.next(max_ticks=3) as claim:
            seen.append((ticks(claim), claim.delivered_before))
    assert seen == [([0, 1, 2], True), ([3, 4, 5], True), ([6, 7, 8], False)]


def test_a_block_acknowledges_and_an_exception_gives_back(queue):
    engine = queue()
    steps(engine.writer("replay"), 0, 4)
    consumer = engine.consumer("replay", format="numpy")
    with pytest.raises(ZeroDivisionError), consumer.next(max_ticks=3):
        raise ZeroDivisionError
    with consumer.next(max_ticks=3) as claim:
        assert ticks(claim) == [0, 1, 2]
    with consumer.next() as claim:
        assert ticks(claim) == [3]
        claim.give_back()
    assert ticks(consumer.next()) == [3]


def test_a_claim_that_is_dropped_is_given_back(queue):
    engine = queue()
    steps(engine.writer("replay"), 0, 4)
    consumer = engine.consumer("replay", format="numpy")
    kept = consumer.next()["action"]
    claim = consumer.next()
    assert claim.delivered_before
    assert kept[:, 0].tolist() == ticks(claim)


def test_closing_a_consumer_gives_back_what_it_holds(queue):
    engine = queue(rollout_length=2)
    steps(engine.writer("replay"), 0, 4)
    consumer = engine.consumer("replay", format="numpy")
    held = [consumer.next(), consumer.next()]
    held[0].ack()
    consumer.close()
    consumer.close()
    with pytest.raises(Closed, match="got one that was closed"):
        consumer.poll()
    again = engine.consumer("replay", format="numpy").next()
    assert ticks(again) == [2, 3]
    assert again.delivered_before


def test_a_consumer_that_is_forgotten_takes_nothing_away_from_its_claims(queue):
    engine = queue()
    steps(engine.writer("replay"), 0, 4)
    claim = engine.consumer("replay", format="numpy").next()
    gc.collect()
    claim.ack()
    assert engine.consumer("replay").poll() is None


def test_what_a_claim_is_made_of_stays_until_nothing_made_from_it_is_alive(queue):
    engine = queue(capacity=8, rollout_length=2)
    view = engine._views["replay"]
    writer = engine.writer("replay", timeout=0.05)
    pages = view.layout.pages
    consumer = engine.consumer("replay")
    steps(writer, 0, 2)
    claim = consumer.next()
    rewards = claim["reward"]
    part = rewards[1:, 0]
    claim.ack()
    claim_is_gone = weakref.ref(claim)
    del claim, rewards
    assert claim_is_gone() is None
    # the queue is filled many times over, the page that the tensor looks at is left alone
    number = 2
    for _ in range(5 * pages):
        steps(writer, number, 2)
        number += 2
        consumer.next().ack()
    assert part.tolist() == [1.0]
    assert np.count_nonzero(hazards(view)) == 1
    del part
    assert not hazards(view).any()
    writer.close()
    check_nothing_leaked(view)


def test_a_client_holds_as_many_claims_as_it_has_leases_and_is_told_so(queue):
    from conduit.store.format.words import HAZARDS_PER_PARTICIPANT

    engine = queue(rollout_length=1, capacity=200)
    steps(engine.writer("replay"), 0, HAZARDS_PER_PARTICIPANT + 1)
    consumer = engine.consumer("replay")
    held = [consumer.next() for _ in range(HAZARDS_PER_PARTICIPANT)]
    with pytest.raises(BufferError, match=f"at most {HAZARDS_PER_PARTICIPANT} leases and claims"):
        consumer.next()
    held.pop().ack()
    assert ticks(consumer.next())[0] == HAZARDS_PER_PARTICIPANT


def test_many_claims_leave_nothing_behind(queue):
    # tianshou#225, flashbax#6: what was delivered must not pile up
    engine = queue(capacity=64, rollout_length=4)
    writer, consumer = engine.writer("replay"), engine.consumer("replay")
    for number in range(0, 4000, 4):
        steps(writer, number, 4)
        with consumer.next(timeout=0) as claim:
            assert ticks(claim)[0] == number
    assert slots_in_use(engine._views["replay"]) == 1
    del claim
    view = engine._views["replay"]
    writer.close()
    assert np.isin(kinds(view), (w.FREE, w.SEALED)).all()


# -- rollouts


def test_a_rollout_is_claimed_when_its_last_tick_is_there_and_not_before(queue):
    engine = queue(rollout_length=3, num_envs=2)
    writer, consumer = (
        engine.writer("replay", num_envs=2, autoreset="next_step"),
        engine.consumer("replay", format="numpy"),
    )
    for number in range(6):
        assert writer.ticks_left == 3 - number % 3
        steps(writer, number, 1)
        claim = consumer.poll()
        assert (claim is not None) == (number % 3 == 2)
        if claim is not None:
            claim.ack()
    steps(writer, 6, 1)
    with pytest.raises(DataTimeout, match="0 rows wait to be claimed, 2 in unfinished rollouts; none is claimed"):
        consumer.next(timeout=0.05)


@pytest.mark.parametrize("partial", ["deliver", "drop"])
def test_an_unfinished_rollout_of_a_writer_that_closes_is_delivered_or_dropped(queue, partial):
    engine = queue(rollout_length=3)
    writer = engine.writer("replay")
    steps(writer, 0, 4)
    writer.close()
    steps(engine.writer("replay"), 10, 3)
    consumer = engine.consumer("replay", format="numpy", partial=partial)
    found = []
    while (claim := consumer.poll()) is not None:
        found.append((ticks(claim), claim.complete))
        claim.ack()
    assert found == [([0, 1, 2], True), *([([3], False)] if partial == "deliver" else []), ([10, 11, 12], True)]
    assert consumer.stats.dropped == (partial == "drop")


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_bootstrap_is_kept_as_it_lies_behind_a_rollout_and_ends_no_episode(queue, path, autoreset):
    engine = queue(rollout_length=3, num_envs=2)
    writer = engine.writer("replay", num_envs=2, autoreset=autoreset)
    for rollout in range(2):
        steps(writer, 3 * rollout, 2)
        assert writer.ticks_left == 1
        behind = np.stack([observation(3 * rollout + 3), observation(3 * rollout + 1003)])
        steps(writer, 3 * rollout + 2, 1, bootstrap=behind)
    consumer = engine.consumer("replay", format="numpy")
    for rollout in range(2):
        claim = consumer.next()
        assert claim.complete
        assert claim.bootstrap["obs"].shape == (2, 4)
        assert claim.bootstrap["obs"][:, 0].tolist() == [3 * rollout + 3, 3 * rollout + 1003]
        assert claim.steps[:, 0].tolist() == [3 * rollout, 3 * rollout + 1, 3 * rollout + 2]
        assert len(claim.finals[0]) == 0


def test_a_final_observation_and_the_first_of_the_next_episode_are_kept_side_by_side(queue):
    engine = queue(rollout_length=2, num_envs=2)
    writer = engine.writer("replay", num_envs=2, autoreset="same_step")
    steps(writer, 0, 1)
    steps(writer, 1, 1, truncated=np.array([False, True]), final=observation(77, 2), bootstrap=observation(5, 2))
    claim = engine.consumer("replay", format="numpy").next()
    places, finals = claim.finals
    assert places.tolist() == [[1, 1]]
    assert finals["obs"].tolist() == [[77.0] * 4]
    assert (claim.bootstrap["obs"] == 5).all()


def test_a_slab_is_one_rollout_with_what_follows_it(queue):
    engine = queue(rollout_length=4, num_envs=2)
    writer = engine.writer("replay", num_envs=2, autoreset="same_step")
    consumer = engine.consumer("replay", format="numpy")
    for rollout in range(3):
        with writer.rollout(4) as slab:
            slab.obs[:] = np.arange(4)[:, None, None] + 10 * rollout
            slab.action = np.full((4, 2), rollout)
            slab.reward[:] = 0
            slab.truncated[1, 0] = True
            slab.set_final(1, 0, observation(9))
            slab.bootstrap(observation(rollout, 2))
            with pytest.raises(FieldError, match="behind a rollout once"):
                slab.bootstrap(observation(rollout, 2))
        claim = consumer.next(timeout=0)
        assert claim.complete
        assert claim["obs"][:, 0, 0].tolist() == [10 * rollout + n for n in range(4)]
        assert (claim.bootstrap["obs"] == rollout).all()
        assert claim.finals[0].tolist() == [[1, 0]]
        claim.ack()


def test_rollouts_may_be_put_together_of_slabs_and_ticks(queue):
    engine = queue(rollout_length=6)
    writer = engine.writer("replay", autoreset="next_step")
    steps(writer, 0, 2)
    with writer.rollout(2) as slab:
        slab.obs[:], slab.action[:], slab.reward[:] = 0, [2, 3], 0
    steps(writer, 4, 2)
    claim = engine.consumer("replay", format="numpy").next(timeout=0)
    assert ticks(claim) == list(range(6))
    assert claim.complete


def test_an_early_bootstrap_ends_the_rollout_there(queue):
    engine = queue(rollout_length=5)
    writer = engine.writer("replay")
    steps(writer, 0, 1)
    steps(writer, 1, 1, bootstrap=observation(2))
    assert writer.ticks_left == 5
    claim = engine.consumer("replay", format="numpy").next(timeout=0)
    assert ticks(claim) == [0, 1]
    assert not claim.complete
    assert (claim.bootstrap["obs"] == 2).all()


def test_a_rollout_whose_page_has_no_room_for_more_finals_ends_early_with_a_bootstrap(queue):
    engine = queue(rollout_length=40)
    writer = engine.writer("replay")
    number, got = 0, []
    consumer = engine.consumer("replay", format="numpy")
    while len(got) < 4:
        last = writer.ticks_left == 1
        end = {"terminated": True, "final": observation(-number)}
        steps(writer, number, 1, **end, bootstrap=observation(number + 1) if last else None)
        number += 1
        claim = consumer.poll()
        if claim is not None:
            got += [(claim.ticks, claim.complete, claim.bootstrap["obs"][0, 0])]
            assert len(claim.finals[0]) == claim.ticks
            claim.ack()
    assert all(count < 40 and not complete for count, complete, _ in got)
    assert [behind for _, _, behind in got] == np.cumsum([count for count, _, _ in got]).tolist()


def test_a_bootstrap_of_a_tick_that_was_refused_belongs_to_no_other(queue):
    engine = queue(rollout_length=2)
    writer = engine.writer("replay")
    steps(writer, 0, 1)
    with pytest.raises(FieldError, match="final observation"):
        steps(writer, 1, 1, terminated=True, bootstrap=observation(9))
    with writer.rollout(1) as slab:
        slab.bootstrap(observation(9))
        slab.abort()
    steps(writer, 1, 1)
    claim = engine.consumer("replay").next(timeout=0)
    assert claim.complete
    assert claim.bootstrap is None


def test_committed_rows_are_the_only_ones_a_bootstrap_counts_for(queue):
    # as if the writer had been killed between keeping the observations and committing the tick before them
    engine = queue(rollout_length=2)
    writer = engine.writer("replay")
    steps(writer, 0, 1)
    writer._stream.here()
    writer._stream.keep_bootstrap(1, writer._stream.checked_bootstrap(observation(9)))
    writer.close()
    claim = engine.consumer("replay").next(timeout=0)
    assert claim.ticks == 1
    assert claim.bootstrap is None


def test_the_unchecked_handle_writes_rollouts(queue):
    engine = queue(rollout_length=4, capacity=40)
    view = engine._views["replay"]
    consumer = engine.consumer("replay", format="numpy")
    with engine.writer("replay", autoreset="next_step").unchecked() as unchecked:
        row = unchecked.row
        for number in range(60):
            unchecked.obs[row], unchecked.action[row], unchecked.reward[row] = 0, number, 0.0
            row = unchecked.commit()
            if number % 4 == 3:
                with consumer.next(timeout=0) as claim:
                    assert ticks(claim) == list(range(number - 3, number + 1))
                del claim
    assert view.rows_written() == 60


def test_statistics_count_every_row_of_a_queue_once(make):
    engine = make(CARTPOLE, 100, kind="queue", rollout_length=4, statistics=("reward",))
    writer = engine.writer("replay", statistics=True)
    consumer = engine.consumer("replay")
    for number in range(40):
        last = observation(0) if number % 8 == 5 else None
        steps(writer, number, 1, bootstrap=last)
        claim = consumer.poll()
        if claim is not None:
            claim.ack()
        del claim
    writer.close()
    moments = engine.table("replay").statistics.read("reward")
    assert moments.count == 40
    assert moments.mean == pytest.approx(np.arange(40).mean())


def test_rows_held_back_by_an_ingestion_policy_are_claimed_once_they_are_published(queue):
    engine = queue()
    writer = engine.writer("replay", ingestion=conduit.CommitEvery(4))
    consumer = engine.consumer("replay", format="numpy")
    steps(writer, 0, 3)
    assert consumer.poll() is None
    steps(writer, 3, 1)
    assert ticks(consumer.next()) == [0, 1, 2, 3]


# -- advantages


def values_of(batch):
    return batch | {"value": 0.5 * batch["reward"], "next_value": 0.25 * batch["bootstrap_obs"][..., 0]}


def test_advantages_of_a_claim_are_those_of_a_batch_of_one_rollout(queue):
    engine = queue(rollout_length=6, num_envs=2)
    writer = engine.writer("replay", num_envs=2, autoreset="same_step")
    for number in range(6):
        end = {"terminated": np.array([False, number == 3]), "final": observation(1, 2)} if number == 3 else {}
        steps(writer, number, 1, **end, bootstrap=observation(8, 2) if number == 5 else None)
    gae = conduit.gae(0.9, 0.8, bootstrap="next_value")
    for kind in ("torch", "numpy"):
        consumer = engine.consumer(
            "replay", format=kind, batch_transforms=(conduit.apply(values_of), gae, conduit.normalize_advantages())
        )
        claim = consumer.next()
        batch = claim.batch()
        assert batch["obs"].shape == (1, 6, 2, 4)
        reward = batch["reward"]
        by_hand = conduit.gae(0.9, 0.8)(batch, values=0.5 * reward, bootstrap=0.25 * batch["bootstrap_obs"][..., 0])
        expected = np.asarray(by_hand["advantages"][0], np.float64)
        expected = (expected - expected.mean()) / (expected.std() + 1e-8)
        assert claim["advantages"].shape == (6, 2)
        np.testing.assert_allclose(np.asarray(claim["advantages"]), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(claim["returns"]), np.asarray(by_hand["returns"][0]))
        assert type(claim["advantages"]) is (torch.Tensor if kind == "torch" else np.ndarray)
        assert {"advantages", "returns", "advantage_mask", "value"} <= set(claim)
        claim.give_back()


def test_a_step_that_lacks_its_inputs_claims_nothing(queue):
    engine = queue(rollout_length=1)
    steps(engine.writer("replay"), 0, 1)
    with pytest.raises(ConfigError, match=r"Expected \['value'\] in the batch"):
        engine.consumer("replay", batch_transforms=[conduit.gae()])
    assert ticks(engine.consumer("replay").next()) == [0]


# -- what is refused


def test_tables_are_told_apart(make):
    queue, replay = make(kind="queue"), make()
    with pytest.raises(
        ConfigError, match=r"is a queue, whose rows are delivered once: use client\.consumer\('replay'\)"
    ):
        queue.loader("replay", batch_size=4)
    with pytest.raises(ConfigError, match=r"one of kind='replay': use client\.loader\('replay', batch_size=\.\.\.\)"):
        replay.consumer("replay")
    with pytest.raises(ConfigError, match=r"Expected table 'replay' to have rollouts"):
        _ = queue.writer("replay").ticks_left
    with pytest.raises(FieldError):
        steps(queue.writer("replay"), 0, 1, bootstrap=observation(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "jax"}, "format 'torch' or 'numpy', got 'jax'"),
        ({"partial": "keep"}, "partial 'deliver' or 'drop', got 'keep'"),
        ({"partial": "drop"}, "has no rollouts that could be unfinished"),
        ({"timeout": -1}, "at least 0"),
        ({"batch_transforms": 3}, "got int - at batch_transforms"),
    ],
)
def test_wrong_options_of_a_consumer_are_named(queue, options, message):
    with pytest.raises(ConfigError, match=message):
        queue().consumer("replay", **options)


def test_wrong_claims_are_refused(queue):
    with pytest.raises(ConfigError, match="no max_ticks for rollouts, which come in one piece, got 3"):
        queue(rollout_length=3).consumer("replay").poll(max_ticks=3)
    with pytest.raises(ConfigError, match="max_ticks of at least 1, got 0"):
        queue().consumer("replay").poll(max_ticks=0)


def test_wrong_rollouts_are_refused(queue, unchanged):
    engine = queue(rollout_length=3, num_envs=2)
    writer = engine.writer("replay", num_envs=2, autoreset="next_step")
    with pytest.raises(ConfigError, match="at most the 3 ticks of the queue's rollouts, got 4"):
        writer.rollout(4)
    steps(writer, 0, 1)
    with unchanged(engine):
        with pytest.raises(FieldError, match=r"Expected shape \(2, 4\), got \(4,\) - at `bootstrap.obs`"):
            steps(writer, 1, 1, bootstrap=observation(1))
        with pytest.raises(FieldError):
            steps(writer, 1, 1, bootstrap={"obs": observation(1, 2), "more": 1})
    with pytest.raises(conduit.errors.CapacityError, match="Expected pages of at least"):
        engine.writer("replay", num_envs=64, autoreset="next_step")


def test_a_table_without_observations_has_nothing_to_bootstrap_from(make):
    engine = make(conduit.Schema([conduit.Field("x", "float32")]), 100, kind="queue", rollout_length=2)
    writer = engine.writer("replay")
    with pytest.raises(FieldError, match="Expected no bootstrap"):
        writer.append(x=1.0, bootstrap={})
    writer.append(x=1.0)


def test_a_full_queue_refuses_and_takes_the_same_step_later(queue):
    engine = queue(rollout_length=2, capacity=4)
    writer = engine.writer("replay", timeout=0.0)
    consumer = engine.consumer("replay", format="numpy")
    number = 2 * engine._views["replay"].layout.pages
    steps(writer, 0, number)
    with pytest.raises(SpaceTimeout):
        steps(writer, number, 1)
    for expected in range(0, 4 * number, 2):
        with consumer.next(timeout=0) as claim:
            assert ticks(claim) == [expected, expected + 1]
        del claim
        steps(writer, number, 2)
        number += 2


def test_writers_that_pause_after_a_whole_rollout_keep_no_page_from_others(queue):
    # reverb#64, acme#207: nobody may wait for somebody who has nothing to do
    engine = queue(rollout_length=2, capacity=4)
    pages = engine._views["replay"].layout.pages
    consumer = engine.consumer("replay", format="numpy")
    idle = [engine.writer("replay") for _ in range(pages)]
    for writer in idle:
        steps(writer, 0, 2)
    for _ in idle:
        consumer.next(timeout=0).ack()
    late = engine.writer("replay", timeout=0.0)
    for number in range(0, 4 * pages, 2):
        steps(late, number, 2)
        consumer.next(timeout=0).ack()
    for writer in idle:
        steps(writer, 2, 2)


def test_a_closed_engine_ends_consumers(queue):
    engine = queue()
    steps(engine.writer("replay"), 0, 2)
    client = conduit.attach(engine.name)
    consumer = client.consumer("replay", format="numpy")
    claim = consumer.next()
    kept = claim["action"]
    engine.close()
    with pytest.raises(Closed):
        consumer.next()
    with pytest.raises(Closed):
        claim.ack()
    client.close()
    assert kept[:, 0].tolist() == [0, 1]
