"""Sums of leaf priorities per page, group and block of rows, owned by one learner as derived data.

The leaves in shared memory are the truth; writers set them before they commit, learners update them (sampling.prioritized_update).
A learner's sums are brought up to date before every draw: pages that changed generation or that another learner updated are summed
anew, new rows of open pages are added. So there is no shared tree that a killed process could leave torn, and a learner that starts
builds its sums in about a millisecond per million rows. All sums are int64: exact, whatever the order.

A block is 32 rows, a group 32 blocks. Sums are of the rows that can be drawn now (sampling.marks); all others weigh nothing.
"""

from __future__ import annotations

from conduit.kernels.cpu.priorities import MANTISSA, value_of
from conduit.kernels.cpu.windows import (
    ENTRY_BYTES,
    ENTRY_ENVS,
    ENTRY_GENERATION,
    ENTRY_LIMIT,
    ENTRY_OVER,
    ENTRY_PAGE,
    ENTRY_START,
    WINDOW_NEED,
    WINDOW_OLDEST,
    WINDOW_REACH,
    WINDOW_SHORT,
)
from conduit.native.jit import inner
from conduit.native.memory import fence_acquire, load_acquire, load_relaxed, peek_i64, peek_u32, poke_i64, prefetch
from conduit.sampling.candidates import MOST_LOOKS, have_turned, list_page, note_open, rows_to_draw
from conduit.sampling.marks import (
    BITS,
    BLOCK,
    NEVER,
    SEEN_BEGIN,
    SEEN_BYTES,
    SEEN_COUNT,
    SEEN_END,
    SEEN_GENERATION,
    SEEN_LEAST,
    SEEN_LIMIT,
    SEEN_SUM,
    SEEN_UPDATES,
    between,
    forget_marks,
    mark_rows,
    marks_of,
    sums_of,
    unmark_deleted,
)
from conduit.store.format import words as w
from conduit.store.pages.protocol import block_of, pages_used


@inner
def _sum_rows(tree, table, page, begin, since, end):
    """Sum the blocks anew that have local rows from `since` on, of a page whose rows [begin, end) may be marked."""
    leaves = peek_i64(table + w.VIEW_PRIORITY) + 4 * page * peek_i64(table + w.VIEW_ROWS)
    blocks, groups, _, _ = sums_of(tree, table, page)
    marks = marks_of(tree, table, page)
    total = 0
    for number in range(since >> BITS, ((end - 1) >> BITS) + 1):
        start = number << BITS
        low, high = max(begin, start), min(end, start + BLOCK)
        bits = peek_u32(marks + 4 * number)
        part = zeros = 0
        if bits == between(low - start, high - start):
            for row in range(low, high):
                leaf = peek_u32(leaves + 4 * row)
                part += value_of(leaf)
                zeros += leaf == 0
        else:
            for row in range(low, high):
                bit = (bits >> (row - start)) & 1
                leaf = peek_u32(leaves + 4 * row)
                part += value_of(leaf) * bit
                zeros += (leaf == 0) & bit
        if zeros != 0:
            unmark_deleted(tree, table, page, number)
        block, group = blocks + 8 * number, groups + 8 * (number >> BITS)
        change = part - peek_i64(block)
        poke_i64(block, part)
        poke_i64(group, peek_i64(group) + change)
        total += change
    known = tree + SEEN_BYTES * page
    poke_i64(known + SEEN_SUM, peek_i64(known + SEEN_SUM) + total)


@inner
def _clear(tree, table, page):
    """A page's rows are others from now on."""
    blocks, groups, block_count, group_count = sums_of(tree, table, page)
    for block in range(block_count):
        poke_i64(blocks + 8 * block, 0)
    for group in range(group_count):
        poke_i64(groups + 8 * group, 0)
    forget_marks(tree, table, page)
    poke_i64(tree + SEEN_BYTES * page + SEEN_SUM, 0)


@inner
def _forget(known):
    """The page has nothing to draw; whatever comes next in it is summed anew."""
    poke_i64(known + SEEN_GENERATION, -1)
    poke_i64(known + SEEN_BEGIN, 0)
    poke_i64(known + SEEN_END, 0)


@inner
def _follow(tree, window, table, entry, begin, end):
    """Bring marks and sums of a page, of its local rows [begin, end), up to date; False when it has been claimed meanwhile."""
    page = peek_i64(entry + ENTRY_PAGE)
    known = tree + SEEN_BYTES * page
    over = peek_i64(entry + ENTRY_OVER)
    generation = peek_i64(entry + ENTRY_GENERATION)
    committed = peek_i64(entry + ENTRY_LIMIT) - page * peek_i64(table + w.VIEW_ROWS)
    weighs = peek_i64(table + w.VIEW_PRIORITY) != 0
    gone = block_of(table, page) + w.PAGE_UPDATES if weighs else peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SHRUNK
    updates = load_acquire(gone)
    changed = peek_i64(known + SEEN_UPDATES) != updates
    before = peek_i64(known + SEEN_LIMIT)
    grown = before != ((committed << 1) | over) or peek_i64(known + SEEN_END) != end
    aged = peek_i64(window + WINDOW_OLDEST) > peek_i64(known + SEEN_LEAST)
    same = peek_i64(known + SEEN_GENERATION) == generation and peek_i64(known + SEEN_BEGIN) == begin
    same = same and peek_i64(known + SEEN_END) <= end and before >> 1 <= committed
    if same and not (changed or grown or aged):
        return True
    since = stored = end
    anew = 1
    if not same:
        _clear(tree, table, page)
        since = begin
    elif aged or (changed and (not weighs or peek_i64(table + w.VIEW_SAMPLED) != 0)):
        since = begin
    else:
        if changed:
            stored = begin
        if grown:
            reach = peek_i64(window + WINDOW_REACH) * peek_i64(entry + ENTRY_ENVS)
            since = max(begin, min(peek_i64(known + SEEN_END), (before >> 1) - reach))
            # rows of a stream that had ended wait again when another writer goes on in its page
            anew = before & 1 & ~over
    if since == begin and anew != 0:
        poke_i64(known + SEEN_LEAST, NEVER)
    if since < end:
        mark_rows(tree, window, table, entry, since, end, anew)
    if weighs and min(since, stored) < end:
        _sum_rows(tree, table, page, begin, min(since, stored), end)
    poke_i64(known + SEEN_GENERATION, generation)
    poke_i64(known + SEEN_BEGIN, begin)
    poke_i64(known + SEEN_END, end)
    poke_i64(known + SEEN_LIMIT, (committed << 1) | over)
    poke_i64(known + SEEN_UPDATES, updates)
    fence_acquire()
    return load_relaxed(block_of(table, page) + w.PAGE_STATE) >> w.GENERATION_SHIFT == generation


