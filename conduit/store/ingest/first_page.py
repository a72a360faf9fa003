"""A writer's first page: one that a stream ended in and that has room, so that writers which come and go fill whole pages.

A SEALED page is swapped to OPEN, of the same generation, with its new owner in the word. What was committed stays as it is and
keeps its ids; the writer's rows follow it as behind `Writer.cut`, with the page's stream number and on from its last tick. The
word that a page is sealed with counts how often it was reopened, so it never returns, and whoever swaps it (another writer
that wants to fill the page, or one that wants to reuse it) has seen the page as it is. docs/memory-model.md has the argument.
"""

from __future__ import annotations

from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    compare_and_swap,
    load_acquire,
    load_relaxed,
    peek_i64,
    peek_u32,
    poke_i64,
    store_relaxed,
    store_release,
    zero_bytes,
)
from conduit.store.format.words import (
    A_BYTES,
    A_ITEM,
    A_ITEMS,
    A_SPANS,
    A_USED,
    ENDED,
    GENERATION_SHIFT,
    KIND_MASK,
    META_BYTES,
    OPEN,
    OWNER_MASK,
    OWNER_SHIFT,
    PAGE_ARENA,
    PAGE_COMMITTED,
    PAGE_ENDED,
    PAGE_ENVS,
    PAGE_EPOCH,
    PAGE_STATE,
    PAGE_STREAM,
    PAGE_TAIL,
    PAGE_TICK,
    SEALED,
    SIDE_REOPENED,
    SPAN_BYTES,
    SPAN_MASK,
    SPAN_SHIFT,
    T_CONTROL,
    T_COUNT,
    T_FUTURE,
    T_HISTORY,
    T_META,
    T_REOPENS,
    T_ROWS,
    T_TERMINATED,
    T_TRUNCATED,
    TABLE_EPOCH,
    TAIL_MASK,
    W_ARENA_COUNT,
    W_ARENAS,
    W_BASE,
    W_BLOCK,
    W_COMPLETE,
    W_ENVS,
    W_EPISODES,
    W_EPOCH,
    W_FIRST_TICK,
    W_KEPT,
    W_LIMIT,
    W_LOCAL,
    W_OWNER,
    W_PAGE,
    W_RESERVE,
    W_ROWS,
    W_STREAM,
    W_TABLE,
    W_TAIL,
)
from conduit.store.ingest.next_page import _end_cut_streams
from conduit.store.ingest.page_writer import BEYOND
from conduit.store.ingest.report_episodes import enter_page
from conduit.store.pages.protocol import block_of, seal, side_of
from conduit.store.pages.ragged_values import keep_values

_NONE = 1 << 40


@inner
def _room_in(writer, table, page, state, epoch, items):
    """Rows free in a page that the writer may reopen, else -1; what is read is only good if the page still has this state."""
    block = block_of(table, page)
    if (state & KIND_MASK) != SEALED or load_relaxed(block + PAGE_ENDED) != ENDED:
        return -1
    envs = peek_i64(writer + W_ENVS)
    if load_relaxed(block + PAGE_ENVS) != envs or load_relaxed(block + PAGE_EPOCH) != epoch:
        return -1
    committed, tail = load_acquire(block + PAGE_COMMITTED), load_relaxed(block + PAGE_TAIL) & TAIL_MASK
    if committed < envs or committed % envs != 0:
        return -1
    for i in range(peek_i64(writer + W_ARENA_COUNT)):
        arena = peek_i64(writer + W_ARENAS) + A_BYTES * i
        # the sum over all arenas is an upper bound of what is taken of each
        taken = load_relaxed(block + PAGE_ARENA) // peek_i64(arena + A_ITEM)
        if taken < 0 or taken + (peek_i64(items + 8 * i) if items != 0 else 0) > peek_i64(arena + A_ITEMS):
            return -1
    return peek_i64(table + T_ROWS) - tail - committed


@inner
def _find(writer, table, epoch, need, items):
    """The page with the least room that is enough, and its state; -1 where there is none."""
    best, best_room, best_state = -1, _NONE, 0
    for page in range(peek_i64(table + T_COUNT)):
        state = load_acquire(block_of(table, page) + PAGE_STATE)
        room = _room_in(writer, table, page, state, epoch, items)
        if need <= room < best_room:
            best, best_room, best_state = page, room, state
    return best, best_state


