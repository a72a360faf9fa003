"""The limiter's two gates: samples and inserts are reserved first, then checked against everybody's reservations.

With I rows inserted, S samples, D deletes (conduit.store.format.limit_specs has the formula), both sides proceed alike: add to a word of
one's own, execute a full fence, read everybody's words, and take the addition back if the sum does not allow it. Of two that
ask at the same time at least one sees the other, so nobody ever passes the limits. For samples S counts what is reserved;
for inserts it counts what has been delivered, and I counts what has been granted: each side takes the other's least and its
own most.

What a participant has reserved and not used goes back when it is recovered (conduit.store.pages.recovery.recover).
"""

from __future__ import annotations

import numpy as np

from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    compare_and_swap,
    data_of,
    fence_acquire,
    fence_full,
    fetch_add,
    load_acquire,
    load_relaxed,
    peek_f64,
    peek_i64,
    poke_f64,
    poke_i64,
    store_release,
    wake,
)
from conduit.store.format import words as w
from conduit.store.pages.row_counts import count_pages, count_seats

GATE_TABLE, GATE_SEAT, GATE_INSERTED, GATE_SIZE, GATE_SHRUNK, GATE_HELD = range(0, 48, 8)
"""Words of a loader's gate: table descriptor; its participant's seat line; rows inserted, rows there and TABLE_SHRUNK as
they were at its last look; samples reserved and neither delivered nor cancelled. I only grows, and the size only shrinks when TABLE_SHRUNK moves: mostly no new look is needed."""
GATE_WORDS = 6

_ATTEMPTS = 8


@kernel("int64(int64, int64)")
def use_seat(table, number):
    """Have a seat line looked at by everybody; before anything is reserved in it. Returns its address."""
    at = peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SEATS
    while True:
        used = load_acquire(at)
        if used > number or compare_and_swap(at, used, number + 1) == used:
            return peek_i64(table + w.VIEW_SEATS) + w.LINE * number


@inner
def _limits_of(table):
    """The limits in force: spi, min_size, min_diff, max_diff."""
    line = peek_i64(table + w.VIEW_CONTROL) + w.TABLE_LIMITS
    while True:
        changes = load_acquire(line)
        at = peek_i64(table + w.VIEW_LIMITS) if changes == 0 else line + 8 + w.LIMITS_BYTES * (changes & 1)
        found = peek_f64(at), peek_f64(at + 8), peek_f64(at + 16), peek_f64(at + 24)
        fence_acquire()
        if load_relaxed(line) == changes:
            return found


@inner
def _pause(seat, attempt):
    """A moment of another length for every participant, so that those who stood in each other's way come apart."""
    for _ in range(((seat >> 7) & 31) * 8 * (attempt + 1)):
        load_relaxed(seat)


@inner
def _cancel(gate):
    held = peek_i64(gate + GATE_HELD)
    if held == 0:
        return
    poke_i64(gate + GATE_HELD, 0)
    fetch_add(peek_i64(gate + GATE_SEAT) + w.SEAT_RESERVED, -held)
    fence_full()
    event = peek_i64(peek_i64(gate + GATE_TABLE) + w.VIEW_CONTROL) + w.TABLE_DATA
    if load_relaxed(event + 8) != 0:
        wake(event)


@kernel("int64(int64, int64)")
def reserve(gate, count):
    """Reserve samples.

    Args:
        gate: Address of the loader's words (GATE_*).
        count: Samples.

    Returns:
        0, or what forbids it: 1 too few rows, 2 the ratio, 3 both; nothing is reserved then.
    """
    table, seat = peek_i64(gate + GATE_TABLE), peek_i64(gate + GATE_SEAT)
    shrunk_at = peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SHRUNK
    blocked = 0
    for attempt in range(_ATTEMPTS):
        fetch_add(seat + w.SEAT_RESERVED, count)
        fence_full()
        spi, min_size, min_diff, _ = _limits_of(table)
        reserved, delivered, _ = count_seats(table)
        inserted, size = peek_i64(gate + GATE_INSERTED), peek_i64(gate + GATE_SIZE)
        shrunk = load_acquire(shrunk_at)
        if shrunk != peek_i64(gate + GATE_SHRUNK) or size < min_size or inserted * spi - reserved < min_diff:
            inserted, _, size = count_pages(table)
            poke_i64(gate + GATE_INSERTED, inserted)
            poke_i64(gate + GATE_SIZE, size)
            poke_i64(gate + GATE_SHRUNK, shrunk)
        blocked = (size < min_size) | ((inserted * spi - reserved < min_diff) << 1)
        if blocked == 0:
            poke_i64(gate + GATE_HELD, peek_i64(gate + GATE_HELD) + count)
            return 0
        fetch_add(seat + w.SEAT_RESERVED, -count)
        # it may be only that others asked at the same moment, and withdraw as well
        if blocked != 2 or inserted * spi - (delivered + count) < min_diff:
            return blocked
        _pause(seat, attempt)
    return blocked


