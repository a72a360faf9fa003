"""The resolvers of windows of many steps: sequences, episodes and rollouts."""

from __future__ import annotations

from typing import Any

from conduit.jit import inner
from conduit.kernels.cpu import J_GENERATIONS, J_ROWS
from conduit.kernels.resolve import (
    E_ENVS,
    E_LIMIT,
    E_OVER,
    E_PAGE,
    V_ACROSS,
    V_BURN_IN,
    V_FOLLOWING_LANES,
    V_FROM_FIRST,
    V_IS_FIRST,
    V_LANES,
    V_LENGTH,
    V_LOSS_MASK,
    V_MASK,
    V_TABLE,
    V_TERMINATED,
    V_TRUNCATED,
    V_USED,
    V_WHOLE,
    may_anchor,
    put_flag,
    too_old,
)
from conduit.store.atomics import peek_i64, peek_u32, poke_i64
from conduit.store.words import FINAL, FIRST, KEPT, LINK_SHIFT, META_BYTES, T_META, T_ROWS, TERMINATED, TRUNCATED


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
    if not may_anchor(window, table, page, row - page * peek_i64(table + T_ROWS), envs) or too_old(window, meta):
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
            if used == 0 or across or peek_i64(entry + E_OVER) == 0:
                return -1
            # the stream ended in the episode's middle
            break
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
        put_flag(peek_i64(window + V_TERMINATED), lane, word & TERMINATED)
        put_flag(peek_i64(window + V_TRUNCATED), lane, (word >> 1) & 1)
        put_flag(peek_i64(window + V_IS_FIRST), lane, (word & FIRST) != 0)
        put_flag(peek_i64(window + V_MASK), lane, not final)
        put_flag(peek_i64(window + V_LOSS_MASK), lane, not final and used >= peek_i64(window + V_BURN_IN))
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
            put_flag(peek_i64(window + flag), length * slot + lane, 0)
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
    if too_old(window, metas + META_BYTES * row):
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
        put_flag(peek_i64(window + V_TERMINATED), at, word & TERMINATED)
        put_flag(peek_i64(window + V_TRUNCATED), at, (word >> 1) & 1)
        put_flag(peek_i64(window + V_IS_FIRST), at, (word & FIRST) != 0)
        put_flag(peek_i64(window + V_MASK), at, (word & FINAL) == 0)
        put_flag(peek_i64(window + V_LOSS_MASK), at, (word & FINAL) == 0)
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


SEQUENCES, ROLLOUTS = _in_turn(resolve_sequence), _in_turn(resolve_rollout)
