"""Uniform sampling of 1-step transitions, with replacement, over every anchor of every stream.

An anchor is a row whose transition is complete: its next observation is in the same page (words.PAGE_FIRST, halo). The
pages are looked at once per draw; the draw is then a function of (seed, batch number, slot, attempt) and of the rows
committed, so the same rows and seed give the same batches. Rows that are no anchors (observation-only rows, the newest
row of a stream, truncated rows without a final observation) are rejected and drawn again, which keeps the rest uniform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conduit.errors import ConfigError, UnknownName
from conduit.kernels.cpu.job import (
    JOB_ENTRIES,
    JOB_FOLLOWING,
    JOB_GENERATIONS,
    JOB_PAGES,
    JOB_ROWS,
    JOB_TABLE,
    JOB_WINDOW,
    ask_for,
)
from conduit.kernels.cpu.transitions import ask_ahead
from conduit.kernels.cpu.windows import (
    ENTRY_BYTES,
    ENTRY_ENVS,
    ENTRY_FIRST,
    ENTRY_GENERATION,
    ENTRY_PAGE,
    WINDOW_NEED,
    WINDOW_RESOLVE,
    WINDOW_SAMPLED,
    WINDOW_SHORT,
)
from conduit.native.jit import address, inner
from conduit.native.memory import call_5, peek_i64, poke_i64, words_at
from conduit.native.philox import draw_lane, random_pair, scale_to
from conduit.numbers import whole
from conduit.sampling.candidates import (
    MOST_LOOKS,
    empty_list,
    has_fresh,
    have_turned,
    list_page,
    note_open,
    rows_to_draw,
)
from conduit.store.format import words as w
from conduit.store.pages.protocol import pages_used

UNIFORM_SEED, UNIFORM_BATCH, UNIFORM_LEAST, UNIFORM_CANDIDATES, UNIFORM_SNAPSHOT, UNIFORM_PAGES, UNIFORM_BITS = range(
    0, 56, 8
)
"""Words of the sampler's state: seed, number of the batch, least number of candidates, candidates at the last look,
address of the list of pages (kernels.cpu.windows.ENTRY_*), pages listed, and room for one chunk's random bits."""
UNIFORM_WORDS = UNIFORM_BITS // 8
"""Words of the state, but for the random bits."""
_TRIES = (1 << 19) - 1
_TRIES_OF_COUNTED = 1 << 16
"""Where deliveries are counted, running dry is nothing unusual."""
_CHUNK = 16
_SIGNATURE = "int64(int64, int64, int64, int64, int64)"


@inner
def look(state, table, need, short):
    """List the pages that have candidates for windows (sampling.candidates.rows_to_draw); returns the number of candidates."""
    entries = peek_i64(state + UNIFORM_SNAPSHOT)
    rows = peek_i64(table + w.VIEW_ROWS)
    sampled = peek_i64(table + w.VIEW_SAMPLED)
    total = listed = 0
    for _ in range(MOST_LOOKS):
        total = listed = noted = 0
        for page in range(pages_used(table)):
            begin, end, committed, word, envs, over = rows_to_draw(table, page, need, short)
            if end <= begin or (sampled != 0 and not has_fresh(table, page, begin, end)):
                continue
            list_page(entries + ENTRY_BYTES * listed, total, page, rows, begin, committed, word, envs, over)
            total += end - begin
            listed += 1
            if (word & w.KIND_MASK) == w.OPEN:
                noted = note_open(table, entries, noted, page, word)
        if not have_turned(table, entries, noted):
            break
    poke_i64(entries + ENTRY_BYTES * listed, total)
    poke_i64(state + UNIFORM_PAGES, listed)
    poke_i64(state + UNIFORM_CANDIDATES, total)
    return total


