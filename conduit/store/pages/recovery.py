"""What becomes of a participant's pages, claims, leases and marks when it is dead; the caller holds its liveness lock.

Every repair is one atomic step, so a repairer that dies is repaired by the next one.
"""

from __future__ import annotations

from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    compare_and_swap,
    fetch_add,
    load_acquire,
    load_relaxed,
    peek_i64,
    store_relaxed,
    store_release,
    wake,
)
from conduit.store.format import words as w
from conduit.store.pages.protocol import _add_up, _age, _disown, block_of, end_claim, sealed_word, side_of


@inner
def _has_elder(table, page, owner):
    """True when the same owner still has an earlier OPEN page of this page's stream."""
    block = block_of(table, page)
    for other in range(peek_i64(table + w.VIEW_COUNT)):
        state = load_acquire(block_of(table, other) + w.PAGE_STATE)
        if (
            other != page
            and (state & w.KIND_MASK) == w.OPEN
            and ((state >> w.OWNER_SHIFT) & w.OWNER_MASK) == owner
            and load_relaxed(block_of(table, other) + w.PAGE_STREAM) == load_relaxed(block + w.PAGE_STREAM)
            and load_relaxed(block_of(table, other) + w.PAGE_TICK) < load_relaxed(block + w.PAGE_TICK)
        ):
            return True
    return False


@inner
def _end_claims(table, owner):
    """Give back every claim of a dead consumer; returns their number."""
    ended = 0
    for page in range(peek_i64(table + w.VIEW_COUNT)):
        word = load_acquire(side_of(table, page) + w.SIDE_CLAIM)
        if (word & w.CONSUMER_MASK) == owner + 1:
            ended += end_claim(table, page, word)
    return ended


@kernel("int64(int64, int64)")
def recover(table, owner):
    """Take back the pages and a queue's claims of a participant that is dead; the caller holds its liveness lock.

    INIT pages become FREE. An OPEN page with rows of its own becomes SEALED and ends its stream. An OPEN page that holds
    no more than its halo becomes FREE when the page before it is still OPEN (the writer died between the two), so that
    the stream ends there. Youngest pages go first: repeating the whole after a repairer's death gives the same result.

    Returns:
        Number of pages taken back.
    """
    control = peek_i64(table + w.VIEW_CONTROL)
    taken = 0
    for sweep in range(2):
        for page in range(peek_i64(table + w.VIEW_COUNT)):
            block = block_of(table, page)
            state = load_acquire(block + w.PAGE_STATE)
            kind = state & w.KIND_MASK
            if (kind != w.INIT and kind != w.OPEN) or ((state >> w.OWNER_SHIFT) & w.OWNER_MASK) != owner:
                continue
            bare = (state >> w.GENERATION_SHIFT) << w.GENERATION_SHIFT
            if kind == w.INIT:
                _add_up(table, page, state >> w.GENERATION_SHIFT)
                _disown(block)
                compare_and_swap(block + w.PAGE_STATE, state, bare | w.FREE)
                taken += 1
                continue
            committed = load_acquire(block + w.PAGE_COMMITTED)
            own = committed - load_relaxed(block + w.PAGE_HALO)
            if committed == 0 or (own <= 0 and _has_elder(table, page, owner)):
                compare_and_swap(block + w.PAGE_STATE, state, bare | w.FREE)
                taken += 1
            elif sweep == 1:
                store_relaxed(block + w.PAGE_ENDED, 1)
                if peek_i64(table + w.VIEW_QUEUE) == 0:
                    store_relaxed(block + w.PAGE_AGE, _age(table, block))
                compare_and_swap(block + w.PAGE_STATE, state, sealed_word(table, page, state))
                taken += 1
    ended = _end_claims(table, owner) if peek_i64(table + w.VIEW_QUEUE) != 0 else 0
    if ended > 0:
        fetch_add(control + w.TABLE_DELIVERED_AGAIN, ended)
    if owner >= peek_i64(table + w.VIEW_SEAT_COUNT):
        # of an engine that had more seats (a checkpoint), or of a damaged word
        return taken
    for mark in range(w.SEAT_WEIGHING, w.LINE, 8):
        store_release(peek_i64(table + w.VIEW_SEATS) + w.LINE * owner + mark, 0)
    # what it had been granted and had not used is given back
    seat = peek_i64(table + w.VIEW_SEATS) + w.LINE * owner
    started = load_relaxed(seat + w.SEAT_STARTED)
    if load_relaxed(seat + w.SEAT_ENDED) != started:
        # first the mark: a repairer that dies in between leaves it to the next one
        fetch_add(control + w.TABLE_UNSETTLED, 1)
        store_release(seat + w.SEAT_ENDED, started)
    unused = load_relaxed(seat + w.SEAT_RESERVED) - load_relaxed(seat + w.SEAT_DELIVERED)
    unused += load_relaxed(seat + w.SEAT_GRANTED) - load_relaxed(seat + w.SEAT_INSERTED)
    store_relaxed(seat + w.SEAT_RESERVED, load_relaxed(seat + w.SEAT_DELIVERED))
    store_relaxed(seat + w.SEAT_GRANTED, load_relaxed(seat + w.SEAT_INSERTED))
    if taken > 0:
        fetch_add(control + w.TABLE_RECOVERED, taken)
    if taken > 0 or ended > 0 or unused != 0:
        wake(control + w.TABLE_DATA)
        wake(control + w.TABLE_SPACE)
    return taken


@kernel("int64(int64)")
def outdate_sums(table):
    """Let every learner sum its leaf priorities anew, in a table that has some: a dead one may have stored leaves uncounted.

    Its stores came before its death, so whoever acquires the raised counts sees them. To raise them again costs the same
    sums once more.
    """
    if peek_i64(table + w.VIEW_PRIORITY) != 0:
        for page in range(peek_i64(table + w.VIEW_COUNT)):
            fetch_add(block_of(table, page) + w.PAGE_UPDATES, 1)
    return 0


@kernel("int64(int64, int64)")
def clear_hazards(hazards, count):
    """End every lease in `count` hazard slots of a dead participant."""
    for i in range(count):
        store_release(hazards + 8 * i, 0)
    return 0


@kernel("int64(int64, int64, int64, int64)")
def clear_marks(marks, stride, count, mark):
    """Set to 0 those of `count` words, `stride` bytes apart, that are `mark`; others may store theirs meanwhile."""
    for i in range(count):
        compare_and_swap(marks + stride * i, mark, 0)
    return 0
