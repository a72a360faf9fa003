"""The rows of a table that a window could be drawn at now, each looked at once: counted, listed, and drawn as they are listed.

A draw chooses among the rows of a list of pages (`uniform.look`) and resolves the window of the chosen one; here the windows of all of
them are resolved, and those that are whole are counted. What is drawn from a list later is looked at again: a row whose page was
taken, or that was deleted, is none any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conduit.kernels.cpu.job import (
    JOB_ENTRIES,
    JOB_FIRST,
    JOB_FOLLOWING,
    JOB_ROWS,
    JOB_SLOTS,
    JOB_TABLE,
    JOB_WINDOW,
    JOB_WORDS,
    ask_for,
)
from conduit.kernels.cpu.transitions import ask_ahead
from conduit.kernels.cpu.window_job import describe_window
from conduit.kernels.cpu.windows import (
    AGES,
    ENTRY_BYTES,
    ENTRY_ENVS,
    ENTRY_FIRST,
    ENTRY_GENERATION,
    ENTRY_PAGE,
    WINDOW_AGES,
    WINDOW_FOLLOWING,
    WINDOW_FOLLOWING_LANES,
    WINDOW_FOLLOWING_STACKED,
    WINDOW_LANES,
    WINDOW_NEED,
    WINDOW_RESOLVE,
    WINDOW_SHORT,
    WINDOW_STACKED,
)
from conduit.kernels.spec.make_plan import make_plan
from conduit.kernels.spec.windows import Transition, Window, crosses, has_next, lanes
from conduit.native.descriptors import fill
from conduit.native.jit import address, entry, inner, kernel
from conduit.native.memory import call_5, fence_acquire, load_relaxed, peek_i64, poke_i64
from conduit.sampling.candidates import empty_list
from conduit.sampling.uniform import UNIFORM_BITS, UNIFORM_PAGES, UNIFORM_SNAPSHOT, UNIFORM_WORDS, look, note_pages
from conduit.store.format import words as w
from conduit.store.format.table_fit import check_window
from conduit.store.pages.deletion import is_present
from conduit.store.pages.protocol import block_of
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

_CHUNK = 64
_CHUNK_LANES = 1 << 16


LISTED_PICKED, LISTED_ENTRIES, LISTED_COUNT = range(UNIFORM_BITS, UNIFORM_BITS + 24, 8)
"""Words of a sampler that draws listed rows, behind those of a uniform one: address of the rows that the next batch takes (int64, one a
slot), address of the address of each page's description, rows picked."""
LISTED_WORDS = LISTED_COUNT // 8 + 1
SIGNATURE = "int64(int64, int64, int64, int64, int64)"


@kernel("int64(int64, int64, int64, int64, int64)", nogil=True)
def count_anchors(state, job, slots, chunk, out):
    """Rows at which a job's window could be drawn now.

    Args:
        state: Words of a uniform sampler (uniform.UNIFORM_*).
        job: A job with a window and room for `chunk` rows and entries.
        slots: Address of int64 [chunk], the numbers from 0 on.
        chunk: Rows that are resolved at a time.
        out: Address for the rows' numbers, int64, page by page; room for as many as `uniform.look` gives. 0: only count.
    """
    table, window = peek_i64(job + JOB_TABLE), peek_i64(job + JOB_WINDOW)
    row_at, entry_at = peek_i64(job + JOB_ROWS), peek_i64(job + JOB_ENTRIES)
    resolve = peek_i64(window + WINDOW_RESOLVE)
    look(state, table, peek_i64(window + WINDOW_NEED), peek_i64(window + WINDOW_SHORT))
    entries = peek_i64(state + UNIFORM_SNAPSHOT)
    total = 0
    for k in range(peek_i64(state + UNIFORM_PAGES)):
        entry = entries + ENTRY_BYTES * k
        rows = peek_i64(entry + ENTRY_BYTES) - peek_i64(entry)
        found = 0
        for start in range(0, rows, chunk):
            count = min(chunk, rows - start)
            for i in range(count):
                poke_i64(row_at + 8 * i, peek_i64(entry + ENTRY_FIRST) + start + i)
                poke_i64(entry_at + 8 * i, entry)
            done = 0
            while done < count:
                more = call_5(resolve, window, job, slots + 8 * done, count - done, 0)
                if out != 0:
                    for i in range(done, done + more):
                        poke_i64(out + 8 * (total + found + i - done), peek_i64(row_at + 8 * i))
                found += more
                done += more + 1
        fence_acquire()
        if load_relaxed(block_of(table, peek_i64(entry + ENTRY_PAGE)) + w.PAGE_STATE) >> w.GENERATION_SHIFT == peek_i64(
            entry + ENTRY_GENERATION
        ):
            total += found
    return total


@inner
def _is_there(table, entry, page):
    """Whether a listed page still has the rows that it had."""
    word = load_relaxed(block_of(table, page) + w.PAGE_STATE)
    return word >> w.GENERATION_SHIFT == peek_i64(entry + ENTRY_GENERATION) and is_present(table, page)


