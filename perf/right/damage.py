"""Restores, forks, other users' files, destructors, publishers and damaged segments: cases that once failed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import conduit
from conduit.errors import AccessDenied, BadSegment, Busy
from conduit.store.segment.names import shm_name
from conduit.testing.puppets import ended, forked
from perf.bars import Bar

_SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "float32", (4,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32"),
    ]
)


def _append(writer: conduit.Writer, rows: int, every: int) -> None:
    for step in range(rows):
        writer.append(
            obs=np.full(4, step, np.float32), action=step, reward=float(step), terminated=step % every == every - 1
        )


def _restores() -> Iterator[Bar]:
    """A6 the next batches of a restored engine."""
    loaders: dict[str, dict[str, object]] = {
        "uniform": {},
        "prioritized": {"sampling": conduit.Prioritized()},
        "3 steps": {"window": conduit.Transition(n_step=3)},
        "3 steps, short ones too": {"window": conduit.Transition(n_step=3, newest="bootstrap")},
    }
    table = conduit.Table(_SCHEMA, 1_000, page_rows=64, max_n_step=3, priorities=conduit.Priorities())

    def draw(engine: conduit.Client) -> dict[str, np.ndarray]:
        found = {}
        for name, options in loaders.items():
            with engine.loader("replay", batch_size=32, format="numpy", **options) as loader:  # type: ignore[arg-type]
                found[name] = loader.next().ids.copy()
        return found

    with (
        tempfile.TemporaryDirectory() as folder,
        conduit.Engine.create("bar-restores", {"replay": table}) as engine,
        engine.writer("replay", keep_final=False) as one,
        engine.writer("replay", keep_final=False) as other,
    ):
        _append(one, 300, 10)
        _append(other, 40, 7)
        engine.checkpoint(Path(folder))
        expected = draw(engine)
        with conduit.Engine.restore(Path(folder), "bar-restores-again") as again:
            found = draw(again)
    for name in loaders:
        differ = int((found[name] != expected[name]).sum())
        yield Bar(f"A6 next batch after a restore, writers open, {name}", f"{differ} of 32 differ", "0", differ == 0)


def _forks() -> Iterator[Bar]:
    """B5 forks beside a thread that opens named loaders."""
    name = f"bar-forks-{os.getpid()}"
    stop = threading.Event()

    def open_one(client: conduit.Client, loader: str) -> None:
        client.loader("replay", batch_size=4, name=loader, format="numpy").close()

    def attach_anew() -> None:
        with conduit.attach(name) as client:
            open_one(client, "theirs")

    with conduit.Engine.create(name, {"replay": conduit.Table(_SCHEMA, 1_000)}) as engine:
        open_one(engine, "theirs")

        def work() -> None:
            while not stop.is_set():
                open_one(engine, "mine")

        thread = threading.Thread(target=work)
        thread.start()
        try:
            good = sum(ended(forked(attach_anew), 5.0) == 0 for _ in range(100))
        finally:
            stop.set()
            thread.join()
    yield Bar(
        "B5 children forked beside a thread that opens named loaders", f"{good} of 100 attach", "100", good == 100
    )


def _others() -> Iterator[Bar]:
    """B6 what lies under an engine's name and is not this user's own file."""
    name = f"bar-others-{os.getpid()}"
    path = Path(f"/dev/shm{shm_name(name)}")
    with conduit.Engine.create(f"{name}-whole", {"replay": conduit.Table(_SCHEMA, 1_000)}):
        whole = path.with_name(f"{path.name}-whole").read_bytes()

    def segment(mode: int, owner: int) -> None:
        path.write_bytes(whole)
        path.chmod(mode)
        if owner != os.geteuid():
            os.chown(path, owner, owner)

    kinds: dict[str, tuple[Callable[[], object], type[Exception]]] = {
        "a segment that others may write": (lambda: segment(0o666, os.geteuid()), AccessDenied),
        "a symbolic link": (lambda: path.symlink_to("/etc/hostname"), BadSegment),
        "a pipe": (lambda: os.mkfifo(path, 0o600), BadSegment),
    }
    if os.geteuid() == 0:
        kinds["another user's segment"] = (lambda: segment(0o600, 65534), AccessDenied)
    for kind, (make, expected) in kinds.items():
        make()
        try:
            conduit.attach(name).close()
            found = "attached"
        except Exception as error:  # noqa: BLE001 -- the row shows which one
            found = type(error).__name__
        finally:
            path.unlink()
        yield Bar(f"B6 attach to {kind}", found, expected.__name__, found == expected.__name__)


def _collect() -> None:
    table = conduit.Table(_SCHEMA, 4_000, page_rows=16, statistics=("obs",))
    with conduit.Engine.create(f"bar-collections-{os.getpid()}", {"replay": table}) as engine:
        for threshold in (1, 2, 5, 700):
            for rows in range(1, 20):
                writer = engine.writer("replay", keep_final=False, statistics=True)
                _append(writer, rows, 100)
                box: list[object] = [writer]
                box.append(box)
                del writer, box
                gc.set_threshold(threshold)
                engine.table("replay").statistics.update(obs=np.ones((3, 4), np.float32))
                gc.set_threshold(700)
                gc.collect()
        assert engine.table("replay").statistics.read("obs").count >= 4 * 57


def _collections() -> Iterator[Bar]:
    """B7 a collection inside an update of statistics finalises a writer that counts."""
    status = ended(forked(_collect), 60.0)
    found = "hangs" if status is None else "whole" if status == 0 else f"status {status}"
    yield Bar(
        "B7 a collection inside an update of statistics finalises a writer that counts", found, "whole", status == 0
    )


def _publishers() -> Iterator[Bar]:
    """B9 two threads publish through one slot."""
    shape = {"a": np.zeros(60_000), "b": np.zeros((300, 200))}
    name = f"bar-publishers-{os.getpid()}"
    torn = polls = 0
    with conduit.Engine.create(name, {}, policies={"policy": shape}) as engine, conduit.attach(name) as reader:
        slot = reader.policy()

        def publish(number: int) -> None:
            for count in range(400):
                value = float(2 * count + number)
                engine.policy().publish({key: np.full_like(one, value) for key, one in shape.items()})

        threads = [threading.Thread(target=publish, args=(number,)) for number in (0, 1)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or slot.held < slot.version:
            weights = slot.poll()
            if weights is not None:
                polls += 1
                torn += any((array != weights.arrays["b"][0, 0]).any() for array in weights.arrays.values())
        sys.setswitchinterval(interval)
        published = slot.version
    yield Bar(
        "B9 two threads publish through one slot",
        f"{torn} torn of {polls} polls, {published} versions",
        "0 torn, 800 versions",
        torn == 0 and polls > 0 and published == 800,
    )


def _folders() -> Iterator[Bar]:
    """B11 what a checkpoint's folder is left with, and what a restore falls back to."""
    name = f"bar-folders-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as place,
        conduit.Engine.create(name, {"replay": conduit.Table(_SCHEMA, 1_000)}) as engine,
    ):
        folder = Path(place) / "runs" / "checkpoints"
        synced: list[Path] = []
        straight = os.fsync

        def note(fd: int) -> None:
            synced.append(Path(f"/proc/self/fd/{fd}").readlink())
            straight(fd)

        os.fsync = note
        try:
            older = engine.checkpoint(folder)
        finally:
            os.fsync = straight
        good = {folder.parent, folder.parent.parent} <= set(synced)
        yield Bar("B11 the folders above a new checkpoint folder are on the disk", str(good), "True", good)
        newer = engine.checkpoint(folder)
        manifest = newer / "manifest.json"
        manifest.unlink()
        manifest.mkdir()  # reading it is an error of the system
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with conduit.Engine.restore(folder, f"{name}-again") as again:
                used = again.restored.path if again.restored else None
        yield Bar(
            "B11 a restore whose newest checkpoint cannot be read takes",
            str(used and used.name),
            older.name,
            used == older,
        )
        yield _outlived(name, Path(place) / "killed")


