"""A learner's updates of priorities: new leaves into shared memory, and into its own sums as far as they cover those rows.

Only pages that are marked as being updated are written to, so that nobody reuses one in between. Behind the leaves each page's count of
updates is raised: another learner that finds a count it does not know sums the page anew (sampling.sum_tree). A learner that is killed
between its stores of leaves and the counts leaves the others' sums behind the leaves; whoever recovers it raises all counts
(store.pages.recovery.outdate_sums), and they sum anew.
"""

from __future__ import annotations

import numpy as np

from conduit.kernels.cpu.priorities import MANTISSA, count_clipped, to_leaves, value_of
from conduit.native.cpython_abi import DATA, DIMS
from conduit.native.jit import kernel
from conduit.native.memory import (
    address_of,
    data_of,
    fence_full,
    fence_release,
    fetch_add,
    load_acquire,
    load_relaxed,
    peek_f64,
    peek_i64,
    peek_u32,
    poke_i64,
    poke_u32,
    prefetch,
    store_relaxed,
    store_release,
)
from conduit.sampling.marks import (
    BITS,
    SEEN_BEGIN,
    SEEN_BYTES,
    SEEN_COUNT,
    SEEN_END,
    SEEN_GENERATION,
    SEEN_PENDING,
    SEEN_SUM,
    SEEN_UPDATES,
    is_marked,
    sums_of,
)
from conduit.store.format import words as w
from conduit.store.ingest.match_objects import is_vector
from conduit.store.pages.deletion import is_present, may_be_taken
from conduit.store.pages.protocol import block_of, envs_of, has_rows
from conduit.store.pages.row_ids import are_own, first_foreign, newest_generation

FOREIGN = -(1 << 40)
CLIPPED = 1 << 40
NOT_TAKEN = -(1 << 50)
"""Results of an update, and of one that some priorities had to be clipped for; what else there is, `update` says."""

(
    UPDATE_TREE,
    UPDATE_TABLE,
    UPDATE_SEAT,
    UPDATE_SCRATCH,
    UPDATE_ALPHA,
    UPDATE_EPS,
    UPDATE_UNIT,
    UPDATE_LARGEST,
    UPDATE_SPAN,
    UPDATE_NEWEST,
    UPDATE_CLIPPED,
    UPDATE_LOWERED,
    UPDATE_ROOM,
    UPDATE_ARRAY,
) = range(0, 112, 8)
"""Words of a learner's updates: its sums; table descriptor; this participant's seat line; memory of int64 [3 UPDATE_ROOM]. Then the
table's rule, in float64: exponent, what is added to each priority, steps of a leaf in 1, the largest leaf; after how many updates the
span for new rows turns. A generation that ids may be of (store.pages.row_ids), and how many priorities of the last update were raised
and lowered to fit. The type of arrays, or 0 where this interpreter's objects are not known (native.cpython_abi)."""
UPDATE_WORDS = 14

_INT64, _FLOAT64 = np.dtype(np.int64).num, np.dtype(np.float64).num


