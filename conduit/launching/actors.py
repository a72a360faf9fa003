"""The handle of a launch: the state of its actors, their failures, and their end."""

from __future__ import annotations

import atexit
import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from conduit import alarms
from conduit.clock import Deadline
from conduit.errors import ActorError, Closed, ConfigError, Forked, WaitTimeout
from conduit.launching.actor import State
from conduit.launching.deaths import again
from conduit.numbers import whole

if TYPE_CHECKING:
    from conduit.launching.crew import Crew

_SLICE = 0.02


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """The state of one actor.

    Attributes:
        index: Its number, from 0.
        state: "running"; "returned" if its function has returned; "failed" if it died and is not started again; "stopped" if it
            had to be ended after it was told to stop.
        pid: Process id of its present or last process.
        attempt: How often it was started again.
    """

    index: int
    state: State
    pid: int
    attempt: int


class Actors:
    """Actors that `conduit.launch` started: a context manager that ends them when its block is left.

    Invariant: when `close` or `abort` has returned, no process of an actor's process group is left.
    """

    def __init__(self, crew: Crew, name: str) -> None:
        self._crew = crew
        self._name = name
        self._owner = os.getpid()
        self._closed = False
        alarms.add(self._look)
        atexit.register(self.close)

    def status(self) -> tuple[ActorStatus, ...]:
        """Every actor as it is now."""
        return tuple(ActorStatus(one.index, one.state, one.pid, one.attempt) for one in self._crew.members)

    @property
    def running(self) -> int:
        """Number of actors that have not returned, failed or been stopped."""
        return self._crew.running

    @property
    def failures(self) -> tuple[ActorError, ...]:
        """One error for each actor that failed for good, in the order of the failures."""
        return tuple(again(error) for error in self._crew.failures)

    def check(self) -> None:
        """Return at once if no actor has failed for good; under a microsecond, so a loop may call it for each batch.

        Raises:
            ActorError: An actor failed for good. The error is the first failure; its notes have the messages of the others, and
                `failures` has all errors.
        """
        if self._crew.error is not None:
            raise self._crew.error
        if self._crew.failures:
            first, *others = self.failures
            for other in others:
                first.add_note(str(other))
            raise first

    def join(self, timeout: float | None = None) -> None:
        """Wait until every actor function has returned.

        Args:
            timeout: Seconds; None waits without limit.

        Raises:
            ActorError: An actor failed for good, before or during the wait.
            WaitTimeout: Some actors still run.
            Forked: This process is a child of the one that launched them.
        """
        self._check_owner()
        deadline = Deadline(timeout)
        while True:
            running = self.running
            self.check()
            if not running:
                return
            if deadline.passed():
                raise WaitTimeout(
                    f"Expected every actor to return within {deadline.timeout:g} s, {running} of {len(self)} still run: "
                    "wait longer, or leave the block to stop them"
                )
            self._crew.thread.join(min(_SLICE, deadline.left()))

    def kill(self, index: int) -> None:
        """Kill one actor's process, such as one that hangs; it is started again as after any death.

        Raises:
            ConfigError: There is no such actor.
            Closed: The actors have been ended.
            Forked: This process is a child of the one that launched them.
        """
        self._check_owner()
        number = whole(index)
        if number is None or not 0 <= number < len(self):
            raise ConfigError(f"Expected the index of an actor, from 0 to {len(self) - 1}, got {index!r}")
        if self._closed:
            raise Closed("The actors have been ended")
        self._crew.kill(number)

    def close(self) -> None:
        """Tell the actors to return. Those that still run after the launch's `grace` get SIGTERM, and 2 s later SIGKILL.

        SIGTERM raises an exception in the actor function, so that its `with` blocks end. Idempotent; does nothing in a forked child. If
        an exception, such as a second Ctrl-C, interrupts this call, it kills the actors at once and raises the exception.

        Raises:
            WaitTimeout: The kernel did not remove a killed process within 10 s.
        """
        if not self._closed and os.getpid() == self._owner:
            alarms.remove(self._look)
            try:
                self._crew.stop()
                self._wait()
            except BaseException:
                self.abort()
                raise

    def abort(self) -> None:
        """Kill the actors at once. Rows that they committed stay. Idempotent; does nothing in a forked child.

        Raises:
            WaitTimeout: As `close`.
        """
        if not self._closed and os.getpid() == self._owner:
            alarms.remove(self._look)
            self._crew.abort()
            self._wait()

    def _wait(self) -> None:
        while self._crew.thread.is_alive():  # the thread's own deadlines bound this wait
            self._crew.thread.join(_SLICE)
        self._closed = True
        atexit.unregister(self.close)
        self._crew.close()
        if isinstance(self._crew.error, WaitTimeout):
            raise self._crew.error

    def _look(self) -> None:
        """The alarm (conduit.alarms): if every actor has ended and one has failed, no rows will come, so waits raise."""
        if self._crew.failures and not self.running and os.getpid() == self._owner:
            self.check()

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise Forked(f"The actors were launched by the process {self._owner}, and belong to it: launch others here")

    def __len__(self) -> int:
        return len(self._crew.members)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self.close()
        if error is None:
            self.check()
        else:
            for failure in self._crew.failures:
                error.add_note(f"{failure}\n{failure.traceback}".rstrip())

    def __repr__(self) -> str:
        states = Counter(member.state for member in self._crew.members)
        return f"<Actors of {self._name}: {', '.join(f'{count} {state}' for state, count in states.items())}>"
