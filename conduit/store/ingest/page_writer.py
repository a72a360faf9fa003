"""The page that a writer writes: how much room it has, whether it still counts, how its rows become visible, how it ends and is turned.

At a turn the writer's next page is prepared, gets copies of the last ticks, is opened, and the one before it sealed. The copies (the
halo) let a window that reaches back or ahead of a page be read inside it (docs/design.md).

`writer` is the address of a writer's private state (words.WRITER_*). A tick is one row of each of the writer's N environments;
rows of a tick lie side by side. What a writer does with its page stands on this: store.ingest.commit stages rows and adds ticks,
store.ingest.first_page goes on in a page that a stream ended in.
"""

from __future__ import annotations

from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    compare_and_swap,
    copy_bytes,
    copy_rows,
    data_of,
    fence_full,
    fetch_add,
    load_acquire,
    load_relaxed,
    peek_i64,
    peek_u32,
    poke_i64,
    poke_u32,
    store_relaxed,
    store_release,
    wake,
    zero_bytes,
)
from conduit.store.format import words as w
from conduit.store.ingest.report_episodes import carry, enter_page
from conduit.store.pages.deletion import mark_deleted
from conduit.store.pages.protocol import block_of, claim, free, publish_open, seal, side_of
from conduit.store.pages.ragged_values import copy_values, empty_arenas, keep_values, kept_bytes
from conduit.store.pages.rate_limiter import give_back_rows

BEYOND = 1 << 62
"""A row number behind the end of every table."""


@inner
def publish_rows(writer):
    """Make all that was committed to the writer's page visible, and wake who waits for it."""
    block = peek_i64(writer + w.WRITER_BLOCK)
    store_relaxed(
        block + w.PAGE_TAIL,
        (peek_i64(writer + w.WRITER_COMPLETE) << w.COMPLETE_SHIFT) | peek_i64(writer + w.WRITER_KEPT),
    )
    if peek_i64(writer + w.WRITER_ARENA_COUNT) != 0:
        store_relaxed(block + w.PAGE_ARENA, kept_bytes(writer))
    local = peek_i64(writer + w.WRITER_LOCAL)
    before = load_relaxed(block + w.PAGE_COMMITTED)
    store_release(block + w.PAGE_COMMITTED, local)
    poke_i64(writer + w.WRITER_UNPUBLISHED, 0)
    seat = peek_i64(writer + w.WRITER_SEAT)
    if seat != 0:
        # behind the store: rows that are granted and published count twice for a moment, and never not at all
        poke_i64(writer + w.WRITER_GRANTED, peek_i64(writer + w.WRITER_GRANTED) - (local - before))
        fetch_add(seat + w.SEAT_INSERTED, local - before)
        fence_full()
    table = peek_i64(writer + w.WRITER_TABLE)
    event = peek_i64(table + w.VIEW_CONTROL) + w.TABLE_DATA
    ticks = peek_i64(table + w.VIEW_ROLLOUT)
    if ticks != 0:
        # nobody can claim a part of a rollout; the last commit comes seldom enough for the full form
        if local == ticks * peek_i64(writer + w.WRITER_ENVS):
            wake(event)
    # no fence here: a waiter that comes at this moment is woken by its own short time slice
    elif load_relaxed(event + 8) != 0:
        wake(event)


@kernel("int64(int64)")
def publish(writer):
    """Make everything that was committed visible now, whatever the writer's policy."""
    if peek_i64(writer + w.WRITER_PAGE) >= 0:
        publish_rows(writer)
    return 0


@inner
def close_page(writer):
    """Publish and seal the page of a queue's writer, before there is another: nothing of it is copied into the next."""
    page = peek_i64(writer + w.WRITER_PAGE)
    if page < 0:
        return
    table = peek_i64(writer + w.WRITER_TABLE)
    if peek_i64(writer + w.WRITER_LOCAL) == 0:
        free(table, page)
    else:
        carry(writer)
        publish_rows(writer)
        state = load_relaxed(block_of(table, page) + w.PAGE_STATE)
        seal(table, page, 0)
        poke_i64(writer + w.WRITER_LAST, page + 1)
        poke_i64(writer + w.WRITER_LAST_GENERATION, state >> w.GENERATION_SHIFT)
    poke_i64(writer + w.WRITER_PAGE, -1)


@kernel("int64(int64)")
def finish_page(writer):
    """Publish and seal the page of a queue's writer; its stream goes on in the next one."""
    close_page(writer)
    return 0


