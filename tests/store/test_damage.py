"""Damaged segments: nobody who works in one crashes or hangs, and what cannot be is refused as damage, by page."""

import ctypes
import faulthandler
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit.errors import BadSegment, ConduitError, DataTimeout
from conduit.plane.deliver.scan import Scan
from conduit.plane.observe import inspect
from conduit.store.format import words as w
from conduit.store.format.layout import LOADER_BYTES
from conduit.store.segment.names import shm_name
from conduit.store.tables.loader_cursors import LOADER_OWNER
from conduit.testing import damage

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "float32", (2,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32"),
    ]
)
WORDS = [0, -1, -5, 1 << 20, 1 << 31, 1 << 48, (1 << 63) - 1, -(1 << 63)]
WINDOWS = {
    "transition": conduit.Transition(),
    "three steps": conduit.Transition(n_step=3),
    "stack": conduit.Transition(stack=2),
    "sequence": conduit.Sequence(3),
    "across": conduit.Sequence(3, across=True, overlap=1),
    "episode": conduit.Episode(4),
}


def word(client, table, page, offset):
    """A page's word, int64 [1], as a writable view."""
    layout = client._views[table].layout
    return client._segment.array(layout.blocks + page * w.LINE + offset, (1,), np.dtype(np.int64))


@pytest.fixture
def engine(engine_name):
    table = conduit.Table(
        SCHEMA, 200, page_rows=32, max_n_step=3, max_stack=2, max_length=4, priorities=conduit.Priorities()
    )
    with conduit.Engine.create(engine_name, {"replay": table}) as made:
        with made.writer("replay") as writer:
            for step in range(90):
                obs = np.full(2, step, np.float32)
                writer.append(obs=obs, action=step, reward=1.0, terminated=step % 10 == 9, final=obs + 1)
        yield made


@pytest.fixture
def queue(engine_name):
    table = conduit.Table.queue(SCHEMA, 200, num_envs=2, rollout_length=8)
    with conduit.Engine.create(engine_name, {"queue": table}) as made:
        with made.writer("queue", num_envs=2, autoreset="same_step") as writer:
            for step in range(16):
                obs = np.full((2, 2), step, np.float32)
                ended = np.array([step == 5, False])
                more = {"bootstrap": obs + 1} if step % 8 == 7 else {}
                writer.append(
                    obs=obs,
                    action=np.full(2, step),
                    reward=np.ones(2, np.float32),
                    terminated=ended,
                    final=obs + 1,
                    **more,
                )
        yield made


# -- all of it


def test_no_copy_with_damaged_words_brings_a_process_down_or_to_a_stop():
    assert damage.run(300, seed=1_000_000) == []


@pytest.mark.torture
def test_none_of_thousands_of_damaged_copies_brings_a_process_down():
    assert damage.run(10_000, seed=2_000_000) == []


def test_a_copy_is_the_same_for_the_same_seed_and_few_words_differ():
    (sample, *_) = damage.samples()
    assert damage.damaged(sample, -1) == sample.content
    changed = set()
    for seed in range(200):
        one = np.frombuffer(damage.damaged(sample, seed), np.int64)
        assert one.tobytes() == damage.damaged(sample, seed)
        places = np.flatnonzero(one != np.frombuffer(sample.content, np.int64))
        assert len(places) <= 40
        changed.update(places.tolist())
    assert len(changed) > 300


def test_the_driver_sees_crashes_hangs_and_errors_that_are_not_conduits(monkeypatch, tmp_path):
    straight = damage.work_in

    def bad(name, kind):
        (tmp_path / str(os.getpid())).touch()  # another run on this machine has other workers
        content = Path(f"/dev/shm{shm_name(name)}").read_bytes()
        seed = next(seed for seed in range(8) if damage.damaged(made[seed % len(made)], seed) == content)
        if seed == 2:
            faulthandler.disable()
            ctypes.string_at(0)
        if seed == 4:
            time.sleep(60)
        return ["ValueError"] if seed == 5 else straight(name, kind)

    made = damage.samples()
    for sample in made:
        damage.check_undamaged(sample)  # a worker that compiles for long would be taken for one that hangs
    monkeypatch.setattr(damage, "samples", lambda: made)
    monkeypatch.setattr(damage, "check_undamaged", lambda sample: None)
    monkeypatch.setattr(damage, "work_in", bad)
    found = damage.run(8, patience=3.0)
    assert [(one.seed, one.what) for one in found] == [
        (2, f"signal {int(signal.SIGSEGV)}"),
        (4, "hang"),
        (5, "ValueError"),
    ]
    workers = [int(one.name) for one in tmp_path.iterdir()]
    assert len(workers) == 3  # one more after the crash, and after the hang
    for pid in (os.getpid(), *workers):
        left = Path("/dev/shm").glob(f"cdt.{os.getuid()}.damage-{pid}*")
        assert not [one.name for one in left if not one.name.partition(f"damage-{pid}")[2][:1].isdigit()]


