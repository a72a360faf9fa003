"""The thread that starts actors' processes, notices their ends, starts them again, and ends them.

This thread starts every process, because the kernel kills a process when the thread that started it ends (PR_SET_PDEATHSIG). So the
thread lives as long as the processes. It alone writes the state in this module; other threads read it.

Invariants: when the thread has ended, no process is left, or the error names the process that the kernel did not remove. An actor is
started again at most `restarts` times in any `per` seconds; after one more death it has failed.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from signal import SIGKILL, SIGTERM
from typing import Any

from conduit.clock import Deadline
from conduit.errors import ActorError, WaitTimeout
from conduit.launching.actor import State
from conduit.launching.deaths import again, describe, make_error
from conduit.launching.payload import Payload
from conduit.launching.process import Process
from conduit.launching.report import TERMINATED, Report

_TERM_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL."""

_KILL_PATIENCE = 10.0
"""Seconds for the kernel to remove a killed process; one that hangs in a driver or on a dead disk takes longer."""

_TICK = 0.02
"""Seconds between two checks of a process whose end the kernel does not report, or that is being ended."""

_ATTENTION = 1.0
"""Seconds between two checks of processes whose end the kernel reports."""

_OURS = (-SIGKILL, -SIGTERM, TERMINATED)
"""Exit codes of a process that Conduit has ended."""

_log = logging.getLogger("conduit.launch")


@dataclass(frozen=True, slots=True)
class Options:
    """How actors are started, started again and ended; see `conduit.launch`."""

    count: int
    restarts: int
    per: float
    grace: float
    env: Mapping[str, str]
    stdout: Any
    stderr: Any
    on_death: Callable[[ActorError], object] | None


@dataclass(slots=True)
class _Member:
    """An actor and its present process."""

    index: int
    attempt: int = 0
    state: State = "running"
    pid: int = 0
    process: Process | None = None
    restarted_at: deque[float] = field(default_factory=deque)


