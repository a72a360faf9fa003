"""Deadlines: every wait in Conduit is bounded by one of these.

A deadline is made once, at the call that may block, and passed down, so that nested waits share one budget instead of adding up their
timeouts. The clock is the system's monotonic clock; tests pass their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from conduit.errors import ConfigError
from conduit.numbers import real

Clock = Callable[[], float]
"""Returns monotonic seconds."""


class Deadline:
    """A point in monotonic time after which a wait gives up.

    Args:
        timeout: Seconds from now; 0 tries once. None means a year, the longest timeout, which is practically no limit.
        clock: Monotonic seconds; `time.monotonic` unless a test needs its own.

    Raises:
        ConfigError: `timeout` is negative or not a number.
    """

    __slots__ = ("_clock", "_end", "timeout")

    FOREVER = 365.0 * 24 * 3600

    def __init__(self, timeout: float | None, clock: Clock = time.monotonic) -> None:
        seconds = self.FOREVER if timeout is None else real(timeout)
        if seconds is None or seconds < 0:
            raise ConfigError(
                f"Expected a timeout of at least 0 seconds, got {timeout!r}; pass None to wait without limit"
            )
        self.timeout = min(seconds, self.FOREVER)
        self._clock = clock
        self._end = clock() + self.timeout

    def left(self) -> float:
        """Seconds until the deadline, never below 0."""
        return max(0.0, self._end - self._clock())

    def passed(self) -> bool:
        """True once the deadline has passed."""
        return self._clock() >= self._end
