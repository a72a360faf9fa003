"""Participants: the processes that are attached to a segment, each with a seat, and the recovery after dead ones.

A participant holds a kernel lock on its seat's byte of the segment, through a descriptor that is never mapped. However the process
dies, the kernel releases the lock after the process can no longer store to memory. A process that notices this takes the lock for a
moment, recovers the dead participant's pages and leases, and releases the lock. There is no heartbeat and no timeout: a stopped or slow
process keeps its lock, and nothing is taken from it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from conduit.clock import Deadline
from conduit.errors import Closed, ConduitError, EngineNotFound, Forked, OwnerGone, ParticipantsFull
from conduit.native.finish import when_gone
from conduit.native.jit import entry
from conduit.store.format import words as w
from conduit.store.format.layout import HEADER_CLOSED, LOADER_BYTES, MAX_NAMED_LOADERS
from conduit.store.pages import recovery
from conduit.store.pages.settling import settle_table
from conduit.store.segment import writer_counts
from conduit.store.segment.locks import LockByte, give_all, held, try_lock, unlock
from conduit.store.segment.segment import Segment

LINE_PID, LINE_SINCE, LINE_ROWS, LINE_ROLES, LINE_NAME = 0, 1, 2, 3, 4
"""Words of a participant's line; its process name takes the last 96 bytes."""

ROLES = ("owner", "writer", "loader", "consumer", "launcher")
"""What a participant has done since it joined; each is a bit of LINE_ROLES, for `conduit status` only."""

_PATIENCE = 1.0
"""Seconds for which a process that finds every seat taken looks again."""
_BETWEEN_LOOKS = 0.005

_open_handles: weakref.WeakSet[Participants] = weakref.WeakSet()


def _forget_in_child() -> None:
    # if the child kept the inherited descriptor open, it would keep its parent's lock after the parent's death
    for handle in list(_open_handles):
        handle.forget()


os.register_at_fork(after_in_child=_forget_in_child)


@dataclass(frozen=True, slots=True)
class Participant:
    """One participant, for status displays.

    Attributes:
        number: Its number, by which page words name it as owner.
        pid: Process that joined.
        name: That process's command name.
        alive: Whether the kernel says that it lives.
        since_ns: When it joined, nanoseconds since the epoch.
        rows_written: Rows that it has committed since it joined.
    """

    number: int
    pid: int
    name: str
    alive: bool
    since_ns: int
    rows_written: int


class Writing(Protocol):
    """An object that writes into the seat's pages by compiled calls."""

    def disarm(self) -> None:
        """In a forked child: give up the pages, which belong to the parent."""

    def halt(self) -> None:
        """Send the next row to the exact path, which checks the seat and the engine."""


