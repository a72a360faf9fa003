"""Rate limiters: a loader's gate, the checks against deadlock, error texts, and the handle that `TableHandle.limiter` returns."""

from __future__ import annotations

import math
import threading
import time

import numpy as np

from conduit.clock import Deadline
from conduit.errors import Busy, ConfigError
from conduit.forking import StaysHere, renew_in_child
from conduit.native.finish import when_gone
from conduit.native.jit import entry
from conduit.numbers import at_least
from conduit.store.format.limit_specs import (
    Limiter,
    Limits,
    checked_limiter,
    half_range,
    numbers_of,
    rows_short,
    samples_short,
)
from conduit.store.format.page_sizes import Geometry
from conduit.store.format.soundness import limits_of_words
from conduit.store.format.table_spec import check_min_size
from conduit.store.pages import rate_limiter as kernels
from conduit.store.pages.row_counts import Counts, counts_of
from conduit.store.segment.locks import LOCK_LIMITS, LockByte
from conduit.store.tables.appearance import never_raises, place_of, state_of
from conduit.store.tables.view import TableView

_CHANGE_TIMEOUT = 2.0
_changing = threading.Lock()
renew_in_child(__name__, "_changing", threading.Lock)


def seat_line(table: TableView) -> int:
    """Address of this participant's line of the table; 0 if the table has no limiter."""
    if table.layout.limits is None:
        return 0
    return table.seat_line()


def limits_of(table: TableView) -> Limits:
    """A table's limits in force."""
    numbers = np.zeros(4, np.float64)
    entry(kernels.limits_in_force)(table.address, numbers.ctypes.data)
    return limits_of_words(table.layout, numbers)


