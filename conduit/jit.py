"""Compiling Conduit's CPU kernels with numba, once per machine.

A kernel is a function of plain integers (addresses, counts) compiled for one declared signature. Two things differ from
`numba.njit(..., cache=True)`:

* The cache is stamped with a hash over the sources of the kernel's module and of every module with kernels that it imports,
  directly or through others, so that editing a function also renews the kernels that inlined it (numba itself looks only at
  the caller's file) and leaves the rest alone.
* Compilation happens at the first use of `entry`, not at import, so that a process pays only for the kernels it runs.

`entry(kernel)` is the compiled C entry point. Calling it skips numba's type dispatch: about 35 ns instead of 80.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import caching, sigutils
from numba.core.ccallback import CFunc

from conduit.errors import ConfigError
from conduit.forking import renew_in_child

KERNEL_MODULES = (
    "conduit.jit",
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
    "conduit.sampling.tree",
    "conduit.sampling.mass",
    "conduit.sampling.prioritised",
    "conduit.sampling.anchors",
    "conduit.testing.rows",
    "conduit.testing.stepping",
)
"""Every module whose source takes part in compiled kernels of other modules."""

_MODULES = frozenset(KERNEL_MODULES)

_SIGNATURES: dict[Any, Any] = {}

_compiling = threading.RLock()
# numba's own locks, which cannot be made anew, are free when nobody is in here
renew_in_child(__name__, "_compiling", threading.RLock, whole=True)


def _path_of(module: str) -> Path:
    return Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")


_IMPORT = re.compile(rb"^\s*(?:from\s+(conduit[\w.]*)\s+import\s+(\([^)]*\)|[^\n]*)|import\s+([^\n]*))", re.MULTILINE)
"""Import statements of a source; parsing it whole would take a tenth of a second in every process."""


@functools.cache
def _source(path: Path) -> tuple[bytes, tuple[str, ...]]:
    """A file, and the modules with kernels that it imports, by any statement in it."""
    source = path.read_bytes()
    names: list[str] = []
    for package, members, modules in _IMPORT.findall(source):
        of = package.decode()
        names += [of, *(f"{of}.{name}" for name in re.findall(r"\w+", members.decode()))]
        names += re.findall(r"[\w.]+", modules.decode())
    return source, tuple(name for name in names if name in _MODULES)


@functools.cache
def _source_stamp(path: str) -> str:
    """Hash over a file and all modules with kernels that it reaches by imports."""
    source, waiting = _source(Path(path))
    reached: set[str] = set()
    left = ["conduit.jit", *waiting]
    while left:
        module = left.pop()
        if module not in reached:
            reached.add(module)
            left += _source(_path_of(module))[1]
    digest = hashlib.sha256(source)
    for module in sorted(reached):
        digest.update(_source(_path_of(module))[0])
    return digest.hexdigest()


class _Stamped:
    """Mixin for numba's cache locators: the stamp covers all sources that a kernel can have inlined."""

    _py_file: str

    def get_source_stamp(self) -> str:
        return _source_stamp(self._py_file)


class _UserProvided(_Stamped, caching.UserProvidedCacheLocator):
    pass


class _InTree(_Stamped, caching.InTreeCacheLocator):
    pass


class _UserWide(_Stamped, caching.UserWideCacheLocator):
    pass


class _Impl(caching.CompileResultCacheImpl):
    _locator_classes = [_UserProvided, _InTree, _UserWide]  # noqa: RUF012 - numba's own attribute


def _named(cell: Any) -> Any:
    """What a closure holds, by name: numba's own key pickles compiled functions, which differ in every process."""
    function = getattr(cell, "py_func", None) or getattr(cell, "_defn", None)
    return f"{type(cell).__name__} {cell}" if function is None else _key_of(function)


def _key_of(function: Any) -> tuple[Any, ...]:
    cells = tuple(_named(cell.cell_contents) for cell in function.__closure__ or ())
    return function.__module__, function.__qualname__, cells


class _KernelCache(caching.FunctionCache):
    _impl_class = _Impl

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        # the sources themselves are in the stamp
        return sig, codegen.magic_tuple(), _key_of(self._py_func)


def kernel(signature: Any, *, nogil: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel; nothing is compiled yet.

    Args:
        signature: numba signature, for instance `"int64(int64, int64)"`.
        nogil: Release the interpreter lock while it runs; costs about 30 ns a call, so only for long ones.
    """

    def declare(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(nogil=nogil)(function)
        _SIGNATURES[dispatcher] = signature
        return dispatcher

    return declare


inner = numba.njit
"""Decorator for functions that only other kernels call."""


def _use_cache(compiled: Any, function: Callable[..., Any]) -> None:
    try:
        compiled._cache = _KernelCache(function)
    except RuntimeError:  # numba found no folder to write to
        warnings.warn(
            "Conduit found no writable folder for compiled kernels and compiles them anew in every process, which takes "
            "seconds: set NUMBA_CACHE_DIR to a folder that this user may write to",
            RuntimeWarning,
            stacklevel=2,
        )


@functools.cache
def entry(dispatcher: Any) -> Callable[..., int]:
    """The compiled entry point of a declared kernel; compiled or loaded from the cache at the first call.

    Raises:
        ConfigError: numba's compiler is switched off.
    """
    args, _ = sigutils.normalize_signature(_SIGNATURES[dispatcher])
    if numba.config.DISABLE_JIT:
        raise ConfigError("Expected numba's compiler, it is switched off by NUMBA_DISABLE_JIT: unset that variable")
    with _compiling:
        _use_cache(dispatcher, dispatcher.py_func)
        dispatcher.compile(_SIGNATURES[dispatcher])
    return dispatcher.overloads[args].entry_point  # type: ignore[no-any-return]


@functools.cache
def address(function: Callable[..., Any], signature: str) -> int:
    """Native address of `function` compiled as a C callback, for kernels that call through a pointer."""
    normalized = sigutils.normalize_signature(signature)
    with _compiling:
        callback = CFunc(function, normalized, locals={}, options={"nopython": True})
        _use_cache(callback, function)
        callback.compile()
    _KEPT.append(callback)
    return int(callback.address)


_KEPT: list[Any] = []