@inner
def _take_arenas(writer, table, page, committed, tail):
    """Go on behind the ragged values of the page's rows and kept finals; False where a span leads out of its arena."""
    rows = peek_i64(table + T_ROWS)
    good = True
    for i in range(peek_i64(writer + W_ARENA_COUNT)):
        arena = peek_i64(writer + W_ARENAS) + A_BYTES * i
        used = 0
        for local in range(rows):
            if local < committed or local >= rows - tail:
                span = peek_i64(peek_i64(arena + A_SPANS) + SPAN_BYTES * (page * rows + local))
                length = (span >> SPAN_SHIFT) & SPAN_MASK
                if length > 0:
                    used = max(used, (span & SPAN_MASK) + length)
        good = good and used <= peek_i64(arena + A_ITEMS)
        poke_i64(arena + A_USED, used)
    keep_values(writer)
    return good


@inner
def _next_episode(table, row, envs):
    """The number behind the largest of the episodes at a tick's rows: a stream numbers them as they begin, so of all before."""
    largest = 0
    for i in range(row, row + envs):
        largest = max(largest, peek_u32(peek_i64(table + T_META) + META_BYTES * i + 8))
    return largest + 1


@kernel("int64(int64, int64, int64, int64)", nogil=True)
def reopen(writer, rows, tail, items):
    """Let a writer without a page go on in one that a stream ended in, in a table where that may be.

    Args:
        writer: Writer state, as a new stream has it.
        rows: Rows that are about to be written.
        tail: Kept observations that they need.
        items: Items of ragged values that they need, address of int64 [arenas], or 0.

    Returns:
        Physical row of the next tick, or -1 when there is no such page.
    """
    table = peek_i64(writer + W_TABLE)
    word = load_acquire(peek_i64(table + T_CONTROL) + TABLE_EPOCH)
    if peek_i64(table + T_REOPENS) == 0 or peek_i64(writer + W_PAGE) >= 0 or word & 1:
        return -1
    envs = peek_i64(writer + W_ENVS)
    # less than that is not worth the copies at the head of the next page
    worth = (peek_i64(table + T_HISTORY) + peek_i64(table + T_FUTURE) + 1) * envs + peek_i64(writer + W_RESERVE)
    need = max(rows + tail, worth)
    _end_cut_streams(table)
    while True:
        page, state = _find(writer, table, word >> 1, need, items)
        if page < 0:
            return -1
        block = block_of(table, page)
        mine = ((state >> GENERATION_SHIFT) << GENERATION_SHIFT) | (peek_i64(writer + W_OWNER) << OWNER_SHIFT) | OPEN
        if compare_and_swap(block + PAGE_STATE, state, mine) == state:
            break
    # before anything else of the page: a word that is seen again stands for a page in which nothing has changed
    count = ((state >> OWNER_SHIFT) + 1) & OWNER_MASK
    store_release(side_of(table, page) + SIDE_REOPENED, count)
    # before the first commit: who reads a count of rows that is new reads this as well
    store_relaxed(block + PAGE_ENDED, 0)
    committed, kept = load_relaxed(block + PAGE_COMMITTED), load_relaxed(block + PAGE_TAIL) & TAIL_MASK
    size = peek_i64(table + T_ROWS)
    base = page * size
    # an earlier owner that died may have left flags and links of rows that it did not commit
    rest = size - kept - committed
    zero_bytes(peek_i64(table + T_TERMINATED) + base + committed, rest)
    zero_bytes(peek_i64(table + T_TRUNCATED) + base + committed, rest)
    zero_bytes(peek_i64(table + T_META) + (base + committed) * META_BYTES, rest * META_BYTES)
    if not _take_arenas(writer, table, page, committed, kept):
        seal(table, page, ENDED)
        return -1
    poke_i64(writer + W_STREAM, load_relaxed(block + PAGE_STREAM))
    poke_i64(writer + W_FIRST_TICK, load_relaxed(block + PAGE_TICK) + committed // envs)
    poke_i64(writer + W_EPISODES, _next_episode(table, base + committed - envs, envs))
    poke_i64(writer + W_EPOCH, word)
    poke_i64(writer + W_ROWS, size)
    poke_i64(writer + W_LIMIT, BEYOND)
    poke_i64(writer + W_BLOCK, block)
    poke_i64(writer + W_BASE, base)
    poke_i64(writer + W_LOCAL, committed)
    # nothing will follow in the episodes of the rows that are there
    poke_i64(writer + W_COMPLETE, committed)
    poke_i64(writer + W_TAIL, kept)
    poke_i64(writer + W_KEPT, kept)
    poke_i64(writer + W_PAGE, page)
    enter_page(writer, committed)
    return base + committed
