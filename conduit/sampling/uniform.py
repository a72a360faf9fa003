"""Uniform sampling of 1-step transitions, with replacement, over every anchor of every stream.

An anchor is a row whose transition is complete: its next observation is in the same page (words.PAGE_FIRST, halo). The
pages are looked at once per draw; the draw is then a function of (seed, batch number, slot, attempt) and of the rows
committed, so the same rows and seed give the same batches. Rows that are no anchors (observation-only rows, the newest
row of a stream, truncated rows without a final observation) are rejected and drawn again, which keeps the rest uniform.
"""

from __future__ import annotations

import numpy as np

from conduit.jit import address, inner
from conduit.kernels.cpu import J_FOLLOWING, J_GENERATIONS, J_PAGES, J_ROWS, J_TABLE, ask_for
from conduit.kernels.philox import random_pair, scale_to
from conduit.store.atomics import load_acquire, load_relaxed, peek_i64, peek_u32, poke_i64, prefetch
from conduit.store.protocol import block_of
from conduit.store.words import (
    FINAL,
    FIRST,
    GENERATION_SHIFT,
    KEPT,
    KIND_MASK,
    LINK_SHIFT,
    META_BYTES,
    OPEN,
    PAGE_COMMITTED,
    PAGE_ENDED,
    PAGE_ENVS,
    PAGE_FIRST,
    PAGE_STATE,
    SEALED,
    T_COUNT,
    T_FUTURE,
    T_META,
    T_ROWS,
    TERMINATED,
)

S_SEED, S_BATCH, S_LEAST, S_CANDIDATES, S_SNAPSHOT, S_PAGES = range(0, 48, 8)
"""Words of the sampler's state: seed, number of the batch, least number of candidates, candidates at the last look,
address of int64 [pages + 1, 6] (running total before the page, page, first row, committed, generation, envs), pages listed."""
_ENTRY = 48
_TRIES = (1 << 19) - 1
_CHUNK = 16
_SIGNATURE = "int64(int64, int64, int64, int64, int64)"


@inner
def _lane(slot, attempt, tries):  # type: ignore[no-untyped-def]
    """Counter of one try: pair of slots in 32 bits, the delivery's attempt in 12, the try in 19."""
    return (slot >> 1) | ((attempt & 4095) << 32) | (tries << 44)


@inner
def look(state, table):  # type: ignore[no-untyped-def]
    """List the pages that have candidates; returns the number of candidates."""
    entries = peek_i64(state + S_SNAPSHOT)
    rows = peek_i64(table + T_ROWS)
    future = peek_i64(table + T_FUTURE)
    total = 0
    listed = 0
    for page in range(peek_i64(table + T_COUNT)):
        block = block_of(table, page)
        word = load_acquire(block + PAGE_STATE)
        kind = word & KIND_MASK
        if kind != OPEN and kind != SEALED:
            continue
        committed = min(load_acquire(block + PAGE_COMMITTED), rows)
        end = committed
        envs = load_relaxed(block + PAGE_ENVS)
        if kind == OPEN or load_relaxed(block + PAGE_ENDED) == 0:
            end -= future * envs
        first = max(0, load_relaxed(block + PAGE_FIRST))
        if end <= first:
            continue
        entry = entries + _ENTRY * listed
        poke_i64(entry, total)
        poke_i64(entry + 8, page)
        poke_i64(entry + 16, page * rows + first)
        poke_i64(entry + 24, page * rows + committed)
        poke_i64(entry + 32, word >> GENERATION_SHIFT)
        poke_i64(entry + 40, envs)
        total += end - first
        listed += 1
    poke_i64(entries + _ENTRY * listed, total)
    poke_i64(state + S_PAGES, listed)
    poke_i64(state + S_CANDIDATES, total)
    return total


@inner
def _locate(entries, listed, guess, position):  # type: ignore[no-untyped-def]
    """The entry whose range holds `position`; `guess` is where it were if all ranges were as long, mostly off by one at most."""
    guess = min(guess, listed - 1)
    guess += (peek_i64(entries + _ENTRY * (guess + 1)) <= position) - (peek_i64(entries + _ENTRY * guess) > position)
    entry = entries + _ENTRY * min(max(guess, 0), listed - 1)
    if peek_i64(entry) <= position < peek_i64(entry + _ENTRY):
        return entry
    low = 0
    span = listed
    while span > 1:
        half = span >> 1
        low += half if peek_i64(entries + _ENTRY * (low + half)) <= position else 0
        span -= half
    return entries + _ENTRY * low


