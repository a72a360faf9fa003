"""What a writer does with its pages: turn to a new one, stage final observations, commit ticks, abort.

`writer` is the address of a writer's private state (words.W_*). A tick is one row of each of the writer's N environments;
rows of a tick lie side by side. Committing is one release store after the rows and their meta are in place.
"""

from __future__ import annotations

from numba import types

from conduit.jit import inner, kernel
from conduit.store.arguments import ObjectType, data_of
from conduit.store.atomics import (
    copy_bytes,
    fetch_add,
    load_relaxed,
    peek_i64,
    peek_u8,
    peek_u32,
    poke_i64,
    poke_u8,
    poke_u32,
    store_relaxed,
    store_release,
    zero_bytes,
)
from conduit.store.protocol import block_of, claim, free, publish_open, seal, side_of, wake
from conduit.store.spans import clear_spans, copy_values, empty_arenas, forget_values, keep_values, kept_bytes
from conduit.store.words import (
    AWAITING_FINAL,
    FINAL,
    FIRST,
    FLAG_MASK,
    GENERATION_SHIFT,
    KEPT,
    LINK_SHIFT,
    META_BYTES,
    PAGE_AGE,
    PAGE_ARENA,
    PAGE_COMMITTED,
    PAGE_ENDED,
    PAGE_ENVS,
    PAGE_FIRST,
    PAGE_HALO,
    PAGE_PREVIOUS,
    PAGE_PREVIOUS_GENERATION,
    PAGE_STATE,
    PAGE_STREAM,
    PAGE_TAIL,
    PAGE_TICK,
    PAGE_UPDATES,
    RUNNING,
    SIDE_ACKED,
    SIDE_BOOTSTRAP,
    SIDE_CLAIM,
    STARTING,
    T_COLUMN_COUNT,
    T_COLUMNS,
    T_CONTROL,
    T_FUTURE,
    T_HISTORY,
    T_META,
    T_PRIORITY,
    T_QUEUE,
    T_ROLLOUT,
    T_ROWS,
    T_TERMINATED,
    T_TRUNCATED,
    TABLE_DATA,
    TABLE_RECENT_LEAF,
    TABLE_TICKET,
    TAG_MASK,
    TAG_SHIFT,
    W_ARENA_COUNT,
    W_BASE,
    W_BLOCK,
    W_CLOSED,
    W_COUNTER,
    W_ENV_STATE,
    W_ENVS,
    W_EPISODES,
    W_KEPT,
    W_LAST,
    W_LAST_GENERATION,
    W_LIMIT,
    W_LOCAL,
    W_NEXT_STEP,
    W_OWNER,
    W_PAGE,
    W_PRIORITIES_GIVEN,
    W_PUBLISH_EVERY,
    W_REFUSED,
    W_RESERVE,
    W_ROWS,
    W_STREAM,
    W_STRICT,
    W_TABLE,
    W_TAIL,
    W_TICK,
    W_UNPUBLISHED,
    W_VERSION,
)

_ENV_BYTES = 24

BEYOND = 1 << 62
"""A row number behind the end of every table."""


@inner
def _copy_row(writer, table, rows, source, destination):  # type: ignore[no-untyped-def]
    """Copy every column of one physical row to another, and its ragged values to the other's page of `rows` rows."""
    columns = peek_i64(table + T_COLUMNS)
    for i in range(peek_i64(table + T_COLUMN_COUNT)):
        base = peek_i64(columns + 16 * i)
        size = peek_i64(columns + 16 * i + 8)
        copy_bytes(base + destination * size, base + source * size, size)
    for column in (T_TERMINATED, T_TRUNCATED):
        base = peek_i64(table + column)
        poke_u8(base + destination, peek_u8(base + source))
    meta = peek_i64(table + T_META)
    copy_bytes(meta + destination * META_BYTES, meta + source * META_BYTES, META_BYTES)
    if peek_i64(writer + W_ARENA_COUNT) != 0:
        copy_values(writer, rows, source, destination)


@inner
def _copy_halo(writer, table, old_base, old_local, halo, new_base, rows):  # type: ignore[no-untyped-def]
    """Copy the last `halo` rows and the kept finals they link to; returns the number of finals."""
    meta = peek_i64(table + T_META)
    tail = 0
    for i in range(halo):
        source = old_base + old_local - halo + i
        destination = new_base + i
        _copy_row(writer, table, rows, source, destination)
        word = peek_u32(meta + source * META_BYTES + 12)
        if word & KEPT:
            tail += 1
            kept = new_base + rows - tail
            _copy_row(writer, table, rows, source + (word >> LINK_SHIFT), kept)
            poke_u32(meta + destination * META_BYTES + 12, ((kept - destination) << LINK_SHIFT) | (word & FLAG_MASK))
    return tail


