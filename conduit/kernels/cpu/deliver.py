"""Delivery on the CPU: draw, gather, transform, validate, and draw again what was overwritten; one call per batch.

The kernel is handed a job (int64 words, JOB_*), runs without the interpreter lock, and works in blocks of slots, small
enough that writers rarely overwrite a row between its draw and its check. Reads are optimistic: rows are copied first,
then each row's page must still be of the generation that was drawn, else the slot is drawn again. Nothing that a writer
might have touched is ever handed out.

The sampler is a C function called by address, `draw(state, job, slots, count, attempt) -> count | -1`, which fills the
job's row, following row, page and generation of each listed slot.
"""

from __future__ import annotations

from conduit.kernels.cpu.gather import OP_FUNCTION, OP_INDEX, OP_SOURCE, OP_STRIDE, OP_WORDS
from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    call_4,
    call_5,
    fence_acquire,
    load_acquire,
    load_relaxed,
    peek_i32,
    peek_i64,
    peek_u32,
    poke_i64,
    poke_u8,
    prefetch,
)
from conduit.store.format import words as w
from conduit.store.pages.deletion import is_present
from conduit.store.pages.protocol import block_of, has_rows, is_of

(
    JOB_TABLE,
    JOB_BATCH,
    JOB_BLOCK,
    JOB_DRAW,
    JOB_DRAW_STATE,
    JOB_WINDOW,
    JOB_OPERATIONS,
    JOB_OPERATION_COUNT,
    JOB_ROWS,
    JOB_FOLLOWING,
    JOB_PAGES,
    JOB_GENERATIONS,
    JOB_SLOTS,
    JOB_IDS,
    JOB_VERSIONS,
    JOB_EPISODES,
    JOB_STEPS,
    JOB_REDRAWN,
    JOB_FIRST,
    JOB_COUNTED,
    JOB_SEAT,
) = range(0, 168, 8)
"""Words of a job: the table descriptor; the slot behind the last one to fill, and rows per block; the sampler's function and state; the window
(kernels.cpu.windows); operations (descriptors back to back); scratch int64 [batch] for rows, following rows, pages, generations and open slots;
outputs int64 [batch] ids, versions, episodes, steps; a count of rows drawn again; the first slot to fill; where deliveries are counted,
what is counted of this batch (kernels.cpu.counted_deliveries) and the participant's seat line."""
JOB_WORDS = 21


@inner
def ask_for(job, slots, count):
    """Prefetch the head of everything that the operations are going to read for these slots.

    Samplers call it as soon as they know the job's rows and can guess the following ones, before they look at anything
    themselves: misses of all columns and rows overlap then, where column after column, as the operations run, would leave
    the memory half idle (docs/memory-model.md).
    """
    operation = peek_i64(job + JOB_OPERATIONS)
    for _ in range(peek_i64(job + JOB_OPERATION_COUNT)):
        index = peek_i64(operation + OP_INDEX)
        if index != peek_i64(job + JOB_ROWS) and index != peek_i64(job + JOB_FOLLOWING):
            # rows of stacks and sequences lie side by side and are long enough for the hardware's own prefetch
            operation += 8 * OP_WORDS
            continue
        source = peek_i64(operation + OP_SOURCE)
        stride = peek_i64(operation + OP_STRIDE)
        # a stride that does not divide a line: a row may lie in two
        crosses = stride > 64 or (stride & (stride - 1)) != 0
        for i in range(count):
            at = source + stride * peek_i64(index + 8 * peek_i64(slots + 8 * i))
            prefetch(at)
            if crosses:
                prefetch(at + min(stride, 128) - 1)
        operation += 8 * OP_WORDS


@inner
def _gather(job, slots, count, attempt):
    """Run every operation on every slot; `attempt` is 0 when the slots are a whole block, in order."""
    operations = peek_i64(job + JOB_OPERATIONS)
    for k in range(peek_i64(job + JOB_OPERATION_COUNT)):
        operation = operations + 8 * OP_WORDS * k
        call_4(peek_i64(operation + OP_FUNCTION), operation, slots, count, attempt)


@inner
def write_meta(job, slots, count):
    """Write the keys of listed slots: ids, versions, episodes, steps."""
    table = peek_i64(job + JOB_TABLE)
    # read once: nothing that is stored below can change them, which a compiler cannot know
    metas = peek_i64(table + w.VIEW_META)
    blocks = block_of(table, 0)
    rows, pages, generations = peek_i64(job + JOB_ROWS), peek_i64(job + JOB_PAGES), peek_i64(job + JOB_GENERATIONS)
    ids, versions = peek_i64(job + JOB_IDS), peek_i64(job + JOB_VERSIONS)
    episodes, steps = peek_i64(job + JOB_EPISODES), peek_i64(job + JOB_STEPS)
    for i in range(count):
        slot = 8 * peek_i64(slots + 8 * i)
        row = peek_i64(rows + slot)
        generation = peek_i64(generations + slot)
        meta = metas + w.META_BYTES * row
        stream = load_relaxed(blocks + w.LINE * peek_i64(pages + slot) + w.PAGE_STREAM)
        poke_i64(ids + slot, ((generation & w.GENERATION_MASK) << w.ROW_BITS) | row)
        poke_i64(versions + slot, peek_i32(meta))
        poke_i64(steps + slot, peek_i32(meta + 4))
        poke_i64(episodes + slot, (stream << 32) | peek_u32(meta + 8))


@inner
def overwritten(job, slots, count):
    """Keep in `slots` those whose page is no longer what was drawn; returns their number."""
    table = peek_i64(job + JOB_TABLE)
    fence_acquire()
    left = 0
    for i in range(count):
        slot = peek_i64(slots + 8 * i)
        state = load_relaxed(block_of(table, peek_i64(peek_i64(job + JOB_PAGES) + 8 * slot)) + w.PAGE_STATE)
        if not is_of(state, peek_i64(peek_i64(job + JOB_GENERATIONS) + 8 * slot)):
            poke_i64(slots + 8 * left, slot)
            left += 1
    return left


@kernel("int64(int64)", nogil=True)
def deliver(job):
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
            if call_5(peek_i64(job + JOB_DRAW), peek_i64(job + JOB_DRAW_STATE), job, slots, count, attempt) < 0:
                return -1
            _gather(job, slots, count, attempt)
            write_meta(job, slots, count)
            count = overwritten(job, slots, count)
            attempt += 1
            poke_i64(job + JOB_REDRAWN, peek_i64(job + JOB_REDRAWN) + count)
    return batch - first


@kernel("int64(int64, int64, int64, int64)")
def still_valid(table, ids, count, out):
    """Tell which row ids still name the row they were given for: bool [count] at `out`; returns how many do."""
    rows = peek_i64(table + w.VIEW_ROWS)
    good = 0
    for i in range(count):
        key = peek_i64(ids + 8 * i)
        page = (key & w.ROW_MASK) // rows
        valid = False
        if page < peek_i64(table + w.VIEW_COUNT):
            state = load_acquire(block_of(table, page) + w.PAGE_STATE)
            same = ((state >> w.GENERATION_SHIFT) & w.GENERATION_MASK) == (key >> w.ROW_BITS)
            valid = same and has_rows(state) and is_present(table, page)
            word = peek_u32(peek_i64(table + w.VIEW_META) + w.META_BYTES * (key & w.ROW_MASK) + 12)
            valid = valid and word & w.DELETED == 0
        poke_u8(out + i, valid)
        good += valid
    return good