@inner
def locate(entries, listed, guess, position):
    """The entry whose range holds `position`; `guess` is where it were if all ranges were as long, mostly off by one at most."""
    guess = min(guess, listed - 1)
    guess += (peek_i64(entries + ENTRY_BYTES * (guess + 1)) <= position) - (
        peek_i64(entries + ENTRY_BYTES * guess) > position
    )
    entry = entries + ENTRY_BYTES * min(max(guess, 0), listed - 1)
    if peek_i64(entry) <= position < peek_i64(entry + ENTRY_BYTES):
        return entry
    low = 0
    span = listed
    while span > 1:
        half = span >> 1
        low += half if peek_i64(entries + ENTRY_BYTES * (low + half)) <= position else 0
        span -= half
    return entries + ENTRY_BYTES * low


@inner
def random_bits(seed, batch, attempt, slots, count, out):
    """The first 64 random bits of each listed slot, int64 [count] at `out`; without branches, so that eight are made at once."""
    listed, made = words_at(slots), words_at(out)
    for i in range(count):
        slot = listed[i]
        first, second = random_pair(seed, batch, draw_lane(slot, attempt, 0))
        made[i] = np.int64(second if slot & 1 else first)


@inner
def note_pages(job, slots, count):
    """Fill in the page and generation of listed slots, from their entries."""
    page_at, generation_at, entry_at = (
        peek_i64(job + JOB_PAGES),
        peek_i64(job + JOB_GENERATIONS),
        peek_i64(job + JOB_ENTRIES),
    )
    for i in range(count):
        slot = peek_i64(slots + 8 * i)
        entry = peek_i64(entry_at + 8 * slot)
        poke_i64(page_at + 8 * slot, peek_i64(entry + ENTRY_PAGE))
        poke_i64(generation_at + 8 * slot, peek_i64(entry + ENTRY_GENERATION))


@inner
def _settle(state, job, slots, count, attempt, total):
    """Resolve the windows of listed slots, and draw again where a row anchors none; False when none is found."""
    window = peek_i64(job + JOB_WINDOW)
    resolve = peek_i64(window + WINDOW_RESOLVE)
    row_at, entry_at = peek_i64(job + JOB_ROWS), peek_i64(job + JOB_ENTRIES)
    entries = peek_i64(state + UNIFORM_SNAPSHOT)
    listed = peek_i64(state + UNIFORM_PAGES)
    density = listed / total
    done = call_5(resolve, window, job, slots, count, 0)
    tries = 0
    while done < count:
        tries += 1
        if tries > (_TRIES if peek_i64(window + WINDOW_SAMPLED) == 0 else _TRIES_OF_COUNTED):
            return False
        slot = peek_i64(slots + 8 * done)
        first, second = random_pair(
            peek_i64(state + UNIFORM_SEED), peek_i64(state + UNIFORM_BATCH), draw_lane(slot, attempt, tries)
        )
        position = scale_to(second if slot & 1 else first, total)
        entry = locate(entries, listed, np.int64(position * density), position)
        poke_i64(row_at + 8 * slot, peek_i64(entry + ENTRY_FIRST) + position - peek_i64(entry))
        poke_i64(entry_at + 8 * slot, entry)
        more = call_5(resolve, window, job, slots + 8 * done, count - done, 0)
        tries = 0 if more > 0 else tries
        done += more
    note_pages(job, slots, count)
    return True


