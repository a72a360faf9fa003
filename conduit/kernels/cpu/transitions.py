"""The resolver of transitions: from an anchor row to the row behind n steps, with the return, discount and stacks of frames."""

from __future__ import annotations

from typing import Any

from conduit.kernels.cpu.job import JOB_ENTRIES, JOB_ROWS, ask_for
from conduit.kernels.cpu.windows import (
    AGES,
    ENTRY_ENVS,
    ENTRY_LIMIT,
    ENTRY_OVER,
    ENTRY_PAGE,
    SUM_DOUBLE,
    SUM_ELEMENTS,
    SUM_FACTOR,
    SUM_HIGH,
    SUM_LOW,
    SUM_OFFSET,
    SUM_OUT,
    SUM_OUT_DOUBLE,
    SUM_SOURCE,
    SUM_STRIDE,
    SUM_WORDS,
    WINDOW_AGES,
    WINDOW_BOOTSTRAP,
    WINDOW_CURRENT,
    WINDOW_DISCOUNT,
    WINDOW_FOLLOWING,
    WINDOW_FOLLOWING_STACKED,
    WINDOW_GAMMA,
    WINDOW_N,
    WINDOW_OLDEST,
    WINDOW_REPEAT,
    WINDOW_RETURN,
    WINDOW_RETURN_DOUBLE,
    WINDOW_REWARD,
    WINDOW_REWARD_DOUBLE,
    WINDOW_REWARD_FACTOR,
    WINDOW_REWARD_HIGH,
    WINDOW_REWARD_LOW,
    WINDOW_REWARD_OFFSET,
    WINDOW_REWARD_STRIDE,
    WINDOW_STACK,
    WINDOW_STACKED,
    WINDOW_SUM_COUNT,
    WINDOW_SUMS,
    WINDOW_TABLE,
    WINDOW_TERMINATED,
    WINDOW_TRUNCATED,
    WINDOW_USED,
)
from conduit.native.jit import inner
from conduit.native.memory import (
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
from conduit.store.format import words as w


@inner
def put_flag(address, at, value):
    """Store a flag, where flags are wanted."""
    if address != 0:
        poke_u8(address + at, value)


@inner
def too_old(window, meta):
    """Count (by age) and refuse a row whose policy version is below the oldest wanted."""
    version = peek_i32(meta)
    if version >= peek_i64(window + WINDOW_OLDEST):
        return False
    age = min(max(peek_i64(window + WINDOW_CURRENT) - version, 0), AGES - 1)
    bin_ = peek_i64(window + WINDOW_AGES) + 8 * age
    poke_i64(bin_, peek_i64(bin_) + 1)
    return True


@inner
def _reward(base, stride, double, factor, offset, low, high, row):
    at = base + stride * row
    raw = peek_f64(at) if double else peek_f32(at)
    scaled = raw * factor + offset
    # min and max would make NaN a bound
    scaled = low if scaled < low else scaled  # noqa: FURB136
    return high if scaled > high else scaled  # noqa: FURB136


@inner
def _stack(window, out, slot, newest, before, ticks, envs, first):
    """Frames ending with row `newest`: those before it are `before`, `before` - envs, ..., of which `ticks` exist.

    None lies before the page's `first` row, whatever a row that is being overwritten says.
    """
    stack = peek_i64(window + WINDOW_STACK)
    repeat = peek_i64(window + WINDOW_REPEAT) != 0
    index = out + 8 * stack * slot
    oldest = newest
    for back in range(stack):
        if back > 0:
            if back <= ticks and before - (back - 1) * envs >= first:
                oldest = before - (back - 1) * envs
            elif not repeat:
                oldest = -1
        poke_i64(index + 8 * (stack - 1 - back), oldest)


@inner
def _put_stacks(window, metas, envs, slot, row, last, after):
    page_rows = peek_i64(peek_i64(window + WINDOW_TABLE) + w.VIEW_ROWS)
    first = row // page_rows * page_rows
    step = peek_i32(metas + w.META_BYTES * row + 4)
    _stack(window, peek_i64(window + WINDOW_STACKED), slot, row, row - envs, step, envs, first)
    stacked = peek_i64(window + WINDOW_FOLLOWING_STACKED)
    step = peek_i32(metas + w.META_BYTES * last + 4)
    if after == last:
        _stack(window, stacked, slot, after, after - envs, step, envs, first)
    else:
        _stack(window, stacked, slot, after, last, step + 1, envs, first)


@inner
def _put_sums(window, envs, slot, row, used):
    """Write the sums of rewards that are several, or have several elements, over the `used` steps from `row` on.

    The steps of a transition lie one tick apart: only the last one's link may lead elsewhere.
    """
    page_rows = peek_i64(peek_i64(window + WINDOW_TABLE) + w.VIEW_ROWS)
    # a row that is being overwritten may say anything
    end = (row // page_rows + 1) * page_rows
    gamma = peek_f64(window + WINDOW_GAMMA)
    words = peek_i64(window + WINDOW_SUMS)
    for _ in range(peek_i64(window + WINDOW_SUM_COUNT)):
        source, stride, elements = (
            peek_i64(words + SUM_SOURCE),
            peek_i64(words + SUM_STRIDE),
            peek_i64(words + SUM_ELEMENTS),
        )
        double, out = peek_i64(words + SUM_DOUBLE) != 0, peek_i64(words + SUM_OUT)
        factor, offset = peek_f64(words + SUM_FACTOR), peek_f64(words + SUM_OFFSET)
        low, high = peek_f64(words + SUM_LOW), peek_f64(words + SUM_HIGH)
        for element in range(elements):
            inside = source + (8 if double else 4) * element
            total, discount = 0.0, 1.0
            for k in range(used):
                at = row + k * envs
                if at >= end:
                    break
                total += discount * _reward(inside, stride, double, factor, offset, low, high, at)
                discount *= gamma
            place = elements * slot + element
            if peek_i64(words + SUM_OUT_DOUBLE) != 0:
                poke_f64(out + 8 * place, total)
            else:
                poke_f32(out + 4 * place, total)
        words += 8 * SUM_WORDS


@inner(forceinline=True)
def _put_transition(window, metas, envs, slot, row, last, after, flags, used, total, discount):
    """Write what a transition from `row` to `after` delivers; `last` is the last step used, with its flags."""
    poke_i64(peek_i64(window + WINDOW_FOLLOWING) + 8 * slot, after)
    put_flag(peek_i64(window + WINDOW_TERMINATED), slot, flags & w.TERMINATED)
    put_flag(peek_i64(window + WINDOW_TRUNCATED), slot, (flags >> 1) & 1)
    if peek_i64(window + WINDOW_REWARD) != 0:
        if peek_i64(window + WINDOW_RETURN_DOUBLE) != 0:
            poke_f64(peek_i64(window + WINDOW_RETURN) + 8 * slot, total)
        else:
            poke_f32(peek_i64(window + WINDOW_RETURN) + 4 * slot, total)
    elif peek_i64(window + WINDOW_SUM_COUNT) != 0:
        _put_sums(window, envs, slot, row, used)
    if peek_i64(window + WINDOW_DISCOUNT) != 0:
        poke_f32(peek_i64(window + WINDOW_DISCOUNT) + 4 * slot, discount)
    if peek_i64(window + WINDOW_USED) != 0:
        poke_i64(peek_i64(window + WINDOW_USED) + 8 * slot, used)
    if peek_i64(window + WINDOW_STACK) > 1:
        _put_stacks(window, metas, envs, slot, row, last, after)


def _walking(writes: bool) -> Any:
    """The walk of a window Transition, link by link: with its outputs, or only whether there is one."""

    @inner
    def walk(window, slot, row, entry):
        table = peek_i64(window + WINDOW_TABLE)
        metas = peek_i64(table + w.VIEW_META)
        envs = peek_i64(entry + ENTRY_ENVS)
        limit = peek_i64(entry + ENTRY_LIMIT)
        end = (peek_i64(entry + ENTRY_PAGE) + 1) * peek_i64(table + w.VIEW_ROWS)
        over = peek_i64(entry + ENTRY_OVER) != 0
        meta = metas + w.META_BYTES * row
        if peek_u32(meta + 12) & (w.FINAL | w.DELETED) or too_old(window, meta):
            return False
        base = peek_i64(window + WINDOW_REWARD)
        stride, double = peek_i64(window + WINDOW_REWARD_STRIDE), peek_i64(window + WINDOW_REWARD_DOUBLE) != 0
        factor, offset = peek_f64(window + WINDOW_REWARD_FACTOR), peek_f64(window + WINDOW_REWARD_OFFSET)
        low, high = peek_f64(window + WINDOW_REWARD_LOW), peek_f64(window + WINDOW_REWARD_HIGH)
        n = peek_i64(window + WINDOW_N)
        gamma = peek_f64(window + WINDOW_GAMMA)
        total, discount = 0.0, 1.0
        used = 0
        last = row
        at = row
        flags = 0
        while True:
            word = peek_u32(metas + w.META_BYTES * at + 12)
            link = word >> w.LINK_SHIFT
            after = at + link
            ended = word & (w.TERMINATED | w.TRUNCATED)
            inline = link != 0 and (word & w.KEPT) == 0
            if (after >= end and not inline) or (used > 0 and word & w.FINAL):
                return False
            waits = inline and after >= limit
            nothing = waits and over
            if inline and not waits:
                nothing = peek_u32(metas + w.META_BYTES * after + 12) & w.FIRST != 0
            if nothing and ended & w.TERMINATED:
                # its observation will never come, and has no influence: its own stands in
                after = at
            elif waits or nothing or (link == 0 and not ended & w.TERMINATED):
                # there is no successor: end one step earlier, with this row as the next observation; unless one may come yet
                if used == 0 or (waits and not over and peek_i64(window + WINDOW_BOOTSTRAP) == 0):
                    return False
                after = at
                break
            if writes and base != 0:
                total += discount * _reward(base, stride, double, factor, offset, low, high, at)
            discount *= gamma
            used += 1
            last = at
            flags = ended
            if ended != 0 or used == n:
                break
            at = after
        if writes:
            _put_transition(window, metas, envs, slot, row, last, after, flags, used, total, discount)
        return True

    return walk


_walk_transition, _is_transition = _walking(writes=True), _walking(writes=False)


def transition_anchors(window, entry, row, wanted, unused):
    """Which rows anchor a transition (kernels.cpu.windows)."""
    metas = peek_i64(peek_i64(window + WINDOW_TABLE) + w.VIEW_META)
    envs, limit = peek_i64(entry + ENTRY_ENVS), peek_i64(entry + ENTRY_LIMIT)
    oldest, n = peek_i64(window + WINDOW_OLDEST), peek_i64(window + WINDOW_N)
    ordinary = envs << w.LINK_SHIFT
    bits = 0
    for i in range(32):
        if (wanted >> i) & 1 == 0:
            continue
        at = metas + w.META_BYTES * (row + i)
        found = row + i + n * envs < limit and peek_i32(at) >= oldest
        if found:
            other = (peek_u32(at + 12) & ~w.FIRST) ^ ordinary
            for _ in range(n - 1):
                at += w.META_BYTES * envs
                other |= peek_u32(at + 12) ^ ordinary
            found = (other | (peek_u32(at + w.META_BYTES * envs + 12) & w.FIRST)) == 0
        if found or _is_transition(window, 0, row + i, entry):
            bits |= 1 << i
    return bits


def _transitions(item: int, scaled: bool) -> Any:
    """The resolver of transitions whose returns sum up rewards of `item` bytes (0: none), `scaled` where they are transformed.

    Most transitions lie inside an episode: n steps, each linked to the row one tick on. That is presumed, all steps are read
    at once, so that their cache misses overlap, and only a row of which it is not true is walked link by link.
    """

    @inner(forceinline=True)
    def reward_at(at, factor, offset, low, high):
        if not scaled:
            return peek_f64(at) if item == 8 else peek_f32(at)
        return _reward(at, 0, item == 8, factor, offset, low, high, 0)

    def resolve(window, job, slots, count, unused):
        # read once: nothing that is stored below can change them, which a compiler cannot know
        metas = peek_i64(peek_i64(window + WINDOW_TABLE) + w.VIEW_META)
        row_at, entry_at = peek_i64(job + JOB_ROWS), peek_i64(job + JOB_ENTRIES)
        oldest = peek_i64(window + WINDOW_OLDEST)
        base, stride = peek_i64(window + WINDOW_REWARD), peek_i64(window + WINDOW_REWARD_STRIDE)
        factor, offset = peek_f64(window + WINDOW_REWARD_FACTOR), peek_f64(window + WINDOW_REWARD_OFFSET)
        low, high = peek_f64(window + WINDOW_REWARD_LOW), peek_f64(window + WINDOW_REWARD_HIGH)
        n = peek_i64(window + WINDOW_N)
        gamma = peek_f64(window + WINDOW_GAMMA)
        for i in range(count):
            slot = peek_i64(slots + 8 * i)
            row = peek_i64(row_at + 8 * slot)
            entry = peek_i64(entry_at + 8 * slot)
            envs = peek_i64(entry + ENTRY_ENVS)
            after = row + n * envs
            presumed = after < peek_i64(entry + ENTRY_LIMIT) and peek_i32(metas + w.META_BYTES * row) >= oldest
            total, discount = 0.0, gamma
            if presumed:
                ordinary = envs << w.LINK_SHIFT
                at, reward = metas + w.META_BYTES * row + 12, base + stride * row
                other = (peek_u32(at) & ~w.FIRST) ^ ordinary
                if item:
                    total += reward_at(reward, factor, offset, low, high)
                for _ in range(n - 1):
                    at += w.META_BYTES * envs
                    other |= peek_u32(at) ^ ordinary
                    if item:
                        reward += stride * envs
                        total += discount * reward_at(reward, factor, offset, low, high)
                    discount *= gamma
                presumed = (other | (peek_u32(at + w.META_BYTES * envs) & w.FIRST)) == 0
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
def ask_ahead(window, metas, row, envs):
    """Prefetch what a transition's steps are resolved from; returns the row that it most likely reads besides its own."""
    n = peek_i64(window + WINDOW_N)
    reward = peek_i64(window + WINDOW_REWARD)
    stride = peek_i64(window + WINDOW_REWARD_STRIDE)
    at = row
    for _ in range(n):
        prefetch(metas + w.META_BYTES * at)
        if reward != 0:
            prefetch(reward + stride * at)
        at += envs
    prefetch(metas + w.META_BYTES * at)
    return row + max(1, n) * envs


TRANSITIONS = {(item, scaled): _transitions(item, scaled) for item in (0, 4, 8) for scaled in (False, True)}
