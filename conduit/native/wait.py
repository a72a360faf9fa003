"""Waiting for a condition on shared memory: a futex with a deadline, never a spin, never a lock a dead process can keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from conduit import alarms
from conduit.clock import Deadline
from conduit.native import memory
from conduit.native.jit import entry

T = TypeVar("T")

SLICE = 0.02
"""Longest single sleep, seconds. A commit does not fence against a waiter that announces itself in the same instant, so a
wake-up can be missed; the slice bounds what that costs, lets signals through and lets the waiter look for dead participants."""


def wait_for(
    attempt: Callable[[], T | None], event: int, words: memoryview, index: int, deadline: Deadline
) -> T | None:
    """Call `attempt` until it returns something, sleeping on an eventcount in between.

    Args:
        attempt: Returns None to go on waiting. It is called at least once, and again after the deadline's last sleep.
        event: Address of the eventcount.
        words: The segment as int64 words.
        index: Index of the eventcount in `words`.
        deadline: When to give up.

    Returns:
        What `attempt` returned, or None when the deadline passed.

    Raises:
        ActorError: An alarm (`conduit/alarms.py`) has it that waiting is of no use.
    """
    timespec = np.zeros(2, np.int64)
    sleep = entry(memory.wait)
    while True:
        entry(memory.announce)(event)
        seen = words[index]
        result = attempt()
        if result is not None or deadline.passed():
            return result
        alarms.look()
        timespec[1] = int(min(SLICE, deadline.left()) * 1e9)
        sleep(event, seen, timespec.ctypes.data)
