"""Draws from the mass of all leaf priorities, and the weights that correct for them: the kernels behind sampling.prioritized.

A draw looks for the row at a place in the mass: page, block, row (sampling.sum_tree). Where rows change under it, it may come to one that
anchors no window; that is refused, and another is drawn from the whole mass.
"""

from __future__ import annotations

import numpy as np

from conduit.kernels.cpu.job import (
    JOB_BATCH,
    JOB_ENTRIES,
    JOB_FIRST,
    JOB_FOLLOWING,
    JOB_PAGES,
    JOB_ROWS,
    JOB_TABLE,
    JOB_WINDOW,
    ask_for,
)
from conduit.kernels.cpu.priorities import value_of
from conduit.kernels.cpu.transitions import ask_ahead
from conduit.kernels.cpu.windows import ENTRY_ENVS, ENTRY_PAGE, ENTRY_START, WINDOW_RESOLVE
from conduit.native.jit import inner, kernel
from conduit.native.memory import call_5, peek_f64, peek_i64, peek_u32, poke_f32, poke_f64, poke_i64
from conduit.native.philox import draw_lane, random_pair, scale_to
from conduit.sampling.marks import SEEN_BEGIN, SEEN_BYTES, SEEN_END, is_marked
from conduit.sampling.sum_tree import find_block, find_row, refresh
from conduit.sampling.uniform import locate, note_pages
from conduit.store.format import words as w

(
    DRAW_UNIFORM_STATE,
    DRAW_UNIFORM,
    DRAW_TREE,
    DRAW_ENTRIES,
    DRAW_PROBABILITIES,
    DRAW_TOTAL,
    DRAW_CANDIDATES,
    DRAW_STRATIFIED,
    DRAW_LEAST,
    DRAW_SEED,
    DRAW_BATCH_AT,
    DRAW_OFFERED,
    DRAW_BLOCKS,
    DRAW_PLACES,
) = range(0, 112, 8)
"""Words of the sampler: the uniform sampler's state and function (for a table of zeros), sums, list of pages, probability of
each slot (float64), sum of all leaves and rows that could be drawn at the last draw, options, seed, address of the batch
number, rows that it looked at; scratch int64 [batch] for each slot's block and its place in the block's mass."""
DRAW_WORDS = 14
_CHUNK = 16
_TRIES = (1 << 19) - 1


