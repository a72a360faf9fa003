"""What a page holds: its halo, kept final observations, cuts, and which page each row is drawn from."""

import numpy as np
import pytest

import conduit
from conduit import Field, Schema
from conduit.errors import Busy, CapacityError
from conduit.store.format import words
from tests.plane.conftest import CARTPOLE

SCHEMA = Schema(
    [
        Field("obs", "int64", observation=True),
        Field("pixels", "uint8", (129,), observation=True),
        Field("reward", "float32"),
    ]
)


def values(k):
    k = np.asarray(k)
    return {
        "obs": k.astype(np.int64)[()],
        "pixels": ((k[..., None] + np.arange(129)) % 256).astype(np.uint8),
        "reward": (k / 2).astype(np.float32)[()],
    }


def observation(k):
    return {name: value for name, value in values(k).items() if name != "reward"}


def words_of(engine, page):
    """One page's words by name."""
    row = engine._views["replay"].pages()[page]
    names = ("COMMITTED", "FIRST", "ENDED", "TICK", "HALO", "TAIL", "PREVIOUS", "PREVIOUS_GENERATION", "ENVS")
    return {name: int(row[getattr(words, f"PAGE_{name}") // 8]) for name in names}


def rows_of(engine, page, start, stop):
    view = engine._views["replay"]
    base = page * view.layout.page_rows
    return {name: column[base + start : base + stop].copy() for name, column in view.columns.items()} | {
        "meta": view.meta[base + start : base + stop].copy(),
        "terminated": view.terminated[base + start : base + stop].copy(),
        "truncated": view.truncated[base + start : base + stop].copy(),
    }


def drawn(engine, count=400):
    """Every (obs, next obs, page) that is sampled."""
    rows = engine._views["replay"].layout.page_rows
    with engine.loader("replay", batch_size=count, min_rows=1, format="numpy", timeout=0) as loader:
        batch = loader.next()
        pages = (batch.ids & ((1 << 40) - 1)) // rows
        np.testing.assert_array_equal(batch["pixels"], values(batch["obs"])["pixels"])
        np.testing.assert_array_equal(batch["next_pixels"], values(batch["next_obs"])["pixels"])
        return set(zip(batch["obs"].tolist(), batch["next_obs"].tolist(), pages.tolist(), strict=True))


@pytest.mark.parametrize(("max_stack", "max_n_step"), [(1, 1), (4, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("num_envs", [None, 2])
def test_a_page_begins_with_a_copy_of_the_last_ticks_of_the_page_before(make, max_stack, max_n_step, num_envs):
    engine = make(SCHEMA, capacity=200, page_rows=40, max_stack=max_stack, max_n_step=max_n_step)
    writer = engine.writer("replay", num_envs=num_envs, autoreset="next_step")
    envs = num_envs or 1
    lead = () if num_envs is None else (num_envs,)
    ticks = 40 // envs + 3
    for t in range(ticks):
        writer.append(**values(t * envs + np.arange(envs).reshape(lead)))
    halo = (max_stack - 1 + max_n_step) * envs
    first, second = words_of(engine, 0), words_of(engine, 1)
    assert first == {
        "COMMITTED": 40,
        "FIRST": 0,
        "ENDED": 0,
        "TICK": 0,
        "HALO": 0,
        "TAIL": 0,
        "PREVIOUS": 0,
        "PREVIOUS_GENERATION": 0,
        "ENVS": envs,
    }
    assert second == first | {
        "COMMITTED": halo + 3 * envs,
        "FIRST": (max_stack - 1) * envs,
        "TICK": (40 - halo) // envs,
        "HALO": halo,
        "PREVIOUS": 1,
        "PREVIOUS_GENERATION": 1,
    }
    old, copied = rows_of(engine, 0, 40 - halo, 40), rows_of(engine, 1, 0, halo)
    for name, column in old.items():
        assert copied[name].tobytes() == column.tobytes(), name
    # each row is drawn from one page: the last n ticks of the old one have moved over; the newest has no successor yet
    split = 40 - max_n_step * envs
    last = (ticks - 1) * envs
    assert drawn(engine) == {(k, k + envs, 0 if k < split else 1) for k in range(last)}
    writer.close()
    assert drawn(engine) == {(k, k + envs, 0 if k < split else 1) for k in range((ticks - 1) * envs)}


@pytest.mark.parametrize("num_envs", [None, 2])
def test_kept_final_observations_lie_at_the_end_and_are_copied_and_relinked_with_the_halo(make, num_envs):
    engine = make(SCHEMA, capacity=160, page_rows=32, max_stack=3, max_n_step=1)
    writer = engine.writer("replay", num_envs=num_envs, autoreset="same_step")
    envs = num_envs or 1
    lead = () if num_envs is None else (num_envs,)
    committed = tail = ticks = 0
    while committed + tail + 2 * envs <= 32:
        ended = ticks % 2 == 1
        serial = ticks * envs + np.arange(envs).reshape(lead)
        final = observation(serial + 1000) if ended else None
        writer.append(**values(serial), truncated=np.full(lead, ended)[()], final=final)
        committed, tail, ticks = committed + envs, tail + ended * envs, ticks + 1
    old = words_of(engine, 0)
    assert (old["COMMITTED"], old["TAIL"] & words.TAIL_MASK) == (committed, tail)
    assert old["TAIL"] >> words.COMPLETE_SHIFT == ticks // 2 * 2 * envs  # behind the newest row that ended
    kept = rows_of(engine, 0, 32 - tail, 32)
    ends = [t * envs + e + 1000 for t in range(1, ticks, 2) for e in range(envs)]
    assert kept["obs"].tolist() == ends[::-1]
    assert (kept["meta"]["link"] == words.FINAL).all()
    writer.append(**values(ticks * envs + np.arange(envs).reshape(lead)))
    new = words_of(engine, 1)
    in_halo = sum((ticks - 1 - k) % 2 == 1 for k in range(3)) * envs
    assert (new["HALO"], new["TAIL"] & words.TAIL_MASK) == (3 * envs, in_halo)
    assert sorted(rows_of(engine, 1, 32 - in_halo, 32)["obs"].tolist()) == ends[-in_halo:]
    halo = rows_of(engine, 1, 0, 3 * envs)
    for local, link in enumerate(halo["meta"]["link"].tolist()):
        if link & words.KEPT:
            after = rows_of(engine, 1, local + (link >> words.LINK_SHIFT), 32)["obs"][0]
            assert after == halo["obs"][local] + 1000
    writer.close()
    split = committed - envs
    assert drawn(engine, 2000) == {
        (t * envs + e, t * envs + e + (1000 if t % 2 else envs), 0 if t * envs + e < split else 1)
        for t in range(ticks)
        for e in range(envs)
    }


def test_every_row_of_the_halo_may_have_its_final_observation_beside_it(make):
    """The smallest pages that a writer is let into have room for that; one row less is refused."""
    for max_stack, max_n_step, envs in [(1, 1, 1), (3, 3, 1), (2, 1, 3), (4, 4, 2)]:
        halo = max_stack - 1 + max_n_step
        need = (2 * halo + 2) * envs
        engine = make(SCHEMA, capacity=4 * need, page_rows=need, max_stack=max_stack, max_n_step=max_n_step)
        writer = engine.writer("replay", num_envs=envs, autoreset="same_step")
        for t in range(40):
            serial = t * envs + np.arange(envs)
            writer.append(**values(serial), terminated=np.ones(envs, bool), final=observation(serial + 1000))
        found = drawn(engine, 1000)
        assert found
        assert {after - k for k, after, _ in found} == {1000}
        small = make(SCHEMA, capacity=4 * need, page_rows=need - 1, max_stack=max_stack, max_n_step=max_n_step)
        with pytest.raises(CapacityError, match=rf"pages of at least {need} rows for {envs} environments.*page_rows="):
            small.writer("replay", num_envs=envs, autoreset="same_step")


def test_a_writer_without_kept_final_observations_needs_smaller_pages(make):
    engine = make(SCHEMA, capacity=80, page_rows=12, max_stack=1, max_n_step=1)
    with pytest.raises(CapacityError, match="at least 16 rows for 4 environments"):
        engine.writer("replay", num_envs=4, autoreset="disabled")
    writer = engine.writer("replay", num_envs=4, autoreset="next_step")
    for t in range(20):
        writer.append(**values(4 * t + np.arange(4)))
    found = drawn(engine, 1000)
    assert {after - k for k, after, _ in found} == {4}
    with pytest.raises(CapacityError, match=r"at least 15 rows for 5 environments.*got 12.*num_envs=5"):
        engine.writer("replay", num_envs=5, autoreset="next_step")


def test_a_table_made_for_a_number_of_environments_lets_such_writers_in(make):
    for num_envs in (1, 7, 64):
        for capacity in (1, 100, 5000, "1 MiB"):
            if capacity == "1 MiB" or num_envs < 64 or capacity != 1:
                engine = make(SCHEMA, capacity=capacity, num_envs=num_envs, max_n_step=3)
                engine.writer("replay", num_envs=num_envs, autoreset="same_step").close()


def test_a_cut_ends_every_episode_without_a_next_observation(make):
    engine = make(SCHEMA)
    writer = engine.writer("replay", num_envs=2, autoreset="next_step")
    for t in range(4):
        writer.append(**values(2 * t + np.arange(2)))
    writer.cut()
    for t in range(4, 7):
        writer.append(**values(2 * t + np.arange(2)))
    writer.close()
    assert {(k, after) for k, after, _ in drawn(engine)} == {(k, k + 2) for k in range(12) if k not in (6, 7)}
    meta = engine._views["replay"].meta[:14]
    assert meta["episode"].tolist() == [0, 1] * 4 + [2, 3] * 3
    assert meta["step"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2]
    first = (meta["link"] & words.FIRST) != 0
    assert np.flatnonzero(first).tolist() == [0, 1, 8, 9]


def test_a_cut_in_the_row_after_an_end_takes_the_final_observation_away(make):
    engine = make(SCHEMA)
    writer = engine.writer("replay", autoreset="next_step")
    writer.append(**values(0), truncated=True)
    writer.cut()
    for k in range(1, 4):
        writer.append(**values(k))
    writer.close()
    assert {(k, after) for k, after, _ in drawn(engine)} == {(1, 2), (2, 3)}


def test_short_pages_hand_their_rows_on_to_the_page_after(make):
    """A rollout that does not fit turns the page early, even when the old page has fewer ticks than a halo."""
    engine = make(SCHEMA, capacity=120, page_rows=20, max_stack=3, max_n_step=3)
    writer = engine.writer("replay", autoreset="next_step")
    k = 0
    for ticks in (1, 1, 15, 13, 14, 2, 15):
        with writer.rollout(ticks) as rollout:
            for name, value in values(k + np.arange(ticks)).items():
                rollout[name] = value
        k += ticks
    pages = [words_of(engine, page) for page in range(5)]
    assert [page["HALO"] for page in pages] == [0, 5, 5, 5, 5]
    assert [page["COMMITTED"] for page in pages] == [17, 18, 19, 7, 20]
    assert [page["FIRST"] for page in pages] == [0, 2, 2, 2, 2]
    writer.close()
    found = drawn(engine, 2000)
    assert {(a, b) for a, b, _ in found} == {(a, a + 1) for a in range(k - 1)}
    assert len(found) == k - 1


def test_a_page_with_less_than_a_halo_hands_all_its_rows_on(make):
    engine = make(SCHEMA, capacity=120, page_rows=20, max_stack=3, max_n_step=3)
    writer = engine.writer("replay", autoreset="next_step")
    for start, ticks in ((0, 1), (1, 15), (16, 5)):
        if start == 1:
            writer._stream._turn()  # early, as before a rollout that needs more room than this page has left
        with writer.rollout(ticks) as rollout:
            for name, value in values(start + np.arange(ticks)).items():
                rollout[name] = value
    assert [words_of(engine, page)["HALO"] for page in range(3)] == [0, 1, 5]
    assert [words_of(engine, page)["FIRST"] for page in range(3)] == [0, 0, 2]
    writer.close()
    found = drawn(engine, 1000)
    assert {(a, b) for a, b, _ in found} == {(a, a + 1) for a in range(20)}
    assert {page for a, _, page in found if a < 13} == {1}


def test_a_writer_that_wrote_nothing_gives_its_page_back(make):
    engine = make()
    writer = engine.writer("replay")
    with pytest.raises(KeyError), writer.step():
        raise KeyError
    pages = engine._views["replay"].pages()
    assert pages[0, 0] & words.KIND_MASK == words.OPEN
    writer.close()
    pages = engine._views["replay"].pages()
    assert (pages[:, 0] & words.KIND_MASK == words.FREE).all()


def test_the_oldest_page_goes_first_and_a_leased_one_stays(make):
    engine = make(CARTPOLE, capacity=20, page_rows=10)
    view = engine._views["replay"]
    writer = engine.writer("replay")

    def fill(rows):
        for _ in range(rows):
            writer.append(obs=np.zeros(4, np.float32), action=0, reward=0.0)

    fill(31)  # pages 0 to 2 are full (the first holds 9 rows and room for its ends), page 3 has begun
    assert [words_of(engine, page)["HALO"] for page in range(4)] == [0, 1, 1, 1]
    with view.lease(0) as lease:
        generations = view.pages()[:, 0] >> words.GENERATION_SHIFT
        assert generations.tolist() == [1, 1, 1, 1]
        fill(10)
        assert (view.pages()[:, 0] >> words.GENERATION_SHIFT).tolist() == [1, 2, 1, 1]
        assert (lease.generation, lease.rows) == (1, 9)
    fill(8)
    assert (view.pages()[:, 0] >> words.GENERATION_SHIFT).tolist() == [2, 2, 1, 1]
    assert view.rows_evicted == 9 + 8
    assert engine.loader("replay", batch_size=1, min_rows=1).next()


def test_a_lease_holds_the_page_of_its_own_table_only(engine_name):
    """Hazards name pages among those of all tables."""
    tables = {name: conduit.Table(CARTPOLE, 20, page_rows=10) for name in ("first", "second")}
    row = {"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0}
    with conduit.Engine.create(engine_name, tables) as engine:
        writers = [engine.writer(name, on_full="raise") for name in tables]
        for writer in writers:
            for _ in range(40):
                writer.append(**row)
        leases = [engine._views["second"].lease(page) for page in range(4)]
        for _ in range(100):
            writers[0].append(**row)
        with pytest.raises(Busy):  # noqa: PT012 - some row of the page
            for _ in range(10):
                writers[1].append(**row)
        view = engine._views["second"]
        before = view.pages()[:, 0] >> words.GENERATION_SHIFT
        leases[2].end()
        writers[1].append(**row)
        raised = (view.pages()[:, 0] >> words.GENERATION_SHIFT) - before
        assert raised.tolist() == [0, 0, 1, 0]
        for lease in leases:
            lease.end()
