"""Rows that go before their page is reused: deleted, reset with their table, delivered as often as they may be; frozen tables."""

import threading

import numpy as np
import pytest

import conduit
from conduit.errors import DataTimeout, FieldError, Frozen
from conduit.testing.puppets import Puppet, attach

PRIORITIES = conduit.Priorities(alpha=1.0)


def put(writer, numbers, envs=None):
    for number in numbers:
        if envs is None:
            writer.append(obs=np.full(4, number, np.float32), action=number, reward=1.0)
        else:
            actions = number * 1000 + np.arange(envs)
            obs = np.repeat(actions[:, None], 4, 1).astype(np.float32)
            writer.append(obs=obs, action=actions, reward=np.ones(envs, np.float32))


def drawn(loader, batches=30):
    found = set()
    for _ in range(batches):
        batch = loader.next(timeout=5.0)
        assert (batch["obs"][:, 0] == batch["action"]).all()
        found |= set(batch["action"].tolist())
    return found


def ids_of(loader, batches=30):
    found = {}
    for _ in range(batches):
        batch = loader.next(timeout=5.0)
        found |= dict(zip(batch["action"].tolist(), batch.ids.tolist(), strict=True))
    return found


# -- delete


@pytest.mark.parametrize("prioritized", [False, True])
def test_deleted_rows_are_not_drawn_again_and_others_are(make, prioritized):
    engine = make(capacity=400, page_rows=32, priorities=PRIORITIES if prioritized else None)
    put(writer := engine.writer("replay"), range(100))
    sampling = conduit.Prioritized() if prioritized else None
    loader = engine.loader("replay", batch_size=64, format="numpy", sampling=sampling)
    ids = ids_of(loader)
    assert sorted(ids) == list(range(99))
    gone = {3, 4, 50, 63, 98, *range(70, 80)}
    assert engine.table("replay").delete([ids[number] for number in gone]) == len(gone)
    assert engine.table("replay").delete(np.array([[ids[3], ids[4]]])) == 0
    assert drawn(loader) == set(range(99)) - gone
    assert loader.valid([ids[3], ids[5]]).tolist() == [False, True]
    view = engine._views["replay"]
    assert (view.counts().size, view.counts().deleted, view.rows_evicted) == (100 - len(gone), len(gone), 0)
    if prioritized:
        assert loader.update_priorities([ids[3], ids[5]], [9.0, 9.0]) == 1
    # deleted rows are still the next observations, and the history, of others
    assert 2 in drawn(loader)
    put(writer, range(100, 200))
    assert drawn(loader, 60) == set(range(199)) - gone


def test_a_row_is_deleted_from_the_page_that_it_moves_to_as_well(make):
    engine = make(capacity=400, page_rows=16, max_n_step=4)
    writer = engine.writer("replay")
    loader = engine.loader("replay", batch_size=64, format="numpy", min_rows=1)
    put(writer, range(16))
    ids = ids_of(loader)
    assert engine.table("replay").delete([ids[13]]) == 1  # drawn from the page, and about to leave it
    put(writer, range(16, 20))
    assert engine.table("replay").delete([ids[14]]) == 1  # it has left it
    assert drawn(loader) == set(range(19)) - {13, 14}
    counts = engine._views["replay"].counts()
    assert (counts.size, counts.deleted) == (18, 2)
    fresh = ids_of(loader)
    assert engine.table("replay").delete([fresh[12]]) == 1  # a copy, by its new id
    assert engine._views["replay"].counts().deleted == 3


def test_evicted_rows_are_left_out_and_ids_that_are_none_are_refused(make):
    engine = make(capacity=40, page_rows=8)
    writer = engine.writer("replay")
    put(writer, range(20))
    loader = engine.loader("replay", batch_size=16, format="numpy")
    ids = ids_of(loader)
    put(writer, range(20, 400))
    assert engine.table("replay").delete(list(ids.values())) == 0
    assert engine.table("replay").delete([-1]) == 0
    with pytest.raises(FieldError, match=f"got {1 << 39} at index 1, which none of its rows ever had"):
        engine.table("replay").delete([-1, 1 << 39, (1 << 62) + 5])
    assert engine.table("replay").delete([]) == 0
    with pytest.raises(FieldError, match="int64"):
        engine.table("replay").delete([1.5])
    counts = engine._views["replay"].counts()
    assert counts.size + counts.evicted == counts.inserted == 400


