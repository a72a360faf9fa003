"""The hot paths of `perf.gate` in this tree and in the one before, by turns in one run: being right must not cost speed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from perf.bars import Bar, at_most, unmeasured
from perf.compare import ROOT, worktree
from perf.gate import PATHS
from perf.measure import Spread
from perf.sides import BEFORE_ROOMS, Before, Side, by_turns

BASE = "1254ce415042250fd16f5595d5a97927673539b8"
"""The last commit before the cases of `perf/right`."""
ROUNDS = 9
LIMIT = 1.03


def gate() -> Iterator[Bar]:
    """Each row of `perf.gate`, this tree's ratio over the base commit's."""
    try:
        with worktree(BASE, perf=BEFORE_ROOMS) as tree, contextlib.ExitStack() as stack:
            sides = {
                "base": stack.enter_context(Before("perf.gate", tree)),
                "this": stack.enter_context(Side("perf.gate", ROOT)),
            }
            for name, found in by_turns(sides, iter(PATHS), ROUNDS):
                slower = Spread.of(found["this"] / found["base"])
                yield at_most(f"{name}, against the commit before", slower, LIMIT, " the time")
    except LookupError as error:
        yield unmeasured("hot paths against the commit before", f"<= {LIMIT}x", str(error))


GROUPS = (gate,)
