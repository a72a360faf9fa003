"""Two ways to run the same figures, each in a process of its own, asked by turns: another tree, or another instruction set.

`python -m perf.sides MODULE` answers one line of JSON for each name that it reads; MODULE has

    FIGURES: Mapping[str, Callable[[], float]]   what can be asked for: a cost, of this process alone or over plain work in it
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from perf.compare import ROOT


class Side:
    """A process that measures; it has run every figure once when it is entered.

    Args:
        module: With FIGURES.
        tree: The tree that it runs in.
        environment: What its environment has besides this process's.
    """

    def __init__(self, module: str, tree: Path = ROOT, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "perf.sides", module],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)} | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # its engines close, and leave no segment behind
        self._process.communicate(timeout=60)

    def ready(self) -> None:
        """Wait until it has run every figure once, and compiled what it needs.

        Raises:
            RuntimeError: It ended before; its own words are on stderr.
        """
        self._line()

    def ask(self, name: str) -> float:
        """One figure, measured now.

        Raises:
            RuntimeError: It ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return float(json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait(30)}; its stderr is above")
        return line


BEFORE_ROOMS = "bf1ee1cb74527db6161a1602d3ddb15db5d5d8fb"
"""The last commit before the package was laid out in rooms and its names were spelled anew."""


class Before(Side):
    """A side that spells as the commits up to BEFORE_ROOMS do; its `perf/` is of that commit or its own."""

    def ask(self, name: str) -> float:
        """As `Side.ask`, by this tree's name."""
        return super().ask(name.replace("prioritized", "prioritised"))


def by_turns(
    sides: Mapping[str, Side], names: Iterator[str], rounds: int
) -> Iterator[tuple[str, dict[str, NDArray[np.float64]]]]:
    """Each name with the figures of every side, float64 [rounds], the same round of all of them one after the other."""
    for side in sides.values():
        side.ready()
    for name in names:
        found: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(rounds):
            for side in list(sides)[:: 1 if turn % 2 else -1]:
                found[side].append(sides[side].ask(name))
        yield name, {side: np.array(values) for side, values in found.items()}


def main(module: str) -> int:
    """Answers until its input ends."""
    figures = importlib.import_module(module).FIGURES
    for measure in figures.values():
        measure()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(figures[line.strip()]()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
