"""What is true of a table in which a loader waited for rows in vain: rows, complete ones, and who is writing more."""

from __future__ import annotations

import sys

import numpy as np

from conduit.kernels.windows import Window
from conduit.native import turns
from conduit.store.table import TableView
from conduit.store.words import KIND_MASK, OPEN, OWNER_MASK, OWNER_SHIFT, PAGE_STATE, PAGE_STREAM


def _compiling() -> str:
    compiler = sys.modules.get("conduit.compiler")
    if compiler is None or not turns.others(compiler.folders):
        return ""
    return (
        ". Another process is compiling kernels, which may take a minute the first time: wait for it with a longer timeout, or "
        "run `conduit warm` before"
    )


def what_is_there(table: TableView, complete: int, window: Window) -> str:
    """How many rows there are and how many of them may begin a window, which writers are at work, and what helps.

    Args:
        table: The table.
        complete: Rows that a draw chose among.
        window: What the loader builds.
    """
    there = table.counts().size
    kind = type(window).__name__
    rows = f"{there:,} rows are there, {complete:,} of them with all behind them that a {kind} needs"
    if there > complete:
        rows += "; the others wait for the steps behind them"
    pages = table.pages()
    written = pages[(pages[:, PAGE_STATE // 8] & KIND_MASK) == OPEN]
    streams = len(np.unique(written[:, PAGE_STREAM // 8]))
    if not streams:
        return (
            f"{rows}; no writer has a page open, so none is alive that has written (`conduit status`): start one, or lower "
            f"min_rows{_compiling()}"
        )
    owners = set(((written[:, PAGE_STATE // 8] >> OWNER_SHIFT) & OWNER_MASK).tolist())
    seats = {one.number: one for one in table.check_open().list()}
    found = [seats[owner] for owner in sorted(owners) if owner in seats]
    at = ", ".join(f"{one.pid}{'' if one.alive else ' (dead)'}" for one in found)
    return (
        f"{rows}; {streams} writer{'s' if streams > 1 else ''} with a page open, in process{'es' if len(found) > 1 else ''} "
        f"{at}: raise timeout, or lower min_rows"
    )
