"""Watches whether the owner of a client's engine still lives and whether the engine was closed, and tells the client.

One thread per process watches for all clients whose engines other processes own. A few times a second it asks the kernel about the
owner's lock (store.segment.locks): a stopped owner lives, and a killed owner is gone, in whatever container it ran. The thread notes a
change in words that calls read anyway: in the client's seat, which each wait and each call outside the compiled paths checks, and in a
word of its writers that `append` compares before each row. So the watch adds no cost to a wait or a row.

Importing this module starts no thread; the first attach does. The thread ends when no client is left to watch for, before a fork (the
parent starts a new one), and at the interpreter's exit. It takes no mutex, and an exception in another thread cannot leave it in a
half-done state.
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
"""Segments that this process owns, which need no watch."""
_running: list[_Looking] = []


class Watch:
    """A client's watch for the end of its engine, as long as anything uses the client's seat.

    Args:
        segment: The client's segment.
        participants: The client's seat, which keeps the watch alive.
        on_owner_exit: "raise": every call of the client raises OwnerGone once the owner is gone. "stay": the client goes on.
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
        """Look once, and tell the client and its writers. Writers are told again each time: a compiled call may just have turned a page."""
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
        except OSError:  # the client was closed meanwhile
            return False
        return not alive and self._segment.lock_fd == fd and not self._segment.closed

    def end(self) -> None:
        """End the watch: the client has closed."""
        _forget(self._reference)


def own(segment: Segment) -> None:
    """Note that this process has become a segment's owner."""
    _owned.add(segment.identity)


def disown(segment: Segment) -> None:
    """Note that this process has closed a segment that it owned, and tell its own clients at once."""
    _owned.discard(segment.identity)
    _look()


def _forget(reference: weakref.ref[Watch]) -> None:
    with contextlib.suppress(ValueError):
        _watches.remove(reference)


def _look() -> bool:
    """Look once for all clients; False if no client's engine has another process as its owner."""
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
        # locks of the interpreter: an exception can interrupt a lock that is written in Python, and leave it locked
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
                    # a client that attaches from here on finds no running thread and starts one, or the next look sees it
                    try:
                        _running.remove(self)
                    except ValueError:  # `_stop` has removed this thread, and waits for its end
                        return
                    if not _look():
                        return
                    _running.append(self)
        finally:
            self._ended.release()

    def end(self) -> None:
        """End the thread and wait for its end, so that a fork finds none; idempotent."""
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
