"""What a forked child must not inherit: mutexes that another thread held, and locks that would outlive their holder."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit import forking
from conduit.errors import Busy
from conduit.forking import LockFile
from conduit.store.segment import leftovers, segment
from conduit.store.segment.locks import held
from conduit.store.segment.names import open_segment, shm_name
from conduit.store.tables import loader_cursors
from conduit.testing.puppets import ended, forked
from conduit.testing.torture_roles import small_table

LIMITED = conduit.Table(small_table().schema, 1_000, page_rows=100, limiter=conduit.SampleToInsertRatio(1, 1, 900))


@pytest.fixture
def engine(engine_name):
    weights = {"policy": {"w": np.zeros(3)}}
    tables = {"replay": LIMITED}
    with conduit.Engine.create(engine_name, tables, policies=weights, max_participants=16) as made:
        yield made


def work_in(name: str) -> None:
    """Attach anew, and do everything that takes a mutex of the process."""
    with conduit.attach(name) as client:
        client.loader("replay", batch_size=4, name=f"child-{os.getpid()}", format="numpy").close()
        client.table("replay").limiter.change(conduit.SampleToInsertRatio(1, 1, 900))
        slot = client.policy()
        slot.publish({"w": np.ones(3)})
        slot.close()
        client.recover()


@pytest.mark.parametrize(("module", "name"), [(one.__name__, name) for one, name, _, _ in forking._mutexes])
def test_a_mutex_that_another_thread_held_is_open_in_a_forked_child(engine, module, name):
    """reverb#35 and its kind: a fork takes no account of what other threads do."""
    work_in(engine.name)
    mutex = getattr(sys.modules[module], name)
    holding, done = threading.Event(), threading.Event()

    def hold():
        with mutex:
            holding.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(60)
    try:
        # a fork waits for those that guard what must not be half done
        threading.Timer(0.3, done.set).start()
        pid = forked(lambda: work_in(engine.name))
        assert ended(pid, 30) == 0
    finally:
        done.set()
        thread.join()
    assert getattr(sys.modules[module], name) is mutex


def test_forks_beside_a_thread_that_opens_named_loaders_attach_anew(engine):
    stop = threading.Event()
    opened = 0

    def open_loaders():
        nonlocal opened
        while not stop.is_set():
            engine.loader("replay", batch_size=4, name="mine", format="numpy").close()
            engine.table("replay").limiter.change(conduit.SampleToInsertRatio(1, 1, 900))
            opened += 1

    def attach_and_open():
        with conduit.attach(engine.name) as client:
            client.loader("replay", batch_size=4, name="theirs", format="numpy").close()
            client.table("replay").limiter.change(conduit.SampleToInsertRatio(1, 1, 900))

    work_in(engine.name)
    thread = threading.Thread(target=open_loaders)
    thread.start()
    try:
        statuses = [ended(forked(attach_and_open), 30) for _ in range(40)]
    finally:
        stop.set()
        thread.join()
    assert statuses == [0] * 40
    assert opened > 40


COMPILES = """
import os, sys, threading
import numba
import conduit
from conduit.native.jit import entry, kernel

@kernel("int64(int64)")
def slow(n):
    total = 0
    for i in range(n):
        total += i * i
    return total

@kernel("int64(int64)")
def other(n):
    return n + 1

inside = threading.Event()
compiling = numba.core.compiler_lock.global_compiler_lock

def compile_slowly():
    import conduit.native.jit
    with conduit.native.jit._compiling, compiling:  # as a kernel that takes its time
        inside.set()
        entry(slow)
        threading.Event().wait(1)

thread = threading.Thread(target=compile_slowly)
thread.start()
inside.wait()
pid = os.fork()
if pid == 0:
    os._exit(entry(other)(1) - 2)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
thread.join()
"""


