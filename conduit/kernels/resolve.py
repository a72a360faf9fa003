"""From an anchor row to the rows its window reads: the kernels behind conduit.kernels.windows.

A resolver is a C function `resolve(window, job, slots, count, 0) -> done`, called through its address by samplers. For each
listed slot it takes the job's row and, in place of the generation, the address of the sampler's description of the page (E_*).
It writes the window's row numbers (and what follows from meta alone: returns, discounts, flags, masks), and stops at the first
row that anchors no such window: `done` slots are resolved. Rows may change under it; the page's generation is checked when
all has been copied. Numbers that could lead out of the page are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.jit import address, inner
from conduit.kernels.cpu import J_GENERATIONS, J_ROWS, ask_for
from conduit.kernels.plan import Plan
from conduit.kernels.windows import Episode, Rollout, Sequence, Transition, Window, need
from conduit.store.atomics import (
    load_relaxed,
    peek_f32,
    peek_f64,
    peek_i32,
    peek_i64,
    peek_u32,
    poke_f32,
    poke_f64,
    poke_i64,
    poke_u8,
    prefetch,
)
from conduit.store.protocol import block_of
from conduit.store.words import (
    FINAL,
    FIRST,
    KEPT,
    LINK_SHIFT,
    META_BYTES,
    PAGE_TICK,
    T_META,
    T_ROWS,
    TERMINATED,
    TRUNCATED,
)

Array = np.ndarray[Any, Any]

E_START, E_PAGE, E_FIRST, E_LIMIT, E_GENERATION, E_ENVS = range(0, 48, 8)
"""A page as samplers list it: candidates before it, page, first candidate row, row behind the last committed one, generation,
rows per tick."""
E_BYTES = 48

(
    V_RESOLVE,
    V_TABLE,
    V_NEED,
    V_N,
    V_GAMMA,
    V_BOOTSTRAP,
    V_STACK,
    V_REPEAT,
    V_REWARD,
    V_REWARD_STRIDE,
    V_REWARD_DOUBLE,
    V_REWARD_FACTOR,
    V_REWARD_OFFSET,
    V_REWARD_LOW,
    V_REWARD_HIGH,
    V_LENGTH,
    V_ENVS,
    V_EVERY,
    V_ACROSS,
    V_WHOLE,
    V_FROM_FIRST,
    V_BURN_IN,
    V_CURRENT,
    V_OLDEST,
    V_AGES,
    V_FOLLOWING,
    V_STACKED,
    V_FOLLOWING_STACKED,
    V_LANES,
    V_RETURN,
    V_DISCOUNT,
    V_USED,
    V_TERMINATED,
    V_TRUNCATED,
    V_IS_FIRST,
    V_MASK,
    V_LOSS_MASK,
    V_RETURN_DOUBLE,
    V_FOLLOWING_LANES,
) = range(0, 312, 8)
"""Words of a window: what it asks for (first half), and addresses of index arrays and outputs (0: not wanted)."""
V_WORDS = 39

AGES = 64
"""Bins of the count of rows that were too old, by age in versions; the last one takes all older ones."""

SIGNATURE = "int64(int64, int64, int64, int64, int64)"


@inner
def _put_flag(address, at, value):  # type: ignore[no-untyped-def]
    if address != 0:
        poke_u8(address + at, value)


@inner
def _too_old(window, meta):  # type: ignore[no-untyped-def]
    """Count (by age) and refuse a row whose policy version is below the oldest wanted."""
    version = peek_i32(meta)
    if version >= peek_i64(window + V_OLDEST):
        return False
    age = min(max(peek_i64(window + V_CURRENT) - version, 0), AGES - 1)
    bin_ = peek_i64(window + V_AGES) + 8 * age
    poke_i64(bin_, peek_i64(bin_) + 1)
    return True


@inner
def _reward(base, stride, double, factor, offset, low, high, row):  # type: ignore[no-untyped-def]
    at = base + stride * row
    raw = peek_f64(at) if double else peek_f32(at)
    scaled = raw * factor + offset
    # min and max would make NaN a bound
    scaled = low if scaled < low else scaled  # noqa: FURB136
    return high if scaled > high else scaled  # noqa: FURB136


@inner
def _stack(window, out, slot, newest, before, ticks, envs):  # type: ignore[no-untyped-def]
    """Frames ending with row `newest`: those before it are `before`, `before` - envs, ..., of which `ticks` exist."""
    stack = peek_i64(window + V_STACK)
    repeat = peek_i64(window + V_REPEAT) != 0
    index = out + 8 * stack * slot
    oldest = newest
    for back in range(stack):
        if back > 0:
            if back <= ticks:
                oldest = before - (back - 1) * envs
            elif not repeat:
                oldest = -1
        poke_i64(index + 8 * (stack - 1 - back), oldest)


@inner
def _put_stacks(window, metas, envs, slot, row, last, after):  # type: ignore[no-untyped-def]
    _stack(window, peek_i64(window + V_STACKED), slot, row, row - envs, peek_i32(metas + META_BYTES * row + 4), envs)
    stacked = peek_i64(window + V_FOLLOWING_STACKED)
    step = peek_i32(metas + META_BYTES * last + 4)
    if after == last:
        _stack(window, stacked, slot, after, after - envs, step, envs)
    else:
        _stack(window, stacked, slot, after, last, step + 1, envs)


@inner(forceinline=True)
def _put_transition(window, metas, envs, slot, row, last, after, flags, used, total, discount):  # type: ignore[no-untyped-def]
    """Write what a transition from `row` to `after` delivers; `last` is the last step used, with its flags."""
    poke_i64(peek_i64(window + V_FOLLOWING) + 8 * slot, after)
    _put_flag(peek_i64(window + V_TERMINATED), slot, flags & TERMINATED)
    _put_flag(peek_i64(window + V_TRUNCATED), slot, (flags >> 1) & 1)
    if peek_i64(window + V_REWARD) != 0:
        if peek_i64(window + V_RETURN_DOUBLE) != 0:
            poke_f64(peek_i64(window + V_RETURN) + 8 * slot, total)
        else:
            poke_f32(peek_i64(window + V_RETURN) + 4 * slot, total)
    if peek_i64(window + V_DISCOUNT) != 0:
        poke_f32(peek_i64(window + V_DISCOUNT) + 4 * slot, discount)
    if peek_i64(window + V_USED) != 0:
        poke_i64(peek_i64(window + V_USED) + 8 * slot, used)
    if peek_i64(window + V_STACK) > 1:
        _put_stacks(window, metas, envs, slot, row, last, after)


@inner
def _walk_transition(window, slot, row, entry):  # type: ignore[no-untyped-def]
    """Window Transition, link by link; see its docstring for the formulas. False where the row anchors none."""
    table = peek_i64(window + V_TABLE)
    metas = peek_i64(table + T_META)
    envs = peek_i64(entry + E_ENVS)
    limit = peek_i64(entry + E_LIMIT)
    end = (peek_i64(entry + E_PAGE) + 1) * peek_i64(table + T_ROWS)
    meta = metas + META_BYTES * row
    if peek_u32(meta + 12) & FINAL or _too_old(window, meta):
        return False
    base = peek_i64(window + V_REWARD)
    stride, double = peek_i64(window + V_REWARD_STRIDE), peek_i64(window + V_REWARD_DOUBLE) != 0
    factor, offset = peek_f64(window + V_REWARD_FACTOR), peek_f64(window + V_REWARD_OFFSET)
    low, high = peek_f64(window + V_REWARD_LOW), peek_f64(window + V_REWARD_HIGH)
    n = peek_i64(window + V_N)
    gamma = peek_f64(window + V_GAMMA)
    total, discount = 0.0, 1.0
    used = 0
    last = row
    at = row
    flags = 0
    while True:
        word = peek_u32(metas + META_BYTES * at + 12)
        link = word >> LINK_SHIFT
        after = at + link
        ended = word & (TERMINATED | TRUNCATED)
        inline = (word & KEPT) == 0
        if (after >= end and not inline) or (used > 0 and word & FINAL):
            return False
        if link == 0 and not ended & TERMINATED:
            return False
        if link != 0 and inline and (after >= limit or peek_u32(metas + META_BYTES * after + 12) & FIRST):
            # there is no successor (yet): end one step earlier, with this row as the next observation
            if used == 0 or peek_i64(window + V_BOOTSTRAP) == 0:
                return False
            after = at
            break
        if base != 0:
            total += discount * _reward(base, stride, double, factor, offset, low, high, at)
        discount *= gamma
        used += 1
        last = at
        flags = ended
        if ended != 0 or used == n:
            break
        at = after
    _put_transition(window, metas, envs, slot, row, last, after, flags, used, total, discount)
    return True


def _transitions(item: int, scaled: bool) -> Any:
    """The resolver of transitions whose returns sum up rewards of `item` bytes (0: none), `scaled` where they are transformed.

    Most transitions lie inside an episode: n steps, each linked to the row one tick on. That is presumed, all steps are read
    at once, so that their cache misses overlap, and only a row of which it is not true is walked link by link.
    """

    @inner(forceinline=True)
    def reward_at(at, factor, offset, low, high):  # type: ignore[no-untyped-def]
        if not scaled:
            return peek_f64(at) if item == 8 else peek_f32(at)
        return _reward(at, 0, item == 8, factor, offset, low, high, 0)

    def resolve(window, job, slots, count, unused):  # type: ignore[no-untyped-def]
        # read once: nothing that is stored below can change them, which a compiler cannot know
        metas = peek_i64(peek_i64(window + V_TABLE) + T_META)
        row_at, entry_at = peek_i64(job + J_ROWS), peek_i64(job + J_GENERATIONS)
        oldest = peek_i64(window + V_OLDEST)
        base, stride = peek_i64(window + V_REWARD), peek_i64(window + V_REWARD_STRIDE)
        factor, offset = peek_f64(window + V_REWARD_FACTOR), peek_f64(window + V_REWARD_OFFSET)
        low, high = peek_f64(window + V_REWARD_LOW), peek_f64(window + V_REWARD_HIGH)
        n = peek_i64(window + V_N)
        gamma = peek_f64(window + V_GAMMA)
        for i in range(count):
            slot = peek_i64(slots + 8 * i)
            row = peek_i64(row_at + 8 * slot)
            entry = peek_i64(entry_at + 8 * slot)
            envs = peek_i64(entry + E_ENVS)
            after = row + n * envs
            presumed = after < peek_i64(entry + E_LIMIT) and peek_i32(metas + META_BYTES * row) >= oldest
            total, discount = 0.0, gamma
            if presumed:
                ordinary = envs << LINK_SHIFT
                at, reward = metas + META_BYTES * row + 12, base + stride * row
                other = (peek_u32(at) & ~FIRST) ^ ordinary
                if item:
                    total += reward_at(reward, factor, offset, low, high)
                for _ in range(n - 1):
                    at += META_BYTES * envs
                    other |= peek_u32(at) ^ ordinary
                    if item:
                        reward += stride * envs
                        total += discount * reward_at(reward, factor, offset, low, high)
                    discount *= gamma
                presumed = (other | (peek_u32(at + META_BYTES * envs) & FIRST)) == 0
            if presumed:
                _put_transition(window, metas, envs, slot, row, after - envs, after, 0, n, total, discount)
            elif _walk_transition(window, slot, row, entry):
                # what was asked for is not what follows it
                ask_for(job, slots + 8 * i, 1)
            else:
                return i
        return count

    return resolve


@inner
def ask_ahead(window, metas, row, envs):  # type: ignore[no-untyped-def]
    """Prefetch what a transition's steps are resolved from; returns the row that it most likely reads besides its own."""
    n = peek_i64(window + V_N)
    reward = peek_i64(window + V_REWARD)
    stride = peek_i64(window + V_REWARD_STRIDE)
    at = row
    for _ in range(n):
        prefetch(metas + META_BYTES * at)
        if reward != 0:
            prefetch(reward + stride * at)
        at += envs
    prefetch(metas + META_BYTES * at)
    return row + max(1, n) * envs


