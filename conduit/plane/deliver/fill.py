"""Filling a batch on the CPU: draw, gather, transform, check, and draw again what was overwritten; one compiled call per batch.

The kernels run without the interpreter lock, and work in blocks of slots, small enough that writers rarely overwrite a row between its
draw and its check, and that what the draw asked for is in the caches when it is gathered. Nothing that a writer might have touched is
ever handed out. They call down: to the sampler (conduit.sampling), a C function known by its address, `draw(state, job, slots, count,
attempt) -> count | -1`, and to the steps of a job (conduit.kernels.cpu.job).
"""

from __future__ import annotations

from conduit.kernels.cpu.job import (
    JOB_BATCH,
    JOB_BLOCK,
    JOB_DRAW,
    JOB_DRAW_STATE,
    JOB_FIRST,
    JOB_REDRAWN,
    JOB_SLOTS,
    overwritten,
    run_operations,
    write_meta,
)
from conduit.native.jit import inner, kernel
from conduit.native.memory import call_5, peek_i64, poke_i64


@inner
def draw(job, slots, count, attempt):
    """Have the job's sampler draw listed slots; returns their number, or -1 when there is nothing to draw."""
    return call_5(peek_i64(job + JOB_DRAW), peek_i64(job + JOB_DRAW_STATE), job, slots, count, attempt)


@kernel("int64(int64)", nogil=True)
def fill(job):
    """Fill one batch, or the slots of it that are this job's (conduit.plane.deliver.mixed).

    Returns:
        Rows delivered, or -1 when the sampler found nothing to draw; the outputs are undefined then.
    """
    batch = peek_i64(job + JOB_BATCH)
    step = peek_i64(job + JOB_BLOCK)
    slots = peek_i64(job + JOB_SLOTS)
    first = peek_i64(job + JOB_FIRST)
    for start in range(first, batch, step):
        count = min(step, batch - start)
        for i in range(count):
            poke_i64(slots + 8 * i, start + i)
        attempt = 0
        while count > 0:
            if draw(job, slots, count, attempt) < 0:
                return -1
            run_operations(job, slots, count, attempt)
            write_meta(job, slots, count)
            count = overwritten(job, slots, count)
            attempt += 1
            poke_i64(job + JOB_REDRAWN, peek_i64(job + JOB_REDRAWN) + count)
    return batch - first


@kernel("int64(int64, int64, int64, int64, int64)", nogil=True)
def draw_again(job, slots, count, attempt, scratch):
    """Draw listed slots of a job without operations anew, until none is overwritten meanwhile.

    Args:
        job: The job.
        slots: int64 [count].
        count: How many.
        attempt: Number of the attempt; one that these slots have not been drawn with.
        scratch: int64 [count].

    Returns:
        The next attempt's number, or -1 when there is nothing to draw.
    """
    left = count
    for i in range(count):
        poke_i64(scratch + 8 * i, peek_i64(slots + 8 * i))
    while left > 0:
        poke_i64(job + JOB_REDRAWN, peek_i64(job + JOB_REDRAWN) + left)
        if draw(job, scratch, left, attempt) < 0:
            return -1
        write_meta(job, scratch, left)
        left = overwritten(job, scratch, left)
        attempt += 1
    return attempt
