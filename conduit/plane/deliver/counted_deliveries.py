"""Deliveries that are counted: in a table whose rows may be delivered so often only, never once more, whatever else happens.

A row's count is one word: the generation its page was opened in, how often the row has been taken and how often delivered
(store.format.words). Loaders change it by compare-and-swap only, so each change is of the very row that was drawn. A batch *takes* its
rows once all of it has been drawn and checked; what is refused then (taken as often as it may be, overwritten meanwhile) is drawn
again. What is taken is *delivered* when the batch is handed out, or *given back* when it is not; only the last delivery counts
the row as gone. A loader that is killed in between has used up what it took (store.pages.settling).
"""

from __future__ import annotations

from conduit.kernels.cpu.job import (
    JOB_BATCH,
    JOB_COUNTED,
    JOB_FIRST,
    JOB_GENERATIONS,
    JOB_PAGES,
    JOB_ROWS,
    JOB_SEAT,
    JOB_SLOTS,
    JOB_TABLE,
    run_operations,
    write_meta,
)
from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    compare_and_swap,
    fence_acquire,
    fence_full,
    fetch_add,
    load_acquire,
    load_relaxed,
    peek_i64,
    poke_i64,
)
from conduit.plane.deliver.fill import draw, fill
from conduit.store.format import words as w
from conduit.store.pages.deletion import home_of, may_be_taken, weigh_nothing_late
from conduit.store.pages.protocol import block_of, is_of
from conduit.store.pages.row_counts import count_gone, mark_gone, tag_of

TAKEN_ROW, TAKEN_TAG, TAKEN_HOME, TAKEN_HOME_TAG = range(0, 32, 8)
"""What is known of a row that a batch has taken: the row, the generation of its count; the row it was copied from, or itself, or -1
where that one is not there any more, and that one's generation."""
TAKEN_BYTES = 32

_FIRST_ATTEMPT = 2048


def words_needed(batch: int) -> int:
    """int64 words of JOB_COUNTED: how many rows are taken, then TAKEN_* of each."""
    return 1 + TAKEN_BYTES // 8 * batch


@inner
def _is_still(table, page, generation):
    """True when a page is what was drawn; loads above stay above."""
    fence_acquire()
    return is_of(load_relaxed(block_of(table, page) + w.PAGE_STATE), generation)


@inner
def _take(job, table, slot):
    """Take a slot's row; False when it has been taken as often as it may be, or is overwritten."""
    row = peek_i64(peek_i64(job + JOB_ROWS) + 8 * slot)
    page = peek_i64(peek_i64(job + JOB_PAGES) + 8 * slot)
    at = peek_i64(table + w.VIEW_SAMPLED) + 8 * row
    word = load_acquire(at)
    home, local, home_tag = home_of(table, page, row - page * peek_i64(table + w.VIEW_ROWS))
    # then word and home are of the page as it was drawn
    if not _is_still(table, page, peek_i64(peek_i64(job + JOB_GENERATIONS) + 8 * slot)):
        return False
    limit = peek_i64(table + w.VIEW_MAX_SAMPLED)
    tag = tag_of(word)
    while tag_of(word) == tag and may_be_taken(word, limit):
        found = compare_and_swap(at, word, word + w.ONE_TAKEN)
        if found == word:
            counted = peek_i64(job + JOB_COUNTED)
            count = peek_i64(counted)
            entry = counted + 8 + TAKEN_BYTES * count
            poke_i64(entry + TAKEN_ROW, row)
            poke_i64(entry + TAKEN_TAG, tag)
            poke_i64(entry + TAKEN_HOME, home * peek_i64(table + w.VIEW_ROWS) + local if home >= 0 else -1)
            poke_i64(entry + TAKEN_HOME_TAG, home_tag)
            poke_i64(counted, count + 1)
            return True
        word = found
    return False


@inner
def _give_back(job):
    """The batch is not handed out: what it took may be taken by others."""
    counted = peek_i64(job + JOB_COUNTED)
    sampled = peek_i64(peek_i64(job + JOB_TABLE) + w.VIEW_SAMPLED)
    for i in range(peek_i64(counted)):
        entry = counted + 8 + TAKEN_BYTES * i
        at = sampled + 8 * peek_i64(entry + TAKEN_ROW)
        word = load_acquire(at)
        while tag_of(word) == peek_i64(entry + TAKEN_TAG):
            found = compare_and_swap(at, word, word - w.ONE_TAKEN)
            if found == word:
                break
            word = found
    poke_i64(counted, 0)
    fetch_add(peek_i64(job + JOB_SEAT) + w.SEAT_ENDED, 1)