@kernel("int64(object, object, object)")
def end(state, seat, _thing):
    """Publish, seal the page and end the stream; what was not committed is gone. Idempotent (conduit.native.finish).

    Args:
        state: The writer's words.
        seat: This process's seat (words.PROCESS_*). Without one the pages are somebody else's to take back.
        _thing: Left alone.
    """
    writer = data_of(state)
    page = peek_i64(writer + w.WRITER_PAGE)
    poke_i64(writer + w.WRITER_BUSY, 0)
    if peek_i64(data_of(seat) + w.PROCESS_NUMBER) >= 0:
        table = peek_i64(writer + w.WRITER_TABLE)
        if page >= 0:
            publish_rows(writer)
        if peek_i64(writer + w.WRITER_SEAT) != 0:
            give_back_rows(writer)
        if page >= 0:
            if peek_i64(writer + w.WRITER_LOCAL) == 0:
                free(table, page)
            else:
                seal(table, page, 1)
    poke_i64(writer + w.WRITER_PAGE, -1)
    return 0


@inner
def page_is_stale(writer):
    """True when the table has been reset or frozen since the writer's page was opened."""
    return load_relaxed(peek_i64(peek_i64(writer + w.WRITER_TABLE) + w.VIEW_CONTROL) + w.TABLE_EPOCH) != peek_i64(
        writer + w.WRITER_EPOCH
    )


@kernel("int64(int64)")
def is_stale(writer):
    """1 when the table has been reset or frozen since the writer's page was opened."""
    return 1 if page_is_stale(writer) else 0


@inner
def rows_free(writer):
    """Rows still free in the page, or -1 without a page."""
    if peek_i64(writer + w.WRITER_PAGE) < 0:
        return -1
    free = peek_i64(writer + w.WRITER_ROWS) - peek_i64(writer + w.WRITER_TAIL)
    return min(free, peek_i64(writer + w.WRITER_LIMIT)) - peek_i64(writer + w.WRITER_LOCAL)


@kernel("int64(int64, int64, int64)")
def fits(writer, rows, tail):
    """1 if the writer's page takes `rows` more rows, of its rollout too, with `tail` more kept observations, else 0."""
    if peek_i64(writer + w.WRITER_PAGE) < 0:
        return 0
    local = peek_i64(writer + w.WRITER_LOCAL) + rows
    limit = peek_i64(writer + w.WRITER_LIMIT) - peek_i64(writer + w.WRITER_RESERVE)
    return (
        1
        if local <= limit and local + tail + peek_i64(writer + w.WRITER_TAIL) <= peek_i64(writer + w.WRITER_ROWS)
        else 0
    )


@inner
def _copy_rows(writer, table, rows, source, destination, count):
    """Copy every column of `count` physical rows to others, and their ragged values to the others' page of `rows` rows."""
    columns = peek_i64(table + w.VIEW_COLUMNS)
    for i in range(peek_i64(table + w.VIEW_COLUMN_COUNT)):
        base = peek_i64(columns + 16 * i)
        size = peek_i64(columns + 16 * i + 8)
        copy_rows(base + destination * size, size, base + source * size, size, count)
    for column in (w.VIEW_TERMINATED, w.VIEW_TRUNCATED):
        base = peek_i64(table + column)
        copy_bytes(base + destination, base + source, count)
    meta = peek_i64(table + w.VIEW_META)
    copy_bytes(meta + destination * w.META_BYTES, meta + source * w.META_BYTES, count * w.META_BYTES)
    if peek_i64(writer + w.WRITER_ARENA_COUNT) != 0:
        for i in range(count):
            copy_values(writer, rows, source + i, destination + i)


@inner
def _copy_halo(writer, table, old_base, old_local, halo, new_base, rows):
    """Copy the last `halo` rows and the kept finals they link to; returns the number of finals."""
    meta = peek_i64(table + w.VIEW_META)
    first = old_base + old_local - halo
    _copy_rows(writer, table, rows, first, new_base, halo)
    tail = 0
    for destination in range(new_base, new_base + halo):
        word = peek_u32(meta + destination * w.META_BYTES + 12)
        if word & w.KEPT:
            tail += 1
            kept = new_base + rows - tail
            final = first + (destination - new_base) + (word >> w.LINK_SHIFT)
            _copy_rows(writer, table, rows, final, kept, 1)
            poke_u32(
                meta + destination * w.META_BYTES + 12, ((kept - destination) << w.LINK_SHIFT) | (word & w.FLAG_MASK)
            )
    return tail


