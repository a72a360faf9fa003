"""Prioritised sampling: P(i) = p_i / sum p, exactly, in integers (conduit.sampling.tree).

Draws are stratified (slot k of B draws from the k-th of B equal slices of the mass; Schaul et al., "Prioritized Experience
Replay", 2016) or independent. Rows of priority 0 are never drawn while others are positive; if all are 0, draws are uniform.
Importance weights are (N * P(i))^-beta with N the rows that could be drawn, over 1, the batch's largest, or the table's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from conduit.errors import ConfigError
from conduit.jit import address, entry, kernel
from conduit.kernels.cpu import J_BATCH, J_FOLLOWING, J_GENERATIONS, J_PAGES, J_ROWS, J_TABLE, J_WINDOW, ask_for
from conduit.kernels.plan import Computed
from conduit.kernels.philox import random_pair, scale_to
from conduit.kernels.resolve import E_BYTES, E_ENVS, E_GENERATION, E_PAGE, E_START, SIGNATURE, V_NEED, V_RESOLVE
from conduit.kernels.leaves import checked_priorities, leaves_of
from conduit.sampling.tree import BLOCK, P_BEGIN, P_BYTES, P_END, P_GENERATION, descend, refresh, update
from conduit.sampling.uniform import S_BATCH, Uniform, lane, locate
from conduit.store.atomics import (
    call_5,
    peek_i64,
    peek_u32,
    poke_f32,
    poke_f64,
    poke_i64,
    prefetch,
)
from conduit.store.layout import Priorities
from conduit.store.words import T_COUNT, T_PRIORITY, T_ROWS

Array = np.ndarray[Any, Any]
Normalise = Literal["none", "batch", "buffer"]

Q_UNIFORM_STATE, Q_UNIFORM, Q_TREE, Q_ENTRIES, Q_LEAVES, Q_TOTAL, Q_CANDIDATES, Q_STRATIFIED, Q_LEAST, Q_SEED = range(
    0, 80, 8
)
Q_BATCH_AT = 80
"""Words of the sampler: the uniform sampler's state and function (for a table of zeros), sums, list of pages, leaf of each
slot, sum of all leaves and rows that could be drawn at the last draw, options, seed, address of the batch number."""
Q_WORDS = 11

WEIGHTS = (Computed("weights", "float32", ()), Computed("probabilities", "float64", ()))
"""What prioritised sampling adds to a batch."""

_CHUNK = 16
_TRIES = (1 << 19) - 1
_STRATUM_TRIES = 64


@dataclass(frozen=True, slots=True)
class Prioritised:
    """Prioritised sampling of a loader; the table must have been created with priorities.

    Attributes:
        beta: Exponent of importance weights, from 0; can be changed live by `loader.sampler.beta`.
        normalise: Divide weights by nothing, by the batch's largest, or by the largest any row of the table has.
        stratified: One draw per equal slice of the mass, or independent draws.
    """

    beta: float = 0.4
    normalise: Normalise = "batch"
    stratified: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta < float("inf"):
            raise ConfigError(f"Expected beta of at least 0, got {self.beta!r}")
        if self.normalise not in ("none", "batch", "buffer"):
            raise ConfigError(f"Expected normalise 'none', 'batch' or 'buffer', got {self.normalise!r}")


def _draw(state, job, slots, count, attempt):  # type: ignore[no-untyped-def]
    table = peek_i64(job + J_TABLE)
    window = peek_i64(job + J_WINDOW)
    resolve = peek_i64(window + V_RESOLVE)
    tree = peek_i64(state + Q_TREE)
    entries = peek_i64(state + Q_ENTRIES)
    leaves = peek_i64(state + Q_LEAVES)
    rows = peek_i64(table + T_ROWS)
    listed, total, candidates = refresh(tree, table, peek_i64(window + V_NEED), entries)
    poke_i64(state + Q_TOTAL, total)
    poke_i64(state + Q_CANDIDATES, candidates)
    if candidates < max(1, peek_i64(state + Q_LEAST)):
        return -1
    if total == 0:
        for i in range(count):
            poke_i64(leaves + 8 * peek_i64(slots + 8 * i), 0)
        return call_5(peek_i64(state + Q_UNIFORM), peek_i64(state + Q_UNIFORM_STATE), job, slots, count, attempt)
    seed = peek_i64(state + Q_SEED)
    batch = peek_i64(peek_i64(state + Q_BATCH_AT))
    size = peek_i64(job + J_BATCH)
    density = listed / total
    whole, rest = total // size, total % size
    for start in range(0, count, _CHUNK):
        here = min(_CHUNK, count - start)
        for i in range(start, start + here):
            slot = peek_i64(slots + 8 * i)
            tries = 0
            while True:
                low, high = 0, total
                if peek_i64(state + Q_STRATIFIED) != 0 and tries < _STRATUM_TRIES:
                    low = whole * slot + rest * slot // size
                    high = whole * (slot + 1) + rest * (slot + 1) // size
                first, second = random_pair(seed, batch, lane(slot, attempt, tries))
                position = low + scale_to(second if slot & 1 else first, max(1, high - low))
                entry_ = locate(entries, listed, np.int64(position * density), position)
                page = peek_i64(entry_ + E_PAGE)
                local, leaf = descend(tree, table, page, position - peek_i64(entry_ + E_START))
                row = page * rows + local
                if local >= 0 and call_5(resolve, window, job, slot, row, entry_) >= 0:
                    break
                tries += 1
                if tries > _TRIES:
                    return -1
            poke_i64(leaves + 8 * slot, leaf)
            poke_i64(peek_i64(job + J_ROWS) + 8 * slot, row)
            poke_i64(peek_i64(job + J_PAGES) + 8 * slot, page)
            poke_i64(peek_i64(job + J_GENERATIONS) + 8 * slot, peek_i64(entry_ + E_GENERATION))
        ask_for(job, slots + 8 * start, here)
    return count


@kernel("int64(int64, int64, int64, int64, int64, float64, int64)")
def weigh(leaves, count, total, candidates, probabilities, beta, weights):  # type: ignore[no-untyped-def]
    """Probabilities (float64) and unnormalised importance weights (float32) of a batch from its leaves."""
    for i in range(count):
        leaf = peek_i64(leaves + 8 * i)
        probability = leaf / total if total > 0 else 1.0 / candidates
        if probabilities != 0:
            poke_f64(probabilities + 8 * i, probability)
        if weights != 0:
            poke_f32(weights + 4 * i, (candidates * probability) ** -beta)
    return count


@kernel("int64(int64, int64)", nogil=True)
def least_leaf(tree, table):  # type: ignore[no-untyped-def]
    """Smallest positive leaf among the rows that the learner's sums cover, or 0."""
    rows = peek_i64(table + T_ROWS)
    least = 1 << 32
    for page in range(peek_i64(table + T_COUNT)):
        known = tree + P_BYTES * page
        leaves = peek_i64(table + T_PRIORITY) + 4 * page * rows
        for row in range(peek_i64(known + P_BEGIN), peek_i64(known + P_END)):
            leaf = peek_u32(leaves + 4 * row)
            if 0 < leaf < least:
                least = leaf
    return least if least < 1 << 32 else 0