def test_deletions_under_writers_that_overwrite_never_take_a_newer_row(make):
    engine = make(capacity=60, page_rows=12, max_n_step=2)
    writer, view = engine.writer("replay"), engine._views["replay"]
    loader = engine.loader("replay", batch_size=8, format="numpy", min_rows=1)
    stop = threading.Event()
    put(writer, range(40))

    def write():
        number = 40
        while not stop.is_set():
            put(writer, range(number, number + 10))
            number += 10

    thread = threading.Thread(target=write)
    thread.start()
    deleted = 0
    try:
        for _ in range(300):
            deleted += engine.table("replay").delete(loader.next(timeout=5.0).ids)
    finally:
        stop.set()
        thread.join()
    assert deleted > 0
    counts = view.counts()
    flagged = {int(row) for row in np.flatnonzero(view.meta["link"] & conduit.store.format.words.DELETED)}
    assert counts.inserted - counts.evicted - len(flagged) <= counts.size <= counts.inserted - counts.evicted
    put(writer, range(1_000_000, 1_000_100))
    loader = engine.loader("replay", batch_size=64, format="numpy", min_rows=1)
    # none of the rows that came afterwards is missing
    assert drawn(loader, 60) >= set(range(1_000_060, 1_000_099))
    counts = view.counts()
    assert counts.size == counts.inserted - counts.evicted


# -- reset


@pytest.mark.parametrize("prioritized", [False, True])
def test_after_a_reset_no_earlier_row_is_drawn_and_writers_go_on(make, prioritized):
    engine = make(capacity=300, page_rows=16, max_n_step=2, priorities=PRIORITIES if prioritized else None)
    one, two = engine.writer("replay"), engine.writer("replay", num_envs=2, autoreset="next_step")
    put(one, range(60))
    put(two, range(1000, 1020), 2)
    sampling = conduit.Prioritized() if prioritized else None
    loader = engine.loader("replay", batch_size=32, format="numpy", min_rows=1, sampling=sampling)
    ids = ids_of(loader)
    view = engine._views["replay"]
    for turn in range(3):
        before = view.counts()
        engine.table("replay").reset()
        counts = view.counts()
        assert (counts.size, counts.inserted, counts.deleted) == (0, before.inserted, before.inserted)
        with pytest.raises(DataTimeout):
            loader.next(timeout=0.02)
        first = 100 * (turn + 1)
        put(one, range(first, first + 5))
        put(two, [5000 + turn], 2)
        put(two, [6000 + turn], 2)
        batch = loader.next(timeout=5.0)
        assert set(drawn(loader)) == {*range(first, first + 4), (5000 + turn) * 1000, (5000 + turn) * 1000 + 1}
        assert (batch.steps < 5).all()  # every environment began an episode
        assert view.counts().size == 9
    assert not loader.valid(list(ids.values())).any()
    assert engine.table("replay").delete(list(ids.values())) == 0


def test_pages_of_before_a_reset_are_overwritten_first(make):
    engine = make(capacity=100, page_rows=10, max_n_step=1)
    view = engine._views["replay"]
    slow = engine.writer("replay")
    put(slow, range(9))  # its page stays open through the reset
    put(engine.writer("replay"), range(100, 160))
    engine.table("replay").reset()
    fast = engine.writer("replay")
    put(fast, range(1000, 1020))
    put(slow, range(9, 12))  # turns now: the old page is sealed after pages of the new epoch
    size = view.counts().size
    pages = view.layout.pages
    written = 20
    while view.counts().size == size + written - 20 and written < 200:
        put(fast, [1000 + written])
        written += 1
    # nothing of the new epoch was evicted before everything of the old one had gone
    assert view.counts().size > (pages - 3) * 8


def test_every_form_of_writing_goes_on_after_a_reset(make):
    engine = make(capacity=200, page_rows=20, max_n_step=2)
    view = engine._views["replay"]
    writer = engine.writer("replay")
    unchecked = writer.unchecked()
    row = unchecked.row
    for number in range(5):
        unchecked.obs[row], unchecked.action[row], unchecked.reward[row] = number, number, 1.0
        row = unchecked.commit()
    engine.table("replay").reset()
    unchecked.obs[row], unchecked.action[row], unchecked.reward[row] = 5, 5, 1.0
    assert unchecked.commit() >= unchecked.rows  # this row was begun before, and goes with the others
    assert unchecked.commit() >= unchecked.rows
    assert view.counts().size == 0
    row = unchecked.row
    for number in range(6, 9):
        unchecked.obs[row], unchecked.action[row], unchecked.reward[row] = number, number, 1.0
        row = unchecked.commit()
    unchecked.close()
    assert view.counts().size == 3
    with writer.rollout(4) as rollout:
        rollout.obs[:] = np.arange(9, 13)[:, None]
        rollout.action[:] = np.arange(9, 13)
        rollout.reward[:] = 1.0
    loader = engine.loader("replay", batch_size=32, format="numpy", min_rows=1)
    assert drawn(loader) == set(range(6, 12))


# -- freeze


