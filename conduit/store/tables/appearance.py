"""The parts of a handle's `repr`: its table or engine, how many rows there are, and whether the handle can be used.

A `repr` never raises. Tracebacks, debuggers and logs show it for handles that are closed, inherited through a fork, or half
constructed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from conduit.store.pages.row_counts import counts_of
from conduit.store.segment.participants import Participants
from conduit.store.segment.segment import Segment
from conduit.store.tables.queue import QueueView
from conduit.store.tables.view import TableView

Tell = Callable[[Any], str]


def never_raises(tell: Tell) -> Tell:
    """Decorator of a `__repr__`. If the method fails, since its object is half constructed, the result is only the class name."""

    @functools.wraps(tell)
    def safely(self: Any) -> str:
        try:
            return tell(self)
        except Exception:  # noqa: BLE001 - whatever is wrong with the object, it can be named
            return f"{type(self).__name__}(not open)"

    return safely


def state_of(table: TableView, *, closed: bool = False) -> str:
    """Whether a handle of a table can be used: "open", "closed", "engine closed", "owner gone" or "forked".

    Args:
        table: The table.
        closed: Whether the handle itself was closed.
    """
    seat = table.participants
    if closed or seat is None:
        return "closed"
    return state_in(table.segment, seat)


def state_in(segment: Segment, seat: Participants) -> str:
    """The state of a handle of an engine, in the same words, from its process's seat."""
    if seat.number < 0:
        return "closed"
    if seat.forked or seat.has_lost_owner:
        return "forked" if seat.forked else "owner gone"
    return "engine closed" if segment.closed else "open"


def place_of(table: TableView) -> str:
    """The names of a table and its engine, for a `repr`."""
    return f"{table.layout.name!r} of engine {table.segment.name!r}"


def held_in(table: TableView) -> int:
    """Rows in a table now; in a queue, rows that are not acknowledged."""
    if table.layout.table.kind == "queue":
        counts = QueueView(table).counts()
        return counts.waiting + counts.unfinished + sum(counts.claimed.values())
    return counts_of(table.address).size


def filling_of(table: TableView) -> str:
    """How full a table is, as text."""
    return f"{held_in(table):,} of {table.layout.rows:,} rows"
