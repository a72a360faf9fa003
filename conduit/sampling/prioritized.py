"""Prioritized sampling: P(i) = p_i / sum p, exactly, in integers (conduit.sampling.sum_tree).

Draws are stratified (slot k of B draws from the k-th of B equal slices of the mass; Schaul et al., "Prioritized Experience
Replay", 2016) or independent. Rows of priority 0 are never drawn while others are positive; if all are 0, draws are uniform.
Importance weights are (N * P(i))^-beta over 1, the batch's largest, or the table's; N counts the rows that can be drawn.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from conduit.errors import ConfigError, FieldError
from conduit.kernels.cpu.priorities import as_priorities, clipping, largest_of, not_a_priority
from conduit.kernels.cpu.windows import SIGNATURE
from conduit.kernels.spec.plan import Computed
from conduit.native import cpython_abi
from conduit.native.descriptors import fill
from conduit.native.jit import address, entry
from conduit.numbers import flag, within
from conduit.sampling.candidates import empty_list
from conduit.sampling.marks import empty_marks
from conduit.sampling.prioritized_draw import (
    DRAW_BATCH_AT,
    DRAW_BLOCKS,
    DRAW_CANDIDATES,
    DRAW_ENTRIES,
    DRAW_LEAST,
    DRAW_OFFERED,
    DRAW_PLACES,
    DRAW_PROBABILITIES,
    DRAW_SEED,
    DRAW_STRATIFIED,
    DRAW_TOTAL,
    DRAW_TREE,
    DRAW_UNIFORM,
    DRAW_UNIFORM_STATE,
    DRAW_WORDS,
    draw,
    least_leaf,
    weigh,
)
from conduit.sampling.prioritized_update import (
    CLIPPED,
    FOREIGN,
    NOT_TAKEN,
    UPDATE_ALPHA,
    UPDATE_ARRAY,
    UPDATE_CLIPPED,
    UPDATE_EPS,
    UPDATE_LARGEST,
    UPDATE_LOWERED,
    UPDATE_ROOM,
    UPDATE_SCRATCH,
    UPDATE_SEAT,
    UPDATE_SPAN,
    UPDATE_TABLE,
    UPDATE_TREE,
    UPDATE_UNIT,
    UPDATE_WORDS,
    update,
    update_at,
)
from conduit.sampling.uniform import UNIFORM_BATCH, Uniform
from conduit.store.format.table_spec import Priorities
from conduit.store.pages.row_ids import not_a_row

Array = np.ndarray[Any, Any]
Normalize = Literal["none", "batch", "buffer"]

WEIGHTS = (Computed("weights", "float32", ()), Computed("probabilities", "float64", ()))
"""What prioritized sampling adds to a batch."""


def callbacks() -> Iterator[tuple[Callable[..., int], str]]:
    """The draw, for a library of kernels."""
    yield draw, SIGNATURE


@dataclass(frozen=True, slots=True)
class Prioritized:
    """Prioritized sampling of a loader; the table must have been created with priorities.

    N of the weights (N * P(i))^-beta counts, and the sum in P(i) = p_i / sum p adds up, exactly the rows that can be drawn when the
    batch is begun. Left out are observation-only and deleted rows, rows whose window is not whole (the newest ones, as far as they wait; the
    last of a stream that ended or before `writer.cut`, a truncated one without its final observation, where an episode is too short or too
    long), and rows that are too old for `max_staleness`, or have been delivered as often as they may be.

    Attributes:
        beta: Exponent of importance weights, from 0; can be changed live by `loader.beta`.
        normalize: Divide weights by nothing, by the batch's largest, or by the largest any row of the table has.
        stratified: One draw per equal slice of the mass, or independent draws.
    """

    beta: float = 0.4
    normalize: Normalize = "batch"
    stratified: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", within("beta", self.beta, 0, math.inf))
        object.__setattr__(self, "stratified", flag("stratified", self.stratified))
        if self.normalize not in ("none", "batch", "buffer"):
            raise ConfigError(f"Expected normalize 'none', 'batch' or 'buffer', got {self.normalize!r}")


class PrioritizedSampler:
    """The sampler of a loader with prioritized sampling; owns one learner's sums.

    Args:
        options: What was asked for.
        rule: The table's.
        name: Of the table.
        table: Address of the table descriptor.
        seat: Address of this participant's seat line in it.
        geometry: Pages and rows per page.
        size: Samples per batch.
        seed: 64-bit seed.
        least: Do not draw from fewer candidate rows than this.

    Attributes:
        beta: Exponent of the importance weights, at least 0; set it to anneal.
        ignored: Updates that came too late: their rows were overwritten.
        raised, lowered: Priorities of updates that were too small, or too large, for the table to tell them from others, and
            were stored as the least or the largest there is (`Priorities`).
    """

    def __init__(
        self,
        options: Prioritized,
        rule: Priorities,
        name: str,
        table: int,
        seat: int,
        geometry: tuple[int, int],
        size: int,
        seed: int,
        least: int,
    ) -> None:
        pages, page_rows = geometry
        self._beta = options.beta
        self.ignored = 0
        self._options = options
        self._rule = rule
        self._name = name
        self._rows = pages * page_rows
        self._updates = np.zeros(UPDATE_WORDS, np.int64)
        self._clips = self._updates[UPDATE_CLIPPED // 8 : UPDATE_LOWERED // 8 + 1].data
        self._scratch = np.zeros(3 * size, np.int64)
        self.raised = self.lowered = 0
        self._table = table
        self._uniform = Uniform(seed, pages, 1)
        self._tree = empty_marks(pages, page_rows)
        self._entries = empty_list(pages)
        self._probabilities = np.zeros(size, np.float64)
        self._places = np.zeros((2, size), np.int64)
        self._size = size
        self._state = np.zeros(DRAW_WORDS, np.int64)
        fill(
            self._state,
            {
                DRAW_UNIFORM_STATE: self._uniform.state,
                DRAW_UNIFORM: self._uniform.function,
                DRAW_TREE: self._tree.ctypes.data,
                DRAW_ENTRIES: self._entries.ctypes.data,
                DRAW_PROBABILITIES: self._probabilities.ctypes.data,
                DRAW_BLOCKS: self._places[0].ctypes.data,
                DRAW_PLACES: self._places[1].ctypes.data,
                DRAW_STRATIFIED: options.stratified,
                DRAW_LEAST: least,
                DRAW_BATCH_AT: self._uniform.state + UNIFORM_BATCH,
            },
        )
        self._state[DRAW_SEED // 8] = np.uint64(seed % 2**64).astype(np.int64)
        self._words = self._state.data
        self._drawn = self._probabilities.ctypes.data
        self._sums = self._tree.ctypes.data
        fill(
            self._updates,
            {
                UPDATE_TREE: self._sums,
                UPDATE_TABLE: table,
                UPDATE_SEAT: seat,
                UPDATE_SPAN: rule.span,
                UPDATE_SCRATCH: self._scratch.ctypes.data,
                UPDATE_ROOM: size,
                UPDATE_ARRAY: id(np.ndarray) if cpython_abi.is_supported() else 0,
            },
        )
        reals = self._updates.view(np.float64)
        fill(
            reals,
            {
                UPDATE_ALPHA: rule.alpha,
                UPDATE_EPS: rule.eps,
                UPDATE_UNIT: rule.unit,
                UPDATE_LARGEST: largest_of(self._rows),
            },
        )
        # compiled first, so that it is kept: the other one is made of it
        self._update_at = entry(update_at)
        self._update, self._weigh, self._least_leaf = entry(update), entry(weigh), entry(least_leaf)
        self._outputs: dict[int, tuple[dict[str, Array], int, int]] = {}
        self.function = address(draw, SIGNATURE)
        self.state: int = self._state.ctypes.data

    @property
    def batch_at(self) -> int:
        """Address of `batch`."""
        return self._uniform.batch_at

    def __repr__(self) -> str:
        return (
            f"PrioritizedSampler(beta={self.beta:g}, batch {self.batch}, {self.candidates:,} candidate rows at the last draw, "
            f"{self.ignored:,} updates ignored)"
        )

    @property
    def beta(self) -> float:
        """Exponent of the importance weights."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = within("beta", value, 0, math.inf)

    @property
    def batch(self) -> int:
        """Number of the batch that is drawn next; set it to repeat or skip draws."""
        return self._uniform.batch

    @batch.setter
    def batch(self, number: int) -> None:
        self._uniform.batch = number

    @property
    def candidates(self) -> int:
        """Rows that the last draw chose among."""
        return self._words[DRAW_CANDIDATES // 8]

    @property
    def offered(self) -> int:
        """Rows that the last draw was offered, those included that begin no window."""
        return self._words[DRAW_OFFERED // 8]

    def finish(self, arrays: dict[str, Array], first: int = 0, count: int | None = None) -> None:
        """Fill "probabilities" and "weights" of the batch that was drawn last, or of its `count` slots from `first` on."""
        known = self._outputs.get(id(arrays))
        if known is None or known[0] is not arrays:
            # taking an array's address costs as much as weighing all samples, and there are but a few buffers
            known = (arrays, arrays["probabilities"].ctypes.data, arrays["weights"].ctypes.data)
            self._outputs[id(arrays)] = known
        total = self._words[DRAW_TOTAL // 8]
        least = 0.0
        if self._options.normalize == "none":
            least = -1.0
        elif self._options.normalize == "buffer" and total > 0:
            least = self._least_leaf(self._sums, self._table) / total
        size = self._size if count is None else count
        drawn, out, weights = self._drawn + 8 * first, known[1] + 8 * first, known[2] + 4 * first
        self._weigh(drawn, size, self.candidates, self._beta, least, out, weights)

    def update(self, ids: Any, priorities: Any) -> int:
        """Set priorities by row id; returns how many came too late.

        Raises:
            FieldError: Wrong shape or dtype, or a NaN, infinite or negative priority; nothing is changed.
        """
        # arrays of int64 and float64 are looked at in there; asking them here would cost as much as fifty rows
        late = self._update(self._updates, ids, priorities)
        if late == NOT_TAKEN:
            ids = _as_ids(ids)
            priorities = as_priorities(priorities, len(ids))
            memory = np.empty(3 * len(ids), np.int64)
            addresses = (ids.ctypes.data, priorities.ctypes.data, len(ids), memory.ctypes.data)
            late = self._update_at(self._updates.ctypes.data, *addresses)
        if late < 0:
            if late <= FOREIGN:
                raise not_a_row(self._name, int(ids[FOREIGN - late]), FOREIGN - late)
            raise not_a_priority(priorities, -1 - late)
        if late >= CLIPPED:
            late -= CLIPPED
            self._tell(priorities)
        self.ignored += late
        return late

    def _tell(self, values: Array) -> None:
        """Count priorities that did not fit, and warn of each kind once."""
        raised, lowered = self._clips[0], self._clips[1]
        first = (raised if self.raised == 0 else 0, lowered if self.lowered == 0 else 0)
        self.raised += raised
        self.lowered += lowered
        if any(first):
            text = clipping(self._rule, self._rows, values, first, self._name)
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _as_ids(ids: Any) -> Array:
    """Row ids as C-contiguous int64 [n].

    Raises:
        FieldError: No integers, or another shape.
    """
    keys = np.asarray(ids.cpu().numpy() if hasattr(ids, "detach") else ids)
    if keys.ndim != 1 or (keys.dtype.kind not in "iu" and keys.size):
        raise FieldError(f"Expected ids as int64 [n], from batch.ids, got {keys.dtype} {keys.shape}", at="ids")
    return np.require(keys, np.int64, ["C", "A", "E"])
