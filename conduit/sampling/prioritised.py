"""Prioritised sampling: P(i) = p_i / sum p, exactly, in integers (conduit.sampling.tree).

Draws are stratified (slot k of B draws from the k-th of B equal slices of the mass; Schaul et al., "Prioritized Experience
Replay", 2016) or independent. Rows of priority 0 are never drawn while others are positive; if all are 0, draws are uniform.
Importance weights are (N * P(i))^-beta over 1, the batch's largest, or the table's; `Prioritised` says which rows N counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from conduit.errors import ConfigError, FieldError
from conduit.jit import address, entry, inner, kernel
from conduit.kernels.cpu import (
    J_BATCH,
    J_FIRST,
    J_FOLLOWING,
    J_GENERATIONS,
    J_PAGES,
    J_ROWS,
    J_TABLE,
    J_WINDOW,
    ask_for,
)
from conduit.kernels.leaves import as_priorities, not_a_priority
from conduit.kernels.philox import random_pair, scale_to
from conduit.kernels.plan import Computed
from conduit.kernels.resolve import (
    E_BYTES,
    E_ENVS,
    E_GENERATION,
    E_PAGE,
    E_START,
    SIGNATURE,
    V_RESOLVE,
    ask_ahead,
    may_anchor,
)
from conduit.sampling.tree import (
    P_BEGIN,
    P_BYTES,
    P_END,
    P_GENERATION,
    find_block,
    find_row,
    is_dense,
    refresh,
    update,
    words_needed,
)
from conduit.sampling.uniform import S_BATCH, Uniform, lane, locate
from conduit.store.atomics import (
    call_5,
    load_relaxed,
    peek_f64,
    peek_i64,
    peek_u32,
    poke_f32,
    poke_f64,
    poke_i64,
)
from conduit.store.declaration import Priorities
from conduit.store.protocol import block_of
from conduit.store.words import PAGE_ENVS, T_COUNT, T_META, T_PRIORITY, T_ROWS

Array = np.ndarray[Any, Any]
Normalise = Literal["none", "batch", "buffer"]

(
    Q_UNIFORM_STATE,
    Q_UNIFORM,
    Q_TREE,
    Q_ENTRIES,
    Q_PROBABILITIES,
    Q_TOTAL,
    Q_CANDIDATES,
    Q_STRATIFIED,
    Q_LEAST,
    Q_SEED,
    Q_BATCH_AT,
    Q_WINDOW,
    Q_OFFERED,
) = range(0, 104, 8)
"""Words of the sampler: the uniform sampler's state and function (for a table of zeros), sums, list of pages, probability of
each slot (float64), sum of all leaves and rows that could be drawn at the last draw, options, seed, address of the batch
number, the window of the last draw, rows that it looked at."""
Q_WORDS = 13

WEIGHTS = (Computed("weights", "float32", ()), Computed("probabilities", "float64", ()))
"""What prioritised sampling adds to a batch."""

_INT64, _FLOAT64 = np.dtype(np.int64), np.dtype(np.float64)
_CHUNK = 16
_TRIES = (1 << 19) - 1


@dataclass(frozen=True, slots=True)
class Prioritised:
    """Prioritised sampling of a loader; the table must have been created with priorities.

    N of the weights (N * P(i))^-beta counts, and the sum in P(i) = p_i / sum p adds up, every row that the loader's window may
    start at by its place alone. Some of these are refused when they are drawn, and another is drawn instead: rows whose window is
    not whole (the last of a stream that ended, the last before `writer.cut`, a truncated one without its final observation, where
    an episode is too short or too long) and rows that are too old for `max_staleness`; observation-only rows have p = 0 and
    count, at most, for N. So with a share s of the p refused, accepted rows come with P(i) / (1 - s), and "probabilities" says P(i).
    For the weights that is one factor common to the batch, which normalise="batch" takes out; "none" keeps it, and the largest
    weight of "buffer" may be that of a row that is refused.

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


