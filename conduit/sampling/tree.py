"""Sums of leaf priorities per page and per block of 64 rows, owned by one learner as derived data.

The leaves in shared memory are the truth; writers set them before they commit, learners update them. A learner's sums are
brought up to date before every draw: pages that changed generation or that another learner updated are summed anew, new
rows of open pages are added. So there is no shared tree that a killed process could leave torn, and a learner that starts
builds its sums in about a millisecond per million rows. All sums are int64: exact, whatever the order.
"""

from __future__ import annotations

from conduit.jit import inner, kernel
from conduit.kernels.cpu import GENERATION_MASK, ROW_BITS, ROW_MASK
from conduit.kernels.resolve import E_BYTES, E_ENVS, E_FIRST, E_GENERATION, E_LIMIT, E_PAGE, E_START
from conduit.store.atomics import (
    fetch_add,
    load_acquire,
    load_relaxed,
    peek_i64,
    peek_u32,
    poke_i64,
    poke_u32,
    store_relaxed,
)
from conduit.store.protocol import block_of
from conduit.store.words import (
    GENERATION_SHIFT,
    KIND_MASK,
    OPEN,
    PAGE_COMMITTED,
    PAGE_ENDED,
    PAGE_ENVS,
    PAGE_FIRST,
    PAGE_STATE,
    PAGE_UPDATES,
    SEALED,
    T_CONTROL,
    T_COUNT,
    T_FUTURE,
    T_PRIORITY,
    T_ROWS,
    TABLE_RECENT_LEAF,
)

BLOCK = 64
_BLOCK_BITS = 6

P_SUM, P_GENERATION, P_BEGIN, P_END, P_UPDATES = range(0, 40, 8)
P_BYTES = 40
"""What a learner knows of a page: sum of its leaves, and the generation, range of local rows and number of updates that the
sum is of."""


@inner
def _blocks_of(tree, table, page):  # type: ignore[no-untyped-def]
    """Address of a page's block sums; they lie behind the pages' own words."""
    pages = peek_i64(table + T_COUNT)
    per_page = (peek_i64(table + T_ROWS) + BLOCK - 1) >> _BLOCK_BITS
    return tree + P_BYTES * pages + 8 * per_page * page


@inner
def _add_rows(tree, table, page, begin, end):  # type: ignore[no-untyped-def]
    """Add the leaves of local rows [begin, end) to the page's sums."""
    leaves = peek_i64(table + T_PRIORITY) + 4 * page * peek_i64(table + T_ROWS)
    blocks = _blocks_of(tree, table, page)
    total = 0
    at = begin
    while at < end:
        stop = min(end, ((at >> _BLOCK_BITS) + 1) << _BLOCK_BITS)
        part = 0
        for row in range(at, stop):
            part += peek_u32(leaves + 4 * row)
        block = blocks + 8 * (at >> _BLOCK_BITS)
        poke_i64(block, peek_i64(block) + part)
        total += part
        at = stop
    known = tree + P_BYTES * page
    poke_i64(known + P_SUM, peek_i64(known + P_SUM) + total)


@inner
def _sum_anew(tree, table, page, begin, end):  # type: ignore[no-untyped-def]
    blocks = _blocks_of(tree, table, page)
    for block in range((peek_i64(table + T_ROWS) + BLOCK - 1) >> _BLOCK_BITS):
        poke_i64(blocks + 8 * block, 0)
    poke_i64(tree + P_BYTES * page + P_SUM, 0)
    _add_rows(tree, table, page, begin, end)


@inner
def _forget(known):  # type: ignore[no-untyped-def]
    """The page has nothing to draw; whatever comes next in it is summed anew."""
    poke_i64(known + P_GENERATION, -1)
    poke_i64(known + P_BEGIN, 0)
    poke_i64(known + P_END, 0)


