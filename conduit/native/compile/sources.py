"""Stamps: hashes over the sources that a compiled kernel was made from, so that one of other sources is never used."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from conduit.native.compile.declare import KERNEL_MODULES

PACKAGE = Path(__file__).parents[2]

_MODULES = frozenset(KERNEL_MODULES)
_IMPORT = re.compile(rb"^\s*(?:from\s+(conduit[\w.]*)\s+import\s+(\([^)]*\)|[^\n]*)|import\s+([^\n]*))", re.MULTILINE)
"""Import statements of a source; parsing it whole would take a tenth of a second in every process."""
_BUILDERS = ("conduit.native.compile.build", "conduit.native.compile.objects", "conduit.native.compile.wrappers")
"""Modules that a library is made by, besides those whose functions are in it."""


def path_of(module: str) -> Path:
    """The file of a module of the package."""
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


@functools.cache
def source(path: Path) -> tuple[bytes, tuple[str, ...]]:
    """A file, and the modules with kernels that it imports, by any statement in it."""
    text = path.read_bytes()
    names: list[str] = []
    for package, members, modules in _IMPORT.findall(text):
        of = package.decode()
        names += [of, *(f"{of}.{name}" for name in re.findall(r"\w+", members.decode()))]
        names += re.findall(r"[\w.]+", modules.decode())
    return text, tuple(name for name in names if name in _MODULES)


@functools.cache
def stamp_of(path: str) -> str:
    """Hash over a file and all modules with kernels that it reaches by imports."""
    text, waiting = source(Path(path))
    reached: set[str] = set()
    left = ["conduit.native.compile.declare", "conduit.native.jit", "conduit.native.compile.compiler", *waiting]
    while left:
        module = left.pop()
        if module not in reached:
            reached.add(module)
            left += source(path_of(module))[1]
    digest = hashlib.sha256(text)
    for module in sorted(reached):
        digest.update(source(path_of(module))[0])
    return digest.hexdigest()


def built_modules() -> tuple[str, ...]:
    """The modules whose kernels a library holds."""
    return tuple(name for name in KERNEL_MODULES if not name.startswith("conduit.testing."))


@functools.cache
def library_stamp() -> str:
    """Hash over all sources that a library of kernels is made from."""
    digest = hashlib.sha256()
    for module in (*built_modules(), *_BUILDERS):
        text = path_of(module).read_bytes()
        digest.update(f"{module} {len(text)} ".encode())
        digest.update(text)
    return digest.hexdigest()
