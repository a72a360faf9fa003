"""A consistent look at a table's words while writers write: what would be found if every process died at one instant.

The word that a page was sealed or freed with never comes again (its generation only grows, and within one it counts how often the page
was reopened); one that says OPEN may, where its owner sealed and reopened it, and its rows are whole up to any count all the same. So
when all state words read the same before and after the other words were read, they all had these values at one
moment in between, and the counts belong to these generations. What changes in the meantime is how many rows an open page has;
its rows below any count that was read are whole, so each stream is cut at a committed row.

Order matters. What was claimed and acknowledged of a page is read before its other words, since that is never more than was
committed later; the rest of its side line is read behind them, since an owner stores it before it commits.
Nobody waits for a look and nobody notices it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit.errors import WaitTimeout
from conduit.native.jit import entry, kernel
from conduit.native.memory import fence_acquire, load_acquire, load_relaxed, peek_i64, poke_i64
from conduit.store.format import words as w
from conduit.store.pages.protocol import block_of
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

_ATTEMPTS = 1 << 16


@kernel("int64(int64, int64, int64, int64, int64)", nogil=True)
def collect(table, blocks, sides, control, attempts):
    """Copy a table's words as they were at one moment.

    Args:
        table: Table descriptor.
        blocks: Where every page's words go, int64 [pages, 16].
        sides: Where every page's side line goes, int64 [pages, 16].
        control: Where the table's control words go, int64 [TABLE_CONTROL_BYTES // 8].
        attempts: How often to try.

    Returns:
        Attempts made, or -1 when pages changed their states under each of them.
    """
    count = peek_i64(table + w.VIEW_COUNT)
    source = peek_i64(table + w.VIEW_CONTROL)
    side = peek_i64(table + w.VIEW_SIDES)
    for attempt in range(attempts):
        epoch = load_acquire(source + w.TABLE_EPOCH)
        limits = load_acquire(source + w.TABLE_LIMITS)
        for page in range(count):
            poke_i64(blocks + w.LINE * page, load_acquire(block_of(table, page) + w.PAGE_STATE))
        for word in range(count * (w.LINE // 8)):
            poke_i64(sides + 8 * word, load_acquire(side + 8 * word))
        for page in range(count):
            block = block_of(table, page)
            # ascending: an owner that prepares a page stores what it adds up before it resets what was added
            for word in range(1, w.LINE // 8):
                poke_i64(blocks + w.LINE * page + 8 * word, load_acquire(block + 8 * word))
            for word in range(w.SIDE_RETURNED, w.LINE, 8):
                poke_i64(sides + w.LINE * page + word, load_acquire(side + w.LINE * page + word))
        # last, so that the ticket is above every page's age
        for word in range(w.TABLE_CONTROL_BYTES // 8):
            poke_i64(control + 8 * word, load_acquire(source + 8 * word))
        fence_acquire()
        same = load_relaxed(source + w.TABLE_EPOCH) == epoch and load_relaxed(source + w.TABLE_LIMITS) == limits
        for page in range(count):
            same &= load_relaxed(block_of(table, page) + w.PAGE_STATE) == peek_i64(blocks + w.LINE * page)
        if same:
            return attempt + 1
    return -1


@dataclass(frozen=True, slots=True)
class TableCut:
    """A table's words at one moment.

    Attributes:
        blocks, sides: int64 [pages, 16], every page's words and its side line.
        control: int64 [TABLE_CONTROL_BYTES // 8].
        delivered: Samples that all seats together had delivered.
    """

    blocks: Array
    sides: Array
    control: Array
    delivered: int


def cut_table(view: TableView) -> TableCut:
    """Look at a table.

    Raises:
        WaitTimeout: Its pages changed hands under every attempt, some ten thousand times.
    """
    pages = view.layout.pages
    blocks = np.zeros((pages, w.LINE // 8), np.int64)
    sides = np.zeros((pages, w.LINE // 8), np.int64)
    control = np.zeros(w.TABLE_CONTROL_BYTES // 8, np.int64)
    addresses = (blocks.ctypes.data, sides.ctypes.data, control.ctypes.data)
    if entry(collect)(view.address, *addresses, _ATTEMPTS) < 0:
        raise WaitTimeout(
            f"Expected a moment in which no page of table {view.layout.name!r} changes hands, found none in {_ATTEMPTS} "
            "looks: raise page_rows, so that pages last longer"
        )
    seats = view.segment.array(
        view.layout.seats, (view.segment.layout.spec.max_participants, w.LINE // 8), np.dtype(np.int64)
    )
    return TableCut(blocks, sides, control, int(seats[:, w.SEAT_DELIVERED // 8].sum()))