@inner
def refresh(tree, table, need, entries):  # type: ignore[no-untyped-def]
    """Bring the sums up to date and list the pages that have rows to draw (kernels.resolve.E_*).

    Args:
        tree: Address of the learner's words: P_* of every page, then block sums.
        table: Table descriptor.
        need: Ticks of future that the window needs.
        entries: Where to list pages; E_START is the sum of the leaves listed before.

    Returns:
        Pages listed, sum of all leaves, rows that could be drawn.
    """
    rows = peek_i64(table + T_ROWS)
    future = peek_i64(table + T_FUTURE)
    total = 0
    listed = 0
    candidates = 0
    for page in range(peek_i64(table + T_COUNT)):
        block = block_of(table, page)
        word = load_acquire(block + PAGE_STATE)
        kind = word & KIND_MASK
        known = tree + P_BYTES * page
        if kind != OPEN and kind != SEALED:
            _forget(known)
            continue
        committed = min(load_acquire(block + PAGE_COMMITTED), rows)
        envs = load_relaxed(block + PAGE_ENVS)
        end = committed
        if kind == OPEN:
            end -= need * envs
        elif load_relaxed(block + PAGE_ENDED) == 0:
            end -= future * envs
        begin = max(0, load_relaxed(block + PAGE_FIRST))
        if end <= begin:
            _forget(known)
            continue
        updates = load_acquire(block + PAGE_UPDATES)
        same = peek_i64(known + P_GENERATION) == (word >> GENERATION_SHIFT) and peek_i64(known + P_BEGIN) == begin
        if same and peek_i64(known + P_UPDATES) == updates and peek_i64(known + P_END) <= end:
            if peek_i64(known + P_END) < end:
                _add_rows(tree, table, page, peek_i64(known + P_END), end)
        else:
            _sum_anew(tree, table, page, begin, end)
        poke_i64(known + P_GENERATION, word >> GENERATION_SHIFT)
        poke_i64(known + P_BEGIN, begin)
        poke_i64(known + P_END, end)
        poke_i64(known + P_UPDATES, updates)
        candidates += end - begin
        if peek_i64(known + P_SUM) == 0:
            continue
        entry = entries + E_BYTES * listed
        poke_i64(entry + E_START, total)
        poke_i64(entry + E_PAGE, page)
        poke_i64(entry + E_FIRST, page * rows + begin)
        poke_i64(entry + E_LIMIT, page * rows + committed)
        poke_i64(entry + E_GENERATION, word >> GENERATION_SHIFT)
        poke_i64(entry + E_ENVS, envs)
        total += peek_i64(known + P_SUM)
        listed += 1
    poke_i64(entries + E_BYTES * listed + E_START, total)
    return listed, total, candidates


@inner
def descend(tree, table, page, position):  # type: ignore[no-untyped-def]
    """Local row of a page within whose leaf `position` (below the page's sum) falls, and that leaf.

    Leaves may change under the search; it then ends on the last row with a positive leaf, or on row -1.
    """
    known = tree + P_BYTES * page
    blocks = _blocks_of(tree, table, page)
    block = peek_i64(known + P_BEGIN) >> _BLOCK_BITS
    last = (peek_i64(known + P_END) - 1) >> _BLOCK_BITS
    while block < last and position >= peek_i64(blocks + 8 * block):
        position -= peek_i64(blocks + 8 * block)
        block += 1
    leaves = peek_i64(table + T_PRIORITY) + 4 * page * peek_i64(table + T_ROWS)
    found, leaf = -1, 0
    first = max(block << _BLOCK_BITS, peek_i64(known + P_BEGIN))
    for row in range(first, min((block + 1) << _BLOCK_BITS, peek_i64(known + P_END))):
        here = peek_u32(leaves + 4 * row)
        if here > 0:
            found, leaf = row, here
            if position < here:
                break
        position -= here
    return found, leaf


@kernel("int64(int64, int64, int64, int64, int64, int64)")
def update(tree, table, ids, leaves, count, span):  # type: ignore[no-untyped-def]
    """Store new leaves, keep this learner's sums in step, and remember the largest of late for new rows.

    Args:
        tree: The learner's words.
        table: Table descriptor.
        ids: Row ids, int64 [count]; of duplicates the last one wins.
        leaves: uint32 [count].
        count: How many.
        span: Updates after which the span for new rows turns.

    Returns:
        How many ids were ignored, since their rows have been overwritten or belong to the stream's next page by now.
    """
    rows = peek_i64(table + T_ROWS)
    base = peek_i64(table + T_PRIORITY)
    ignored = 0
    largest = 0
    for i in range(count):
        key = peek_i64(ids + 8 * i)
        row = key & ROW_MASK
        page = row // rows
        if page >= peek_i64(table + T_COUNT):
            ignored += 1
            continue
        known = tree + P_BYTES * page
        block = block_of(table, page)
        state = load_acquire(block + PAGE_STATE)
        kind = state & KIND_MASK
        local = row - page * rows
        alive = ((state >> GENERATION_SHIFT) & GENERATION_MASK) == (key >> ROW_BITS) and (
            kind == OPEN or kind == SEALED
        )
        mine = peek_i64(known + P_GENERATION) == (state >> GENERATION_SHIFT)
        if not alive or not mine or local < peek_i64(known + P_BEGIN) or local >= peek_i64(known + P_END):
            ignored += 1
            continue
        leaf = peek_u32(leaves + 4 * i)
        largest = max(largest, leaf)
        at = base + 4 * row
        change = leaf - peek_u32(at)
        poke_u32(at, leaf)
        # another learner that updates in between makes the count jump: this page is summed anew then
        if fetch_add(block + PAGE_UPDATES, 1) == peek_i64(known + P_UPDATES):
            poke_i64(known + P_UPDATES, peek_i64(known + P_UPDATES) + 1)
        sums = _blocks_of(tree, table, page) + 8 * (local >> _BLOCK_BITS)
        poke_i64(sums, peek_i64(sums) + change)
        poke_i64(known + P_SUM, peek_i64(known + P_SUM) + change)
    recent = peek_i64(table + T_CONTROL) + TABLE_RECENT_LEAF
    if fetch_add(recent + 16, count - ignored) + count - ignored >= span:
        store_relaxed(recent + 16, 0)
        store_relaxed(recent + 8, load_relaxed(recent))
        store_relaxed(recent, largest)
    elif largest > load_relaxed(recent):
        store_relaxed(recent, largest)
    return ignored
