"""A writer's next ticks: what is staged for them beside their values, their commit, and what is forgotten where they are given up.

Staged are the observations behind the end of an episode or rollout, in rows at the end of the page (its tail), which grows towards the
ticks. A commit makes them part of the page, writes the ticks' meta and priorities, and makes all visible with one release store,
`store.ingest.page_writer.publish_rows`, at once or as the writer's policy says; the values are in place before. `abort` forgets what was staged.
"""

from __future__ import annotations

from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    data_of,
    load_relaxed,
    peek_i64,
    peek_u8,
    peek_u32,
    poke_i64,
    poke_u32,
    store_relaxed,
    zero_bytes,
)
from conduit.store.format import words as w
from conduit.store.ingest.page_writer import BEYOND, close_page, next_page, page_is_stale, publish_rows, rows_free
from conduit.store.ingest.report_episodes import report_ends
from conduit.store.pages.protocol import side_of
from conduit.store.pages.ragged_values import clear_spans, forget_values, keep_values
from conduit.store.pages.rate_limiter import ask_for_rows, give_back_rows

BEGINS, COMPLETES, MISPLACED, ENDS = 1, 2, 4, 8
"""What a row that is committed does to episodes; MISPLACED: it ends one and cannot."""

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
    table = peek_i64(writer + w.WRITER_TABLE)
    poke_i64(writer + w.WRITER_TAIL, peek_i64(writer + w.WRITER_KEPT))
    poke_i64(writer + w.WRITER_PRIORITIES_GIVEN, 0)
    forget_values(writer)
    if peek_i64(writer + w.WRITER_ENDS) != 0:
        poke_i64(writer + w.WRITER_ENDS, 0)
        store_relaxed(side_of(table, peek_i64(writer + w.WRITER_PAGE)) + w.SIDE_BOOTSTRAP, 0)
    rows = min(rows, rows_free(writer))
    if rows <= 0:
        return
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


@inner
def _step_after(step):
    """Number of the step behind a step: numbers have 31 bits, an endless episode goes on from half of that."""
    return step + 1 if step != w.LAST_STEP else w.AFTER_LAST_STEP


@inner
def _finish_row(meta, terminated, truncated, state, envs, version, next_step, strict, episodes):
    """Write one row's meta from its flags and its environment's state.

    Returns:
        BEGINS if it begins an episode, ENDS if it ends one, COMPLETES if by it an episode's last row is complete, or some of them. MISPLACED, and nothing
        is changed, if it ends an episode that must itself only be closed ("next_step"), or lacks the final observation that the
        writer insists on.
    """
    phase = peek_i64(state)
    if phase == w.RUNNING and (peek_u8(terminated) | peek_u8(truncated)) == 0:
        step = peek_i64(state + 16)
        poke_i64(state + 16, _step_after(step))
        poke_i64(meta, version | (step << 32))
        poke_i64(meta + 8, peek_i64(state + 8) | (envs << (32 + w.LINK_SHIFT)))
        return 0
    does = 0
    flags = 0
    link = envs
    step = peek_i64(state + 16)
    ended = (peek_u8(terminated) != 0) | ((peek_u8(truncated) != 0) << 1)
    if ended != 0 and (
        phase == w.AWAITING_FINAL or (strict != 0 and next_step == 0 and peek_u32(meta + 12) >> w.LINK_SHIFT == 0)
    ):
        return MISPLACED
    if phase == w.AWAITING_FINAL:
        flags = w.FINAL
        link = 0
        does = COMPLETES
        poke_i64(state, w.STARTING)
    else:
        if phase == w.STARTING:
            flags = w.FIRST
            step = 0
            does = BEGINS
            poke_i64(state + 8, episodes & w.EPISODE_MASK)
            poke_i64(state, w.RUNNING)
        poke_i64(state + 16, _step_after(step))
        if ended != 0:
            flags |= ended
            does |= ENDS
            if next_step != 0:
                poke_i64(state, w.AWAITING_FINAL)
            else:
                poke_i64(state, w.STARTING)
                link = peek_u32(meta + 12) >> w.LINK_SHIFT
                if link != 0 or ended & w.TERMINATED:
                    does |= COMPLETES
                if link != 0:
                    flags |= w.KEPT
                    kept = meta + link * w.META_BYTES
                    poke_u32(kept, version)
                    poke_u32(kept + 4, _step_after(step))
                    poke_u32(kept + 8, peek_i64(state + 8))
                    poke_u32(kept + 12, w.FINAL)
    poke_u32(meta, version)
    poke_u32(meta + 4, step)
    poke_u32(meta + 8, peek_i64(state + 8))
    poke_u32(meta + 12, (link << w.LINK_SHIFT) | flags)
    return does