@inner
def _try_again(state, job, at, entries, listed, total, attempt):  # type: ignore[no-untyped-def]
    """Draw the slot at address `at` from the whole mass until a row anchors the window; False when none is found.

    The whole mass, for slots of a stratum too: each row is then drawn in proportion to its leaf, whichever rows are refused.
    """
    slot = peek_i64(at)
    table = peek_i64(job + J_TABLE)
    window = peek_i64(job + J_WINDOW)
    rows = peek_i64(table + T_ROWS)
    tree = peek_i64(state + Q_TREE)
    seed = peek_i64(state + Q_SEED)
    batch = peek_i64(peek_i64(state + Q_BATCH_AT))
    density = listed / total
    for tries in range(1, _TRIES):
        first, second = random_pair(seed, batch, lane(slot, attempt, tries))
        position = scale_to(second if slot & 1 else first, total)
        entry_ = locate(entries, listed, np.int64(position * density), position)
        page = peek_i64(entry_ + E_PAGE)
        block, position = find_block(tree, table, page, position - peek_i64(entry_ + E_START))
        local, leaf = find_row(tree, window, table, page, block, position)
        poke_i64(peek_i64(job + J_ROWS) + 8 * slot, page * rows + local)
        poke_i64(peek_i64(job + J_GENERATIONS) + 8 * slot, entry_)
        if local >= 0 and call_5(peek_i64(window + V_RESOLVE), window, job, at, 1, 0) > 0:
            poke_f64(peek_i64(state + Q_PROBABILITIES) + 8 * slot, leaf / total)
            return True
    return False


def _draw(state, job, slots, count, attempt):  # type: ignore[no-untyped-def]
    table = peek_i64(job + J_TABLE)
    window = peek_i64(job + J_WINDOW)
    tree = peek_i64(state + Q_TREE)
    entries = peek_i64(state + Q_ENTRIES)
    probabilities = peek_i64(state + Q_PROBABILITIES)
    metas = peek_i64(table + T_META)
    rows = peek_i64(table + T_ROWS)
    poke_i64(state + Q_WINDOW, window)
    listed, total, candidates, offered = refresh(tree, window, table, entries)
    poke_i64(state + Q_TOTAL, total)
    poke_i64(state + Q_CANDIDATES, candidates)
    poke_i64(state + Q_OFFERED, offered)
    if candidates < 1 or offered < peek_i64(state + Q_LEAST):
        return -1
    if total == 0:
        for i in range(count):
            poke_f64(probabilities + 8 * peek_i64(slots + 8 * i), 1.0 / candidates)
        return call_5(peek_i64(state + Q_UNIFORM), peek_i64(state + Q_UNIFORM_STATE), job, slots, count, attempt)
    seed = peek_i64(state + Q_SEED)
    batch = peek_i64(peek_i64(state + Q_BATCH_AT))
    begin = peek_i64(job + J_FIRST)
    size = peek_i64(job + J_BATCH) - begin
    stratified = peek_i64(state + Q_STRATIFIED) != 0
    density = listed / total
    whole, rest = total // size, total % size
    row_at, page_at = peek_i64(job + J_ROWS), peek_i64(job + J_PAGES)
    after_at, entry_at = peek_i64(job + J_FOLLOWING), peek_i64(job + J_GENERATIONS)
    first = second = np.uint64(0)
    computed = -1
    # blocks, then rows, then windows, of all slots each: what a later stage reads has been asked for by the one before
    for i in range(count):
        slot = peek_i64(slots + 8 * i)
        if slot >> 1 != computed:
            computed = slot >> 1
            first, second = random_pair(seed, batch, lane(slot, attempt, 0))
        low, high = 0, total
        if stratified:
            stratum = slot - begin
            low = whole * stratum + rest * stratum // size
            high = whole * (stratum + 1) + rest * (stratum + 1) // size
        position = low + scale_to(second if slot & 1 else first, max(1, high - low))
        entry_ = locate(entries, listed, np.int64(position * density), position)
        page = peek_i64(entry_ + E_PAGE)
        block, position = find_block(tree, table, page, position - peek_i64(entry_ + E_START))
        poke_i64(row_at + 8 * slot, block)
        poke_i64(after_at + 8 * slot, position)
        poke_i64(page_at + 8 * slot, page)
        poke_i64(entry_at + 8 * slot, entry_)
    for start in range(0, count, _CHUNK):
        here = min(_CHUNK, count - start)
        for i in range(start, start + here):
            slot = peek_i64(slots + 8 * i)
            page = peek_i64(page_at + 8 * slot)
            local, leaf = find_row(
                tree, window, table, page, peek_i64(row_at + 8 * slot), peek_i64(after_at + 8 * slot)
            )
            # a row that is none is refused below by its leaf; its number stays inside the page
            row = page * rows + max(local, 0)
            after = ask_ahead(window, metas, row, peek_i64(peek_i64(entry_at + 8 * slot) + E_ENVS))
            poke_i64(row_at + 8 * slot, row)
            poke_i64(after_at + 8 * slot, after)
            poke_f64(probabilities + 8 * slot, leaf / total)
        ask_for(job, slots + 8 * start, here)
    done = stop = 0
    while done < count:
        if stop <= done:
            stop = done
            while stop < count and peek_f64(probabilities + 8 * peek_i64(slots + 8 * stop)) > 0.0:
                stop += 1
        if stop > done:
            done += call_5(peek_i64(window + V_RESOLVE), window, job, slots + 8 * done, stop - done, 0)
        if done < count and (done < stop or peek_f64(probabilities + 8 * peek_i64(slots + 8 * done)) <= 0.0):
            if not _try_again(state, job, slots + 8 * done, entries, listed, total, attempt):
                return -1
            done += 1
    for i in range(count):
        slot = peek_i64(slots + 8 * i)
        entry_ = peek_i64(entry_at + 8 * slot)
        poke_i64(page_at + 8 * slot, peek_i64(entry_ + E_PAGE))
        poke_i64(entry_at + 8 * slot, peek_i64(entry_ + E_GENERATION))
    return count