def _draw(state, job, slots, count, attempt):
    """Take the picked rows, each for its slot; -1 when one is not there any more, or has been overwritten meanwhile."""
    if attempt > 0:
        return -1
    table, window = peek_i64(job + JOB_TABLE), peek_i64(job + JOB_WINDOW)
    row_at, entry_at = peek_i64(job + JOB_ROWS), peek_i64(job + JOB_ENTRIES)
    after_at, metas, rows = peek_i64(job + JOB_FOLLOWING), peek_i64(table + w.VIEW_META), peek_i64(table + w.VIEW_ROWS)
    picked, entries = peek_i64(state + LISTED_PICKED), peek_i64(state + LISTED_ENTRIES)
    for i in range(count):
        slot = peek_i64(slots + 8 * i)
        row = peek_i64(picked + 8 * slot)
        entry = peek_i64(entries + 8 * (row // rows))
        if not _is_there(table, entry, row // rows):
            return -1
        poke_i64(row_at + 8 * slot, row)
        poke_i64(entry_at + 8 * slot, entry)
        poke_i64(after_at + 8 * slot, ask_ahead(window, metas, row, peek_i64(entry + ENTRY_ENVS)))
    ask_for(job, slots, count)
    if call_5(peek_i64(window + WINDOW_RESOLVE), window, job, slots, count, 0) < count:
        return -1
    note_pages(job, slots, count)
    return count


def callbacks() -> Iterator[tuple[Callable[..., int], str]]:
    """The draw of what is picked, for a library of kernels."""
    yield _draw, SIGNATURE


def draw_picked() -> int:
    """Native address of the sampler function that draws what is picked."""
    return address(_draw, SIGNATURE)


@kernel("int64(int64, int64, int64, int64, int64, int64)", nogil=True)
def pick(state, job, listed, begin, end, wanted):
    """Pick the first rows of a list that are still there.

    Args:
        state: The sampler's words; what is picked goes where LISTED_PICKED says, and its number to LISTED_COUNT.
        job: The job that is going to draw them; its first slot is written over.
        listed: Address of the list, int64 row numbers.
        begin: Where to begin in it.
        end: Where it ends.
        wanted: Rows to pick.

    Returns:
        Where to go on in the list.
    """
    table, window = peek_i64(job + JOB_TABLE), peek_i64(job + JOB_WINDOW)
    resolve, rows = peek_i64(window + WINDOW_RESOLVE), peek_i64(table + w.VIEW_ROWS)
    picked, entries = peek_i64(state + LISTED_PICKED), peek_i64(state + LISTED_ENTRIES)
    slot = peek_i64(job + JOB_SLOTS)
    found = 0
    while begin < end and found < wanted:
        row = peek_i64(listed + 8 * begin)
        begin += 1
        entry = peek_i64(entries + 8 * (row // rows))
        if not _is_there(table, entry, row // rows):
            continue
        poke_i64(slot, peek_i64(job + JOB_FIRST))
        poke_i64(peek_i64(job + JOB_ROWS) + 8 * peek_i64(slot), row)
        poke_i64(peek_i64(job + JOB_ENTRIES) + 8 * peek_i64(slot), entry)
        if call_5(resolve, window, job, slot, 1, 0) == 1:
            poke_i64(picked + 8 * found, row)
            found += 1
    poke_i64(state + LISTED_COUNT, found)
    return begin


def anchors(table: TableView, window: Window | None) -> int:
    """Rows at which a window could be drawn now, of whatever priority and policy version.

    Args:
        table: The table.
        window: None stands for transitions of one step.

    Raises:
        ConfigError: The table was created for narrower windows, or this is none.
    """
    pages = empty_list(table.layout.pages)
    state = np.zeros(UNIFORM_WORDS, np.int64)
    state[UNIFORM_SNAPSHOT // 8] = pages.ctypes.data
    return _survey(table, window, state, None)


def list_anchors(table: TableView, window: Window, state: Array) -> Array:
    """The same rows by number, int64 [n], page by page; the pages stand in the list of `state`, a sampler's words."""
    out: Array = np.zeros(table.layout.rows, np.int64)
    return out[: _survey(table, window, state, out)].copy()


def _survey(table: TableView, window: Window | None, state: Array, out: Array | None) -> int:
    window = Transition() if window is None else window
    # flags are in every schema, and nothing is delivered
    plan = make_plan(table.layout.schema, 1, window, fields=("terminated",))
    check_window(table.layout.table, *plan.reach, crosses=crosses(window))
    per_slot = int(np.prod(lanes(window), dtype=np.int64)) * (window.stack if isinstance(window, Transition) else 1)
    chunk = max(1, min(_CHUNK, _CHUNK_LANES // per_slot))
    index = np.zeros((2, chunk * per_slot), np.int64)
    slots, rows, entries = np.zeros((3, chunk), np.int64)
    slots[:] = np.arange(chunk)
    ages = np.zeros(AGES, np.int64)
    here, following = index[0].ctypes.data, index[1].ctypes.data
    after = np.zeros(chunk, np.int64)
    addresses = {
        WINDOW_FOLLOWING: after.ctypes.data,
        WINDOW_STACKED: here,
        WINDOW_FOLLOWING_STACKED: following,
        WINDOW_LANES: here,
        WINDOW_FOLLOWING_LANES: following if has_next(window) else 0,
        WINDOW_AGES: ages.ctypes.data,
    }
    sampled = int(table.descriptor[w.VIEW_SAMPLED // 8]), int(table.descriptor[w.VIEW_MAX_SAMPLED // 8])
    words, _ = describe_window(plan, table.address, sampled, [], addresses)
    job: np.ndarray[Any, Any] = np.zeros(JOB_WORDS, np.int64)
    fill(
        job,
        {
            JOB_TABLE: table.address,
            JOB_WINDOW: words.ctypes.data,
            JOB_ROWS: rows.ctypes.data,
            JOB_ENTRIES: entries.ctypes.data,
        },
    )
    into = 0 if out is None else out.ctypes.data
    return entry(count_anchors)(state.ctypes.data, job.ctypes.data, slots.ctypes.data, chunk, into)