@inner
def refresh(tree, window, table, entries):
    """Bring the sums up to date and list the pages that have rows to draw (kernels.cpu.windows.ENTRY_*).

    Args:
        tree: Address of what the learner knows (sampling.marks).
        window: What is to be drawn (kernels.cpu.windows.WINDOW_*); always the same for a learner.
        table: Table descriptor.
        entries: Where to list pages; ENTRY_START is the sum of the leaves listed before.

    Returns:
        Pages listed, sum of the leaves of all rows that can be drawn, these rows, rows that were offered.
    """
    rows = peek_i64(table + w.VIEW_ROWS)
    need, short = peek_i64(window + WINDOW_NEED), peek_i64(window + WINDOW_SHORT)
    total = listed = candidates = offered = 0
    for _ in range(MOST_LOOKS):
        total = listed = candidates = offered = noted = 0
        for page in range(pages_used(table)):
            known = tree + SEEN_BYTES * page
            entry = entries + ENTRY_BYTES * listed
            begin, end, committed, word, envs, over = rows_to_draw(table, page, need, short)
            list_page(entry, total, page, rows, begin, committed, word, envs, over)
            if end <= begin or not _follow(tree, window, table, entry, begin, end):
                _forget(known)
                continue
            candidates += peek_i64(known + SEEN_COUNT)
            offered += end - begin
            if (word & w.KIND_MASK) == w.OPEN:
                noted = note_open(table, entries, noted, page, word)
            if peek_i64(known + SEEN_SUM) == 0:
                continue
            total += peek_i64(known + SEEN_SUM)
            listed += 1
        if not have_turned(table, entries, noted):
            break
    poke_i64(entries + ENTRY_BYTES * listed + ENTRY_START, total)
    return listed, total, candidates, offered


@inner
def _first_beyond(sums, first, last, position):
    """The first of the sums [first, last] within which `position` falls, and what is left of the position there.

    Without branches on the sums: which one it is cannot be predicted, and a wrong guess costs more than reading them all.
    """
    run, found, before = 0, first, 0
    for i in range(first, last):
        run += peek_i64(sums + 8 * i)
        passed = run <= position
        found += passed
        before = run if passed else before
    return found, position - before


@inner
def find_block(tree, table, page, position):
    """Block of a page within which `position` (below the page's sum) falls, and the position in it; asks for its leaves."""
    known = tree + SEEN_BYTES * page
    blocks, groups, _, _ = sums_of(tree, table, page)
    low = peek_i64(known + SEEN_BEGIN) >> BITS
    high = (peek_i64(known + SEEN_END) - 1) >> BITS
    group, position = _first_beyond(groups, low >> BITS, high >> BITS, position)
    first = max(low, group << BITS)
    block, position = _first_beyond(blocks, first, min(high, (group << BITS) + BLOCK - 1), position)
    leaves = peek_i64(table + w.VIEW_PRIORITY) + 4 * (page * peek_i64(table + w.VIEW_ROWS) + (block << BITS))
    prefetch(leaves)
    prefetch(leaves + 64)
    prefetch(leaves + 124)
    return block, position


@inner
def find_row(tree, table, page, block, position):
    """Local row of a block within whose leaf `position` falls, and what that leaf stands for.

    Leaves may change under the search; it then ends on the last row with a positive leaf, or on row -1.
    """
    known = tree + SEEN_BYTES * page
    leaves = peek_i64(table + w.VIEW_PRIORITY) + 4 * page * peek_i64(table + w.VIEW_ROWS)
    start = block << BITS
    first = max(start, peek_i64(known + SEEN_BEGIN))
    last = min(start + BLOCK, peek_i64(known + SEEN_END))
    bits = peek_u32(marks_of(tree, table, page) + 4 * block)
    run, found = 0, first
    if bits != between(first - start, last - start):
        for row in range(first, last):
            run += value_of(peek_u32(leaves + 4 * row)) * ((bits >> (row - start)) & 1)
            found += run <= position
    else:
        blocks, _, _, _ = sums_of(tree, table, page)
        if peek_i64(blocks + 8 * block) <= MANTISSA:
            # small codes all of them, which are what they stand for
            for row in range(first, last):
                run += peek_u32(leaves + 4 * row)
                found += run <= position
        else:
            for row in range(first, last):
                run += value_of(peek_u32(leaves + 4 * row))
                found += run <= position
    if found < last:
        leaf = value_of(peek_u32(leaves + 4 * found))
        if leaf > 0:
            return found, leaf
    found, leaf = -1, 0
    for row in range(first, last):
        here = value_of(peek_u32(leaves + 4 * row))
        if here > 0 and (bits >> (row - start)) & 1:
            found, leaf = row, here
            if position < here:
                break
            position -= here
    return found, leaf
