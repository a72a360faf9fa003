"""Check and measure the GPU kernels and the loaders on a device, on a machine with a CUDA GPU: one table, the bars, tests, JSON.

    python perf/gpu_check.py --out results

It runs from a bare checkout, installed or not, with a Python (3.11 or newer) that has torch 2.11 and Triton 3.6 or newer and numpy, and
these small wheels besides: numba (with llvmlite) and posix-ipc; and pytest for the tests. Nothing is downloaded.

First it looks, in seconds and with the standard library alone, for what it needs, and says what is missing and how to carry it here: wheels in
the checkout's folder `wheels`, or in --wheels FOLDER, are unpacked and used. Then come the measurements: copy rates, against which
everything is held; each kernel, beside torch's own way and torch.compile; whole loaders into training steps. Last come the GPU's own
tests, compiled and on the device. Every part runs in a process of its own within its time; one that fails, crashes or hangs takes nothing
else with it. All of it ends within --deadline seconds (560, so that ten minutes are enough): what was not reached then is said to be.
Whatever happens, --out has gpu_check.json with all that was found until then.

Status 0: all bars are reached and all tests passed. 1: not so. 2: something that is needed is missing, a CUDA device for instance.

`--interpret` runs every part once on tiny sizes in Triton's interpreter, without a GPU: it shows that the script works, and measures
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from perf.gpu import preflight, report, running  # noqa: E402 - the checkout need not be installed
from perf.gpu.found import Found  # noqa: E402

PARTS = (
    "perf.gpu.part:rates",
    "perf.gpu.kernels:atari",
    "perf.gpu.loaders:registered",
    "perf.gpu.loaders:end_to_end",
    *(
        f"perf.gpu.kernels:{n}"
        for n in ("rows_of_small_fields", "sequences", "steps", "priorities", "traces", "tokens")
    ),
)
"""The bars first: what comes late may be cut off by the deadline."""
SUITES = ("tests/gpu/interpret", "tests/gpu/device")
_FOR_TESTS = 0.35
"""Share of the deadline that is kept for the tests."""


class Check:
    """One run: what was found so far, and where it is written."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.clock = running.Clock(options.deadline)
        self.found: list[Found] = []
        self.content: dict[str, Any] = {
            "machine": {},
            "interpreted": options.interpret,
            "problems": ["it was interrupted before it had looked for what it needs"],
            "versions": {},
            "parts": {},
            "tests": {},
        }
        self.rates = [0.0, 0.0]

    def save(self) -> None:
        """Write everything down."""
        if self.options.out is None:
            return
        bars = [{**dataclasses.asdict(bar), "reached": bar.reached} for bar in report.bars(self.found)]
        rows = [dataclasses.asdict(one) for one in self.found]
        content = {**self.content, "seconds": round(self.clock.spent, 1), "rows": rows, "bars": bars}
        running.write(self.options.out / "gpu_check.json", content)

    def environment(self, *, interpret: bool) -> dict[str, str]:
        """What children inherit: wheels that were brought along, the checkout, and how Triton works."""
        kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        paths = [str(self.folder / "wheels"), str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
        kept |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", "1")}
        return kept | ({"TRITON_INTERPRET": "1"} if interpret else {"CONDUIT_GPU_TESTS": "1"})

    def look(self) -> bool:
        """Look for what is needed; False when something is missing, which is said."""
        unpacked = self.folder / "wheels"
        unpacked.mkdir()
        for wheels in (self.options.wheels, ROOT / "wheels"):
            for name in preflight.unpack(wheels, unpacked) if wheels is not None and wheels.is_dir() else ():
                print(f"not for this Python or machine: {wheels / name}")
        sys.path.insert(0, str(unpacked))
        seen = preflight.look()
        self.content |= {"problems": seen.problems, "versions": seen.versions, "notes": seen.notes}
        for note in seen.notes:
            print(note)
        if not seen.problems and not self.options.interpret:
            # torch is imported in a child: a driver that hangs must not take this process along
            probe = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
            ended = self.run(running.python("-c", probe), 60.0, "probe", interpret=False)
            if ended.word != "passed":
                last = ended.text.strip().splitlines()[-1:] or ["it said nothing"]
                why = f"finds none ({ended.word})" if not ended.text.strip() else f"{ended.word}: {last[0]}"
                seen.problems.append(
                    f"No CUDA device: torch {seen.versions['torch']} {why}. This script needs one (or --interpret, which "
                    "measures nothing)"
                )
        for problem in seen.problems:
            print(problem, file=sys.stderr)
        return not seen.problems

    def run(self, command: list[str], seconds: float, name: str, *, interpret: bool) -> running.Ended:
        """Run a child."""
        log = self.folder / f"{name}.log"
        return running.run(command, seconds, self.environment(interpret=interpret), log, ROOT)

    def measure(self, parts: Iterable[str], seconds: float, number: int) -> None:
        """Run parts in one child and take over what it found, however it ended."""
        listed, result = list(parts), self.folder / f"part-{number}.json"
        asked = {
            "interpret": self.options.interpret,
            "parts": listed,
            "rates": self.rates,
            "seconds": max(1.0, seconds - 10.0),
        }
        command = running.python("-m", "perf.gpu.part", str(result), json.dumps(asked))
        ended = self.run(command, seconds, f"part-{number}", interpret=self.options.interpret)
        written = running.read(result)
        self.content["machine"] = written.get("machine") or self.content["machine"]
        self.rates = written.get("rates") or self.rates
        self.found += [Found(**row) for row in written.get("rows", [])]
        errors = written.get("errors", {})
        for name in listed:
            word = errors.get(name, "passed" if ended.word == "failed" and written else ended.word)
            self.content["parts"][name] = {"ended": word, "seconds": ended.seconds}
            if word != "passed":
                self.found.append(Found(name, note=word))
                print(f"  {word:>12}  {name}\n{ended.text[-2500:]}", flush=True)
            else:
                print(f"  {word:>12}  {name}  {ended.seconds:.0f} s", flush=True)
        self.save()

    def measure_all(self) -> None:
        """Every measurement, as far as time allows."""
        parts = self.options.part or PARTS
        # in the interpreter a process costs more than what it runs
        groups = (
            [parts[i::2] for i in range(2)]
            if self.options.interpret and not self.options.part
            else [[p] for p in parts]
        )
        kept = 0.0 if self.options.no_tests else self.options.deadline * _FOR_TESTS
        for number, group in enumerate(groups):
            left = self.clock.left - kept
            if left < self.options.least:
                for name in group:
                    self.content["parts"][name] = {"ended": "not reached before the deadline", "seconds": 0.0}
                    self.found.append(Found(name, note="not reached before the deadline"))
                continue
            self.measure(group, min(left, self.options.part_seconds * len(group)), number)

    def test_all(self) -> None:
        """The GPU's tests, each file in a process of its own, side by side."""
        if self.content["versions"].get("pytest") is None:
            print("tests: not run, pytest is not installed")
            return
        paths = [str(path.relative_to(ROOT)) for suite in SUITES for path in sorted((ROOT / suite).glob("test_*.py"))]
        if self.options.interpret:
            paths = ["tests/gpu/interpret/test_skipped_rows.py"]
        # the project's own settings name plugins that need not be here
        config = self.folder / "pytest.ini"
        config.write_text(f"[pytest]\npythonpath = {ROOT}\n")
        until = self.clock.spent + max(0.0, self.clock.left - 15.0)

        def one(path: str) -> tuple[str, running.Ended | None]:
            left = until - self.clock.spent
            if left < self.options.least:
                return path, None
            options = [
                "-q",
                "-p",
                "no:cacheprovider",
                "--import-mode=importlib",
                f"--rootdir={ROOT}",
                "-c",
                str(config),
            ]
            name = path.replace("/", "-")
            return path, self.run(
                running.python("-m", "pytest", path, *options), left, name, interpret=self.options.interpret
            )

        with ThreadPoolExecutor(min(6, os.cpu_count() or 1)) as pool, self.interruptible(pool):
            for path, ended in pool.map(one, paths):
                word = "not reached before the deadline" if ended is None else ended.word
                text = "" if ended is None else ended.text
                last = text.strip().splitlines()[-1] if text.strip() else ""
                self.content["tests"][path] = {"ended": word, "summary": last}
                print(f"  {word:>12}  {path}  {last}", flush=True)
                if word not in ("passed", "out of time"):
                    print("\n".join(text.splitlines()[-40:]))
                self.save()

    @contextlib.contextmanager
    def interruptible(self, pool: ThreadPoolExecutor) -> Iterator[None]:
        """Let the threads of a pool end soon when this one is interrupted."""
        try:
            yield
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            running.kill_all()
            raise

    def status(self) -> int:
        """Print what was found; returns the exit status."""
        print(f"\n{self.content['machine']}\n\n{report.table(self.found)}\n")
        found = report.bars(self.found)
        for bar in found:
            # times of the interpreter say nothing
            print(dataclasses.replace(bar, value=None) if self.options.interpret else bar)
        failed = [
            name for kind in ("parts", "tests") for name, one in self.content[kind].items() if one["ended"] != "passed"
        ]
        if failed:
            print(f"did not pass: {', '.join(failed)}")
        print(f"{self.clock.spent:.0f} s")
        complete = bool(self.content["tests"]) or self.options.no_tests
        reached = self.options.interpret or all(bar.reached for bar in found)
        return 0 if complete and not failed and reached else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and measure GPU kernels and loaders on this machine's GPU.")
    parser.add_argument("--out", type=Path, help="folder for gpu_check.json")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes in Triton's interpreter, no GPU")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--only-preflight", action="store_true", help="only look for what is needed")
    parser.add_argument(
        "--wheels", type=Path, help="folder of wheels to unpack and use, beside the checkout's own `wheels`"
    )
    parser.add_argument("--deadline", type=float, default=560.0, help="seconds for everything, default 560")
    parser.add_argument(
        "--part-seconds", type=float, default=100.0, help="seconds for one measurement at most, default 100"
    )
    parser.add_argument(
        "--least", type=float, default=15.0, help="seconds that must be left to begin a part, default 15"
    )
    parser.add_argument("--part", action="append", help="only this measurement, module:function; several times")
    return parser.parse_args()


def _leave(*_: object) -> None:
    raise SystemExit(1)


def main() -> int:
    """Run; returns the exit status."""
    options = _options()
    signal.signal(signal.SIGTERM, _leave)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        check = Check(options, Path(folder))
        try:
            if not check.look():
                return 2
            if options.only_preflight:
                return 0
            print("measurements:", flush=True)
            check.measure_all()
            if not options.no_tests:
                print(f"tests, after {check.clock.spent:.0f} s:", flush=True)
                check.test_all()
            return check.status()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        finally:
            try:
                check.save()
            except OSError as error:
                print(f"gpu_check.json could not be written: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
