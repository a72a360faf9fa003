"""What is staged for a writer's uncommitted rows beside their values: observations behind the end of an episode or rollout.

They are kept in rows at the end of the page (its tail), which grows towards the ticks. A commit makes them part of the page;
`abort` forgets them.
"""

from __future__ import annotations

from conduit.native.jit import inner, kernel
from conduit.native.memory import peek_i64, peek_u32, poke_i64, poke_u32, store_relaxed, zero_bytes
from conduit.native.object_args import data_of
from conduit.store.format import words as w
from conduit.store.ingest.page_writer import rows_free
from conduit.store.pages.protocol import side_of
from conduit.store.pages.ragged_values import clear_spans, forget_values
from conduit.store.pages.rate_limiter import give_back_rows

ALL_ROWS = 1 << 40
"""More rows than a page has."""


@inner
def keep_final_row(writer, row, behind):
    """Keep a final observation as `stage_final` does."""
    table = peek_i64(writer + w.WRITER_TABLE)
    word = peek_i64(table + w.VIEW_META) + row * w.META_BYTES + 12
    link = peek_u32(word) >> w.LINK_SHIFT
    if link != 0:
        return row + link
    tail = peek_i64(writer + w.WRITER_TAIL) + 1
    kept = peek_i64(writer + w.WRITER_BASE) + peek_i64(table + w.VIEW_ROWS) - tail
    if kept < behind:
        return -1
    poke_i64(writer + w.WRITER_TAIL, tail)
    clear_spans(writer, kept)
    poke_u32(word, (kept - row) << w.LINK_SHIFT)
    return kept


@kernel("int64(int64, int64, int64)")
def stage_final(writer, row, behind):
    """Reserve a tail row for the final observation of an uncommitted physical row.

    Args:
        writer: Writer state.
        row: Physical row whose episode ends with it.
        behind: Physical row behind those that are being written; the tail stays clear of them.

    Returns:
        Physical row to write the observation to, or -1 when the page has no room for it.
    """
    return keep_final_row(writer, row, behind)


@kernel("int64(int64, int64, int64, int64, int64)")
def stage_finals(writer, first, places, count, behind):
    """Reserve tail rows for the final observations of `count` uncommitted rows that have none yet, side by side.

    Args:
        writer: Writer state.
        first: Physical row that places are counted from.
        places: Address of int64 [count], ascending: the rows whose episodes end.
        count: Rows, at least 1.
        behind: Physical row behind those that are being written.

    Returns:
        Physical row of the last one's observation; those before lie above it, in reverse. -1 when the page has no room.
    """
    kept = -1
    for i in range(count):
        kept = keep_final_row(writer, first + peek_i64(places + 8 * i), behind)
        if kept < 0:
            return -1
    return kept


@kernel("int64(int64, int64)")
def stage_bootstrap(writer, ticks):
    """Reserve tail rows, one for each environment in their order, for the observations behind the next `ticks` ticks.

    Returns:
        Physical row of the first, or -1 when the page has no room for them.
    """
    table = peek_i64(writer + w.WRITER_TABLE)
    envs = peek_i64(writer + w.WRITER_ENVS)
    committed = peek_i64(writer + w.WRITER_LOCAL) + ticks * envs
    kept = peek_i64(writer + w.WRITER_ROWS) - peek_i64(writer + w.WRITER_TAIL) - envs
    if kept < committed:
        return -1
    poke_i64(writer + w.WRITER_ENDS, 1)
    poke_i64(writer + w.WRITER_TAIL, peek_i64(writer + w.WRITER_TAIL) + envs)
    for env in range(envs):
        clear_spans(writer, peek_i64(writer + w.WRITER_BASE) + kept + env)
    store_relaxed(side_of(table, peek_i64(writer + w.WRITER_PAGE)) + w.SIDE_BOOTSTRAP, (committed << 32) | (kept + 1))
    return peek_i64(writer + w.WRITER_BASE) + kept


@inner
def forget_rows(writer, rows):
    """Forget what was staged, as `abort` does."""
    kept = peek_i64(writer + w.WRITER_KEPT)
    poke_i64(writer + w.WRITER_TAIL, kept)
    poke_i64(writer + w.WRITER_PRIORITIES_GIVEN, 0)
    forget_values(writer)
    if peek_i64(writer + w.WRITER_ENDS) != 0:
        poke_i64(writer + w.WRITER_ENDS, 0)
        store_relaxed(
            side_of(peek_i64(writer + w.WRITER_TABLE), peek_i64(writer + w.WRITER_PAGE)) + w.SIDE_BOOTSTRAP, 0
        )
    rows = min(rows, rows_free(writer))
    if rows <= 0:
        return
    table = peek_i64(writer + w.WRITER_TABLE)
    start = peek_i64(writer + w.WRITER_BASE) + peek_i64(writer + w.WRITER_LOCAL)
    zero_bytes(peek_i64(table + w.VIEW_TERMINATED) + start, rows)
    zero_bytes(peek_i64(table + w.VIEW_TRUNCATED) + start, rows)
    zero_bytes(peek_i64(table + w.VIEW_META) + start * w.META_BYTES, rows * w.META_BYTES)


@inner
def _let_go(writer, rows):
    forget_rows(writer, rows)
    if peek_i64(writer + w.WRITER_SEAT) != 0:
        give_back_rows(writer)


@kernel("int64(int64, int64)")
def abort(writer, rows):
    """Forget what was staged for the next `rows` uncommitted rows, and give back what a limiter granted for them.

    The tail shrinks back to what committed rows need.
    """
    _let_go(writer, rows)
    return 0


@kernel("int64(int64, int64)")
def discard(writer, rows):
    """`abort`, after which nothing is in progress."""
    _let_go(writer, rows)
    poke_i64(writer + w.WRITER_BUSY, 0)
    return 0


@kernel("int64(object, object, object)")
def drop(state, number, _thing):
    """`discard` a form of writing, int64 [1] its number, if it still is in progress (conduit.native.finish)."""
    writer = data_of(state)
    if peek_i64(writer + w.WRITER_BUSY) == peek_i64(data_of(number)) and peek_i64(writer + w.WRITER_PAGE) >= 0:
        _let_go(writer, ALL_ROWS)
        poke_i64(writer + w.WRITER_BUSY, 0)
    return 0
