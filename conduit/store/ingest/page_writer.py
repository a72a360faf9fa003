"""The page that a writer writes: how much room it has, whether it still counts, how its rows become visible, how it ends.

`writer` is the address of a writer's private state (words.WRITER_*). A tick is one row of each of the writer's N environments;
rows of a tick lie side by side. What a writer does with its page stands on this: store.ingest.next_page prepares the next one,
store.ingest.final_rows keeps observations that are no rows, store.ingest.commit adds ticks.
"""

from __future__ import annotations

from conduit.native.eventcount import wake
from conduit.native.jit import inner, kernel
from conduit.native.memory import fence_full, fetch_add, load_relaxed, peek_i64, poke_i64, store_relaxed, store_release
from conduit.native.object_args import data_of
from conduit.store.format import words as w
from conduit.store.ingest.report_episodes import carry
from conduit.store.pages.protocol import block_of, free, seal
from conduit.store.pages.ragged_values import kept_bytes
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