def _draw(state, job, slots, count, attempt):
    table = peek_i64(job + JOB_TABLE)
    metas = peek_i64(table + w.VIEW_META)
    window = peek_i64(job + JOB_WINDOW)
    total = look(state, table, peek_i64(window + WINDOW_NEED), peek_i64(window + WINDOW_SHORT))
    if total <= 0 or total < peek_i64(state + UNIFORM_LEAST):
        return -1
    entries = peek_i64(state + UNIFORM_SNAPSHOT)
    listed = peek_i64(state + UNIFORM_PAGES)
    seed = peek_i64(state + UNIFORM_SEED)
    batch = peek_i64(state + UNIFORM_BATCH)
    row_at, after_at, entry_at = (
        peek_i64(job + JOB_ROWS),
        peek_i64(job + JOB_FOLLOWING),
        peek_i64(job + JOB_ENTRIES),
    )
    bits = state + UNIFORM_BITS
    density = listed / total
    # what lies at a chunk's positions is asked for, and looked at a chunk later: the memory works on one chunk's misses
    # while the one before is being resolved and the next one computed
    for start in range(0, count + _CHUNK, _CHUNK):
        here = min(_CHUNK, count - start)
        if here > 0:
            chunk = slots + 8 * start
            random_bits(seed, batch, attempt, chunk, here, bits)
            positions = words_at(bits)
            for i in range(here):
                positions[i] = scale_to(np.uint64(positions[i]), total)
            for i in range(here):
                slot = peek_i64(chunk + 8 * i)
                position = positions[i]
                entry = locate(entries, listed, np.int64(position * density), position)
                row = peek_i64(entry + ENTRY_FIRST) + position - peek_i64(entry)
                after = ask_ahead(window, metas, row, peek_i64(entry + ENTRY_ENVS))
                poke_i64(row_at + 8 * slot, row)
                poke_i64(after_at + 8 * slot, after)
                poke_i64(entry_at + 8 * slot, entry)
            ask_for(job, chunk, here)
        before = start - _CHUNK
        if before >= 0:
            past = min(_CHUNK, count - before)
            if not _settle(state, job, slots + 8 * before, past, attempt, total):
                return -1
    return count


def callbacks() -> Iterator[tuple[Callable[..., int], str]]:
    """The draw, for a library of kernels."""
    yield _draw, _SIGNATURE


class Uniform:
    """Sampler contract's default: every complete transition is equally likely.

    Args:
        seed: 64-bit seed.
        pages: Pages of the table.
        least: Do not draw from fewer candidate rows than this.
    """

    def __init__(self, seed: int, pages: int, least: int = 1) -> None:
        self._snapshot = empty_list(pages)
        self._state = np.zeros(UNIFORM_WORDS + _CHUNK, np.int64)
        self._state[UNIFORM_SEED // 8] = np.uint64(seed % 2**64).astype(np.int64)
        self._state[UNIFORM_LEAST // 8] = least
        self._state[UNIFORM_SNAPSHOT // 8] = self._snapshot.ctypes.data
        self._words = self._state.data
        self.function = address(_draw, _SIGNATURE)
        self.state: int = self._state.ctypes.data

    @property
    def batch_at(self) -> int:
        """Address of `batch`."""
        return self.state + UNIFORM_BATCH

    @property
    def batch(self) -> int:
        """Number of the batch that is drawn next; set it to repeat or skip draws."""
        return self._words[UNIFORM_BATCH // 8]

    @batch.setter
    def batch(self, number: int) -> None:
        value = whole(number)
        if value is None or not 0 <= value < 1 << 63:
            raise ConfigError(f"Expected the number of a batch, from 0, got {number!r}")
        self._words[UNIFORM_BATCH // 8] = value

    def finish(self, arrays: dict[str, np.ndarray[Any, Any]], first: int = 0, count: int | None = None) -> None:
        """Nothing is left to do for a batch of equal probabilities."""

    @property
    def beta(self) -> float:
        """Rows that are drawn uniformly have no importance weights, and no exponent of them.

        Raises:
            UnknownName: Always, when it is set too.
        """
        raise UnknownName(
            "Expected a loader opened with sampling=conduit.Prioritized(...), this one draws uniformly", at="beta"
        )

    @beta.setter
    def beta(self, value: float) -> None:
        raise UnknownName(
            f"Expected a loader opened with sampling=conduit.Prioritized(...) to set beta={value!r}, this one draws uniformly",
            at="beta",
        )

    def __repr__(self) -> str:
        return f"Uniform(batch {self.batch}, {self.candidates:,} candidate rows at the last draw)"

    @property
    def candidates(self) -> int:
        """Rows that the last draw chose among, rejected ones included."""
        return self._words[UNIFORM_CANDIDATES // 8]

    @property
    def offered(self) -> int:
        """The same: every row is looked at."""
        return self.candidates