@kernel("int64(int64, int64, int64, int64, int64, int64, int64)")
def store_leaves(tree, table, seat, ids, count, scratch, span):
    """The part of `update` that others can see: `ids` is the address of int64 [count], the new leaves lie in the last third of `scratch`.

    Returns:
        How many ids were ignored.
    """
    touched, leaves = scratch + 8 * count, scratch + 16 * count
    # read once: nothing that is stored below can change them, which a compiler cannot know
    rows = peek_i64(table + w.VIEW_ROWS)
    pages = peek_i64(table + w.VIEW_COUNT)
    base = peek_i64(table + w.VIEW_PRIORITY)
    metas = peek_i64(table + w.VIEW_META)
    sampled = peek_i64(table + w.VIEW_SAMPLED)
    future = peek_i64(table + w.VIEW_FUTURE)
    words = block_of(table, 0)
    blocks, groups, block_count, group_count = sums_of(tree, table, 0)
    inverse = 1.0 / rows
    marks = peek_i64(table + w.VIEW_MARKS) + 4 * w.UPDATING_MARKS * ((seat - peek_i64(table + w.VIEW_SEATS)) // w.LINE)
    ignored = 0
    largest = 0
    listed = 0
    for start in range(0, count, w.UPDATING_MARKS):
        stop = min(start + w.UPDATING_MARKS, count)
        # what was stored under earlier marks stays above later ones
        fence_release()
        for i in range(start, stop):
            row = peek_i64(ids + 8 * i) & w.ROW_MASK
            # row // rows, without the division: half a row more keeps what is rounded off from mattering
            page = int((row + 0.5) * inverse)
            poke_u32(marks + 4 * (i - start), page + 1)
            prefetch(base + 4 * row)
            prefetch(blocks + 8 * (block_count * page + ((row - page * rows) >> BITS)))
        # a marked page is not reused before its leaves are stored: whoever claims it looks at the marks behind a fence too
        store_release(seat + w.SEAT_UPDATING, stop - start)
        fence_full()
        for i in range(start, stop):
            key = peek_i64(ids + 8 * i)
            page = peek_u32(marks + 4 * (i - start)) - 1
            if not 0 <= page < pages:
                ignored += 1
                continue
            row = key & w.ROW_MASK
            local = row - page * rows
            block = words + w.LINE * page
            state = load_acquire(block + w.PAGE_STATE)
            kind = state & w.KIND_MASK
            generation = state >> w.GENERATION_SHIFT
            end = load_acquire(block + w.PAGE_COMMITTED)
            if kind == w.SEALED and load_relaxed(block + w.PAGE_ENDED) == 0:
                end -= future * envs_of(table, page)
            alive = (generation & w.GENERATION_MASK) == (key >> w.ROW_BITS) and has_rows(state)
            alive = alive and is_present(table, page)
            if not alive or not load_relaxed(block + w.PAGE_FIRST) <= local < end:
                ignored += 1
                continue
            at = base + 4 * row
            present = peek_u32(at)
            # the leaf of a closing observation, or of a row that has gone, is 0 and stays it; more is only looked at then
            if present == 0 and (
                peek_u32(metas + w.META_BYTES * row + 12) & (w.FINAL | w.DELETED)
                or (
                    sampled != 0 and not may_be_taken(peek_i64(sampled + 8 * row), peek_i64(table + w.VIEW_MAX_SAMPLED))
                )
            ):
                ignored += 1
                continue
            leaf = peek_u32(leaves + 4 * i)
            largest = max(largest, leaf)
            change = leaf - present
            if leaf | present > MANTISSA:
                change = value_of(leaf) - value_of(present)
            poke_u32(at, leaf)
            known = tree + SEEN_BYTES * page
            pending = peek_i64(known + SEEN_PENDING)
            poke_i64(known + SEEN_PENDING, pending + 1)
            poke_i64(touched + 8 * listed, page)
            listed += pending == 0
            summed = peek_i64(known + SEEN_GENERATION) == generation and peek_i64(
                known + SEEN_BEGIN
            ) <= local < peek_i64(known + SEEN_END)
            every = peek_i64(known + SEEN_COUNT) == peek_i64(known + SEEN_END) - peek_i64(known + SEEN_BEGIN)
            if summed and (every or is_marked(tree, table, page, local)):
                block_sum = blocks + 8 * (block_count * page + (local >> BITS))
                group_sum = groups + 8 * (group_count * page + (local >> (2 * BITS)))
                poke_i64(block_sum, peek_i64(block_sum) + change)
                poke_i64(group_sum, peek_i64(group_sum) + change)
                poke_i64(known + SEEN_SUM, peek_i64(known + SEEN_SUM) + change)
        store_release(seat + w.SEAT_UPDATING, 0)
    for i in range(listed):
        page = peek_i64(touched + 8 * i)
        known = tree + SEEN_BYTES * page
        pending = peek_i64(known + SEEN_PENDING)
        poke_i64(known + SEEN_PENDING, 0)
        # another learner that updates in between makes the count jump: this page is summed anew then
        before = fetch_add(words + w.LINE * page + w.PAGE_UPDATES, pending)
        if before == peek_i64(known + SEEN_UPDATES):
            poke_i64(known + SEEN_UPDATES, before + pending)
    recent = peek_i64(table + w.VIEW_CONTROL) + w.TABLE_RECENT_LEAF
    if fetch_add(recent + 16, count - ignored) + count - ignored >= span:
        store_relaxed(recent + 16, 0)
        store_relaxed(recent + 8, load_relaxed(recent))
        store_relaxed(recent, largest)
    elif largest > load_relaxed(recent):
        store_relaxed(recent, largest)
    return ignored


@kernel("int64(int64, int64, int64, int64, int64)")
def update_at(words, ids, priorities, count, scratch):
    """`update` of int64 [count] ids and float64 [count] priorities at addresses, with memory of int64 [3 count]."""
    table = peek_i64(words + UPDATE_TABLE)
    if not are_own(table, ids, count, peek_i64(words + UPDATE_NEWEST)):
        foreign = first_foreign(table, ids, count)
        if foreign >= 0:
            return FOREIGN - foreign
        poke_i64(words + UPDATE_NEWEST, newest_generation(table))
    clipped = words + UPDATE_CLIPPED
    poke_i64(clipped, 0)
    poke_i64(words + UPDATE_LOWERED, 0)
    alpha, eps = peek_f64(words + UPDATE_ALPHA), peek_f64(words + UPDATE_EPS)
    unit, largest = peek_f64(words + UPDATE_UNIT), peek_f64(words + UPDATE_LARGEST)
    bad = to_leaves(priorities, count, alpha, eps, unit, largest, clipped, scratch + 16 * count)
    if bad >= 0:
        return -1 - bad
    fitted = peek_i64(clipped) | peek_i64(words + UPDATE_LOWERED)
    if fitted:
        count_clipped(peek_i64(table + w.VIEW_CONTROL), clipped)
    sums, seat, span = peek_i64(words + UPDATE_TREE), peek_i64(words + UPDATE_SEAT), peek_i64(words + UPDATE_SPAN)
    late = store_leaves(sums, table, seat, ids, count, scratch, span)
    return late + CLIPPED if fitted else late


@kernel("int64(object, object, object)")
def update(words, ids, priorities):
    """Store new leaves, keep this learner's sums in step, and remember the largest of late for new rows.

    Args:
        words: The learner's words (UPDATE_*); one thread at a time, which the interpreter's lock sees to.
        ids: Row ids, int64 [n]; of duplicates the last one wins.
        priorities: float64 [n].

    Returns:
        How many ids were ignored: their rows have been overwritten, belong to the stream's next page by now, or never were
        rows that can be drawn; CLIPPED more when priorities were raised or lowered to fit. Or -1 - i when priority i is none,
        FOREIGN - i when id i cannot be of a row of this table, NOT_TAKEN when these are no arrays of that kind or more than there
        is memory for: nothing was changed then.
    """
    at, keys, values = data_of(words), address_of(ids), address_of(priorities)
    kind = peek_i64(at + UPDATE_ARRAY)
    if not (is_vector(keys, kind, _INT64) and is_vector(values, kind, _FLOAT64)):
        return NOT_TAKEN
    count = peek_i64(peek_i64(keys + DIMS))
    if peek_i64(peek_i64(values + DIMS)) != count or count > peek_i64(at + UPDATE_ROOM):
        return NOT_TAKEN
    return update_at(at, peek_i64(keys + DATA), peek_i64(values + DATA), count, peek_i64(at + UPDATE_SCRATCH))
