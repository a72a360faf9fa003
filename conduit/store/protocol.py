"""The page protocol: claim, seal, give back, lease, recover, and the wait for either side.

Invariants (docs/memory-model.md has the argument, tests/store the kill tests):

* A page is owned by exactly one live participant while INIT or OPEN; the owner is part of the word that is swapped, so no
  instant exists at which a page belongs to nobody and cannot be claimed.
* A page under a lease is never handed to a writer.
* Rows below `committed` never change within a generation.
* Every repair is one atomic step, so a repairer that dies is repaired by the next one.

All functions take addresses; `table` is the address of a table descriptor (words.T_*).
"""

from __future__ import annotations

from conduit.jit import inner, kernel
from conduit.store.atomics import (
    FUTEX,
    compare_and_swap,
    exchange,
    fence_acquire,
    fence_full,
    fetch_add,
    load_acquire,
    load_relaxed,
    peek_i64,
    poke_i64,
    store_relaxed,
    store_release,
    syscall,
)
from conduit.store.words import (
    CONSUMER_MASK,
    FREE,
    GENERATION_SHIFT,
    INIT,
    KIND_MASK,
    LINE,
    OPEN,
    OWNER_MASK,
    OWNER_SHIFT,
    PAGE_AGE,
    PAGE_COMMITTED,
    PAGE_ENDED,
    PAGE_HALO,
    PAGE_STATE,
    PAGE_STREAM,
    PAGE_TICK,
    PAGE_UPDATES,
    POLICY_EVENT,
    POSITION_MASK,
    POSITION_SHIFT,
    SEALED,
    SIDE_ACKED,
    SIDE_CLAIM,
    SIDE_RETURNED,
    T_CONTROL,
    T_COUNT,
    T_HAZARD_COUNT,
    T_HAZARDS,
    T_PAGE_BASE,
    T_PAGES,
    T_PRIORITY,
    T_QUEUE,
    T_SIDES,
    TABLE_DATA,
    TABLE_DELIVERED_AGAIN,
    TABLE_EVICTED_ROWS,
    TABLE_RECOVERED,
    TABLE_SEALED_ROWS,
    TABLE_SPACE,
    TABLE_TICKET,
    TAG_SHIFT,
)

_NEVER = (1 << 63) - 1
_WAIT, _WAKE = 0, 1
_ALL = 1 << 30


@inner
def block_of(table, page):  # type: ignore[no-untyped-def]
    """Address of a page's words."""
    return peek_i64(table + T_PAGES) + page * LINE


@inner
def side_of(table, page):  # type: ignore[no-untyped-def]
    """Address of a page's side line."""
    return peek_i64(table + T_SIDES) + page * LINE


@inner
def wake(event):  # type: ignore[no-untyped-def]
    """Tell every waiter of an eventcount that something changed; no system call when nobody waits."""
    fetch_add(event, 1)
    fence_full()
    if load_relaxed(event + 8) != 0 and exchange(event + 8, 0) != 0:
        syscall(FUTEX, event, _WAKE, _ALL, 0, 0, 0)


@kernel("int64(int64)")
def announce(event):  # type: ignore[no-untyped-def]
    """Say that somebody is about to wait; before the look at the condition, so that what comes after it wakes us."""
    store_relaxed(event + 8, 1)
    fence_full()
    return 0


@kernel("int64(int64, int64, int64)", nogil=True)
def wait(event, seen, timespec):  # type: ignore[no-untyped-def]
    """Sleep until the eventcount moves on from `seen` or the time is over; wakes early without harm.

    Args:
        event: Address of the eventcount.
        seen: Its value before the caller looked at the condition it waits for.
        timespec: Address of int64 [2]: seconds, nanoseconds.
    """
    if load_acquire(event) != seen:
        return 0
    return syscall(FUTEX, event, _WAIT, seen & 0xFFFFFFFF, timespec, 0, 0)


@inner
def _leased(table, page):  # type: ignore[no-untyped-def]
    hazards = peek_i64(table + T_HAZARDS)
    wanted = peek_i64(table + T_PAGE_BASE) + page + 1
    for i in range(peek_i64(table + T_HAZARD_COUNT)):
        if load_acquire(hazards + 8 * i) == wanted:
            return True
    return False


