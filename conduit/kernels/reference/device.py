"""The specification of the GPU kernels, in plain numpy and Python, beside the specifications that they share with the CPU.

conduit.kernels.reference.returns specifies advantages and returns; conduit.kernels.reference.gather specifies conversions, the random
generator, moved images, and padded and packed values.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from conduit.field import Field
from conduit.kernels.reference import gather
from conduit.kernels.spec.plan import Output
from conduit.kernels.spec.transforms import Transform
from conduit.kernels.spec.windows import Transition
from conduit.store.format import words as w

Array = np.ndarray[Any, Any]


def gathered(column: Array, dtype: str, index: Array, transform: Transform) -> Array:
    """Rows of a column, converted; zeros for row -1.

    Args:
        column: [rows, *shape], bfloat16 as its uint16 bits.
        dtype: The column's dtype, as named in conduit.field.
        index: int64 [...].
        transform: Applied to each element.

    Returns:
        [..., *shape] of the transform's dtype, bfloat16 as its bits.
    """
    field = Field("x", dtype, column.shape[1:])
    output = Output("x", field, "anchor", (), transform)
    flat = index.reshape(-1)
    rows = gather.transform(output, column[np.maximum(flat, 0)])
    rows[flat < 0] = 0
    return rows.reshape(*index.shape, *column.shape[1:])


@dataclass(frozen=True, slots=True)
class Resolved:
    """A transition found along links: the rows of the next observation and of the stacks, and the values computed from its steps."""

    following: int
    reward: float
    discount: float
    used: int
    terminated: bool
    truncated: bool
    stack: list[int]
    following_stack: list[int]


def resolved(
    meta: Array, reward: Array, row: int, page: tuple[int, int, int], envs: int, window: Transition, over: bool
) -> Resolved | None:
    """The transition from an anchor row, or None if the row anchors none.

    Args:
        meta: META_DTYPE [rows].
        reward: float64 [rows].
        row: The anchor.
        page: First row of its page, the row after the last committed one, the row after the page.
        envs: Rows per tick.
        window: The transition's window.
        over: True if no row will ever follow the last committed row.
    """
    _, limit, end = page
    total, discount, used, at, last = 0.0, 1.0, 0, row, row
    flags = 0
    while True:
        word = int(meta["link"][at])
        ahead, kept = at + (word >> w.LINK_SHIFT), bool(word & w.KEPT)
        if word & w.FINAL or (kept and ahead >= end) or (used == 0 and word & w.DELETED):
            return None
        lacks = ahead == at and not word & w.TERMINATED
        waits = ahead != at and not kept and ahead >= limit
        cut = ahead != at and not kept and not waits and bool(int(meta["link"][ahead]) & w.FIRST)
        if (cut or (waits and over)) and word & w.TERMINATED:
            ahead = at
        elif lacks or waits or cut:
            if used == 0 or (waits and not over and window.newest != "bootstrap"):
                return None
            after = at
            break
        total += discount * float(reward[at])
        discount *= window.gamma
        used, last, after, flags = used + 1, at, ahead, word & (w.TERMINATED | w.TRUNCATED)
        if flags or used == window.n_step:
            break
        at = ahead
    ticks = int(meta["step"][row])
    stack = _frames([row - back * envs for back in range(ticks + 1)], window)
    behind = [last - back * envs for back in range(int(meta["step"][last]) + 1)]
    following = _frames(behind if after == last else [after, *behind], window)
    return Resolved(
        after, total, discount, used, bool(flags & w.TERMINATED), bool(flags & w.TRUNCATED), stack, following
    )


def _frames(newest_first: list[int], window: Transition) -> list[int]:
    missing = newest_first[-1] if window.padding == "repeat" else gather.ZEROS
    padded = newest_first + [missing] * window.stack
    return padded[: window.stack][::-1]


def stands_for(leaves: Array) -> list[int]:
    """The priorities that leaves encode, in units of their step: a number of 27 bits, shifted by the 5 bits above it."""
    return [(int(leaf) % 2**27) * 2 ** (int(leaf) // 2**27) for leaf in leaves]


def drawn(leaves: Array, seed: int, draw: int, count: int, *, stratified: bool) -> tuple[list[int], list[float]]:
    """Rows and probabilities of a prioritized draw, from a running sum in Python integers; rows are -1 if all leaves are 0."""
    weights = stands_for(leaves)
    ends = np.cumsum(np.array(weights, object)).tolist()
    total = ends[-1]
    rows, probabilities = list[int](), list[float]()
    for slot in range(count):
        if total == 0:
            rows.append(-1)
            probabilities.append(0.0)
            continue
        bits = gather.philox(seed, draw, slot >> 1)[slot & 1]
        low, high = 0, total
        if stratified:
            low, high = ((total // count) * k + (total % count) * k // count for k in (slot, slot + 1))
        position = low + (bits * max(1, high - low) >> 64)
        row = next(i for i, end in enumerate(ends) if position < end)
        rows.append(row)
        probabilities.append(float(weights[row]) / float(total))
    return rows, probabilities


def summed(leaves: Array, fan_out: int) -> list[list[int]]:
    """Sums of `fan_out` numbers each, level by level, until no more than that many are left (at least one level)."""
    levels: list[list[int]] = []
    numbers = stands_for(leaves)
    while not levels or len(numbers) > fan_out:
        bounds = [*range(0, len(numbers), fan_out), len(numbers)]
        numbers = [sum(numbers[low:high]) for low, high in pairwise(bounds)]
        levels.append(numbers)
    return levels


def loss_mask(lengths: Array, prompts: Array, longest: int) -> Array:
    """Bool [n, longest]: True for items of values after their prompts."""
    places = np.arange(longest)
    return (places < lengths[:, None]) & (places >= prompts[:, None])
