"""House: what moving every module cost in speed, and whether the tree now reads from where data enters to where it leaves."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path

import conduit
from conduit.native.compile import library
from perf import gate, visits
from perf.bars import Bar, at_most
from perf.compare import ROOT, worktree
from perf.measure import Spread
from perf.sides import BEFORE_ROOMS, Before, Side, by_turns
from tests import test_layers

TITLE = "rooms with names: nothing slower, short ways, no circles"

BASE = BEFORE_ROOMS
_ROUNDS = 15
_SLOWER = 1.02


def hot_paths() -> Iterator[Bar]:
    """The gate's hot paths, cost against the base commit."""
    environment = {library.VARIABLE: library.COMPILE, library.PATH_VARIABLE: ""}
    with worktree(BASE, perf=False) as base, contextlib.ExitStack() as stack:
        sides = {
            "base": stack.enter_context(Before("perf.gate", base, environment)),
            "this": stack.enter_context(Side("perf.gate", ROOT, environment)),
        }
        for name, found in by_turns(sides, iter(gate.FIGURES), _ROUNDS):
            yield at_most(name, Spread.of(found["this"] / found["base"]), _SLOWER, f" of {BASE[:7]}'s cost")


def ways() -> Iterator[Bar]:
    """Modules that a row visits."""
    for name, way in visits.in_a_fresh_process().items():
        most, count = visits.MOST[name], len(way["modules"])
        yield Bar(f"modules from {name}", str(count), f"<= {most}", count <= most, (", ".join(way["modules"]),))
        against = [f"{' > '.join(chain)}" for chain in [*way["again"], *way["up"]]]
        yield Bar(f"rooms entered twice or upwards from {name}", str(len(against)), "0", not against, tuple(against))


def _counted(name: str, found: list[str], bar: str, ok: bool) -> Bar:
    return Bar(name, str(len(found)), bar, ok, () if ok else tuple(found))


def habits() -> Iterator[Bar]:
    """What tests/test_layers.py holds."""
    imports = [one for path in test_layers.SOURCES for one in test_layers.imports_of(path)]
    circles = [" > ".join(one) for one in test_layers.module_circles(imports) + test_layers.room_circles(imports)]
    yield _counted("import circles between modules or rooms", circles, "0", not circles)
    long = [f"{name}: {lines}" for name, lines in test_layers.long_modules().items() if name not in test_layers.LONG]
    name = f"modules over {test_layers.LINES} lines without a reason"
    excused = tuple(f"{module}: {reason}" for module, reason in test_layers.LONG.items())
    yield Bar(name, str(len(long)), "0", not long, (*long, *(f"with a reason: {one}" for one in excused)))
    untyped = test_layers.untyped()
    yield _counted("no-untyped-def ignores", untyped, f"< {test_layers.UNTYPED}", len(untyped) < test_layers.UNTYPED)
    families = [f"{name}: {', '.join(members)}" for name, members in test_layers.letter_families().items()]
    yield _counted("families of constants told apart by a letter", families, "0", not families)
    public = list(conduit.__all__)
    yield _counted("public names", public, f"< {test_layers.PUBLIC}", len(public) < test_layers.PUBLIC)


def facts(tree: Path) -> int:
    """Test functions of a tree, and state machines."""
    found = 0
    for path in [*(tree / "tests").rglob("test_*.py"), *(tree / "perf").rglob("test_*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            found += isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            found += isinstance(node, ast.Assign) and ast.unparse(node.value).endswith(".TestCase")
    return found


def tests() -> Iterator[Bar]:
    """Facts that are tested."""
    with worktree(BASE, perf=False) as base:
        before, now = facts(base), facts(ROOT)
    yield Bar(
        "tests, before parameters",
        str(now),
        f">= {before}",
        now >= before,
        ("`make test` says whether they are green",),
    )


GROUPS = (habits, ways, tests, hot_paths)