@inner
def _note_complete(writer, metas, local, count):
    """Find the newest complete row of those that end their episodes (PAGE_TAIL), among `count` rows up to local row `local`."""
    next_step = peek_i64(writer + w.WRITER_NEXT_STEP)
    for i in range(count):
        word = peek_u32(metas - w.META_BYTES * (i + 1) + 12)
        if next_step != 0:
            if word & w.FINAL:
                poke_i64(writer + w.WRITER_COMPLETE, local - i - peek_i64(writer + w.WRITER_ENVS))
                return
        elif word & w.KEPT or word & w.TERMINATED:
            poke_i64(writer + w.WRITER_COMPLETE, local - i)
            return


@inner
def _take_back(metas, states, envs, count):
    """Undo `_finish_row` for `count` rows from the first meta on, the last of them first; what was staged for them stays."""
    for back in range(count):
        at = count - 1 - back
        meta, state = metas + w.META_BYTES * at, states + w.ENV_BYTES * (at % envs)
        word = peek_u32(meta + 12)
        if word & w.FIRST:
            poke_i64(state, w.STARTING)
        else:
            poke_i64(state, w.AWAITING_FINAL if word & w.FINAL else w.RUNNING)
            poke_i64(state + 8, peek_u32(meta + 8))
            poke_i64(state + 16, peek_u32(meta + 4))
        poke_i64(meta, 0)
        poke_u32(meta + 8, 0)
        poke_u32(meta + 12, (word >> w.LINK_SHIFT) << w.LINK_SHIFT if word & w.KEPT else 0)


@inner
def _set_priorities(writer, table, row, count):
    """Leaf priorities of rows about to be committed: the caller's, else the largest of late; none for final observations."""
    priorities = peek_i64(table + w.VIEW_PRIORITY)
    metas = peek_i64(table + w.VIEW_META)
    recent = peek_i64(table + w.VIEW_CONTROL) + w.TABLE_RECENT_LEAF
    # before the first update there is no largest priority: 1 then
    new = max(load_relaxed(recent), load_relaxed(recent + 8))
    if new == 0:
        new = 1 << 20
    given = peek_i64(writer + w.WRITER_PRIORITIES_GIVEN)
    for i in range(row, row + count):
        if peek_u32(metas + w.META_BYTES * i + 12) & w.FINAL:
            poke_u32(priorities + 4 * i, 0)
        elif given == 0:
            poke_u32(priorities + 4 * i, new)
    poke_i64(writer + w.WRITER_PRIORITIES_GIVEN, 0)