@inner
def following(metas, row, limit, end):  # type: ignore[no-untyped-def]
    """Physical row of the next observation, or -1 when the row is no anchor; see kernels.reference.following_row.

    Args:
        metas: Address of the table's meta.
        row: Physical row.
        limit: Physical row behind the page's last committed one.
        end: Physical row behind the page.
    """
    word = peek_u32(metas + META_BYTES * row + 12)
    link = word >> LINK_SHIFT
    after = row + link
    if word & FINAL or after >= end:
        return -1
    if link == 0:
        return row if word & TERMINATED else -1
    if word & KEPT:
        return after
    if after >= limit or peek_u32(metas + META_BYTES * after + 12) & FIRST:
        return -1
    return after


def _draw(state, job, slots, count, attempt):  # type: ignore[no-untyped-def]
    table = peek_i64(job + J_TABLE)
    metas = peek_i64(table + T_META)
    rows = peek_i64(table + T_ROWS)
    total = look(state, table)
    if total <= 0 or total < peek_i64(state + S_LEAST):
        return -1
    entries = peek_i64(state + S_SNAPSHOT)
    listed = peek_i64(state + S_PAGES)
    seed = peek_i64(state + S_SEED)
    batch = peek_i64(state + S_BATCH)
    density = listed / total
    first = second = np.uint64(0)
    computed = -1
    # all positions first, then all checks; what lies there is asked for in between, a chunk at a time, so that the memory
    # works on one chunk's misses while the next one is being computed
    for start in range(0, count, _CHUNK):
        here = min(_CHUNK, count - start)
        for i in range(start, start + here):
            slot = peek_i64(slots + 8 * i)
            if slot >> 1 != computed:
                computed = slot >> 1
                first, second = random_pair(seed, batch, _lane(slot, attempt, 0))
            position = scale_to(second if slot & 1 else first, total)
            entry = _locate(entries, listed, np.int64(position * density), position)
            row = peek_i64(entry + 16) + position - peek_i64(entry)
            after = row + peek_i64(entry + 40)
            prefetch(metas + META_BYTES * row)
            prefetch(metas + META_BYTES * after)
            poke_i64(peek_i64(job + J_ROWS) + 8 * slot, row)
            poke_i64(peek_i64(job + J_FOLLOWING) + 8 * slot, after)
            poke_i64(peek_i64(job + J_GENERATIONS) + 8 * slot, entry)
        ask_for(job, slots + 8 * start, here)
    for i in range(count):
        slot = peek_i64(slots + 8 * i)
        row = peek_i64(peek_i64(job + J_ROWS) + 8 * slot)
        entry = peek_i64(peek_i64(job + J_GENERATIONS) + 8 * slot)
        page = peek_i64(entry + 8)
        after = following(metas, row, peek_i64(entry + 24), (page + 1) * rows)
        tries = 0
        while after < 0:
            tries += 1
            if tries > _TRIES:
                return -1
            first, second = random_pair(seed, batch, _lane(slot, attempt, tries))
            position = scale_to(second if slot & 1 else first, total)
            entry = _locate(entries, listed, np.int64(position * density), position)
            page = peek_i64(entry + 8)
            row = peek_i64(entry + 16) + position - peek_i64(entry)
            after = following(metas, row, peek_i64(entry + 24), (page + 1) * rows)
        poke_i64(peek_i64(job + J_ROWS) + 8 * slot, row)
        poke_i64(peek_i64(job + J_FOLLOWING) + 8 * slot, after)
        poke_i64(peek_i64(job + J_PAGES) + 8 * slot, page)
        poke_i64(peek_i64(job + J_GENERATIONS) + 8 * slot, peek_i64(entry + 32))
    return count


class Uniform:
    """Sampler contract's default: every complete transition is equally likely.

    Args:
        seed: 64-bit seed.
        pages: Pages of the table.
        least: Do not draw from fewer candidate rows than this.
    """

    def __init__(self, seed: int, pages: int, least: int = 1) -> None:
        self._snapshot = np.zeros((pages + 1, _ENTRY // 8), np.int64)
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

    @property
    def candidates(self) -> int:
        """Rows that the last draw chose among, rejected ones included."""
        return int(self._state[S_CANDIDATES // 8])
