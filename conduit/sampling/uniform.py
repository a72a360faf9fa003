"""Uniform sampling of 1-step transitions, with replacement, over every anchor of every stream.

An anchor is a row whose transition is complete: its next observation is in the same page (words.PAGE_FIRST, halo). The
pages are looked at once per draw; the draw is then a function of (seed, batch number, slot, attempt) and of the rows
committed, so the same rows and seed give the same batches. Rows that are no anchors (observation-only rows, the newest
row of a stream, truncated rows without a final observation) are rejected and drawn again, which keeps the rest uniform.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.jit import address, inner
from conduit.kernels.cpu import J_FOLLOWING, J_GENERATIONS, J_PAGES, J_ROWS, J_TABLE, J_WINDOW, ask_for
from conduit.kernels.philox import random_pair, scale_to
from conduit.kernels.resolve import (
    E_BYTES,
    E_ENVS,
    E_FIRST,
    E_GENERATION,
    E_LIMIT,
    E_PAGE,
    E_START,
    V_NEED,
    V_RESOLVE,
    V_SAMPLED,
    ask_ahead,
)
from conduit.store.atomics import call_5, load_acquire, load_relaxed, peek_i64, peek_u32, poke_i64
from conduit.store.protocol import block_of
from conduit.store.words import (
    DELETED,
    FINAL,
    GENERATION_SHIFT,
    KIND_MASK,
    META_BYTES,
    OPEN,
    PAGE_COMMITTED,
    PAGE_ENDED,
    PAGE_ENVS,
    PAGE_EPOCH,
    PAGE_FIRST,
    PAGE_STATE,
    SEALED,
    T_CONTROL,
    T_COUNT,
    T_FUTURE,
    T_MAX_SAMPLED,
    T_META,
    T_ROWS,
    T_SAMPLED,
    TABLE_EPOCH,
)

S_SEED, S_BATCH, S_LEAST, S_CANDIDATES, S_SNAPSHOT, S_PAGES = range(0, 48, 8)
"""Words of the sampler's state: seed, number of the batch, least number of candidates, candidates at the last look,
address of the list of pages (kernels.resolve.E_*), pages listed."""
_TRIES = (1 << 19) - 1
_TRIES_OF_COUNTED = 1 << 16
"""Where deliveries are counted, running dry is nothing unusual."""
_CHUNK = 8
_SIGNATURE = "int64(int64, int64, int64, int64, int64)"


@inner
def lane(slot, attempt, tries):  # type: ignore[no-untyped-def]
    """Counter of one try: pair of slots in 32 bits, the delivery's attempt in 12, the try in 19."""
    return (slot >> 1) | ((attempt & 4095) << 32) | (tries << 44)


@inner
def needed(table, need):  # type: ignore[no-untyped-def]
    """Ticks of future that a row of an open page must have to be drawn.

    Where deliveries of a row are counted, the widest window's: a row is not drawn from the page that it is about to leave,
    so its count moves with it.
    """
    return peek_i64(table + T_FUTURE) if peek_i64(table + T_SAMPLED) != 0 else need


@inner
def _has_fresh(table, page, first, end):  # type: ignore[no-untyped-def]
    """True when one of the local rows [first, end) may be delivered once more; most pages of a drained table have none."""
    limit = peek_i64(table + T_MAX_SAMPLED)
    start = page * peek_i64(table + T_ROWS)
    for row in range(start + first, start + end):
        if peek_u32(peek_i64(table + T_SAMPLED) + 4 * row) < limit:
            word = peek_u32(peek_i64(table + T_META) + META_BYTES * row + 12)
            if word & (FINAL | DELETED) == 0:
                return True
    return False


@inner
def look(state, table, need):  # type: ignore[no-untyped-def]
    """List the pages that have candidates for windows that need `need` ticks of future; returns the number of candidates.

    A page that is being written is sampled up to its newest complete window. When it is sealed and its stream goes on, its
    last ticks (as many as the widest window of the table needs) belong to the next page, which has them as its halo.
    """
    entries = peek_i64(state + S_SNAPSHOT)
    rows = peek_i64(table + T_ROWS)
    future = peek_i64(table + T_FUTURE)
    total = 0
    listed = 0
    epoch = load_acquire(peek_i64(table + T_CONTROL) + TABLE_EPOCH) >> 1
    need = needed(table, need)
    sampled = peek_i64(table + T_SAMPLED)
    for page in range(peek_i64(table + T_COUNT)):
        block = block_of(table, page)
        word = load_acquire(block + PAGE_STATE)
        kind = word & KIND_MASK
        if (kind != OPEN and kind != SEALED) or (epoch != 0 and load_relaxed(block + PAGE_EPOCH) != epoch):
            continue
        committed = min(load_acquire(block + PAGE_COMMITTED), rows)
        end = committed
        envs = load_relaxed(block + PAGE_ENVS)
        if kind == OPEN:
            end -= need * envs
        elif load_relaxed(block + PAGE_ENDED) == 0:
            end -= future * envs
        first = max(0, load_relaxed(block + PAGE_FIRST))
        if end <= first or (sampled != 0 and not _has_fresh(table, page, first, end)):
            continue
        entry = entries + E_BYTES * listed
        poke_i64(entry + E_START, total)
        poke_i64(entry + E_PAGE, page)
        poke_i64(entry + E_FIRST, page * rows + first)
        poke_i64(entry + E_LIMIT, page * rows + committed)
        poke_i64(entry + E_GENERATION, word >> GENERATION_SHIFT)
        poke_i64(entry + E_ENVS, envs)
        total += end - first
        listed += 1
    poke_i64(entries + E_BYTES * listed, total)
    poke_i64(state + S_PAGES, listed)
    poke_i64(state + S_CANDIDATES, total)
    return total


