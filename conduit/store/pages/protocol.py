"""The page protocol: claim, open, seal, give back, lease; store.pages.recovery does it for the dead, native.memory.wake is how either side waits.

Invariants (docs/memory-model.md has the argument, tests/store the kill tests):

* A page is owned by exactly one live participant while INIT or OPEN; the owner is part of the word that is swapped, so no
  instant exists at which a page belongs to nobody and cannot be claimed.
* A page under a lease is never handed to a writer.
* Rows below `committed` never change within a generation.

All functions take addresses; `table` is the address of a table descriptor (words.VIEW_*).
"""

from __future__ import annotations

from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    compare_and_swap,
    fence_acquire,
    fence_full,
    fetch_add,
    load_acquire,
    load_relaxed,
    peek_i64,
    peek_u32,
    poke_i64,
    store_relaxed,
    store_release,
    wake,
)
from conduit.store.format import words as w

_NEVER = (1 << 63) - 1
_RESET_FIRST = 1 << 48
"""Taken off the age of a page whose rows went with a reset, so that it is claimed before all others."""


@inner
def block_of(table, page):
    """Address of a page's words."""
    return peek_i64(table + w.VIEW_PAGES) + page * w.LINE


@inner
def side_of(table, page):
    """Address of a page's side line."""
    return peek_i64(table + w.VIEW_SIDES) + page * w.LINE


@inner
def pages_used(table):
    """How many pages, from the first on, may have rows: behind them none has ever been claimed."""
    return min(max(load_acquire(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_USED), 0), peek_i64(table + w.VIEW_COUNT))


@inner
def envs_of(table, page):
    """Rows per tick of a page, from 1 to all of its rows whatever the word says: it may be torn, or damaged."""
    return min(max(load_relaxed(block_of(table, page) + w.PAGE_ENVS), 1), peek_i64(table + w.VIEW_ROWS))


@inner
def has_rows(state):
    """True for the state of a page that rows may be read of."""
    kind = state & w.KIND_MASK
    return kind == w.OPEN or kind == w.SEALED


@inner
def is_of(state, generation):
    """True for the state of a page that rows of that generation may be read of."""
    return (state >> w.GENERATION_SHIFT) == generation and has_rows(state)


@inner
def _weighed(table, page):
    """True while a learner may store a priority of the page."""
    wanted = page + 1
    used = load_acquire(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SEATS)
    for number in range(min(used, peek_i64(table + w.VIEW_SEAT_COUNT))):
        seat = peek_i64(table + w.VIEW_SEATS) + w.LINE * number
        for mark in range(w.WEIGHING_MARKS):
            if load_acquire(seat + w.SEAT_WEIGHING + 8 * mark) == wanted:
                return True
        marks = peek_i64(table + w.VIEW_MARKS) + 4 * w.UPDATING_MARKS * number
        for mark in range(min(load_acquire(seat + w.SEAT_UPDATING), w.UPDATING_MARKS)):
            if peek_u32(marks + 4 * mark) == wanted:
                return True
    return False


@inner
def _leased(table, page):
    hazards = peek_i64(table + w.VIEW_HAZARDS)
    wanted = peek_i64(table + w.VIEW_PAGE_BASE) + page + 1
    for i in range(peek_i64(table + w.VIEW_HAZARD_COUNT)):
        if load_acquire(hazards + 8 * i) == wanted:
            return True
    return peek_i64(table + w.VIEW_MARKS) != 0 and _weighed(table, page)


@inner
def _add_up(table, page, generation):
    """Add the rows of the generations before `generation` to PAGE_PAST, once; the caller holds the page in INIT.

    One store does it, and its low bits say that it is done, so that a repairer of a killed claimer neither adds them
    again nor leaves them out. Afterwards the page's own count may be overwritten.
    """
    block = block_of(table, page)
    past = load_relaxed(block + w.PAGE_PAST)
    if ((past ^ generation) & w.PAST_MASK) == 0:
        return
    rows = max(0, load_acquire(block + w.PAGE_COMMITTED) - load_relaxed(block + w.PAGE_HALO))
    total = (past >> w.PAST_SHIFT) + rows
    store_release(block + w.PAGE_PAST, (total << w.PAST_SHIFT) | (generation & w.PAST_MASK))
    fence_full()
    if rows > 0:
        fetch_add(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SHRUNK, 1)


@inner
def _disown(block):
    """Before a page becomes FREE: it has no rows of its own, so that nobody counts earlier ones again."""
    store_relaxed(block + w.PAGE_HALO, load_relaxed(block + w.PAGE_COMMITTED))


