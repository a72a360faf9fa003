"""`conduit checkpoint` and `conduit checkpoints`: making one of a running engine, and looking at those that are there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conduit.cli.output import counted, draw, duration, size
from conduit.cli.progress import bar
from conduit.errors import CheckpointError
from conduit.plane.attach import attach
from conduit.plane.checkpoints import Checkpoint, checkpoints


def make(name: str, folder: Path, keep: int, *, quiet: bool) -> Checkpoint:
    """Make a checkpoint of a running engine; it takes a seat in it meanwhile."""
    with attach(name, on_owner_exit="stay") as client, bar(f"checkpoint of {name}", shown=not quiet) as tell:
        path = client.checkpoint(folder, keep=keep, progress=tell)
    return checkpoints(path)[0]


def look(path: Path, *, verify: bool, quiet: bool) -> list[Checkpoint]:
    """The checkpoints at a path, oldest first.

    Raises:
        CheckpointError: There is none.
    """
    with bar("reading", shown=verify and not quiet) as tell:
        found = checkpoints(path, verify=verify, progress=tell)
    if not found:
        raise CheckpointError(f"Expected a checkpoint, or a folder of checkpoints, at {path}, found none")
    return found


def as_json(found: Sequence[Checkpoint]) -> list[dict[str, Any]]:
    """The objects of `--json`."""
    return [
        {
            "path": str(one.path),
            "problem": one.problem,
            "engine": one.engine,
            "created_ns": one.created_ns,
            "bytes": one.bytes,
            "rows": one.rows,
            "rows_left_out": one.rows_left_out,
        }
        for one in found
    ]


def told(one: Checkpoint) -> str:
    """A checkpoint that was made, in a line or two."""
    rows = ", ".join(f"{name} {counted(count, 'row')}" for name, count in one.rows.items())
    text = f"{one.path}\n  {size(one.bytes)}; {rows}\n"
    if one.rows_left_out:
        text += f"  {counted(one.rows_left_out, 'row')} overwritten before they could be copied\n"
    return text


def show(found: Sequence[Checkpoint], *, verified: bool) -> None:
    """Print checkpoints for people."""
    from rich.markup import escape
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, side in (
        ("checkpoint", "left"),
        ("engine", "left"),
        ("age", "right"),
        ("size", "right"),
        ("rows", "right"),
    ):
        grid.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    grid.add_column("state", overflow="fold")
    now = time.time_ns()
    for one in found:
        state = "[green]good[/]" if verified else "not verified"
        grid.add_row(
            one.path.name,
            escape(one.engine) or "-",
            duration((now - one.created_ns) / 1e9) if one.created_ns else "-",
            size(one.bytes) if one.bytes else "-",
            f"{sum(one.rows.values()):,}" if one.rows else "-",
            state if one.problem is None else f"[red]bad[/]: {escape(one.problem)}",
        )
    draw(grid)
