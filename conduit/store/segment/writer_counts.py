"""How many writers a table has, and how many of them live, for the errors of waits without a result.

Each participant keeps the number of its open writers in its line of the table. The process that recovers a dead participant adds that
participant's writers to the table's count of lost writers; a writer that opens later lowers this count by one. It is a statistic:
stores are plain, and no decision depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from conduit.store.format import words as w
from conduit.store.format.layout import TableLayout
from conduit.store.segment.segment import Segment

_MOST = 1 << 20
"""A number above any possible number of writers of a table."""


def _seats(segment: Segment, layout: TableLayout) -> np.ndarray[Any, np.dtype[np.int64]]:
    shape = (segment.layout.spec.max_participants, w.LINE // 8)
    return segment.array(layout.seats, shape, np.dtype(np.int64))[:, w.SEAT_WRITERS // 8]


def _bounded(count: Any) -> int:
    """A count from a word of the segment, bounded, in case the word is damaged."""
    return min(max(int(count), 0), _MOST)


def note(segment: Segment, layout: TableLayout, seat: int, count: int, *, opened: bool) -> None:
    """Store how many writers of a table a participant has open, after it has opened or closed one."""
    _seats(segment, layout)[seat] = count
    at = (layout.control + w.TABLE_LOST) // 8
    if opened and segment.words[at] > 0:
        segment.words[at] -= 1


def empty(segment: Segment, seat: int, *, died: bool) -> None:
    """Set a participant's number of open writers to 0 in all tables; the caller holds the seat's lock."""
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
    """The writers of a table: {pid: number} for living processes, and the number of dead processes' writers.

    Args:
        segment: The segment.
        layout: The table's layout.
        participants: (seat, pid, alive) of each participant.
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
