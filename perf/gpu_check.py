"""Check and measure the GPU kernels and the loaders on a device, on a machine with a CUDA GPU: tests, one table, the bars, JSON.

    python perf/gpu_check.py --out results

It runs from a bare checkout, installed or not, with a Python (3.11 or newer) that has torch 2.11 and Triton 3.6 or newer and numpy, and
these small wheels besides: numba (with llvmlite) and posix-ipc; and pytest for the tests. Nothing is downloaded. It ends within
five minutes, by a deadline of its own: what was not reached then is missing from the table and said to be.

First come the GPU's own tests, compiled and on the device, file by file side by side; then copy rates, against which everything is
held; then each kernel, beside torch's own way and torch.compile; then whole loaders into training steps. Without a CUDA device it
says so and ends with status 2. Status 1: a test failed, a bar is short, or something was not measured.

`--interpret` runs every part once on tiny sizes in Triton's interpreter, without a GPU: it shows that the script works, and measures
nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perf.gpu.measuring import Bench

ROOT = Path(__file__).resolve().parents[1]
SUITES = ("tests/gpu/interpret", "tests/gpu/device")
_FOR_TESTS = 110
"""Seconds that the tests may take together."""


def _one_file(path: str, seconds: float, config: Path, interpret: bool) -> tuple[str, str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {"CONDUIT_GPU_TESTS": "1"}
    environment["OMP_NUM_THREADS"] = "1"
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={ROOT}", "-c", str(config)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", path, *options],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return path, "out of time", ""
    words = {0: "passed", 1: "failed"}
    text = done.stdout + done.stderr
    return path, words.get(done.returncode, f"pytest ended with {done.returncode}"), text


def run_tests(seconds: float, interpret: bool) -> dict[str, Any]:
    """Run the GPU's tests, each file in a process of its own; returns {file: how it ended, its last line}."""
    try:
        import pytest  # noqa: F401 - only whether it is there
    except ImportError:
        print("tests: not run, pytest is not installed")
        return {}
    paths = [str(path.relative_to(ROOT)) for suite in SUITES for path in sorted((ROOT / suite).glob("test_*.py"))]
    if interpret:
        paths = ["tests/gpu/interpret/test_skipped_rows.py"]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(min(6, os.cpu_count() or 1)) as pool:
        # the project's own settings name plugins that need not be here
        config = Path(folder) / "pytest.ini"
        config.write_text("[pytest]\npythonpath = " + str(ROOT) + "\n")
        for path, word, text in pool.map(lambda path: _one_file(path, seconds, config, interpret), paths):
            last = text.strip().splitlines()[-1] if text.strip() else ""
            results[path] = {"ended": word, "summary": last}
            print(f"  {word:>12}  {path}  {last}", flush=True)
            if word not in ("passed", "out of time"):
                print("\n".join(text.splitlines()[-40:]))
    return results


def measure_all(bench: Bench, interpret: bool, save: Callable[[], None]) -> None:
    """Every measurement, as far as time allows; what there is so far is saved after each part."""
    from conduit.plane.device.cuda import CudaDevice
    from conduit.plane.device.host import HostDevice
    from perf.gpu import kernels, loaders
    from perf.gpu.measuring import Found, OutOfTime

    device = HostDevice() if interpret else CudaDevice("cuda")
    parts = [(part.__name__, lambda part=part: part(bench)) for part in kernels.EVERY]
    # the bars first: what comes late may be cut off by the deadline
    parts[1:1] = [
        ("registered", lambda: loaders.registered(bench, device)),
        ("end_to_end", lambda: loaders.end_to_end(bench, device)),
    ]
    bench.rates()
    for name, part in parts:
        try:
            bench.clock.check(10.0)
            part()
        except OutOfTime:
            bench.found.append(Found(name, note="not reached before the deadline"))
        except Exception as error:
            if interpret:
                raise
            # one part's failure must not hide the others' figures
            print(f"  FAILED {name}: {type(error).__name__}: {error}")
            bench.found.append(Found(name, note=f"failed: {type(error).__name__}: {error}"))
        save()


def main() -> int:
    """Run; returns the exit status."""
    parser = argparse.ArgumentParser(description="Check and measure GPU kernels and loaders on this machine's GPU.")
    parser.add_argument("--out", type=Path, help="folder for gpu_check.json")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes in Triton's interpreter, no GPU")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--deadline", type=float, default=280.0, help="seconds, default 280")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not options.interpret and not torch.cuda.is_available():
        print(
            f"No CUDA device: torch {torch.__version__} finds none. This script needs one (or --interpret, which measures nothing).",
            file=sys.stderr,
        )
        return 2
    from perf.gpu import report
    from perf.gpu.measuring import Bench, Clock, OutOfTime

    def stop(*_: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(int(options.deadline) + 5)
    # a device that hangs holds the signal up too
    faulthandler.dump_traceback_later(options.deadline + 15, exit=True)
    clock = Clock(options.deadline)
    bench = Bench("cpu" if options.interpret else "cuda", interpret=options.interpret, clock=clock)
    tests: dict[str, Any] = {}

    def save() -> None:
        if options.out is not None:
            path = options.out / "gpu_check.json"
            report.write(path, bench.found, tests, seconds=clock.spent, interpreted=options.interpret)

    try:
        if not options.no_tests:
            print("tests:")
            tests.update(run_tests(min(_FOR_TESTS, clock.left / 2), options.interpret))
        print(f"measurements, after {clock.spent:.0f} s:")
        measure_all(bench, options.interpret, save)
    except OutOfTime:
        print("the deadline has passed: what is missing below was not reached")
    signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()
    print(f"\n{report.machine()}\n\n{report.table(bench.found)}\n")
    found = report.bars(bench.found)
    for bar in found:
        # times of the interpreter say nothing
        print(dataclasses.replace(bar, value=None) if options.interpret else bar)
    save()
    failed = [path for path, result in tests.items() if result["ended"] != "passed"]
    if failed:
        print(f"tests that did not pass: {', '.join(failed)}")
    print(f"{clock.spent:.0f} s")
    if options.interpret:
        return 1 if failed else 0
    complete = bool(tests) or options.no_tests
    return 0 if complete and not failed and all(bar.reached for bar in found) else 1


if __name__ == "__main__":
    sys.exit(main())