@inner
def _wanted(table, page):  # type: ignore[no-untyped-def]
    """True for a SEALED page of a queue with rows that are not acknowledged, or that a consumer holds."""
    word = load_acquire(side_of(table, page) + SIDE_CLAIM)
    position = (word >> POSITION_SHIFT) & POSITION_MASK
    return (word & CONSUMER_MASK) != 0 or position < load_acquire(block_of(table, page) + PAGE_COMMITTED)


@kernel("int64(int64, int64, int64)")
def claim(table, owner, careless):  # type: ignore[no-untyped-def]
    """Take a FREE page, else the oldest SEALED one that nobody leases; it is INIT and of a new generation then.

    Of a queue only pages are taken of which every row is acknowledged.

    Args:
        table: Table descriptor.
        owner: Participant number of the claimer.
        careless: 1 leaves out the look at the leases before the swap, so that tests reach the give-back.

    Returns:
        Page number, or -1 when every page is open or leased, or has rows that are not acknowledged.
    """
    floor = -1
    queue = peek_i64(table + T_QUEUE)
    while True:
        best = -1
        best_age = _NEVER
        best_state = 0
        for page in range(peek_i64(table + T_COUNT)):
            state = load_acquire(block_of(table, page) + PAGE_STATE)
            kind = state & KIND_MASK
            if kind == FREE:
                # a claimer can die in INIT while a reader still leases the page: FREE pages may be leased too
                if _leased(table, page):
                    continue
                best, best_state, best_age = page, state, -1
                break
            if kind == SEALED and (queue == 0 or not _wanted(table, page)):
                age = load_relaxed(block_of(table, page) + PAGE_AGE)
                if floor < age < best_age:
                    best, best_state, best_age = page, state, age
        if best < 0:
            return -1
        if careless == 0 and best_age >= 0 and _leased(table, best):
            floor = best_age
            continue
        block = block_of(table, best)
        generation = (best_state >> GENERATION_SHIFT) + 1
        mine = (generation << GENERATION_SHIFT) | (owner << OWNER_SHIFT) | INIT
        if compare_and_swap(block + PAGE_STATE, best_state, mine) != best_state:
            continue
        # orders INIT before every later store into the page, and against a lease published at the same moment
        fence_full()
        if _leased(table, best):
            back = SEALED if best_age >= 0 else FREE
            store_release(block + PAGE_STATE, (generation << GENERATION_SHIFT) | back)
            floor = max(floor, best_age)
            continue
        if best_age >= 0:
            rows = load_relaxed(block + PAGE_COMMITTED) - load_relaxed(block + PAGE_HALO)
            fetch_add(peek_i64(table + T_CONTROL) + TABLE_EVICTED_ROWS, rows)
        return best


@inner
def publish_open(table, page):  # type: ignore[no-untyped-def]
    """INIT to OPEN, once the page's words are prepared."""
    state = load_relaxed(block_of(table, page) + PAGE_STATE)
    store_release(block_of(table, page) + PAGE_STATE, state - INIT + OPEN)


@kernel("int64(int64, int64, int64)")
def seal(table, page, ended):  # type: ignore[no-untyped-def]
    """Finish an OPEN page of the caller; `ended` says that its stream goes on in no other page."""
    block = block_of(table, page)
    control = peek_i64(table + T_CONTROL)
    state = load_relaxed(block + PAGE_STATE)
    store_relaxed(block + PAGE_ENDED, ended)
    if peek_i64(table + T_QUEUE) == 0:
        store_relaxed(block + PAGE_AGE, fetch_add(control + TABLE_TICKET, 1))
    fetch_add(control + TABLE_SEALED_ROWS, load_relaxed(block + PAGE_COMMITTED) - load_relaxed(block + PAGE_HALO))
    store_release(block + PAGE_STATE, ((state >> GENERATION_SHIFT) << GENERATION_SHIFT) | SEALED)
    wake(control + TABLE_DATA)
    wake(control + TABLE_SPACE)
    return 0


@kernel("int64(int64, int64)")
def free(table, page):  # type: ignore[no-untyped-def]
    """Give back an INIT or OPEN page of the caller that holds no rows of its own."""
    block = block_of(table, page)
    state = load_relaxed(block + PAGE_STATE)
    store_release(block + PAGE_STATE, ((state >> GENERATION_SHIFT) << GENERATION_SHIFT) | FREE)
    wake(peek_i64(table + T_CONTROL) + TABLE_SPACE)
    return 0