def _outlived(name: str, folder: Path) -> Bar:
    reading, writing = os.pipe()

    def leave_a_child(*_: int) -> None:
        child = os.fork()
        if child:
            os.write(writing, str(child).encode())
        time.sleep(60)
        os._exit(0)

    maker = os.fork()
    if maker == 0:
        with conduit.attach(name) as client:
            client.checkpoint(folder, progress=leave_a_child)
        os._exit(1)
    child = int(os.read(reading, 20))
    os.kill(maker, signal.SIGKILL)
    os.waitpid(maker, 0)
    try:
        with conduit.attach(name) as client:
            client.checkpoint(folder)
        found = "made"
    except Busy:
        found = "Busy"
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.close(writing)
    return Bar("B11 a checkpoint beside the forked child of a maker that was killed", found, "made", found == "made")


_WORKERS = 2
_COPIES = 10_000


def _copies() -> Iterator[Bar]:
    """B10 damaged copies of whole segments, and everything that is done in a segment."""
    share = _COPIES // _WORKERS
    command = [sys.executable, "-m", "conduit.testing.damage", "--copies", str(share), "--seed"]
    workers = [
        subprocess.Popen([*command, str(number * share)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for number in range(_WORKERS)
    ]
    told = [worker.communicate()[0] for worker in workers]
    counts = [int(text.split()[-2]) for text in told]
    first = tuple(line for text in told for line in text.splitlines()[:-1][:3])
    yield Bar(
        f"B10 {_COPIES:,} damaged copies: crashes, hangs, errors that are not Conduit's",
        str(sum(counts)),
        "0",
        sum(counts) == 0,
        first,
    )


GROUPS: tuple[Callable[[], Iterator[Bar]], ...] = (
    _restores,
    _forks,
    _others,
    _collections,
    _publishers,
    _folders,
    _copies,
)
