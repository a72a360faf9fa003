"""The pages that a writer fills: where the next tick's row lies, and the conditions for writing it.

The conditions are a page with enough room, rows that the table's limiter grants, and a table that is not frozen. A writer waits only
here. The writer's position is in its words (words.WRITER_*), which kernels change; Python keeps no copy of it.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from conduit.clock import Deadline
from conduit.errors import Busy, Closed, FieldError, SpaceTimeout
from conduit.native.descriptors import fill
from conduit.native.jit import entry
from conduit.plane.ingest.field_statistics import Tally
from conduit.store.format import words as w
from conduit.store.ingest import first_page, page_writer
from conduit.store.ingest.report_episodes import WRITER_REPORTS, WRITER_WORDS, Reports
from conduit.store.pages import ragged_values, rate_limiter
from conduit.store.tables.limit_checks import check_rows, limits_of, seat_line, why_not_inserted
from conduit.store.tables.queue import QueueView
from conduit.store.tables.view import TableView

OnFull = Literal["wait", "raise"]
Array = np.ndarray[Any, Any]

_TURNS_AT_ONCE = 15
"""Number of page turns that `append` makes in its compiled call before Python makes one. Python also recovers dead processes' pages."""


class WriterPages:
    """The pages of one writer: room for its rows, and what is stored in them.

    Attributes:
        table: The table's view in this process.
        schema: Its schema.
        envs: Rows per tick.
        hands_over: True if the caller passes final observations (`final=`); False if the next row is the final observation.
        is_queue: True if rows wait for consumers instead of being overwritten.
        rollout: Ticks after which a page is complete, or 0.
        tally: Adds the writer's rows to the table's statistics, or None.
        largest_tick: Items of a tick's longest possible ragged values, final observations included, int64 [ragged fields];
            None without such fields. A new page always has room for them (conduit.store.format.arena_sizes).
        words: int64 words (words.WRITER_*) as a memoryview; `array` is the same memory as an array, `address` its address.
    """

    def __init__(
        self,
        table: TableView,
        envs: int,
        *,
        hands_over: bool,
        timeout: float | None,
        on_full: OnFull,
        keep_final: bool,
        what: str,
    ) -> None:
        seat = table.check_open()
        self.envs = envs
        self.table = table
        self.schema = table.layout.schema
        self.hands_over = hands_over
        keeps = hands_over and bool(self.schema.observation_names)
        table.layout.check_writer(envs, finals=keeps)
        self._seat = seat_line(table)
        self.check_grant(1, what)
        self.is_queue = table.layout.table.kind == "queue"
        self.rollout = table.layout.table.rollout_length or 0
        self.largest_tick = self._largest_tick()
        self._timeout = timeout
        self._on_full = on_full
        self._closed = False
        self.tally: Tally | None = None
        self._env_states = np.zeros((envs, 3), np.int64)
        self._env_states[:, 0] = w.STARTING
        self._arenas = ragged_values.arena_words(
            [
                (
                    table.columns[name].ctypes.data,
                    values.ctypes.data,
                    values.strides[0],
                    values.strides[1],
                    values.shape[1],
                )
                for name, values in table.arenas.items()
            ]
        )
        self._reports = Reports(table.segment.base + table.layout.episodes, self.schema, table.columns, envs)
        self.array = np.zeros(WRITER_WORDS, np.int64)
        self.words = self.array.data
        self.address: int = self.array.ctypes.data
        fill(
            self.words,
            {
                w.WRITER_TABLE: table.address,
                w.WRITER_PAGE: -1,
                w.WRITER_ENVS: envs,
                w.WRITER_RESERVE: envs * (keeps + (self.rollout > 0)),
                w.WRITER_NEXT_STEP: not hands_over,
                w.WRITER_ENV_STATE: self._env_states.ctypes.data,
                w.WRITER_STREAM: table.new_stream(),
                w.WRITER_OWNER: seat.number,
                w.WRITER_COUNTER: seat.counter,
                w.WRITER_PUBLISH_EVERY: 1,
                w.WRITER_CLOSED: table.segment.closed_address,
                w.WRITER_FINISHES: self.is_queue,
                w.WRITER_STRICT: keeps and keep_final,
                w.WRITER_ARENAS: self._arenas.ctypes.data,
                w.WRITER_ARENA_COUNT: len(self._arenas),
                w.WRITER_SEAT: self._seat,
                WRITER_REPORTS: self._reports.address,
            },
        )

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("Expected an open writer, got one that was closed")
        self.table.check_open()

    @property
    def number(self) -> int:
        """Number of the stream in the table. With its first row a writer may continue the page, and the stream, of an earlier writer."""
        return self.words[w.WRITER_STREAM // 8]

    @property
    def ticks(self) -> int:
        """Ticks that this writer has committed."""
        return self.words[w.WRITER_TICK // 8] - self.words[w.WRITER_FIRST_TICK // 8]

    @property
    def closed(self) -> bool:
        """True once the writer has closed."""
        return self._closed

    def here(self, rows: int = 0, tail: int = 0, items: Array | None = None) -> int:
        """Physical row of the next tick. If the page has too little room left, or the table was reset, the page is turned first.

        Args:
            rows: Rows that are needed; 0 means one tick and all final observations that it may have.
            tail: Number of final observations to keep room for at the page's end.
            items: Items of ragged values that are needed, int64 [ragged fields]; at most those of one tick and its final observations.

        Raises:
            SpaceTimeout, Busy: No page could be claimed, or the table's limiter does not grant the rows.
            Frozen: The table is frozen.
        """
        if rows == 0:
            rows, tail = self.envs, self.words[w.WRITER_RESERVE // 8]
        try:
            self.admit(rows)
            fits = entry(page_writer.fits)(self.address, rows, tail) and not entry(page_writer.is_stale)(self.address)
            if not fits or (items is not None and not entry(ragged_values.values_fit)(self.address, items.ctypes.data)):
                needed = 0 if items is None else items.ctypes.data
                at = (
                    -1
                    if self.words[w.WRITER_PAGE // 8] >= 0
                    else entry(first_page.reopen)(self.address, rows, tail, needed)
                )
                if at < 0:
                    self._turn()
        except BaseException:
            self._give_back()
            raise
        self.words[w.WRITER_BEYOND // 8] = 0
        return self.words[w.WRITER_BASE // 8] + self.words[w.WRITER_LOCAL // 8]

    def check_grant(self, ticks: int, what: str) -> None:
        """Refuse a number of ticks that the table's limiter can never grant at once.

        Raises:
            ConfigError: The limiter can never grant them.
        """
        if self._seat:
            check_rows(limits_of(self.table), ticks * self.envs, self.table.layout.name, what)

    def admit(self, rows: int) -> None:
        """Wait until the table's limiter grants the next rows; the page does not change.

        Raises:
            SpaceTimeout, Busy: The limiter does not grant them.
            Frozen: The table is frozen.
        """
        self.table.check_thawed()
        if not self._seat or entry(rate_limiter.grant)(self.address, rows):
            return
        # loaders may wait for rows that the ingestion still holds back
        self.publish()

        def ask() -> bool | None:
            self.table.check_thawed()
            return True if entry(rate_limiter.grant)(self.address, rows) else None

        if self._on_full == "wait" and self.table.wait(ask, for_space=True, deadline=Deadline(self._timeout)):
            return
        why = why_not_inserted(limits_of(self.table), self.table.counts(), rows) or "it was blocked until just now"
        message = f"Expected the limiter of table {self.table.layout.name!r} to let {rows} rows in, but {why}"
        if self._on_full == "raise":
            raise Busy(message)
        raise SpaceTimeout(f"{message} (waited {self._timeout} s)")

    def _give_back(self) -> None:
        if self._seat:
            entry(rate_limiter.give_back)(self.address)

    def _turn(self) -> None:
        self._check_open()
        if self.tally is not None:
            self.tally.take(self.words, self.envs)
        if self.is_queue:
            entry(page_writer.finish_page)(self.address)
        turned = self._turn_at_once()
        if not turned and self._on_full == "wait":
            turned = self.table.wait(self._turn_at_once, for_space=True, deadline=Deadline(self._timeout))
        if not turned:
            self._explain_full()
        self.table.check_open().look_after_dead()
        if self.tally is None and not self.is_queue and len(self._arenas) == 0:
            self.words[w.WRITER_TURNS // 8] = _TURNS_AT_ONCE

    def _turn_at_once(self) -> bool | None:
        """Turn to another page; None if all pages are open or leased."""
        seat = self.table.check_open()
        turn = entry(page_writer.turn_to_next)
        if turn(self.address) < 0 and (seat.recover_dead() == 0 or turn(self.address) < 0):
            return None
        return True

    def _explain_full(self) -> None:
        layout = self.table.layout
        states = self.table.pages()[:, w.PAGE_STATE // 8]
        kinds = states & w.KIND_MASK
        held = np.isin(kinds, (w.INIT, w.OPEN))
        page_writer, leased = int(held.sum()), int((kinds == w.SEALED).sum())
        processes = len(np.unique((states[held] >> w.OWNER_SHIFT) & w.OWNER_MASK))
        message = (
            f"Expected a free page in table {layout.name!r}, but of its {layout.pages} pages of {layout.page_rows} rows {page_writer} "
            f"are being written, by {page_writer} writers in {processes} process{'es' if processes != 1 else ''}, and {leased} are leased by readers: end leases, "
            f"close writers that are done, or create the table with writers=<as many as are open at once>, at least {page_writer + 1}"
        )
        if self.is_queue:
            message = (
                f"Expected room in queue {layout.name!r}, but its {layout.pages} pages of {layout.page_rows} rows are full: "
                f"{QueueView(self.table).explain()}. Start a consumer, let consumers acknowledge sooner and drop the "
                "arrays of what they have acknowledged, or raise the capacity"
            )
        if self._on_full == "raise":
            raise Busy(message)
        raise SpaceTimeout(f"{message} (waited {self._timeout} s)")

    def publish(self) -> None:
        """Make committed rows visible that an ingestion policy still holds back."""
        entry(page_writer.publish)(self.address)
        if self.tally is not None:
            self.tally.take(self.words, self.envs)

    def end_rollout(self) -> None:
        """Close the page after its last committed tick: consumers get the rollout at its present length."""
        if self.tally is not None:
            self.tally.take(self.words, self.envs)
        entry(page_writer.finish_page)(self.address)

    @property
    def ticks_left(self) -> int:
        """Ticks that the present rollout still takes: rollout_length between two rollouts, 1 if its page may have no room for more."""
        words = self.words
        local, reserve = words[w.WRITER_LOCAL // 8], words[w.WRITER_RESERVE // 8]
        if not entry(page_writer.fits)(self.address, self.envs, reserve):
            return self.rollout
        # each tick may keep a final observation of every environment; after the last tick come the bootstrap observations
        free = words[w.WRITER_ROWS // 8] - words[w.WRITER_TAIL // 8] - local - self.envs
        return 1 if free < 2 * reserve else self.rollout - local // self.envs

    def put(self, name: str, row: int, array: Array) -> None:
        """Store a checked value of one uncommitted physical row; a ragged value goes to the end of the page's arena.

        Raises:
            FieldError: The arena has no room for it.
        """
        if name not in self.table.arenas:
            self.table.columns[name][row] = array
            return
        number = self.schema.ragged_names.index(name)
        if entry(ragged_values.put_value)(self.address, number, row, array.ctypes.data, len(array)) < 0:
            self._refuse_length(name, len(array))

    def reserve_value(self, name: str, row: int, length: int) -> Array:
        """Reserve a ragged value of one uncommitted physical row: a view [length, *shape[1:]] with the memory's previous contents.

        Raises:
            FieldError: The arena has no room for it.
        """
        number = self.schema.ragged_names.index(name)
        if entry(ragged_values.reserve_value)(self.address, number, row, length) < 0:
            self._refuse_length(name, length)
        return self.value(name, row)

    def _refuse_length(self, name: str, length: int) -> None:
        raise FieldError(f"Expected room for {length} items in the page's arena: write it with append", at=name)

    def value(self, name: str, row: int) -> Array:
        """The ragged value staged for an uncommitted physical row: a writable view [length, *shape[1:]] of the page's arena."""
        start, length = map(int, self.table.columns[name][row])
        view: Array = self.table.arenas[name][self.words[w.WRITER_PAGE // 8], start : start + length]
        return view

    def _largest_tick(self) -> Array | None:
        fields = [self.schema[name] for name in self.schema.ragged_names]
        if not fields:
            return None
        values = [self.envs * (2 if self.hands_over and field.observation else 1) for field in fields]
        return np.array([n * field.max_length for n, field in zip(values, fields, strict=True)], np.int64)
