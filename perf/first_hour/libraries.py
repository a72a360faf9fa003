"""The speed of compiled libraries of kernels: the gate's hot paths beside numba's own code, and x86-64-v3 beside x86-64-v4."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from conduit.native.compile import build, library
from perf import gate
from perf.bars import Bar, at_least
from perf.first_hour.installed import ROOT
from perf.instruction_sets import rows
from perf.measure import Spread
from perf.sides import Side, by_turns

_ROUNDS = 5
_LEAST = 0.85


def libraries() -> Iterator[Bar]:
    """Hot paths with a library of kernels, beside what numba compiles for this very processor."""
    instructions = library.supported()[0]
    (path,) = build.made((instructions,), ROOT / "build")
    environments = {
        instructions: {library.VARIABLE: instructions, library.PATH_VARIABLE: str(path)},
        "compiled here": {library.VARIABLE: library.COMPILE, library.PATH_VARIABLE: ""},
    }
    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(Side("perf.gate", environment=one)) for name, one in environments.items()}
        for name, found in by_turns(sides, iter(gate.FIGURES), _ROUNDS):
            speed = Spread.of(found["compiled here"] / found[instructions])
            yield at_least(f"{name}, library of {instructions}", speed, _LEAST, " of numba's own")


GROUPS = (libraries, rows)