class Participants:
    """This process's seat among the participants of a segment.

    Attributes:
        number: The participant number.
        counter: Address of its count of rows written.
        writing: The objects that write into its pages.
        lookout: The watch for the engine's end (store.segment.owner_watch), kept alive.
    """

    lookout: object = None

    def __init__(self, segment: Segment, tables: list[np.ndarray]) -> None:
        self._segment = segment
        self._tables = tables
        self._count: int = segment.layout.spec.max_participants
        self._lines = segment.array(segment.layout.participants, (self._count, 16), np.dtype(np.int64))
        self._hazards = segment.array(
            segment.layout.hazards, (self._count, w.HAZARDS_PER_PARTICIPANT), np.dtype(np.int64)
        )
        self.seat = segment.seat
        # threads of a process share the lock descriptor, so the kernel's lock does not exclude them from each other
        self._recovering = threading.Lock()
        self._playing = threading.Lock()
        self._last_look = 0.0
        self.forked = False
        self._refusal: tuple[type[ConduitError], str] | None = None
        self.writing: weakref.WeakSet[Writing] = weakref.WeakSet()
        self.number = -1
        _open_handles.add(self)  # before the lock is taken, since another thread may fork at any time
        # a client that is dropped without close() must not keep its seat: without its lock it counts as dead
        when_gone(self, entry(give_all), self.seat)
        self.number = self._join()
        self.seat[w.PROCESS_HAZARDS // 8] = self._hazards[self.number].ctypes.data
        self.seat[w.PROCESS_NUMBER // 8] = self.number

    def _join(self) -> int:
        number = self._take_seat()
        # the seat of a dead participant is locked while another process recovers it, which may be stopped in the middle
        deadline = Deadline(_PATIENCE)
        while number < 0 and not deadline.passed():
            time.sleep(_BETWEEN_LOOKS)
            number = self._take_seat()
        if not self._segment.is_current():
            # `clean` holds all locks while it removes a name; this lock may have been taken just after it
            raise EngineNotFound(f"Expected a running engine named {self._segment.name!r}, but it was just removed")
        if number < 0:
            raise ParticipantsFull(
                f"Expected a free participant slot in engine {self._segment.name!r}, all {self._count} are taken: "
                "detach some, or create the engine with a larger max_participants"
            )
        return number

    def _take_seat(self) -> int:
        """Lock a seat and write this process's line; returns the seat's number, or -1 when every seat is locked."""
        for number in range(self._count):
            if not try_lock(self._segment.lock_fd, number):
                continue
            self._recover(number)
            line = self._lines[number]
            line[LINE_SINCE] = time.time_ns()
            line[LINE_ROWS] = line[LINE_ROLES] = 0
            name = Path("/proc/self/comm").read_bytes().strip()[:95]
            line.view(np.uint8)[LINE_NAME * 8 :] = np.frombuffer(name.ljust(96, b"\0"), np.uint8)
            line[LINE_PID] = os.getpid()
            return number
        return -1

    @property
    def counter(self) -> int:
        """Address of this participant's count of rows written."""
        return self._lines[self.number, LINE_ROWS:].ctypes.data

    def add(self, writing: Writing) -> None:
        """Register an object that writes, to be told of a fork and of the engine's end; it is not kept alive."""
        self.writing.add(writing)

    def play(self, role: str) -> None:
        """Add one of ROLES to this participant's line, for `conduit status`."""
        if self.number >= 0:
            with self._playing:
                self._lines[self.number, LINE_ROLES] |= 1 << ROLES.index(role)

    def forget(self) -> None:
        """In a forked child: give up the seat, which belongs to the parent."""
        self.forked = True
        self._refusal = (
            Forked,
            f"Expected a handle opened in this process, got one inherited through a fork: "
            f"call conduit.attach({self._segment.name!r}) in the child",
        )
        for one in self.writing:
            one.disarm()
        self._segment.release_locks()

    def lose_owner(self) -> None:
        """Refuse every use from now on, since the engine's owner is gone; leases and claims can still be given back."""
        name = self._segment.name
        self._refusal = (
            OwnerGone,
            f"Expected the owner of engine {name!r} to live, but its process is gone. Rows that were committed stay: another "
            f"owner goes on with them by conduit.Engine.adopt({name!r}) or conduit.Engine.create({name!r}, ..., exist_ok=True); "
            "attach to that one, or attach with on_owner_exit='stay' to wait for it",
        )
        self.halt()

    def halt(self) -> None:
        """Make every writer of this seat check the engine's state before its next row."""
        for one in tuple(self.writing):
            one.halt()

    @property
    def seated(self) -> bool:
        """False once this process may not touch the seat's pages and leases: after a fork, after `leave`, or without its lock.

        Garbage collection releases the lock before it finalizes writers and leases of the same reference cycle; by then another
        participant may have their pages.
        """
        return bool(self.seat[w.PROCESS_NUMBER // 8] >= 0)

    @property
    def has_lost_owner(self) -> bool:
        """Whether this client has ended with its engine's owner."""
        return self._refusal is not None and self._refusal[0] is OwnerGone

    def check(self) -> None:
        """Refuse use in a forked child, and without an owner.

        Raises:
            Forked: This handle was opened before a fork.
            OwnerGone: The engine's owner is gone, and this client ends with it.
        """
        if self._refusal is not None:
            kind, message = self._refusal
            raise kind(message)

    def check_open(self) -> None:
        """Refuse work if the engine or this client has closed, or if `check` refuses; every call checks this first.

        Raises:
            Closed: The engine has closed, or this client has.
            Forked, OwnerGone: As `check`.
        """
        if self.number < 0:
            raise closed_client(self._segment.name)
        if self._refusal is not None:
            self.check()
        if self._segment.words[HEADER_CLOSED // 8] != 0:
            raise Closed(f"Expected engine {self._segment.name!r} to be running, it has been closed by its owner")

    def leave(self) -> None:
        """Give the seat back; the caller has closed its writers before. Idempotent."""
        if self.number >= 0 and not self.forked and self._segment.lock_fd >= 0:
            self.seat[w.PROCESS_NUMBER // 8] = -1
            self._recover(self.number)
            self._lines[self.number, LINE_PID] = 0
            unlock(self._segment.lock_fd, self.number)
        self.number = -1
        _open_handles.discard(self)

    # -- the dead

    def _recover(self, number: int) -> int:
        """Recover a dead participant's pages, leases and names; the caller holds its lock."""
        died = number != self.number and self._lines[number, LINE_PID] != 0
        if died:
            # it died without leaving, possibly in the middle of an update of priorities
            for table in self._tables:
                entry(recovery.outdate_sums)(table.ctypes.data)
        # the next line clears the seat's line
        writer_counts.empty(self._segment, number, died=died)
        pages = sum(entry(recovery.recover)(table.ctypes.data, number) for table in self._tables)
        for table in self._tables:
            settle_table(table)
        entry(recovery.clear_hazards)(self._hazards[number].ctypes.data, w.HAZARDS_PER_PARTICIPANT)
        # the names of its loaders are free again (conduit.store.tables.loader_cursors.LOADER_OWNER)
        loaders = self._segment.base + self._segment.layout.loaders
        entry(recovery.clear_marks)(loaders, LOADER_BYTES, MAX_NAMED_LOADERS, number + 1)
        return pages

    def recover_dead(self) -> int:
        """Find dead participants and take back their pages and leases; returns the number of pages.

        Idempotent; any number of processes may call it at the same time. Costs one system call per seat in use.
        """
        pages = 0
        self._last_look = time.monotonic()
        with self._recovering:
            lock = LockByte(self.seat)
            try:
                for number in np.flatnonzero(self._lines[:, LINE_PID]).tolist():
                    if number == self.number or not lock.take(number):
                        continue
                    pages += self._recover(number)
                    self._lines[number, LINE_PID] = 0
                    lock.give()
            finally:
                lock.give()
        return pages

    def look_after_dead(self, every: float = 0.5) -> int:
        """`recover_dead`, at most once in `every` seconds."""
        return self.recover_dead() if time.monotonic() - self._last_look > every else 0

    def list(self) -> list[Participant]:
        """All seats that are in use, or were in use and are not cleared yet."""
        found = []
        for number in np.flatnonzero(self._lines[:, LINE_PID]).tolist():
            line = self._lines[number].copy()
            alive = number == self.number or held(self._segment.lock_fd, number, 1)
            name = line.view(np.uint8)[LINE_NAME * 8 :].tobytes().split(b"\0")[0].decode("utf-8", "replace")
            found.append(
                Participant(number, int(line[LINE_PID]), name, alive, int(line[LINE_SINCE]), int(line[LINE_ROWS]))
            )
        return found


def closed_client(engine: str) -> Closed:
    """The error for the use of a closed client."""
    return Closed(f"Expected an attached client of engine {engine!r}, got one that was closed")


def play_everywhere(role: str) -> None:
    """Add a role to the lines of all of this process's participants."""
    for one in list(_open_handles):
        if not one.forked:
            one.play(role)