# -- words of pages


@pytest.mark.parametrize("sampling", [None, conduit.Prioritized()], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("offset", [w.PAGE_ENVS, w.PAGE_COMMITTED, w.PAGE_FIRST], ids=["envs", "committed", "first"])
def test_windows_of_pages_whose_words_cannot_be_are_not_drawn(engine, window, sampling, offset):
    pages = engine._views["replay"].layout.pages
    straight = [int(word(engine, "replay", page, offset)[0]) for page in range(pages)]
    for value in WORDS:
        with engine.loader(
            "replay", batch_size=64, min_rows=1, window=window, sampling=sampling, format="numpy", timeout=0
        ) as loader:
            for page in range(pages - 1):
                word(engine, "replay", page, offset)[0] = value
                try:
                    ids = loader.next().ids
                except ConduitError:
                    continue
                local = (ids & (1 << 40) - 1) // engine._views["replay"].layout.page_rows
                assert (local < pages).all()
                if offset == w.PAGE_ENVS:
                    assert not np.isin(local, range(page + 1)).any()
        for page in range(pages):
            word(engine, "replay", page, offset)[0] = straight[page]


def test_a_stack_goes_back_no_further_than_its_page(engine):
    view = engine._views["replay"]
    word(engine, "replay", 0, w.PAGE_FIRST)[0] = 0
    # what lies before the table's first row
    engine._segment.root[view.layout.columns["obs"] - 8 :][:8].view(np.float32)[:] = 7777
    for step in (1, 2, 1 << 20, (1 << 31) - 1, -1, -(1 << 31)):
        view.meta["step"] = step
        view.meta["link"] &= ~np.uint32(w.FIRST)
        with engine.loader(
            "replay", batch_size=512, min_rows=1, window=conduit.Transition(stack=2), format="numpy", fields=("obs",)
        ) as loader:
            batch = loader.next()
        assert (batch.ids & (1 << 40) - 1 == 0).any()
        assert np.isin(batch["obs"], np.arange(91)).all()


IMPOSSIBLE = [(w.PAGE_ENVS, 0)] + [
    (offset, value)
    for offset in (w.PAGE_ENVS, w.PAGE_COMMITTED, w.PAGE_HALO)
    for value in (-1, 1 << 20, 1 << 48, -(1 << 63))
]


@pytest.mark.parametrize(("offset", "value"), IMPOSSIBLE)
def test_a_page_that_cannot_be_is_named_by_leases_scans_and_checkpoints(engine, tmp_path, offset, value):
    view = engine._views["replay"]
    word(engine, "replay", 1, offset)[0] = value
    with pytest.raises(BadSegment, match=r"page 1 of table 'replay'.*restore a checkpoint.*conduit clean"):
        view.lease(1)
    view.lease(0).end()
    with pytest.raises(BadSegment, match=f"page 1 of table 'replay'.*{value}"):
        list(Scan(view))
    with pytest.raises(BadSegment, match="page 1 of table 'replay'"):
        engine.checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_final_observation_outside_of_its_page_is_named(engine):
    meta = engine._views["replay"].meta
    row = int(np.flatnonzero(meta["link"] & w.KEPT)[0])
    meta["link"][row] = (1 << 25 << w.LINK_SHIFT) | (int(meta["link"][row]) & 63)
    with pytest.raises(BadSegment, match=r"page 0 of table 'replay', got a link to local row 33\d+"):
        list(Scan(engine._views["replay"]))
    with engine.loader("replay", batch_size=256, min_rows=1, format="numpy") as loader:
        assert not np.isin(loader.next().ids & (1 << 40) - 1, row).any()


def test_a_checkpoint_with_limits_that_cannot_be_is_refused_and_so_is_a_look(engine_name, tmp_path):
    table = conduit.Table(SCHEMA, 200, limiter=conduit.MinSize(5))
    with conduit.Engine.create(engine_name, {"replay": table}) as made:
        made.table("replay").limiter.change(conduit.MinSize(6))
        control = made._views["replay"].layout.control + w.TABLE_LIMITS
        for number in range(8):
            made._segment.array(control + 8 + 8 * number, (1,), np.dtype(np.float64))[0] = np.nan
        for call in (made.table("replay").limiter.explain, lambda: made.loader("replay", batch_size=4)):
            with pytest.raises(BadSegment, match="the limits of table 'replay', got nan"):
                call()
        found = inspect.inspect(engine_name)
        assert found.state == "damaged"
        assert "the limits of table 'replay'" in found.problem


# -- queues


@pytest.mark.parametrize("value", WORDS)
def test_a_page_before_that_there_is_none_holds_no_claim_up(queue, value):
    pages = queue._views["queue"].layout.pages
    for page in range(pages):
        word(queue, "queue", page, w.PAGE_PREVIOUS)[0] = value
    consumer = queue.consumer("queue", format="numpy", timeout=0)
    assert consumer.next().ticks == 8


UNCLAIMABLE = [
    *((w.PAGE_ENVS, value) for value in (0, -1, 3, 1 << 20, 1 << 48, (1 << 63) - 1)),
    *((w.PAGE_COMMITTED, value) for value in (3, 1 << 20, 1 << 48, (1 << 63) - 1)),
    *((w.PAGE_STREAM, value) for value in (-1, 1 << 48, (1 << 63) - 1)),
]


@pytest.mark.parametrize(("offset", "value"), UNCLAIMABLE)
def test_a_claim_on_a_page_that_cannot_be_is_refused_and_nothing_is_held(queue, offset, value):
    view = queue._views["queue"]
    states = view.pages()[:, w.PAGE_STATE // 8] & w.KIND_MASK
    page = int(np.flatnonzero(states >= w.OPEN)[0])
    word(queue, "queue", page, offset)[0] = value
    consumer = queue.consumer("queue", format="numpy", timeout=0)
    sides = view.segment.array(view.layout.sides, (view.layout.pages, 16), np.dtype(np.int64)).copy()
    for _ in range(20):  # a client has 16 holds
        with pytest.raises(BadSegment, match=f"page {page} of table 'queue'"):
            consumer.next()
    np.testing.assert_array_equal(
        view.segment.array(view.layout.sides, (view.layout.pages, 16), np.dtype(np.int64)), sides
    )
    assert consumer.stats.claims == 0


def test_bootstrap_observations_outside_of_their_page_are_no_claim(queue):
    view = queue._views["queue"]
    side = view.segment.array(view.layout.sides, (view.layout.pages, 16), np.dtype(np.int64))
    assert (side[:2, w.SIDE_BOOTSTRAP // 8] >> 32 == 16).all()
    side[:2, w.SIDE_BOOTSTRAP // 8] = (16 << 32) | 0xFFFFFF
    with pytest.raises(BadSegment, match="page 0 of table 'queue'"):
        queue.consumer("queue", format="numpy", timeout=0).next()


# -- seats


def test_seats_that_an_engine_had_more_of_are_not_written_behind_those_it_has(engine_name, tmp_path):
    """The words of a checkpoint name its owners: with fewer seats, theirs would lie among the rows."""
    table = conduit.Table(SCHEMA, 200, page_rows=32)
    with conduit.Engine.create(engine_name, {"replay": table}, max_participants=64) as made:
        clients = [conduit.attach(engine_name) for _ in range(60)]
        writers = [client.writer("replay", keep_final=False) for client in clients[-3:]]
        for step in range(20):
            for number, writer in enumerate(writers):
                obs = np.full(2, 100 * number + step, np.float32)
                writer.append(obs=obs, action=1 << 40 | step, reward=3.5)
        made.checkpoint(tmp_path)
        expected = {name: made._views["replay"].columns[name].copy() for name in SCHEMA.names}
        for client in clients:
            client.close()
    with conduit.Engine.restore(tmp_path, f"{engine_name}-again", max_participants=2) as again:
        view = again._views["replay"]
        live = np.repeat(view.pages()[:, w.PAGE_COMMITTED // 8], 32) > np.arange(view.layout.rows) % 32
        assert live.sum() == 60
        for name, column in expected.items():
            np.testing.assert_array_equal(view.columns[name][live], column[live], err_msg=name)
        assert [one.rows for one in inspect.inspect(again.name).participants] == [0]


def test_priorities_that_add_up_to_more_than_a_sum_can_hold_draw_nothing(engine):
    leaves = engine._views["replay"].priorities
    for count in range(1, len(leaves)):
        leaves[:] = 0
        leaves[:count] = (1 << 32) - 1
        with engine.loader(
            "replay", batch_size=32, min_rows=1, sampling=conduit.Prioritized(), format="numpy", timeout=0
        ) as loader:
            try:
                drawn = loader.next().ids & (1 << 40) - 1
            except DataTimeout:
                continue
            assert (drawn < count).all()
            assert not 45 <= count <= 60  # some are no anchors; 33 to 63 of almost 2^58 each pass 2^63


@pytest.mark.parametrize("owner", [-1, 1 << 10, 1 << 62, (1 << 63) - 1])
def test_a_named_loader_of_a_participant_that_cannot_be_is_refused_as_damage(engine, owner):
    engine.loader("replay", batch_size=2, name="first").close()
    slot = engine._segment.array(engine._segment.layout.loaders, (LOADER_BYTES // 8,), np.dtype(np.int64))
    slot[LOADER_OWNER] = owner
    with pytest.raises(BadSegment, match="the list of named loaders"):
        engine.loader("replay", batch_size=2, name="first")
    slot[LOADER_OWNER] = 0
    engine.loader("replay", batch_size=2, name="first").close()
