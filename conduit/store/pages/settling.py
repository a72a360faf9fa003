"""What a participant that died while it counted deliveries, or deleted rows, left between two steps: it is counted anew.

A delivery is counted in the row's own word, and a row that goes is counted in its page's SIDE_GONE besides. A death in between
leaves the two apart, or rows that are taken and neither delivered nor given back. Nobody can tell which of these belong to the
dead as long as others count too. So a page is looked at while nobody is between two steps (SEAT_STARTED and SEAT_ENDED of all
seats agree before and behind the look); what is not whole then is the dead one's. Whoever counts meanwhile is not waited for: the look
is taken again, now or by whoever recovers or asks for counts next.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.native.jit import entry, inner, kernel
from conduit.native.memory import (
    compare_and_swap,
    fence_acquire,
    fence_full,
    load_acquire,
    load_relaxed,
    peek_i64,
    peek_u32,
    poke_i64,
    store_relaxed,
)
from conduit.store.format import words as w
from conduit.store.pages.deletion import home_of, may_be_taken
from conduit.store.pages.protocol import block_of, has_rows, side_of
from conduit.store.pages.row_counts import mark_gone, opened_in

Array = np.ndarray[Any, Any]

_LOOKS = 64


@inner
def _begun(table):
    """How often anybody has begun to count, or -1 while somebody is at it."""
    used = min(load_acquire(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SEATS), peek_i64(table + w.VIEW_SEAT_COUNT))
    begun = 0
    for number in range(used):
        seat = peek_i64(table + w.VIEW_SEATS) + w.LINE * number
        started = load_acquire(seat + w.SEAT_STARTED)
        if load_acquire(seat + w.SEAT_ENDED) != started:
            return -1
        begun += started
    return begun


@kernel("int64(int64)")
def times_begun(table):
    """How often anybody has begun to count or to delete, or -1 while somebody is at it: rows that are flagged as deleted move it."""
    return _begun(table)


@inner
def _is_deleted(table, row):
    return peek_u32(peek_i64(table + w.VIEW_META) + w.META_BYTES * row + 12) & (w.DELETED | w.FINAL) == w.DELETED


@inner
def _rows_of(table, page):
    """State of a page and how many rows it has, 0 where they are nobody's."""
    state = load_acquire(block_of(table, page) + w.PAGE_STATE)
    if not has_rows(state):
        return state, 0
    return state, min(max(load_acquire(block_of(table, page) + w.PAGE_COMMITTED), 0), peek_i64(table + w.VIEW_ROWS))


@inner
def _spend(table, page, scratch):
    """Mark the rows of a page as gone that will not be delivered any more; False when somebody was in between."""
    sampled, limit = peek_i64(table + w.VIEW_SAMPLED), peek_i64(table + w.VIEW_MAX_SAMPLED)
    base = page * peek_i64(table + w.VIEW_ROWS)
    tag = opened_in(table, page)
    begun = _begun(table)
    state, rows = _rows_of(table, page)
    if begun < 0:
        return False
    for local in range(rows):
        word = load_acquire(sampled + 8 * (base + local))
        lost = word & w.HAS_GONE == 0 and (not may_be_taken(word, limit) or _is_deleted(table, base + local))
        # what has gone is looked at too: its copy may be marked and itself not
        poke_i64(scratch + 8 * local, word if lost or word & w.HAS_GONE else 0)
    fence_acquire()
    if _begun(table) != begun or load_relaxed(block_of(table, page) + w.PAGE_STATE) >> 4 != state >> 4:
        return False
    halo = load_relaxed(block_of(table, page) + w.PAGE_HALO)
    for local in range(rows):
        word = peek_i64(scratch + 8 * local)
        if word != 0:
            # nobody else changes the word of such a row, but who deletes it or reuses the page
            compare_and_swap(sampled + 8 * (base + local), word, word | w.HAS_GONE)
            if local < halo and opened_in(table, page) == tag:
                home, at, home_tag = home_of(table, page, local)
                if home >= 0:
                    mark_gone(table, home * peek_i64(table + w.VIEW_ROWS) + at, home_tag)
    return True


@inner
def _count_page(table, page):
    """Set SIDE_GONE to the rows of the page that have gone; False when somebody was in between."""
    at = side_of(table, page) + w.SIDE_GONE
    seen = load_acquire(at)
    begun = _begun(table)
    _, rows = _rows_of(table, page)
    if begun < 0:
        return False
    base = page * peek_i64(table + w.VIEW_ROWS)
    gone = 0
    for local in range(max(load_relaxed(block_of(table, page) + w.PAGE_HALO), 0), rows):
        if peek_i64(table + w.VIEW_SAMPLED) == 0:
            gone += _is_deleted(table, base + local)
        else:
            gone += load_relaxed(peek_i64(table + w.VIEW_SAMPLED) + 8 * (base + local)) & w.HAS_GONE != 0
    fence_acquire()
    if _begun(table) != begun:
        return False
    return rows == 0 or compare_and_swap(at, seen, (gone << w.PAST_SHIFT) | (seen & w.PAST_MASK)) == seen


@kernel("int64(int64, int64)", nogil=True)
def settle(table, scratch):
    """Count anew what the dead may have left half counted.

    Args:
        table: Table descriptor.
        scratch: Memory of int64 [rows per page].

    Returns:
        1 when nothing is left to settle, 0 when others were counting at every look: it is left to the next caller.
    """
    word = peek_i64(table + w.VIEW_CONTROL) + w.TABLE_UNSETTLED
    waiting = load_acquire(word)
    if waiting == 0:
        return 1
    # first all marks, since a copy's is carried to its own page
    for sweep in range(2):
        for page in range(peek_i64(table + w.VIEW_COUNT)):
            done = sweep == 0 and peek_i64(table + w.VIEW_SAMPLED) == 0
            looks = 0
            while not done and looks < _LOOKS:
                done = _spend(table, page, scratch) if sweep == 0 else _count_page(table, page)
                looks += 1
            if not done:
                return 0
    compare_and_swap(word, waiting, 0)
    return 1


@kernel("int64(int64)")
def is_settled(table):
    """1 when nobody has died half-way since the last `settle`."""
    return 1 if load_relaxed(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_UNSETTLED) == 0 else 0


@kernel("int64(int64)")
def settle_restored(table):
    """In a restored table, to which nobody has attached: what was taken and not delivered is nobody's, and is given back."""
    sampled = peek_i64(table + w.VIEW_SAMPLED)
    if sampled != 0:
        for page in range(peek_i64(table + w.VIEW_COUNT)):
            _, rows = _rows_of(table, page)
            for row in range(page * peek_i64(table + w.VIEW_ROWS), page * peek_i64(table + w.VIEW_ROWS) + rows):
                word = load_relaxed(sampled + 8 * row)
                delivered = word & w.MOST_DELIVERIES
                kept = (word >> w.COUNT_TAG_SHIFT << w.COUNT_TAG_SHIFT) | (word & w.HAS_GONE)
                store_relaxed(sampled + 8 * row, kept | (delivered << 16) | delivered)
    store_relaxed(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_UNSETTLED, 1)
    fence_full()
    return 1


def settle_table(descriptor: Array) -> bool:
    """Count anew what the dead may have left half counted; False when it is left for later, since others are counting.

    Args:
        descriptor: int64 words of the table (words.VIEW_*).
    """
    address = descriptor.ctypes.data
    if entry(is_settled)(address):
        return True
    scratch = np.zeros(int(descriptor[w.VIEW_ROWS // 8]), np.int64)
    return entry(settle)(address, scratch.ctypes.data) == 1