class Crew:
    """The actors of one launch, and the thread that manages them.

    Args:
        payload: The function and arguments that their processes read.
        options: How they are started, started again and ended.

    Attributes:
        members: One per actor; only the thread writes them.
        failures: Errors of the actors that failed for good, in the order of the failures.
        error: An error of the thread itself, such as a process that could not be started; no process is left then.
        thread: Ends after `stop` or `abort`, or when every actor has returned.
    """

    def __init__(self, payload: Payload, options: Options) -> None:
        self._payload = payload
        self._options = options
        self.members = [_Member(index) for index in range(options.count)]
        self.failures: list[ActorError] = []
        self._selector = selectors.DefaultSelector()
        self._stop, self._tell = os.pipe()
        self._told = False
        self._aborted = False
        self._started = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name="conduit-launch", daemon=True)

    def start(self) -> None:
        """Start every process; returns when all are started.

        Raises:
            OSError: A process could not be started; none is left then.
        """
        self.thread.start()
        self._started.wait(Deadline.FOREVER)
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Tell the actors to return, and the thread to end those that do not; idempotent."""
        if not self._told:
            self._told = True
            os.write(self._tell, b"!")  # never read, so every actor sees it

    def abort(self) -> None:
        """Kill the actors at once; idempotent."""
        self._aborted = True
        self.stop()

    def kill(self, index: int) -> None:
        """Kill an actor's present process and its process group."""
        process = self.members[index].process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Close the descriptors, after the thread has ended."""
        self._selector.close()
        os.close(self._stop)
        os.close(self._tell)
        self._payload.close()

    @property
    def running(self) -> int:
        """Number of actors that have a process, or whose process is about to be started again."""
        return sum(member.state == "running" for member in self.members)

    @property
    def _processes(self) -> list[Process]:
        return [member.process for member in self.members if member.process is not None]

    def _work(self) -> None:
        try:
            self._selector.register(self._stop, selectors.EVENT_READ)
            for member in self.members:
                self._play(member)
            self._started.set()
            while self.running and not self._told:
                self._look(_ATTENTION)
            self._selector.unregister(self._stop)
            self._end()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever starts, asks or closes this
            self.error = error
            for process in self._processes:
                process.kill()
            self._told = True
            self._wait(_KILL_PATIENCE)
        finally:
            self._started.set()

    def _play(self, member: _Member) -> None:
        """Start a process for an actor."""
        options = self._options
        member.process = Process(
            self._payload,
            self._stop,
            member.index,
            options.count,
            member.attempt,
            env=options.env,
            stdout=options.stdout,
            stderr=options.stderr,
        )
        member.pid = member.process.pid
        if member.process.fd is not None:
            self._selector.register(member.process.fd, selectors.EVENT_READ)

    def _look(self, timeout: float) -> None:
        """Wait until a process ends or a call wakes the thread, at most `timeout` seconds, and handle the processes that have ended."""
        told_by_kernel = all(process.fd is not None for process in self._processes)
        self._selector.select(timeout if told_by_kernel else min(timeout, _TICK))
        for member in self.members:
            if member.process is not None and member.process.ended():
                self._bury(member, member.process)

    def _bury(self, member: _Member, process: Process) -> None:
        """Handle the end of an actor's process: the actor has returned, was stopped, or died."""
        if process.fd is not None:
            self._selector.unregister(process.fd)
        report, exitcode = process.report(), process.exitcode
        process.close()
        member.process = None
        if exitcode == 0:
            member.state = "returned"
        elif self._told and (report.stage == "stop" if report else exitcode in _OURS):
            member.state = "stopped"
        else:
            self._mourn(member, exitcode, report, killed=process.killed)

    def _mourn(self, member: _Member, exitcode: int, report: Report | None, *, killed: bool) -> None:
        """Start a dead actor again, or mark it as failed; report its death either way."""
        options, now = self._options, time.monotonic()
        pid, attempt = member.pid, member.attempt
        while member.restarted_at and member.restarted_at[0] <= now - options.per:
            member.restarted_at.popleft()
        if self._told:
            then = "it was to return"
        elif report and report.stage in ("main", "load"):
            then = "it is not started again, since that would not help"
        elif len(member.restarted_at) >= options.restarts:
            times = f"{options.restarts} times within {options.per:g} s"
            then = f"it has been started again {times} and is not any more" if options.restarts else "restarts=0"
        else:
            try:
                member.attempt += 1
                self._play(member)
                then = f"started again as pid {member.pid}, {len(member.restarted_at) + 1} of {options.restarts} times"
                then += f" in {options.per:g} s"
            except OSError as why:
                then = f"it could not be started again: {why}"
        restarted = member.process is not None
        how = describe(exitcode, report, killed=killed)
        error = make_error(member.index, attempt, pid, exitcode, report, f"{how}; {then}", restarted=restarted)
        if restarted:
            member.restarted_at.append(now)
        else:
            self.failures.append(error)
            member.state = "failed"
        self._tell_of(error)

    def _tell_of(self, error: ActorError) -> None:
        told = self._options.on_death
        if told is None:
            level = logging.WARNING if error.restarted else logging.ERROR
            _log.log(level, "%s", f"{error}\n{error.traceback}".rstrip())
            return
        try:
            told(again(error))
        except Exception:  # noqa: BLE001 - the actors are looked after whatever it was
            _log.exception("on_death raised, while it was told: %s", error)

    def _end(self) -> None:
        """Wait for the processes to return; then send SIGTERM; then kill them.

        Raises:
            WaitTimeout: The kernel did not remove a killed process.
        """
        for process in self._processes:
            process.resume()
        if not self._aborted:
            self._wait(self._options.grace, unless_aborted=True)
            # twice: Python hears a signal that comes just before a blocking call only after that call
            for _ in range(2):
                for process in self._processes:
                    process.terminate()
                self._wait(_TERM_GRACE / 2, unless_aborted=True)
        for process in self._processes:
            process.kill()
        self._wait(_KILL_PATIENCE)
        if left := self._processes:
            raise WaitTimeout(
                f"Expected the processes {', '.join(str(process.pid) for process in left)} to be gone {_KILL_PATIENCE:g} s after "
                "SIGKILL, the kernel still has them: they hang in a driver, or on a disk"
            )

    def _wait(self, seconds: float, *, unless_aborted: bool = False) -> None:
        """Handle ended processes until none is left, at most `seconds` long."""
        deadline = Deadline(seconds)
        while self._processes and not deadline.passed() and not (unless_aborted and self._aborted):
            self._look(min(_TICK, deadline.left()))
