"""Lock bytes: who is alive, as the kernel tells it.

A lock byte belongs to one open file description and goes when that is closed, so also however its process dies. The bytes
lie far beyond the end of any segment. One description serves all threads of a process: they must keep apart by themselves.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import struct
from typing import Any

import numpy as np

from conduit.forking import drop_in_child, opening
from conduit.native.finish import when_gone
from conduit.native.jit import entry, inner, kernel
from conduit.native.memory import data_of, peek_i64, poke_i64, syscall
from conduit.store.format import words as w

Array = np.ndarray[Any, np.dtype[np.int64]]

LOCK_BASE = 1 << 40
"""First lock byte; lock bytes lie far beyond the end of any segment. Byte LOCK_BASE + p belongs to participant p."""
LOCK_SPAN = 1 << 20
LOCK_PUBLISHERS = 1 << 16
"""Lock byte LOCK_BASE + LOCK_PUBLISHERS + i is held by the publisher of weights slot i."""
LOCK_LIMITS = LOCK_SPAN - 2
"""Held by whoever changes a table's limits."""
LOCK_LOADERS = 1 << 17
"""Held for a moment by who takes or registers a loader's name."""
LOCK_CREATOR = LOCK_SPAN - 1

_CLOSE = {"x86_64": 3, "aarch64": 57}.get(platform.machine(), -1)
_FCNTL = {"x86_64": 72, "aarch64": 25}.get(platform.machine(), -1)
_OPENAT = {"x86_64": 257, "aarch64": 56}.get(platform.machine(), -1)
_HERE = -100
_SET_LOCK, _WRITE, _UNLOCK = fcntl.F_OFD_SETLK, fcntl.F_WRLCK, fcntl.F_UNLCK

LOCK_BYTE_NUMBER, LOCK_BYTE_HELD, LOCK_BYTE_REQUEST = 0, 8, 16
"""Words of a `LockByte`: its byte; 1 while it is held; the struct flock that the kernel reads."""
LOCK_BYTE_WORDS = 6


def try_lock(fd: int, byte: int, length: int = 1) -> bool:
    """Take the write lock on lock byte(s); False when another open file description holds one of them."""
    return _set_lock(fd, fcntl.F_WRLCK, byte, length)


def unlock(fd: int, byte: int, length: int = 1) -> None:
    """Give lock byte(s) back."""
    _set_lock(fd, fcntl.F_UNLCK, byte, length)


def _set_lock(fd: int, kind: int, byte: int, length: int) -> bool:
    # open file description locks: a plain POSIX lock would be lost when the process closes any descriptor of the file
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, LOCK_BASE + byte, length, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def held(fd: int, byte: int = 0, length: int = LOCK_SPAN) -> bool:
    """True when somebody else holds any of these lock bytes."""
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LOCK_BASE + byte, length, 0)
    answer = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request))
    return bool(answer[0] != fcntl.F_UNLCK)


@inner
def _ask(lock, seat, kind):
    """`_set_lock` on the byte of a LockByte; 0 where it was done."""
    request = lock + LOCK_BYTE_REQUEST
    poke_i64(request, kind)
    poke_i64(request + 8, LOCK_BASE + peek_i64(lock + LOCK_BYTE_NUMBER))
    poke_i64(request + 16, 1)
    poke_i64(request + 24, 0)
    return syscall(_FCNTL, peek_i64(seat + w.PROCESS_LOCK), _SET_LOCK, request, 0, 0, 0)


@kernel("int64(object, object, int64)")
def take_byte(words, seat, byte):
    """Take a lock byte and note it; 1, or 0 when somebody else has it."""
    lock = data_of(words)
    poke_i64(lock + LOCK_BYTE_NUMBER, byte)
    taken = 1 if _ask(lock, data_of(seat), _WRITE) == 0 else 0
    if taken != 0:
        poke_i64(lock + LOCK_BYTE_HELD, 1)
    return taken


