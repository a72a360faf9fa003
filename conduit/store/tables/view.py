"""One process's view of a table: its columns as arrays, its words, and waits and leases on its pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self, TypeVar

import numpy as np

from conduit.clock import Deadline
from conduit.errors import Closed, Frozen, Overwritten
from conduit.native.descriptors import fill
from conduit.native.finish import when_gone
from conduit.native.jit import entry
from conduit.native.wait import wait_for
from conduit.store.format import words as w
from conduit.store.format.columns import META_DTYPE, columns_of
from conduit.store.format.layout import TableLayout
from conduit.store.format.limit_specs import numbers_of
from conduit.store.format.soundness import damaged_page
from conduit.store.format.table_spec import fills_pages, future_ticks
from conduit.store.pages import deletion, holds, protocol, row_counts, settling
from conduit.store.pages.image import Extent, PageImages, values_of
from conduit.store.pages.rate_limiter import use_seat
from conduit.store.pages.row_ids import as_ids, find_foreign, not_a_row
from conduit.store.segment.participants import Participants, closed_client
from conduit.store.segment.segment import Segment

T = TypeVar("T")
Array = np.ndarray[Any, Any]

_HOLD_ATTEMPTS = 3
"""Attempts to lease a page: a writer that claims the page and gives it back prevents a lease for a moment."""


class TableView:
    """A table as mapped by this process.

    Attributes:
        layout: The table's offsets in the segment.
        columns: {field name: array [rows, *shape]} over the whole table, writable views of shared memory; SPAN_DTYPE [rows]
            for a ragged field.
        arenas: {ragged field: array [pages, items, *shape[1:]]}, the values of ragged fields.
        terminated, truncated: bool [rows].
        meta: META_DTYPE [rows].
        priorities: Leaf priorities, uint32 [rows] (kernels.cpu.priorities), or None.
        sampled: Counts of the rows' deliveries, int64 [rows] (words.ONE_TAKEN), or None.
        descriptor: int64 words (words.VIEW_*); kernels take their address as the argument `table`.
    """

    def __init__(self, segment: Segment, layout: TableLayout) -> None:
        self.layout = layout
        self.segment = segment
        rows = layout.rows
        self.columns: dict[str, Array] = {}
        pairs = []
        for column in columns_of(layout):
            if column.is_field:
                shape = (rows, *column.shape)
                self.columns[column.name] = segment.array(column.offset, shape, column.dtype, column.strides)
                pairs.append((segment.base + column.offset, column.stride))
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
            self.sampled = segment.array(layout.sampled, (rows,), np.dtype(np.int64))
        self._pairs = np.array(pairs, np.int64)
        self.descriptor = np.zeros(w.VIEW_WORDS, np.int64)
        fill(
            self.descriptor,
            {
                w.VIEW_PAGES: segment.base + layout.blocks,
                w.VIEW_COUNT: layout.pages,
                w.VIEW_ROWS: layout.page_rows,
                w.VIEW_HAZARDS: segment.base + segment.layout.hazards,
                w.VIEW_HAZARD_COUNT: segment.layout.hazard_count,
                w.VIEW_CONTROL: segment.base + layout.control,
                w.VIEW_PAGE_BASE: layout.page_base,
                w.VIEW_COLUMNS: self._pairs.ctypes.data,
                w.VIEW_COLUMN_COUNT: len(pairs),
                w.VIEW_META: segment.base + layout.meta,
                w.VIEW_TERMINATED: segment.base + layout.terminated,
                w.VIEW_TRUNCATED: segment.base + layout.truncated,
                w.VIEW_PRIORITY: segment.base + layout.priority if self.priorities is not None else 0,
                w.VIEW_MARKS: segment.base + layout.marks if self.priorities is not None else 0,
                w.VIEW_FIRST_GENERATION: layout.first_generation,
                w.VIEW_HISTORY: layout.table.max_stack - 1,
                w.VIEW_FUTURE: future_ticks(layout.table),
                w.VIEW_SIDES: segment.base + layout.sides,
                w.VIEW_SEATS: segment.base + layout.seats,
                w.VIEW_SEAT_COUNT: segment.layout.spec.max_participants,
                w.VIEW_SAMPLED: segment.base + layout.sampled if self.sampled is not None else 0,
                w.VIEW_MAX_SAMPLED: layout.table.max_times_sampled or 0,
                w.VIEW_QUEUE: layout.table.kind == "queue",
                w.VIEW_ROLLOUT: layout.table.rollout_length or 0,
                w.VIEW_KEEP: layout.keep,
                w.VIEW_REOPENS: fills_pages(layout.table),
            },
        )
        self._limits: Array | None = None
        if layout.limits is not None:
            self._limits = np.array(numbers_of(layout.limits), np.float64)
            self.descriptor[w.VIEW_LIMITS // 8] = self._limits.ctypes.data
        self.address = self.descriptor.ctypes.data
        self.participants: Participants | None = None

    @functools.cached_property
    def images(self) -> PageImages:
        """The table's pages as bytes."""
        return PageImages(self.layout, self.segment.root)

    def _word(self, offset: int) -> int:
        return self.segment.words[(self.layout.control + offset) // 8]

    @property
    def epoch(self) -> int:
        """A number that changes with each reset. After the first reset, only pages that were opened in the present epoch have rows."""
        return self._word(w.TABLE_EPOCH) >> 1

    def new_stream(self) -> int:
        """A stream number that no other writer of this table has had."""
        return entry(protocol.take_ticket)(self.segment.base + self.layout.control + w.TABLE_STREAMS)

    def pages(self) -> Array:
        """A copy of every page's words, int64 [pages, 16] (words.PAGE_* // 8)."""
        out = np.zeros((self.layout.pages, w.LINE // 8), np.int64)
        entry(protocol.copy_words)(self.address, out.ctypes.data)
        return out

    def counts(self) -> row_counts.Counts:
        """Counts of rows and samples; exact, except for changes by other processes during the call."""
        settling.settle_table(self.descriptor)
        return row_counts.counts_of(self.address)

    def seat_line(self) -> int:
        """Address of this participant's line of the table, which counts include from now on."""
        return entry(use_seat)(self.address, self.check_open().number)

    def rows_visible(self) -> int:
        """Committed rows in the table now, halo copies not counted."""
        return self.counts().size

    def rows_written(self) -> int:
        """Rows ever committed."""
        return self.counts().inserted

    @property
    def rows_evicted(self) -> int:
        """Rows whose page was reused."""
        return self.counts().evicted

    @property
    def pages_recovered(self) -> int:
        """Pages taken back from dead writers."""
        return self._word(w.TABLE_RECOVERED)

    @property
    def delivered_again(self) -> int:
        """Claims of dead consumers that were given back."""
        return self._word(w.TABLE_DELIVERED_AGAIN)

    def check_open(self) -> Participants:
        """Refuse work if the engine or client has closed, its owner is gone, or this process inherited the handle through a fork.

        Returns:
            This process's seat.

        Raises:
            Closed: The engine has closed, or this client has.
            Forked: This process inherited the handle through a fork.
            OwnerGone: The engine's owner is gone.
        """
        participants = self.seat()
        participants.check_open()
        return participants

    def seat(self) -> Participants:
        """This process's seat, also after the engine's end, so that the process can finish the pages that it has written.

        Raises:
            Closed: This client has closed.
        """
        if self.participants is None:
            raise closed_client(self.segment.name)
        return self.participants

    def check_thawed(self) -> None:
        """Refuse to write into a frozen table.

        Raises:
            Frozen: The table is frozen.
        """
        if self._word(w.TABLE_EPOCH) & 1:
            raise Frozen(
                f"Expected table {self.layout.name!r} to take rows, but it is frozen: thaw it with client.table({self.layout.name!r}).thaw()"
            )

    def wait(self, attempt: Callable[[], T | None], *, for_space: bool, deadline: Deadline) -> T | None:
        """Wait until `attempt` succeeds, woken by writers (rows) or by freed pages (space).

        Raises:
            Closed: The engine closed meanwhile.
            OwnerGone: The engine's owner died meanwhile.
        """
        offset = self.layout.control + (w.TABLE_SPACE if for_space else w.TABLE_DATA)

        def alive_attempt() -> T | None:
            self.check_open().look_after_dead()
            return attempt()

        return wait_for(alive_attempt, self.segment.base + offset, self.segment.words, offset // 8, deadline)

    def delete(self, ids: Any) -> int:
        """Delete rows by id; returns how many rows were deleted.

        Raises:
            FieldError: The ids are not integers, or an id cannot belong to a row of this table; nothing is deleted then.
            BufferError: This client holds too many leases.
        """
        keys = as_ids(ids).ravel()
        seat = self.check_open().seat
        done = entry(deletion.delete)(self.address, keys.ctypes.data, keys.size, seat)
        if done < -1:
            raise not_a_row(self.layout.name, int(keys[-2 - done]), -2 - done)
        if done < 0:
            raise too_many_holds()
        return done

    def check_ids(self, ids: Array) -> None:
        """Refuse row ids, int64 [n], that cannot belong to rows of this table.

        Raises:
            FieldError: An id cannot belong to a row of this table; names it.
        """
        keys = np.ascontiguousarray(ids, np.int64)
        foreign = entry(find_foreign)(self.address, keys.ctypes.data, keys.size)
        if foreign >= 0:
            raise not_a_row(self.layout.name, int(keys[foreign]), foreign)

    def lease(self, page: int, generation: int | None = None) -> Lease:
        """Lease a page: its rows neither change nor go until the lease ends.

        Args:
            page: Page number.
            generation: The expected generation; None takes the present one.

        Raises:
            Overwritten: The page holds no rows, or rows of another generation.
            BufferError: This client holds too many leases.
            BadSegment: The page is damaged.
        """
        lease = Lease(self)
        lease.take(page, -1 if generation is None else generation)
        return lease

    def hold(self, extent: Extent) -> Lease | None:
        """Lease a page if it still has the rows of an extent; None if they are gone.

        Raises:
            BufferError, BadSegment: As `lease`.
        """
        lease = Lease(self)
        return lease if lease.take_extent(extent) else None


class Lease:
    """A reader's hold on one page at a time, which keeps writers from taking the page; a context manager.

    Attributes:
        page: The leased page, or the page that was leased last.
    """

    def __init__(self, table: TableView) -> None:
        self._table = table
        self._seat = table.check_open().seat
        self._array = np.zeros(w.HOLD_WORDS, np.int64)
        self._words = self._array.data
        self.page = -1
        when_gone(self, entry(holds.end_hold), self._array, self._seat)

    def take(self, page: int, generation: int) -> None:
        """Begin the lease of a page; see `TableView.lease`. Generation -1 takes the present one. The lease must hold no page before."""
        self.page = page
        rows = entry(holds.hold)(self._table.address, self.page, generation, self._seat, self._array)
        if rows < 0:
            if rows == holds.OVERWRITTEN:
                raise Overwritten(
                    f"Expected generation {self.generation} of page {self.page} in table {self._table.layout.name!r}, "
                    "but it has no rows now or was reused: take a newer page"
                )
            if rows == holds.DAMAGED:
                raise damaged_page(self._table.layout, self.page, "rows, rows per tick and a halo that do not fit it")
            self._table.check_open()
            raise too_many_holds()

    def take_extent(self, extent: Extent) -> bool:
        """Begin the lease of an extent's page if it still has the extent's rows; see `TableView.hold`."""
        self._table.check_open()
        for _ in range(_HOLD_ATTEMPTS):
            try:
                self.take(extent.page, -1)
            except Overwritten:
                continue
            if self._table.images.holds(extent):
                return True
            self.end()
            return False
        return False

    @property
    def rows(self) -> int:
        """Rows committed when the lease began, halo included."""
        return self._words[w.HOLD_ROWS // 8]

    @property
    def generation(self) -> int:
        """Generation of the page."""
        return self._words[w.HOLD_GENERATION // 8]

    @property
    def envs(self) -> int:
        """Rows per tick."""
        return self._words[w.HOLD_ENVS // 8]

    @property
    def halo(self) -> int:
        """Number of leading rows that are copies from the page before."""
        return self._words[w.HOLD_HALO // 8]

    def column(self, name: str) -> Array:
        """Zero-copy view [rows, *shape] of a field's rows (or of "terminated", "truncated", "meta"); do not write to it.

        For a ragged field it is SPAN_DTYPE [rows]; `values` returns the values.
        """
        table = self._check()
        array = table.columns[name] if name in table.columns else getattr(table, name)
        start = self.page * table.layout.page_rows
        view: Array = array[start : start + self.rows]
        view.flags.writeable = False
        return view

    def values(self, name: str) -> list[Array]:
        """Zero-copy views [length, *shape[1:]] of a ragged field's rows; do not write to them."""
        spans = self.column(name)
        views = values_of(self._table.layout, name, self.page, self._check().arenas[name][self.page], spans)
        for view in views:
            view.flags.writeable = False
        return views

    def _check(self) -> TableView:
        table = self._table
        if self._words[w.HOLD_SLOT // 8] == 0 or table.participants is None:
            raise Closed("Expected a lease that holds its page, got one that has ended")
        table.participants.check()
        return table

    def end(self) -> None:
        """End the lease; idempotent. Views taken from it must not be used afterwards."""
        entry(holds.end_hold)(self._array, self._seat, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def too_many_holds() -> BufferError:
    """The error if every hazard slot of this process is in use."""
    return BufferError(
        f"Expected at most {w.HAZARDS_PER_PARTICIPANT} leases and claims at a time in one attached client: end some, "
        "acknowledge claims and drop what was made from them"
    )