@inner
def _bound(whole, rest, size, stratum):
    """Where one of `size` equal slices of a mass of whole * size + rest begins."""
    return whole * stratum + np.int64(np.uint64(rest * stratum) // np.uint64(size))


@inner
def _try_again(state, job, at, entries, listed, total, attempt):
    """Draw the slot at address `at` from the whole mass until a row anchors the window; False when none is found.

    The whole mass, for slots of a stratum too: each row is then drawn in proportion to its leaf, whichever rows are refused.
    """
    slot = peek_i64(at)
    table = peek_i64(job + JOB_TABLE)
    window = peek_i64(job + JOB_WINDOW)
    rows = peek_i64(table + w.VIEW_ROWS)
    tree = peek_i64(state + DRAW_TREE)
    seed = peek_i64(state + DRAW_SEED)
    batch = peek_i64(peek_i64(state + DRAW_BATCH_AT))
    density = listed / total
    for tries in range(1, _TRIES):
        first, second = random_pair(seed, batch, draw_lane(slot, attempt, tries))
        position = scale_to(second if slot & 1 else first, total)
        entry_ = locate(entries, listed, np.int64(position * density), position)
        page = peek_i64(entry_ + ENTRY_PAGE)
        block, position = find_block(tree, table, page, position - peek_i64(entry_ + ENTRY_START))
        local, leaf = find_row(tree, table, page, block, position)
        poke_i64(peek_i64(job + JOB_ROWS) + 8 * slot, page * rows + local)
        poke_i64(peek_i64(job + JOB_ENTRIES) + 8 * slot, entry_)
        if local >= 0 and call_5(peek_i64(window + WINDOW_RESOLVE), window, job, at, 1, 0) > 0:
            poke_f64(peek_i64(state + DRAW_PROBABILITIES) + 8 * slot, leaf / total)
            return True
    return False


def draw(state, job, slots, count, attempt):
    """The draw of a loader (sampling.prioritized): resolves `count` slots; returns that, or -1 where too few rows are there."""
    table = peek_i64(job + JOB_TABLE)
    window = peek_i64(job + JOB_WINDOW)
    tree = peek_i64(state + DRAW_TREE)
    entries = peek_i64(state + DRAW_ENTRIES)
    probabilities = peek_i64(state + DRAW_PROBABILITIES)
    metas = peek_i64(table + w.VIEW_META)
    rows = peek_i64(table + w.VIEW_ROWS)
    listed, total, candidates, offered = refresh(tree, window, table, entries)
    poke_i64(state + DRAW_TOTAL, total)
    poke_i64(state + DRAW_CANDIDATES, candidates)
    poke_i64(state + DRAW_OFFERED, offered)
    # damaged leaves can add up to 2^63 and more
    if total < 0 or candidates < 1 or offered < peek_i64(state + DRAW_LEAST):
        return -1
    if total == 0:
        for i in range(count):
            poke_f64(probabilities + 8 * peek_i64(slots + 8 * i), 1.0 / candidates)
        return call_5(peek_i64(state + DRAW_UNIFORM), peek_i64(state + DRAW_UNIFORM_STATE), job, slots, count, attempt)
    seed = peek_i64(state + DRAW_SEED)
    batch = peek_i64(peek_i64(state + DRAW_BATCH_AT))
    begin = peek_i64(job + JOB_FIRST)
    size = peek_i64(job + JOB_BATCH) - begin
    stratified = peek_i64(state + DRAW_STRATIFIED) != 0
    density = listed / total
    whole, rest = total // size, total % size
    row_at, page_at = peek_i64(job + JOB_ROWS), peek_i64(job + JOB_PAGES)
    after_at, entry_at = peek_i64(job + JOB_FOLLOWING), peek_i64(job + JOB_ENTRIES)
    block_at, place_at = peek_i64(state + DRAW_BLOCKS), peek_i64(state + DRAW_PLACES)
    first = second = np.uint64(0)
    computed = -1
    high = behind = 0
    # blocks, then rows, then windows, of all slots each: what a later stage reads has been asked for by the one before
    for i in range(count):
        slot = peek_i64(slots + 8 * i)
        if slot >> 1 != computed:
            computed = slot >> 1
            first, second = random_pair(seed, batch, draw_lane(slot, attempt, 0))
        low = 0
        if stratified:
            # slots mostly follow each other, and a division costs as much as the search of a block
            stratum = slot - begin
            low = high if stratum == behind else _bound(whole, rest, size, stratum)
            behind = stratum + 1
            high = _bound(whole, rest, size, behind)
        else:
            high = total
        position = low + scale_to(second if slot & 1 else first, max(1, high - low))
        entry_ = locate(entries, listed, np.int64(position * density), position)
        page = peek_i64(entry_ + ENTRY_PAGE)
        block, position = find_block(tree, table, page, position - peek_i64(entry_ + ENTRY_START))
        poke_i64(block_at + 8 * slot, block)
        poke_i64(place_at + 8 * slot, position)
        poke_i64(page_at + 8 * slot, page)
        poke_i64(entry_at + 8 * slot, entry_)
    for start in range(0, count, _CHUNK):
        here = min(_CHUNK, count - start)
        for i in range(start, start + here):
            slot = peek_i64(slots + 8 * i)
            page = peek_i64(page_at + 8 * slot)
            local, leaf = find_row(tree, table, page, peek_i64(block_at + 8 * slot), peek_i64(place_at + 8 * slot))
            # a row that is none is refused below by its leaf; its number stays inside the page
            row = page * rows + max(local, 0)
            after = ask_ahead(window, metas, row, peek_i64(peek_i64(entry_at + 8 * slot) + ENTRY_ENVS))
            poke_i64(row_at + 8 * slot, row)
            poke_i64(after_at + 8 * slot, after)
            poke_f64(probabilities + 8 * slot, leaf / total)
        ask_for(job, slots + 8 * start, here)
    done = stop = 0
    while done < count:
        if stop <= done:
            stop = done
            while stop < count and peek_f64(probabilities + 8 * peek_i64(slots + 8 * stop)) > 0.0:
                stop += 1
        if stop > done:
            done += call_5(peek_i64(window + WINDOW_RESOLVE), window, job, slots + 8 * done, stop - done, 0)
        if done < count and (done < stop or peek_f64(probabilities + 8 * peek_i64(slots + 8 * done)) <= 0.0):
            if not _try_again(state, job, slots + 8 * done, entries, listed, total, attempt):
                return -1
            done += 1
    note_pages(job, slots, count)
    return count


@kernel("int64(int64, int64, int64, float64, float64, int64, int64)")
def weigh(probabilities, count, candidates, beta, least, out, weights):
    """Importance weights (float32) of a batch, over that of probability `least` (0: over the batch's largest, < 0: over 1).

    The weight of the least probability is the largest one, so dividing by it is a power of a ratio.
    """
    base = 1.0 / candidates
    if least == 0.0:
        base = peek_f64(probabilities)
        for i in range(count):
            base = min(base, peek_f64(probabilities + 8 * i))
    elif least > 0.0:
        base = least
    for i in range(count):
        probability = peek_f64(probabilities + 8 * i)
        poke_f64(out + 8 * i, probability)
        poke_f32(weights + 4 * i, (probability / base) ** -beta)
    return count


@kernel("int64(int64, int64)", nogil=True)
def least_leaf(tree, table):
    """What the smallest positive leaf among the rows that the learner's sums are of stands for, or 0."""
    rows = peek_i64(table + w.VIEW_ROWS)
    least = 1 << 32
    for page in range(peek_i64(table + w.VIEW_COUNT)):
        known = tree + SEEN_BYTES * page
        leaves = peek_i64(table + w.VIEW_PRIORITY) + 4 * page * rows
        for row in range(peek_i64(known + SEEN_BEGIN), peek_i64(known + SEEN_END)):
            leaf = peek_u32(leaves + 4 * row)
            if 0 < leaf < least and is_marked(tree, table, page, row):
                least = leaf
    return value_of(least) if least < 1 << 32 else 0