@kernel("int64(object, object, object)")
def give_byte(words, seat, _thing):
    """Give a lock byte back if it is held. Idempotent (conduit.native.finish)."""
    lock = data_of(words)
    if peek_i64(lock + LOCK_BYTE_HELD) != 0:
        poke_i64(lock + LOCK_BYTE_HELD, 0)
        _ask(lock, data_of(seat), _UNLOCK)
    return 0


@kernel("int64(object, object)")
def give_all(seat, _thing):
    """Close the lock descriptor: every lock of this handle is given back. Idempotent (conduit.native.finish)."""
    at = data_of(seat)
    fd = peek_i64(at + w.PROCESS_LOCK)
    poke_i64(at + w.PROCESS_LOCK, -1)
    poke_i64(at + w.PROCESS_NUMBER, -1)
    if fd >= 0:
        syscall(_CLOSE, fd, 0, 0, 0, 0, 0)
    return 0


@kernel("int64(object, object, int64, int64)")
def _open_kept(words, path, flags, mode):
    """Open the file of a name that ends with a zero byte, and note the descriptor; it is negative where that failed."""
    fd = syscall(_OPENAT, _HERE, data_of(path), flags, mode, 0, 0)
    poke_i64(data_of(words), fd)
    return fd


@kernel("int64(object, object)")
def _close_kept(words, _thing):
    fd = peek_i64(data_of(words))
    poke_i64(data_of(words), -1)
    if fd >= 0:
        syscall(_CLOSE, fd, 0, 0, 0, 0, 0)
    return 0


class _Kept:
    """Has a descriptor until it is handed on."""


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
    """`os.open`, of which an interrupt between the system call and the caller leaves nothing open.

    Raises:
        OSError: As `os.open`.
    """
    kept, words = _Kept(), np.full(1, -1, np.int64)
    when_gone(kept, entry(_close_kept), words)
    name = np.frombuffer(os.fsencode(path) + b"\0", np.uint8)
    if entry(_open_kept)(words, name, flags, mode) < 0:
        return os.open(path, flags, mode)  # says what is wrong
    fd = int(words[0])
    # from here to the caller's next statement no signal is looked at
    words[0] = -1
    return fd


class Locks:
    """A process's hold on a segment: its lock descriptor, and what it has taken under it; all of it ends with the object.

    Attributes:
        seat: int64 words (words.PROCESS_*), as kernels note what is held.
    """

    def __init__(self) -> None:
        self.seat = np.zeros(w.PROCESS_WORDS, np.int64)
        self.seat[w.PROCESS_NUMBER // 8] = -1
        self.seat[w.PROCESS_LOCK // 8] = -1
        when_gone(self, entry(give_all), self.seat)

    def open(self, path: str) -> None:
        """Open the descriptor on a segment's file."""
        # a fork in between would give the child a descriptor that nobody there knows of
        with opening():
            self.seat[w.PROCESS_LOCK // 8] = open_file(path, os.O_RDWR | os.O_CLOEXEC)
            drop_in_child(self)

    @property
    def fd(self) -> int:
        """The descriptor, which is never mapped (a mapping would keep its locks alive in forked children), or -1."""
        return int(self.seat[w.PROCESS_LOCK // 8])

    def close(self) -> None:
        """Give every lock back; idempotent."""
        entry(give_all)(self.seat, None)

    def drop(self) -> None:
        """In a forked child: the locks are the parent's."""
        self.close()


class LockByte:
    """A lock byte of a segment that is held for a moment: from `take` until `give`, and no longer than the object lives.

    The threads of a process must keep apart by themselves.

    Args:
        seat: The process's seat (words.PROCESS_*).
    """

    def __init__(self, seat: Array) -> None:
        self._seat = seat
        self._words = np.zeros(LOCK_BYTE_WORDS, np.int64)
        when_gone(self, entry(give_byte), self._words, seat)

    def take(self, byte: int) -> bool:
        """Take a byte, while none is held; False when another open file description holds it."""
        return entry(take_byte)(self._words, self._seat, byte) != 0

    def give(self) -> None:
        """Give it back; idempotent."""
        entry(give_byte)(self._words, self._seat, None)
