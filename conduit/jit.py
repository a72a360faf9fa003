"""Kernels as they are declared: plain Python functions, with a signature, that this module compiles nothing of and imports no compiler for.

A kernel is a function of plain integers (addresses, counts) compiled for one declared signature. `entry(kernel)` is its compiled
entry point, `address(function, signature)` that of a function that kernels call through a pointer. Both come, at their first use,
from the library that was compiled ahead of time for this machine (conduit.native), or, where there is none, from numba
(conduit.compiler). So a process with such a library never imports numba, and any process pays only for the kernels that it runs.

A signature is text, `"int64(int64, float64, object)"`. An `object` is handed over as its address and nothing more
(conduit.store.arguments).
"""

from __future__ import annotations

import functools
import importlib
import threading
import types as python_types
from collections.abc import Callable
from typing import Any

from conduit.forking import renew_in_child

KERNEL_MODULES = (
    "conduit.jit",
    "conduit.compiler",
    "conduit.store.atomics",
    "conduit.store.arguments",
    "conduit.store.copying",
    "conduit.store.words",
    "conduit.store.events",
    "conduit.store.protocol",
    "conduit.store.locks",
    "conduit.store.holds",
    "conduit.store.recovery",
    "conduit.store.counting",
    "conduit.store.limiter",
    "conduit.store.removal",
    "conduit.store.row_ids",
    "conduit.store.settling",
    "conduit.store.interpreter",
    "conduit.store.spans",
    "conduit.store.episodes",
    "conduit.store.writing",
    "conduit.store.turning",
    "conduit.store.reopening",
    "conduit.store.staging",
    "conduit.store.committing",
    "conduit.store.queue",
    "conduit.store.descriptions",
    "conduit.store.recognising",
    "conduit.store.finals",
    "conduit.store.objects",
    "conduit.store.statistics",
    "conduit.store.cut",
    "conduit.kernels.leaves",
    "conduit.kernels.philox",
    "conduit.kernels.rows",
    "conduit.kernels.augment",
    "conduit.kernels.traces",
    "conduit.kernels.ragged",
    "conduit.kernels.relabel",
    "conduit.kernels.resolve",
    "conduit.kernels.transitions",
    "conduit.kernels.sequences",
    "conduit.kernels.goals",
    "conduit.kernels.describing",
    "conduit.kernels.cpu",
    "conduit.kernels.deliveries",
    "conduit.kernels.staging",
    "conduit.sampling.pages",
    "conduit.sampling.uniform",
    "conduit.sampling.marks",
    "conduit.sampling.tree",
    "conduit.sampling.mass",
    "conduit.sampling.prioritised",
    "conduit.sampling.anchors",
    "conduit.sampling.drawable",
    "conduit.testing.rows",
    "conduit.testing.stepping",
)
"""Every module whose source takes part in compiled kernels of other modules."""


_compiling = threading.RLock()
# the compiler's own locks, and that of its import, cannot be made anew: they are free when nobody is in here
renew_in_child(__name__, "_compiling", threading.RLock, whole=True)


class _Late:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


ir: Any = _Late("llvmlite.ir")
types: Any = _Late("numba.types")
cgutils: Any = _Late("numba.core.cgutils")
"""What the bodies of intrinsics are written with; those run only where something is compiled."""


class _Known:
    """Something that kernels refer to; numba asks such an object for its type."""

    __slots__ = ("__weakref__",)

    @property
    def _numba_type_(self) -> Any:
        from conduit import compiler

        return compiler.type_of(self)


class Declared(_Known):
    """A function that kernels are made of.

    Attributes:
        function: The function.
        signature: A kernel's; None for what only other kernels call.
        nogil: Whether the interpreter lock is released while it runs.
        options: As of numba.njit.
    """

    __slots__ = ("function", "nogil", "options", "signature")

    def __init__(
        self, function: Callable[..., Any], signature: str | None, options: dict[str, Any], *, nogil: bool = False
    ) -> None:
        self.function = function
        self.signature = signature
        self.nogil = nogil
        self.options = options

    def __call__(self, *arguments: Any) -> Any:
        """Compile it for these arguments and call it: for tests; kernels are called by their `entry`."""
        from conduit import compiler

        return compiler.dispatcher(self)(*arguments)

    def __repr__(self) -> str:
        return f"<kernel {name_of(self)}>"


class Intrinsic(_Known):
    """A function whose code its own body writes: body(typing context, *argument types) is (signature, code generator).

    Attributes:
        function: The body.
    """

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        """Only kernels can call it."""
        raise NotImplementedError(
            f"Expected a call out of a kernel, got one of {self.function.__qualname__} from Python"
        )


class External(_Known):
    """A C function that kernels call by its name.

    Attributes:
        name: Its symbol.
        signature: As text.
    """

    __slots__ = ("name", "signature")

    def __init__(self, name: str, signature: str) -> None:
        self.name = name
        self.signature = signature


declared: list[Declared] = []
"""Every kernel of the modules that are imported."""


def kernel(signature: str, *, nogil: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel; nothing is compiled yet.

    Args:
        signature: For instance `"int64(int64, object)"`.
        nogil: Release the interpreter lock while it runs; costs about 30 ns a call, so only for long ones.
    """

    def declare(function: Callable[..., Any]) -> Declared:
        declared.append(Declared(function, signature, {}, nogil=nogil))
        return declared[-1]

    return declare


def inner(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator for functions that only other kernels call; options are numba.njit's."""
    if function is None:
        return lambda late: Declared(late, None, options)
    return Declared(function, None, options)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Decorator for functions that write their own code (`Intrinsic`)."""
    return Intrinsic(function)


def name_of(known: Declared) -> str:
    """A kernel's name, unique among those of modules."""
    return f"{known.function.__module__}.{known.function.__qualname__}"


def key_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    """What tells a function from all others in every process: its name, and what its closure holds, by name."""
    cells = tuple(_named(cell.cell_contents) for cell in function.__closure__ or ())
    return function.__module__, function.__qualname__, cells


def _named(value: Any) -> Any:
    if isinstance(value, Declared | Intrinsic):
        return key_of(value.function)
    if isinstance(value, python_types.FunctionType):
        return key_of(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__name__} {value!r}"


@functools.cache
def entry(known: Any) -> Callable[..., int]:
    """The compiled entry point of a declared kernel; loaded or compiled at the first call.

    Raises:
        ConfigError: CONDUIT_KERNELS asks for what there is not; or it has to be compiled, and numba's compiler is switched off.
    """
    from conduit.native import library

    found = library.entry(known)
    if found is not None:
        return found
    with _compiling:
        from conduit import compiler

        return compiler.entry(known)


@functools.cache
def address(function: Callable[..., Any], signature: str) -> int:
    """Native address of `function` as a C callback, for kernels that call through a pointer.

    Raises:
        ConfigError: As `entry`.
    """
    from conduit.native import library

    found = library.address(function, signature)
    if found:
        return found
    with _compiling:
        from conduit import compiler

        return compiler.address(function, signature)


def native(known: Any) -> int:
    """Address of a kernel's machine code, in numba's calling convention: int32 f(result*, exception**, arguments...)."""
    from conduit.native import library

    found = library.native(known)
    if found:
        return found
    with _compiling:
        from conduit import compiler

        return compiler.native(known)
