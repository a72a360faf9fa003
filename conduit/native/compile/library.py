"""The kernels that were compiled ahead of time: a library per instruction set, of which a process uses the one for its processor.

A library holds, for each kernel, a `PyMethodDef` by the name "method NAME" and its machine code by "native NAME", and C callbacks by
"address DIGEST". Its "conduit.facts" say what it was made from and for. One that was made from other sources than those that lie here
is not used, since a stale kernel is worse than none: then numba compiles.

`CONDUIT_KERNELS` says `compile` (no library), or names an instruction set, which then has to be there. `CONDUIT_KERNELS_LIBRARY` is the
path of a library to use in place of the package's own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conduit.errors import ConfigError
from conduit.native.compile.declare import Declared, key_of, name_of
from conduit.native.compile.sources import library_stamp

VARIABLE, PATH_VARIABLE = "CONDUIT_KERNELS", "CONDUIT_KERNELS_LIBRARY"
COMPILE = "compile"

_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"))
INSTRUCTION_SETS = {
    "x86-64-v4": _V3 | frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
    "x86-64-v3": _V3,
}
"""What libraries are made for, best first, and the processor's flags (as Linux names them) that each needs."""

FORM = 1
"""Number of the form of libraries: what symbols they have, and how these are called."""
_FLAGS_WITHIN = 1 << 16
"""Bytes of /proc/cpuinfo in which the first processor's flags lie."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where this process has its kernels from.

    Attributes:
        library: The library, or None where they are compiled.
        instructions: Its instruction set; "" without one.
        path: Its file; "" without one.
        reason: Why it is so, for people.
    """

    library: ctypes.CDLL | None
    instructions: str
    path: str
    reason: str


def path_for(instructions: str, folder: Path | None = None) -> Path:
    """Where the package's library for an instruction set lies."""
    return (folder or Path(__file__).parents[1]) / f"kernels-{instructions}.so"


@functools.cache
def host_flags() -> frozenset[str]:
    """The processor's features as Linux names them; none where that is not known."""
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            text = file.read(_FLAGS_WITHIN).decode("ascii", "replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def supported() -> tuple[str, ...]:
    """Instruction sets of this processor for which there can be libraries, best first."""
    if platform.machine() != "x86_64":
        return ()
    return tuple(name for name, needed in INSTRUCTION_SETS.items() if needed <= host_flags())


def facts_here() -> dict[str, Any]:
    """What must be the same where a library was made and where it is used."""
    return {
        "form": FORM,
        "stamp": library_stamp(),
        "machine": platform.machine(),
        "system": sys.platform,
        "byteorder": sys.byteorder,
        "pointer": ctypes.sizeof(ctypes.c_void_p),
    }


@functools.cache
def chosen() -> Choice:
    """Where this process has its kernels from; decided once.

    Raises:
        ConfigError: CONDUIT_KERNELS has another value, or names an instruction set that this processor does not have, or of which there
            is no library that fits.
    """
    wanted, path = os.environ.get(VARIABLE, ""), os.environ.get(PATH_VARIABLE, "")
    if wanted and wanted != COMPILE and wanted not in INSTRUCTION_SETS:
        names = ", ".join((COMPILE, *sorted(INSTRUCTION_SETS)))
        raise ConfigError(f"Expected {VARIABLE} to be one of {names}, got {wanted!r}: unset it to let Conduit choose")
    if wanted == COMPILE:
        return Choice(None, "", "", f"{VARIABLE}={COMPILE}")
    if wanted and wanted not in supported():
        raise ConfigError(
            f"Expected an instruction set of this processor in {VARIABLE}, got {wanted!r}; it has "
            f"{' and '.join(supported()) or 'none that libraries are made for'}"
        )
    allowed = (wanted,) if wanted else supported()
    reasons = [] if allowed else ["there is no library of kernels for this processor"]
    for candidate in [Path(path)] if path else [path_for(name) for name in allowed]:
        found = _opened(candidate, allowed)
        if not isinstance(found, str):
            return found
        reasons.append(found)
    if wanted:
        raise ConfigError(
            f"Expected a library of kernels for {VARIABLE}={wanted}: {reasons[0]}; unset it to have them compiled"
        )
    return Choice(None, "", "", reasons[0])


def _opened(path: Path, allowed: tuple[str, ...]) -> Choice | str:
    """The choice of a library of one of these instruction sets, or why it cannot be used."""
    if not path.exists():
        return f"there is no library of kernels at {path}"
    if getattr(sys, "_is_gil_enabled", lambda: True)() is False:
        return "this interpreter has no global lock"
    try:
        library = ctypes.CDLL(str(path))
        facts = json.loads(ctypes.c_char_p.in_dll(library, "conduit.facts").value or b"{}")
    except (OSError, ValueError) as error:
        return f"{path} cannot be loaded ({error})"
    here, instructions = facts_here(), facts.get("instructions")
    other = [name for name in here if facts.get(name) != here[name]]
    if "stamp" in other:
        return f"{path} was made from other sources than those in {Path(__file__).parents[2]}"
    if other:
        return f"{path} was made for another {', '.join(other)}"
    if instructions not in allowed:
        return f"{path} is for {instructions}, and {' or '.join(allowed)} is what can be used"
    return Choice(library, instructions, str(path), f"this processor has {instructions}")


def digest_of(function: Callable[..., Any], signature: str) -> str:
    """Name of a C callback in a library."""
    return hashlib.sha256(repr((key_of(function), signature)).encode()).hexdigest()[:32]


def _symbol(name: str) -> int:
    library = chosen().library
    if library is None:
        return 0
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(library, name))
    except ValueError:
        return 0


_function_of = ctypes.pythonapi.PyCFunction_NewEx
_function_of.restype = ctypes.py_object
_function_of.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]


def entry(declared: Declared) -> Callable[..., int] | None:
    """Entry point of a kernel, None where the library has none."""
    method = _symbol(f"method {name_of(declared)}")
    return _function_of(method, None, None) if method else None


def native(declared: Declared) -> int:
    """Address of a kernel's machine code, in numba's calling convention; 0 where the library has none."""
    return _symbol(f"native {name_of(declared)}")


def address(function: Callable[..., Any], signature: str) -> int:
    """Address of a C callback; 0 where the library has none."""
    return _symbol(f"address {digest_of(function, signature)}") if chosen().library is not None else 0
