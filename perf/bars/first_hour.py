"""First hour: how soon a program works after its installation, and what becomes of its processes.

The rows are in `perf/first_hour`, one module for each kind.
"""

from __future__ import annotations

import importlib
import pkgutil

import perf.first_hour

TITLE = "from the wheel to the first batch, and to the end of a job"

_MODULES = [
    importlib.import_module(f"perf.first_hour.{module.name}")
    for module in sorted(pkgutil.iter_modules(perf.first_hour.__path__), key=lambda module: module.name)
]
GROUPS = tuple(group for module in _MODULES for group in getattr(module, "GROUPS", ()))
