"""How many rows a table has, had and lost: exact sums over its pages, whoever was killed.

No counter is kept per row. A page's words say how many rows of its own it has (`PAGE_COMMITTED` less the halo) and how many
its earlier generations had (`PAGE_PAST`), which whoever claims or recovers the page adds up while it is INIT
(conduit.store.pages.protocol). A page's sum only grows, so a sum over all pages lies between the true counts at the beginning
and at the end of the look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit.native.jit import entry, inner, kernel
from conduit.native.memory import (
    compare_and_swap,
    fence_acquire,
    fetch_add,
    load_acquire,
    load_relaxed,
    peek_i64,
    poke_i64,
)
from conduit.store.format.words import (
    COUNT_TAG_MASK,
    COUNT_TAG_SHIFT,
    GENERATION_SHIFT,
    HAS_GONE,
    INIT,
    KIND_MASK,
    LINE,
    OPEN,
    PAGE_COMMITTED,
    PAGE_EPOCH,
    PAGE_HALO,
    PAGE_PAST,
    PAGE_STATE,
    PAST_MASK,
    PAST_SHIFT,
    SEALED,
    SEAT_DELIVERED,
    SEAT_GRANTED,
    SEAT_INSERTED,
    SEAT_RESERVED,
    SIDE_GONE,
    T_CONTROL,
    T_COUNT,
    T_PAGES,
    T_ROWS,
    T_SAMPLED,
    T_SEAT_COUNT,
    T_SEATS,
    T_SIDES,
    T_WORDS,
    TABLE_BASE_DELETED,
    TABLE_BASE_INSERTED,
    TABLE_BASE_SAMPLED,
    TABLE_EPOCH,
    TABLE_SEATS,
    TABLE_SHRUNK,
)
from conduit.store.pages.protocol import block_of

Array = np.ndarray[Any, Any]

N_INSERTED, N_EVICTED, N_SIZE, N_RESERVED, N_DELIVERED, N_OUTSTANDING = range(6)
"""What `count` stores: rows inserted; of these evicted with their page; those that are there; samples reserved and
delivered; rows that writers have been granted and have not published."""
N_WORDS = 6


@dataclass(frozen=True, slots=True)
class Counts:
    """What a table has taken in, given out and lost.

    Attributes:
        inserted: Rows ever committed (I of a limiter's formula).
        sampled: Samples delivered by loaders of a table with a limiter, one for each element of a batch (S).
        deleted: Inserted rows that are not there any more: evicted, deleted, or sampled as often as they may be (D).
        size: Rows that are there, halo copies not counted: inserted - deleted.
        evicted: Rows that went because their page was reused.
        reserved: Samples that loaders have reserved and not delivered yet.
        granted: Rows that writers have been granted and not published yet.
    """

    inserted: int
    sampled: int
    deleted: int
    size: int
    evicted: int
    reserved: int
    granted: int


def counts_over(blocks: Array, sides: Array, control: Array, seats: Array, page_rows: int) -> Counts:
    """The counts by copies of a table's words.

    Args:
        blocks: Every page's words, int64 [pages, 16].
        sides: Every page's side line, int64 [pages, 16].
        control: int64 [TABLE_CONTROL_BYTES // 8].
        seats: Every participant's seat line, int64 [participants, 16].
        page_rows: Rows per page.
    """
    descriptor = np.zeros(T_WORDS, np.int64)
    for offset, value in (
        (T_PAGES, blocks.ctypes.data),
        (T_COUNT, len(blocks)),
        (T_ROWS, page_rows),
        (T_CONTROL, control.ctypes.data),
        (T_SIDES, sides.ctypes.data),
        (T_SEATS, seats.ctypes.data),
        (T_SEAT_COUNT, len(seats)),
    ):
        descriptor[offset // 8] = value
    return counts_of(descriptor.ctypes.data)


def counts_of(table: int) -> Counts:
    """The counts of the table at a descriptor's address."""
    words = np.zeros(N_WORDS, np.int64)
    entry(count)(table, words.ctypes.data)
    inserted, evicted, size, reserved, delivered, outstanding = words.tolist()
    return Counts(inserted, delivered, inserted - size, size, evicted, reserved - delivered, outstanding)


@inner
def _count_page(table, page, epoch):
    """Own rows that a page ever had, of these those of earlier generations, and those that are there."""
    block = block_of(table, page)
    rows = peek_i64(table + T_ROWS)
    while True:
        state = load_acquire(block + PAGE_STATE)
        past = load_acquire(block + PAGE_PAST)
        committed = load_acquire(block + PAGE_COMMITTED)
        own = min(max(committed - load_relaxed(block + PAGE_HALO), 0), rows)
        gone = load_relaxed(peek_i64(table + T_SIDES) + LINE * page + SIDE_GONE) >> PAST_SHIFT
        opened = load_relaxed(block + PAGE_EPOCH)
        # another claim or recovery has come in between if either word moved; it made progress, so this ends
        fence_acquire()
        if load_relaxed(block + PAGE_PAST) == past and load_relaxed(block + PAGE_STATE) == state:
            break
    kind = state & KIND_MASK
    before = past >> PAST_SHIFT
    if kind == OPEN or kind == SEALED:
        return before + own, before, max(own - gone, 0) if opened == epoch else 0
    if kind == INIT and ((past ^ (state >> GENERATION_SHIFT)) & PAST_MASK) != 0:
        before += own
    return before, before, 0


@inner
def count_pages(table):
    """Rows inserted, evicted, and there."""
    control = peek_i64(table + T_CONTROL)
    epoch = load_acquire(control + TABLE_EPOCH) >> 1
    inserted, evicted, size = 0, 0, 0
    for page in range(peek_i64(table + T_COUNT)):
        ever, before, present = _count_page(table, page, epoch)
        inserted += ever
        evicted += before
        size += present
    base = load_relaxed(control + TABLE_BASE_INSERTED)
    return base + inserted, load_relaxed(control + TABLE_BASE_DELETED) + evicted, size


@inner
def count_seats(table):
    """Samples reserved and delivered, rows granted and not yet published; the last is never too small."""
    seats = peek_i64(table + T_SEATS)
    reserved = load_relaxed(peek_i64(table + T_CONTROL) + TABLE_BASE_SAMPLED)
    delivered = reserved
    outstanding = 0
    used = load_acquire(peek_i64(table + T_CONTROL) + TABLE_SEATS)
    for number in range(min(used, peek_i64(table + T_SEAT_COUNT))):
        seat = seats + LINE * number
        published = load_acquire(seat + SEAT_INSERTED)
        outstanding += load_relaxed(seat + SEAT_GRANTED) - published
        delivered += load_relaxed(seat + SEAT_DELIVERED)
        reserved += load_relaxed(seat + SEAT_RESERVED)
    return reserved, delivered, outstanding


@kernel("int64(int64, int64)")
def count(table, out):
    """Fill int64 [N_WORDS] at `out` (N_*); returns the rows inserted."""
    reserved, delivered, outstanding = count_seats(table)
    inserted, evicted, size = count_pages(table)
    poke_i64(out + 8 * N_INSERTED, inserted)
    poke_i64(out + 8 * N_EVICTED, evicted)
    poke_i64(out + 8 * N_SIZE, size)
    poke_i64(out + 8 * N_RESERVED, reserved)
    poke_i64(out + 8 * N_DELIVERED, delivered)
    poke_i64(out + 8 * N_OUTSTANDING, outstanding)
    return inserted


@inner
def may_be_taken(word, limit):
    """True when a row with this count of deliveries may be delivered once more; one that has gone counts as 65,536 times."""
    return (word >> 16) & 0x1FFFF < limit


@inner
def tag_of(word):
    """The generation that a row's page was opened in, its low bits, out of the row's count of deliveries."""
    return (word >> COUNT_TAG_SHIFT) & COUNT_TAG_MASK


@inner
def opened_in(table, page):
    """Low bits of the generation that a page was opened in; later ones are of claims that were given back."""
    return load_acquire(peek_i64(table + T_SIDES) + LINE * page + SIDE_GONE) & PAST_MASK


@inner
def count_gone(table, page, tag):
    """Count one own row of a page as gone, unless the page was opened in another generation than `tag` says."""
    at = peek_i64(table + T_SIDES) + LINE * page + SIDE_GONE
    seen = load_acquire(at)
    while ((seen ^ tag) & PAST_MASK) == 0:
        found = compare_and_swap(at, seen, seen + (1 << PAST_SHIFT))
        if found == seen:
            fetch_add(peek_i64(table + T_CONTROL) + TABLE_SHRUNK, 1)
            return True
        seen = found
    return False


@inner
def mark_gone(table, row, tag):
    """Mark in a row's count of deliveries that the row has gone; False when it is marked, or another generation's by now."""
    at = peek_i64(table + T_SAMPLED) + 8 * row
    word = load_acquire(at)
    while ((tag_of(word) ^ tag) & PAST_MASK) == 0 and word & HAS_GONE == 0:
        found = compare_and_swap(at, word, word | HAS_GONE)
        if found == word:
            return True
        word = found
    return False
