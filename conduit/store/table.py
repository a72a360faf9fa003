"""One process's view of a table: its columns as arrays, its words, and claims, waits and leases on its pages."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar

import numpy as np

from conduit.clock import Deadline
from conduit.errors import Closed, Overwritten
from conduit.jit import entry
from conduit.store import protocol
from conduit.store.declaration import row_stride
from conduit.store.layout import TableLayout
from conduit.store.participants import Participants
from conduit.store.segment import Segment
from conduit.store.statistics import Statistics
from conduit.store.waiting import wait_for
from conduit.store.words import (
    GENERATION_SHIFT,
    KIND_MASK,
    LINE,
    OPEN,
    PAGE_COMMITTED,
    PAGE_ENVS,
    PAGE_HALO,
    PAGE_STATE,
    SEALED,
    T_COLUMN_COUNT,
    T_COLUMNS,
    T_CONTROL,
    T_COUNT,
    T_FUTURE,
    T_HAZARD_COUNT,
    T_HAZARDS,
    T_HISTORY,
    T_MAX_SAMPLED,
    T_META,
    T_PAGE_BASE,
    T_PAGES,
    T_PRIORITY,
    T_QUEUE,
    T_ROLLOUT,
    T_ROWS,
    T_SAMPLED,
    T_SEAT_COUNT,
    T_SEATS,
    T_SIDES,
    T_TERMINATED,
    T_TRUNCATED,
    T_WORDS,
    TABLE_DATA,
    TABLE_DELIVERED_AGAIN,
    TABLE_EVICTED_ROWS,
    TABLE_RECOVERED,
    TABLE_SEALED_ROWS,
    TABLE_SPACE,
    TABLE_STREAMS,
)

T = TypeVar("T")
Array = np.ndarray[Any, Any]

SPAN_DTYPE = np.dtype([("start", "<u4"), ("length", "<u4")])
"""Where a ragged value lies in its page's arena, in items; the same word as words.SPAN_*."""

META_DTYPE = np.dtype([("version", "<i4"), ("step", "<i4"), ("episode", "<u4"), ("link", "<u4")])
"""A row's meta; `link` is the distance to the next observation << 5 | flags (conduit.store.words)."""


