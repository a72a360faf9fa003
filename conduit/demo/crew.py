"""The actors of one run: launched, listened to, killed when they hang.

Each reports through a pipe of its own. What they print comes through another one, so that a terminal display is not written over.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Self

import msgspec

import conduit
from conduit.demo.actor import play
from conduit.demo.settings import Report, Settings
from conduit.errors import ActorError

_PATIENCE = 10.0
_ACTOR_PATIENCE = 60.0
_STARTING_PATIENCE = 60.0
_GRACE = 3.0
_RESTARTS = 3
_KEPT_LINES = 40
_READ = 1 << 16


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


class _Lines:
    """The reading end of a pipe, as lines; never blocks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)
        self._rest = b""

    def read(self) -> list[bytes]:
        """Whole lines that are there now."""
        data = self._rest
        try:
            while chunk := os.read(self._fd, _READ):
                data += chunk
        except BlockingIOError:
            pass
        *lines, self._rest = data.split(b"\n")
        return [line for line in lines if line]


@dataclass(slots=True)
class _Member:
    """What an actor has reported."""

    reports: _Lines
    attempt: int = 0
    rows: int = 0
    version: int = 0
    heard: float = field(default_factory=time.monotonic)


class Crew:
    """All actors of one run. A context manager; `close` ends every process.

    Args:
        engine: Name of the engine that they attach to.
        settings: How many, and what they do.
        seed: Of the run.
        note: Called with a text and a detail (of several lines, or empty) when something happened to an actor.
    """

    def __init__(self, engine: str, settings: Settings, seed: int, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._deaths: deque[ActorError] = deque()
        self._printed: deque[str] = deque(maxlen=_KEPT_LINES)
        self._members: list[_Member] = []
        self.restarts = 0
        with ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            ends = []
            for _ in range(settings.actors + 1):
                reader, writer = Pipe(duplex=False)
                stack.callback(reader.close)
                stack.callback(writer.close)
                self._selector.register(reader, selectors.EVENT_READ)
                ends.append((_Lines(reader.fileno()), writer))
            (self._output, output), *reports = ends
            self._members = [_Member(lines) for lines, _ in reports]
            self._actors = conduit.launch(
                play,
                settings.actors,
                args=(engine, settings, seed, [writer for _, writer in reports], _ACTOR_PATIENCE),
                restarts=_RESTARTS,
                grace=_GRACE,
                # Networks of this size gain nothing from BLAS threads, and the cores belong to the processes.
                env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                stdout=output.fileno(),
                stderr=subprocess.STDOUT,
                on_death=self._deaths.append,
            )
            stack.callback(self._actors.close)
            self._open = stack.pop_all()

    @property
    def actors(self) -> tuple[ActorView, ...]:
        """Every actor as it is now."""
        return tuple(
            ActorView(
                one.index, one.pid, "acting" if member.version else "starting", member.version, member.rows, one.attempt
            )
            for member, one in zip(self._members, self._actors.status(), strict=True)
        )

    def poll(self, timeout: float) -> list[Report]:
        """What actors reported; waits up to `timeout` seconds for something to happen. Tells of those that died.

        Raises:
            ActorError: One died too often.
        """
        self._selector.select(timeout)
        reports = []
        for member, now in zip(self._members, self._actors.status(), strict=True):
            if now.attempt != member.attempt:
                member.attempt, member.version, member.heard = now.attempt, 0, time.monotonic()
            reports += self._listen(member)
            if not member.version and time.monotonic() - member.heard > _STARTING_PATIENCE:
                self._kill(member, f"has not started within {_STARTING_PATIENCE:.0f} s")
        self._printed.extend(line.decode(errors="replace") for line in self._output.read())
        self._tell_of_deaths()
        self._actors.check()
        return reports

    def _tell_of_deaths(self) -> None:
        while self._deaths:
            death = self._deaths.popleft()
            self.restarts += death.restarted
            text = str(death)
            self._note(text[0].lower() + text[1:], death.traceback.rstrip() or "\n".join(self._printed))

    def _listen(self, member: _Member) -> list[Report]:
        reports = []
        for line in member.reports.read():
            try:
                report = msgspec.json.decode(line, type=Report)
            except msgspec.DecodeError:  # of an actor that was killed while it wrote
                continue
            reports.append(report)
            member.rows += report.rows
            if report.attempt == member.attempt:
                member.version, member.heard = report.version, time.monotonic()
        return reports

    def _kill(self, member: _Member, why: str) -> None:
        index = self._members.index(member)
        self._note(f"actor {index} (pid {self._actors.status()[index].pid}) {why}: it is killed", "")
        self._actors.kill(index)
        member.heard = time.monotonic()

    def done_with(self, version: int) -> bool:
        """Whether every actor has acted with this version or a newer one; those that are just starting do not count.

        At least one must have: with every actor dead the learner does not go on alone.
        """
        running = [member.version for member in self._members if member.version]
        return bool(running) and min(running) >= version

    def stop_waiting_for(self, version: int) -> None:
        """Kill the actors that keep everyone waiting for this version since too long; they are started again."""
        for member in self._members:
            if 0 < member.version < version and time.monotonic() - member.heard > _PATIENCE:
                self._kill(member, f"has not reported for {_PATIENCE:.0f} s")

    def close(self) -> None:
        """End every process: ask, wait a little, kill; idempotent."""
        self._open.close()
        self._tell_of_deaths()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
