"""`make perf-compare BASE=<commit>`: this tree against another commit, interleaved, on the cases of the suite.

The base is checked out into a throw-away git worktree, with this tree's `perf/` in place of its own, so that both do the same
work. The quick tests of both trees must be green first. Then both run as processes of the suite's protocol, by turns, on the
same rows; what they deliver is compared with what was written. The ratio of each case is printed with its quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from perf.measure import Spread
from perf.peers.cases import CASES, Case, Rows, shrunk
from perf.peers.driver import PEERS, ROOT, Process, Refused, compare, turn_order
from perf.peers.setup import FOLDER

QUICK_TESTS = (
    "tests/test_layers.py",
    "tests/kernels/test_cpu.py",
    "tests/kernels/test_rows.py",
    "tests/plane/test_append.py",
    "tests/plane/test_delivery.py",
    "tests/sampling",
)
"""What must pass in both trees before anything is timed: layers, row kernels, append, delivery, samplers."""
TIMED = tuple(case.name for case in CASES.values() if case.kind not in ("concurrent", "visible"))
SLOWER, BROKEN = 0.95, 1 / 1.3


class Red(RuntimeError):
    """A tree whose tests fail is not measured."""


@contextlib.contextmanager
def worktree(commit: str, root: Path = ROOT, *, perf: bool | str = True) -> Iterator[Path]:
    """A throw-away worktree of a commit.

    Args:
        commit: By any name that git knows.
        root: The repository.
        perf: Put this tree's `perf/` in place of its own, or that of another commit, where the commit knows none of this tree's names.

    Raises:
        LookupError: There is no such commit.
    """
    found = _git(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    if found.returncode:
        raise LookupError(f"expected a commit of this repository, got {commit!r}: `git log --oneline` lists them")
    place = Path(tempfile.mkdtemp(prefix="conduit-base-"))
    tree = place / "tree"
    try:
        _git(root, "worktree", "add", "--detach", "--quiet", str(tree), found.stdout.strip()).check_returncode()
        if isinstance(perf, str):
            _git(tree, "checkout", "--quiet", perf, "--", "perf").check_returncode()
        elif perf:
            shutil.rmtree(tree / "perf", ignore_errors=True)
            shutil.copytree(root / "perf", tree / "perf", ignore=shutil.ignore_patterns("__pycache__"))
        yield tree
    finally:
        _git(root, "worktree", "remove", "--force", str(tree))
        shutil.rmtree(place, ignore_errors=True)


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)


def check(tree: Path, tests: tuple[str, ...] = QUICK_TESTS) -> None:
    """Runs the quick tests of a tree; those that it has.

    Raises:
        Red: One failed.
    """
    there = [one for one in tests if (tree / one).exists()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *there],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Red(f"expected green tests in {tree}, got:\n" + "\n".join(done.stdout.splitlines()[-12:]))


def measure(case: Case, sides: dict[str, Process], rounds: int, burst: float, rows: int | None) -> dict[str, Spread]:
    """Base's cost over this tree's for each part of a case: how many times as fast this tree is.

    Raises:
        AssertionError: A side delivers something else than was written.
        Refused: A side broke.
    """
    if rows is not None:
        case = shrunk(case, rows)
    written: Rows | None = None
    for process in sides.values():
        with process.turn():
            said = process.ask("open", case=case.name, seed=7, rows=rows)
            if case.kind != "write":
                written = written or Rows.of(case, 7, said["rows"])
                compare(case, written, process.ask("check", batches=2)["arrays"])
    found = {}
    for part in case.parts:
        units = max(_units(process, part, burst) for process in sides.values())
        costs: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in turn_order(number, list(sides)):
                with sides[name].turn() as process:
                    said = process.ask("time", what=part, units=units)
                costs[name].append(min(said["wall_ns"], said["cpu_ns"]))
        found[part] = Spread.of(np.array(costs["base"]) / np.array(costs["this"]))
    for process in sides.values():
        with process.turn():
            process.ask("close")
    return found


def _units(process: Process, part: str, burst: float) -> int:
    units = 1
    with process.turn():
        for _ in range(6):
            said = process.ask("time", what=part, units=units)
            cost = max(1.0, min(said["wall_ns"], said["cpu_ns"]))
            wanted = int(min(1 << 15, max(1.0, burst * 1e9 / cost)))
            if wanted <= 2 * units:
                return wanted
            units = min(wanted, 16 * units)
    return units


def main(arguments: list[str] | None = None) -> int:
    """Prints the ratios; 1 if a case became 1.3 times as slow, 2 if the trees cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m perf.compare", description=__doc__.splitlines()[0])
    parser.add_argument("base", help="commit to compare with")
    parser.add_argument("--cases", default="", help=f"of: {', '.join(TIMED)}; all without")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--burst", type=float, default=0.05, help="seconds")
    parser.add_argument("--rows", type=int, default=None, help="largest table")
    asked = parser.parse_args(arguments)
    wanted = [one for one in asked.cases.split(",") if one] or list(TIMED)
    slow = 0
    try:
        with worktree(asked.base) as tree:
            for name, place in (("base", tree), ("this", ROOT)):
                print(f"# quick tests of {name}: {', '.join(QUICK_TESTS)}", flush=True)
                check(place)
            with contextlib.ExitStack() as stack:
                sides = {
                    name: stack.enter_context(Process(PEERS["conduit"], FOLDER, None, place))
                    for name, place in (("this", ROOT), ("base", tree))
                }
                print(f"# this tree against {asked.base}: times as fast, median (quartiles) of {asked.rounds} rounds")
                for name in wanted:
                    try:
                        found = measure(CASES[name], sides, asked.rounds, asked.burst, asked.rows)
                    except Refused as error:
                        print(f"{name} | not comparable: {error}", flush=True)
                        continue
                    for part, ratio in found.items():
                        word = "faster" if ratio.q25 > 1 / SLOWER else "SLOWER" if ratio.q75 < SLOWER else "same"
                        slow += ratio.median < BROKEN
                        print(
                            f"{name}, {part} | {ratio.median:.3f}x ({ratio.q25:.3f}-{ratio.q75:.3f}) | {word}",
                            flush=True,
                        )
    except (Red, LookupError) as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
