"""Right: each value that once came out wrong, or crashed, or hung, with the value that is right; and what being right costs.

The cases stand in `perf/right`, one module for each part of the code.
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