@inner
def may_anchor(window, table, page, local, envs):  # type: ignore[no-untyped-def]
    """True when a sequence, episode or rollout may start at a local row, by the row's place alone."""
    meta = peek_i64(table + T_META) + META_BYTES * (page * peek_i64(table + T_ROWS) + local)
    word = peek_u32(meta + 12)
    across = peek_i64(window + V_ACROSS) != 0
    position = peek_i32(meta + 4)
    if peek_i64(window + V_ENVS) != 0:
        if envs != peek_i64(window + V_ENVS) or local % envs != 0:
            return False
        across = True
    elif (word & FINAL and not across) or (peek_i64(window + V_FROM_FIRST) != 0 and word & FIRST == 0):
        return False
    every = peek_i64(window + V_EVERY)
    if across and every > 1:
        position = load_relaxed(block_of(table, page) + PAGE_TICK) + local // envs
    return every <= 1 or position % every == 0


@inner
def _following(metas, row, limit, end):  # type: ignore[no-untyped-def]
    """Row of a step's next observation (kernels.reference.following_row), or -1 where there is none.

    `limit` is the row behind the last committed one, `end` the row behind the page.
    """
    word = peek_u32(metas + META_BYTES * row + 12)
    after = row + (word >> LINK_SHIFT)
    if word & KEPT:
        return after if after < end else -1
    if after == row:
        return row if word & TERMINATED else -1
    return -1 if after >= limit or peek_u32(metas + META_BYTES * after + 12) & FIRST else after