class TableView:
    """A table as mapped by this process.

    Attributes:
        layout: Its place in the segment.
        columns: {field name: array [rows, *shape]} over the whole table, writable views of shared memory; SPAN_DTYPE [rows]
            for a ragged field.
        arenas: {ragged field: array [pages, items, *shape[1:]]}, its values.
        terminated, truncated: bool [rows].
        meta: META_DTYPE [rows].
        priorities: Leaf priorities, uint32 [rows] (kernels.leaves), or None.
        sampled: How often each row was delivered, uint32 [rows], or None.
        descriptor: int64 words (words.T_*) whose address kernels take as `table`.
    """

    def __init__(self, segment: Segment, layout: TableLayout) -> None:
        self.layout = layout
        self.segment = segment
        rows = layout.rows
        self.columns: dict[str, Array] = {}
        pairs = []
        for field in layout.schema.fields:
            stride = row_stride(field)
            dtype = SPAN_DTYPE if field.ragged else np.dtype(field.numpy_dtype)
            shape = () if field.ragged else field.shape
            inner = np.empty(shape, dtype).strides
            offset = layout.columns[field.name]
            self.columns[field.name] = segment.array(offset, (rows, *shape), dtype, (stride, *inner))
            pairs.append((segment.base + offset, stride))
        self.arenas: dict[str, Array] = {}
        for name, arena in layout.arenas.items():
            field = layout.schema[name]
            dtype = np.dtype(field.numpy_dtype)
            shape = (layout.pages, arena.items, *field.shape[1:])
            strides = (arena.page_bytes, *np.empty(field.shape, dtype).strides)
            self.arenas[name] = segment.array(arena.offset, shape, dtype, strides)
        self.terminated = segment.array(layout.terminated, (rows,), np.dtype(bool))
        self.truncated = segment.array(layout.truncated, (rows,), np.dtype(bool))
        self.meta = segment.array(layout.meta, (rows,), META_DTYPE)
        self.priorities: Array | None = None
        if layout.table.priorities is not None:
            self.priorities = segment.array(layout.priority, (rows,), np.dtype(np.uint32))
            pairs.append((segment.base + layout.priority, 4))
        self.sampled: Array | None = None
        if layout.table.max_times_sampled is not None:
            self.sampled = segment.array(layout.sampled, (rows,), np.dtype(np.uint32))
            pairs.append((segment.base + layout.sampled, 4))
        self._pairs = np.array(pairs, np.int64)
        self.descriptor = np.zeros(T_WORDS, np.int64)
        for offset, value in (
            (T_PAGES, segment.base + layout.blocks),
            (T_COUNT, layout.pages),
            (T_ROWS, layout.page_rows),
            (T_HAZARDS, segment.base + segment.layout.hazards),
            (T_HAZARD_COUNT, segment.layout.hazard_count),
            (T_CONTROL, segment.base + layout.control),
            (T_PAGE_BASE, layout.page_base),
            (T_COLUMNS, self._pairs.ctypes.data),
            (T_COLUMN_COUNT, len(pairs)),
            (T_META, segment.base + layout.meta),
            (T_TERMINATED, segment.base + layout.terminated),
            (T_TRUNCATED, segment.base + layout.truncated),
            (T_PRIORITY, segment.base + layout.priority if self.priorities is not None else 0),
            (T_HISTORY, layout.table.max_stack - 1),
            (T_FUTURE, layout.table.future_ticks),
            (T_SIDES, segment.base + layout.sides),
            (T_SEATS, segment.base + layout.seats),
            (T_SEAT_COUNT, segment.layout.spec.max_participants),
            (T_SAMPLED, segment.base + layout.sampled if self.sampled is not None else 0),
            (T_MAX_SAMPLED, layout.table.max_times_sampled or 0),
            (T_QUEUE, layout.table.kind == "queue"),
            (T_ROLLOUT, layout.table.rollout_length or 0),
        ):
            self.descriptor[offset // 8] = value
        self.address = self.descriptor.ctypes.data
        self.participants: Participants | None = None
        self._statistics_mutex = threading.Lock()

    @property
    def statistics(self) -> Statistics:
        """Running statistics of its fields; not kept here, since a cycle would keep the seat of a dropped client."""
        return Statistics(self, self._statistics_mutex)

    def _word(self, offset: int) -> int:
        return self.segment.words[(self.layout.control + offset) // 8]

    def new_stream(self) -> int:
        """A stream number that no other writer of this table has had."""
        return entry(protocol.take_ticket)(self.segment.base + self.layout.control + TABLE_STREAMS)

    def pages(self) -> Array:
        """A copy of every page's words, int64 [pages, 16] (words.PAGE_* // 8)."""
        out = np.zeros((self.layout.pages, LINE // 8), np.int64)
        entry(protocol.copy_words)(self.address, out.ctypes.data)
        return out

    def rows_visible(self) -> int:
        """Committed rows in the table now, halo copies not counted."""
        pages = self.pages()
        live = np.isin(pages[:, PAGE_STATE // 8] & KIND_MASK, (OPEN, SEALED))
        return int((pages[live, PAGE_COMMITTED // 8] - pages[live, PAGE_HALO // 8]).sum())

    def rows_written(self) -> int:
        """Rows ever committed; a statistic, not a synchronised count."""
        pages = self.pages()
        is_open = (pages[:, PAGE_STATE // 8] & KIND_MASK) == OPEN
        in_open = int((pages[is_open, PAGE_COMMITTED // 8] - pages[is_open, PAGE_HALO // 8]).sum())
        return self._word(TABLE_SEALED_ROWS) + in_open

    @property
    def rows_evicted(self) -> int:
        """Rows whose page was reused."""
        return self._word(TABLE_EVICTED_ROWS)

    @property
    def pages_recovered(self) -> int:
        """Pages taken back from dead writers."""
        return self._word(TABLE_RECOVERED)

    @property
    def delivered_again(self) -> int:
        """Claims of dead consumers that were given back."""
        return self._word(TABLE_DELIVERED_AGAIN)

    def check_open(self) -> Participants:
        """Refuse work on a closed engine, or through a handle that a fork has made useless.

        Returns:
            This process's seat.

        Raises:
            Closed: The engine has closed, or this client has.
            Forked: The handle came through a fork.
        """
        if self.participants is None:
            raise Closed(f"Expected an attached client of engine {self.segment.name!r}, this one was closed")
        self.participants.check()
        if self.segment.closed:
            raise Closed(f"Expected engine {self.segment.name!r} to be running, it has been closed by its owner")
        return self.participants

    def claim(self) -> int:
        """A page for this participant (INIT), or -1 when all are open or leased."""
        seat = self.check_open()
        page = entry(protocol.claim)(self.address, seat.number, 0)
        if page < 0 and seat.recover_dead() > 0:
            page = entry(protocol.claim)(self.address, seat.number, 0)
        return page

    def wait(self, attempt: Callable[[], T | None], *, for_space: bool, deadline: Deadline) -> T | None:
        """Wait until `attempt` succeeds, woken by writers (rows) or by freed pages (space).

        Raises:
            Closed: The engine closed meanwhile.
        """
        offset = self.layout.control + (TABLE_SPACE if for_space else TABLE_DATA)

        def alive_attempt() -> T | None:
            self.check_open().look_after_dead()
            return attempt()

        return wait_for(alive_attempt, self.segment.base + offset, self.segment.words, offset // 8, deadline)

    def lease(self, page: int, generation: int | None = None) -> Lease:
        """Hold a page: its rows neither change nor go until the lease ends.

        Args:
            page: Page number.
            generation: The generation that is meant; None takes the present one.

        Raises:
            Overwritten: The page holds no rows, or rows of another generation.
            BufferError: This client holds too many leases.
        """
        seat = self.check_open()
        block = (self.layout.blocks + page * LINE) // 8
        if generation is None:
            generation = self.segment.words[block] >> GENERATION_SHIFT
        hazard = seat.take_hazard()
        rows = entry(protocol.lease)(self.address, page, generation, hazard)
        if rows < 0:
            seat.give_hazard(hazard)
            raise Overwritten(
                f"Expected generation {generation} of page {page} in table {self.layout.name!r}, "
                "but it has no rows now or was reused: take a newer page"
            )
        return Lease(self, page, generation, rows, hazard)


class Lease:
    """A hold on one page; a context manager.

    Attributes:
        page, generation: What is held.
        rows: Rows committed when it was taken, halo included; they stay as they are while the lease lasts.
        envs: Rows per tick.
        halo: Leading rows that are copies of the page before.
    """

    def __init__(self, table: TableView, page: int, generation: int, rows: int, hazard: int) -> None:
        self._table = table
        self._hazard = hazard
        self.page = page
        self.generation = generation
        self.rows = rows
        block = (table.layout.blocks + page * LINE) // 8
        self.envs = table.segment.words[block + PAGE_ENVS // 8]
        self.halo = table.segment.words[block + PAGE_HALO // 8]

    def column(self, name: str) -> Array:
        """Zero-copy view [rows, *shape] of a field's rows (or of "terminated", "truncated", "meta"); read it only.

        A ragged field's is SPAN_DTYPE [rows]; `values` has what it stands for.
        """
        table = self._check()
        array = table.columns[name] if name in table.columns else getattr(table, name)
        start = self.page * table.layout.page_rows
        view: Array = array[start : start + self.rows]
        view.flags.writeable = False
        return view

    def values(self, name: str) -> list[Array]:
        """Zero-copy views [length, *shape[1:]] of a ragged field's rows; read them only."""
        spans = self.column(name)
        arena = self._check().arenas[name][self.page]
        views = [arena[int(start) : int(start) + int(length)] for start, length in spans.tolist()]
        for view in views:
            view.flags.writeable = False
        return views

    def _check(self) -> TableView:
        table = self._table
        if self._hazard == 0 or table.participants is None:
            raise Closed("Expected a lease that holds its page, this one has ended")
        table.participants.check()
        return table

    def end(self) -> None:
        """Let the page go; idempotent. Views taken from it must not be used afterwards."""
        if self._hazard == 0:
            return
        hazard, self._hazard = self._hazard, 0
        participants = self._table.participants
        if participants is not None and participants.seated:
            entry(protocol.end_lease)(self._table.address, hazard)
            participants.give_hazard(hazard)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the kernel ends it then
            self.end()
