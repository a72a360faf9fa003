"""hatchling, with what kernels are compiled with asked for where a wheel is built, and not for editable installs or sources."""

from __future__ import annotations

from typing import Any

from hatchling import build as _hatchling
from hatchling.build import *  # noqa: F403 - which hooks there are depends on who builds

_KERNELS = ("numba>=0.61", "numpy>=2.0", "posix-ipc>=1.1")
"""What conduit.native.compile.build imports (hatch_build.py runs it)."""


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """What a wheel is built with."""
    return [*_hatchling.get_requires_for_build_wheel(config_settings), *_KERNELS]