@inner
def resolve_sequence(window, job, slot, row, entry):  # type: ignore[no-untyped-def]
    """Windows Sequence and Episode."""
    table = peek_i64(window + V_TABLE)
    metas = peek_i64(table + T_META)
    envs = peek_i64(entry + E_ENVS)
    limit = peek_i64(entry + E_LIMIT)
    length = peek_i64(window + V_LENGTH)
    meta = metas + META_BYTES * row
    across = peek_i64(window + V_ACROSS) != 0
    page = peek_i64(entry + E_PAGE)
    if not may_anchor(window, table, page, row - page * peek_i64(table + T_ROWS), envs) or _too_old(window, meta):
        return -1
    index = peek_i64(window + V_LANES) + 8 * length * slot
    next_index = peek_i64(window + V_FOLLOWING_LANES)
    wants_next = next_index != 0
    next_index += 8 * length * slot
    end = (page + 1) * peek_i64(table + T_ROWS)
    at = row
    used = 0
    ended = 0
    while used < length and ended == 0:
        if at >= limit:
            return -1
        word = peek_u32(metas + META_BYTES * at + 12)
        if used > 0 and word & FIRST and not across:
            break
        final = (word & FINAL) != 0
        poke_i64(index + 8 * used, at)
        if wants_next:
            after = -1 if final else _following(metas, at, limit, end)
            if after < 0 and not final:
                return -1
            poke_i64(next_index + 8 * used, after)
        lane = length * slot + used
        _put_flag(peek_i64(window + V_TERMINATED), lane, word & TERMINATED)
        _put_flag(peek_i64(window + V_TRUNCATED), lane, (word >> 1) & 1)
        _put_flag(peek_i64(window + V_IS_FIRST), lane, (word & FIRST) != 0)
        _put_flag(peek_i64(window + V_MASK), lane, not final)
        _put_flag(peek_i64(window + V_LOSS_MASK), lane, not final and used >= peek_i64(window + V_BURN_IN))
        used += 1
        at += envs
        if not across:
            ended = word & (TERMINATED | TRUNCATED)
    if peek_i64(window + V_WHOLE) != 0 and (ended == 0 if peek_i64(window + V_FROM_FIRST) != 0 else used < length):
        return -1
    if peek_i64(window + V_USED) != 0:
        poke_i64(peek_i64(window + V_USED) + 8 * slot, used)
    for lane in range(used, length):
        poke_i64(index + 8 * lane, -1)
        if wants_next:
            poke_i64(next_index + 8 * lane, -1)
        for flag in (V_TERMINATED, V_TRUNCATED, V_IS_FIRST, V_MASK, V_LOSS_MASK):
            _put_flag(peek_i64(window + flag), length * slot + lane, 0)
    return 0


