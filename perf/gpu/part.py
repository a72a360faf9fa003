"""One part of perf/gpu_check.py, in a process of its own: python -m perf.gpu.part RESULT OPTIONS-AS-JSON.

What it finds is written down again and again, so that what it found before it hangs or crashes is not lost.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from perf.gpu.found import Found
from perf.gpu.running import Clock, write


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    import platform

    import torch
    import triton

    about: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "system": platform.platform(),
        "processor": platform.machine(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        about |= {"gpu": properties.name, "gpu memory": properties.total_memory, "cuda": torch.version.cuda}
    return about


def rates(bench: Any) -> None:
    """Copy rates, against which everything is held."""
    bench.rates()


def main() -> int:
    """Run the parts that are named, in order; returns the exit status."""
    result, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    if options["interpret"]:
        os.environ["TRITON_INTERPRET"] = "1"
    content: dict[str, Any] = {"machine": {}, "rows": [], "rates": options["rates"], "errors": {}}
    found: list[Found] = []

    def save() -> None:
        content["rows"] = [dataclasses.asdict(one) for one in list(found)]
        write(result, content)

    content["machine"] = machine()
    from perf.gpu.measuring import Bench, OutOfTime

    bench = Bench(
        "cpu" if options["interpret"] else "cuda", interpret=options["interpret"], clock=Clock(options["seconds"])
    )
    bench.found = found
    bench.copy_rate, bench.bus_rate = options["rates"]
    over = threading.Event()

    def keep() -> None:
        while not over.wait(0.5):
            save()

    threading.Thread(target=keep, daemon=True).start()
    device = None
    for name in options["parts"]:
        module, _, function = name.partition(":")
        before = len(found)
        try:
            part = getattr(importlib.import_module(module), function)
            needs = len(inspect.signature(part).parameters)
            if needs > 1 and device is None:
                from conduit.plane.device.cuda import CudaDevice
                from conduit.plane.device.host import HostDevice

                device = HostDevice() if options["interpret"] else CudaDevice("cuda")
            part(*(bench, device)[:needs])
        except OutOfTime:
            content["errors"][name] = "not reached before the deadline"
        # one part's failure must not hide the others' figures
        except Exception as error:  # noqa: BLE001
            import traceback

            traceback.print_exc()
            content["errors"][name] = f"{type(error).__name__}: {error}"
        content["rates"] = [bench.copy_rate, bench.bus_rate]
        print(f"  {name}: {len(found) - before} rows", flush=True)
    over.set()
    save()
    return 1 if content["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
