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
from conduit.store.format import words as w
from conduit.store.ingest.page_writer import BEYOND, end_cut_streams, enter
from conduit.store.pages.protocol import block_of, seal, side_of
from conduit.store.pages.ragged_values import keep_values

_NONE = 1 << 40


@inner
def _room_in(writer, table, page, state, epoch, items):
    """Rows free in a page that the writer may reopen, else -1; what is read is only good if the page still has this state."""
    block = block_of(table, page)
    if (state & w.KIND_MASK) != w.SEALED or load_relaxed(block + w.PAGE_ENDED) != w.ENDED:
        return -1
    envs = peek_i64(writer + w.WRITER_ENVS)
    if load_relaxed(block + w.PAGE_ENVS) != envs or load_relaxed(block + w.PAGE_EPOCH) != epoch:
        return -1
    committed, tail = load_acquire(block + w.PAGE_COMMITTED), load_relaxed(block + w.PAGE_TAIL) & w.TAIL_MASK
    if committed < envs or committed % envs != 0:
        return -1
    for i in range(peek_i64(writer + w.WRITER_ARENA_COUNT)):
        arena = peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * i
        # the sum over all arenas is an upper bound of what is taken of each
        taken = load_relaxed(block + w.PAGE_ARENA) // peek_i64(arena + w.ARENA_ITEM)
        if taken < 0 or taken + (peek_i64(items + 8 * i) if items != 0 else 0) > peek_i64(arena + w.ARENA_ITEMS):
            return -1
    return peek_i64(table + w.VIEW_ROWS) - tail - committed


@inner
def _find(writer, table, epoch, need, items):
    """The page with the least room that is enough, and its state; -1 where there is none."""
    best, best_room, best_state = -1, _NONE, 0
    for page in range(peek_i64(table + w.VIEW_COUNT)):
        state = load_acquire(block_of(table, page) + w.PAGE_STATE)
        room = _room_in(writer, table, page, state, epoch, items)
        if need <= room < best_room:
            best, best_room, best_state = page, room, state
    return best, best_state


@inner
def _take_arenas(writer, table, page, committed, tail):
    """Go on behind the ragged values of the page's rows and kept finals; False where a span leads out of its arena."""
    rows = peek_i64(table + w.VIEW_ROWS)
    good = True
    for i in range(peek_i64(writer + w.WRITER_ARENA_COUNT)):
        arena = peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * i
        used = 0
        for local in range(rows):
            if local < committed or local >= rows - tail:
                span = peek_i64(peek_i64(arena + w.ARENA_SPANS) + w.SPAN_BYTES * (page * rows + local))
                length = (span >> w.SPAN_SHIFT) & w.SPAN_MASK
                if length > 0:
                    used = max(used, (span & w.SPAN_MASK) + length)
        good = good and used <= peek_i64(arena + w.ARENA_ITEMS)
        poke_i64(arena + w.ARENA_USED, used)
    keep_values(writer)
    return good


@inner
def _next_episode(table, row, envs):
    """The number behind the largest of the episodes at a tick's rows: a stream numbers them as they begin, so of all before."""
    largest = 0
    for i in range(row, row + envs):
        largest = max(largest, peek_u32(peek_i64(table + w.VIEW_META) + w.META_BYTES * i + 8))
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
    table = peek_i64(writer + w.WRITER_TABLE)
    word = load_acquire(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_EPOCH)
    if peek_i64(table + w.VIEW_REOPENS) == 0 or peek_i64(writer + w.WRITER_PAGE) >= 0 or word & 1:
        return -1
    envs = peek_i64(writer + w.WRITER_ENVS)
    # less than that is not worth the copies at the head of the next page
    worth = (peek_i64(table + w.VIEW_HISTORY) + peek_i64(table + w.VIEW_FUTURE) + 1) * envs + peek_i64(
        writer + w.WRITER_RESERVE
    )
    need = max(rows + tail, worth)
    end_cut_streams(table)
    while True:
        page, state = _find(writer, table, word >> 1, need, items)
        if page < 0:
            return -1
        block = block_of(table, page)
        mine = (
            ((state >> w.GENERATION_SHIFT) << w.GENERATION_SHIFT)
            | (peek_i64(writer + w.WRITER_OWNER) << w.OWNER_SHIFT)
            | w.OPEN
        )
        if compare_and_swap(block + w.PAGE_STATE, state, mine) == state:
            break
    # before anything else of the page: a word that is seen again stands for a page in which nothing has changed
    count = ((state >> w.OWNER_SHIFT) + 1) & w.OWNER_MASK
    store_release(side_of(table, page) + w.SIDE_REOPENED, count)
    # before the first commit: who reads a count of rows that is new reads this as well
    store_relaxed(block + w.PAGE_ENDED, 0)
    committed, kept = load_relaxed(block + w.PAGE_COMMITTED), load_relaxed(block + w.PAGE_TAIL) & w.TAIL_MASK
    size = peek_i64(table + w.VIEW_ROWS)
    base = page * size
    # an earlier owner that died may have left flags and links of rows that it did not commit
    rest = size - kept - committed
    zero_bytes(peek_i64(table + w.VIEW_TERMINATED) + base + committed, rest)
    zero_bytes(peek_i64(table + w.VIEW_TRUNCATED) + base + committed, rest)
    zero_bytes(peek_i64(table + w.VIEW_META) + (base + committed) * w.META_BYTES, rest * w.META_BYTES)
    if not _take_arenas(writer, table, page, committed, kept):
        seal(table, page, w.ENDED)
        return -1
    poke_i64(writer + w.WRITER_STREAM, load_relaxed(block + w.PAGE_STREAM))
    poke_i64(writer + w.WRITER_FIRST_TICK, load_relaxed(block + w.PAGE_TICK) + committed // envs)
    poke_i64(writer + w.WRITER_EPISODES, _next_episode(table, base + committed - envs, envs))
    poke_i64(writer + w.WRITER_EPOCH, word)
    poke_i64(writer + w.WRITER_LIMIT, BEYOND)
    # nothing will follow in the episodes of the rows that are there: all of them are complete
    return enter(writer, page, committed, kept, committed)
