"""How many writers a table has, and how many of them live: for those who wait for rows in vain.

Each participant keeps the number of its open writers in its seat line of the table. Whoever recovers a dead one adds its writers to
the table's lost ones, and a writer that opens stands for one of those. A statistic: stores are plain, nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from conduit.store.format import words as w
from conduit.store.format.layout import TableLayout
from conduit.store.segment.segment import Segment

_MOST = 1 << 20
"""More writers than a table has pages."""


def _seats(segment: Segment, layout: TableLayout) -> np.ndarray[Any, np.dtype[np.int64]]:
    shape = (segment.layout.spec.max_participants, w.LINE // 8)
    return segment.array(layout.seats, shape, np.dtype(np.int64))[:, w.SEAT_WRITERS // 8]


def _bounded(count: Any) -> int:
    """A count as it was read: a damaged word is some number of writers that there can be."""
    return min(max(int(count), 0), _MOST)


def note(segment: Segment, layout: TableLayout, seat: int, count: int, *, opened: bool) -> None:
    """Store how many writers of a table a seat's holder has open; one of them has just been opened, or closed."""
    _seats(segment, layout)[seat] = count
    at = (layout.control + w.TABLE_LOST) // 8
    if opened and segment.words[at] > 0:
        segment.words[at] -= 1


def empty(segment: Segment, seat: int, *, died: bool) -> None:
    """A seat's holder has no writers any more; the caller holds its lock."""
    for layout in segment.layout.tables.values():
        seats = _seats(segment, layout)
        count = _bounded(seats[seat])
        seats[seat] = 0
        if died and count:
            at = (layout.control + w.TABLE_LOST) // 8
            segment.words[at] = _bounded(_bounded(segment.words[at]) + count)


def count(
    segment: Segment, layout: TableLayout, participants: Iterable[tuple[int, int, bool]]
) -> tuple[dict[int, int], int]:
    """The writers that a table has: {process number: how many} of those that live, and how many are dead.

    Args:
        segment: The segment.
        layout: The table's.
        participants: (seat, process number, alive) of each.
    """
    seats = _seats(segment, layout)
    alive: dict[int, int] = {}
    dead = _bounded(segment.words[(layout.control + w.TABLE_LOST) // 8])
    for seat, pid, lives in participants:
        found = _bounded(seats[seat])
        if found and lives:
            alive[pid] = alive.get(pid, 0) + found
        else:
            dead += found
    return alive, dead
