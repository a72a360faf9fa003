"""The device path, on host memory in Triton's interpreter: copies, draws, destructors and errors; and the script for a first GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from perf.bars import Bar

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = """
import gc, json, threading, time
import numpy as np, torch, conduit
from conduit.plane.device.cuda import CudaDevice
from conduit.plane.device.host import HostDevice
from conduit.contracts.device import Event
from conduit.plane.device.mirror import Mirror


class Late(Event):
    def __init__(self):
        self.over = threading.Event()

    def passed(self):
        return self.over.is_set()

    def wait(self):
        assert self.over.wait(30)


class Behind(HostDevice):
    def record(self):
        self.event = Late()
        return self.event


found = {}
schema = conduit.Schema([conduit.Field("obs", "float32", (4,), observation=True)])
with conduit.Engine.create("bar-device", {"t": conduit.Table(schema, 300, page_rows=48)}) as engine:
    with engine.writer("t") as writer:
        for step in range(100):
            writer.append(obs=np.full(4, step, np.float32))
    device = Behind(1 << 26)
    mirror = Mirror(device, engine._views["t"], "1 MiB", None)
    mirror.refresh()
    time.sleep(0.1)
    found["first copies"] = "wait" if not mirror._flying[0].event.passed() else "do not wait"
    event = device.event
    threading.Timer(0.2, event.over.set).start()
    del mirror
    gc.collect()
    found["a dropped mirror"] = "waits" if event.passed() else "does not wait"
    loader = engine.loader("t", batch_size=4, device=HostDevice(), pool="1 MiB")
    loader.residence.fill()
    draws = loader.draws()
    draws.replay()
    loader.close()
    try:
        draws.replay()
        found["replay after close"] = "replayed"
    except Exception as error:
        found["replay after close"] = type(error).__name__
    cuda = object.__new__(CudaDevice)
    cuda.place = "cuda:0"

    def failing(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    empty, torch.empty = torch.empty, failing
    try:
        cuda.pinned(1 << 20)
    except Exception as error:
        found["pinned memory"] = type(error).__name__
    torch.empty = empty
print(json.dumps(found))
"""


def _lifetimes() -> Iterator[Bar]:
    """A17 streams, events and lifetimes of the device path."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env=environment, timeout=120, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    for name, right in (
        ("first copies", "wait"),
        ("a dropped mirror", "waits"),
        ("replay after close", "Closed"),
        ("pinned memory", "NoPinnedMemory"),
    ):
        yield Bar(f"A17 {name}", found[name], right, found[name] == right)


def _preflight() -> Iterator[Bar]:
    """A17 the script for a first GPU, where posix_ipc is missing."""
    with tempfile.TemporaryDirectory() as folder:
        hide = "import sys\nclass H:\n def find_spec(self, n, p=None, t=None):\n  if n == 'posix_ipc': raise ImportError(n)\n"
        (Path(folder) / "sitecustomize.py").write_text(hide + "sys.meta_path.insert(0, H())\n")
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(_ROOT / "perf/gpu_check.py"), "--out", folder],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": folder},
            timeout=120,
            check=False,
        )
        seconds = time.monotonic() - begun
        written = json.loads((Path(folder) / "gpu_check.json").read_text())
    named = [problem.split()[0] for problem in written["problems"]]
    ok = done.returncode == 2 and "posix_ipc" in named and "pip download" in done.stderr and seconds < 15
    yield Bar("A17 gpu_check without posix_ipc", f"status {done.returncode}, names {named}", "2, ['posix_ipc']", ok)


GROUPS: tuple[Callable[[], Iterator[Bar]], ...] = (_lifetimes, _preflight)
