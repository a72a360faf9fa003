"""Lock bytes: who is alive, as the kernel tells it.

A lock byte belongs to one open file description and goes when that is closed, so also however its process dies. The bytes
lie far beyond the end of any segment. One description serves all threads of a process: they must keep apart by themselves.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

LOCK_BASE = 1 << 40
"""First lock byte; lock bytes lie far beyond the end of any segment. Byte LOCK_BASE + p belongs to participant p."""
LOCK_SPAN = 1 << 20
LOCK_PUBLISHERS = 1 << 16
"""Lock byte LOCK_BASE + LOCK_PUBLISHERS + i is held by the publisher of weights slot i."""
LOCK_LOADERS = 1 << 17
"""Held for a moment by who takes or registers a loader's name."""
LOCK_CREATOR = LOCK_SPAN - 1


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
