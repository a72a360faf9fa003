"""The goals of each issue (its bars), measured.

A module in this package is the table of one issue: `python -m perf.bars engine` runs it, with a hyphen for each underscore
(`first-hour`). It has

    TITLE: str                                   one line
    GROUPS: tuple[Callable[[], Iterator[Bar]]]   each measures some rows of the table and yields them

Each row is printed as `name | measured | bar | ok`, or SHORT in place of ok; notes follow indented. A group that cannot
be measured is SHORT with its reason, never left out. The exit status is 1 if any row is short, 2 for an unknown name.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

from perf.measure import Spread, ratio_text


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a table.

    Attributes:
        name: What was measured.
        measured: The figure, with its spread.
        bar: What it must reach.
        ok: Whether it does.
        notes: Printed below: how it was measured, other figures.
    """

    name: str
    measured: str
    bar: str
    ok: bool
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.name} | {self.measured} | {self.bar} | {'ok' if self.ok else 'SHORT'}"]
        return "\n".join([*lines, *("    " + note for note in self.notes)])


def at_least(name: str, speed: Spread, factor: float, unit: str = "", *notes: str) -> Bar:
    """A row that says how many times as fast: the median must reach `factor`."""
    return Bar(name, ratio_text(speed), f">= {factor:g}x{unit}", speed.median >= factor, notes)


def at_most(name: str, share: Spread, factor: float, unit: str = "", *notes: str) -> Bar:
    """A row that says how many times the cost: the median must stay at or under `factor`."""
    return Bar(name, ratio_text(share), f"<= {factor:g}x{unit}", share.median <= factor, notes)


def unmeasured(name: str, bar: str, reason: str) -> Bar:
    """A row that could not be measured."""
    return Bar(name, reason, bar, ok=False)


def names() -> list[str]:
    """The tables that exist."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def load(name: str) -> ModuleType:
    """The module of one table.

    Raises:
        LookupError: No such table; the message lists those that exist.
    """
    if name not in names():
        raise LookupError(f"expected one of {', '.join(names())}, got {name!r}; `python -m perf.bars` lists them")
    return importlib.import_module(f"perf.bars.{name.replace('-', '_')}")


def measure(groups: tuple[Callable[[], Iterator[Bar]], ...]) -> Iterator[Bar]:
    """All rows of a table; a group that fails gives a short row with the error, and its traceback on stderr."""
    for group in groups:
        try:
            yield from group()
        except Exception as error:  # noqa: BLE001 -- one broken row must not hide the others
            traceback.print_exc(file=sys.stderr)
            subject = (group.__doc__ or group.__name__).splitlines()[0].rstrip(".")
            yield unmeasured(subject, "measured", f"{type(error).__name__}: {error}".splitlines()[0])


def run(name: str) -> int:
    """Measures and prints one table; the exit status."""
    try:
        table = load(name)
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    started = time.perf_counter()
    print(f"# {name}: {table.TITLE}", flush=True)
    short = 0
    count = 0
    for bar in measure(table.GROUPS):
        print(bar, flush=True)
        count += 1
        short += not bar.ok
    print(f"# {count - short} of {count} reached, {time.perf_counter() - started:.0f} s", flush=True)
    return 1 if short else 0