@kernel("int64(int64, int64, int64, float64, float64, int64, int64)")
def weigh(probabilities, count, candidates, beta, least, out, weights):  # type: ignore[no-untyped-def]
    """Importance weights (float32) of a batch, over that of probability `least` (0: over the batch's largest, < 0: over 1).

    The weight of the least probability is the largest one, so dividing by it is a power of a ratio.
    """
    base = 1.0 / candidates
    if least == 0.0:
        base = peek_f64(probabilities)
        for i in range(count):
            base = min(base, peek_f64(probabilities + 8 * i))
    elif least > 0.0:
        base = least
    for i in range(count):
        probability = peek_f64(probabilities + 8 * i)
        poke_f64(out + 8 * i, probability)
        poke_f32(weights + 4 * i, (probability / base) ** -beta)
    return count


@kernel("int64(int64, int64, int64)", nogil=True)
def least_leaf(tree, window, table):  # type: ignore[no-untyped-def]
    """Smallest positive leaf among the rows that the learner's sums cover, or 0."""
    rows = peek_i64(table + T_ROWS)
    dense = is_dense(window)
    least = 1 << 32
    for page in range(peek_i64(table + T_COUNT)):
        known = tree + P_BYTES * page
        leaves = peek_i64(table + T_PRIORITY) + 4 * page * rows
        envs = load_relaxed(block_of(table, page) + PAGE_ENVS)
        for row in range(peek_i64(known + P_BEGIN), peek_i64(known + P_END)):
            leaf = peek_u32(leaves + 4 * row)
            if 0 < leaf < least and (dense or may_anchor(window, table, page, row, envs)):
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
        self._tree = np.zeros(words_needed(pages, page_rows), np.int64)
        self._tree[: P_BYTES // 8 * pages].reshape(pages, -1)[:, P_GENERATION // 8] = -1
        self._entries = np.zeros((pages + 1, E_BYTES // 8), np.int64)
        self._probabilities = np.zeros(size, np.float64)
        self._size = size
        self._state = np.zeros(Q_WORDS, np.int64)
        for offset, value in (
            (Q_UNIFORM_STATE, self._uniform.state),
            (Q_UNIFORM, self._uniform.function),
            (Q_TREE, self._tree.ctypes.data),
            (Q_ENTRIES, self._entries.ctypes.data),
            (Q_PROBABILITIES, self._probabilities.ctypes.data),
            (Q_STRATIFIED, options.stratified),
            (Q_LEAST, least),
            (Q_BATCH_AT, self._uniform.state + S_BATCH),
        ):
            self._state[offset // 8] = value
        self._state[Q_SEED // 8] = np.uint64(seed % 2**64).astype(np.int64)
        self._words = self._state.data
        self._drawn = self._probabilities.ctypes.data
        self._sums = self._tree.ctypes.data
        self._reserve(size)
        self._update, self._weigh, self._least_leaf = entry(update), entry(weigh), entry(least_leaf)
        self._outputs: dict[int, tuple[dict[str, Array], int, int]] = {}
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
        return self._words[Q_CANDIDATES // 8]

    @property
    def offered(self) -> int:
        """Rows that the last draw looked at, those that begin no window included."""
        return self._words[Q_OFFERED // 8]

    def finish(self, arrays: dict[str, Array], first: int = 0, count: int | None = None) -> None:
        """Fill "probabilities" and "weights" of the batch that was drawn last, or of its `count` slots from `first` on."""
        known = self._outputs.get(id(arrays))
        if known is None or known[0] is not arrays:
            # taking an array's address costs as much as weighing all samples, and there are but a few buffers
            known = (arrays, arrays["probabilities"].ctypes.data, arrays["weights"].ctypes.data)
            self._outputs[id(arrays)] = known
        total = self._words[Q_TOTAL // 8]
        least = 0.0
        if self._options.normalise == "none":
            least = -1.0
        elif self._options.normalise == "buffer" and total > 0:
            least = self._least_leaf(self._sums, self._words[Q_WINDOW // 8], self._table) / total
        size = self._size if count is None else count
        drawn, out, weights = self._drawn + 8 * first, known[1] + 8 * first, known[2] + 4 * first
        self._weigh(drawn, size, self.candidates, self.beta, least, out, weights)

    def update(self, ids: Any, priorities: Any) -> int:
        """Set priorities by row id; returns how many came too late.

        Raises:
            FieldError: Wrong shape or dtype, or a NaN, infinite or negative priority; nothing is changed.
        """
        # what a batch and a learner mostly hand over is taken as it is: each conversion costs as much as fifty rows
        keys = ids if type(ids) is np.ndarray and ids.dtype is _INT64 and ids.flags.carray else _as_ids(ids)
        if keys.ndim != 1:
            raise FieldError(f"Expected ids as int64 [n], from batch.ids, got {keys.dtype} {keys.shape}", at="ids")
        count, values = len(keys), priorities
        if not (
            type(values) is np.ndarray
            and values.dtype is _FLOAT64
            and values.flags.carray
            and values.shape == keys.shape
        ):
            values = as_priorities(priorities, count)
        if count > self._room:
            self._reserve(count)
        rule = self._rule
        late = self._update(
            self._sums,
            self._words[Q_WINDOW // 8],
            self._table,
            keys,
            values,
            self._scratch,
            rule.alpha,
            rule.eps,
            rule.span,
        )
        if late < 0:
            raise not_a_priority(values, -1 - late)
        self.ignored += late
        return late

    def _reserve(self, count: int) -> None:
        """Memory for an update of `count` rows."""
        self._room = count
        self._memory = np.zeros(3 * count, np.int64)
        self._scratch = self._memory.ctypes.data


def _as_ids(ids: Any) -> Array:
    """Row ids as C-contiguous int64.

    Raises:
        FieldError: No integers.
    """
    keys = np.asarray(ids.cpu().numpy() if hasattr(ids, "detach") else ids)
    if keys.dtype.kind not in "iu" and keys.size:
        raise FieldError(f"Expected ids as int64 [n], from batch.ids, got {keys.dtype} {keys.shape}", at="ids")
    return np.require(keys, np.int64, ["C", "A", "E"])