@inner
def _publish(writer):  # type: ignore[no-untyped-def]
    block = peek_i64(writer + W_BLOCK)
    store_relaxed(block + PAGE_TAIL, peek_i64(writer + W_KEPT))
    if peek_i64(writer + W_ARENA_COUNT) != 0:
        store_relaxed(block + PAGE_ARENA, kept_bytes(writer))
    local = peek_i64(writer + W_LOCAL)
    store_release(block + PAGE_COMMITTED, local)
    poke_i64(writer + W_UNPUBLISHED, 0)
    table = peek_i64(writer + W_TABLE)
    event = peek_i64(table + T_CONTROL) + TABLE_DATA
    ticks = peek_i64(table + T_ROLLOUT)
    if ticks != 0:
        # nobody can claim a part of a rollout; the last commit comes seldom enough for the full form
        if local == ticks * peek_i64(writer + W_ENVS):
            wake(event)
    # no fence here: a waiter that comes at this moment is woken by its own short time slice
    elif load_relaxed(event + 8) != 0:
        wake(event)


@inner
def _enter_queue(writer, table, page):  # type: ignore[no-untyped-def]
    """What a queue has of a page beside the rest, while the page is prepared: its place in the order, nothing claimed."""
    generation = load_relaxed(block_of(table, page) + PAGE_STATE) >> GENERATION_SHIFT
    side = side_of(table, page)
    store_relaxed(block_of(table, page) + PAGE_AGE, fetch_add(peek_i64(table + T_CONTROL) + TABLE_TICKET, 1))
    store_relaxed(side + SIDE_ACKED, 0)
    store_relaxed(side + SIDE_BOOTSTRAP, 0)
    store_release(side + SIDE_CLAIM, (generation & TAG_MASK) << TAG_SHIFT)
    ticks = peek_i64(table + T_ROLLOUT)
    if ticks != 0:
        poke_i64(writer + W_LIMIT, ticks * peek_i64(writer + W_ENVS) + peek_i64(writer + W_RESERVE))


@inner
def _finish_page(writer):  # type: ignore[no-untyped-def]
    """Publish and seal the page of a queue's writer, before there is another: nothing of it is copied into the next."""
    page = peek_i64(writer + W_PAGE)
    if page < 0:
        return
    table = peek_i64(writer + W_TABLE)
    if peek_i64(writer + W_LOCAL) == 0:
        free(table, page)
    else:
        _publish(writer)
        state = load_relaxed(block_of(table, page) + PAGE_STATE)
        seal(table, page, 0)
        poke_i64(writer + W_LAST, page + 1)
        poke_i64(writer + W_LAST_GENERATION, state >> GENERATION_SHIFT)
    poke_i64(writer + W_PAGE, -1)


@kernel("int64(int64)")
def finish_page(writer):  # type: ignore[no-untyped-def]
    """Publish and seal the page of a queue's writer; its stream goes on in the next one."""
    _finish_page(writer)
    return 0


