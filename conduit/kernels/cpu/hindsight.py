"""Goals of relabelled single transitions: the row behind a step of the same episode, chosen while the window is resolved.

The resolver of `Transition` finds a step; this one goes on to the end of its episode and picks the step whose achievement
becomes the goal. All of it lies in the page of the anchor, as far as the table was created for, so the generation that is
checked for the transition stands for the goal as well. A step of an episode that has not ended, or is longer than the longest
wanted, anchors no such transition.
"""

from __future__ import annotations

import numpy as np

from conduit.kernels.cpu.job import JOB_ENTRIES, JOB_ROWS
from conduit.kernels.cpu.sequences import _following
from conduit.kernels.cpu.transitions import put_flag
from conduit.kernels.cpu.windows import (
    ENTRY_ENVS,
    ENTRY_LIMIT,
    ENTRY_OVER,
    ENTRY_PAGE,
    WINDOW_GOALS,
    WINDOW_TABLE,
)
from conduit.native.jit import inner
from conduit.native.memory import call_5, peek_i32, peek_i64, peek_u32, poke_i64
from conduit.native.philox import PICK_GOALS, pick_lane, random_pair, scale_to
from conduit.store.format import words as w

(
    GOAL_RESOLVE,
    GOAL_ANCHORS,
    GOAL_ROWS,
    GOAL_FLAGS,
    GOAL_STRATEGY,
    GOAL_THRESHOLD,
    GOAL_LONGEST,
    GOAL_SAME,
    GOAL_SEED,
    GOAL_BATCH_AT,
) = range(0, 80, 8)
"""Words of goals: the transition's resolver, and what tells its anchors; int64 [batch] for the goals' rows, -1 for none, and bool [batch] for whether there is
one; number of the strategy; a step is relabelled when 62 random bits are below the threshold; the longest episode; whether what a
step achieved is stored in its own row; the loader's seed, and the address of the number of the batch."""
GOAL_WORDS = 10


@inner
def _known_steps(goals, row, entry, table):
    """How many steps of a row's episode are known to have achieved something; -1 where it is not a whole episode."""
    metas = peek_i64(table + w.VIEW_META)
    envs, limit, over = peek_i64(entry + ENTRY_ENVS), peek_i64(entry + ENTRY_LIMIT), peek_i64(entry + ENTRY_OVER)
    end = (peek_i64(entry + ENTRY_PAGE) + 1) * peek_i64(table + w.VIEW_ROWS)
    last = peek_i32(metas + w.META_BYTES * row + 4)
    longest = peek_i64(goals + GOAL_LONGEST)
    same = peek_i64(goals + GOAL_SAME) != 0
    at = row
    while True:
        # a row that is being overwritten may say anything
        if not 0 <= last < longest or at >= limit:
            return -1
        ended = peek_u32(metas + w.META_BYTES * at + 12) & (w.TERMINATED | w.TRUNCATED)
        after = _following(metas, at, limit, end, over)
        if after < 0 and (ended == 0 or not same):
            return -1
        if ended != 0:
            # of a last step without its final observation nobody knows what it achieved
            return last if after == at and not same else last + 1
        at += envs
        last += 1


@inner
def _choose(goals, slot, row, entry, table):
    """Choose a slot's goal; False where its step is not of a whole episode."""
    known = _known_steps(goals, row, entry, table)
    if known < 0:
        return False
    metas = peek_i64(table + w.VIEW_META)
    envs, limit, over = peek_i64(entry + ENTRY_ENVS), peek_i64(entry + ENTRY_LIMIT), peek_i64(entry + ENTRY_OVER)
    start = peek_i64(entry + ENTRY_PAGE) * peek_i64(table + w.VIEW_ROWS)
    end = start + peek_i64(table + w.VIEW_ROWS)
    step = peek_i32(metas + w.META_BYTES * row + 4)
    same = peek_i64(goals + GOAL_SAME) != 0
    goal = -1
    first, second = random_pair(
        peek_i64(goals + GOAL_SEED), peek_i64(peek_i64(goals + GOAL_BATCH_AT)), pick_lane(PICK_GOALS, slot)
    )
    if step < known and np.int64(first >> np.uint64(2)) < peek_i64(goals + GOAL_THRESHOLD):
        strategy = peek_i64(goals + GOAL_STRATEGY)
        place = known - 1
        if strategy == 0:
            place = step + scale_to(second, known - step)
        elif strategy == 2:
            place = scale_to(second, known)
        chosen = row + (place - step) * envs
        if chosen < start:
            return False
        goal = chosen if same else _following(metas, chosen, limit, end, over)
        if goal < 0:
            return False
    poke_i64(peek_i64(goals + GOAL_ROWS) + 8 * slot, goal)
    put_flag(peek_i64(goals + GOAL_FLAGS), slot, goal >= 0)
    return True


def resolve_goals(window, job, slots, count, unused):
    """Transitions with goals."""
    goals, table = peek_i64(window + WINDOW_GOALS), peek_i64(window + WINDOW_TABLE)
    done = call_5(peek_i64(goals + GOAL_RESOLVE), window, job, slots, count, 0)
    for i in range(done):
        slot = peek_i64(slots + 8 * i)
        row = peek_i64(peek_i64(job + JOB_ROWS) + 8 * slot)
        if not _choose(goals, slot, row, peek_i64(peek_i64(job + JOB_ENTRIES) + 8 * slot), table):
            return i
    return done


def goal_anchors(window, entry, row, wanted, unused):
    """Which rows anchor a transition with a goal (kernels.cpu.windows)."""
    goals, table = peek_i64(window + WINDOW_GOALS), peek_i64(window + WINDOW_TABLE)
    bits = call_5(peek_i64(goals + GOAL_ANCHORS), window, entry, row, wanted, 0)
    for i in range(32):
        if (bits >> i) & 1 and _known_steps(goals, row + i, entry, table) < 0:
            bits ^= 1 << i
    return bits
