"""The actors' processes: started, listened to, restarted when they die, ended together.

Each actor is a fresh interpreter, never a fork, so it carries nothing of the learner's. It reports through a pipe of its
own, and its output is read through another, so that a terminal display is not written over and nobody blocks.

Invariant: after `close` every process that was ever started has been waited for.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from conduit.clock import Deadline
from conduit.demo.settings import ActorPlan, Report, Settings
from conduit.errors import ConduitError

_PATIENCE = 10.0
_ACTOR_PATIENCE = 60.0
_STARTING_PATIENCE = 60.0
_GRACE = 3.0
_GIVE_UP_AFTER = 3
_KEPT_LINES = 40
_READ = 1 << 16


class ActorFailed(ConduitError, RuntimeError):
    """An actor died again and again before it had done anything; the message ends with what it printed."""


@dataclass(frozen=True, slots=True)
class ActorView:
    """One actor as others see it.

    Attributes:
        index: Its number; restarts keep it.
        pid: Process id.
        state: "starting" until its first report, then "acting".
        version: Version of the weights that it last finished with; 0 before.
        rows: Rows that it wrote, over all its processes.
        restarts: How often it had to be started again.
    """

    index: int
    pid: int
    state: str
    version: int
    rows: int
    restarts: int


class _Pipe:
    """The reading end of a pipe, as lines; never blocks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.set_blocking(fd, False)
        self._rest = b""

    def lines(self) -> list[bytes]:
        """Whole lines that are there now."""
        data = self._rest
        try:
            while chunk := os.read(self.fd, _READ):
                data += chunk
        except BlockingIOError:
            pass
        *lines, self._rest = data.split(b"\n")
        return lines


class _Member:
    """An actor and the process that plays it now."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.rows = 0
        self.starts = 0
        self.idle_deaths = 0
        self.version = 0
        self.heard = 0.0
        self.errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self.process: subprocess.Popen[bytes]
        self.reports: _Pipe
        self.output: _Pipe
        self.pipes: tuple[_Pipe, ...] = ()


class Crew:
    """All actors of one run. A context manager; `close` ends every process.

    Args:
        engine: Name of the engine that they attach to.
        settings: How many, and what they do.
        seed: Of the run.
        note: Called with a text and a detail (of several lines, or empty) when something happened to an actor.
    """

    def __init__(self, engine: str, settings: Settings, seed: int, note: Callable[[str, str], None]) -> None:
        self._engine = engine
        self._settings = settings
        self._seed = seed
        self._note = note
        self._selector = selectors.DefaultSelector()
        self._members: list[_Member] = []
        self.restarts = 0
        try:
            for index in range(settings.actors):
                member = _Member(index)
                self._start(member)
                self._members.append(member)
        except BaseException:
            self.close()
            raise

    def _start(self, member: _Member) -> None:
        settings = self._settings
        report_end, report_fd = os.pipe()
        output_end, output_fd = os.pipe()
        plan = ActorPlan(
            engine=self._engine,
            learner=os.getpid(),
            report_fd=report_fd,
            seed=(self._seed, member.index, member.starts),
            envs=settings.envs,
            ticks=settings.ticks_per_version,
            warmup_ticks=settings.warmup_ticks,
            explore_versions=settings.explore_versions,
            floors=settings.floors(member.index),
            patience=_ACTOR_PATIENCE,
        )
        here = str(Path(__file__).resolve().parents[2])
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        # Networks of this size gain nothing from BLAS threads, and the cores belong to the processes.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        try:
            member.process = subprocess.Popen(  # noqa: S603 - this interpreter and this package
                [sys.executable, "-P", "-m", "conduit.demo.actor", msgspec.json.encode(plan).decode()],
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                pass_fds=(report_fd,),
                env=environment,
                # Ctrl-C reaches the whole foreground group of a terminal: the learner alone answers it.
                process_group=0,
            )
        except BaseException:
            os.close(report_end)
            os.close(output_end)
            raise
        finally:
            os.close(report_fd)
            os.close(output_fd)
        member.reports, member.output = _Pipe(report_end), _Pipe(output_end)
        member.starts += 1
        member.version = 0
        member.heard = time.monotonic()
        member.errors.clear()
        member.pipes = (member.reports, member.output)
        for pipe in member.pipes:
            self._selector.register(pipe.fd, selectors.EVENT_READ)

    @property
    def actors(self) -> tuple[ActorView, ...]:
        """Every actor as it is now."""
        return tuple(
            ActorView(
                member.index,
                member.process.pid,
                "acting" if member.version else "starting",
                member.version,
                member.rows,
                member.starts - 1,
            )
            for member in self._members
        )

    def poll(self, timeout: float) -> list[Report]:
        """What actors reported; waits up to `timeout` seconds for something to happen. Restarts those that died.

        Raises:
            ActorFailed: One died several times in a row before its first report.
        """
        self._selector.select(timeout)
        reports = []
        for member in self._members:
            reports += self._listen(member)
            if member.process.poll() is not None:
                reports += self._listen(member)
                self._replace(member)
            elif not member.version and time.monotonic() - member.heard > _STARTING_PATIENCE:
                self._kill(member, f"has not started within {_STARTING_PATIENCE:.0f} s")
        return reports

    def _listen(self, member: _Member) -> list[Report]:
        member.errors.extend(line.decode(errors="replace") for line in member.output.lines())
        reports = [msgspec.json.decode(line, type=Report) for line in member.reports.lines()]
        for report in reports:
            member.version = report.version
            member.rows += report.rows
            member.heard = time.monotonic()
            member.idle_deaths = 0
        return reports

    def _replace(self, member: _Member) -> None:
        status = member.process.returncode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        pid, detail = member.process.pid, "\n".join(member.errors)
        member.idle_deaths += not member.version
        self._forget(member)
        if member.idle_deaths >= _GIVE_UP_AFTER:
            raise ActorFailed(
                f"Expected actor {member.index} to act, but it died {member.idle_deaths} times before it had done anything; "
                f"the last time its process {pid} {how}:\n{detail}"
            )
        self._start(member)
        self.restarts += 1
        self._note(f"actor {member.index} (pid {pid}) {how}; started again as pid {member.process.pid}", detail)

    def _forget(self, member: _Member) -> None:
        pipes, member.pipes = member.pipes, ()
        for pipe in pipes:
            self._selector.unregister(pipe.fd)
            os.close(pipe.fd)

    def _kill(self, member: _Member, why: str) -> None:
        self._note(f"actor {member.index} (pid {member.process.pid}) {why}: it is killed", "")
        member.process.kill()
        member.heard = time.monotonic()

    def done_with(self, version: int) -> bool:
        """Whether every actor has acted with this version or a newer one; those that are just starting do not count.

        At least one must have: with every actor dead the learner does not go on alone.
        """
        running = [member.version for member in self._members if member.version]
        return bool(running) and min(running) >= version

    def stop_waiting_for(self, version: int) -> None:
        """Kill the actors that keep everyone waiting for this version since too long; `poll` then replaces them."""
        for member in self._members:
            if 0 < member.version < version and time.monotonic() - member.heard > _PATIENCE:
                self._kill(member, f"has not reported for {_PATIENCE:.0f} s")

    def close(self) -> None:
        """End every process: ask, wait a little, kill; idempotent."""
        members, self._members = self._members, []
        for member in members:
            # One that was stopped (SIGSTOP) does not hear anything else before it is continued.
            member.process.send_signal(signal.SIGTERM)
            member.process.send_signal(signal.SIGCONT)
        deadline = Deadline(_GRACE)
        for member in members:
            try:
                member.process.wait(deadline.left())
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
            self._forget(member)
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
