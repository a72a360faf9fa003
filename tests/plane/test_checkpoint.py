"""Checkpoints: what comes back is what was there, whatever was going on meanwhile, and whatever became of the files."""

import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit.errors import Busy, CheckpointError, Closed, ConfigError, EngineExists, NoSpace
from conduit.plane.checkpoints import checkpoints, waits
from conduit.store.checkpoint import save
from conduit.store.checkpoint.direct_io import HEADER
from conduit.store.checkpoint.files import FileSet
from conduit.store.checkpoint.restore import create_from, rebased
from conduit.store.checkpoint.snapshot import cut_table
from conduit.store.format import words as w
from conduit.store.format.limit_specs import Limits
from conduit.testing import rows
from conduit.testing.invariants import (
    check_each_row_is_drawn_from_one_page,
    check_every_page_can_be_claimed,
    check_nothing_leaked,
    check_proving_rows,
)
from conduit.testing.puppets import Puppet, attach, write_rows

ROOT = Path(__file__).resolve().parents[2]
WIDE = conduit.Schema(
    [
        conduit.Field("obs.image", "uint8", (5, 30), observation=True),  # 150 bytes in rows of 256
        conduit.Field("obs.state", "float32", (3,), observation=True),
        conduit.Field("tokens", "int32", (20,), ragged=True),
        conduit.Field("half", "bfloat16", (2,)),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32"),
    ]
)
WEIGHTS = {"policy": {"w": np.zeros((3, 4), np.float32), "b": np.zeros((), np.float64)}}


def wide_table(**options):
    return conduit.Table(
        WIDE,
        500,
        page_rows=64,
        max_n_step=2,
        max_stack=2,
        priorities=conduit.Priorities(alpha=0.7),
        statistics=("obs.state", "reward"),
        **options,
    )


def write(writer, count, seed=0):
    """Rows of WIDE whose episodes end now and then, with their final observations."""
    rng = np.random.default_rng(seed)

    def observation():
        return {"image": rng.integers(0, 255, (5, 30), np.uint8), "state": rng.random(3, np.float32)}

    for step in range(count):
        ends = step % 11 == 10
        writer.append(
            obs=observation(),
            tokens=rng.integers(0, 100, rng.integers(0, 20), np.int32),
            half=rng.random(2).tolist(),
            action=step,
            reward=rng.random(),
            terminated=ends and step % 2 == 0,
            truncated=ends and step % 2 == 1,
            final=observation() if ends else None,
        )


OUTPUTS = ("obs.image", "half", "action", "reward", "next_obs.image")
LOADERS = {
    "uniform": {},
    "prioritized": {"sampling": conduit.Prioritized()},
    "stacked n-step": {"window": conduit.Transition(n_step=2, stack=2), "seed": 3, "fields": OUTPUTS},
    "sequences": {"window": conduit.Sequence(3), "seed": 4, "fields": OUTPUTS[:-1]},
    "packed": {"ragged": "pack", "transform": {"reward": conduit.normalize()}},
}


def batches(client, count=3, names=False):
    """Batches of every kind of loader, as copies: {loader: [{output: array}]}."""
    found = {}
    for key, options in LOADERS.items():
        with client.loader(
            "replay", batch_size=32, format="numpy", timeout=0, name=key if names else None, **options
        ) as loader:
            found[key] = []
            for _ in range(count):
                batch = loader.next()
                found[key].append({name: array.copy() for name, array in batch.items()} | {"ids": batch.ids.copy()})
    return found


def assert_same(found, expected):
    for key, several in expected.items():
        for one, other in zip(found[key], several, strict=True):
            for name, array in other.items():
                np.testing.assert_array_equal(one[name], array, err_msg=f"{key}: {name}")


@pytest.fixture
def engine(engine_name):
    tables = {"replay": wide_table(max_length=3)}
    with conduit.Engine.create(engine_name, tables, policies=WEIGHTS, max_participants=8) as made:
        yield made


def restored(path, name, **options):
    return conduit.Engine.restore(path, f"{name}-again", **options)


# -- what comes back


def test_the_same_seeds_give_the_same_next_batches_after_a_restore(engine, tmp_path):
    """reverb#14: a restored server held nothing."""
    with engine.writer("replay", statistics=True) as writer:
        write(writer, 900)
    with engine.loader("replay", batch_size=64, sampling=conduit.Prioritized(), format="numpy") as loader:
        for _ in range(5):
            batch = loader.next()
            loader.update_priorities(batch.ids, np.arange(64.0))
    path = engine.checkpoint(tmp_path)
    expected = batches(engine)
    view = engine._views["replay"]
    with restored(tmp_path, engine.name) as again:
        assert again.restored.path == path
        assert again.restored.tables["replay"].rows == view.rows_visible() > 400
        assert_same(batches(again), expected)
        twin = again._views["replay"]
        for name in ("rows_visible", "rows_written"):
            assert getattr(twin, name)() == getattr(view, name)()
        assert twin.rows_evicted == view.rows_evicted > 0
        for field in ("obs.state", "reward"):
            one, other = (each.table("replay").statistics.read(field) for each in (engine, again))
            assert one.count == other.count > 0
            np.testing.assert_array_equal(one.mean, other.mean)
            np.testing.assert_array_equal(one.variance, other.variance)
        again.table("replay").statistics.update(reward=np.ones(5, np.float32))
        assert (
            again.table("replay").statistics.read("reward").count
            == engine.table("replay").statistics.read("reward").count + 5
        )


