"""Rows that go before their page is reused: deleted by id, sampled as often as they may be, or reset with the whole table.

A deleted row carries a flag in its meta, set by an atomic operation under a lease, so that it can never land on a row that
has taken the place. A reset raises the table's epoch; pages of earlier epochs have no rows any more, wherever they are looked
at. docs/memory-model.md has the argument.
"""

from __future__ import annotations

from numba import types

from conduit.jit import inner, kernel
from conduit.store.arguments import ObjectType, data_of
from conduit.store.atomics import (
    compare_and_swap,
    fence_full,
    fetch_add,
    load_acquire,
    load_relaxed,
    peek_i64,
    poke_u32,
    store_release,
)
from conduit.store.counting import count_gone
from conduit.store.events import wake
from conduit.store.holds import give_slot, hazard_of, take_slot
from conduit.store.protocol import block_of, lease
from conduit.store.words import (
    DELETED,
    FINAL,
    GENERATION_SHIFT,
    KIND_MASK,
    LINE,
    META_BYTES,
    OPEN,
    PAGE_COMMITTED,
    PAGE_ENVS,
    PAGE_EPOCH,
    PAGE_HALO,
    PAGE_PREVIOUS,
    PAGE_PREVIOUS_GENERATION,
    PAGE_STATE,
    PAGE_UPDATES,
    PAST_MASK,
    SEALED,
    SIDE_GONE,
    T_CONTROL,
    T_COUNT,
    T_FUTURE,
    T_META,
    T_PRIORITY,
    T_ROWS,
    T_SIDES,
    TABLE_DATA,
    TABLE_EPOCH,
    TABLE_SHRUNK,
    TABLE_SPACE,
)


@inner
def is_present(table, page):  # type: ignore[no-untyped-def]
    """False when the page's rows went with a reset."""
    epoch = load_acquire(peek_i64(table + T_CONTROL) + TABLE_EPOCH) >> 1
    return epoch == 0 or load_relaxed(block_of(table, page) + PAGE_EPOCH) == epoch


@inner
def row_has_gone(table, page, local, seen):  # type: ignore[no-untyped-def]
    """Count a row as gone, in the page that wrote it; `seen` is the page's SIDE_GONE from before it was known to hold the row.

    Returns:
        False when the page holds other rows by now.
    """
    block = block_of(table, page)
    if local >= load_relaxed(block + PAGE_HALO):
        return count_gone(table, page, seen)
    # a copy: its own page may be evicted already, and the row be counted by that
    owner = load_relaxed(block + PAGE_PREVIOUS) - 1
    if 0 <= owner < peek_i64(table + T_COUNT):
        theirs = load_acquire(peek_i64(table + T_SIDES) + LINE * owner + SIDE_GONE)
        if ((theirs ^ load_relaxed(block + PAGE_PREVIOUS_GENERATION)) & PAST_MASK) == 0:
            count_gone(table, owner, theirs)
    return True


@inner
def weigh_nothing(table, page, row):  # type: ignore[no-untyped-def]
    """A row that has gone is not drawn by priority; learners sum its page anew."""
    priorities = peek_i64(table + T_PRIORITY)
    if priorities != 0:
        poke_u32(priorities + 4 * row, 0)
        fetch_add(block_of(table, page) + PAGE_UPDATES, 1)


@inner
def mark_deleted(table, page, local):  # type: ignore[no-untyped-def]
    """Flag a row of a page that is held; False when it is flagged already, or only an observation."""
    row = page * peek_i64(table + T_ROWS) + local
    at = peek_i64(table + T_META) + META_BYTES * row + 8
    while True:
        word = load_acquire(at)
        if (word >> 32) & (FINAL | DELETED):
            return False
        if compare_and_swap(at, word, word | (DELETED << 32)) == word:
            break
    weigh_nothing(table, page, row)
    return True


@inner
def _hold(table, page, generation, hazard):  # type: ignore[no-untyped-def]
    """Lease a page if its generation has these low bits and its rows are there; returns its rows, or -1."""
    state = load_acquire(block_of(table, page) + PAGE_STATE)
    kind = state & KIND_MASK
    known = state >> GENERATION_SHIFT
    if (kind != OPEN and kind != SEALED) or (known & ((1 << 23) - 1)) != generation or not is_present(table, page):
        return -1
    return lease(table, page, known, hazard)


