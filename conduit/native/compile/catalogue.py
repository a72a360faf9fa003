"""What a library of kernels holds: every declared kernel, and the callbacks that their modules list.

A module that calls `conduit.native.jit.address` says in `callbacks()` what it may ask for, as pairs of a function and its signature, and in
`usual()`, where these are many, which of them most programs do. What it leaves out is compiled when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

from conduit.native.compile.declare import Declared, declared, key_of
from conduit.native.compile.sources import built_modules

_COMPILER = "conduit.native.compile.compiler"
"""Takes part in every kernel and holds none; importing it would import numba."""


def _modules() -> Iterator[tuple[str, ModuleType]]:
    for name in built_modules():
        if name != _COMPILER:
            yield name, importlib.import_module(name)


def kernels() -> Iterator[Declared]:
    """Every kernel of the package that has an entry."""
    names = {name for name, _ in _modules()}
    yield from (one for one in declared if one.function.__module__ in names)


def callbacks(*, every: bool = True) -> Iterator[tuple[Callable[..., int], str]]:
    """Every callback that is listed, or the usual ones."""
    seen = set()
    for _, module in _modules():
        listed = getattr(module, "callbacks", None)
        if not every:
            listed = getattr(module, "usual", listed)
        for function, signature in () if listed is None else listed():
            # bytes and bools, for one, are read by the same function
            key = key_of(function), signature
            if key not in seen:
                seen.add(key)
                yield function, signature
