"""`conduit doctor`: make every check, and show what works, what is missing and how to get it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from conduit.cli import checks
from conduit.cli.checks import Check
from conduit.cli.output import counted, draw
from conduit.cli.packages import Imports

_STYLES = {"ok": "green", "warning": "yellow", "missing": "cyan", "broken": "bold red"}


def examine(*, quiet: bool) -> list[Check]:
    """Make all checks. Takes a few seconds, or about half a minute where kernels must be compiled first.

    Args:
        quiet: Show no sign of life on a terminal's standard error.
    """
    from rich.console import Console

    with (
        Console(stderr=True, quiet=quiet).status("trying out this machine"),
        Imports() as imports,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what there is to warn of is a check's outcome
        found = [*checks.of_machine(), *checks.of_shared_memory(), *checks.of_kernel(), *checks.of_compiler()]
        if not any(one.fatal for one in found if one.group == "compiler"):
            found += checks.of_engine()
        found += imports.checks()
    return found


def healthy(found: Sequence[Check]) -> bool:
    """Whether everything that Conduit requires works."""
    return not any(one.fatal for one in found)


def as_json(found: Sequence[Check]) -> dict[str, Any]:
    """The document of `conduit doctor --json`."""
    return {"healthy": healthy(found), "versions": checks.versions(), "checks": found}


def show(found: Sequence[Check]) -> None:
    """Print the checks for people, and a verdict."""
    from rich.markup import escape
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for group, members in groupby(found, key=lambda one: one.group):
        grid.add_row(f"[bold]{group}[/]")
        for one in members:
            text = escape(one.found) + (f"\n[dim]-> {escape(one.remedy)}[/]" if one.remedy else "")
            grid.add_row(f"  [{_STYLES[one.status]}]{one.status}[/]", one.name, text)
    draw(grid, "", _verdict(found))


def _verdict(found: Sequence[Check]) -> str:
    fatal = [one.name for one in found if one.fatal]
    if fatal:
        return f"[bold red]Conduit does not work here:[/] {', '.join(fatal)}."
    rest = [one for one in found if one.status != "ok"]
    if not rest:
        return "Everything works."
    parts = []
    warnings = sum(one.status == "warning" for one in rest)
    if warnings:
        parts.append(counted(warnings, "warning"))
    if len(rest) > warnings:
        parts.append(f"{counted(len(rest) - warnings, 'optional part')} missing")
    return f"Conduit works here; {', '.join(parts)}."
