"""The resolvers of windows of many steps: sequences, episodes and rollouts."""

from __future__ import annotations

from typing import Any

from conduit.kernels.cpu.job import JOB_ENTRIES, JOB_ROWS
from conduit.kernels.cpu.transitions import put_flag, too_old
from conduit.kernels.cpu.windows import (
    ENTRY_ENVS,
    ENTRY_LIMIT,
    ENTRY_OVER,
    ENTRY_PAGE,
    WINDOW_ACROSS,
    WINDOW_BURN_IN,
    WINDOW_ENVS,
    WINDOW_EVERY,
    WINDOW_FOLLOWING_LANES,
    WINDOW_FROM_FIRST,
    WINDOW_IS_FIRST,
    WINDOW_LANES,
    WINDOW_LENGTH,
    WINDOW_LOSS_MASK,
    WINDOW_MASK,
    WINDOW_TABLE,
    WINDOW_TERMINATED,
    WINDOW_TRUNCATED,
    WINDOW_USED,
    WINDOW_WHOLE,
)
from conduit.native.jit import inner
from conduit.native.memory import load_relaxed, peek_i32, peek_i64, peek_u32, poke_i64
from conduit.store.format import words as w
from conduit.store.pages.protocol import block_of


@inner
def _may_anchor(window, table, page, local, envs):
    """True when a sequence, episode or rollout may start at a local row, by the row's place alone."""
    meta = peek_i64(table + w.VIEW_META) + w.META_BYTES * (page * peek_i64(table + w.VIEW_ROWS) + local)
    word = peek_u32(meta + 12)
    across = peek_i64(window + WINDOW_ACROSS) != 0
    position = peek_i32(meta + 4)
    if word & w.DELETED:
        return False
    if peek_i64(window + WINDOW_ENVS) != 0:
        if envs != peek_i64(window + WINDOW_ENVS) or local % envs != 0:
            return False
        across = True
    elif (word & w.FINAL and not across) or (peek_i64(window + WINDOW_FROM_FIRST) != 0 and word & w.FIRST == 0):
        return False
    every = peek_i64(window + WINDOW_EVERY)
    if across and every > 1:
        position = load_relaxed(block_of(table, page) + w.PAGE_TICK) + local // envs
    return every <= 1 or position % every == 0


@inner
def _following(metas, row, limit, end, over):
    """Row of a step's next observation (kernels.reference.gather.following_row), or -1 where there is none.

    `limit` is the row behind the last committed one, behind which nothing will come if `over`; `end` the row behind the page.
    """
    word = peek_u32(metas + w.META_BYTES * row + 12)
    after = row + (word >> w.LINK_SHIFT)
    if word & w.KEPT:
        return after if after < end else -1
    if after != row:
        if after >= limit:
            if over == 0:
                return -1
        elif peek_u32(metas + w.META_BYTES * after + 12) & w.FIRST == 0:
            return after
    return row if word & w.TERMINATED else -1


def _sequences(writes: bool) -> Any:
    """Windows Sequence and Episode: what resolves one, or only says whether there is one."""

    @inner
    def sequence(window, job, slot, row, entry):
        table = peek_i64(window + WINDOW_TABLE)
        metas = peek_i64(table + w.VIEW_META)
        envs = peek_i64(entry + ENTRY_ENVS)
        limit = peek_i64(entry + ENTRY_LIMIT)
        over = peek_i64(entry + ENTRY_OVER)
        length = peek_i64(window + WINDOW_LENGTH)
        meta = metas + w.META_BYTES * row
        across = peek_i64(window + WINDOW_ACROSS) != 0
        page = peek_i64(entry + ENTRY_PAGE)
        if not _may_anchor(window, table, page, row - page * peek_i64(table + w.VIEW_ROWS), envs) or too_old(
            window, meta
        ):
            return -1
        whole = peek_i64(window + WINDOW_WHOLE) != 0
        index = peek_i64(window + WINDOW_LANES) + 8 * length * slot
        next_index = peek_i64(window + WINDOW_FOLLOWING_LANES)
        wants_next = next_index != 0
        if not writes and not wants_next and (across or not whole) and row + (length - 1) * envs < limit:
            # it may be shorter, and has all of its rows
            return 0
        next_index += 8 * length * slot
        end = (page + 1) * peek_i64(table + w.VIEW_ROWS)
        at = row
        used = 0
        ended = 0
        while used < length and ended == 0:
            if at >= limit:
                if used == 0 or across or over == 0:
                    return -1
                # the stream ended in the episode's middle
                break
            word = peek_u32(metas + w.META_BYTES * at + 12)
            if used > 0 and word & w.FIRST and not across:
                break
            final = (word & w.FINAL) != 0
            if wants_next:
                after = -1 if final else _following(metas, at, limit, end, over)
                if after < 0 and not final:
                    return -1
                if writes:
                    poke_i64(next_index + 8 * used, after)
            if writes:
                poke_i64(index + 8 * used, at)
                lane = length * slot + used
                put_flag(peek_i64(window + WINDOW_TERMINATED), lane, word & w.TERMINATED)
                put_flag(peek_i64(window + WINDOW_TRUNCATED), lane, (word >> 1) & 1)
                put_flag(peek_i64(window + WINDOW_IS_FIRST), lane, (word & w.FIRST) != 0)
                put_flag(peek_i64(window + WINDOW_MASK), lane, not final)
                put_flag(
                    peek_i64(window + WINDOW_LOSS_MASK), lane, not final and used >= peek_i64(window + WINDOW_BURN_IN)
                )
            used += 1
            at += envs
            if not across:
                ended = word & (w.TERMINATED | w.TRUNCATED)
        if whole and (ended == 0 if peek_i64(window + WINDOW_FROM_FIRST) != 0 else used < length):
            return -1
        if writes:
            if peek_i64(window + WINDOW_USED) != 0:
                poke_i64(peek_i64(window + WINDOW_USED) + 8 * slot, used)
            for lane in range(used, length):
                poke_i64(index + 8 * lane, -1)
                if wants_next:
                    poke_i64(next_index + 8 * lane, -1)
                for flag in (WINDOW_TERMINATED, WINDOW_TRUNCATED, WINDOW_IS_FIRST, WINDOW_MASK, WINDOW_LOSS_MASK):
                    put_flag(peek_i64(window + flag), length * slot + lane, 0)
        return 0

    return sequence


