"""Right: cases that once gave a wrong value, a crash or a hang, with the right value; and the cost of the fixes.

The cases are in `perf/right`, one module for each part of the code.
"""

from __future__ import annotations

import importlib
import pkgutil

import perf.right

TITLE = "nothing silently wrong: each case with its right value"

_MODULES = [
    importlib.import_module(f"perf.right.{module.name}")
    for module in sorted(pkgutil.iter_modules(perf.right.__path__), key=lambda module: module.name)
]
GROUPS = tuple(group for module in _MODULES for group in module.GROUPS)