class Gate:
    """A loader's access to its table's limiter: reserve samples, then deliver or cancel them.

    Samples that are reserved and neither delivered nor cancelled count as sampled until this process detaches or dies. So a batch may
    be made before the call that delivers it: samples are reserved before the draw, and charged at the delivery.

    Args:
        table: A table with a limiter.
        count: Most samples that are reserved at once.
        future: Ticks that a window needs after its first.

    Raises:
        ConfigError: The loader and the writers could wait for each other.
    """

    def __init__(self, table: TableView, count: int, future: int) -> None:
        limits = limits_of(table)
        check_batch(limits, count, table.layout.name)
        check_window(limits, future, table.layout.name)
        self._words = np.zeros(kernels.GATE_WORDS, np.int64)
        self._words[kernels.GATE_TABLE // 8] = table.address
        self._words[kernels.GATE_SEAT // 8] = seat_line(table)
        self._words[kernels.GATE_SHRUNK // 8] = -1
        self._address = self._words.ctypes.data
        self._table = table
        self._seat = table.check_open().seat
        self._reserve, self._deliver, self._cancel = (
            entry(kernels.reserve),
            entry(kernels.deliver),
            entry(kernels.cancel),
        )
        when_gone(self, self._cancel, self._words, self._seat)

    def reserve(self, count: int) -> bool:
        """Reserve samples; False when the limiter does not allow them now."""
        return self._reserve(self._address, count) == 0

    def deliver(self, batch_at: int = 0, batch: int = 0) -> None:
        """Charge the reserved samples: the batch is delivered. If `batch_at` is an address, `batch` is stored there in the same call."""
        self._deliver(self._address, batch_at, batch)

    def cancel(self) -> None:
        """Give back the reserved samples: the batch is not delivered. Idempotent."""
        self._cancel(self._words, self._seat, None)

    def explain(self, count: int) -> str | None:
        """Why `reserve` fails now and what ends the wait, as text, or None."""
        return why_not_sampled(limits_of(self._table), self._table.counts(), count)


def _range(limits: Limits) -> str:
    return f"I * {limits.samples_per_insert:g} - S stays between {limits.min_diff:g} and {limits.max_diff:g}"


def check_batch(limits: Limits, count: int, table: str) -> None:
    """Refuse a batch size with which loaders and writers could wait for each other.

    Raises:
        ConfigError: The batch is more than half of the limits' range.
    """
    half = half_range(limits)
    if count > half:
        raise ConfigError(
            f"Expected a batch_size of at most {math.floor(half)} for the limiter of table {table!r}, got {count}: "
            f"{_range(limits)}, and a batch of more than half of that range and rows that are inserted could come to wait for "
            f"each other. Make the range at least {2 * count:g} wide (error_buffer={count:g}), or the batch smaller"
        )


def check_window(limits: Limits, future: int, table: str) -> None:
    """Refuse windows that cannot be complete before writers have to wait for the first sample.

    Raises:
        ConfigError: The limits admit too few rows before the first sample.
    """
    rows = max(limits.min_size, limits.max_diff / limits.samples_per_insert)
    if rows < future + 1:
        raise ConfigError(
            f"Expected windows of at most {math.floor(rows)} ticks for the limiter of table {table!r}, got {future + 1} (the next "
            f"observation counts): writers wait for a sample after {math.floor(rows)} rows, when there is no whole window to "
            "sample. Raise min_size or max_diff (error_buffer)"
        )


def check_rows(limits: Limits, rows: int, table: str, what: str) -> None:
    """Refuse a number of rows inserted at once with which writers and loaders could wait for each other.

    Raises:
        ConfigError: The rows are worth more than half of the limits' range.
    """
    spi, half = limits.samples_per_insert, half_range(limits)
    if rows * spi > half:
        raise ConfigError(
            f"Expected at most {math.floor(half / spi)} rows at once for the limiter of table {table!r}, got {rows} ({what}): "
            f"{_range(limits)}, and rows that are worth more than half of that range and a batch could come to wait for each "
            f"other. Make the range at least {2 * rows * spi:g} wide (error_buffer={rows * spi:g}), or write fewer at once"
        )


def _inserts(count: int) -> str:
    return f"{count:,} more inserted row{'s' if count != 1 else ''} free{'' if count != 1 else 's'} it"


def why_not_sampled(limits: Limits, counts: Counts, count: int) -> str | None:
    """Why `count` samples are refused: the term of the formula, and how many inserts end the wait. None if they are allowed."""
    spi = limits.samples_per_insert
    taken = counts.sampled + counts.reserved
    by_size, by_difference = rows_short(limits, counts.inserted, taken, counts.deleted, count)
    terms = []
    if by_size:
        terms.append(f"min_size: {counts.size:,} of {limits.min_size:,} rows are there")
    if by_difference:
        terms.append(
            f"min_diff: inserted * samples_per_insert - sampled - {count} = {counts.inserted:,} * {spi:g} - {taken:,} - {count} = "
            f"{counts.inserted * spi - taken - count:,g} is below {limits.min_diff:,g}"
        )
    missing = max(by_size, by_difference)
    return f"sampling is blocked by {' and by '.join(terms)}; {_inserts(missing)}" if terms else None


def why_not_inserted(limits: Limits, counts: Counts, rows: int) -> str | None:
    """Why `rows` more rows are refused: the term of the formula, and how many samples end the wait. None if they are allowed."""
    spi = limits.samples_per_insert
    total = counts.inserted + counts.granted + rows
    missing = samples_short(limits, counts.inserted + counts.granted, counts.sampled, counts.deleted, rows)
    if not missing:
        return None
    granted = f" ({counts.granted:,} of them granted to writers)" if counts.granted else ""
    return (
        f"inserting is blocked by max_diff: (inserted + {rows}) * samples_per_insert - sampled = {total:,}{granted} * {spi:g} - "
        f"{counts.sampled:,} = {total * spi - counts.sampled:,g} is above {limits.max_diff:,g}; {missing:,} more sample"
        f"{'s free' if missing != 1 else ' frees'} it"
    )


def explain(limits: Limits, counts: Counts, samples: int = 1, rows: int = 1) -> str:
    """Both sides as text: the limits in force, the counts, and what each side waits for."""
    return "\n".join(
        (
            f"samples_per_insert {limits.samples_per_insert:g}, min_size {limits.min_size:,}, "
            f"range {limits.min_diff:,g} to {limits.max_diff:,g}",
            f"inserted {counts.inserted:,}, sampled {counts.sampled:,} (and {counts.reserved:,} reserved), "
            f"deleted {counts.deleted:,}, {counts.size:,} there",
            why_not_sampled(limits, counts, samples) or f"{samples:,} may be sampled",
            why_not_inserted(limits, counts, rows) or f"{rows:,} may be inserted",
        )
    )


class RateLimiter(StaysHere):
    """The limiter of a table, shared by all processes; from `TableHandle.limiter`."""

    _elsewhere = "ask there, client.table(name).limiter"

    def __init__(self, table: TableView) -> None:
        if table.layout.limits is None:
            raise ConfigError(
                f"Expected table {table.layout.name!r} to have a limiter: create it with limiter=conduit.SampleToInsertRatio(...)"
            )
        self._table = table

    @never_raises
    def __repr__(self) -> str:
        limits, counts = limits_of(self._table), counts_of(self._table.address)
        return (
            f"RateLimiter({place_of(self._table)}, samples_per_insert={limits.samples_per_insert:g}, min_size={limits.min_size}, "
            f"min_diff={limits.min_diff:g}, max_diff={limits.max_diff:g}, {state_of(self._table)}: {counts.inserted:,} inserted, "
            f"{counts.sampled:,} sampled, {counts.size:,} there)"
        )

    @property
    def counts(self) -> Counts:
        """Rows inserted, deleted and present, samples delivered and reserved; exact, also after processes were killed."""
        self._table.check_open()
        return self._table.counts()

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        self._table.check_open()
        return limits_of(self._table)

    def explain(self, samples: int = 1, rows: int = 1) -> str:
        """Whether a batch and an insert are allowed now; if not, by which term of the formula, and what ends the wait.

        Args:
            samples: Samples of the batch.
            rows: Rows to insert at once.
        """
        return explain(self.limits, self.counts, at_least("samples", samples, 1), at_least("rows", rows, 1))

    def change(self, limiter: Limiter) -> None:
        """Change the limits, at once and in all processes; processes that wait check again.

        Open loaders and writers are not checked against the new limits: a batch that is too large for them waits, and its error says
        why.

        Raises:
            ConfigError: The argument is not a limiter, or the table cannot hold min_size rows.
            Busy: Another process is changing the limits.
        """
        table = self._table
        table.check_open()
        limits = checked_limiter(limiter)
        if limits is None:
            raise ConfigError("Expected a limiter, got None: conduit.MinSize(1) limits nothing")
        layout = table.layout
        check_min_size(layout.table, limits, Geometry(layout.pages, layout.page_rows, layout.keep))
        numbers = np.array(numbers_of(limits), np.float64)
        deadline = Deadline(_CHANGE_TIMEOUT)
        with _changing:
            lock = LockByte(table.segment.seat)
            try:
                while not lock.take(LOCK_LIMITS):
                    if deadline.passed():
                        raise Busy(
                            f"Expected no other process to change limits for {_CHANGE_TIMEOUT:g} s, got other changes all the time: try again"
                        )
                    time.sleep(0.001)
                entry(kernels.change_limits)(table.address, numbers.ctypes.data)
            finally:
                lock.give()
