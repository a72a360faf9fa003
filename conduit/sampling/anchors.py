"""How many rows of a table a window could be drawn at now, each looked at once.

A draw chooses among the rows of a list of pages (`uniform.look`) and resolves the window of the chosen one; here the windows of all of
them are resolved, and those that are whole are counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.jit import entry, kernel
from conduit.kernels.cpu import J_GENERATIONS, J_ROWS, J_TABLE, J_WINDOW, J_WORDS
from conduit.kernels.describing import describe_window
from conduit.kernels.plan import make_plan
from conduit.kernels.resolve import (
    AGES,
    E_BYTES,
    E_FIRST,
    E_GENERATION,
    E_PAGE,
    V_AGES,
    V_FOLLOWING,
    V_FOLLOWING_LANES,
    V_FOLLOWING_STACKED,
    V_LANES,
    V_NEED,
    V_RESOLVE,
    V_SHORT,
    V_STACKED,
)
from conduit.kernels.windows import Transition, Window, crosses, has_next, lanes
from conduit.sampling.pages import empty_list
from conduit.sampling.uniform import S_PAGES, S_SNAPSHOT, S_WORDS, look
from conduit.store.atomics import call_5, fence_acquire, load_relaxed, peek_i64, poke_i64
from conduit.store.protocol import block_of
from conduit.store.table import TableView
from conduit.store.words import GENERATION_SHIFT, PAGE_STATE, T_MAX_SAMPLED, T_SAMPLED

_CHUNK = 64
_CHUNK_LANES = 1 << 16


@kernel("int64(int64, int64, int64, int64)", nogil=True)
def count_anchors(state, job, slots, chunk):  # type: ignore[no-untyped-def]
    """Rows at which a job's window could be drawn now.

    Args:
        state: Words of a uniform sampler (uniform.S_*).
        job: A job with a window and room for `chunk` rows and generations.
        slots: Address of int64 [chunk], the numbers from 0 on.
        chunk: Rows that are resolved at a time.
    """
    table, window = peek_i64(job + J_TABLE), peek_i64(job + J_WINDOW)
    row_at, entry_at = peek_i64(job + J_ROWS), peek_i64(job + J_GENERATIONS)
    resolve = peek_i64(window + V_RESOLVE)
    look(state, table, peek_i64(window + V_NEED), peek_i64(window + V_SHORT))
    entries = peek_i64(state + S_SNAPSHOT)
    total = 0
    for k in range(peek_i64(state + S_PAGES)):
        entry = entries + E_BYTES * k
        rows = peek_i64(entry + E_BYTES) - peek_i64(entry)
        found = 0
        for start in range(0, rows, chunk):
            count = min(chunk, rows - start)
            for i in range(count):
                poke_i64(row_at + 8 * i, peek_i64(entry + E_FIRST) + start + i)
                poke_i64(entry_at + 8 * i, entry)
            done = 0
            while done < count:
                more = call_5(resolve, window, job, slots + 8 * done, count - done, 0)
                found += more
                done += more + 1
        fence_acquire()
        if load_relaxed(block_of(table, peek_i64(entry + E_PAGE)) + PAGE_STATE) >> GENERATION_SHIFT == peek_i64(
            entry + E_GENERATION
        ):
            total += found
    return total


def anchors(table: TableView, window: Window | None) -> int:
    """Rows at which a window could be drawn now, of whatever priority and policy version.

    Args:
        table: The table.
        window: None stands for transitions of one step.

    Raises:
        ConfigError: The table was created for narrower windows, or this is none.
    """
    window = Transition() if window is None else window
    # flags are in every schema, and nothing is delivered
    plan = make_plan(table.layout.schema, 1, window, fields=("terminated",))
    table.layout.table.check_window(*plan.reach, crosses=crosses(window))
    per_slot = int(np.prod(lanes(window), dtype=np.int64)) * (window.stack if isinstance(window, Transition) else 1)
    chunk = max(1, min(_CHUNK, _CHUNK_LANES // per_slot))
    index = np.zeros((2, chunk * per_slot), np.int64)
    slots, rows, generations = np.zeros((3, chunk), np.int64)
    slots[:] = np.arange(chunk)
    ages = np.zeros(AGES, np.int64)
    here, following = index[0].ctypes.data, index[1].ctypes.data
    after = np.zeros(chunk, np.int64)
    addresses = {
        V_FOLLOWING: after.ctypes.data,
        V_STACKED: here,
        V_FOLLOWING_STACKED: following,
        V_LANES: here,
        V_FOLLOWING_LANES: following if has_next(window) else 0,
        V_AGES: ages.ctypes.data,
    }
    sampled = int(table.descriptor[T_SAMPLED // 8]), int(table.descriptor[T_MAX_SAMPLED // 8])
    words, _ = describe_window(plan, table.address, sampled, [], addresses)
    job: np.ndarray[Any, Any] = np.zeros(J_WORDS, np.int64)
    for offset, value in (
        (J_TABLE, table.address),
        (J_WINDOW, words.ctypes.data),
        (J_ROWS, rows.ctypes.data),
        (J_GENERATIONS, generations.ctypes.data),
    ):
        job[offset // 8] = value
    pages = empty_list(table.layout.pages)
    state = np.zeros(S_WORDS, np.int64)
    state[S_SNAPSHOT // 8] = pages.ctypes.data
    return entry(count_anchors)(state.ctypes.data, job.ctypes.data, slots.ctypes.data, chunk)
