"""A description of the machine that a figure was measured on."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, Any]:
    """Processor, memory, kernel, Python, this tree's commit, the date; and how loaded the machine is now."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("numpy", "numba", "torch")},
        "commit": commit(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="minutes"),
        "load": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """Short name of the commit, with + where the tree differs from it; empty outside a clone."""
    name = _git("rev-parse", "--short=10", "HEAD")
    return name + "+" if name and _git("status", "--porcelain", "--untracked-files=no") else name


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = ((index / name).read_text().strip() for name in ("level", "type"))
        if kind != "Instruction":
            found[f"L{level}"] = (index / "size").read_text().strip()
    return found
