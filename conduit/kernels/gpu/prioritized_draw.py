"""Prioritized draws on the device, and their importance weights: rows and probabilities equal to the CPU's bit for bit.

A draw is one warp per sample: at each level of the sums (conduit.kernels.gpu.priorities) it reads 128 numbers, sums them up from the
left, and goes on below the one that its position falls into. Sums are integers, so a position finds the row that it finds on the CPU,
whose blocks are of other sizes but cover the same rows in the same order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from conduit.errors import ConfigError
from conduit.kernels.gpu.launch import check, launch
from conduit.kernels.gpu.philox import random_pair, scale_to
from conduit.kernels.gpu.priorities import FAN_OUT, Tree, exp2, log2, value_of

_FAN = tl.constexpr(FAN_OUT)


@triton.jit(do_not_specialize=["count"])
def _draw(state, levels, rows, probabilities, count, BLOCKS: tl.constexpr, STRATIFIED: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, _FAN)
    weight = tl.load(levels[0] + j).to(tl.int64)
    total = tl.sum(weight, 0)
    first, second = random_pair(tl.load(state), tl.load(state + 1), slot >> 1)
    low = total * 0
    high = total
    if STRATIFIED:
        size = count.to(tl.int64)
        whole, rest = total // size, total % size
        low = whole * slot + rest * slot // size
        high = whole * (slot + 1) + rest * (slot + 1) // size
    position = low + scale_to(tl.where(slot & 1 != 0, second, first), tl.maximum(high - low, 1))
    # with nothing to draw it ends at row 0, as the only thing that is sure to be there
    position = tl.where(total > 0, position, -1)
    block = total * 0
    for level in tl.static_range(len(levels)):
        if level > 0:
            # sums that are not up to date lead to a wrong row, but to no other memory
            block = tl.minimum(block, BLOCKS[level] - 1)
            weight = tl.load(levels[level] + block * _FAN + j).to(tl.int64)
            if level == len(levels) - 1:
                weight = value_of(weight)
        run = tl.cumsum(weight, 0)
        found = tl.minimum(tl.sum((run <= position).to(tl.int32), 0), _FAN - 1)
        position -= tl.sum(tl.where(j < found, weight, 0), 0)
        block = block * _FAN + found
    leaf = tl.sum(tl.where(j == block % _FAN, weight, 0), 0)
    tl.store(rows + slot, tl.where(total > 0, block, -1))
    tl.store(probabilities + slot, leaf.to(tl.float64) / tl.maximum(total, 1).to(tl.float64))


@triton.jit
def _weigh(
    probabilities, candidates, beta, least, out, COUNT: tl.constexpr, OVER_BATCH: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: the least probability of the batch, then (p / base)^-beta of each."""
    if OVER_BATCH:
        smallest = tl.full((BLOCK,), 2.0, tl.float64)
        for start in range(0, COUNT, BLOCK):
            at = start + tl.arange(0, BLOCK)
            p = tl.load(probabilities + at, mask=at < COUNT, other=2.0)
            smallest = tl.minimum(smallest, tl.where(p > 0.0, p, 2.0))
        base = tl.min(smallest, 0)
    elif least is None:
        base = 1.0 / tl.load(candidates).to(tl.float64)
    else:
        base = tl.load(least)
    exponent = tl.load(beta)
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(probabilities + at, mask=at < COUNT, other=0.0)
        power = -exponent * log2(tl.where(p > 0.0, p, base) / base)
        power = tl.where(power < -1000.0, -1000.0, power)
        power = tl.where(power > 1000.0, 1000.0, power)
        tl.store(out + at, tl.where(p > 0.0, exp2(power), 0.0).to(tl.float32), mask=at < COUNT)


def draw(tree: Tree, state: Any, rows: Any, probabilities: Any, *, stratified: bool = True) -> None:
    """Draw rows in proportion to their leaves: those that conduit.sampling.prioritized draws first for the same seed and leaves.

    Args:
        tree: The tree, its sums up to date.
        state: int64 [2], seed and number of the draw (conduit.kernels.gpu.philox).
        rows: int64 [count], overwritten; -1 where all leaves are 0.
        probabilities: float64 [count], leaf over the sum of all, 0 as above.
        stratified: One draw from each equal slice of the mass, or independent ones.

    Raises:
        FieldError: Wrong tensors.
    """
    check(state, "state", "int64", (2,), like=tree.leaves)
    check(rows, "rows", "int64", (None,), like=tree.leaves)
    check(probabilities, "probabilities", "float64", (len(rows),), like=rows)
    levels = (*reversed(tree.sums), tree.leaves)
    launch(
        _draw,
        len(rows),
        state,
        levels,
        rows,
        probabilities,
        len(rows),
        num_warps=1,
        BLOCKS=tuple(len(level) // FAN_OUT for level in levels),
        STRATIFIED=int(stratified),
    )


def weigh(probabilities: Any, weights: Any, *, beta: Any, candidates: Any = None, least: Any = None) -> None:
    """Importance weights (p / base)^-beta, 0 where p is 0.

    Args:
        probabilities: float64 [count].
        weights: float32 [count], overwritten.
        beta: float64 [1].
        candidates: int64 [1], rows that could be drawn: base is 1 / candidates.
        least: float64 [1], base itself (the least probability of any row). With neither, base is the batch's least.

    Raises:
        FieldError: Wrong tensors.
        ConfigError: Both bases.
    """
    check(probabilities, "probabilities", "float64", (None,))
    check(weights, "weights", "float32", (len(probabilities),), like=probabilities)
    check(beta, "beta", "float64", (1,), like=probabilities)
    if candidates is not None and least is not None:
        raise ConfigError("Expected candidates or least, got both")
    if candidates is not None:
        check(candidates, "candidates", "int64", (1,), like=probabilities)
    if least is not None:
        check(least, "least", "float64", (1,), like=probabilities)
    launch(
        _weigh,
        min(1, len(probabilities)),
        probabilities,
        candidates,
        beta,
        least,
        weights,
        num_warps=8,
        COUNT=len(probabilities),
        OVER_BATCH=int(candidates is None and least is None),
        BLOCK=256,
    )