@kernel("int64(int64, int64, int64)")
def deliver(gate, batch_at, batch):
    """What is reserved has been delivered, and the next batch's number is stored; a writer that waits for that is told.

    Args:
        gate: Address of the loader's words (GATE_*).
        batch_at: Address of the number of the sampler's next batch, or 0.
        batch: That number from now on.
    """
    if batch_at != 0:
        poke_i64(batch_at, batch)
    count = peek_i64(gate + GATE_HELD)
    poke_i64(gate + GATE_HELD, 0)
    fetch_add(peek_i64(gate + GATE_SEAT) + w.SEAT_DELIVERED, count)
    fence_full()
    event = peek_i64(peek_i64(gate + GATE_TABLE) + w.VIEW_CONTROL) + w.TABLE_SPACE
    if load_relaxed(event + 8) != 0:
        wake(event)
    return 0


@kernel("int64(object, object, object)")
def cancel(words, seat, _thing):
    """Give reserved samples back that were not delivered; another loader that waits is told (conduit.native.finish).

    Args:
        words: The loader's words (GATE_*).
        seat: This process's seat (words.PROCESS_*).
        _thing: Left alone.
    """
    if peek_i64(data_of(seat) + w.PROCESS_NUMBER) >= 0:
        _cancel(data_of(words))
    return 0


@inner
def _unpublished(writer):
    """Rows that a writer has committed and holds back still."""
    if peek_i64(writer + w.WRITER_PAGE) < 0:
        return 0
    return peek_i64(writer + w.WRITER_LOCAL) - load_relaxed(peek_i64(writer + w.WRITER_BLOCK) + w.PAGE_COMMITTED)


@inner
def ask_for_rows(writer, rows):
    """Have `rows` more rows granted, less what is left of earlier grants; False when the limiter forbids it."""
    wanted = rows + _unpublished(writer) - peek_i64(writer + w.WRITER_GRANTED)
    if wanted <= 0:
        return True
    table, seat = peek_i64(writer + w.WRITER_TABLE), peek_i64(writer + w.WRITER_SEAT)
    for attempt in range(_ATTEMPTS):
        fetch_add(seat + w.SEAT_GRANTED, wanted)
        fence_full()
        spi, min_size, _, max_diff = _limits_of(table)
        if max_diff == np.inf:
            poke_i64(writer + w.WRITER_GRANTED, peek_i64(writer + w.WRITER_GRANTED) + wanted)
            return True
        # grants before pages: a row that is published in between is counted twice, and not left out
        _, delivered, outstanding = count_seats(table)
        inserted, _, size = count_pages(table)
        deleted = inserted - size
        total = inserted + outstanding
        if total - deleted <= min_size or total * spi - delivered <= max_diff:
            poke_i64(writer + w.WRITER_GRANTED, peek_i64(writer + w.WRITER_GRANTED) + wanted)
            return True
        fetch_add(seat + w.SEAT_GRANTED, -wanted)
        alone = inserted + wanted
        if alone - deleted > min_size and alone * spi - delivered > max_diff:
            return False
        _pause(seat, attempt)
    return False


@kernel("int64(int64, int64)")
def grant(writer, rows):
    """`ask_for_rows`: 1 when the rows may be written, 0 when the writer has to wait."""
    return 1 if ask_for_rows(writer, rows) else 0


@inner
def give_back_rows(writer):
    """Give back what was granted and is not going to be written now; another writer that waits is told."""
    surplus = peek_i64(writer + w.WRITER_GRANTED) - _unpublished(writer)
    if surplus <= 0:
        return
    poke_i64(writer + w.WRITER_GRANTED, peek_i64(writer + w.WRITER_GRANTED) - surplus)
    fetch_add(peek_i64(writer + w.WRITER_SEAT) + w.SEAT_GRANTED, -surplus)
    fence_full()
    event = peek_i64(peek_i64(writer + w.WRITER_TABLE) + w.VIEW_CONTROL) + w.TABLE_SPACE
    if load_relaxed(event + 8) != 0:
        wake(event)


@kernel("int64(int64)")
def give_back(writer):
    """`give_back_rows`."""
    give_back_rows(writer)
    return 0


@kernel("int64(int64, int64)")
def limits_in_force(table, out):
    """Store the limits in force at float64 [4] `out`; returns how often they have been changed."""
    spi, min_size, min_diff, max_diff = _limits_of(table)
    poke_f64(out, spi)
    poke_f64(out + 8, min_size)
    poke_f64(out + 16, min_diff)
    poke_f64(out + 24, max_diff)
    return load_acquire(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_LIMITS)


@kernel("int64(int64, int64)")
def change_limits(table, limits):
    """Put other limits, float64 [4], in force at once; one caller at a time. Returns the number of the change."""
    line = peek_i64(table + w.VIEW_CONTROL) + w.TABLE_LIMITS
    number = load_acquire(line) + 1
    at = line + 8 + w.LIMITS_BYTES * (number & 1)
    for i in range(4):
        poke_f64(at + 8 * i, peek_f64(limits + 8 * i))
    store_release(line, number)
    # a reader of the copy that the next change overwrites must see this number before any of that
    fence_full()
    wake(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_DATA)
    wake(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SPACE)
    return number
