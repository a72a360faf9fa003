"""Uniform sampling: every complete transition equally likely, a function of the seed, and the same rule as the reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conduit
from conduit import Field, Schema
from conduit.sampling import uniform
from conduit.sampling.uniform import UNIFORM_SNAPSHOT, Uniform

SCHEMA = Schema([Field("obs", "int64", observation=True), Field("x", "float32")])


def chi_square(counts):
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def bound(degrees):
    """Far above the 99.99 % quantile of chi-square; the seeds are fixed, so this is passed for good or failed for good."""
    return degrees + 5 * np.sqrt(2 * degrees) + 5


@pytest.fixture
def table(engine_name):
    """A table of five writers of all kinds, with ends, cuts and open pages; and every transition that is complete."""
    tables = {"t": conduit.Table(SCHEMA, 700, page_rows=40, max_stack=2, max_n_step=2)}
    with conduit.Engine.create(engine_name, tables) as engine:
        rng = np.random.default_rng(0)
        complete, writers = {}, []
        for serial, (envs, autoreset, keep, ticks, close) in enumerate(
            [
                (1, "next_step", True, 100, True),
                (3, "next_step", True, 31, False),
                (2, "same_step", True, 43, False),
                (1, "disabled", False, 90, True),
                (4, "next_step", True, 5, False),
            ]
        ):
            writer = engine.writer("t", num_envs=envs, autoreset=autoreset, keep_final=keep)
            writers.append(writer)  # one that is dropped is closed
            first = 1000 * serial
            dead = np.zeros(envs, bool)
            for tick in range(ticks):
                obs = first + tick * envs + np.arange(envs)
                ended = (rng.random(envs) < 0.2) & ~dead
                terminated = rng.random(envs) < 0.5
                final = obs + 100_000 if autoreset == "same_step" else None
                writer.append(
                    obs=obs,
                    x=np.zeros(envs, np.float32),
                    terminated=ended & terminated,
                    truncated=ended & ~terminated,
                    final=final,
                )
                last = tick == ticks - 1
                for env in range(envs):
                    key = int(obs[env])
                    if dead[env]:  # a closing row
                        dead[env] = False
                    elif autoreset == "next_step":
                        dead[env] = ended[env]
                        if not last:
                            complete[key] = key + envs
                    elif ended[env]:
                        if autoreset == "same_step" and not (last and not close):
                            complete[key] = key + 100_000
                        elif autoreset == "disabled" and terminated[env]:
                            complete[key] = key
                    elif not last:
                        complete[key] = key + envs
            if close:
                writer.close()
        yield engine, complete


def test_every_complete_transition_is_drawn_equally_often_and_nothing_else(table):
    engine, complete = table
    loader = engine.loader("t", batch_size=10_000, min_rows=1, format="numpy", seed=12, fields=["obs", "next_obs"])
    counts = dict.fromkeys(complete, 0)
    for _ in range(10):
        batch = loader.next()
        for obs, following in zip(batch["obs"].tolist(), batch["next_obs"].tolist(), strict=True):
            assert complete[obs] == following
            counts[obs] += 1
    assert len(counts) > 250
    found = np.array(list(counts.values()))
    assert chi_square(found) < bound(len(found) - 1)
    assert found.min() > 0


def test_slots_and_batches_are_independent(table):
    engine, complete = table
    loader = engine.loader("t", batch_size=2, min_rows=1, format="numpy", seed=5, fields=["obs"])
    pairs = np.array([loader.next()["obs"].copy() for _ in range(20_000)])
    _, ranks = np.unique(pairs, return_inverse=True)
    ranks = ranks.reshape(pairs.shape) * 8 // len(complete)
    for first, second in ((ranks[:, 0], ranks[:, 1]), (ranks[:-1, 1], ranks[1:, 0])):
        joint = np.zeros((8, 8))
        np.add.at(joint, (first, second), 1)
        expected = joint.sum(1)[:, None] * joint.sum(0)[None] / joint.sum()
        assert ((joint - expected) ** 2 / expected).sum() < bound(49)


def test_the_draw_of_a_slot_does_not_depend_on_how_many_there_are_or_on_the_blocks_they_are_drawn_in(table):
    engine, _ = table
    sequences = {}
    for size in (1, 2, 7, 16, 100, 3000):
        loader = engine.loader("t", batch_size=size, min_rows=1, format="numpy", seed=77, fields=["obs"])
        for _ in range(3):
            for slot, obs in enumerate(loader.next()["obs"].tolist()):
                key = (loader.sampler.batch, slot)
                assert sequences.setdefault(key, obs) == obs
    small, large = (
        engine.loader("t", batch_size=64, min_rows=1, format="numpy", seed=1, fields=["obs"]) for _ in range(2)
    )
    for buffer in small._ring.buffers:
        buffer.job.words[2] = 1  # one slot per block
    for _ in range(5):
        np.testing.assert_array_equal(small.next()["obs"], large.next()["obs"])


def test_new_rows_change_the_draws_of_no_earlier_batch(table):
    engine, _ = table
    first, second = (engine.loader("t", batch_size=32, min_rows=1, format="numpy", seed=4) for _ in range(2))
    before = [first.next()["obs"].tolist() for _ in range(3)]
    assert [second.next()["obs"].tolist() for _ in range(2)] == before[:2]
    with engine.writer("t") as writer:
        for k in range(30):
            writer.append(obs=5000 + k, x=0.0)
    assert second.next()["obs"].tolist() != before[2]


def test_the_number_of_candidates_and_the_least_of_them(table):
    engine, complete = table
    loader = engine.loader("t", batch_size=8, min_rows=1)
    loader.next()
    candidates = loader.sampler.candidates
    assert candidates >= len(complete)
    engine.loader("t", batch_size=8, min_rows=candidates, timeout=0).next()
    with pytest.raises(conduit.errors.DataTimeout, match=f"at least {candidates + 1} .* got {candidates}"):
        engine.loader("t", batch_size=8, min_rows=candidates + 1, timeout=0).next()


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60), data=st.data())
def test_every_position_is_found_in_its_range_however_uneven_the_ranges_are(sizes, data):
    sampler = Uniform(0, len(sizes))
    ends = np.cumsum(sizes)
    sampler._snapshot[0, 0] = 0
    sampler._snapshot[1 : len(ends) + 1, 0] = ends
    entries = int(sampler._state[UNIFORM_SNAPSHOT // 8])
    total = int(ends[-1])
    for position in {0, total - 1, data.draw(st.integers(0, total - 1)), *(ends[:-1] % total), *(ends[:-1] - 1)}:
        wanted = int(np.searchsorted(ends, position, side="right"))
        for guess in {
            0,
            len(sizes) - 1,
            wanted,
            int(position * len(sizes) / total),
            data.draw(st.integers(0, len(sizes))),
        }:
            found = uniform.locate(entries, len(sizes), guess, int(position))
            assert (found - entries) // sampler._snapshot.strides[0] == wanted


def test_seeds_are_taken_modulo_two_to_the_64():
    for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**70)):
        assert np.uint64(seed % 2**64) == Uniform(seed, 1)._state[:1].view(np.uint64)[0]
