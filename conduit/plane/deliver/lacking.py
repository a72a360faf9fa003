"""The text of a loader's DataTimeout: how many rows the table has, how many begin a complete window, and which writers live."""

from __future__ import annotations

import sys

from conduit.errors import DataTimeout
from conduit.kernels.spec.windows import Window
from conduit.native.compile import turns
from conduit.sampling.anchors import anchors
from conduit.store.segment import writer_counts
from conduit.store.tables.view import TableView


def _compiling() -> str:
    compiler = sys.modules.get("conduit.native.compile.compiler")
    if compiler is None or not turns.others(compiler.folders):
        return ""
    return (
        ". Another process is compiling kernels, which may take a minute the first time: wait for it with a longer timeout, or "
        "run `conduit warm` before"
    )


def _writers(table: TableView) -> tuple[dict[int, int], int]:
    """{pid: number of its open writers} of living processes, and the number of writers of dead processes.

    Raises:
        Closed, Forked, OwnerGone: As `TableView.check_open`.
    """
    listed = table.check_open().list()
    return writer_counts.count(table.segment, table.layout, ((one.number, one.pid, one.alive) for one in listed))


def what_is_there(table: TableView, window: Window) -> str:
    """How many rows the table has, how many begin a window, which writers are open, and a remedy, as text.

    Args:
        table: The table.
        window: The loader's window.
    """
    there, complete = table.counts().size, anchors(table, window)
    kind = type(window).__name__
    rows = f"{there:,} rows are there, {complete:,} of them begin a complete {kind}"
    if there > complete:
        rows += "; the others wait for later steps"
    alive, _ = _writers(table)
    if not alive:
        return f"{rows}; {who_writes(table)} (`conduit status`): start writers, or lower min_rows{_compiling()}"
    at = ", ".join(map(str, sorted(alive)))
    where = f"in process{'es' if len(alive) > 1 else ''} {at}"
    return f"{rows}; {who_writes(table)}, {where}: raise timeout, or lower min_rows{_compiling()}"


def who_writes(table: TableView) -> str:
    """How many writers the table has and how many of them live, such as "0 of 2 writers alive"."""
    alive, dead = _writers(table)
    living = sum(alive.values())
    if living + dead == 0:
        return "no writer is open"
    return f"{living} of {living + dead} writer{'s' if living + dead > 1 else ''} alive"


def too_few_rows(
    table: TableView,
    window: Window,
    rows: tuple[int, int],
    wanted: int,
    timeout: float | None,
    blocked: str | None,
    stale: tuple[int, dict[int, int]] | None,
) -> DataTimeout:
    """The error of a loader that waited for rows until its deadline.

    Args:
        table: The table.
        window: The loader's window.
        rows: Number of rows that the last draw looked at, and the loader's minimum.
        wanted: Samples per batch.
        timeout: Seconds that the loader waited.
        blocked: Why the table's limiter did not let a batch out, or None.
        stale: `max_staleness`, and the refused rows by age; None without `max_staleness`.
    """
    times = table.layout.table.max_times_sampled
    spent = ""
    if times is not None:
        counts = table.counts()
        spent = (
            f"; {counts.deleted - counts.evicted:,} of the rows still in their pages have been delivered as often as they may "
            f"be (max_times_sampled={times}) or deleted"
        )
    where = f"in table {table.layout.name!r}"
    if blocked is not None:
        return DataTimeout(
            f"Expected the limiter {where} to let {wanted} samples out within {timeout} s, but {blocked}; {who_writes(table)}"
        )
    found, least = rows
    if found >= least:
        refused = "" if stale is None else f"; refused as older than max_staleness={stale[0]}: {stale[1]}"
        return DataTimeout(
            f"Expected rows that begin a {type(window).__name__} {where}, got none among {found} within "
            f"{timeout} s{refused}{spent}; {who_writes(table)}: wait for more rows, or ask for another window"
        )
    return DataTimeout(
        f"Expected at least {least} sampleable rows {where}, got {found} within {timeout} s{spent}: {what_is_there(table, window)}"
    )