@inner
def resolve_rollout(window, job, slot, row, entry):  # type: ignore[no-untyped-def]
    """Window Rollout."""
    table = peek_i64(window + V_TABLE)
    metas = peek_i64(table + T_META)
    envs = peek_i64(entry + E_ENVS)
    page = peek_i64(entry + E_PAGE)
    local = row - page * peek_i64(table + T_ROWS)
    limit = peek_i64(entry + E_LIMIT)
    count = peek_i64(window + V_LENGTH) * envs
    if not may_anchor(window, table, page, local, envs) or row + count > limit:
        return -1
    if _too_old(window, metas + META_BYTES * row):
        return -1
    index = peek_i64(window + V_LANES) + 8 * count * slot
    next_index = peek_i64(window + V_FOLLOWING_LANES)
    wants_next = next_index != 0
    next_index += 8 * count * slot
    end = (page + 1) * peek_i64(table + T_ROWS)
    for lane in range(count):
        word = peek_u32(metas + META_BYTES * (row + lane) + 12)
        poke_i64(index + 8 * lane, row + lane)
        if wants_next:
            after = -1 if word & FINAL else _following(metas, row + lane, limit, end)
            if after < 0 and word & FINAL == 0:
                return -1
            poke_i64(next_index + 8 * lane, after)
        at = count * slot + lane
        _put_flag(peek_i64(window + V_TERMINATED), at, word & TERMINATED)
        _put_flag(peek_i64(window + V_TRUNCATED), at, (word >> 1) & 1)
        _put_flag(peek_i64(window + V_IS_FIRST), at, (word & FIRST) != 0)
        _put_flag(peek_i64(window + V_MASK), at, (word & FINAL) == 0)
        _put_flag(peek_i64(window + V_LOSS_MASK), at, (word & FINAL) == 0)
    return 0