def _rollouts(writes: bool) -> Any:
    """Window Rollout: what resolves one, or only says whether there is one."""

    @inner
    def rollout(window, job, slot, row, entry):
        table = peek_i64(window + WINDOW_TABLE)
        metas = peek_i64(table + w.VIEW_META)
        envs = peek_i64(entry + ENTRY_ENVS)
        page = peek_i64(entry + ENTRY_PAGE)
        local = row - page * peek_i64(table + w.VIEW_ROWS)
        limit = peek_i64(entry + ENTRY_LIMIT)
        over = peek_i64(entry + ENTRY_OVER)
        count = peek_i64(window + WINDOW_LENGTH) * envs
        if not _may_anchor(window, table, page, local, envs) or row + count > limit:
            return -1
        if too_old(window, metas + w.META_BYTES * row):
            return -1
        index = peek_i64(window + WINDOW_LANES) + 8 * count * slot
        next_index = peek_i64(window + WINDOW_FOLLOWING_LANES)
        wants_next = next_index != 0
        if not writes and not wants_next:
            return 0
        next_index += 8 * count * slot
        end = (page + 1) * peek_i64(table + w.VIEW_ROWS)
        for lane in range(count):
            word = peek_u32(metas + w.META_BYTES * (row + lane) + 12)
            if wants_next:
                after = -1 if word & w.FINAL else _following(metas, row + lane, limit, end, over)
                if after < 0 and word & w.FINAL == 0:
                    return -1
                if writes:
                    poke_i64(next_index + 8 * lane, after)
            if writes:
                poke_i64(index + 8 * lane, row + lane)
                at = count * slot + lane
                put_flag(peek_i64(window + WINDOW_TERMINATED), at, word & w.TERMINATED)
                put_flag(peek_i64(window + WINDOW_TRUNCATED), at, (word >> 1) & 1)
                put_flag(peek_i64(window + WINDOW_IS_FIRST), at, (word & w.FIRST) != 0)
                put_flag(peek_i64(window + WINDOW_MASK), at, (word & w.FINAL) == 0)
                put_flag(peek_i64(window + WINDOW_LOSS_MASK), at, (word & w.FINAL) == 0)
        return 0

    return rollout


def _in_turn(one: Any) -> Any:
    """A resolver that calls `one(window, job, slot, row, entry) -> 0 | -1` for each slot."""

    def resolve(window, job, slots, count, unused):
        for i in range(count):
            slot = peek_i64(slots + 8 * i)
            row = peek_i64(peek_i64(job + JOB_ROWS) + 8 * slot)
            if one(window, job, slot, row, peek_i64(peek_i64(job + JOB_ENTRIES) + 8 * slot)) < 0:
                return i
        return count

    return resolve


def _one_by_one(one: Any) -> Any:
    """Which rows anchor a window (kernels.cpu.windows), by a function that says it of one."""

    def anchors(window, entry, row, wanted, unused):
        bits = 0
        for i in range(32):
            if (wanted >> i) & 1 and one(window, 0, 0, row + i, entry) == 0:
                bits |= 1 << i
        return bits

    return anchors


SEQUENCES, ROLLOUTS = _in_turn(_sequences(writes=True)), _in_turn(_rollouts(writes=True))
SEQUENCE_ANCHORS, ROLLOUT_ANCHORS = _one_by_one(_sequences(writes=False)), _one_by_one(_rollouts(writes=False))