@kernel("int64(int64, int64)", nogil=True)
def turn(writer, page):  # type: ignore[no-untyped-def]
    """Prepare a page that the writer has claimed, open it, and seal the page before it.

    The old page stays open until the new one is: a writer that dies in between leaves both for `recover`, which can tell
    them apart. Flags and meta of the whole page are cleared, so that a field that a caller forgets is never an old flag.

    Returns:
        Physical row of the next tick.
    """
    table = peek_i64(writer + W_TABLE)
    old = peek_i64(writer + W_PAGE)
    envs = peek_i64(writer + W_ENVS)
    rows = peek_i64(table + T_ROWS)
    base = page * rows
    block = block_of(table, page)
    zero_bytes(peek_i64(table + T_TERMINATED) + base, rows)
    zero_bytes(peek_i64(table + T_TRUNCATED) + base, rows)
    zero_bytes(peek_i64(table + T_META) + base * META_BYTES, rows * META_BYTES)
    halo = 0
    tail = 0
    first = 0
    empty_arenas(writer)
    if old >= 0:
        _publish(writer)
        old_local = peek_i64(writer + W_LOCAL)
        history = peek_i64(table + T_HISTORY)
        wanted = (history + peek_i64(table + T_FUTURE)) * envs
        halo = min(wanted, old_local)
        tail = _copy_halo(writer, table, peek_i64(writer + W_BASE), old_local, halo, base, rows)
        # a short old page has its oldest ticks as anchors still: only what lies n before its end moves over
        first = max(0, halo - peek_i64(table + T_FUTURE) * envs)
        state = load_relaxed(block_of(table, old) + PAGE_STATE)
        store_relaxed(block + PAGE_PREVIOUS, old + 1)
        store_relaxed(block + PAGE_PREVIOUS_GENERATION, state >> GENERATION_SHIFT)
    else:
        store_relaxed(block + PAGE_PREVIOUS, peek_i64(writer + W_LAST))
        store_relaxed(block + PAGE_PREVIOUS_GENERATION, peek_i64(writer + W_LAST_GENERATION))
    store_relaxed(block + PAGE_ENVS, envs)
    store_relaxed(block + PAGE_FIRST, first)
    store_relaxed(block + PAGE_ENDED, 0)
    store_relaxed(block + PAGE_STREAM, peek_i64(writer + W_STREAM))
    store_relaxed(block + PAGE_TICK, peek_i64(writer + W_TICK) - halo // envs)
    store_relaxed(block + PAGE_HALO, halo)
    store_relaxed(block + PAGE_TAIL, tail)
    store_relaxed(block + PAGE_UPDATES, 0)
    keep_values(writer)
    store_relaxed(block + PAGE_ARENA, kept_bytes(writer))
    store_relaxed(block + PAGE_COMMITTED, halo)
    poke_i64(writer + W_ROWS, rows)
    poke_i64(writer + W_LIMIT, BEYOND)
    if peek_i64(table + T_QUEUE) != 0:
        _enter_queue(writer, table, page)
    publish_open(table, page)
    if old >= 0:
        seal(table, old, 0)
    poke_i64(writer + W_PAGE, page)
    poke_i64(writer + W_BLOCK, block)
    poke_i64(writer + W_BASE, base)
    poke_i64(writer + W_LOCAL, halo)
    poke_i64(writer + W_TAIL, tail)
    poke_i64(writer + W_KEPT, tail)
    return base + halo


@inner
def _room(writer):  # type: ignore[no-untyped-def]
    """Rows still free in the page, or -1 without a page."""
    if peek_i64(writer + W_PAGE) < 0:
        return -1
    free = peek_i64(writer + W_ROWS) - peek_i64(writer + W_TAIL)
    return min(free, peek_i64(writer + W_LIMIT)) - peek_i64(writer + W_LOCAL)


@kernel("int64(int64)")
def room(writer):  # type: ignore[no-untyped-def]
    """Rows still free in the writer's page, or -1 without a page."""
    return _room(writer)


@kernel("int64(int64, int64, int64)")
def fits(writer, rows, tail):  # type: ignore[no-untyped-def]
    """1 if the writer's page takes `rows` more rows, of its rollout too, with `tail` more kept observations, else 0."""
    if peek_i64(writer + W_PAGE) < 0:
        return 0
    local = peek_i64(writer + W_LOCAL) + rows
    limit = peek_i64(writer + W_LIMIT) - peek_i64(writer + W_RESERVE)
    return 1 if local <= limit and local + tail + peek_i64(writer + W_TAIL) <= peek_i64(writer + W_ROWS) else 0


@inner
def _stage_final(writer, row, behind):  # type: ignore[no-untyped-def]
    table = peek_i64(writer + W_TABLE)
    word = peek_i64(table + T_META) + row * META_BYTES + 12
    link = peek_u32(word) >> LINK_SHIFT
    if link != 0:
        return row + link
    tail = peek_i64(writer + W_TAIL) + 1
    kept = peek_i64(writer + W_BASE) + peek_i64(table + T_ROWS) - tail
    if kept < behind:
        return -1
    poke_i64(writer + W_TAIL, tail)
    clear_spans(writer, kept)
    poke_u32(word, (kept - row) << LINK_SHIFT)
    return kept


@kernel("int64(int64, int64, int64)")
def stage_final(writer, row, behind):  # type: ignore[no-untyped-def]
    """Reserve a tail row for the final observation of an uncommitted physical row.

    Args:
        writer: Writer state.
        row: Physical row whose episode ends with it.
        behind: Physical row behind those that are being written; the tail stays clear of them.

    Returns:
        Physical row to write the observation to, or -1 when the page has no room for it.
    """
    return _stage_final(writer, row, behind)


@kernel("int64(int64, int64, int64, int64, int64)")
def stage_finals(writer, first, places, count, behind):  # type: ignore[no-untyped-def]
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
        kept = _stage_final(writer, first + peek_i64(places + 8 * i), behind)
        if kept < 0:
            return -1
    return kept


@kernel("int64(int64, int64)")
def stage_bootstrap(writer, ticks):  # type: ignore[no-untyped-def]
    """Reserve tail rows, one for each environment in their order, for the observations behind the next `ticks` ticks.

    Returns:
        Physical row of the first, or -1 when the page has no room for them.
    """
    table = peek_i64(writer + W_TABLE)
    envs = peek_i64(writer + W_ENVS)
    committed = peek_i64(writer + W_LOCAL) + ticks * envs
    kept = peek_i64(writer + W_ROWS) - peek_i64(writer + W_TAIL) - envs
    if kept < committed:
        return -1
    poke_i64(writer + W_TAIL, peek_i64(writer + W_TAIL) + envs)
    for env in range(envs):
        clear_spans(writer, peek_i64(writer + W_BASE) + kept + env)
    store_relaxed(side_of(table, peek_i64(writer + W_PAGE)) + SIDE_BOOTSTRAP, (committed << 32) | (kept + 1))
    return peek_i64(writer + W_BASE) + kept


@kernel("int64(int64, int64)")
def abort(writer, rows):  # type: ignore[no-untyped-def]
    """Forget what was staged for the next `rows` uncommitted rows; the tail shrinks back to what committed rows need."""
    kept = peek_i64(writer + W_KEPT)
    poke_i64(writer + W_TAIL, kept)
    forget_values(writer)
    if peek_i64(writer + W_PAGE) >= 0:
        store_relaxed(side_of(peek_i64(writer + W_TABLE), peek_i64(writer + W_PAGE)) + SIDE_BOOTSTRAP, 0)
    rows = min(rows, _room(writer))
    if rows <= 0:
        return 0
    table = peek_i64(writer + W_TABLE)
    start = peek_i64(writer + W_BASE) + peek_i64(writer + W_LOCAL)
    zero_bytes(peek_i64(table + T_TERMINATED) + start, rows)
    zero_bytes(peek_i64(table + T_TRUNCATED) + start, rows)
    zero_bytes(peek_i64(table + T_META) + start * META_BYTES, rows * META_BYTES)
    return 0


@inner
def _finish_row(meta, terminated, truncated, state, envs, version, next_step, episodes):  # type: ignore[no-untyped-def]
    """Write one row's meta from its flags and its environment's state; returns 1 if it begins an episode."""
    phase = peek_i64(state)
    if phase == RUNNING and (peek_u8(terminated) | peek_u8(truncated)) == 0:
        step = peek_i64(state + 16)
        poke_i64(state + 16, step + 1)
        poke_i64(meta, version | (step << 32))
        poke_i64(meta + 8, peek_i64(state + 8) | (envs << (32 + LINK_SHIFT)))
        return 0
    began = 0
    flags = 0
    link = envs
    step = peek_i64(state + 16)
    if phase == AWAITING_FINAL:
        poke_u8(terminated, 0)
        poke_u8(truncated, 0)
        flags = FINAL
        link = 0
        poke_i64(state, STARTING)
    else:
        if phase == STARTING:
            flags = FIRST
            step = 0
            began = 1
            poke_i64(state + 8, episodes)
            poke_i64(state, RUNNING)
        poke_i64(state + 16, step + 1)
        ended = (peek_u8(terminated) != 0) | ((peek_u8(truncated) != 0) << 1)
        if ended != 0:
            flags |= ended
            if next_step != 0:
                poke_i64(state, AWAITING_FINAL)
            else:
                poke_i64(state, STARTING)
                link = peek_u32(meta + 12) >> LINK_SHIFT
                if link != 0:
                    flags |= KEPT
                    kept = meta + link * META_BYTES
                    poke_u32(kept, version)
                    poke_u32(kept + 4, step + 1)
                    poke_u32(kept + 8, peek_i64(state + 8))
                    poke_u32(kept + 12, FINAL)
    poke_u32(meta, version)
    poke_u32(meta + 4, step)
    poke_u32(meta + 8, peek_i64(state + 8))
    poke_u32(meta + 12, (link << LINK_SHIFT) | flags)
    return began


@inner
def _set_priorities(writer, table, row, count):  # type: ignore[no-untyped-def]
    """Leaf priorities of rows about to be committed: the caller's, else the largest of late; none for final observations."""
    priorities = peek_i64(table + T_PRIORITY)
    metas = peek_i64(table + T_META)
    recent = peek_i64(table + T_CONTROL) + TABLE_RECENT_LEAF
    # before the first update there is no largest priority: 1 then
    new = max(load_relaxed(recent), load_relaxed(recent + 8))
    if new == 0:
        new = 1 << 20
    given = peek_i64(writer + W_PRIORITIES_GIVEN)
    for i in range(row, row + count):
        if peek_u32(metas + META_BYTES * i + 12) & FINAL:
            poke_u32(priorities + 4 * i, 0)
        elif given == 0:
            poke_u32(priorities + 4 * i, new)
    poke_i64(writer + W_PRIORITIES_GIVEN, 0)


@inner
def _commit(writer, ticks):  # type: ignore[no-untyped-def]
    table = peek_i64(writer + W_TABLE)
    envs = peek_i64(writer + W_ENVS)
    local = peek_i64(writer + W_LOCAL)
    row = peek_i64(writer + W_BASE) + local
    count = ticks * envs
    meta = peek_i64(table + T_META)
    terminated = peek_i64(table + T_TERMINATED)
    truncated = peek_i64(table + T_TRUNCATED)
    if peek_i64(writer + W_STRICT) != 0:
        for i in range(count):
            ended = peek_u8(terminated + row + i) | peek_u8(truncated + row + i)
            if ended != 0 and peek_u32(meta + (row + i) * META_BYTES + 12) == 0:
                return -2 - i
    states = peek_i64(writer + W_ENV_STATE)
    version = peek_i64(writer + W_VERSION)
    next_step = peek_i64(writer + W_NEXT_STEP)
    episodes = peek_i64(writer + W_EPISODES)
    for _ in range(ticks):
        for env in range(envs):
            episodes += _finish_row(
                meta + row * META_BYTES,
                terminated + row,
                truncated + row,
                states + _ENV_BYTES * env,
                envs,
                version,
                next_step,
                episodes,
            )
            row += 1
    if peek_i64(table + T_PRIORITY) != 0:
        _set_priorities(writer, table, row - count, count)
    local += count
    poke_i64(writer + W_EPISODES, episodes)
    poke_i64(writer + W_LOCAL, local)
    poke_i64(writer + W_KEPT, peek_i64(writer + W_TAIL))
    if peek_i64(writer + W_ARENA_COUNT) != 0:
        keep_values(writer)
    poke_i64(writer + W_TICK, peek_i64(writer + W_TICK) + ticks)
    counter = peek_i64(writer + W_COUNTER)
    store_relaxed(counter, load_relaxed(counter) + count)
    pending = peek_i64(writer + W_UNPUBLISHED) + ticks
    poke_i64(writer + W_UNPUBLISHED, pending)
    full = _room(writer) < envs + peek_i64(writer + W_RESERVE)
    if full or pending >= peek_i64(writer + W_PUBLISH_EVERY):
        _publish(writer)
    return -1 if full else row


@kernel("int64(int64, int64)")
def commit(writer, ticks):  # type: ignore[no-untyped-def]
    """Make the next `ticks` ticks visible: meta, then one release store of the page's `committed`.

    Returns:
        Physical row of the next tick, or -1 when the page has no room for one more. -2 - k when nothing was committed
        because row k of these (0 for the first) ends its episode and has no final observation staged.
    """
    return _commit(writer, ticks)


@kernel(types.int64(ObjectType()))
def commit_and_turn(state):  # type: ignore[no-untyped-def]
    """Commit one tick, and turn to a new page where the old one is full and another can be had at once.

    Returns:
        Physical row of the next tick, or BEYOND when there is none (no page free, the engine closed, or the commit was refused): a row behind
        every table, so that a caller who does not look stores nothing instead of something wrong.
    """
    writer = data_of(state)
    # no page (closed), or a full one behind which no other was free: there is no row that could have been assigned
    left = min(peek_i64(writer + W_ROWS) - peek_i64(writer + W_KEPT), peek_i64(writer + W_LIMIT))
    left -= peek_i64(writer + W_LOCAL)
    if peek_i64(writer + W_PAGE) < 0 or left < peek_i64(writer + W_ENVS) + peek_i64(writer + W_RESERVE):
        return BEYOND
    row = _commit(writer, 1)
    if row >= 0:
        return row
    if row < -1:
        poke_i64(writer + W_REFUSED, -1 - row)
        return BEYOND
    if load_relaxed(peek_i64(writer + W_CLOSED)) != 0:
        return BEYOND
    table = peek_i64(writer + W_TABLE)
    if peek_i64(table + T_QUEUE) != 0:
        _finish_page(writer)
    page = claim(table, peek_i64(writer + W_OWNER), 0)
    return turn(writer, page) if page >= 0 else BEYOND


@kernel("int64(int64)")
def publish(writer):  # type: ignore[no-untyped-def]
    """Make everything that was committed visible now, whatever the writer's policy."""
    if peek_i64(writer + W_PAGE) >= 0:
        _publish(writer)
    return 0
