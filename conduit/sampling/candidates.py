"""Which rows of a page can be drawn, and the list of pages that a draw chooses from."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.kernels.cpu.windows import (
    ENTRY_BYTES,
    ENTRY_ENVS,
    ENTRY_FIRST,
    ENTRY_GENERATION,
    ENTRY_LIMIT,
    ENTRY_OVER,
    ENTRY_PAGE,
    ENTRY_START,
)
from conduit.native.jit import inner
from conduit.native.memory import fence_acquire, load_acquire, load_relaxed, peek_i64, peek_u32, poke_i64
from conduit.store.format import words as w
from conduit.store.pages.deletion import is_present, may_be_taken
from conduit.store.pages.protocol import block_of, has_rows

Array = np.ndarray[Any, Any]

MOST_LOOKS = 8
"""Looks at a table's pages until none of those that were being written has been turned meanwhile; then the last one is taken."""


def empty_list(pages: int) -> Array:
    """Memory for a list of pages: one description a line, and behind them those of the pages that were being written."""
    return np.zeros((pages + 1 + -(-16 * pages // ENTRY_BYTES), ENTRY_BYTES // 8), np.int64)


@inner
def _is_unborn(table, block):
    """True of an OPEN page with nothing but its halo whose stream's page before it is not sealed: that one has these rows still."""
    if load_relaxed(block + w.PAGE_COMMITTED) > load_relaxed(block + w.PAGE_HALO):
        return False
    before = load_relaxed(block + w.PAGE_PREVIOUS) - 1
    if not 0 <= before < peek_i64(table + w.VIEW_COUNT):
        return False
    word = load_acquire(block_of(table, before) + w.PAGE_STATE)
    same = word >> w.GENERATION_SHIFT == load_relaxed(block + w.PAGE_PREVIOUS_GENERATION)
    return same and (word & w.KIND_MASK) == w.OPEN


@inner
def rows_to_draw(table, page, need, short):
    """Local rows [begin, end) of a page that may anchor windows which need `need` ticks of future.

    A page that is being written is sampled up to its newest complete window; where a window ends with its episode (`short`),
    up to the newest row that is complete so, if that is further. When it is sealed and its stream goes on, its last ticks (as many
    as the widest window of the table needs) belong to the next page, which has them as its halo, and offers none of them before.
    One that was being written when a checkpoint was made is sampled as it was then, until something is written into the
    restored table.

    Returns:
        Begin, end (not above begin: none), local row behind the last committed one, state, rows per tick, 1 if nothing will
        ever come behind the last row.
    """
    block = block_of(table, page)
    word = load_acquire(block + w.PAGE_STATE)
    kind = word & w.KIND_MASK
    if not has_rows(word) or not is_present(table, page):
        return 0, 0, 0, 0, 0, 0
    committed = min(max(load_acquire(block + w.PAGE_COMMITTED), 0), peek_i64(table + w.VIEW_ROWS))
    envs = load_relaxed(block + w.PAGE_ENVS)
    if not 1 <= envs <= peek_i64(table + w.VIEW_ROWS):  # torn, or damaged: every later step relies on it
        return 0, 0, 0, 0, 0, 0
    begin = max(0, load_relaxed(block + w.PAGE_FIRST))
    end = committed
    ended = load_relaxed(block + w.PAGE_ENDED)
    if kind == w.OPEN or ended == w.CUT:
        if kind == w.OPEN and _is_unborn(table, block):
            return 0, 0, 0, 0, 0, 0
        if peek_i64(table + w.VIEW_SAMPLED) != 0:
            # where deliveries are counted, no row is drawn from the page that it is about to leave: its count moves with it
            end -= peek_i64(table + w.VIEW_FUTURE) * envs
        else:
            complete = load_relaxed(block + w.PAGE_TAIL) >> w.COMPLETE_SHIFT if short != 0 else 0
            end = max(end - need * envs, min(complete, committed))
        return begin, end, committed, word, envs, 0
    if ended == 0:
        end -= peek_i64(table + w.VIEW_FUTURE) * envs
    return begin, end, committed, word, envs, 1 if ended == w.ENDED else 0


@inner
def note_open(table, entries, noted, page, word):
    """Remember a page that is being written, and its state; returns how many are remembered."""
    at = entries + ENTRY_BYTES * (peek_i64(table + w.VIEW_COUNT) + 1) + 16 * noted
    poke_i64(at, page)
    poke_i64(at + 8, word)
    return noted + 1


@inner
def have_turned(table, entries, noted):
    """True when a page that was being written is so no more: what it offered may be offered by its successor too."""
    fence_acquire()
    at = entries + ENTRY_BYTES * (peek_i64(table + w.VIEW_COUNT) + 1)
    for i in range(noted):
        if load_relaxed(block_of(table, peek_i64(at + 16 * i)) + w.PAGE_STATE) != peek_i64(at + 16 * i + 8):
            return True
    return False


@inner
def has_fresh(table, page, begin, end):
    """True when one of the local rows [begin, end) may be delivered once more; most pages of a drained table have none."""
    limit = peek_i64(table + w.VIEW_MAX_SAMPLED)
    start = page * peek_i64(table + w.VIEW_ROWS)
    for row in range(start + begin, start + end):
        if may_be_taken(peek_i64(peek_i64(table + w.VIEW_SAMPLED) + 8 * row), limit):
            word = peek_u32(peek_i64(table + w.VIEW_META) + w.META_BYTES * row + 12)
            if word & (w.FINAL | w.DELETED) == 0:
                return True
    return False


@inner
def list_page(entry, start, page, rows, begin, committed, word, envs, over):
    """Describe a page of `rows` rows to draws (kernels.cpu.windows.ENTRY_*); `start` is what lies before it."""
    poke_i64(entry + ENTRY_START, start)
    poke_i64(entry + ENTRY_PAGE, page)
    poke_i64(entry + ENTRY_FIRST, page * rows + begin)
    poke_i64(entry + ENTRY_LIMIT, page * rows + committed)
    poke_i64(entry + ENTRY_GENERATION, word >> w.GENERATION_SHIFT)
    poke_i64(entry + ENTRY_ENVS, envs)
    poke_i64(entry + ENTRY_OVER, over)
