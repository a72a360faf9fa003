"""Holds on pages: one compiled call takes a hazard of this process, leases a page and notes both, another one ends it.

`seat` is the process's seat (words.PROCESS_*), `words` are those of the hold (words.HOLD_*); both are arrays.
"""

from __future__ import annotations

from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    compare_and_swap,
    data_of,
    load_acquire,
    load_relaxed,
    peek_i64,
    poke_i64,
    store_release,
)
from conduit.store.format import words as w
from conduit.store.pages.protocol import block_of, end_lease, lease

OVERWRITTEN, NO_SLOT, NO_SEAT, DAMAGED = -1, -2, -3, -4
"""Results of `hold`: the page has no rows of that generation; every hazard is in use; the process has no seat any more;
the page's words cannot be."""


@inner
def take_slot(seat):
    """Number of a hazard that nobody of this process uses, or NO_SLOT; another thread may ask at the same time."""
    for slot in range(w.HAZARDS_PER_PARTICIPANT):
        at = seat + w.PROCESS_SLOTS + 8 * slot
        if load_relaxed(at) == 0 and compare_and_swap(at, 0, 1) == 0:
            return slot
    return NO_SLOT


@inner
def give_slot(seat, slot):
    """Make a hazard available again; nothing is leased by it."""
    store_release(seat + w.PROCESS_SLOTS + 8 * slot, 0)


@inner
def hazard_of(seat, slot):
    """Address of a hazard of this process."""
    return peek_i64(seat + w.PROCESS_HAZARDS) + 8 * slot


@kernel("int64(int64, int64, int64, object, object)")
def hold(table, page, generation, seat, words):
    """Lease a page.

    Args:
        table: Table descriptor.
        page: Page number.
        generation: The generation that is meant, or -1 for the present one.
        seat: This process's seat.
        words: Where the hold is noted.

    Returns:
        Rows committed in the page, or OVERWRITTEN, NO_SLOT, NO_SEAT, DAMAGED: nothing is held then.
    """
    mine, at = data_of(seat), data_of(words)
    block = block_of(table, page)
    known = generation if generation >= 0 else load_acquire(block + w.PAGE_STATE) >> w.GENERATION_SHIFT
    poke_i64(at + w.HOLD_GENERATION, known)
    if peek_i64(mine + w.PROCESS_NUMBER) < 0:
        return NO_SEAT
    slot = take_slot(mine)
    if slot < 0:
        return NO_SLOT
    rows = lease(table, page, known, hazard_of(mine, slot))
    if rows < 0:
        give_slot(mine, slot)
        return OVERWRITTEN
    envs, halo = load_relaxed(block + w.PAGE_ENVS), load_relaxed(block + w.PAGE_HALO)
    most = peek_i64(table + w.VIEW_ROWS)
    if not (1 <= envs <= most and 0 <= halo <= rows and 0 <= load_relaxed(block + w.PAGE_COMMITTED) <= most):
        end_lease(table, hazard_of(mine, slot))
        give_slot(mine, slot)
        return DAMAGED
    poke_i64(at + w.HOLD_TABLE, table)
    poke_i64(at + w.HOLD_ROWS, rows)
    poke_i64(at + w.HOLD_ENVS, envs)
    poke_i64(at + w.HOLD_HALO, halo)
    poke_i64(at + w.HOLD_SLOT, slot + 1)
    return rows


MARK_AT, MARK_HELD = 0, 8
"""Words of a mark: address of the word that names this participant, 1 while it does."""
MARK_WORDS = 2


@kernel("int64(int64, object, object)")
def set_mark(at, words, seat):
    """Have the word at an address name this participant, and note it; the caller knows that it is free."""
    mark = data_of(words)
    store_release(at, peek_i64(data_of(seat) + w.PROCESS_NUMBER) + 1)
    poke_i64(mark + MARK_AT, at)
    poke_i64(mark + MARK_HELD, 1)
    return 0


@kernel("int64(object, object, object)")
def end_mark(words, seat, _thing):
    """Have it name nobody. Idempotent: by then another object of this process may have set it (conduit.native.finish)."""
    mark = data_of(words)
    if peek_i64(mark + MARK_HELD) != 0:
        poke_i64(mark + MARK_HELD, 0)
        number = peek_i64(data_of(seat) + w.PROCESS_NUMBER)
        if number >= 0 and load_relaxed(peek_i64(mark + MARK_AT)) == number + 1:
            store_release(peek_i64(mark + MARK_AT), 0)
    return 0


@inner
def end_hold_at(words, seat):
    """End a hold, by addresses; nothing where there is none."""
    slot = peek_i64(words + w.HOLD_SLOT) - 1
    if slot < 0:
        return
    poke_i64(words + w.HOLD_SLOT, 0)
    if peek_i64(seat + w.PROCESS_NUMBER) < 0:
        return
    end_lease(peek_i64(words + w.HOLD_TABLE), hazard_of(seat, slot))
    give_slot(seat, slot)


@kernel("int64(object, object, object)")
def end_hold(words, seat, _thing):
    """End a hold; whoever waits for a page is told. Idempotent (conduit.native.finish)."""
    end_hold_at(data_of(words), data_of(seat))
    return 0