@inner
def _take_over_deletions(table, source, page, halo):
    """Delete copies of rows that were deleted while they were being copied; from now on deleters find the copies themselves."""
    fence_full()
    meta = peek_i64(table + w.VIEW_META)
    for i in range(halo):
        if peek_u32(meta + (source + i) * w.META_BYTES + 12) & w.DELETED:
            mark_deleted(table, page, i)


@inner
def enter(writer, page, local, tail, complete):
    """Have a writer go on in a page of its own that is open: local row of its next tick, rows at the page's end, rows that are complete.

    Returns:
        Physical row of the next tick.
    """
    table = peek_i64(writer + w.WRITER_TABLE)
    rows = peek_i64(table + w.VIEW_ROWS)
    poke_i64(writer + w.WRITER_ROWS, rows)
    poke_i64(writer + w.WRITER_BLOCK, block_of(table, page))
    poke_i64(writer + w.WRITER_BASE, page * rows)
    poke_i64(writer + w.WRITER_LOCAL, local)
    poke_i64(writer + w.WRITER_TAIL, tail)
    poke_i64(writer + w.WRITER_KEPT, tail)
    poke_i64(writer + w.WRITER_COMPLETE, complete)
    poke_i64(writer + w.WRITER_PAGE, page)
    enter_page(writer, local)
    return page * rows + local


@inner
def end_cut_streams(table):
    """Streams that a checkpoint cut have ended from now on: the table is about to be written into (words.PAGE_ENDED).

    Only a restore makes a page CUT, so the swap changes none that another writer has claimed meanwhile.
    """
    left = peek_i64(table + w.VIEW_CONTROL) + w.TABLE_CUT
    if load_relaxed(left) == 0:
        return
    for page in range(peek_i64(table + w.VIEW_COUNT)):
        compare_and_swap(block_of(table, page) + w.PAGE_ENDED, w.CUT, w.ENDED)
    store_release(left, 0)


@inner
def _enter_queue(writer, table, page):
    """What a queue has of a page beside the rest, while the page is prepared: its place in the order, nothing claimed."""
    generation = load_relaxed(block_of(table, page) + w.PAGE_STATE) >> w.GENERATION_SHIFT
    side = side_of(table, page)
    store_relaxed(block_of(table, page) + w.PAGE_AGE, fetch_add(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_TICKET, 1))
    store_relaxed(side + w.SIDE_ACKED, 0)
    store_relaxed(side + w.SIDE_BOOTSTRAP, 0)
    store_release(side + w.SIDE_CLAIM, (generation & w.TAG_MASK) << w.TAG_SHIFT)
    ticks = peek_i64(table + w.VIEW_ROLLOUT)
    if ticks != 0:
        poke_i64(
            writer + w.WRITER_LIMIT, ticks * peek_i64(writer + w.WRITER_ENVS) + peek_i64(writer + w.WRITER_RESERVE)
        )


