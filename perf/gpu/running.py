"""Parts in child processes, each within its time: what hangs, crashes or cannot be imported takes nothing else with it.

Standard library only: the parent must live whatever a child does to the device, the driver or the interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_children: set[int] = set()
"""Process groups that are running."""
_PATIENCE = 5.0
"""Seconds in which a killed process has to be gone: one that hangs in the driver may never be."""


@dataclass
class Ended:
    """How a child ended.

    Attributes:
        word: "passed", "failed", "out of time", "killed by signal 11", or "out of time, and cannot be killed".
        seconds: How long it took.
        text: The end of what it said.
    """

    word: str
    seconds: float
    text: str


class Clock:
    """Seconds since the start, and the deadline."""

    def __init__(self, allowed: float) -> None:
        self._begun = time.monotonic()
        self.allowed = allowed

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begun

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.allowed - self.spent


def run(command: Sequence[str], seconds: float, environment: dict[str, str], log: Path, cwd: Path) -> Ended:
    """Run a command in a process group of its own, and end all of it when its time is over."""
    begun = time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        word = ""
        _children.add(child.pid)
        try:
            child.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            word = "out of time"
        finally:
            _children.discard(child.pid)
            _kill(child.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_PATIENCE)
    if child.returncode is None:
        word = "out of time, and cannot be killed"
    code = child.returncode
    if not word:
        word = "passed" if code == 0 else f"killed by signal {-code}" if code < 0 else "failed"
    text = log.read_text(errors="replace")
    return Ended(word, round(time.monotonic() - begun, 1), text[-6000:])


def _kill(group: int) -> None:
    """Kill a child's whole group; what it started may outlive it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_all() -> None:
    """Kill every child that other threads wait for."""
    for group in list(_children):
        _kill(group)


def read(path: Path) -> dict[str, Any]:
    """What a part wrote down, as far as it got; empty where it wrote nothing."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content


def write(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees all of it or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(path)


def python(*arguments: str) -> list[str]:
    """A command for this Python, with a traceback of every thread when it crashes."""
    return [sys.executable, "-X", "faulthandler", *arguments]
