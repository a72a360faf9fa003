"""For batches on a device: which of the drawn rows the device reads by itself, and copies of the others for it to fetch.

A sample's window lies in one page. The device reads its rows *near*, in memory of its own or in registered host memory, where
its page is in place there in the generation that was drawn; otherwise they are *far*: the host copies them, as they are stored,
into pinned memory. Both are row numbers in some column: -1 stands for zeros, and `SKIP` for what comes the other way.
"""

from __future__ import annotations

from conduit.kernels.cpu.gather import OP_FUNCTION, OP_WORDS
from conduit.kernels.cpu.job import (
    JOB_GENERATIONS,
    JOB_PAGES,
    overwritten,
)
from conduit.native.jit import inner, kernel
from conduit.native.memory import call_4, peek_i64, poke_i64, poke_u32

SKIP = -2
"""A row number that tells a gather to leave its place as it is."""

PL_BASE, PL_GENERATION, PL_ROWS, PL_TAIL = range(0, 32, 8)
"""A page's place with the device: row of its local row 0, or -1 where it is not in place; generation; rows that are there from
the first one on, and the first one of those that are there up to the page's end (local)."""
PL_BYTES = 32

INDEX_ROWS, INDEX_LANES, INDEX_NEAR, INDEX_FAR, INDEX_LISTED = range(0, 40, 8)
"""An index array: the table's rows it holds, int64 [batch, lanes]; the same as near and far rows; and the far ones' rows of the
table, int64 [batch, lanes], in the order of their copies."""
INDEX_WORDS = 5

(
    SPLIT_JOB,
    SPLIT_PLACES,
    SPLIT_PAGE_ROWS,
    SPLIT_INDICES,
    SPLIT_INDEX_COUNT,
    SPLIT_COPIES,
    SPLIT_COPY_COUNT,
    SPLIT_NUMBERS,
    SPLIT_FAR,
    SPLIT_USED,
    SPLIT_STACK,
    SPLIT_FOLLOWING_STACK,
    SPLIT_STACK_SIZE,
    SPLIT_SHIFT,
    SPLIT_NEAR,
) = range(0, 120, 8)
"""Words of a staging: the delivery's job; places of pages; rows per page; index arrays (INDEX_*), back to back; operations that copy far
rows, back to back; number of each slot's copy, int64 [batch], -1 for none; scratch for numbers, int64 [batch]; copies so far; the
table's rows of both stacks, their size, and int32 [batch] for how far the second lies behind the first (0: not wanted);
int64 [batch], 1 for each slot that is near."""
SPLIT_WORDS = 15


@inner
def _is_near(staging, place, slot, generation, first):
    """True when every row that a slot reads is in place."""
    if peek_i64(place + PL_BASE) < 0 or peek_i64(place + PL_GENERATION) != generation:
        return False
    rows, tail = peek_i64(place + PL_ROWS), peek_i64(place + PL_TAIL)
    index = peek_i64(staging + SPLIT_INDICES)
    for _ in range(peek_i64(staging + SPLIT_INDEX_COUNT)):
        lanes = peek_i64(index + INDEX_LANES)
        at = peek_i64(index + INDEX_ROWS) + 8 * lanes * slot
        for lane in range(lanes):
            row = peek_i64(at + 8 * lane)
            if row >= 0 and rows <= row - first < tail:
                return False
        index += 8 * INDEX_WORDS
    return True


@inner
def _number(staging, slot):
    """The number of a slot's copy; it keeps the one it has."""
    at = peek_i64(staging + SPLIT_NUMBERS) + 8 * slot
    number = peek_i64(at)
    if number < 0:
        number = peek_i64(staging + SPLIT_USED)
        poke_i64(staging + SPLIT_USED, number + 1)
        poke_i64(at, number)
    return number


@inner
def _translate(staging, slot, near, number, shift):
    """Write a slot's near and far rows; `shift` leads from the table's rows to near ones."""
    index = peek_i64(staging + SPLIT_INDICES)
    for _ in range(peek_i64(staging + SPLIT_INDEX_COUNT)):
        lanes = peek_i64(index + INDEX_LANES)
        for lane in range(lanes):
            at = 8 * (lanes * slot + lane)
            row = peek_i64(peek_i64(index + INDEX_ROWS) + at)
            copy = lanes * number + lane
            poke_i64(peek_i64(index + INDEX_NEAR) + at, (row + shift if row >= 0 else -1) if near else SKIP)
            poke_i64(peek_i64(index + INDEX_FAR) + at, SKIP if near else (copy if row >= 0 else -1))
            if not near:
                poke_i64(peek_i64(index + INDEX_LISTED) + 8 * copy, row)
        index += 8 * INDEX_WORDS


@inner
def _shift(staging, slot):
    """How far a slot's second stack lies behind its first: the least number of frames that fits."""
    size = peek_i64(staging + SPLIT_STACK_SIZE)
    first = peek_i64(staging + SPLIT_STACK) + 8 * size * slot
    second = peek_i64(staging + SPLIT_FOLLOWING_STACK) + 8 * size * slot
    for shift in range(size):
        same = True
        for k in range(size - shift):
            if peek_i64(second + 8 * k) != peek_i64(first + 8 * (k + shift)):
                same = False
        if same:
            return shift
    return size


@kernel("int64(int64, int64, int64, int64)", nogil=True)
def stage(staging, slots, count, lost):
    """Find out which of the listed slots are near, and copy the rows of the others.

    Args:
        staging: Words of the staging.
        slots: int64 [count], slots that have been drawn.
        count: How many.
        lost: int64 [count], overwritten with the slots whose rows a writer overwrote before they were copied: draw these again.

    Returns:
        How many were lost.
    """
    job = peek_i64(staging + SPLIT_JOB)
    pages, generations = peek_i64(job + JOB_PAGES), peek_i64(job + JOB_GENERATIONS)
    page_rows = peek_i64(staging + SPLIT_PAGE_ROWS)
    numbers = peek_i64(staging + SPLIT_FAR)
    far = 0
    for i in range(count):
        slot = peek_i64(slots + 8 * i)
        page = peek_i64(pages + 8 * slot)
        place = peek_i64(staging + SPLIT_PLACES) + PL_BYTES * page
        first = page * page_rows
        near = _is_near(staging, place, slot, peek_i64(generations + 8 * slot), first)
        number = -1
        if not near:
            number = _number(staging, slot)
            poke_i64(numbers + 8 * far, number)
            poke_i64(lost + 8 * far, slot)
            far += 1
        poke_i64(peek_i64(staging + SPLIT_NEAR) + 8 * slot, near)
        _translate(staging, slot, near, number, peek_i64(place + PL_BASE) - first)
        if peek_i64(staging + SPLIT_SHIFT) != 0:
            poke_u32(peek_i64(staging + SPLIT_SHIFT) + 4 * slot, _shift(staging, slot))
    copies = peek_i64(staging + SPLIT_COPIES)
    for k in range(peek_i64(staging + SPLIT_COPY_COUNT)):
        copy = copies + 8 * OP_WORDS * k
        call_4(peek_i64(copy + OP_FUNCTION), copy, numbers, far, 1)
    return overwritten(job, lost, far)
