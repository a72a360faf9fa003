"""Kill a process at a chosen instruction: `ptrace` single steps, then SIGKILL.

A program is compiled code between `begin()` and `finish()`. The tracer lets its process run up to `begin`, takes `count`
single steps, and kills it there: at whichever instruction boundary that is. Programs call the very machine code that users
run, through `conduit.native.jit.native` addresses, so a boundary here is a boundary there.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from conduit.native.jit import External, cgutils, entry, inner, intrinsic, ir, kernel, types
from conduit.native.memory import peek_u32

_TRACE_ME, _SINGLE_STEP = 0, 9
_REFUSED = 77
"""Exit status of a process that may not be traced."""

_raise: Any = External("raise", "int32(int32)")
_ptrace: Any = External("ptrace", "int64(int64, int64, int64, int64)")
_waitpid: Any = External("waitpid", "int32(int32, int64, int32)")
_STOP, _DONE, _TRAP = int(signal.SIGSTOP), int(signal.SIGUSR1), int(signal.SIGTRAP)


def _native_caller(arity: int) -> Any:
    # numba's own convention: int32 f(result*, exception**, arguments...); kernels raise nothing
    word = ir.IntType(64)
    opaque = ir.IntType(8).as_pointer()

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [word.as_pointer(), opaque.as_pointer(), *([word] * arity)])
        result = cgutils.alloca_once(builder, word)
        exception = cgutils.alloca_once(builder, opaque)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [result, exception, *args[1:]])
        return builder.load(result)

    return types.int64(types.int64, *([types.int64] * arity)), codegen


@intrinsic
def call_native_1(typingctx: Any, function: Any, a: Any) -> Any:
    """Call the kernel at a `native` address with one argument."""
    return _native_caller(1)


@intrinsic
def call_native_2(typingctx: Any, function: Any, a: Any, b: Any) -> Any:
    """Call the kernel at a `native` address with two arguments."""
    return _native_caller(2)


@intrinsic
def call_native_3(typingctx: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """Call the kernel at a `native` address with three arguments."""
    return _native_caller(3)


@intrinsic
def call_native_4(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call the kernel at a `native` address with four arguments."""
    return _native_caller(4)


@intrinsic
def call_native_5(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """Call the kernel at a `native` address with five arguments."""
    return _native_caller(5)


@intrinsic
def call_native_7(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any) -> Any:
    """Call the kernel at a `native` address with seven arguments."""
    return _native_caller(7)


@inner
def begin():
    """Here the tracer takes over."""
    return _raise(_STOP)


@inner
def finish():
    """Tells the tracer that the program is complete."""
    return _raise(_DONE)


@kernel("int64(int64, int64, int64)", nogil=True)
def _steps(pid, count, status):
    """Take up to `count` single steps; returns how many were taken before the process did anything but step.

    -1: a step was refused; -2: the process could not be waited for.
    """
    for taken in range(count):
        if _ptrace(_SINGLE_STEP, pid, 0, 0) != 0:
            return -1
        # once more where a signal interrupted the wait
        if _waitpid(pid, status, 0) != pid and _waitpid(pid, status, 0) != pid:
            return -2
        if (peek_u32(status) & 0xFF) != 0x7F or (peek_u32(status) >> 8 & 0xFF) != _TRAP:
            return taken
    return count


def why_not() -> str | None:
    """Why single steps cannot be taken here, or None."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return f"single steps are taken on Linux on x86-64 only, this is {sys.platform} on {platform.machine()}"
    pid = os.fork()
    if pid == 0:
        _be_traced()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return "ptrace is refused here" if os.waitstatus_to_exitcode(status) == _REFUSED else None


def _be_traced() -> None:
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long] * 4
    if ptrace(_TRACE_ME, 0, 0, 0) != 0:
        os._exit(_REFUSED)


class Traced:
    """A forked process, stopped at its program's `begin`.

    Args:
        program: Runs in the process. It prepares what it needs, then calls compiled code with `begin` and `finish`.
    """

    def __init__(self, program: Callable[[], object]) -> None:
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _be_traced()
                program()
            except BaseException:
                print(traceback.format_exc(), file=sys.stderr, flush=True)
            os._exit(1)
        self._status = np.zeros(1, np.int32)
        _, status = os.waitpid(self.pid, 0)
        if not os.WIFSTOPPED(status) or os.WSTOPSIG(status) != signal.SIGSTOP:
            raise RuntimeError(f"Expected the program to stop at its begin, got status {status:#x}")

    def kill_after(self, count: int) -> int:
        """Take `count` steps, then kill; returns the steps taken, fewer when the program was complete before."""
        taken = self.step(count)
        status = int(self._status[0])
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        if taken < count and (taken < 0 or not os.WIFSTOPPED(status) or os.WSTOPSIG(status) != signal.SIGUSR1):
            raise RuntimeError(f"Expected single steps up to the program's finish, got status {status:#x} at {taken}")
        return taken

    def step(self, count: int) -> int:
        """Take `count` steps and leave it stopped there; returns the steps taken, fewer when the program is complete."""
        return entry(_steps)(self.pid, count, self._status.ctypes.data)
