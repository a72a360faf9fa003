"""Compiling declared kernels with numba, once per machine, where no library that was compiled ahead of time holds them.

Two things differ from `numba.njit(..., cache=True)`:

* The cache is stamped with a hash over the sources of the kernel's module and of every module with kernels that it imports,
  directly or through others, so that editing a function also renews the kernels that inlined it (numba itself looks only at
  the caller's file) and leaves the rest alone.
* Of several processes that miss a kernel at once, one compiles it and the others wait (conduit.native.compile.turns). Within a process
  conduit.native.jit lets one thread in here at a time.

A kernel's entry point is numba's C function. Calling it skips numba's type dispatch: about 35 ns instead of 80.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import caching
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.extending import NativeValue, models, register_model, unbox
from numba.extending import intrinsic as numba_intrinsic

from conduit.errors import ConfigError
from conduit.native.compile import turns
from conduit.native.compile.declare import Declared, External, Intrinsic, key_of
from conduit.native.compile.sources import stamp_of

loaded: list[str] = []
"""Kernels that this process had from a cache, by name."""
compiled: list[str] = []
"""Kernels that this process compiled."""
folders: set[str] = set()
"""Where they are cached."""
warned: list[str] = []
"""Why a kernel could not be kept, once it was told."""


class ObjectType(types.Type):
    """numba type of an argument that is an object's address."""

    def __init__(self) -> None:
        super().__init__(name="conduit.object")


@register_model(ObjectType)
class _ObjectModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.IntType(64))


@unbox(ObjectType)
def _take_address(_kind: Any, value: Any, context: Any) -> Any:
    return NativeValue(context.builder.ptrtoint(value, ir.IntType(64)))


_OBJECT = ObjectType()


def parse(signature: str) -> tuple[tuple[Any, ...], Any]:
    """Argument types and result type of a declared signature."""
    result, _, arguments = signature.rstrip(")").partition("(")
    kinds = [_type(word) for word in arguments.split(",") if word.strip()]
    return tuple(kinds), _type(result)


def _type(word: str) -> Any:
    name = word.strip()
    return _OBJECT if name == "object" else getattr(types, name)


def _signature(signature: str) -> Any:
    arguments, result = parse(signature)
    return result(*arguments)


@functools.cache
def dispatcher(declared: Declared) -> Any:
    """The dispatcher of a declared function."""
    return numba.njit(nogil=declared.nogil, **declared.options)(declared.function)


@functools.cache
def _intrinsic(known: Intrinsic) -> Any:
    return numba_intrinsic(known.function)


def type_of(known: Any) -> Any:
    """The type of what kernels refer to."""
    if isinstance(known, Declared):
        return dispatcher(known)._numba_type_
    if isinstance(known, External):
        return types.ExternalFunction(known.name, _signature(known.signature))
    context = cpu_target.typing_context
    made = _intrinsic(known)
    context.refresh()
    return context.resolve_value_type(made)


class _Stamped:
    """Mixin for numba's cache locators: the stamp covers all sources that a kernel can have inlined."""

    _py_file: str

    def get_source_stamp(self) -> str:
        return stamp_of(self._py_file)


class _UserProvided(_Stamped, caching.UserProvidedCacheLocator):
    pass


class _InTree(_Stamped, caching.InTreeCacheLocator):
    pass


class _InTreeToRead(_Stamped, caching.InTreeCacheLocator):
    """The package's own folder where it cannot be written to, as in an image that was warmed when it was made."""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        locator = cls(py_func, py_file)
        kept = Path(locator.get_cache_path()).glob(f"{Path(py_file).stem}.{py_func.__name__}-*.nbi")
        return locator if any(kept) else None


class _UserWide(_Stamped, caching.UserWideCacheLocator):
    pass


class _Impl(caching.CompileResultCacheImpl):
    _locator_classes = [_UserProvided, _InTree, _InTreeToRead, _UserWide]  # noqa: RUF012 - numba's own attribute


class _Index(caching.IndexDataCacheFile):
    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except Exception:  # noqa: BLE001 - written by another release, or cut short: as good as none
            return {}


class _KernelCache(caching.FunctionCache):
    _impl_class = _Impl

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = _Index(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    @property
    def index(self) -> str:
        """Name of the file that lists this function's kernels."""
        return f"{self._impl.filename_base}.nbi"

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        # the sources themselves are in the stamp
        return sig, codegen.magic_tuple(), key_of(self._py_func)

    def has(self, signature: Any) -> bool:
        """Whether a kernel is there."""
        key = self._index_key(signature, cpu_target.target_context.codegen())
        return self._cache_file._load_index().get(key) is not None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - numba's pickles fail in many ways; the kernel is compiled anew and written over it
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_unkept(f"could not keep a compiled kernel in {self._cache_path} ({error.strerror})")


def _warn_unkept(what: str) -> None:
    if not warned:
        warned.append(what)
        warnings.warn(
            f"Conduit {what} and compiles kernels anew in every process, which takes seconds each: set NUMBA_CACHE_DIR to a "
            "folder that this user may write to, and run `conduit warm` once",
            RuntimeWarning,
            stacklevel=2,
        )


def _make(owner: Any, function: Callable[..., Any], signature: Any, compile_: Callable[[], object]) -> None:
    """Have a dispatcher or callback load a kernel from the cache, or compile it in turn."""
    name = f"{function.__module__}.{function.__qualname__}"
    try:
        cache = _KernelCache(function)
    except RuntimeError:  # numba found no folder to write to
        _warn_unkept("found no writable folder for compiled kernels")
        with turns.alone():
            compile_()
        compiled.append(name)
        return
    owner._cache = cache
    folders.add(cache.cache_path)
    if not cache.has(signature):
        with turns.turn(cache.cache_path, cache.index):
            there = cache.has(signature)
            compile_()
        (loaded if there else compiled).append(name)
        return
    compile_()
    loaded.append(name)


def _check_compiler() -> None:
    if numba.config.DISABLE_JIT:
        raise ConfigError("Expected numba's compiler, it is switched off by NUMBA_DISABLE_JIT: unset that variable")


def _compiled(declared: Declared) -> Any:
    """The compile result of a kernel."""
    if declared.signature is None:
        raise TypeError(f"Expected a kernel with a signature, got {declared!r}")
    _check_compiler()
    signature = _signature(declared.signature)
    made = dispatcher(declared)
    if signature.args not in made.overloads:
        _make(made, declared.function, signature, lambda: made.compile(signature))
    return made.overloads[signature.args]


def entry(declared: Declared) -> Callable[..., int]:
    """Entry point of a kernel; see conduit.native.jit."""
    return _compiled(declared).entry_point  # type: ignore[no-any-return]


def native(declared: Declared) -> int:
    """Address of a kernel's machine code, in numba's calling convention: int32 f(result*, exception**, arguments...)."""
    result = _compiled(declared)
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


def address(function: Callable[..., Any], signature: str) -> int:
    """Address of a C callback; see conduit.native.jit."""
    _check_compiler()
    arguments, result = parse(signature)
    callback = CFunc(function, (arguments, result), locals={}, options={"nopython": True})
    _make(callback, function, callback._sig, callback.compile)
    _KEPT.append(callback)
    return int(callback.address)


_KEPT: list[Any] = []
