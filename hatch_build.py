"""The build step of wheels: kernels compiled ahead of time, one library per instruction set.

An editable install and a source distribution hold sources only. A wheel that no library can be built for is made without, and says
so: its kernels are compiled where they are used, as those of a checkout are. `CONDUIT_KERNELS=compile` asks for such a wheel.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """Adds the libraries to a wheel, and says in its tag what they need."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the libraries before the wheel is put together."""
        if version == "editable" or os.environ.get("CONDUIT_KERNELS") == "compile":
            return
        sys.path.insert(0, self.root)
        try:
            from conduit.native.compile import build
            from conduit.native.compile.library import INSTRUCTION_SETS, path_for
        except ImportError as error:
            self._without(f"conduit.native.compile.build needs {error.name}")
            return
        finally:
            sys.path.remove(self.root)
        folder = Path(self.root) / "build"
        try:
            made = build.made(tuple(INSTRUCTION_SETS), folder)
        except build.CannotBuild as error:
            self._without(str(error))
            return
        for instructions, path in zip(INSTRUCTION_SETS, made, strict=True):
            build_data["force_include"][str(path)] = f"conduit/native/{path_for(instructions).name}"
        build_data["pure_python"] = False
        build_data["tag"] = build.wheel_tag(made)

    def _without(self, why: str) -> None:
        self.app.display_warning(
            f"This wheel has no kernels that are compiled ahead of time, they are compiled at their first use: {why}"
        )
