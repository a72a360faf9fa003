"""Whether an engine still has the owner that a client attached under; the client is told when it has not, or the engine was closed.

One thread of a process looks after all its clients whose engines other processes own. A few times a second it asks the kernel
for the owner's lock (store.segment.locks): an owner that is stopped lives, and one that was killed is gone, whatever container it was in.
What it finds is noted where calls look anyway: in the client's seat, which each wait and each call outside the compiled paths
checks, and in the words of its writers, one of which `append` compares with the table's before each row. So neither a wait nor a
row costs more than without.

Importing this starts no thread, the first attach does. It ends where no client is left to look after, before a fork (in the
parent another one begins), and at the interpreter's exit. It takes no mutex, and is not told by anything that an exception can
interrupt halfway.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import time
import weakref
from pathlib import Path
from typing import Literal

from conduit.clock import Deadline
from conduit.store.segment.locks import LOCK_CREATOR, held
from conduit.store.segment.participants import Participants
from conduit.store.segment.segment import Segment

OnOwnerExit = Literal["raise", "stay"]

LOOK_EVERY = 0.2
"""Seconds between two looks."""

_PATIENCE = 1.0
_MOMENT = 0.0001

_watches: list[weakref.ref[Watch]] = []
_owned: set[tuple[int, int]] = set()
"""Segments that this process owns: it dies with their owner."""
_running: list[_Looking] = []


class Watch:
    """A client's look-out for its engine's end, as long as anything uses the client's seat.

    Args:
        segment: The client's.
        participants: Its seat; keeps this alive.
        on_owner_exit: "raise": OwnerGone from every call of the client once the owner is gone. "stay": it goes on.
    """

    def __init__(self, segment: Segment, participants: Participants, on_owner_exit: OnOwnerExit) -> None:
        self._segment = segment
        self._participants = weakref.ref(participants)
        self._ends = on_owner_exit == "raise"
        self._term = segment.term
        self._gone = False
        for one in tuple(_watches):
            if one() is None:
                _forget(one)
        self._reference: weakref.ref[Watch] = weakref.ref(self)
        participants.lookout = self
        _watches.append(self._reference)
        if self.is_foreign and not _running:
            _start()

    @property
    def is_foreign(self) -> bool:
        """Whether another process owns the engine."""
        return self._segment.identity not in _owned

    def look(self) -> None:
        """Tell the client, and again its writers: a call without the interpreter lock may just have turned their page."""
        participants = self._participants()
        if participants is None:
            return
        if self._segment.closed:
            participants.halt()
        elif self._ends and (self._gone or self._is_gone()):
            self._gone = True
            participants.lose_owner()

    def _is_gone(self) -> bool:
        fd = self._segment.lock_fd
        if fd < 0:
            return False
        if self._segment.term != self._term:
            return True
        try:
            alive = held(fd, LOCK_CREATOR, 1)
        except OSError:  # closed meanwhile
            return False
        return not alive and self._segment.lock_fd == fd and not self._segment.closed

    def end(self) -> None:
        """The client has closed."""
        _forget(self._reference)


def own(segment: Segment) -> None:
    """This process has become a segment's owner."""
    _owned.add(segment.identity)


def disown(segment: Segment) -> None:
    """This process has closed a segment that it owned; its own clients are told at once."""
    _owned.discard(segment.identity)
    _look()


def _forget(reference: weakref.ref[Watch]) -> None:
    with contextlib.suppress(ValueError):
        _watches.remove(reference)


def _look() -> bool:
    """Look once for all clients; False where none is in an engine of another process."""
    foreign = False
    for reference in tuple(_watches):
        watch = reference()
        if watch is not None:
            watch.look()
            foreign = foreign or watch.is_foreign
    return foreign


class _Looking:
    """A thread that looks, from `begin` until `end`."""

    def __init__(self) -> None:
        # the interpreter's own locks: what is written in Python may be interrupted inside, and stay locked
        self._told, self._ended = _thread.allocate_lock(), _thread.allocate_lock()
        self._told.acquire()
        self._ended.acquire()
        self._number = 0

    def begin(self) -> None:
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        self._number = _thread.get_native_id()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while not self._told.acquire(timeout=LOOK_EVERY):
                if not _look():
                    # whoever attaches from here on finds none running, or is seen by another look
                    try:
                        _running.remove(self)
                    except ValueError:  # `_stop` has taken it out, and waits for its end
                        return
                    if not _look():
                        return
                    _running.append(self)
        finally:
            self._ended.release()

    def end(self) -> None:
        """Have the thread end, and wait until it has, so that a fork meets none; idempotent."""
        with contextlib.suppress(RuntimeError):
            self._told.release()
        if self._ended.acquire(timeout=_PATIENCE):
            self._ended.release()
            deadline = Deadline(_PATIENCE)
            while Path(f"/proc/self/task/{self._number}").exists() and not deadline.passed():
                time.sleep(_MOMENT)


def _start() -> None:
    looking = _Looking()
    _running.append(looking)
    try:
        looking.begin()
    except BaseException:
        _running.remove(looking)
        raise


def _stop() -> None:
    while _running:
        _running.pop().end()


def _go_on() -> None:
    if not _running and any(watch is not None and watch.is_foreign for watch in (one() for one in tuple(_watches))):
        _start()


def _begin_anew() -> None:
    for inherited in (_watches, _owned, _running):
        inherited.clear()


atexit.register(_stop)
os.register_at_fork(before=_stop, after_in_parent=_go_on, after_in_child=_begin_anew)
