"""Declared kernels as something to call: from a library that was compiled ahead of time, or from the compiler.

A kernel is a function of plain integers (addresses, counts) compiled for one declared signature. `entry(kernel)` is its compiled
entry point, `address(function, signature)` that of a function that kernels call through a pointer. Both come, at their first use,
from the library that was compiled ahead of time for this machine (conduit.native), or, where there is none, from numba
(conduit.native.compile.compiler). So a process with such a library never imports numba, and any process pays only for the kernels that it runs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from conduit.forking import renew_in_child
from conduit.native.compile import library
from conduit.native.compile.declare import Declared, External, Known, cgutils, inner, intrinsic, ir, kernel, types

__all__ = ["External", "address", "cgutils", "entry", "inner", "intrinsic", "ir", "kernel", "native", "types"]

_compiling = threading.RLock()
# the compiler's own locks, and that of its import, cannot be made anew: they are free when nobody is in here
renew_in_child(__name__, "_compiling", threading.RLock, whole=True)


def _type_of(known: Any) -> Any:
    from conduit.native.compile import compiler

    return compiler.type_of(known)


def _dispatch(declared: Declared, *arguments: Any) -> Any:
    from conduit.native.compile import compiler

    return compiler.dispatcher(declared)(*arguments)


Known.type_of = staticmethod(_type_of)
Declared.dispatch = staticmethod(_dispatch)


@functools.cache
def entry(known: Any) -> Callable[..., int]:
    """The compiled entry point of a declared kernel; loaded or compiled at the first call.

    Raises:
        ConfigError: CONDUIT_KERNELS asks for what there is not; or it has to be compiled, and numba's compiler is switched off.
    """
    found = library.entry(known)
    if found is not None:
        return found
    with _compiling:
        from conduit.native.compile import compiler

        return compiler.entry(known)


@functools.cache
def address(function: Callable[..., Any], signature: str) -> int:
    """Native address of `function` as a C callback, for kernels that call through a pointer.

    Raises:
        ConfigError: As `entry`.
    """
    found = library.address(function, signature)
    if found:
        return found
    with _compiling:
        from conduit.native.compile import compiler

        return compiler.address(function, signature)


def native(known: Any) -> int:
    """Address of a kernel's machine code, in numba's calling convention: int32 f(result*, exception**, arguments...)."""
    found = library.native(known)
    if found:
        return found
    with _compiling:
        from conduit.native.compile import compiler

        return compiler.native(known)
