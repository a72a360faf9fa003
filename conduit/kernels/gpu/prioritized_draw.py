"""Prioritized draws on the device, and their importance weights: rows and probabilities equal to the CPU's bit for bit.

One warp draws one sample. At each level of the sums (conduit.kernels.gpu.priorities) it reads 128 numbers, adds them up from the left,
and descends into the one that its position falls into. Sums are integers, and the CPU's blocks cover the same rows in the same order,
although with other sizes. So a position leads to the same row as on the CPU.
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
    # if there is nothing to draw, it ends at row 0, which always exists
    position = tl.where(total > 0, position, -1)
    block = total * 0
    for level in tl.static_range(len(levels)):
        if level > 0:
            # outdated sums may lead to a wrong row, but never out of the memory
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
    """One program: finds the least probability of the batch, then computes (p / base)^-beta of each sample."""
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
    """Draw rows in proportion to their leaves: the rows of conduit.sampling.prioritized's first attempt for the same seed and leaves.

    Args:
        tree: The tree, with its sums up to date.
        state: int64 [2], seed and number of the draw (conduit.kernels.gpu.philox).
        rows: int64 [count], overwritten; -1 if all leaves are 0.
        probabilities: float64 [count], a row's leaf divided by the sum of all leaves; 0 if all leaves are 0.
        stratified: Make one draw from each of `count` equal slices of the total; otherwise all draws are independent.

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
        candidates: int64 [1], number of rows that could be drawn; base is then 1 / candidates.
        least: float64 [1], the base itself (the least probability of any row). Without both, base is the least probability in the batch.

    Raises:
        FieldError: Wrong tensors.
        ConfigError: Both `candidates` and `least` are given.
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
