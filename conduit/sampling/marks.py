"""Which rows a learner's draws choose among: a bit for each row that anchors the learner's window now, and how many there are.

What a page offers (sampling.candidates) is a range of rows, and not all of them can be drawn: some are only observations, deleted, too
old, or lack what follows them; some wait for it. So each row that is offered is looked at by the same steps that resolve it when it
is drawn (kernels.cpu.windows, `anchors`). Committed rows do not change, so most are looked at once. Again looked at are the newest, as
far as a window reaches, when rows have come behind them; a page's, when one of them has become too old; and, where rows go without
a new priority that would tell of it, a page's whenever any have gone.

This is a learner's own, derived data, as its sums are (sampling.sum_tree).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.kernels.cpu.windows import (
    ENTRY_ENVS,
    ENTRY_LIMIT,
    ENTRY_OVER,
    ENTRY_PAGE,
    WINDOW_ANCHORS,
    WINDOW_OLDEST,
    WINDOW_REACH,
)
from conduit.native.jit import inner
from conduit.native.memory import call_5, peek_i32, peek_i64, peek_u32, poke_i64, poke_u32
from conduit.store.format import words as w
from conduit.store.pages.deletion import may_be_taken

Array = np.ndarray[Any, Any]

BLOCK = 32
"""Rows of a block, and blocks of a group."""
BITS = 5

SEEN_SUM, SEEN_GENERATION, SEEN_BEGIN, SEEN_END, SEEN_LIMIT, SEEN_UPDATES, SEEN_COUNT, SEEN_PENDING, SEEN_LEAST = range(
    0, 72, 8
)
SEEN_BYTES = 72
"""What a learner knows of a page: sum of its marked rows' leaves; generation, range of local rows, rows committed << 1 | whether its
stream has ended, and number of updates that sum and marks are of; rows marked; leaves that the update in progress has stored; the
least policy version of a marked row, where versions count."""

NEVER = 1 << 40
"""A policy version behind all."""


def empty_marks(pages: int, page_rows: int) -> Array:
    """What a learner knows at first, int64: SEEN_* of every page, block sums, group sums, marks, and room for marks of one page more."""
    blocks = -(-page_rows // BLOCK)
    words = pages * (SEEN_BYTES // 8 + blocks + -(-blocks // BLOCK)) + -(-(pages + 1) * blocks // 2)
    memory = np.zeros(words, np.int64)
    memory[: SEEN_BYTES // 8 * pages].reshape(pages, -1)[:, SEEN_GENERATION // 8] = -1
    return memory


@inner
def sums_of(tree, table, page):
    """Addresses of a page's block sums and of its group sums, and how many of each."""
    pages = peek_i64(table + w.VIEW_COUNT)
    blocks = (peek_i64(table + w.VIEW_ROWS) + BLOCK - 1) >> BITS
    groups = (blocks + BLOCK - 1) >> BITS
    first = tree + SEEN_BYTES * pages
    return first + 8 * blocks * page, first + 8 * pages * blocks + 8 * groups * page, blocks, groups


@inner
def marks_of(tree, table, page):
    """Address of a page's marks, uint32 [blocks]; behind those of the last page there is room for one page more."""
    pages = peek_i64(table + w.VIEW_COUNT)
    first, _, blocks, groups = sums_of(tree, table, 0)
    return first + 8 * pages * (blocks + groups) + 4 * blocks * page


@inner
def is_marked(tree, table, page, local):
    """True for a local row that draws choose among."""
    return (peek_u32(marks_of(tree, table, page) + 4 * (local >> BITS)) >> (local & (BLOCK - 1))) & 1 != 0


@inner
def between(low, high):
    """The marks of rows [low, high) of a block."""
    return ((1 << (high - low)) - 1) << low


@inner
def _ones(bits):
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) & 0xFFFFFFFF) >> 24


@inner
def forget_marks(tree, table, page):
    """None of a page's rows is marked."""
    marks = marks_of(tree, table, page)
    _, _, blocks, _ = sums_of(tree, table, page)
    for block in range(blocks):
        poke_u32(marks + 4 * block, 0)
    poke_i64(tree + SEEN_BYTES * page + SEEN_COUNT, 0)


@inner
def _set_marks(tree, page, at, bits):
    before = peek_u32(at)
    if bits != before:
        known = tree + SEEN_BYTES * page
        poke_i64(known + SEEN_COUNT, peek_i64(known + SEEN_COUNT) + _ones(bits) - _ones(before))
        poke_u32(at, bits)