def test_a_fork_waits_for_a_kernel_that_another_thread_compiles(tmp_path):
    """Numba's own mutexes cannot be made anew, so no child may come in the middle of it."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    script = tmp_path / "compiles.py"
    script.write_text(COMPILES)
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


# -- locks of the kernel


def folder_lock(folder: Path) -> LockFile:
    file = LockFile(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def outlived(read_end: int, parent: int) -> int:
    """Kill a process whose child lives, once that has told its number; returns the child's."""
    child = int(os.read(read_end, 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    return child


@pytest.mark.parametrize("kind", ["checkpoint", "creator", "clean", "notes"])
def test_a_lock_goes_with_its_holder_although_its_forked_child_lives(engine_name, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    read_end, write_end = os.pipe()

    def leave_child_behind(*_):
        child = os.fork()
        if child:
            os.write(write_end, str(child).encode())
        time.sleep(60)
        os._exit(0)

    def parent():
        if kind == "checkpoint":
            with conduit.Engine.create(engine_name, {"replay": small_table()}) as made:
                made.checkpoint(tmp_path / "checkpoints", progress=leave_child_behind)
        elif kind == "creator":
            segment.allocate = leave_child_behind
            conduit.Engine.create(engine_name, {"replay": small_table()})
        elif kind == "clean":
            leftovers.leads_to = leave_child_behind
            leftovers.remove_if_dead(engine_name)
        else:
            segment.allocate = leave_child_behind
            from conduit.store.segment import names

            names.exists = leave_child_behind
            conduit.Engine.create(engine_name, {"replay": small_table()}, backing="memfd")

    conduit.Engine.create(engine_name, {"replay": small_table()}).close()  # no child has to compile what this takes
    if kind == "clean":
        dead = forked(lambda: (conduit.Engine.create(engine_name, {"replay": small_table()}), os._exit(0)))
        assert ended(dead, 60) == 0
    child = outlived(read_end, forked(parent))
    os.close(read_end)
    os.close(write_end)
    try:
        assert Path(f"/proc/{child}").exists()
        if kind == "checkpoint":
            folder_lock(tmp_path / "checkpoints").close()
        elif kind == "notes":
            folder_lock(tmp_path / f"conduit-{os.getuid()}").close()
        else:
            fd = open_segment(engine_name)
            assert not held(fd)
            os.close(fd)
    finally:
        os.kill(child, signal.SIGKILL)
        Path("/dev/shm" + shm_name(engine_name)).unlink(missing_ok=True)


def test_a_checkpoint_that_failed_lets_go_of_its_folder_although_its_forked_child_lives(engine_name, tmp_path):
    children = []

    def fail(done, total):
        children.append(forked(lambda: time.sleep(60)))
        raise RuntimeError("no more")

    with conduit.Engine.create(engine_name, {"replay": small_table()}) as made:
        with pytest.raises(RuntimeError, match="no more"):
            made.checkpoint(tmp_path, progress=fail)
        try:
            made.checkpoint(tmp_path)
        finally:
            os.kill(children[0], signal.SIGKILL)
            os.waitpid(children[0], 0)


def test_no_child_inherits_a_lock_file_that_it_does_not_know(tmp_path, monkeypatch):
    """Forks beside a thread that opens them, with time between the opening and what comes after it."""
    path = tmp_path / "file"
    path.touch()
    files, children = [], []
    stop = threading.Event()
    straight = os.open

    def slowly(where, *flags):
        fd = straight(where, *flags)
        time.sleep(0.002)
        return fd

    def open_files():
        while not stop.is_set() and len(files) < 300:
            files.append(LockFile(path))

    monkeypatch.setattr(os, "open", slowly)
    thread = threading.Thread(target=open_files)
    thread.start()
    try:
        for _ in range(30):
            children.append(forked(lambda: time.sleep(60)))
            time.sleep(0.001)
        stop.set()
        thread.join()
        for child in children:
            assert not [link for link in Path(f"/proc/{child}/fd").iterdir() if link.readlink() == path]
    finally:
        stop.set()
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for file in files:
            file.close()
    assert len(files) > 10


def test_a_lock_file_is_closed_once_whoever_closes_it(tmp_path):
    file = LockFile(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    first = file.fd
    file.close()
    other = os.open(tmp_path, os.O_RDONLY)  # takes the number
    assert (file.fd, other) == (-1, first)
    file.close()
    del file
    os.fstat(other)
    os.close(other)


def test_a_loader_s_name_is_busy_and_not_waited_for_in_a_child(engine):
    with engine.loader("replay", batch_size=4, name="mine", format="numpy"):

        def child():
            with conduit.attach(engine.name) as client, pytest.raises(Busy):
                client.loader("replay", batch_size=4, name="mine", format="numpy")

        assert ended(forked(child), 30) == 0
    assert loader_cursors.known_loaders(engine._segment)["mine"].table == "replay"
