"""What perf/gpu_check.py needs, looked for with the standard library alone, in seconds, before anything is imported.

What is missing is named together with how to carry it to a machine without a network.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

NEEDED = {
    "numpy": (2, 0),
    "torch": (2, 11),
    "triton": (3, 6),
    "numba": (0, 61),
    "llvmlite": (0, 44),
    "posix_ipc": (1, 1),
}
"""Modules, and the least release of each."""
OPTIONAL = ("pytest",)


@dataclass
class Preflight:
    """What was found.

    Attributes:
        problems: What keeps the script from running, each with a remedy.
        versions: {module: its release, or None}.
        notes: What is missing and can be done without.
    """

    problems: list[str]
    versions: dict[str, str | None]
    notes: list[str]


def unpack(wheels: Path, into: Path) -> list[str]:
    """Unpack the wheels of a folder that fit this Python; returns the names of those that do not.

    An extension module cannot be imported out of a wheel, and pip may not be there.
    """
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    unfit = []
    for wheel in sorted(wheels.glob("*.whl")):
        _, *tags = wheel.stem.rsplit("-", 3)
        python, abi, system = tags if len(tags) == 3 else ("", "", "")
        fits = (tag in python.split(".") or "py3" in python.split(".") or abi == "abi3") and (
            system == "any" or system.endswith(platform.machine())
        )
        if not fits:
            unfit.append(wheel.name)
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    return unfit


def _release(module: str) -> str | None:
    """The release of a module that is there, "" where it does not say, None where there is no such module."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except (ImportError, ValueError):
        return None
    for name in (module, module.replace("_", "-")):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _numbers(release: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", release)
    return tuple(map(int, found.groups())) if found else ()


def carry(module: str) -> str:
    """How a module comes to a machine without a network."""
    name = module.replace("_", "-")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"on a machine with a network run `pip download --only-binary :all: --no-deps --python-version {version} "
        f"--platform manylinux2014_{platform.machine()} --dest wheels {name}`, carry the folder `wheels` beside the checkout's "
        "perf/, or anywhere, and say --wheels FOLDER"
    )


def look() -> Preflight:
    """Look for everything; imports none of it."""
    problems: list[str] = []
    notes: list[str] = []
    versions: dict[str, str | None] = {"python": platform.python_version()}
    if sys.version_info < (3, 11):  # noqa: UP036 - what it needs is said by it, and not by a syntax error
        problems.append(f"Python 3.11 or newer is needed, this is {platform.python_version()}")
    for module, least in NEEDED.items():
        release = versions[module] = _release(module)
        wanted = ".".join(map(str, least))
        if release is None:
            problems.append(f"{module} (release {wanted} or newer) is missing: {carry(module)}")
        elif release and _numbers(release) < least:
            problems.append(f"{module} {wanted} or newer is needed, {release} is there")
    for module in OPTIONAL:
        versions[module] = _release(module)
        if versions[module] is None:
            notes.append(f"{module} is missing: the tests are not run ({carry(module)})")
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        problems.append(f"{shm} is needed and cannot be written to: run where it is mounted")
    return Preflight(problems, versions, notes)