@inner
def _find_waiting(tree, table, entry, low, end):
    """Mark in the spare place those of the local rows [low, end) whose episode goes on up to the newest row: they wait.

    From the newest row of each environment backwards, so that no window is walked for each of them.
    """
    first = peek_i64(entry + ENTRY_PAGE) * peek_i64(table + w.VIEW_ROWS)
    metas = peek_i64(table + w.VIEW_META) + w.META_BYTES * first
    envs = peek_i64(entry + ENTRY_ENVS)
    waiting = marks_of(tree, table, peek_i64(table + w.VIEW_COUNT))
    for block in range(low >> BITS, ((end - 1) >> BITS) + 1):
        poke_u32(waiting + 4 * block, 0)
    newest = peek_i64(entry + ENTRY_LIMIT) - first - envs
    for env in range(envs):
        at = newest + env
        cut = 0
        while at >= low:
            word = peek_u32(metas + w.META_BYTES * at + 12)
            if cut != 0 or word & (w.TERMINATED | w.TRUNCATED | w.FINAL) or word >> w.LINK_SHIFT == 0:
                break
            if at < end:
                mark = waiting + 4 * (at >> BITS)
                poke_u32(mark, peek_u32(mark) | (1 << (at & (BLOCK - 1))))
            cut = word & w.FIRST
            at -= envs


@inner
def _may_be_taken(table, row, wanted):
    """Which of the 32 rows from `row` on, of those in `wanted`, may be delivered once more."""
    sampled, limit = peek_i64(table + w.VIEW_SAMPLED), peek_i64(table + w.VIEW_MAX_SAMPLED)
    bits = 0
    for i in range(BLOCK):
        if (wanted >> i) & 1 and may_be_taken(peek_i64(sampled + 8 * (row + i)), limit):
            bits |= 1 << i
    return bits


@inner
def mark_rows(tree, window, table, entry, since, end, anew):
    """Mark those of a page's local rows [since, end) that anchor the window.

    Args:
        tree: Address of what the learner knows.
        window: What is to be drawn (kernels.cpu.windows.WINDOW_*).
        table: Table descriptor.
        entry: The page (kernels.cpu.windows.ENTRY_*).
        since: The first of the local rows.
        end: Behind the last.
        anew: 0 leaves rows as they are that are marked: they still anchor it.
    """
    page = peek_i64(entry + ENTRY_PAGE)
    known = tree + SEEN_BYTES * page
    first = page * peek_i64(table + w.VIEW_ROWS)
    metas = peek_i64(table + w.VIEW_META) + w.META_BYTES * first
    marks = marks_of(tree, table, page)
    waiting = marks_of(tree, table, peek_i64(table + w.VIEW_COUNT))
    newest = end
    if peek_i64(entry + ENTRY_OVER) == 0:
        newest = max(
            since,
            peek_i64(entry + ENTRY_LIMIT) - first - peek_i64(window + WINDOW_REACH) * peek_i64(entry + ENTRY_ENVS),
        )
        if newest < end:
            _find_waiting(tree, table, entry, newest, end)
    anchors = peek_i64(window + WINDOW_ANCHORS)
    counts_versions = peek_i64(window + WINDOW_OLDEST) > 0
    least = peek_i64(known + SEEN_LEAST) if counts_versions else 0
    for block in range(since >> BITS, ((end - 1) >> BITS) + 1):
        start = block << BITS
        wanted = between(max(since - start, 0), min(end - start, BLOCK))
        bits = peek_u32(marks + 4 * block)
        if anew != 0:
            bits &= ~wanted
        else:
            wanted &= ~bits
        if newest < end and block >= newest >> BITS:
            wanted &= ~peek_u32(waiting + 4 * block)
        if peek_i64(table + w.VIEW_SAMPLED) != 0:
            wanted = _may_be_taken(table, first + start, wanted)
        found = 0 if wanted == 0 else call_5(anchors, window, entry, first + start, wanted, 0)
        if counts_versions:
            for i in range(BLOCK):
                if (found >> i) & 1:
                    least = min(least, peek_i32(metas + w.META_BYTES * (start + i)))
        _set_marks(tree, page, marks + 4 * block, bits | found)
    poke_i64(known + SEEN_LEAST, least)


@inner
def unmark_deleted(tree, table, page, block):
    """A deleted row has priority 0, and that it has it now is all that is told of it: take the marks of a block's deleted rows away."""
    first = page * peek_i64(table + w.VIEW_ROWS) + (block << BITS)
    leaves = peek_i64(table + w.VIEW_PRIORITY) + 4 * first
    metas = peek_i64(table + w.VIEW_META) + w.META_BYTES * first
    at = marks_of(tree, table, page) + 4 * block
    bits = peek_u32(at)
    for i in range(BLOCK):
        if (bits >> i) & 1 and peek_u32(leaves + 4 * i) == 0 and peek_u32(metas + w.META_BYTES * i + 12) & w.DELETED:
            bits ^= 1 << i
    _set_marks(tree, page, at, bits)
