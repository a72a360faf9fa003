"""Rows that go before their page is reused: deleted by id, sampled as often as they may be, or reset with the whole table.

A deleted row carries a flag in its meta, set by an atomic operation under a lease, so that it can never land on a row that
has taken the place. A reset raises the table's epoch; pages of earlier epochs have no rows any more, wherever they are looked
at. docs/memory-model.md has the argument.
"""

from __future__ import annotations

from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    compare_and_swap,
    data_of,
    fence_acquire,
    fence_full,
    fetch_add,
    load_acquire,
    load_relaxed,
    peek_i64,
    peek_u32,
    poke_u8,
    poke_u32,
    store_release,
    wake,
)
from conduit.store.format import words as w
from conduit.store.pages.holds import give_slot, hazard_of, take_slot
from conduit.store.pages.protocol import block_of, envs_of, has_rows, is_of, lease
from conduit.store.pages.rate_limiter import use_seat
from conduit.store.pages.row_counts import count_gone, mark_gone, opened_in
from conduit.store.pages.row_ids import first_foreign

_TRIES = 64


@inner
def is_present(table, page):
    """False when the page's rows went with a reset."""
    epoch = load_acquire(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_EPOCH) >> 1
    return epoch == 0 or load_relaxed(block_of(table, page) + w.PAGE_EPOCH) == epoch


@inner
def may_be_taken(word, limit):
    """True when a row with this count of deliveries may be delivered once more; one that has gone counts as 65,536 times."""
    return (word >> 16) & 0x1FFFF < limit


@inner
def home_of(table, page, local):
    """Where a row was written: page, local row, and the low bits of the generation that page was opened in.

    That is the row itself, or, of a copy in a halo, a row of an earlier page; page -1 where that has been claimed since. The
    words of `page` are held by the caller, or looked at again; those of earlier pages are looked at twice here.
    """
    block = block_of(table, page)
    tag = opened_in(table, page)
    halo = load_relaxed(block + w.PAGE_HALO)
    hops = 0
    while local < halo:
        hops += 1
        page = load_relaxed(block + w.PAGE_PREVIOUS) - 1
        tag = load_relaxed(block + w.PAGE_PREVIOUS_GENERATION) & w.PAST_MASK
        if not 0 <= page < peek_i64(table + w.VIEW_COUNT):
            return -1, 0, 0
        block = block_of(table, page)
        state = load_acquire(block + w.PAGE_STATE)
        if not has_rows(state) or opened_in(table, page) != tag:
            return -1, 0, 0
        local += load_acquire(block + w.PAGE_COMMITTED) - halo
        halo = load_relaxed(block + w.PAGE_HALO)
        fence_acquire()
        if (load_relaxed(block + w.PAGE_STATE) ^ state) >> w.GENERATION_SHIFT != 0:
            return -1, 0, 0
        # damaged words may lead anywhere, and round
        if not 0 <= local < peek_i64(table + w.VIEW_ROWS) or hops > peek_i64(table + w.VIEW_COUNT):
            return -1, 0, 0
    return page, local, tag


@inner
def weigh_nothing(table, page, row):
    """A row that has gone is not drawn by priority; learners sum its page anew."""
    priorities = peek_i64(table + w.VIEW_PRIORITY)
    if priorities != 0:
        poke_u32(priorities + 4 * row, 0)
        fetch_add(block_of(table, page) + w.PAGE_UPDATES, 1)


@inner
def weigh_nothing_late(table, page, row, tag, seat):
    """`weigh_nothing` for a row whose page is not held: nothing is done if the page was opened in another generation than `tag`.

    A mark keeps writers away from the page meanwhile. Where other threads have all marks it is left: no such row is drawn anyway.
    """
    if peek_i64(table + w.VIEW_PRIORITY) == 0:
        return
    for attempt in range(_TRIES * w.WEIGHING_MARKS):
        mark = seat + w.SEAT_WEIGHING + 8 * (attempt % w.WEIGHING_MARKS)
        if compare_and_swap(mark, 0, page + 1) == 0:
            fence_full()
            state = load_acquire(block_of(table, page) + w.PAGE_STATE)
            if has_rows(state) and ((opened_in(table, page) ^ tag) & w.PAST_MASK) == 0:
                weigh_nothing(table, page, row)
            store_release(mark, 0)
            return


