"""Kernels as they are declared: plain Python functions, with a signature. Nothing is compiled here, and no compiler is imported.

A signature is text, `"int64(int64, float64, object)"`. An `object` is handed over as its address and nothing more
(conduit.native.memory.address_of).
"""

from __future__ import annotations

import importlib
import types as python_types
from collections.abc import Callable
from typing import Any, ClassVar

KERNEL_MODULES = (
    "conduit.native.compile.declare",
    "conduit.native.jit",
    "conduit.native.compile.compiler",
    "conduit.native.memory",
    "conduit.store.format.words",
    "conduit.store.pages.protocol",
    "conduit.store.segment.locks",
    "conduit.store.pages.holds",
    "conduit.store.pages.recovery",
    "conduit.store.pages.row_counts",
    "conduit.store.pages.rate_limiter",
    "conduit.store.pages.deletion",
    "conduit.store.pages.row_ids",
    "conduit.store.pages.settling",
    "conduit.native.cpython_abi",
    "conduit.store.pages.ragged_values",
    "conduit.store.ingest.report_episodes",
    "conduit.store.ingest.page_writer",
    "conduit.store.ingest.first_page",
    "conduit.store.ingest.commit",
    "conduit.store.tables.queue",
    "conduit.store.ingest.field_specs",
    "conduit.store.ingest.match_objects",
    "conduit.store.ingest.append_objects",
    "conduit.store.tables.statistics",
    "conduit.store.checkpoint.snapshot",
    "conduit.kernels.cpu.priorities",
    "conduit.native.philox",
    "conduit.kernels.cpu.elements",
    "conduit.kernels.cpu.gather",
    "conduit.kernels.cpu.augment",
    "conduit.kernels.cpu.returns",
    "conduit.kernels.cpu.ragged",
    "conduit.kernels.ops.hindsight",
    "conduit.kernels.cpu.windows",
    "conduit.kernels.cpu.transitions",
    "conduit.kernels.cpu.sequences",
    "conduit.kernels.cpu.hindsight",
    "conduit.kernels.cpu.window_job",
    "conduit.kernels.cpu.job",
    "conduit.kernels.cpu.near_far",
    "conduit.sampling.candidates",
    "conduit.sampling.uniform",
    "conduit.sampling.marks",
    "conduit.sampling.sum_tree",
    "conduit.sampling.prioritized_update",
    "conduit.sampling.prioritized_draw",
    "conduit.sampling.prioritized",
    "conduit.sampling.anchors",
    "conduit.sampling.drawable",
    "conduit.plane.deliver.fill",
    "conduit.plane.deliver.counted_deliveries",
    "conduit.testing.rows",
    "conduit.testing.stepping",
)
"""Every module whose source takes part in compiled kernels of other modules."""


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


class Known:
    """Something that kernels refer to; numba asks such an object for its type."""

    __slots__ = ("__weakref__",)

    type_of: ClassVar[Callable[[Any], Any]]
    """The compiler's; conduit.native.jit sets it."""

    @property
    def _numba_type_(self) -> Any:
        return Known.type_of(self)


class Declared(Known):
    """A function that kernels are made of.

    Attributes:
        function: The function.
        signature: A kernel's; None for what only other kernels call.
        nogil: Whether the interpreter lock is released while it runs.
        options: As of numba.njit.
    """

    __slots__ = ("function", "nogil", "options", "signature")
    dispatch: ClassVar[Callable[..., Any]]
    """The compiler's; conduit.native.jit sets it."""

    def __init__(
        self, function: Callable[..., Any], signature: str | None, options: dict[str, Any], *, nogil: bool = False
    ) -> None:
        self.function = function
        self.signature = signature
        self.nogil = nogil
        self.options = options

    def __call__(self, *arguments: Any) -> Any:
        """Compile it for these arguments and call it: for tests; kernels are called by their `entry`."""
        return Declared.dispatch(self, *arguments)

    def __repr__(self) -> str:
        return f"<kernel {name_of(self)}>"


class Intrinsic(Known):
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


class External(Known):
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