@kernel("int64(int64, int64)", nogil=True)
def turn(writer, page):
    """Prepare a page that the writer has claimed, open it, and seal the page before it.

    The old page stays open until the new one is: a writer that dies in between leaves both for `recover`, which can tell
    them apart. Flags and meta of the whole page are cleared, so that a field that a caller forgets is never an old flag.
    After a reset of the table nothing is carried over: every environment begins an episode, and the old page ends its stream.

    Returns:
        Physical row of the next tick.
    """
    table = peek_i64(writer + w.WRITER_TABLE)
    old = peek_i64(writer + w.WRITER_PAGE)
    envs = peek_i64(writer + w.WRITER_ENVS)
    rows = peek_i64(table + w.VIEW_ROWS)
    base = page * rows
    block = block_of(table, page)
    # without the bit that says frozen: a writer of a frozen table has to notice
    epoch = load_acquire(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_EPOCH) & ~1
    goes_on = old >= 0 and epoch == peek_i64(writer + w.WRITER_EPOCH)
    poke_i64(writer + w.WRITER_EPOCH, epoch)
    zero_bytes(peek_i64(table + w.VIEW_TERMINATED) + base, rows)
    zero_bytes(peek_i64(table + w.VIEW_TRUNCATED) + base, rows)
    zero_bytes(peek_i64(table + w.VIEW_META) + base * w.META_BYTES, rows * w.META_BYTES)
    generation = load_relaxed(block + w.PAGE_STATE) >> w.GENERATION_SHIFT
    counts = peek_i64(table + w.VIEW_SAMPLED)
    if counts != 0:
        # copies too: no row that moves on to this page has been delivered from the one before (sampling.candidates)
        for row in range(base, base + rows):
            store_relaxed(counts + 8 * row, (generation & w.COUNT_TAG_MASK) << w.COUNT_TAG_SHIFT)
    halo = 0
    tail = 0
    first = 0
    complete = 0
    empty_arenas(writer)
    if old >= 0:
        publish_rows(writer)
    if goes_on:
        carry(writer)
        old_local = peek_i64(writer + w.WRITER_LOCAL)
        history = peek_i64(table + w.VIEW_HISTORY)
        wanted = (history + peek_i64(table + w.VIEW_FUTURE)) * envs
        halo = min(wanted, old_local)
        tail = _copy_halo(writer, table, peek_i64(writer + w.WRITER_BASE), old_local, halo, base, rows)
        # a short old page has its oldest ticks as anchors still: only what lies n before its end moves over
        first = max(0, halo - peek_i64(table + w.VIEW_FUTURE) * envs)
        complete = max(0, peek_i64(writer + w.WRITER_COMPLETE) - (old_local - halo))
        state = load_relaxed(block_of(table, old) + w.PAGE_STATE)
        store_relaxed(block + w.PAGE_PREVIOUS, old + 1)
        store_relaxed(block + w.PAGE_PREVIOUS_GENERATION, state >> w.GENERATION_SHIFT)
    else:
        for env in range(envs if old >= 0 else 0):
            poke_i64(peek_i64(writer + w.WRITER_ENV_STATE) + w.ENV_BYTES * env, w.STARTING)
        store_relaxed(block + w.PAGE_PREVIOUS, peek_i64(writer + w.WRITER_LAST))
        store_relaxed(block + w.PAGE_PREVIOUS_GENERATION, peek_i64(writer + w.WRITER_LAST_GENERATION))
    store_relaxed(block + w.PAGE_ENVS, envs)
    store_relaxed(block + w.PAGE_FIRST, first)
    store_relaxed(block + w.PAGE_ENDED, 0)
    store_relaxed(block + w.PAGE_STREAM, peek_i64(writer + w.WRITER_STREAM))
    store_relaxed(
        block + w.PAGE_TICK, peek_i64(writer + w.WRITER_FIRST_TICK) + peek_i64(writer + w.WRITER_TICK) - halo // envs
    )
    store_relaxed(block + w.PAGE_HALO, halo)
    store_relaxed(block + w.PAGE_TAIL, (complete << w.COMPLETE_SHIFT) | tail)
    store_relaxed(block + w.PAGE_UPDATES, 0)
    store_relaxed(block + w.PAGE_EPOCH, epoch >> 1)
    store_relaxed(peek_i64(table + w.VIEW_SIDES) + w.LINE * page + w.SIDE_GONE, generation & w.PAST_MASK)
    store_relaxed(peek_i64(table + w.VIEW_SIDES) + w.LINE * page + w.SIDE_REOPENED, 0)
    keep_values(writer)
    store_relaxed(block + w.PAGE_ARENA, kept_bytes(writer))
    store_relaxed(block + w.PAGE_COMMITTED, halo)
    poke_i64(writer + w.WRITER_LIMIT, BEYOND)
    if peek_i64(table + w.VIEW_QUEUE) != 0:
        _enter_queue(writer, table, page)
    end_cut_streams(table)
    publish_open(table, page)
    if halo > 0:
        _take_over_deletions(
            table, peek_i64(writer + w.WRITER_BASE) + peek_i64(writer + w.WRITER_LOCAL) - halo, page, halo
        )
    if old >= 0:
        seal(table, old, 0 if goes_on else 1)
    return enter(writer, page, halo, tail, complete)


@inner
def next_page(writer):
    """Claim a page and turn to it; returns the physical row of the next tick, or -1 when no page can be had now."""
    table = peek_i64(writer + w.WRITER_TABLE)
    if peek_i64(table + w.VIEW_QUEUE) != 0:
        close_page(writer)
    page = claim(table, peek_i64(writer + w.WRITER_OWNER), 0)
    return turn(writer, page) if page >= 0 else -1


@kernel("int64(int64)", nogil=True)
def turn_to_next(writer):
    """`next_page`: in one call, so that a page that was claimed is the writer's whatever interrupts its caller."""
    return next_page(writer)
