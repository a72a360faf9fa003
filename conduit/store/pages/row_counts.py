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

from conduit.native.descriptors import fill
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
from conduit.store.format import words as w
from conduit.store.pages.protocol import block_of, has_rows

Array = np.ndarray[Any, Any]

COUNT_INSERTED, COUNT_EVICTED, COUNT_SIZE, COUNT_RESERVED, COUNT_DELIVERED, COUNT_OUTSTANDING = range(6)
"""What `count` stores: rows inserted; of these evicted with their page; those that are there; samples reserved and
delivered; rows that writers have been granted and have not published."""
COUNT_WORDS = 6


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
    descriptor = np.zeros(w.VIEW_WORDS, np.int64)
    fill(
        descriptor,
        {
            w.VIEW_PAGES: blocks.ctypes.data,
            w.VIEW_COUNT: len(blocks),
            w.VIEW_ROWS: page_rows,
            w.VIEW_CONTROL: control.ctypes.data,
            w.VIEW_SIDES: sides.ctypes.data,
            w.VIEW_SEATS: seats.ctypes.data,
            w.VIEW_SEAT_COUNT: len(seats),
        },
    )
    return counts_of(descriptor.ctypes.data)


def counts_of(table: int) -> Counts:
    """The counts of the table at a descriptor's address."""
    words = np.zeros(COUNT_WORDS, np.int64)
    entry(count)(table, words.ctypes.data)
    inserted, evicted, size, reserved, delivered, outstanding = words.tolist()
    return Counts(inserted, delivered, inserted - size, size, evicted, reserved - delivered, outstanding)


@inner
def _count_page(table, page, epoch):
    """Own rows that a page ever had, of these those of earlier generations, and those that are there."""
    block = block_of(table, page)
    rows = peek_i64(table + w.VIEW_ROWS)
    while True:
        state = load_acquire(block + w.PAGE_STATE)
        past = load_acquire(block + w.PAGE_PAST)
        committed = load_acquire(block + w.PAGE_COMMITTED)
        own = min(max(committed - load_relaxed(block + w.PAGE_HALO), 0), rows)
        gone = load_relaxed(peek_i64(table + w.VIEW_SIDES) + w.LINE * page + w.SIDE_GONE) >> w.PAST_SHIFT
        opened = load_relaxed(block + w.PAGE_EPOCH)
        # another claim or recovery has come in between if either word moved; it made progress, so this ends
        fence_acquire()
        if load_relaxed(block + w.PAGE_PAST) == past and load_relaxed(block + w.PAGE_STATE) == state:
            break
    kind = state & w.KIND_MASK
    before = past >> w.PAST_SHIFT
    if has_rows(state):
        return before + own, before, max(own - gone, 0) if opened == epoch else 0
    if kind == w.INIT and ((past ^ (state >> w.GENERATION_SHIFT)) & w.PAST_MASK) != 0:
        before += own
    return before, before, 0


@inner
def count_pages(table):
    """Rows inserted, evicted, and there."""
    control = peek_i64(table + w.VIEW_CONTROL)
    epoch = load_acquire(control + w.TABLE_EPOCH) >> 1
    inserted, evicted, size = 0, 0, 0
    for page in range(peek_i64(table + w.VIEW_COUNT)):
        ever, before, present = _count_page(table, page, epoch)
        inserted += ever
        evicted += before
        size += present
    base = load_relaxed(control + w.TABLE_BASE_INSERTED)
    return base + inserted, load_relaxed(control + w.TABLE_BASE_DELETED) + evicted, size


@inner
def count_seats(table):
    """Samples reserved and delivered, rows granted and not yet published; the last is never too small."""
    seats = peek_i64(table + w.VIEW_SEATS)
    reserved = load_relaxed(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_BASE_SAMPLED)
    delivered = reserved
    outstanding = 0
    used = load_acquire(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SEATS)
    for number in range(min(used, peek_i64(table + w.VIEW_SEAT_COUNT))):
        seat = seats + w.LINE * number
        published = load_acquire(seat + w.SEAT_INSERTED)
        outstanding += load_relaxed(seat + w.SEAT_GRANTED) - published
        delivered += load_relaxed(seat + w.SEAT_DELIVERED)
        reserved += load_relaxed(seat + w.SEAT_RESERVED)
    return reserved, delivered, outstanding


@kernel("int64(int64, int64)")
def count(table, out):
    """Fill int64 [COUNT_WORDS] at `out` (COUNT_*); returns the rows inserted."""
    reserved, delivered, outstanding = count_seats(table)
    inserted, evicted, size = count_pages(table)
    poke_i64(out + 8 * COUNT_INSERTED, inserted)
    poke_i64(out + 8 * COUNT_EVICTED, evicted)
    poke_i64(out + 8 * COUNT_SIZE, size)
    poke_i64(out + 8 * COUNT_RESERVED, reserved)
    poke_i64(out + 8 * COUNT_DELIVERED, delivered)
    poke_i64(out + 8 * COUNT_OUTSTANDING, outstanding)
    return inserted


@inner
def tag_of(word):
    """The generation that a row's page was opened in, its low bits, out of the row's count of deliveries."""
    return (word >> w.COUNT_TAG_SHIFT) & w.COUNT_TAG_MASK


@inner
def opened_in(table, page):
    """Low bits of the generation that a page was opened in; later ones are of claims that were given back."""
    return load_acquire(peek_i64(table + w.VIEW_SIDES) + w.LINE * page + w.SIDE_GONE) & w.PAST_MASK


@inner
def count_gone(table, page, tag):
    """Count one own row of a page as gone, unless the page was opened in another generation than `tag` says."""
    at = peek_i64(table + w.VIEW_SIDES) + w.LINE * page + w.SIDE_GONE
    seen = load_acquire(at)
    while ((seen ^ tag) & w.PAST_MASK) == 0:
        found = compare_and_swap(at, seen, seen + (1 << w.PAST_SHIFT))
        if found == seen:
            fetch_add(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SHRUNK, 1)
            return True
        seen = found
    return False


@inner
def mark_gone(table, row, tag):
    """Mark in a row's count of deliveries that the row has gone; False when it is marked, or another generation's by now."""
    at = peek_i64(table + w.VIEW_SAMPLED) + 8 * row
    word = load_acquire(at)
    while ((tag_of(word) ^ tag) & w.PAST_MASK) == 0 and word & w.HAS_GONE == 0:
        found = compare_and_swap(at, word, word | w.HAS_GONE)
        if found == word:
            return True
        word = found
    return False