@inner
def _deliver_one(table, entry, seat):
    """A taken row is handed out; the last time, it has gone."""
    limit, rows = peek_i64(table + w.VIEW_MAX_SAMPLED), peek_i64(table + w.VIEW_ROWS)
    row, tag = peek_i64(entry + TAKEN_ROW), peek_i64(entry + TAKEN_TAG)
    home, home_tag = peek_i64(entry + TAKEN_HOME), peek_i64(entry + TAKEN_HOME_TAG)
    at = peek_i64(table + w.VIEW_SAMPLED) + 8 * row
    word = load_acquire(at)
    while tag_of(word) == tag:
        new = word + 1
        last = new & w.MOST_DELIVERIES == limit
        if last:
            new |= w.HAS_GONE
        found = compare_and_swap(at, word, new)
        if found != word:
            word = found
            continue
        if last:
            if home == row:
                if word & w.HAS_GONE == 0:
                    count_gone(table, row // rows, tag)
            elif home >= 0 and mark_gone(table, home, home_tag):
                count_gone(table, home // rows, home_tag)
            weigh_nothing_late(table, row // rows, row, tag, seat)
        return


@kernel("int64(int64)", nogil=True)
def hand_out(job):
    """The batch is handed out; returns how many deliveries that counts."""
    counted = peek_i64(job + JOB_COUNTED)
    count = peek_i64(counted)
    if count == 0:
        return 0
    table, seat = peek_i64(job + JOB_TABLE), peek_i64(job + JOB_SEAT)
    for i in range(count):
        _deliver_one(table, counted + 8 + TAKEN_BYTES * i, seat)
    poke_i64(counted, 0)
    fetch_add(seat + w.SEAT_ENDED, 1)
    return count


@kernel("int64(int64)", nogil=True)
def give_back(job):
    """What the last batch took and was not handed out may be taken by others; returns how many rows that were."""
    count = peek_i64(peek_i64(job + JOB_COUNTED))
    if count > 0:
        _give_back(job)
    return count


@inner
def _keep_overwritten_first(job, table, slots, count):
    """`overwritten` that loses no slot of the list: those to draw again come first, the others behind."""
    fence_acquire()
    left = 0
    for i in range(count):
        slot = peek_i64(slots + 8 * i)
        page = peek_i64(peek_i64(job + JOB_PAGES) + 8 * slot)
        if not _is_still(table, page, peek_i64(peek_i64(job + JOB_GENERATIONS) + 8 * slot)):
            poke_i64(slots + 8 * i, peek_i64(slots + 8 * left))
            poke_i64(slots + 8 * left, slot)
            left += 1
    return left


@inner
def _take_all(job, table, slots):
    """Take every slot's row, drawing others for those that are refused; False when there are too few.

    Taking is what decides between loaders that draw a row at the same time, and between slots of one batch.
    """
    first = peek_i64(job + JOB_FIRST)
    count = peek_i64(job + JOB_BATCH) - first
    for i in range(count):
        poke_i64(slots + 8 * i, first + i)
    # draws of their own, whatever attempts the batch took
    attempt = _FIRST_ATTEMPT
    while True:
        left = 0
        for i in range(count):
            slot = peek_i64(slots + 8 * i)
            if not _take(job, table, slot):
                poke_i64(slots + 8 * left, slot)
                left += 1
        if left == 0:
            return True
        # drawing works on a part of the list; those that wait behind it are named in it already
        count = left
        while left > 0:
            attempt += 1
            if draw(job, slots, left, attempt) < 0:
                return False
            run_operations(job, slots, left, attempt)
            write_meta(job, slots, left)
            left = _keep_overwritten_first(job, table, slots, left)


@kernel("int64(int64)", nogil=True)
def fill_counted(job):
    """`fill`, in a table whose rows may be delivered so often only; `hand_out` or `give_back` follows."""
    if peek_i64(peek_i64(job + JOB_COUNTED)) > 0:
        _give_back(job)
    fetch_add(peek_i64(job + JOB_SEAT) + w.SEAT_STARTED, 1)
    fence_full()
    rows = fill(job)
    if rows < 0 or not _take_all(job, peek_i64(job + JOB_TABLE), peek_i64(job + JOB_SLOTS)):
        _give_back(job)
        return -1
    if rows == 0:
        fetch_add(peek_i64(job + JOB_SEAT) + w.SEAT_ENDED, 1)
    return rows
