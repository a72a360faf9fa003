"""The packages that `conduit doctor` checks.

Each is imported in a process of its own, since a broken package may crash or hang the importing process. All run at the same time, since
each import takes a second or more.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from conduit.cli.checks import Check
from conduit.cli.output import counted, size

_PATIENCE = 120.0

_TORCH = """
import json, torch
out = {"version": torch.__version__, "cuda_build": torch.version.cuda, "devices": []}
out["sum"] = float(torch.ones(8).sum())
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        out["devices"].append({"name": device.name, "bytes": device.total_memory, "capability": f"{device.major}.{device.minor}"})
    out["cuda_sum"] = float(torch.ones(8, device="cuda").sum())
print(json.dumps(out))
"""
_TRITON = """
import json, triton
try:
    target = str(triton.runtime.driver.active.get_current_target())
except Exception:
    target = None
print(json.dumps({"version": triton.__version__, "target": target}))
"""
_UCX = """
import json, ucxx
print(json.dumps({"version": ucxx.__version__, "ucx": ".".join(map(str, ucxx.get_ucx_version()))}))
"""
_PLAIN = """
import json, {0}
print(json.dumps({{"version": {0}.__version__}}))
"""

_PROGRAMS = {
    "torch": _TORCH,
    "triton": _TRITON,
    "ucxx": _UCX,
    "gymnasium": _PLAIN.format("gymnasium"),
    "matplotlib": _PLAIN.format("matplotlib"),
}
_REMEDIES = {
    "torch": "pip install 'conduit-rl[torch]'; actors, and format=\"numpy\", do without",
    "triton": "pip install 'conduit-rl[gpu]', for batches on a GPU",
    "ucxx": "pip install ucxx-cu12 (or ucxx-cu13); one node does not need it",
    "gymnasium": "pip install 'conduit-rl[gym]'",
    "matplotlib": "pip install 'conduit-rl[demo]'",
}
_PURPOSES = {
    "torch": "batches as tensors",
    "triton": "kernels on GPUs",
    "ucxx": "transfers between nodes",
    "gymnasium": "environments, the demo",
    "matplotlib": "the demo's plot",
}


@dataclass(frozen=True, slots=True)
class Imported:
    """The outcome of importing a package.

    Attributes:
        status: "ok", "missing" or "broken".
        found: The finding, if the status is not "ok".
        facts: Facts that the package reports, if the status is "ok".
    """

    status: str
    found: str
    facts: dict[str, Any]


class Imports:
    """Imports of packages in background processes; a context manager that leaves no process behind."""

    def __init__(self) -> None:
        self._running = {
            name: subprocess.Popen(  # noqa: S603 - our own program, in this interpreter
                [sys.executable, "-P", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, program in _PROGRAMS.items()
            if importlib.util.find_spec(name) is not None
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()

    def checks(self) -> Iterator[Check]:
        """Wait for the imports, two minutes at most for each, and judge them."""
        torch = self._finish("torch")
        # who has it means to use it
        yield _of_package("torch", torch, required=torch.status != "missing")
        yield _of_cuda(torch)
        yield _of_package("triton", self._finish("triton"))
        yield _of_package("ucxx", self._finish("ucxx"))
        yield _of_package("gymnasium", self._finish("gymnasium"))
        yield _of_package("matplotlib", self._finish("matplotlib"))

    def _finish(self, name: str) -> Imported:
        if name not in self._running:
            return Imported("missing", f"not installed ({_PURPOSES[name]})", {})
        process = self._running[name]
        try:
            out, err = process.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            return Imported("broken", f"its import did not end within {_PATIENCE:.0f} s", {})
        if process.returncode < 0:
            return Imported("broken", f"its import was ended by {signal.Signals(-process.returncode).name}", {})
        try:
            facts = json.loads(out.splitlines()[-1])
        except (IndexError, ValueError):
            facts = None
        if process.returncode or not isinstance(facts, dict):
            lines = err.strip().splitlines()
            return Imported("broken", f"its import fails: {lines[-1] if lines else f'exit {process.returncode}'}", {})
        return Imported("ok", "", facts)


def _of_package(name: str, imported: Imported, *, required: bool = False) -> Check:
    if imported.status == "missing":
        return Check("packages", name, "missing", required, imported.found, _REMEDIES[name])
    if imported.status == "broken":
        return Check("packages", name, "broken", required, imported.found, f"install it anew: {_REMEDIES[name]}")
    facts = imported.facts
    found = str(facts["version"])
    if name == "torch":
        found += f", built for CUDA {facts['cuda_build']}" if facts["cuda_build"] else ", built for the CPU"
    elif name == "triton":
        found += f", for {facts['target']}" if facts["target"] else ", with no GPU to compile for"
    elif name == "ucxx":
        found += f", UCX {facts['ucx']}"
    return Check("packages", name, "ok", required, found, None, facts)


def _of_cuda(torch: Imported) -> Check:
    driver = _nvidia_driver()
    devices = torch.facts.get("devices", [])
    details = {"driver": driver, "devices": devices}
    if devices:
        first = f"{devices[0]['name']}, {size(devices[0]['bytes'])}, compute capability {devices[0]['capability']}"
        if torch.facts.get("cuda_sum") != 8.0:
            return Check("packages", "cuda", "broken", False, f"{first}; a sum on it came out wrong", None, details)
        found = first if len(devices) == 1 else f"{counted(len(devices), 'device')}, the first {first}"
        return Check("packages", "cuda", "ok", False, found, None, details)
    if driver is None:
        return Check("packages", "cuda", "missing", False, "no NVIDIA GPU here", None, details)
    if torch.status == "ok" and not torch.facts["cuda_build"]:
        remedy = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
        found = f"driver {driver}, but this torch is built for the CPU"
    else:
        remedy = "compare `nvidia-smi` with the CUDA version of torch; in Docker: --gpus all"
        found = f"driver {driver}, but torch sees no device"
    return Check("packages", "cuda", "broken", False, found, remedy, details)


def _nvidia_driver() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), "of unknown version")