def _in_turn(one: Any) -> Any:
    """A resolver that calls `one(window, job, slot, row, entry) -> 0 | -1` for each slot."""

    def resolve(window, job, slots, count, unused):  # type: ignore[no-untyped-def]
        for i in range(count):
            slot = peek_i64(slots + 8 * i)
            row = peek_i64(peek_i64(job + J_ROWS) + 8 * slot)
            if one(window, job, slot, row, peek_i64(peek_i64(job + J_GENERATIONS) + 8 * slot)) < 0:
                return i
        return count

    return resolve


_TRANSITIONS = {(item, scaled): _transitions(item, scaled) for item in (0, 4, 8) for scaled in (False, True)}
_SEQUENCES, _ROLLOUTS = _in_turn(resolve_sequence), _in_turn(resolve_rollout)


def resolver(window: Window, item: int, scaled: bool) -> int:
    """Native address of a window's resolver.

    Args:
        window: The window.
        item: Bytes of a reward that a transition sums up, 0 for none.
        scaled: Whether it is transformed before.
    """
    if isinstance(window, Transition):
        return address(_TRANSITIONS[item, scaled and item > 0], SIGNATURE)
    return address(_ROLLOUTS if isinstance(window, Rollout) else _SEQUENCES, SIGNATURE)


def describe_window(plan: Plan, table: int, reward: tuple[int, int, int], addresses: dict[int, int]) -> Array:
    """The words of a plan's window.

    Args:
        plan: The plan.
        table: Table descriptor.
        reward: Address, row stride and item size of the reward column, zeros where no return is made.
        addresses: {V_*: address} of index arrays and outputs.

    Returns:
        int64 [V_WORDS].
    """
    window = plan.window
    words = np.zeros(V_WORDS, np.int64)
    reals = words.view(np.float64)
    scaled = plan.reward is not None and not plan.reward.is_cast
    values = {V_TABLE: table, V_NEED: need(window)[1], V_EVERY: 1, V_STACK: 1, **addresses}
    values[V_RESOLVE] = resolver(window, reward[2] if reward[0] else 0, scaled)
    if isinstance(window, Transition):
        values |= {
            V_N: window.n_step,
            V_BOOTSTRAP: window.newest == "bootstrap",
            V_NEED: 1 if window.newest == "bootstrap" else window.n_step,
            V_STACK: window.stack,
            V_REPEAT: window.padding == "repeat",
            V_REWARD: reward[0],
            V_REWARD_STRIDE: reward[1],
        }
        reals[V_GAMMA // 8] = window.gamma
        if plan.reward is not None:
            values[V_REWARD_DOUBLE] = reward[2] == 8
            values[V_RETURN_DOUBLE] = plan.reward.dtype == "float64"
            reals[V_REWARD_FACTOR // 8], reals[V_REWARD_OFFSET // 8] = plan.reward.factor, plan.reward.offset
            reals[V_REWARD_LOW // 8], reals[V_REWARD_HIGH // 8] = plan.reward.low, plan.reward.high
    elif isinstance(window, Sequence):
        values |= {
            V_LENGTH: window.length,
            V_ACROSS: window.across,
            V_WHOLE: not window.pad,
            V_BURN_IN: window.burn_in,
            V_EVERY: 1 if window.overlap is None else window.length - window.overlap,
        }
    elif isinstance(window, Episode):
        values |= {V_LENGTH: window.max_length, V_WHOLE: 1, V_FROM_FIRST: 1}
    else:
        values |= {V_LENGTH: window.ticks, V_ENVS: window.num_envs, V_EVERY: window.stride or window.ticks}
    for offset, value in values.items():
        words[offset // 8] = value
    return words