@inner
def _age(table, block):
    """The age of a page that is sealed now."""
    control = peek_i64(table + w.VIEW_CONTROL)
    ticket = fetch_add(control + w.TABLE_TICKET, 1)
    is_present = load_relaxed(block + w.PAGE_EPOCH) == load_acquire(control + w.TABLE_EPOCH) >> 1
    return ticket if is_present else ticket - _RESET_FIRST


@inner
def _wanted(table, page):
    """True for a SEALED page of a queue with rows that are not acknowledged, or that a consumer holds."""
    word = load_acquire(side_of(table, page) + w.SIDE_CLAIM)
    position = (word >> w.POSITION_SHIFT) & w.POSITION_MASK
    return (word & w.CONSUMER_MASK) != 0 or position < load_acquire(block_of(table, page) + w.PAGE_COMMITTED)


@inner
def _count_as_used(table, page):
    """Before a page's first rows are visible, so that whoever sees that there are rows looks at it."""
    at = peek_i64(table + w.VIEW_CONTROL) + w.TABLE_USED
    seen = load_relaxed(at)
    while seen <= page:
        found = compare_and_swap(at, seen, page + 1)
        if found == seen:
            break
        seen = found


@kernel("int64(int64, int64, int64)")
def claim(table, owner, careless):
    """Take a FREE page, or the oldest SEALED one that nobody leases; it is INIT and of a new generation then.

    A table may have pages beside those that its capacity needs, for writers. So that old rows do not stay in these, a SEALED page
    goes first where the others hold VIEW_KEEP rows without it; a FREE one where they do not, or where there is no other. Of a queue only
    pages are taken of which every row is acknowledged.

    Args:
        table: Table descriptor.
        owner: Participant number of the claimer.
        careless: 1 leaves out the look at the leases before the swap, so that tests reach the give-back.

    Returns:
        Page number, or -1 when every page is open or leased, or has rows that are not acknowledged.
    """
    floor = -_NEVER
    queue = peek_i64(table + w.VIEW_QUEUE)
    keep = peek_i64(table + w.VIEW_KEEP)
    while True:
        best = -1
        best_age = _NEVER
        best_state = 0
        free = -1
        free_state = 0
        rows, best_rows = 0, 0
        epoch = load_acquire(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_EPOCH) >> 1
        for page in range(peek_i64(table + w.VIEW_COUNT)):
            block = block_of(table, page)
            state = load_acquire(block + w.PAGE_STATE)
            kind = state & w.KIND_MASK
            if kind == w.FREE:
                # a claimer can die in INIT while a reader still leases the page: FREE pages may be leased too
                if free < 0 and not _leased(table, page):
                    free, free_state = page, state
                    if keep == 0:
                        break
                continue
            own = 0
            if keep != 0 and kind != w.INIT and load_relaxed(block + w.PAGE_EPOCH) == epoch:
                own = max(0, load_relaxed(block + w.PAGE_COMMITTED) - load_relaxed(block + w.PAGE_HALO))
                rows += own
            if kind == w.SEALED and (queue == 0 or not _wanted(table, page)):
                age = load_relaxed(block + w.PAGE_AGE)
                if floor < age < best_age:
                    best, best_state, best_age, best_rows = page, state, age, own
        if free >= 0 and (best < 0 or rows - best_rows < keep or keep == 0):
            best, best_state, best_age = free, free_state, -_NEVER
        if best < 0:
            return -1
        was_free = (best_state & w.KIND_MASK) == w.FREE
        if careless == 0 and not was_free and _leased(table, best):
            floor = best_age
            continue
        block = block_of(table, best)
        generation = (best_state >> w.GENERATION_SHIFT) + 1
        mine = (generation << w.GENERATION_SHIFT) | (owner << w.OWNER_SHIFT) | w.INIT
        if compare_and_swap(block + w.PAGE_STATE, best_state, mine) != best_state:
            continue
        # orders INIT before every later store into the page, and against a lease published at the same moment
        fence_full()
        if _leased(table, best):
            back = w.FREE if was_free else w.SEALED
            store_release(block + w.PAGE_STATE, (generation << w.GENERATION_SHIFT) | back)
            floor = max(floor, best_age)
            continue
        _count_as_used(table, best)
        _add_up(table, best, generation)
        return best


@inner
def publish_open(table, page):
    """INIT to OPEN, once the page's words are prepared."""
    state = load_relaxed(block_of(table, page) + w.PAGE_STATE)
    store_release(block_of(table, page) + w.PAGE_STATE, state - w.INIT + w.OPEN)


