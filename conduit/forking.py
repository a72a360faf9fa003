"""Forks, and objects that must stay in their process: mutexes, descriptors with kernel locks, and handles of an engine.

Only the forking thread goes on in the child. A mutex that another thread held would stay locked there for ever, so the child makes new
ones of all mutexes that a new attach needs. A kernel lock belongs to an open file description, which the child shares: the lock would
outlive its holder as long as the child lives. So the child closes such descriptors before it does anything else.

Handles of an engine consist of addresses and locks of their process, so they can be neither copied nor pickled (`StaysHere`).

Destructors take no mutex: garbage collection may run them at any allocation, also in the thread that holds the mutex.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from conduit.errors import Unsendable

_PATIENCE = 10.0
"""Seconds that a fork waits for other threads to finish guarded work; then it goes on all the same."""

_UNLOCK_ALL = struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)

_opening = threading.RLock()
_mutexes: list[tuple[Any, str, Callable[[], Any], bool]] = []
_taken = threading.local()
_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_in_child(module: str, name: str, make: Callable[[], Any], *, whole: bool = False) -> None:
    """Replace a mutex by a new one in forked children, whether or not a thread held it.

    Args:
        module: Name of the module whose global it is.
        name: Its name there.
        make: threading.Lock, or threading.RLock.
        whole: Make a fork wait until no other thread holds it (an RLock), since the work that it guards must not be half done in the
            child.
    """
    _mutexes.append((sys.modules[module], name, make, whole))


def opening() -> Any:
    """A lock to hold while a descriptor for kernel locks is opened and passed to `drop_in_child`, so that no fork comes in between."""
    return _opening


class StaysHere:
    """An object that belongs to the process that opened it. `_elsewhere` says what another process does instead, for the error."""

    __slots__ = ()
    _elsewhere = "open one there"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise Unsendable(
            f"Expected something that can be copied or pickled, got a {type(self).__name__}, which belongs to the process that opened "
            f"it: send the client, which attaches again by its engine's name where it arrives, and {self._elsewhere}"
        )


class Droppable(Protocol):
    """An object with a descriptor for kernel locks."""

    def drop(self) -> None:
        """In a forked child: close the descriptor, and leave its locks to the parent."""


def drop_in_child(holder: Droppable) -> None:
    """Make forked children drop a holder's descriptor; the holder is not kept alive."""
    _holders.add(holder)


class LockFile:
    """A descriptor for kernel locks. It is never mapped, and a forked child closes it at once.

    Args:
        path: A file, or a folder.
        flags: As for `os.open`.
    """

    def __init__(self, path: str | os.PathLike[str], flags: int = os.O_RDWR) -> None:
        self._open: list[int] = []
        with opening():
            self._open.append(os.open(path, flags | os.O_CLOEXEC))
            drop_in_child(self)

    @property
    def fd(self) -> int:
        """The descriptor; -1 once it is closed."""
        return self._open[0] if self._open else -1

    def close(self) -> None:
        """Release its locks and close it; idempotent, and safe in a destructor."""
        fd = self.fd
        if fd < 0:
            return
        # first: a fork at this moment may take the description along, and no lock with it
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _UNLOCK_ALL)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        self.drop()

    def drop(self) -> None:
        """In a forked child: the locks are the parent's."""
        with contextlib.suppress(IndexError):  # a destructor has closed it already
            os.close(self._open.pop())

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit the kernel closes it
            self.close()


def _before() -> None:
    _taken.mutexes = []
    for module, name, _, whole in _mutexes:
        mutex = getattr(module, name)
        if whole and mutex.acquire(timeout=_PATIENCE):
            _taken.mutexes.append(mutex)


def _in_parent() -> None:
    for mutex in _taken.mutexes:
        mutex.release()


def _in_child() -> None:
    for holder in list(_holders):
        holder.drop()
    for module, name, make, _ in _mutexes:
        setattr(module, name, make())


renew_in_child(__name__, "_opening", threading.RLock, whole=True)
os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
