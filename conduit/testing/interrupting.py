"""Interrupts an operation at every point at which CPython checks for signals, one point after the other.

CPython runs signal handlers between bytecodes: at the start of a Python function, after a call of compiled code, at a jump backwards. A
first run of the operation records its points. Then the operation runs once for each point; there, a compiled call makes a SIGINT pending,
as if the kernel had just delivered it. So the exception, and its place, are the same as for a user's Ctrl-C; nothing is patched.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np

from conduit.native.jit import External, entry, inner, kernel
from conduit.native.memory import data_of, peek_i64, poke_i64

_interrupt: Any = External("PyErr_SetInterrupt", "void()")

_LOOKS = ("RESUME", "CALL", "CALL_FUNCTION_EX", "SEND", "FOR_ITER")
_JUMPS = ("JUMP_BACKWARD", "POP_JUMP_BACKWARD")


@inner
def _count_down(words):
    left = peek_i64(words) - 1
    poke_i64(words, left)
    return left


@kernel("void(object, object, object, object)")
def _trace(words, _frame, _event, _argument):
    """A frame's trace function: raises SIGINT at the event that int64 [1] counts down to."""
    if _count_down(data_of(words)) == 0:
        _interrupt()


def _looks(frame: FrameType) -> bool:
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return name in _LOOKS or name.startswith(_JUMPS)


def _run(operation: Callable[[], object], local: Callable[..., Any]) -> None:
    """Run an operation with a trace function in every frame that it opens."""

    def begin(frame: FrameType, _event: str, _argument: object) -> Callable[..., Any]:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return local

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        operation()
    finally:
        sys.settrace(before)


def points_of(operation: Callable[[], object]) -> list[int]:
    """Numbers of the trace events of an operation at which CPython is about to look for signals, from 1."""
    found: list[int] = []
    count = 0

    def local(frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
        nonlocal count
        count += 1
        if event == "opcode" and _looks(frame):
            found.append(count)
        return local

    _run(operation, local)
    return found


def interrupt_at(operation: Callable[[], object], point: int) -> str | None:
    """Run an operation with a SIGINT at one of its points.

    Returns:
        Where KeyboardInterrupt came from, as "file:line function", or None where the operation came to its end: behind its last
        point, or where a destructor was interrupted.
    """
    words = np.full(1, point, np.int64)
    try:
        _run(operation, functools.partial(entry(_trace), words))
    except KeyboardInterrupt as interrupt:
        frames = [
            one for one in traceback.extract_tb(interrupt.__traceback__) if "testing/interrupting" not in one.filename
        ]
        if frames:
            last = frames[-1]
            return f"{last.filename.rpartition('conduit/')[2]}:{last.lineno} {last.name}"
    with contextlib.suppress(KeyboardInterrupt):
        for _ in range(2):  # one that is still pending
            pass
    return None


@dataclass(slots=True)
class Sweep:
    """What became of the points of an operation.

    Attributes:
        points: Points that were tried.
        raised: Those at which KeyboardInterrupt came out of the operation.
        bad: One line for each point after which something did not hold.
    """

    points: int = 0
    raised: int = 0
    bad: list[str] = field(default_factory=list)


def sweep(
    operation: Callable[[], object], check: Callable[[], object], *, every: int = 1, first: int = 0, most_bad: int = 20
) -> Sweep:
    """Interrupt an operation at its points and check what is left after each.

    Args:
        operation: Comes through the same points each time it is called.
        check: Raises AssertionError, or what a use of the objects raises, where something does not hold any more.
        every: Try every so many points only, ...
        first: ... from this one on.
        most_bad: Stop after so many bad points.
    """
    operation()  # compiles and fills caches
    check()
    done = Sweep()
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        for point in points_of(operation)[first::every]:
            done.points += 1
            where = None
            try:
                where = interrupt_at(operation, point)
                done.raised += where is not None
                check()
            except Exception as error:
                done.bad.append(f"point {point}, {where}: {type(error).__name__}: {error}".splitlines()[0])
                if len(done.bad) >= most_bad:
                    break
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, was)
    return done
