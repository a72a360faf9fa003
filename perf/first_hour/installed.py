"""Conduit as it is installed from its wheel, in environments of its own.

The wheel is built from this tree, with the libraries of kernels that lie below build/ where they are of its sources. An environment holds
the wheel alone; what it depends on is found where this interpreter finds it, so that making one takes a second and no network.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BUILD_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with Conduit from its wheel, and nothing compiled or cached yet.

    Attributes:
        folder: Where it lies.
    """

    folder: Path

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    def variables(self, **more: str) -> dict[str, str]:
        """Environment variables of a process that starts in it: caches are empty folders of its own."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NUMBA", "CONDUIT"))
        }
        return kept | {"HOME": str(self.folder / "home"), "NUMBA_CACHE_DIR": str(self.folder / "numba")} | more


@contextlib.contextmanager
def wheel() -> Iterator[Path]:
    """The wheel of this tree, built by pip."""
    with tempfile.TemporaryDirectory() as name:
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--disable-pip-version-check",
            "-w",
            name,
            str(ROOT),
        ]
        if _has("hatchling"):
            command.insert(5, "--no-build-isolation")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BUILD_SECONDS)
        if done.returncode:
            raise RuntimeError(f"the wheel was not built: {done.stderr.strip().rpartition(chr(10))[2]}")
        (path,) = Path(name).glob("*.whl")
        yield path


def _has(package: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def environment(built: Path) -> Iterator[Environment]:
    """A fresh environment with a wheel in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder, with_pip=False, symlinks=True)
        made = Environment(folder)
        (folder / "home").mkdir()
        inside = subprocess.run(
            [made.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        # a line of a .pth file is a folder of modules, whose own .pth files (an editable Conduit's) are not looked at
        folders = [one for one in sys.path if Path(one).name in ("site-packages", "dist-packages")]
        Path(inside, "dependencies.pth").write_text("\n".join(folders))
        pip = [sys.executable, "-m", "pip", "--python", made.python, "install", "--no-deps", "--no-index", "-q"]
        subprocess.run([*pip, "--disable-pip-version-check", str(built)], check=True, capture_output=True, timeout=300)
        yield made
