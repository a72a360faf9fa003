"""Eventcounts: how processes wait for each other's changes without asking again and again, and without missing one.

An event is two words: a count that every change raises, and a flag that says that somebody may be asleep. Who changes
something makes no system call while nobody waits; docs/memory-model.md has the argument.
"""

from __future__ import annotations

from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    FUTEX,
    exchange,
    fence_full,
    fetch_add,
    load_acquire,
    load_relaxed,
    store_relaxed,
    syscall,
)

_WAIT, _WAKE = 0, 1
_ALL = 1 << 30


@inner
def wake(event):
    """Tell every waiter of an eventcount that something changed; no system call when nobody waits."""
    fetch_add(event, 1)
    fence_full()
    if load_relaxed(event + 8) != 0 and exchange(event + 8, 0) != 0:
        syscall(FUTEX, event, _WAKE, _ALL, 0, 0, 0)


@kernel("int64(int64)")
def announce(event):
    """Say that somebody is about to wait; before the look at the condition, so that what comes after it wakes us."""
    store_relaxed(event + 8, 1)
    fence_full()
    return 0


@kernel("int64(int64, int64, int64)", nogil=True)
def wait(event, seen, timespec):
    """Sleep until the eventcount moves on from `seen` or the time is over; wakes early without harm.

    Args:
        event: Address of the eventcount.
        seen: Its value before the caller looked at the condition it waits for.
        timespec: Address of int64 [2]: seconds, nanoseconds.
    """
    if load_acquire(event) != seen:
        return 0
    return syscall(FUTEX, event, _WAIT, seen & 0xFFFFFFFF, timespec, 0, 0)
