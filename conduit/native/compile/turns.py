"""Turns at compiling: of several processes that miss a kernel, one compiles it and the others wait for what it keeps.

A turn is a byte of a file beside the cached kernels, locked for the open file description: the system gives it back with the
process that held it, however that ends. Kernels have bytes of their own, so processes that miss different ones do not wait for each
other. A wait has a deadline; who reaches it compiles for itself.

The first turn of a process that takes it beyond a second altogether says so, in one line on stderr, unless `CONDUIT_KERNELS_QUIET` is set.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import sys
import time
import zlib
from collections.abc import Generator, Iterable
from pathlib import Path

from conduit.clock import Deadline
from conduit.forking import drop_in_child

LOCK_FILE = "conduit-compiling.lock"
QUIET = "CONDUIT_KERNELS_QUIET"
_PATIENCE = 300.0
"""Seconds to wait for another process's kernel."""
_SILENT = 1.0
"""Seconds of compiling and waiting that nothing is said of."""
_PAUSE = 0.02
_BYTES = 1 << 30


class _Patience:
    """What this process has spent on turns, and whether it has said so."""

    seconds = 0.0
    told = False


def _say(text: str) -> None:
    if _Patience.told or os.environ.get(QUIET):
        return
    _Patience.told = True
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"conduit: {text}", file=sys.stderr, flush=True)


def hush() -> None:
    """Say nothing in this process, which itself says what it does."""
    _Patience.told = True


def _kept(folder: str) -> str:
    return f"kept in {folder} for the next process" if folder else "not kept: no folder to write to was found"


@contextlib.contextmanager
def _timed(folder: str) -> Generator[None]:
    if _Patience.seconds > _SILENT:
        _say(
            f"compiling kernels for this machine, a second or so each, which may take a minute the first time; {_kept(folder)}; "
            "`conduit warm` does it beforehand"
        )
    began = time.monotonic()
    try:
        yield
    finally:
        _Patience.seconds += time.monotonic() - began


@contextlib.contextmanager
def alone() -> Generator[None]:
    """A turn that no other process has to know of, since what is compiled cannot be kept."""
    with _timed(""):
        yield


@contextlib.contextmanager
def turn(folder: str, name: str, patience: float = _PATIENCE) -> Generator[None]:
    """A turn at compiling one kernel, which begins when no other process has it. The kernel may have been kept by then.

    Args:
        folder: Where it is kept.
        name: Of the file there that it is listed in.
        patience: Seconds to wait for another process.
    """
    file = _opened(folder)
    if file is None:
        with _timed(folder):
            yield
        return
    try:
        _await(file.fd, zlib.crc32(name.encode()) % _BYTES, folder, patience)
        with _timed(folder):
            yield
    finally:
        file.close()


def others(folders: Iterable[str]) -> bool:
    """Whether another process has a turn at a kernel that is kept in one of these folders."""
    for folder in folders:
        with contextlib.suppress(OSError), (Path(folder) / LOCK_FILE).open("rb") as file:
            request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, _BYTES, 0)
            if struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_OFD_GETLK, request))[0] != fcntl.F_UNLCK:
                return True
    return False


class _LockFile:
    """A descriptor that turns are taken on.

    It is no conduit.forking.LockFile: who opens such a one may have to compile a kernel first, so the two locks would be taken in either
    order. Forks wait until nobody compiles (conduit.native.jit), so none comes in between here.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)]
        drop_in_child(self)

    @property
    def fd(self) -> int:
        return self._open[0]

    def close(self) -> None:
        """Give its locks back, which a fork at this moment may take along with the description, and close it."""
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
        self.drop()

    def drop(self) -> None:
        """In a forked child: the locks are the parent's."""
        with contextlib.suppress(IndexError, OSError):
            os.close(self._open.pop())


def _opened(folder: str) -> _LockFile | None:
    """The lock file of a folder; None where there can be none, and everybody compiles for himself."""
    try:
        return _LockFile(Path(folder) / LOCK_FILE)
    except OSError:
        return None


def _await(fd: int, byte: int, folder: str, patience: float) -> None:
    deadline, began = Deadline(patience), time.monotonic()
    try:
        while not _taken(fd, byte):
            if deadline.left() == 0.0:
                return
            if _Patience.seconds + time.monotonic() - began > _SILENT:
                _say(
                    "another process is compiling kernels for this machine, this one waits for them, which may take a minute "
                    f"the first time; {_kept(folder)}; `conduit warm` does it beforehand"
                )
            time.sleep(_PAUSE)
    finally:
        _Patience.seconds += time.monotonic() - began


def _taken(fd: int, byte: int) -> bool:
    """Take the lock of a byte; True also where the file system has no locks."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True