@inner
def _has_elder(table, page, owner):  # type: ignore[no-untyped-def]
    """True when the same owner still has an earlier OPEN page of this page's stream."""
    block = block_of(table, page)
    for other in range(peek_i64(table + T_COUNT)):
        state = load_acquire(block_of(table, other) + PAGE_STATE)
        if (
            other != page
            and (state & KIND_MASK) == OPEN
            and ((state >> OWNER_SHIFT) & OWNER_MASK) == owner
            and load_relaxed(block_of(table, other) + PAGE_STREAM) == load_relaxed(block + PAGE_STREAM)
            and load_relaxed(block_of(table, other) + PAGE_TICK) < load_relaxed(block + PAGE_TICK)
        ):
            return True
    return False


@inner
def returned_until(side, tag):  # type: ignore[no-untyped-def]
    """Local row up to which rows of the generation with this tag have been claimed and given back."""
    word = load_relaxed(side + SIDE_RETURNED)
    return (word >> POSITION_SHIFT) & POSITION_MASK if (word >> TAG_SHIFT) == tag else 0


@inner
def end_claim(table, page, word):  # type: ignore[no-untyped-def]
    """Give back what a consumer has claimed of a queue's page and not acknowledged; returns 1 if `word` was its claim still."""
    side = side_of(table, page)
    position = (word >> POSITION_SHIFT) & POSITION_MASK
    if returned_until(side, word >> TAG_SHIFT) < position:
        store_relaxed(side + SIDE_RETURNED, word)
    back = word - (word & CONSUMER_MASK) - (position << POSITION_SHIFT)
    back |= load_acquire(side + SIDE_ACKED) << POSITION_SHIFT
    return 1 if compare_and_swap(side + SIDE_CLAIM, word, back) == word else 0


@inner
def _end_claims(table, owner):  # type: ignore[no-untyped-def]
    """Give back every claim of a dead consumer; returns their number."""
    ended = 0
    for page in range(peek_i64(table + T_COUNT)):
        word = load_acquire(side_of(table, page) + SIDE_CLAIM)
        if (word & CONSUMER_MASK) == owner + 1:
            ended += end_claim(table, page, word)
    return ended


@kernel("int64(int64, int64)")
def recover(table, owner):  # type: ignore[no-untyped-def]
    """Take back the pages and a queue's claims of a participant that is dead; the caller holds its liveness lock.

    INIT pages become FREE. An OPEN page with rows of its own becomes SEALED and ends its stream. An OPEN page that holds
    no more than its halo becomes FREE when the page before it is still OPEN (the writer died between the two), so that
    the stream ends there. Youngest pages go first: repeating the whole after a repairer's death gives the same result.

    Returns:
        Number of pages taken back.
    """
    control = peek_i64(table + T_CONTROL)
    taken = 0
    for sweep in range(2):
        for page in range(peek_i64(table + T_COUNT)):
            block = block_of(table, page)
            state = load_acquire(block + PAGE_STATE)
            kind = state & KIND_MASK
            if (kind != INIT and kind != OPEN) or ((state >> OWNER_SHIFT) & OWNER_MASK) != owner:
                continue
            bare = (state >> GENERATION_SHIFT) << GENERATION_SHIFT
            if kind == INIT:
                compare_and_swap(block + PAGE_STATE, state, bare | FREE)
                taken += 1
                continue
            committed = load_acquire(block + PAGE_COMMITTED)
            own = committed - load_relaxed(block + PAGE_HALO)
            if committed == 0 or (own <= 0 and _has_elder(table, page, owner)):
                compare_and_swap(block + PAGE_STATE, state, bare | FREE)
                taken += 1
            elif sweep == 1:
                store_relaxed(block + PAGE_ENDED, 1)
                if peek_i64(table + T_QUEUE) == 0:
                    store_relaxed(block + PAGE_AGE, fetch_add(control + TABLE_TICKET, 1))
                if compare_and_swap(block + PAGE_STATE, state, bare | SEALED) == state:
                    fetch_add(control + TABLE_SEALED_ROWS, own)
                taken += 1
    ended = _end_claims(table, owner) if peek_i64(table + T_QUEUE) != 0 else 0
    if ended > 0:
        fetch_add(control + TABLE_DELIVERED_AGAIN, ended)
    if taken > 0:
        fetch_add(control + TABLE_RECOVERED, taken)
    if taken > 0 or ended > 0:
        wake(control + TABLE_DATA)
        wake(control + TABLE_SPACE)
    return taken