@inner
def commit_ticks(writer, ticks):
    """Commit as `commit` does."""
    table = peek_i64(writer + w.WRITER_TABLE)
    envs = peek_i64(writer + w.WRITER_ENVS)
    local = peek_i64(writer + w.WRITER_LOCAL)
    row = peek_i64(writer + w.WRITER_BASE) + local
    count = ticks * envs
    meta = peek_i64(table + w.VIEW_META)
    terminated = peek_i64(table + w.VIEW_TERMINATED)
    truncated = peek_i64(table + w.VIEW_TRUNCATED)
    next_step = peek_i64(writer + w.WRITER_NEXT_STEP)
    strict = peek_i64(writer + w.WRITER_STRICT)
    states = peek_i64(writer + w.WRITER_ENV_STATE)
    version = peek_i64(writer + w.WRITER_VERSION)
    episodes = peek_i64(writer + w.WRITER_EPISODES)
    does = 0
    for _ in range(ticks):
        for env in range(envs):
            at, state = meta + row * w.META_BYTES, states + w.ENV_BYTES * env
            done = _finish_row(at, terminated + row, truncated + row, state, envs, version, next_step, strict, episodes)
            if done == MISPLACED:
                first = peek_i64(writer + w.WRITER_BASE) + local
                _take_back(meta + first * w.META_BYTES, states, envs, row - first)
                return -2 - (row - first)
            episodes += done & BEGINS
            does |= done
            row += 1
    if peek_i64(table + w.VIEW_PRIORITY) != 0:
        _set_priorities(writer, table, row - count, count)
    if does & ENDS:
        report_ends(writer, row - count, count)
    local += count
    if does & COMPLETES:
        _note_complete(writer, meta + row * w.META_BYTES, local, count)
    poke_i64(writer + w.WRITER_EPISODES, episodes)
    poke_i64(writer + w.WRITER_LOCAL, local)
    poke_i64(writer + w.WRITER_KEPT, peek_i64(writer + w.WRITER_TAIL))
    if peek_i64(writer + w.WRITER_ARENA_COUNT) != 0:
        keep_values(writer)
    poke_i64(writer + w.WRITER_TICK, peek_i64(writer + w.WRITER_TICK) + ticks)
    counter = peek_i64(writer + w.WRITER_COUNTER)
    store_relaxed(counter, load_relaxed(counter) + count)
    pending = peek_i64(writer + w.WRITER_UNPUBLISHED) + ticks
    poke_i64(writer + w.WRITER_UNPUBLISHED, pending)
    full = rows_free(writer) < envs + peek_i64(writer + w.WRITER_RESERVE)
    if full and peek_i64(writer + w.WRITER_FINISHES) != 0:
        close_page(writer)
    elif full or pending >= peek_i64(writer + w.WRITER_PUBLISH_EVERY):
        publish_rows(writer)
    return -1 if full else row


@kernel("int64(int64, int64)")
def commit(writer, ticks):
    """Make the next `ticks` ticks visible: meta, then one release store of the page's `committed`.

    Returns:
        Physical row of the next tick, or -1 when the page has no room for one more. -2 - k when nothing was committed
        because row k of these (0 for the first) ends its episode and has no final observation staged, or must itself only close
        the episode before ("next_step").
    """
    result = commit_ticks(writer, ticks)
    if result >= -1:
        poke_i64(writer + w.WRITER_BUSY, 0)
        if peek_i64(writer + w.WRITER_ENDS) != 0:
            poke_i64(writer + w.WRITER_ENDS, 0)
            if peek_i64(writer + w.WRITER_FINISHES) != 0:
                close_page(writer)
            else:
                # the page takes no more: whoever turns it finishes it
                publish_rows(writer)
                poke_i64(writer + w.WRITER_LIMIT, peek_i64(writer + w.WRITER_LOCAL))
    return result


@kernel("int64(object)")
def commit_and_turn(state):
    """Commit one tick, and turn to a new page where the old one is full and another can be had at once.

    Returns:
        Physical row of the next tick, or BEYOND when there is none at once (no page free, the limiter's turn, the table reset,
        frozen or closed, or the commit refused): a row behind every table, so that a caller who does not look stores
        nothing instead of something wrong.
    """
    writer = data_of(state)
    # a handle that was closed or dropped has no rows either
    if peek_i64(writer + w.WRITER_BEYOND) != 0 or peek_i64(writer + w.WRITER_BUSY) == 0:
        return BEYOND
    # no page (closed), or a full one behind which no other was free: there is no row that could have been assigned
    left = min(peek_i64(writer + w.WRITER_ROWS) - peek_i64(writer + w.WRITER_KEPT), peek_i64(writer + w.WRITER_LIMIT))
    left -= peek_i64(writer + w.WRITER_LOCAL)
    need = peek_i64(writer + w.WRITER_ENVS) + peek_i64(writer + w.WRITER_RESERVE)
    if peek_i64(writer + w.WRITER_PAGE) < 0 or left < need:
        return BEYOND
    row = commit_ticks(writer, 1)
    if row < -1:
        poke_i64(writer + w.WRITER_REFUSED, -1 - row)
        return BEYOND
    # what may have to wait, or is to be refused, is left to the call that asks for a row
    is_granted = peek_i64(writer + w.WRITER_SEAT) == 0 or ask_for_rows(writer, peek_i64(writer + w.WRITER_ENVS))
    if is_granted and not page_is_stale(writer):
        if row >= 0:
            return row
        if load_relaxed(peek_i64(writer + w.WRITER_CLOSED)) == 0:
            row = next_page(writer)
            if row >= 0:
                return row
    poke_i64(writer + w.WRITER_BEYOND, 1)
    return BEYOND