def test_a_frozen_table_takes_no_rows_in_any_form_and_is_read_as_before(make):
    engine = make(capacity=200, page_rows=20)
    writer = engine.writer("replay")
    put(writer, range(30))
    rollout = engine.writer("replay").rollout(3)
    loader = engine.loader("replay", batch_size=32, format="numpy", min_rows=1)
    view = engine._views["replay"]
    unchecked = engine.writer("replay").unchecked()
    row = unchecked.row
    with conduit.attach(engine.name) as other:
        other.table("replay").freeze()
        before = view.counts()
        for write in (
            lambda: put(writer, [30]),
            lambda: writer.append(obs=[1, 2, 3, 4], action=1, reward=1.0),
            lambda: writer.step().__enter__(),
            lambda: writer.rollout(2),
            rollout.commit,
            lambda: engine.table("replay").delete([0]),
            lambda: engine.table("replay").reset(),
        ):
            with pytest.raises(Frozen, match=r"thaw"):
                write()
        assert unchecked.commit() >= unchecked.rows
        with pytest.raises(Frozen):
            unchecked.row  # noqa: B018
        assert view.counts().size - before.size <= 1  # the unchecked handle's row had been begun
        assert drawn(loader) >= set(range(29))
        other.table("replay").thaw()
    assert row < unchecked.rows
    rollout.commit()
    put(writer, range(30, 40))
    assert drawn(loader) >= set(range(39))
    # the stream went on as if nothing had been
    assert set(range(39)) <= {step for _ in range(30) for step in loader.next().steps.tolist()}


def test_a_writer_that_waits_is_told_when_its_table_is_frozen(make):
    engine = make(limiter=conduit.Limits(1.0, 1, 0.0, 3))
    writer = engine.writer("replay", timeout=20.0)
    put(writer, range(3))
    timer = threading.Timer(0.05, engine.table("replay").freeze)
    timer.start()
    with pytest.raises(Frozen):
        put(writer, [3])
    timer.join()


# -- max_times_sampled


def take_all(loader, most=400):
    counts = {}
    for _ in range(most):
        try:
            batch = loader.next(timeout=0.0)
        except DataTimeout:
            return counts
        for number in batch["action"].tolist():
            counts[number] = counts.get(number, 0) + 1
    raise AssertionError("it never ran dry")


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_every_row_is_delivered_exactly_as_often_as_it_may_be(make, times, prioritized):
    engine = make(
        capacity=600,
        page_rows=32,
        max_n_step=3,
        max_times_sampled=times,
        priorities=PRIORITIES if prioritized else None,
    )
    writer = engine.writer("replay")
    put(writer, range(103))
    sampling = conduit.Prioritized() if prioritized else None
    loader = engine.loader("replay", batch_size=10, format="numpy", min_rows=1, sampling=sampling)
    counts = take_all(loader)
    # the newest 3 rows have no whole widest window behind them yet
    assert counts.keys() <= set(range(100))
    assert sum(counts.values()) == 100 * times  # 10 divides it
    assert set(counts.values()) == {times}
    found = engine._views["replay"].counts()
    assert (found.size, found.deleted) == (3, 100)
    with pytest.raises(DataTimeout, match=rf"100 .* as often as .*max_times_sampled={times}"):
        loader.next(timeout=0.0)
    put(writer, range(103, 203))
    assert set(take_all(loader)) == set(range(100, 200))
    writer.close()


def test_a_batch_that_cannot_be_filled_counts_nothing(make):
    engine = make(max_times_sampled=1)
    put(engine.writer("replay"), range(16))
    loader = engine.loader("replay", batch_size=10, format="numpy", min_rows=1)
    first = loader.next(timeout=0.0)["action"].tolist()
    for _ in range(3):
        with pytest.raises(DataTimeout):
            loader.next(timeout=0.0)
    assert engine._views["replay"].counts().size == 16 - 10
    rest = engine.loader("replay", batch_size=5, format="numpy", min_rows=1).next(timeout=0.0)["action"].tolist()
    assert sorted(first + rest) == list(range(15))


def drain(own, size):
    got = []
    with own.client.loader("replay", batch_size=size, format="numpy", min_rows=1) as loader:
        while True:
            try:
                got += loader.next(timeout=0.3)["action"].tolist()
            except DataTimeout:
                return got


def test_processes_that_drain_a_table_together_never_deliver_a_row_twice(make):
    engine = make(capacity=4000, page_rows=64, max_times_sampled=1)
    with engine.loader("replay", batch_size=2, format="numpy", min_rows=1) as loader, pytest.raises(DataTimeout):
        loader.next(timeout=0.0)
    with Puppet() as one, Puppet() as two:
        for puppet in (one, two):
            puppet.do(attach, engine.name)
            puppet.tell(drain, 8)
        put(engine.writer("replay"), range(2000))
        got = one.answer() + two.answer()
    assert len(got) == len(set(got))
    assert len(got) >= 1999 - 16