def test_a_restored_engine_takes_rows_and_writers_streams_do_not_meet(engine, tmp_path):
    with engine.writer("replay") as writer:
        write(writer, 300)
        engine.checkpoint(tmp_path)
    with restored(tmp_path, engine.name) as again:
        view = again._views["replay"]
        check_nothing_leaked(view)
        check_each_row_is_drawn_from_one_page(view)
        with again.writer("replay") as writer:
            write(writer, 1000, seed=1)
        check_each_row_is_drawn_from_one_page(view)
        check_nothing_leaked(view)
        batches(again)


def test_a_stream_that_was_being_written_comes_back_as_it_was_and_has_ended(engine, tmp_path):
    with Puppet() as puppet:
        puppet.do(attach, engine.name)
        puppet.do(_open_and_write, 333)
        engine.checkpoint(tmp_path)
        expected = batches(engine)
        puppet.kill()
    assert engine.recover() == 1
    with restored(tmp_path, engine.name) as again:
        assert_same(batches(again), expected)
        check_nothing_leaked(again._views["replay"])
        # whoever writes next ends it, and all its rows can be drawn, as those of a writer that died
        assert again._views["replay"].rows_visible() == 333
        with again.writer("replay") as writer:
            write(writer, 1)
            pages = again._views["replay"].pages()
            sealed = pages[pages[:, w.PAGE_STATE // 8] & w.KIND_MASK == w.SEALED]
            assert sealed[:, w.PAGE_ENDED // 8].max() == w.ENDED


def _open_and_write(own, count):
    own.writer = own.client.writer("replay")
    write(own.writer, count)


def test_weights_come_back_with_their_version(engine, tmp_path):
    engine.checkpoint(tmp_path)
    slot = engine.policy()
    for version in range(1, 6):
        slot.publish({"w": np.full((3, 4), version, np.float32), "b": np.float64(version)})
    engine.checkpoint(tmp_path)
    first, second = (one.path for one in checkpoints(tmp_path))
    with restored(first, engine.name) as again:
        assert again.policy().version == 0
        assert again.policy().poll() is None
    with restored(second, engine.name) as again:
        weights = again.policy().poll()
        assert weights.version == 5
        assert (weights.arrays["w"] == 5).all()
        assert weights.arrays["b"] == 5
        assert again.policy().publish({"w": weights.arrays["w"] + 1, "b": np.float64(6)}) == 6
        assert (again.policy().poll().arrays["w"] == 6).all()


def test_a_callers_own_bytes_belong_to_their_checkpoint(engine, tmp_path):
    engine.checkpoint(tmp_path, extra={"agent/1": b"first", "empty": b""})
    engine.checkpoint(tmp_path, extra={"agent/1": bytearray(b"second")})
    first, second = (one.path for one in checkpoints(tmp_path))
    with restored(first, engine.name) as again:
        assert again.restored.extra == {"agent/1": b"first", "empty": b""}
    with restored(second, engine.name) as again:
        assert again.restored.extra == {"agent/1": b"second"}
    with pytest.raises(ConfigError, match=r"extra as \{name: bytes\}, got dict for 'agent'"):
        engine.checkpoint(tmp_path, extra={"agent": {}})
    assert [one.path for one in checkpoints(tmp_path)] == [first, second]


def test_named_loaders_go_on_with_the_batch_that_was_next(engine, tmp_path):
    with engine.writer("replay") as writer:
        write(writer, 300)
    batches(engine, 4, names=True)
    engine.checkpoint(tmp_path)
    expected = batches(engine, 2, names=True)
    with restored(tmp_path, engine.name) as again:
        assert again.restored.loaders == dict.fromkeys(LOADERS, 4)
        assert_same(batches(again, 2, names=True), expected)


def test_a_table_without_rows_and_an_engine_with_another_number_of_seats_come_back(engine, tmp_path):
    engine.checkpoint(tmp_path)
    with restored(tmp_path, engine.name, max_participants=3, backing="memfd") as again:
        assert again._segment.layout.spec.max_participants == 3
        assert again.restored.tables["replay"].rows == 0
        with again.writer("replay") as writer:
            write(writer, 50)
    with pytest.raises(ConfigError, match="max_participants"):
        restored(tmp_path, engine.name, max_participants=0)


def test_the_name_is_the_one_it_had_and_must_be_free(engine, tmp_path):
    engine.checkpoint(tmp_path)
    with pytest.raises(EngineExists):
        conduit.Engine.restore(tmp_path)
    name = engine.name
    engine.close()
    with conduit.Engine.restore(tmp_path) as again, conduit.attach(name) as client:
        assert again.name == name
        assert client.tables == ("replay",)
    assert engine.restored is None


def test_tables_and_fields_of_any_name_have_files(engine_name, tmp_path):
    schema = conduit.Schema([conduit.Field("a", "float32", (2,), observation=True)])
    tables = {name: conduit.Table(schema, 100) for name in ("..", "a/b", "%2E.", "größe", "x" * 60)}
    with conduit.Engine.create(engine_name, tables) as engine:
        for number, name in enumerate(tables):
            with engine.writer(name, keep_final=False) as writer:
                for _ in range(number + 1):
                    writer.append(a=np.full(2, number, np.float32))
        path = engine.checkpoint(tmp_path)
        assert len([*(path / "tables").iterdir()]) == len(tables)
    with conduit.Engine.restore(path) as again:
        assert [one.rows for one in again.restored.tables.values()] == [1, 2, 3, 4, 5]


def test_progress_grows_up_to_all_bytes(engine, tmp_path):
    with engine.writer("replay") as writer:
        write(writer, 300)
    told = []
    engine.checkpoint(tmp_path, progress=lambda *seen: told.append(seen))
    assert told[-1][0] == told[-1][1] > 0
    told.clear()
    with restored(tmp_path, engine.name, progress=lambda *seen: told.append(seen)):
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        assert told[-1][0] == told[-1][1] == checkpoints(tmp_path)[0].bytes


# -- while others work


SMALL = conduit.Table(rows.SCHEMA, capacity=2000, page_rows=50, max_n_step=2, max_stack=2)
BUSY = conduit.Table(rows.SCHEMA, capacity=20_000, page_rows=500, max_n_step=2, max_stack=2)
"""A table that takes a flat-out writer some ten milliseconds to fill."""


def _write_for_ever(own, life, pause=0.0):
    writer = own.client.writer("replay", num_envs=2, autoreset="next_step")
    from conduit.native.jit import entry

    obs, action, reward = np.zeros((2, rows.WORDS), np.int64), np.zeros(2, np.int64), np.zeros(2)
    ends = np.zeros((2, 2), bool)
    addresses = [array.ctypes.data for array in (obs, action, reward, ends[0], ends[1])]
    for number in range(1 << 62):
        entry(rows.write_ticks)(*addresses, life * 2, 2, number, 1)
        writer.append(obs=obs, action=action, reward=reward, terminated=ends[0], truncated=ends[1])
        if pause:
            time.sleep(pause)


def _fill(engine):
    """Rows of an ended stream, more than the table holds."""
    with engine.writer("replay", keep_final=False) as writer:
        write_rows(type("Own", (), {"client": engine, "writer": writer, "number": 0})(), 21_000, 10)


def test_rows_are_whole_and_streams_are_cut_at_a_committed_row_while_writers_write(engine_name, tmp_path):
    with conduit.Engine.create(engine_name, {"replay": BUSY}) as engine, Puppet() as one, Puppet() as two:
        for life, puppet in enumerate((one, two)):
            puppet.do(attach, engine.name)
            puppet.tell(_write_for_ever, life)
        engine.loader("replay", batch_size=1, min_rows=19_000, format="numpy").next()
        kept = 0
        for _ in range(4):
            engine.checkpoint(tmp_path, keep=1)
            with restored(tmp_path, engine.name) as again:
                view = again._views["replay"]
                report = again.restored.tables["replay"]
                assert check_proving_rows(view) >= view.rows_visible() == report.rows
                check_each_row_is_drawn_from_one_page(view)
                check_nothing_leaked(view)
                kept += report.rows
                check_every_page_can_be_claimed(view)
        assert kept > 4 * 1000  # flat-out writers overwrite some before it can be copied


def test_nothing_is_left_out_while_writers_are_slower_than_the_copy(engine_name, tmp_path):
    with conduit.Engine.create(engine_name, {"replay": BUSY}) as engine, Puppet() as puppet:
        _fill(engine)
        puppet.do(attach, engine.name)
        puppet.tell(_write_for_ever, 0, 0.002)
        while engine._views["replay"].rows_written() < 21_010:
            time.sleep(0.01)
        for number in range(5):
            path = engine.checkpoint(tmp_path)
            (one,) = checkpoints(path)
            assert one.rows_left_out == 0
            assert 19_000 < one.rows["replay"] < 22_000
            if number == 4:
                with restored(path, engine.name) as again:
                    check_proving_rows(again._views["replay"])
                    check_each_row_is_drawn_from_one_page(again._views["replay"])


def test_the_pages_that_writers_took_meanwhile_are_left_out_counted_and_free(engine_name, tmp_path):
    with conduit.Engine.create(engine_name, {"replay": SMALL}) as engine:
        view = engine._views["replay"]
        with engine.writer("replay", keep_final=False) as writer:
            own = type("Own", (), {"client": engine, "writer": writer, "number": 0})()
            write_rows(own, 4000)
            cut = cut_table(view)
            write_rows(own, 700)  # a third of the table
            with FileSet(tmp_path) as files:
                entry = save._save_table(view, cut, save._TableFiles(view, files), save._Counter(None, 0))
                files.finish()
        assert entry.pages_left_out > 10
        places = np.load(tmp_path / "tables" / "replay" / "places.npy")
        missing = cut.blocks[places[:, 0] < 0]
        missing = missing[missing[:, w.PAGE_COMMITTED // 8] > 0]
        assert len(missing) == entry.pages_left_out
        assert entry.rows_left_out == (missing[:, w.PAGE_COMMITTED // 8] - missing[:, w.PAGE_HALO // 8]).sum()
        inserted, sampled, deleted, visible = save.counts(cut, view.layout.page_rows)
        manifest = save.Manifest(
            "0", engine.name, 0, engine._segment.layout.spec, {"replay": entry}, {}, {}, (), files.entries
        )
        segment, counts = create_from(
            tmp_path,
            manifest,
            f"{engine_name}-again",
            limiter="keep",
            backing="shm",
            max_participants=None,
            progress=None,
        )
        with conduit.Engine(segment) as again:
            twin = again._views["replay"]
            assert twin.rows_visible() == visible - entry.rows_left_out
            assert twin.rows_evicted == deleted + entry.rows_left_out
            assert counts["replay"].inserted == inserted
            assert counts["replay"].deleted == deleted + entry.rows_left_out
            assert sampled == 0
            free = np.flatnonzero((twin.pages()[:, w.PAGE_STATE // 8] & w.KIND_MASK) == w.FREE)
            assert len(free) >= entry.pages_left_out
            generations = twin.pages()[free, w.PAGE_STATE // 8] >> w.GENERATION_SHIFT
            past = twin.pages()[free, w.PAGE_PAST // 8]
            assert ((past & 0xFFFF) == generations & 0xFFFF).all()
            check_proving_rows(twin)
            check_each_row_is_drawn_from_one_page(twin)
            check_every_page_can_be_claimed(twin)


def test_a_checkpoint_of_an_attached_client_does_not_wait_for_a_stopped_writer_nor_take_leases_away(engine, tmp_path):
    with engine.writer("replay") as writer:
        write(writer, 400)
    with Puppet() as puppet, conduit.attach(engine.name) as client:
        puppet.do(attach, engine.name)
        puppet.do(_open_and_write, 20)
        puppet.stop()
        with client._views["replay"].lease(1) as lease:
            before = lease.column("action").copy()
            path = client.checkpoint(tmp_path)
            np.testing.assert_array_equal(lease.column("action"), before)
        puppet.go_on()
        assert checkpoints(path, verify=True)[0].problem is None
        assert checkpoints(path)[0].rows == {"replay": engine._views["replay"].rows_visible()}


def test_a_closed_engine_makes_no_checkpoint_and_leaves_nothing(engine, tmp_path):
    with conduit.attach(engine.name) as client:
        engine.close()
        for one in (engine, client):
            with pytest.raises(Closed):
                one.checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_checkpoint_at_a_time_in_a_folder(engine, tmp_path):
    inside, go_on = threading.Event(), threading.Event()

    def wait(done, total):
        inside.set()
        assert go_on.wait(30)

    thread = threading.Thread(target=engine.checkpoint, args=(tmp_path,), kwargs={"progress": wait})
    thread.start()
    try:
        assert inside.wait(30)
        with pytest.raises(Busy, match="another process is"):
            engine.checkpoint(tmp_path)
    finally:
        go_on.set()
        thread.join()
    engine.checkpoint(tmp_path)
    assert [one.path.name for one in checkpoints(tmp_path)] == ["0000000001", "0000000002"]


# -- death and damage


def _checkpoint_for_ever(own, folder):
    while True:
        own.client.checkpoint(folder)


def killed_rounds(engine, folder, rounds, seed):
    """Kill a process again and again that makes checkpoints; each time the newest one restores, whole."""
    chance = random.Random(seed)
    began = time.monotonic()
    engine.checkpoint(folder)
    longest = max(0.15, 2 * (time.monotonic() - began))  # some are whole before they are killed, also on a busy machine
    for _ in range(rounds):
        with Puppet() as puppet:
            puppet.do(attach, engine.name)
            puppet.tell(_checkpoint_for_ever, folder)
            time.sleep(chance.random() * longest)
            puppet.kill()
        found = checkpoints(folder, verify=True)
        assert 1 <= len(found) < 10  # more than 2 where one was killed before it removed older ones
        assert [one.problem for one in found] == [None] * len(found)
        with restored(folder, engine.name) as again:
            assert again.restored.skipped == ()
            view = again._views["replay"]
            assert check_proving_rows(view) >= 15_000
            check_each_row_is_drawn_from_one_page(view)
    made = int(found[-1].path.name)
    assert made > 1
    engine.checkpoint(folder)
    assert [one.name for one in folder.iterdir() if one.name.startswith(".")] == []


def _torture(engine_name, folder, rounds, seed):
    with conduit.Engine.create(engine_name, {"replay": BUSY}) as engine, Puppet() as writer:
        _fill(engine)
        writer.do(attach, engine.name)
        writer.tell(_write_for_ever, 0, 0.0005)
        killed_rounds(engine, folder, rounds, seed)


def test_a_process_killed_while_it_makes_a_checkpoint_leaves_the_last_good_one(engine_name, tmp_path):
    _torture(engine_name, tmp_path, 15, 1)


@pytest.mark.torture
def test_two_hundred_killed_checkpoints_leave_the_last_good_one(engine_name, tmp_path):
    _torture(engine_name, tmp_path, 200, 2)


@pytest.fixture
def good(engine, tmp_path):
    """A checkpoint with every kind of file."""
    with engine.writer("replay", statistics=True) as writer:
        write(writer, 120)
    engine.policy().publish(WEIGHTS["policy"])
    return engine.checkpoint(tmp_path / "good", extra={"agent": b"its state"})


def _refused(path, name, *words):
    with pytest.raises(CheckpointError) as caught:
        restored(path, name)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    assert not (Path("/dev/shm") / f"cdt.{os.getuid()}.{name}-again").exists()


def test_a_flipped_bit_or_a_cut_in_any_file_is_refused_with_its_name(engine, good):
    chance = random.Random(5)
    files = [one for one in sorted(good.rglob("*")) if one.is_file()]
    assert len(files) > 18
    for file in files:
        data = file.read_bytes()
        name = str(file.relative_to(good.parent))
        places = {chance.randrange(len(data)), len(data) - 1 if file.suffix == ".npy" else 10}
        places |= {chance.randrange(HEADER)} if file.suffix == ".npy" else set()
        for place in places:
            flipped = bytearray(data)
            flipped[place] ^= 1 << chance.randrange(8)
            file.write_bytes(flipped)
            _refused(good, engine.name, name)
        file.write_bytes(data[: chance.randrange(len(data) - 1)])
        _refused(good, engine.name, name)
        file.write_bytes(data + b"\0")
        if file.suffix == ".npy":
            _refused(good, engine.name, name)
        file.unlink()
        _refused(good, engine.name, name)
        file.write_bytes(data)
    with restored(good, engine.name):
        pass


def test_a_folder_falls_back_to_an_older_checkpoint_and_says_so(engine, good):
    newer = engine.checkpoint(good.parent)
    file = newer / "tables" / "replay" / "meta.npy"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match=r"did not use the newer checkpoint .*meta\.npy"):
        again = restored(good.parent, engine.name)
    with again:
        assert again.restored.path == good
        ((path, why),) = again.restored.skipped
        assert path == newer
        assert "meta.npy" in why
    _refused(newer, engine.name, "meta.npy")
    shutil.rmtree(good)
    _refused(good.parent, engine.name, "meta.npy")


@pytest.mark.parametrize("file", ["manifest.json", "tables/replay/columns/action.npy", "extra/agent.npy"])
@pytest.mark.parametrize("what", ["a folder", "a link that leads round", "a bad block"])
def test_a_folder_falls_back_where_the_newest_checkpoint_cannot_be_read(engine, tmp_path, monkeypatch, file, what):
    """An error of the disk or of permissions is as much a reason as damage."""
    with engine.writer("replay") as writer:
        write(writer, 300)
    older = engine.checkpoint(tmp_path, extra={"agent": b"older"})
    newer = engine.checkpoint(tmp_path, extra={"agent": b"newer"})
    bad = newer / file
    if what == "a bad block":
        straight = os.preadv
        read_bytes = Path.read_bytes

        def fail(fd, *rest):
            if Path(f"/proc/self/fd/{fd}").readlink() == bad:
                raise OSError(5, "Input/output error")
            return straight(fd, *rest)

        def fail_bytes(path):
            if path == bad:
                raise OSError(5, "Input/output error")
            return read_bytes(path)

        monkeypatch.setattr(os, "preadv", fail)
        monkeypatch.setattr(Path, "read_bytes", fail_bytes)
    else:
        bad.unlink()
        bad.mkdir() if what == "a folder" else bad.symlink_to(bad)
    with pytest.warns(RuntimeWarning, match=str(newer)):
        again = restored(tmp_path, engine.name)
    with again:
        assert again.restored.path == older
        assert again.restored.extra == {"agent": b"older"}
        assert [one for one, _ in again.restored.skipped] == [newer]
        assert again.restored.tables["replay"].rows == 300
    with pytest.raises(CheckpointError, match=str(bad)):
        restored(newer, engine.name)
    problems = [one.problem for one in checkpoints(tmp_path, verify=True)]
    assert problems[0] is None
    assert str(bad) in problems[1]


def test_what_a_restore_lacks_itself_is_no_reason_to_take_an_older_checkpoint(engine, tmp_path, monkeypatch):
    engine.checkpoint(tmp_path)
    engine.checkpoint(tmp_path)

    def fail(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Too many open files"):
        restored(tmp_path, engine.name)
    monkeypatch.undo()
    with pytest.raises(EngineExists):  # an OSError as well
        conduit.Engine.restore(tmp_path, engine.name)


def test_the_names_of_new_folders_are_on_the_disk_before_a_checkpoint_is_there(engine, tmp_path, monkeypatch):
    straight = os.fsync
    seen = []

    def note(fd):
        seen.append(Path(f"/proc/self/fd/{fd}").readlink())
        straight(fd)

    monkeypatch.setattr(os, "fsync", note)
    folder = tmp_path / "runs" / "seven" / "checkpoints"
    path = engine.checkpoint(folder)
    behind = seen.index(folder)  # its own entries come last, when the checkpoint has its number
    assert seen[:3] == [tmp_path, tmp_path / "runs", tmp_path / "runs" / "seven"]
    assert seen[-1] == folder
    assert any(one.name.endswith(".npy") for one in seen[3:behind])
    assert path.exists()


def test_what_is_no_checkpoint_or_of_another_version_is_refused(engine, good, tmp_path):
    _refused(tmp_path / "nowhere", engine.name, "found none")
    manifest = good / "manifest.json"
    head = json.loads(manifest.read_text())
    for change, words in (
        ({"format": "other"}, ["no checkpoint of Conduit's"]),
        ({"version": 2}, ["format version 1", "got 2"]),
        ({"version": None}, ["format version 1", "got None"]),
        ({"digest": "0" * 32}, ["digest"]),
    ):
        manifest.write_text(json.dumps(head | change))
        _refused(good, engine.name, "manifest.json", *words)
    manifest.write_text("[]")
    _refused(good, engine.name, "manifest.json")


def test_older_checkpoints_go_and_leftovers_of_the_dead_are_removed(engine, tmp_path):
    (tmp_path / ".0000000001.tmp-1-00000000" / "tables").mkdir(parents=True)
    (tmp_path / ".0000000007.old-1").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(4):
        engine.checkpoint(tmp_path, keep=2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["0000000003", "0000000004", "notes.txt"]
    with pytest.raises(ConfigError, match="at least 1"):
        engine.checkpoint(tmp_path, keep=0)
    with pytest.raises(ConfigError, match="the file"):
        engine.checkpoint(tmp_path / "notes.txt")


FULL = """
import os, numpy as np, conduit
from conduit.errors import NoSpace

os.makedirs("/tmp/full", exist_ok=True)
mount(b"tmpfs", b"/tmp/full", 0, b"size=1m")
schema = conduit.Schema([conduit.Field("obs", "float32", (100,), observation=True)])
with conduit.Engine.create(sys.argv[1], {"replay": conduit.Table(schema, 4000)}, backing="memfd") as engine:
    with engine.writer("replay", keep_final=False) as writer:
        for k in range(3000):
            writer.append(obs=np.full(100, k, np.float32))
            if k == 500:
                writer.flush()
                good = engine.checkpoint("/tmp/full")
    try:
        engine.checkpoint("/tmp/full")
    except NoSpace as error:
        print(error)
    print(os.listdir("/tmp/full"))
    with conduit.Engine.restore("/tmp/full", sys.argv[1] + "-again", backing="memfd") as again:
        print(again.restored.tables["replay"].rows)
    mount(b"tmpfs", b"/dev/shm", 0, b"size=300k")
    try:
        conduit.Engine.restore("/tmp/full", sys.argv[1] + "-again")
    except NoSpace as error:
        print(error)
    print(os.listdir("/dev/shm"))
"""


def test_a_full_disk_leaves_the_last_good_checkpoint_and_full_memory_restores_nothing(engine_name):
    """SB3#238: a buffer half saved to a full disk."""
    from tests.store.test_segment import NAMESPACE

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", NAMESPACE + textwrap.dedent(FULL), engine_name],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "Expected room for a checkpoint in /tmp/full" in lines[0]
    assert lines[1:3] == ["['0000000001']", "501"]
    assert f"bytes free in /dev/shm for engine '{engine_name}-again'" in lines[3]
    assert lines[4:] == ["[]"]


def test_a_full_file_system_error_is_told_as_no_space_and_others_as_a_folder_that_takes_no_checkpoint():
    from conduit.store.checkpoint.direct_io import unwritable

    assert isinstance(unwritable(OSError(28, "full"), Path("/tmp")), NoSpace)
    told = unwritable(OSError(5, "broken"), Path("/tmp"))
    assert isinstance(told, CheckpointError)
    assert "in /tmp, got [Errno 5] broken: name a folder" in str(told)
    for others in (OSError(24, "too many open files"), Busy("somebody else")):
        assert unwritable(others, Path("/tmp")) is others


@pytest.mark.parametrize("below", ["file/below", "n" * 300, "file"], ids=["below a file", "long", "file"])
def test_a_folder_that_takes_no_checkpoint_is_named(engine_name, tmp_path, below):
    (tmp_path / "file").touch()
    schema = conduit.Schema.from_example({"obs": np.zeros(2, np.float32), "action": 0})
    engine = conduit.Engine.create(engine_name, {"replay": conduit.Table(schema, 100)})
    with engine, pytest.raises((CheckpointError, ConfigError), match=below[-40:]):
        engine.checkpoint(tmp_path / below)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_path_that_cannot_be_looked_at_is_no_folder_of_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match="File name too long"):
        checkpoints(tmp_path / ("n" * 300))


# -- limiters


def _limited(engine_name, limiter):
    schema = conduit.Schema.from_example({"obs": np.zeros(2, np.float32), "action": 0})
    return conduit.Engine.create(engine_name, {"replay": conduit.Table(schema, 1000, limiter=limiter)})


def _bases(engine, **values):
    view = engine._views["replay"]
    for offset, value in values.items():
        at = {"inserted": w.TABLE_BASE_INSERTED, "sampled": w.TABLE_BASE_SAMPLED, "deleted": w.TABLE_BASE_DELETED}[
            offset
        ]
        view.segment.words[(view.layout.control + at) // 8] = value


def _counts_of(engine):
    one = engine.restored.tables["replay"]
    view = engine._views["replay"]
    cut = cut_table(view)
    assert save.counts(cut, view.layout.page_rows)[:3] == (one.inserted, one.sampled, one.deleted)
    return one.inserted, one.sampled, one.deleted


def test_a_table_with_a_limiter_needs_a_policy_for_its_counts(engine_name, tmp_path):
    with _limited(engine_name, conduit.MinSize(5)) as engine:
        engine.checkpoint(tmp_path)
        with pytest.raises(ConfigError, match=r"limiter='keep', 'reset' or 'rebase', since tables \['replay'\]"):
            restored(tmp_path, engine.name)
        with pytest.raises(ConfigError, match="'keep', 'reset' or 'rebase', got 'now'"):
            restored(tmp_path, engine.name, limiter="now")


def test_counts_are_kept_or_reset_or_moved_to_where_nobody_waits(engine_name, tmp_path):
    """reverb#118: 100073 * 256 - 25503488 is just the least difference, so a restored server never sampled again."""
    ratio = conduit.SampleToInsertRatio(256, 1000, 115200 / 2)
    with _limited(engine_name, conduit.SampleToInsertRatio(256, 450, (115200.0, 200000.0))) as engine:
        with engine.writer("replay", keep_final=False) as writer:
            for _ in range(573):
                writer.append(obs=np.zeros(2, np.float32), action=0)
        _bases(engine, inserted=99500, sampled=25503488, deleted=99500)
        engine.checkpoint(tmp_path)
        assert ratio.limits().samples_per_insert == 256
        with restored(tmp_path, engine.name, limiter="keep") as again:
            assert _counts_of(again) == (100073, 25503488, 99500)
            assert "sampling waits for 1 more rows" in again.restored.tables["replay"].waits
        with restored(tmp_path, engine.name, limiter="reset") as again:
            assert _counts_of(again) == (573, 0, 0)
            assert again.restored.tables["replay"].waits == ""
        with restored(tmp_path, engine.name, limiter="rebase") as again:
            inserted, sampled, deleted = _counts_of(again)
            assert (inserted, deleted) == (100073, 99500)
            assert inserted * 256 - sampled == (115200 + 200000) / 2
            assert again.restored.tables["replay"].waits == ""


@pytest.mark.parametrize(
    ("limits", "counted", "said"),
    [
        (Limits(1.0, 10, -np.inf, np.inf), (9, 0, 0), "sampling waits for 1 more rows (size 9 < min_size 10)"),
        (Limits(1.0, 10, -np.inf, np.inf), (10, 5, 0), ""),
        (Limits(1.0, 1, 0.0, 5.0), (7, 7, 0), "sampling waits for 1 more rows"),
        (Limits(1.0, 1, 0.0, 5.0), (7, 6, 0), ""),
        (Limits(1.0, 1, 0.0, 5.0), (7, 2, 0), "inserting waits for 1 more samples"),
        (Limits(1.0, 1, 0.0, 5.0), (9, 2, 0), "inserting waits for 3 more samples"),
        (Limits(4.0, 1, 0.0, 50.0), (10, 60, 0), "sampling waits for 6 more rows"),
        (None, (0, 0, 0), ""),
    ],
)
def test_what_waits_is_told_with_what_ends_it(limits, counted, said):
    told = waits(limits, *counted)
    assert told.startswith(said)
    assert bool(told) == bool(said)
    if limits is not None:
        inserted, sampled = counted[0], rebased(limits, counted[0], counted[1])
        if inserted * limits.samples_per_insert > limits.max_diff:
            assert "more samples" not in waits(limits, inserted, sampled, 0)
        assert "sampled - 1" not in waits(limits, inserted, sampled, 0) or sampled == 0


# -- queues


def queue_of(engine_name, **options):
    schema = conduit.Schema([conduit.Field("obs", "float32", (2,), observation=True), conduit.Field("action", "int64")])
    table = conduit.Table(schema, 200, kind="queue", num_envs=2, **options)
    return conduit.Engine.create(engine_name, {"queue": table})


def put(writer, ticks, start=0, **last):
    for tick in range(start, start + ticks):
        more = last if tick == start + ticks - 1 else {}
        flags = np.zeros(2, bool)
        action = np.array([2 * tick, 2 * tick + 1])
        writer.append(obs=np.full((2, 2), tick, np.float32), action=action, terminated=flags, truncated=flags, **more)


def test_what_consumers_had_not_acknowledged_is_delivered_again_after_a_restore_and_nothing_else(engine_name, tmp_path):
    with queue_of(engine_name, page_rows=20) as engine:
        with engine.writer("queue", num_envs=2, autoreset="next_step") as writer:
            put(writer, 40)
        consumer = engine.consumer("queue", format="numpy")
        consumer.next(max_ticks=4).ack()
        held = consumer.next(max_ticks=3)
        assert held["action"].ravel().tolist() == list(range(8, 14))
        path = engine.checkpoint(tmp_path)
        held.ack()
        del held
        consumer.close()
    with conduit.Engine.restore(path) as again, again.consumer("queue", format="numpy") as consumer:
        found, again_delivered = [], []
        while (claim := consumer.poll()) is not None:
            found += claim["action"].ravel().tolist()
            again_delivered.append(claim.delivered_before)
            claim.ack()
        assert found == list(range(8, 80))
        assert again_delivered[0]
        assert not any(again_delivered[1:])
        with again.writer("queue", num_envs=2, autoreset="next_step") as writer:
            put(writer, 10, start=40)
        assert consumer.next(timeout=5)["action"][0, 0] == 80


def test_a_rollout_comes_back_with_its_bootstrap_observations(engine_name, tmp_path):
    with queue_of(engine_name, rollout_length=5) as engine:
        writer = engine.writer("queue", num_envs=2, autoreset="next_step")
        put(writer, 5, bootstrap=np.full((2, 2), 77, np.float32))
        put(writer, 2, start=5)
        engine.checkpoint(tmp_path)
    with conduit.Engine.restore(tmp_path) as again, again.consumer("queue", format="numpy") as consumer:
        with consumer.next(timeout=5) as claim:
            assert claim.complete
            assert claim.ticks == 5
            assert (claim.bootstrap["obs"] == 77).all()
        with consumer.next(timeout=5) as claim:  # its writer has ended
            assert not claim.complete
            assert claim.ticks == 2


# -- in another process


def test_a_checkpoint_of_a_killed_engine_restores_in_another_process(engine_name, tmp_path):
    with Puppet() as puppet:
        puppet.do(_create_wide, engine_name)
        puppet.do(_checkpoint, tmp_path)
        expected = puppet.do(_batches)
        puppet.kill()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with restored(tmp_path, engine_name) as again:
            assert_same(batches(again, 1), expected)
    with conduit.Engine.adopt(engine_name) as adopted:
        assert_same(batches(adopted, 1), expected)


def _create_wide(own, name):
    own.client = conduit.Engine.create(name, {"replay": wide_table(max_length=3)})
    with own.client.writer("replay") as writer:
        write(writer, 300)


def _checkpoint(own, path):
    own.client.checkpoint(path)


def _batches(own):
    return batches(own.client, 1)