@inner
def mark_deleted(table, page, local):
    """Flag a row of a page that is held; False when it is flagged already, or only an observation."""
    row = page * peek_i64(table + w.VIEW_ROWS) + local
    at = peek_i64(table + w.VIEW_META) + w.META_BYTES * row + 8
    while True:
        word = load_acquire(at)
        if (word >> 32) & (w.FINAL | w.DELETED):
            return False
        if compare_and_swap(at, word, word | (w.DELETED << 32)) == word:
            break
    weigh_nothing(table, page, row)
    return True


@inner
def _delete_home(table, page, local, hazard):
    """Flag the row that a deleted one is a copy of, and count it as gone; a row that is no copy is its own.

    A row goes once: whoever flags it where it was written counts it.
    """
    home, at, tag = home_of(table, page, local)
    newly = home == page
    if home >= 0 and home != page:
        state = load_acquire(block_of(table, home) + w.PAGE_STATE)
        if opened_in(table, home) == tag and lease(table, home, state >> w.GENERATION_SHIFT, hazard) >= 0:
            newly = opened_in(table, home) == tag and mark_deleted(table, home, at)
            store_release(hazard, 0)
    if not newly:
        return
    if peek_i64(table + w.VIEW_SAMPLED) == 0 or mark_gone(table, home * peek_i64(table + w.VIEW_ROWS) + at, tag):
        count_gone(table, home, tag)


@inner
def _hold(table, page, generation, hazard):
    """Lease a page if its generation has these low bits and its rows are there; returns its rows, or -1."""
    state = load_acquire(block_of(table, page) + w.PAGE_STATE)
    known = state >> w.GENERATION_SHIFT
    if not has_rows(state) or (known & w.GENERATION_MASK) != generation or not is_present(table, page):
        return -1
    return lease(table, page, known, hazard)


@inner
def _delete_copy(table, page, local, hazard):
    """Flag the copy of a row in the halo of the page that continues its stream."""
    old = block_of(table, page)
    committed = load_acquire(old + w.PAGE_COMMITTED)
    generation = opened_in(table, page)
    for other in range(peek_i64(table + w.VIEW_COUNT)):
        block = block_of(table, other)
        state = load_acquire(block + w.PAGE_STATE)
        if load_relaxed(block + w.PAGE_PREVIOUS) != page + 1 or not has_rows(state):
            continue
        if (load_relaxed(block + w.PAGE_PREVIOUS_GENERATION) ^ generation) & w.PAST_MASK != 0:
            continue
        if lease(table, other, state >> w.GENERATION_SHIFT, hazard) >= 0:
            copy = local - (committed - load_relaxed(block + w.PAGE_HALO))
            if 0 <= copy < peek_i64(table + w.VIEW_ROWS):
                mark_deleted(table, other, copy)
            store_release(hazard, 0)
        return


@inner
def _delete(table, ids, count, hazard, other, seat):
    rows = peek_i64(table + w.VIEW_ROWS)
    done = 0
    fetch_add(seat + w.SEAT_STARTED, 1)
    fence_full()
    for i in range(count):
        key = peek_i64(ids + 8 * i)
        row = key & w.ROW_MASK
        page = row // rows
        if key < 0 or page >= peek_i64(table + w.VIEW_COUNT):
            continue
        committed = _hold(table, page, key >> w.ROW_BITS, hazard)
        if committed < 0:
            continue
        local = row - page * rows
        if local < committed and mark_deleted(table, page, local):
            # behind the flag: a writer that is turning its page sees it, or has opened a page that is seen here
            fence_full()
            if local >= committed - peek_i64(table + w.VIEW_FUTURE) * envs_of(table, page):
                _delete_copy(table, page, local, other)
            _delete_home(table, page, local, other)
            done += 1
        store_release(hazard, 0)
    fetch_add(seat + w.SEAT_ENDED, 1)
    wake(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SPACE)
    return done