class PrioritisedSampler:
    """The sampler of a loader with prioritised sampling; owns one learner's sums.

    Args:
        options: What was asked for.
        rule: The table's.
        table: Address of the table descriptor.
        geometry: Pages and rows per page.
        size: Samples per batch.
        seed: 64-bit seed.
        least: Do not draw from fewer candidate rows than this.

    Attributes:
        beta: Exponent of the importance weights; set it to anneal.
        ignored: Updates that came too late: their rows were overwritten.
    """

    def __init__(
        self,
        options: Prioritised,
        rule: Priorities,
        table: int,
        geometry: tuple[int, int],
        size: int,
        seed: int,
        least: int,
    ) -> None:
        pages, page_rows = geometry
        self.beta = options.beta
        self.ignored = 0
        self._options = options
        self._rule = rule
        self._table = table
        self._uniform = Uniform(seed, pages, 1)
        blocks = -(-page_rows // BLOCK)
        self._tree = np.zeros(P_BYTES // 8 * pages + blocks * pages, np.int64)
        self._tree[: P_BYTES // 8 * pages].reshape(pages, -1)[:, P_GENERATION // 8] = -1
        self._entries = np.zeros((pages + 1, E_BYTES // 8), np.int64)
        self._leaves = np.zeros(size, np.int64)
        self._state = np.zeros(Q_WORDS, np.int64)
        for offset, value in (
            (Q_UNIFORM_STATE, self._uniform.state),
            (Q_UNIFORM, self._uniform.function),
            (Q_TREE, self._tree.ctypes.data),
            (Q_ENTRIES, self._entries.ctypes.data),
            (Q_LEAVES, self._leaves.ctypes.data),
            (Q_STRATIFIED, options.stratified),
            (Q_LEAST, least),
            (Q_BATCH_AT, self._uniform.state + S_BATCH),
        ):
            self._state[offset // 8] = value
        self._state[Q_SEED // 8] = np.uint64(seed % 2**64).astype(np.int64)
        self.function = address(_draw, SIGNATURE)
        self.state: int = self._state.ctypes.data

    @property
    def batch(self) -> int:
        """Number of the batch that is drawn next; set it to repeat or skip draws."""
        return self._uniform.batch

    @batch.setter
    def batch(self, number: int) -> None:
        self._uniform.batch = number

    def advance(self) -> None:
        """Go on to the next batch."""
        self._uniform.advance()

    @property
    def candidates(self) -> int:
        """Rows that the last draw chose among."""
        return int(self._state[Q_CANDIDATES // 8])

    def finish(self, arrays: dict[str, Array]) -> None:
        """Fill "probabilities" and "weights" of the batch that was drawn last."""
        total, candidates = int(self._state[Q_TOTAL // 8]), self.candidates
        weights = arrays["weights"]
        entry(weigh)(
            self._leaves.ctypes.data,
            len(self._leaves),
            total,
            candidates,
            arrays["probabilities"].ctypes.data,
            self.beta,
            weights.ctypes.data,
        )
        if self._options.normalise == "batch":
            weights /= weights.max()
        elif self._options.normalise == "buffer" and total > 0:
            least = entry(least_leaf)(self._tree.ctypes.data, self._table)
            weights /= np.float32((candidates * (least / total)) ** -self.beta)

    def update(self, ids: Array, priorities: Any) -> int:
        """Set priorities by row id; returns how many came too late.

        Raises:
            FieldError: Wrong shape, or a NaN, infinite or negative priority; nothing is changed.
        """
        leaves = leaves_of(checked_priorities(priorities, len(ids)), self._rule)
        late = entry(update)(
            self._tree.ctypes.data, self._table, ids.ctypes.data, leaves.ctypes.data, len(ids), self._rule.span
        )
        self.ignored += late
        return late
