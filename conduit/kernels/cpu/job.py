"""The job by which a batch is made: its words, and the steps that are done to listed slots of it.

A job is int64 words (JOB_*) that say what a batch is made of and where it goes. Whoever makes batches has slots drawn, runs the row
operations on them, writes their keys, and looks whether a writer has overwritten what was read (conduit.plane.deliver.fill). Reads are
optimistic: rows are copied first, then each row's page must still be of the generation that was drawn. Samplers fill in the job's row,
page and generation of each listed slot, and ask ahead for what will be read there. For the resolver of windows, which they call, they
fill in the row's entry in their list of pages (kernels.cpu.windows) first.
"""

from __future__ import annotations

from conduit.kernels.cpu.gather import OP_FUNCTION, OP_INDEX, OP_SOURCE, OP_STRIDE, OP_WORDS
from conduit.native.jit import inner
from conduit.native.memory import (
    call_4,
    fence_acquire,
    load_relaxed,
    peek_i32,
    peek_i64,
    peek_u32,
    poke_i64,
    prefetch,
)
from conduit.store.format import words as w
from conduit.store.pages.protocol import block_of, is_of

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
    JOB_ENTRIES,
    JOB_SLOTS,
    JOB_IDS,
    JOB_VERSIONS,
    JOB_EPISODES,
    JOB_STEPS,
    JOB_REDRAWN,
    JOB_FIRST,
    JOB_COUNTED,
    JOB_SEAT,
) = range(0, 176, 8)
"""Words of a job: the table descriptor; the slot behind the last one to fill, and rows per block; the sampler's function and state; the window
(kernels.cpu.windows); operations (descriptors back to back); scratch int64 [batch] for rows, following rows, pages, generations, addresses of entries (kernels.cpu.windows.ENTRY_*) and open slots;
outputs int64 [batch] ids, versions, episodes, steps; a count of rows drawn again; the first slot to fill; where deliveries are counted,
what is counted of this batch (plane.deliver.counted_deliveries) and the participant's seat line."""
JOB_WORDS = 22


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
def run_operations(job, slots, count, attempt):
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