@kernel("int64(int64)")
def outdate_sums(table):  # type: ignore[no-untyped-def]
    """Let every learner sum its leaf priorities anew, in a table that has some: a dead one may have stored leaves uncounted.

    Its stores came before its death, so whoever acquires the raised counts sees them. To raise them again costs the same
    sums once more.
    """
    if peek_i64(table + T_PRIORITY) != 0:
        for page in range(peek_i64(table + T_COUNT)):
            fetch_add(block_of(table, page) + PAGE_UPDATES, 1)
    return 0


@kernel("int64(int64, int64)")
def clear_hazards(hazards, count):  # type: ignore[no-untyped-def]
    """End every lease in `count` hazard slots of a dead participant."""
    for i in range(count):
        store_release(hazards + 8 * i, 0)
    return 0


@kernel("int64(int64, int64, int64, int64)")
def clear_marks(marks, stride, count, mark):  # type: ignore[no-untyped-def]
    """Set to 0 those of `count` words, `stride` bytes apart, that are `mark`; others may store theirs meanwhile."""
    for i in range(count):
        compare_and_swap(marks + stride * i, mark, 0)
    return 0


@kernel("int64(int64, int64, int64, int64)")
def lease(table, page, generation, hazard):  # type: ignore[no-untyped-def]
    """Publish a hazard on a page, then check that it still is of that generation.

    Returns:
        Rows committed in the page (at least 0), or -1 when the page is of another generation: nothing is leased then.
    """
    store_relaxed(hazard, peek_i64(table + T_PAGE_BASE) + page + 1)
    fence_full()
    block = block_of(table, page)
    state = load_acquire(block + PAGE_STATE)
    kind = state & KIND_MASK
    if (state >> GENERATION_SHIFT) == generation and (kind == OPEN or kind == SEALED):
        return load_acquire(block + PAGE_COMMITTED)
    store_release(hazard, 0)
    return -1


@kernel("int64(int64, int64)")
def end_lease(table, hazard):  # type: ignore[no-untyped-def]
    """Take the hazard back; whoever waits for a page is told."""
    store_release(hazard, 0)
    wake(peek_i64(table + T_CONTROL) + TABLE_SPACE)
    return 0


@kernel("int64(int64, int64)")
def copy_words(table, out):  # type: ignore[no-untyped-def]
    """Copy every page's words to int64 [pages, 16] at `out`, state first; for status screens and tests."""
    count = peek_i64(table + T_COUNT)
    for page in range(count):
        block = block_of(table, page)
        for i in range(LINE // 8):
            poke_i64(out + LINE * page + 8 * i, load_acquire(block + 8 * i))
    fence_acquire()
    return count


@kernel("int64(int64)")
def take_ticket(address):  # type: ignore[no-untyped-def]
    """Add 1 to the word at `address`; returns its value before."""
    return fetch_add(address, 1)


@kernel("int64(int64)")
def load(address):  # type: ignore[no-untyped-def]
    """Acquire load of a word."""
    return load_acquire(address)


@kernel("int64(int64)")
def load_after(address):  # type: ignore[no-untyped-def]
    """Load of a word that is not moved before any load that stands above it: the check after an optimistic copy."""
    fence_acquire()
    return load_relaxed(address)


@kernel("int64(int64)")
def begin_copy(version):  # type: ignore[no-untyped-def]
    """Mark a weights copy as being written (version -1), before any store into it."""
    store_relaxed(version, -1)
    fence_full()
    return 0


@kernel("int64(int64, int64, int64)")
def finish_copy(version, latest, value):  # type: ignore[no-untyped-def]
    """Give a written weights copy its version, then make it the latest and tell who waits for it."""
    store_release(version, value)
    store_release(latest, value)
    wake(latest + POLICY_EVENT)
    return 0
