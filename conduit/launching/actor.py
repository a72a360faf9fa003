"""The first argument of an actor function: which actor it is, and whether it should stop."""

from __future__ import annotations

import select
import time
from typing import Literal

from conduit.clock import Deadline
from conduit.numbers import at_least

State = Literal["running", "returned", "failed", "stopped"]


class Actor:
    """The first argument of an actor function that `conduit.launch` started.

    An Actor that you make yourself, such as `act(conduit.Actor(), "engine")` in a test, is never told to stop.

    Attributes:
        index: Its number among the actors of its launch, from 0; restarts keep it.
        count: How many actors the launch has.
        attempt: How often it was started before, 0 at first.
    """

    __slots__ = ("_can_stop", "_stop", "attempt", "count", "index")

    def __init__(self, index: int = 0, count: int = 1, attempt: int = 0, *, stop: int | None = None) -> None:
        self.index = at_least("index", index, 0)
        self.count = at_least("count", count, 1)
        self.attempt = at_least("attempt", attempt, 0)
        # A descriptor that becomes readable when the owner tells the actor to stop, or is gone.
        self._stop = select.poll()
        self._can_stop = stop is not None
        if stop is not None:
            self._stop.register(stop, select.POLLIN)

    @property
    def stopping(self) -> bool:
        """Whether the owner wants the function to return; takes about a microsecond, so a loop may check it in every step."""
        return self._can_stop and bool(self._stop.poll(0))

    def wait(self, timeout: float) -> bool:
        """Sleep up to `timeout` seconds, less if the actor is told to stop; returns `stopping`.

        Raises:
            ConfigError: `timeout` is negative or not a number.
        """
        deadline = Deadline(timeout)
        if not self._can_stop:
            time.sleep(deadline.left())
            return False
        return bool(self._stop.poll(deadline.left() * 1000.0))

    def seed(self, base: int) -> int:
        """The actor's own 32-bit seed: a function of a job's seed `base`, the index and the attempt, the same on every machine.

        An actor that is started again gets another seed, so that it does not repeat the steps that ended it.

        Raises:
            ConfigError: `base` is not an integer of at least 0.
        """
        from numpy.random import SeedSequence

        (state,) = SeedSequence((at_least("base", base, 0), self.index, self.attempt)).generate_state(1)
        return int(state)

    def __repr__(self) -> str:
        again = f", attempt {self.attempt}" if self.attempt else ""
        return f"<Actor {self.index} of {self.count}{again}{', stopping' if self.stopping else ''}>"
