"""Probes of the machine's features that an engine needs, each tried on memory of its own; `conduit doctor` shows the outcomes.

A probe returns its outcome; it does not raise if the machine lacks the feature. Probes leave nothing behind.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit.errors import ConfigError
from conduit.native import memory
from conduit.native.compile import library
from conduit.native.jit import entry
from conduit.native.memory import compare_and_swap, exchange, fence_full, fetch_add
from conduit.store.pages import protocol
from conduit.store.segment.locks import held, try_lock
from conduit.store.segment.memory import Bound, available
from conduit.store.segment.names import Backing, runtime_directory

_EXPECTED = {
    "x86_64": {
        "compare-and-swap": r"\block\s+cmpxchgq",
        "fetch-and-add": r"\block\s+(xaddq|addq|incq)",
        "exchange": r"\bxchgq",
        "full fence": r"\b(mfence|lock\s+or[lq])",
    },
    "aarch64": {
        "compare-and-swap": r"\b(casal|ldaxr)\b",
        "fetch-and-add": r"\b(ldaddal|ldaxr)\b",
        "exchange": r"\b(swpal|ldaxr)\b",
        "full fence": r"\bdmb\s+ish\b",
    },
}
"""The machine instructions that the atomic operations of native/memory.py must become, per machine; AT&T syntax on x86-64."""


def room_for(backing: Backing) -> Bound | None:
    """The limit on the size of a new engine of this backing, as its creation would find it now; None if there is none."""
    return available(backing)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a probe.

    Attributes:
        works: Whether an engine can rely on the feature.
        found: The finding, as text.
    """

    works: bool
    found: str


@dataclass(frozen=True, slots=True)
class KernelCache:
    """Where this process got its compiled kernels from.

    Attributes:
        library: The library that they come from; "" if they are compiled on this machine.
        folders: The folders of the cache.
        loaded: Kernels loaded from the cache.
        compiled: Kernels that were compiled, and are in the cache now.
    """

    library: str
    folders: tuple[str, ...]
    loaded: int
    compiled: int


def memfd() -> Outcome:
    """Allocate a small memfd, memory without a name in a file system."""
    try:
        os.close(_memfd())
    except OSError as error:
        return Outcome(False, f"memory without a name cannot be had: {error.strerror}")
    return Outcome(True, f"works; notes of such engines lie in {runtime_directory()}")


def liveness_locks() -> Outcome:
    """Open-file-description locks: visible through another descriptor of the file, and released when their holder's is closed."""
    try:
        fd = _memfd()
    except OSError as error:
        return Outcome(False, f"could not be tried: {error.strerror}")
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            if not try_lock(fd, 0) or not held(other, 0, 1) or try_lock(other, 0):
                return Outcome(False, "a lock that is held is not seen through another descriptor")
        finally:
            os.close(fd)
        if held(other, 0, 1) or not try_lock(other, 0):
            return Outcome(False, "a lock outlives the descriptor that held it")
    except OSError as error:
        return Outcome(False, f"the system call failed: {error.strerror}")
    finally:
        os.close(other)
    return Outcome(True, "work: held ones are seen, those of closed descriptors go")


def kernels() -> Outcome:
    """The source of kernels: a library that was compiled ahead of time, or the compiler."""
    try:
        choice = library.chosen()
    except ConfigError as error:
        return Outcome(False, str(error))
    if choice.library is not None:
        return Outcome(True, f"compiled ahead of time for {choice.instructions}: {choice.path}")
    return Outcome(True, f"compiled at their first use: {choice.reason}")


def has_library() -> bool:
    """Whether kernels come from a library, so that nothing has to be compiled here."""
    try:
        return library.chosen().library is not None
    except ConfigError:
        return False


def compiles() -> Outcome:
    """Compile a kernel, or load it from the cache."""
    import numba

    try:
        entry(protocol.load)
    except ConfigError as error:
        return Outcome(False, str(error))
    except Exception as error:  # noqa: BLE001 - numba and LLVM fail in many ways; each is what was found
        return Outcome(False, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return Outcome(True, f"numba {numba.__version__} compiles")


def futex() -> Outcome:
    """Sleep on a word until a deadline."""
    words = np.zeros(2, np.int64)
    timespec = np.array([0, 2_000_000], np.int64)
    wait = entry(memory.wait)
    began = time.perf_counter()
    wait(words.ctypes.data, 0, timespec.ctypes.data)
    slept = time.perf_counter() - began
    if slept < 0.001:
        return Outcome(False, f"a wait of 2 ms came back after {slept * 1e6:.0f} us: the call is missing or blocked")
    return Outcome(True, f"works: a wait of 2 ms took {slept * 1e3:.1f} ms")


def atomic_instructions() -> Outcome:
    """Compile the atomic operations, run them, and check that their machine code has the instructions and no library call."""
    machine = platform.machine()
    if machine not in _EXPECTED:
        return Outcome(False, f"none are known for {machine}; Conduit runs on {' and '.join(_EXPECTED)}")

    import numba

    # compiled anew: numba does not show the machine code of kernels that it loaded from its cache
    @numba.njit("int64(int64)")  # type: ignore[untyped-decorator]
    def operate(address: Any) -> Any:
        before = compare_and_swap(address, 0, 5)
        before += 10 * fetch_add(address, 2)
        fence_full()
        return before + 100 * exchange(address, 9)

    word = np.zeros(1, np.int64)
    result = int(operate(word.ctypes.data))
    if (result, int(word[0])) != (750, 9):
        return Outcome(False, f"the operations gave {result} and left {word[0]}, expected 750 and 9")
    (code,) = operate.inspect_asm().values()
    missing = [name for name, pattern in _EXPECTED[machine].items() if not re.search(pattern, code)]
    if missing or re.search(r"__(atomic|sync)_", code):
        return Outcome(False, f"not compiled to instructions of {machine}: {', '.join(missing) or 'a library call'}")
    return Outcome(True, f"{machine} instructions: {', '.join(_EXPECTED[machine])}")


def kernel_cache() -> KernelCache:
    """Where the kernels that ran in this process so far came from."""
    choice = library.chosen()
    if "conduit.native.compile.compiler" not in sys.modules:
        return KernelCache(choice.path, (), 0, 0)
    from conduit.native.compile import compiler

    return KernelCache(choice.path, tuple(sorted(compiler.folders)), len(compiler.loaded), len(compiler.compiled))


def _memfd() -> int:
    fd = os.memfd_create("conduit-probe", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, 4096)
    except OSError:
        os.close(fd)
        raise
    return fd