@inner
def locate(entries, listed, guess, position):  # type: ignore[no-untyped-def]
    """The entry whose range holds `position`; `guess` is where it were if all ranges were as long, mostly off by one at most."""
    guess = min(guess, listed - 1)
    guess += (peek_i64(entries + E_BYTES * (guess + 1)) <= position) - (peek_i64(entries + E_BYTES * guess) > position)
    entry = entries + E_BYTES * min(max(guess, 0), listed - 1)
    if peek_i64(entry) <= position < peek_i64(entry + E_BYTES):
        return entry
    low = 0
    span = listed
    while span > 1:
        half = span >> 1
        low += half if peek_i64(entries + E_BYTES * (low + half)) <= position else 0
        span -= half
    return entries + E_BYTES * low


@inner
def _settle(state, job, slots, begin, end, attempt, total):  # type: ignore[no-untyped-def]
    """Resolve the windows of listed slots [begin, end), and draw again where a row anchors none; False when none is found."""
    window = peek_i64(job + J_WINDOW)
    resolve = peek_i64(window + V_RESOLVE)
    entries = peek_i64(state + S_SNAPSHOT)
    listed = peek_i64(state + S_PAGES)
    density = listed / total
    for i in range(begin, end):
        slot = peek_i64(slots + 8 * i)
        row = peek_i64(peek_i64(job + J_ROWS) + 8 * slot)
        entry = peek_i64(peek_i64(job + J_GENERATIONS) + 8 * slot)
        tries = 0
        while call_5(resolve, window, job, slot, row, entry) < 0:
            tries += 1
            if tries > (_TRIES if peek_i64(window + V_SAMPLED) == 0 else _TRIES_OF_COUNTED):
                return False
            first, second = random_pair(peek_i64(state + S_SEED), peek_i64(state + S_BATCH), lane(slot, attempt, tries))
            position = scale_to(second if slot & 1 else first, total)
            entry = locate(entries, listed, np.int64(position * density), position)
            row = peek_i64(entry + E_FIRST) + position - peek_i64(entry)
        poke_i64(peek_i64(job + J_ROWS) + 8 * slot, row)
        poke_i64(peek_i64(job + J_PAGES) + 8 * slot, peek_i64(entry + E_PAGE))
        poke_i64(peek_i64(job + J_GENERATIONS) + 8 * slot, peek_i64(entry + E_GENERATION))
    return True


def _draw(state, job, slots, count, attempt):  # type: ignore[no-untyped-def]
    table = peek_i64(job + J_TABLE)
    metas = peek_i64(table + T_META)
    window = peek_i64(job + J_WINDOW)
    total = look(state, table, peek_i64(window + V_NEED))
    if total <= 0 or total < peek_i64(state + S_LEAST):
        return -1
    entries = peek_i64(state + S_SNAPSHOT)
    listed = peek_i64(state + S_PAGES)
    seed = peek_i64(state + S_SEED)
    batch = peek_i64(state + S_BATCH)
    density = listed / total
    first = second = np.uint64(0)
    computed = -1
    # what lies at a chunk's positions is asked for, and looked at a chunk later: the memory works on one chunk's misses
    # while the one before is being resolved and the next one computed
    for start in range(0, count + _CHUNK, _CHUNK):
        here = min(_CHUNK, count - start)
        for i in range(start, start + here):
            slot = peek_i64(slots + 8 * i)
            if slot >> 1 != computed:
                computed = slot >> 1
                first, second = random_pair(seed, batch, lane(slot, attempt, 0))
            position = scale_to(second if slot & 1 else first, total)
            entry = locate(entries, listed, np.int64(position * density), position)
            row = peek_i64(entry + E_FIRST) + position - peek_i64(entry)
            after = ask_ahead(window, metas, row, peek_i64(entry + E_ENVS))
            poke_i64(peek_i64(job + J_ROWS) + 8 * slot, row)
            poke_i64(peek_i64(job + J_FOLLOWING) + 8 * slot, after)
            poke_i64(peek_i64(job + J_GENERATIONS) + 8 * slot, entry)
        if here > 0:
            ask_for(job, slots + 8 * start, here)
        before = start - _CHUNK
        if before >= 0 and not _settle(state, job, slots, before, min(before + _CHUNK, count), attempt, total):
            return -1
    return count


class Uniform:
    """Sampler contract's default: every complete transition is equally likely.

    Args:
        seed: 64-bit seed.
        pages: Pages of the table.
        least: Do not draw from fewer candidate rows than this.
    """

    def __init__(self, seed: int, pages: int, least: int = 1) -> None:
        self._snapshot = np.zeros((pages + 1, E_BYTES // 8), np.int64)
        self._state = np.zeros(S_PAGES // 8 + 1, np.int64)
        self._state[S_SEED // 8] = np.uint64(seed % 2**64).astype(np.int64)
        self._state[S_LEAST // 8] = least
        self._state[S_SNAPSHOT // 8] = self._snapshot.ctypes.data
        self._words = self._state.data
        self.function = address(_draw, _SIGNATURE)
        self.state = self._state.ctypes.data

    @property
    def batch(self) -> int:
        """Number of the batch that is drawn next; set it to repeat or skip draws."""
        return int(self._state[S_BATCH // 8])

    @batch.setter
    def batch(self, number: int) -> None:
        self._state[S_BATCH // 8] = number

    def advance(self) -> None:
        """Go on to the next batch."""
        self._words[S_BATCH // 8] += 1

    def finish(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Nothing is left to do for a batch of equal probabilities."""

    @property
    def candidates(self) -> int:
        """Rows that the last draw chose among, rejected ones included."""
        return int(self._state[S_CANDIDATES // 8])

    @property
    def offered(self) -> int:
        """The same: every row is looked at."""
        return self.candidates