@kernel("int64(int64, int64, int64, object)", nogil=True)
def delete(table, ids, count, seat):
    """Delete rows.

    Args:
        table: Table descriptor.
        ids: Row ids, int64 [count].
        count: How many.
        seat: This process's seat (words.PROCESS_*), two of whose hazards are used.

    Returns:
        Rows deleted; not those that have gone before, or never were rows that are drawn. -1 when the hazards are not free, -2 - i
        when id i cannot be of a row of this table: nothing is deleted then.
    """
    foreign = first_foreign(table, ids, count)
    if foreign >= 0:
        return -2 - foreign
    mine = data_of(seat)
    first = take_slot(mine)
    if first < 0:
        return -1
    second = take_slot(mine)
    done = -1
    if second >= 0:
        line = use_seat(table, peek_i64(mine + w.PROCESS_NUMBER))
        done = _delete(table, ids, count, hazard_of(mine, first), hazard_of(mine, second), line)
        give_slot(mine, second)
    give_slot(mine, first)
    return done


@kernel("int64(int64, int64, int64, int64, int64)")
def deleted_rows(table, page, generation, rows, out):
    """Which of a page's first `rows` rows are deleted.

    Args:
        table: Table descriptor.
        page: The page.
        generation: Its generation.
        rows: How many of its rows are asked for, up to all that a page has.
        out: Address of uint32 [ceil(rows of a page / 32)], overwritten: bit i % 32 of word i // 32 is row i's.

    Returns:
        1, or 0 when the page has no rows of that generation any more: what was written says nothing then.
    """
    size = peek_i64(table + w.VIEW_ROWS)
    metas = peek_i64(table + w.VIEW_META) + w.META_BYTES * page * size
    for start in range(0, size, 32):
        bits = 0
        for row in range(start, min(start + 32, rows)):
            bits |= (peek_u32(metas + w.META_BYTES * row + 12) & w.DELETED != 0) << (row - start)
        poke_u32(out + start // 8, bits)
    fence_acquire()
    state = load_relaxed(block_of(table, page) + w.PAGE_STATE)
    return is_of(state, generation) and is_present(table, page)


@kernel("int64(int64, int64, int64, int64)")
def still_valid(table, ids, count, out):
    """Tell which row ids still name the row they were given for: bool [count] at `out`; returns how many do."""
    rows = peek_i64(table + w.VIEW_ROWS)
    good = 0
    for i in range(count):
        key = peek_i64(ids + 8 * i)
        page = (key & w.ROW_MASK) // rows
        valid = False
        if page < peek_i64(table + w.VIEW_COUNT):
            state = load_acquire(block_of(table, page) + w.PAGE_STATE)
            same = ((state >> w.GENERATION_SHIFT) & w.GENERATION_MASK) == (key >> w.ROW_BITS)
            valid = same and has_rows(state) and is_present(table, page)
            word = peek_u32(peek_i64(table + w.VIEW_META) + w.META_BYTES * (key & w.ROW_MASK) + 12)
            valid = valid and word & w.DELETED == 0
        poke_u8(out + i, valid)
        good += valid
    return good


@kernel("int64(int64)")
def reset(table):
    """Let all rows go; returns the number of resets."""
    control = peek_i64(table + w.VIEW_CONTROL)
    before = fetch_add(control + w.TABLE_EPOCH, 2)
    fetch_add(control + w.TABLE_SHRUNK, 1)
    wake(control + w.TABLE_DATA)
    wake(control + w.TABLE_SPACE)
    return (before >> 1) + 1


@kernel("int64(int64, int64)")
def set_frozen(table, frozen):
    """Freeze (1) or thaw (0) a table; whoever waits is told."""
    control = peek_i64(table + w.VIEW_CONTROL)
    while True:
        word = load_acquire(control + w.TABLE_EPOCH)
        if compare_and_swap(control + w.TABLE_EPOCH, word, (word & ~1) | frozen) == word:
            break
    wake(control + w.TABLE_DATA)
    wake(control + w.TABLE_SPACE)
    return word & 1