@inner
def _delete_copy(table, page, local, hazard):  # type: ignore[no-untyped-def]
    """Flag the copy of a row in the halo of the page that continues its stream."""
    old = block_of(table, page)
    committed = load_acquire(old + PAGE_COMMITTED)
    generation = load_relaxed(old + PAGE_STATE) >> GENERATION_SHIFT
    for other in range(peek_i64(table + T_COUNT)):
        block = block_of(table, other)
        state = load_acquire(block + PAGE_STATE)
        if load_relaxed(block + PAGE_PREVIOUS) != page + 1 or (state & KIND_MASK) not in {OPEN, SEALED}:
            continue
        if load_relaxed(block + PAGE_PREVIOUS_GENERATION) != generation:
            continue
        if lease(table, other, state >> GENERATION_SHIFT, hazard) >= 0:
            copy = local - (committed - load_relaxed(block + PAGE_HALO))
            if copy >= 0:
                mark_deleted(table, other, copy)
            store_release(hazard, 0)
        return


@inner
def _delete(table, ids, count, hazard, other):  # type: ignore[no-untyped-def]
    rows = peek_i64(table + T_ROWS)
    done = 0
    for i in range(count):
        key = peek_i64(ids + 8 * i)
        row = key & ((1 << 40) - 1)
        page = row // rows
        if key < 0 or page >= peek_i64(table + T_COUNT):
            continue
        committed = _hold(table, page, key >> 40, hazard)
        if committed < 0:
            continue
        block = block_of(table, page)
        local = row - page * rows
        if local < committed and mark_deleted(table, page, local):
            # behind the flag: a writer that is turning its page sees it, or has opened a page that is seen here
            fence_full()
            if local >= committed - peek_i64(table + T_FUTURE) * load_relaxed(block + PAGE_ENVS):
                _delete_copy(table, page, local, other)
            row_has_gone(table, page, local, load_acquire(peek_i64(table + T_SIDES) + LINE * page + SIDE_GONE))
            done += 1
        store_release(hazard, 0)
    wake(peek_i64(table + T_CONTROL) + TABLE_SPACE)
    return done


@kernel(types.int64(types.int64, types.int64, types.int64, ObjectType()), nogil=True)
def delete(table, ids, count, seat):  # type: ignore[no-untyped-def]
    """Delete rows.

    Args:
        table: Table descriptor.
        ids: Row ids, int64 [count].
        count: How many.
        seat: This process's seat (words.P_*), two of whose hazards are used.

    Returns:
        Rows deleted; not those that have gone before, or never were rows that are drawn. -1 when the hazards are not free.
    """
    mine = data_of(seat)
    first = take_slot(mine)
    if first < 0:
        return -1
    second = take_slot(mine)
    done = -1
    if second >= 0:
        done = _delete(table, ids, count, hazard_of(mine, first), hazard_of(mine, second))
        give_slot(mine, second)
    give_slot(mine, first)
    return done


@kernel("int64(int64)")
def reset(table):  # type: ignore[no-untyped-def]
    """Let all rows go; returns the number of resets."""
    control = peek_i64(table + T_CONTROL)
    before = fetch_add(control + TABLE_EPOCH, 2)
    fetch_add(control + TABLE_SHRUNK, 1)
    wake(control + TABLE_DATA)
    wake(control + TABLE_SPACE)
    return (before >> 1) + 1


@kernel("int64(int64, int64)")
def set_frozen(table, frozen):  # type: ignore[no-untyped-def]
    """Freeze (1) or thaw (0) a table; whoever waits is told."""
    control = peek_i64(table + T_CONTROL)
    while True:
        word = load_acquire(control + TABLE_EPOCH)
        if compare_and_swap(control + TABLE_EPOCH, word, (word & ~1) | frozen) == word:
            break
    wake(control + TABLE_DATA)
    wake(control + TABLE_SPACE)
    return word & 1
