"""Waiting for a condition on shared memory: a futex with a deadline. It never spins, and uses no lock that a dead process could keep."""

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
"""Longest single sleep, in seconds. A commit has no fence against a process that begins to wait at the same moment, so a wake-up can be
missed. The slice bounds the delay, lets signal handlers run, and lets the waiting process look for dead participants.
"""


def wait_for(
    attempt: Callable[[], T | None], event: int, words: memoryview, index: int, deadline: Deadline
) -> T | None:
    """Call `attempt` until it returns a value other than None, sleeping on an eventcount in between.

    Args:
        attempt: Returns None to go on waiting. It is called at least once, and once more after the last sleep before the deadline.
        event: Address of the eventcount.
        words: The segment as int64 words.
        index: Index of the eventcount in `words`.
        deadline: When to give up.

    Returns:
        The value that `attempt` returned, or None when the deadline passed.

    Raises:
        ActorError: A launched actor has failed for good (`conduit/alarms.py`), so waiting is of no use.
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