@inner
def sealed_word(table, page, state):
    """The state that an OPEN page is sealed with; one that was reopened never gets a word that it had before."""
    reopened = load_relaxed(side_of(table, page) + w.SIDE_REOPENED) & w.OWNER_MASK
    return ((state >> w.GENERATION_SHIFT) << w.GENERATION_SHIFT) | (reopened << w.OWNER_SHIFT) | w.SEALED


@kernel("int64(int64, int64, int64)")
def seal(table, page, ended):
    """Finish an OPEN page of the caller; `ended` says that its stream goes on in no other page."""
    block = block_of(table, page)
    control = peek_i64(table + w.VIEW_CONTROL)
    state = load_relaxed(block + w.PAGE_STATE)
    store_relaxed(block + w.PAGE_ENDED, ended)
    if peek_i64(table + w.VIEW_QUEUE) == 0:
        store_relaxed(block + w.PAGE_AGE, _age(table, block))
    store_release(block + w.PAGE_STATE, sealed_word(table, page, state))
    wake(control + w.TABLE_DATA)
    wake(control + w.TABLE_SPACE)
    return 0


@kernel("int64(int64, int64)")
def free(table, page):
    """Give back an INIT or OPEN page of the caller that holds no rows of its own."""
    block = block_of(table, page)
    state = load_relaxed(block + w.PAGE_STATE)
    _disown(block)
    store_release(block + w.PAGE_STATE, ((state >> w.GENERATION_SHIFT) << w.GENERATION_SHIFT) | w.FREE)
    wake(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SPACE)
    return 0


@inner
def returned_until(side, tag):
    """Local row up to which rows of the generation with this tag have been claimed and given back."""
    word = load_relaxed(side + w.SIDE_RETURNED)
    return (word >> w.POSITION_SHIFT) & w.POSITION_MASK if (word >> w.TAG_SHIFT) == tag else 0


@inner
def end_claim(table, page, word):
    """Give back what a consumer has claimed of a queue's page and not acknowledged; returns 1 if `word` was its claim still."""
    side = side_of(table, page)
    position = (word >> w.POSITION_SHIFT) & w.POSITION_MASK
    if returned_until(side, word >> w.TAG_SHIFT) < position:
        store_relaxed(side + w.SIDE_RETURNED, word)
    back = word - (word & w.CONSUMER_MASK) - (position << w.POSITION_SHIFT)
    back |= load_acquire(side + w.SIDE_ACKED) << w.POSITION_SHIFT
    return 1 if compare_and_swap(side + w.SIDE_CLAIM, word, back) == word else 0


@kernel("int64(int64, int64, int64, int64)")
def lease(table, page, generation, hazard):
    """Publish a hazard on a page, then check that it still is of that generation.

    Returns:
        Rows committed in the page (at least 0), or -1 when the page is of another generation: nothing is leased then.
    """
    store_relaxed(hazard, peek_i64(table + w.VIEW_PAGE_BASE) + page + 1)
    fence_full()
    block = block_of(table, page)
    if is_of(load_acquire(block + w.PAGE_STATE), generation):
        return min(max(load_acquire(block + w.PAGE_COMMITTED), 0), peek_i64(table + w.VIEW_ROWS))
    store_release(hazard, 0)
    return -1


@kernel("int64(int64, int64)")
def end_lease(table, hazard):
    """Take the hazard back; whoever waits for a page is told."""
    store_release(hazard, 0)
    wake(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SPACE)
    return 0


@kernel("int64(int64, int64)")
def copy_words(table, out):
    """Copy every page's words to int64 [pages, 16] at `out`, state first; for status screens and tests."""
    count = peek_i64(table + w.VIEW_COUNT)
    for page in range(count):
        block = block_of(table, page)
        for i in range(w.LINE // 8):
            poke_i64(out + w.LINE * page + 8 * i, load_acquire(block + 8 * i))
    fence_acquire()
    return count


@kernel("int64(int64)")
def take_ticket(address):
    """Add 1 to the word at `address`; returns its value before."""
    return fetch_add(address, 1)


@kernel("int64(int64)")
def load(address):
    """Acquire load of a word."""
    return load_acquire(address)


@kernel("int64(int64)")
def load_after(address):
    """Load of a word that is not moved before any load that stands above it: the check after an optimistic copy."""
    fence_acquire()
    return load_relaxed(address)


@kernel("int64(int64)")
def begin_copy(version):
    """Mark a weights copy as being written (version -1), before any store into it."""
    store_relaxed(version, -1)
    fence_full()
    return 0


@kernel("int64(int64, int64, int64)")
def finish_copy(version, latest, value):
    """Give a written weights copy its version, then make it the latest and tell who waits for it."""
    store_release(version, value)
    store_release(latest, value)
    wake(latest + w.POLICY_EVENT)
    return 0
