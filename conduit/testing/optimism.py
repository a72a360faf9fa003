"""An optimistic read in separate steps: draw, gather, check the rows, validate.

It runs the product's own draw, gather and validation (conduit.plane.deliver.fill), so the result holds for loaders. The check before the
validation is the control: if it never finds a torn row, the test never produced a race.
"""

from __future__ import annotations

from conduit.kernels.cpu.job import (
    JOB_BATCH,
    JOB_DRAW,
    JOB_DRAW_STATE,
    JOB_SLOTS,
    JOB_WINDOW,
    overwritten,
    run_operations,
    write_meta,
)
from conduit.kernels.cpu.windows import WINDOW_TERMINATED, WINDOW_TRUNCATED
from conduit.native.jit import kernel
from conduit.native.memory import call_5, peek_i64, peek_u8, poke_i64
from conduit.testing.rows import find_torn_transitions

TORN_BEFORE, TORN_AFTER, VALID, OVERWRITTEN = range(0, 32, 8)
"""Offsets of the counts that `gather_and_look` adds to."""


@kernel("int64(int64)", nogil=True)
def draw(job):
    """Draw one batch's rows without reading them; returns the batch size, or -1 when there is nothing to draw."""
    slots = peek_i64(job + JOB_SLOTS)
    count = peek_i64(job + JOB_BATCH)
    for i in range(count):
        poke_i64(slots + 8 * i, i)
    return call_5(peek_i64(job + JOB_DRAW), peek_i64(job + JOB_DRAW_STATE), job, slots, count, 0)


@kernel("int64(int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def gather_and_look(job, obs, after, action, reward, torn, counts):
    """Gather what was drawn, find torn rows, validate, and count the torn ones among all and among those that passed.

    Args:
        job: A buffer's job, after `draw`.
        obs, after, action, reward: Addresses of the buffer's arrays.
        torn: Address of uint8 [batch].
        counts: Address of int64 [4]: torn before validation, torn after it, rows that passed, rows found overwritten.
    """
    slots = peek_i64(job + JOB_SLOTS)
    count = peek_i64(job + JOB_BATCH)
    run_operations(job, slots, count, 0)
    write_meta(job, slots, count)
    window = peek_i64(job + JOB_WINDOW)
    terminated, truncated = peek_i64(window + WINDOW_TERMINATED), peek_i64(window + WINDOW_TRUNCATED)
    before = find_torn_transitions(obs, after, action, reward, terminated, truncated, count, torn)
    left = overwritten(job, slots, count)
    excused = 0
    for i in range(left):
        excused += peek_u8(torn + peek_i64(slots + 8 * i))
    poke_i64(counts + TORN_BEFORE, peek_i64(counts + TORN_BEFORE) + before)
    poke_i64(counts + TORN_AFTER, peek_i64(counts + TORN_AFTER) + before - excused)
    poke_i64(counts + VALID, peek_i64(counts + VALID) + count - left)
    poke_i64(counts + OVERWRITTEN, peek_i64(counts + OVERWRITTEN) + left)
    return before - excused
