"""The hot paths of `perf.gate` in this tree and in the one before, by turns in one run: being right must not cost speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from perf.bars import Bar, at_most, unmeasured
from perf.compare import ROOT, worktree
from perf.gate import PATHS
from perf.measure import Spread

BASE = "1254ce415042250fd16f5595d5a97927673539b8"
"""The last commit before the cases of `perf/right`."""
ROUNDS = 9
LIMIT = 1.03

_PROGRAM = """
import contextlib, json, sys
from perf.gate import PATHS, ratio
for name, build in PATHS.items():
    with contextlib.ExitStack() as stack:
        ratio(build(stack), 0.1)
print("ready", flush=True)
for line in sys.stdin:
    name = line.strip()
    with contextlib.ExitStack() as stack:
        print(json.dumps(min(ratio(PATHS[name](stack), 0.25) for _ in range(2))), flush=True)
"""


def _process(tree: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(process: subprocess.Popen[str], name: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    return float(json.loads(process.stdout.readline()))


def gate() -> Iterator[Bar]:
    """Each row of `perf.gate`, this tree's ratio over the base commit's."""
    try:
        with worktree(BASE) as tree:
            sides = {"base": _process(tree), "this": _process(ROOT)}
            try:
                for process in sides.values():
                    assert process.stdout is not None
                    if process.stdout.readline().strip() != "ready":
                        raise RuntimeError("a tree did not run the rows of perf.gate")
                for name in PATHS:
                    found: dict[str, list[float]] = {side: [] for side in sides}
                    for turn in range(ROUNDS):
                        for side in list(sides)[:: 1 if turn % 2 else -1]:
                            found[side].append(_ask(sides[side], name))
                    slower = [this / base for this, base in zip(found["this"], found["base"], strict=True)]
                    yield at_most(f"{name}, against the commit before", Spread.of(slower), LIMIT, " the time")
            finally:
                for process in sides.values():
                    # its engines close, and leave no segment behind
                    assert process.stdin is not None
                    process.stdin.close()
                    process.wait(30)
    except LookupError as error:
        yield unmeasured("hot paths against the commit before", f"<= {LIMIT}x", str(error))


GROUPS = (gate,)
