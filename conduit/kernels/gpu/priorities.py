"""Priorities on the device: leaves, the sums above them, and updates, in integers, equal to the CPU's bit for bit.

A leaf is a uint32 code of an integer, as in conduit.kernels.cpu.priorities. Above the leaves are int64 sums of 128 numbers each, level by
level, until 128 or fewer are left; a draw descends them (conduit.kernels.gpu.prioritized_draw). Integer sums do not depend on the order
of additions and do not drift. The caller sets the leaves of rows that cannot be drawn to 0 (conduit.kernels.gpu.draws.drawable);
otherwise all probabilities are too small.

An update is four small launches in the order of the stream. The first converts priorities into leaves. The second finds the last of
duplicate rows: each entry has a ticket, a number that grows with every update, so that nothing has to be cleared, and the largest
ticket wins. The third writes the winners' leaves. The fourth sums each changed block again. If one priority is NaN, infinite or
negative, nothing at all is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from conduit.errors import ConfigError
from conduit.kernels.cpu.priorities import MANTISSA_BITS, largest_of
from conduit.kernels.gpu.launch import LARGEST, LARGEST_PART, check, launch, tiles
from conduit.store.format.table_spec import Priorities

FAN_OUT = 128
"""Numbers that one sum adds up; a warp reads them with one or two 16-byte loads per thread."""
_BLOCK = 128
_FAN = tl.constexpr(FAN_OUT)
_BITS, _MASK = tl.constexpr(MANTISSA_BITS), tl.constexpr((1 << MANTISSA_BITS) - 1)
_BIAS, _TOP = tl.constexpr(1023 + MANTISSA_BITS - 1), tl.constexpr(MANTISSA_BITS - 1)


@triton.jit
def log2(x):
    """conduit.kernels.cpu.priorities._log2, operation by operation."""
    bits = x.to(tl.int64, bitcast=True) - 0x3FE6A09E667F3BCD
    raised = (((bits >> 52) + 2048) & 0xFFF) | 0x4330000000000000
    exponent = raised.to(tl.float64, bitcast=True) - (4503599627370496.0 + 2048.0)
    m = ((bits & 0xFFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD).to(tl.float64, bitcast=True)
    t = (m - 1.0) / (m + 1.0)
    u = t * t
    series = u * 0.0 + 1.0 / 17.0
    for k in tl.static_range(15, 2, -2):
        series = series * u + 1.0 / k
    series = series * u + 1.0
    return exponent + 2.8853900817779268 * t * series


@triton.jit
def exp2(y):
    """conduit.kernels.cpu.priorities._exp2, operation by operation."""
    shifted = y + 6755399441055744.0
    z = (y - (shifted - 6755399441055744.0)) * 0.6931471805599453
    series = z * 0.0 + 1.0 / 39916800.0
    series = series * z + 1.0 / 3628800.0
    series = series * z + 1.0 / 362880.0
    series = series * z + 1.0 / 40320.0
    series = series * z + 1.0 / 5040.0
    series = series * z + 1.0 / 720.0
    series = series * z + 1.0 / 120.0
    series = series * z + 1.0 / 24.0
    series = series * z + 1.0 / 6.0
    series = series * z + 1.0 / 2.0
    series = series * z + 1.0
    series = series * z + 1.0
    return series * ((shifted.to(tl.int64, bitcast=True) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _leaves(
    priorities,
    out,
    refused,
    clipped,
    count,
    ALPHA: tl.constexpr,
    EPS: tl.constexpr,
    UNIT: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    priority = tl.load(priorities + at, mask=mask, other=0.0).to(tl.float64)
    # false for NaN too
    good = (priority >= 0.0) & (priority < float("inf"))
    x = tl.where(good, priority, 0.0) + EPS
    power = ALPHA * log2(x)
    power = tl.where(power < -1000.0, -1000.0, power)
    power = tl.where(power > 1000.0, 1000.0, power)
    # Triton would make plain numbers float32, which cannot represent these
    powered = exp2(power) * tl.full((), UNIT, tl.float64)
    largest = tl.full((), LARGEST, tl.float64)
    some = mask & good
    if ALPHA != 0.0:
        some = some & (x != 0.0)
    tl.atomic_add(clipped, tl.sum((some & (powered < 0.5)).to(tl.int32), 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(clipped + 1, tl.sum((some & (powered > largest)).to(tl.int32), 0).to(tl.int64), sem="relaxed")
    powered = tl.where(powered < 1.0, 1.0, powered)
    powered = tl.where(powered > largest, largest, powered)
    shift = ((powered.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - _BIAS
    shift = tl.where(shift < 0, 0, shift)
    scaled = powered * ((1023 - shift) << 52).to(tl.float64, bitcast=True)
    mantissa = (scaled + 4503599627370496.0).to(tl.int64, bitcast=True) & 0xFFFFFFFF
    carry = mantissa >> _BITS
    leaf = ((shift + carry) << _BITS) + mantissa - (carry << _TOP)
    if ALPHA != 0.0:
        leaf = tl.where(x == 0.0, 0, leaf)
    tl.store(out + at, leaf.to(tl.uint32), mask=mask)
    tl.atomic_add(refused, tl.sum((mask & (good == 0)).to(tl.int32), 0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["count", "capacity"])
def _claim(winner, rows, ticket, refused, count, capacity, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + at, mask=at < count, other=-1)
    # none of them while one priority is refused; a mask takes no scalar in the interpreter
    wanted = (row >= 0) & (row < tl.where(tl.load(refused) == 0, capacity, 0))
    tl.atomic_max(winner + row, tl.load(ticket) + at, mask=wanted, sem="relaxed")


@triton.jit(do_not_specialize=["count", "capacity"])
def _write(winner, rows, ticket, refused, values, leaves, count, capacity, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + at, mask=at < count, other=-1)
    # none of them while one priority is refused; a mask takes no scalar in the interpreter
    wanted = (row >= 0) & (row < tl.where(tl.load(refused) == 0, capacity, 0))
    mine = wanted & (tl.load(winner + row, mask=wanted, other=-1) == tl.load(ticket) + at)
    value = tl.load(values + at, mask=at < count, other=0)
    tl.store(leaves + row, value, mask=mine)


@triton.jit
def value_of(code):
    """conduit.kernels.cpu.priorities.value_of, of int64."""
    return (code & _MASK) << (code >> _BITS)


@triton.jit(do_not_specialize=["count", "capacity"])
def _sum(
    lower,
    upper,
    rows,
    ticket,
    refused,
    clipped,
    count,
    capacity,
    SPAN: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Sum one block again: the block of the program's row, or, without rows, the block of the program's number."""
    program = tl.program_id(0)
    if rows is None:
        block = program.to(tl.int64)
    else:
        row = tl.load(rows + program)
        block = tl.where((row >= 0) & (row < capacity), row, 0) // SPAN
    below = tl.load(lower + block * _FAN + tl.arange(0, _FAN)).to(tl.int64)
    if FIRST:
        below = value_of(below)
    tl.store(upper + block, tl.sum(below, 0))
    if LAST and program == 0:
        pending = tl.load(refused)
        for kind in tl.static_range(2):
            # a refused update changed nothing, so it clipped nothing
            here = tl.where(pending == 0, tl.load(clipped + kind), 0)
            tl.store(clipped + 2 + kind, tl.load(clipped + 2 + kind) + here)
            tl.store(clipped + kind, pending * 0)
        tl.store(refused + 1, tl.load(refused + 1) + pending)
        tl.store(refused, pending * 0)
        tl.store(ticket, tl.load(ticket) + count)


@dataclass(frozen=True, slots=True)
class Tree:
    """Leaves of a table's rows and the sums above them, on one device.

    Attributes:
        rows: Rows of the table.
        leaves: uint32 [rows, rounded up to a multiple of 128]; 0 for a row that cannot be drawn, and after the last row.
        sums: int64 arrays, from the sums of 128 leaves each to the topmost array of 128 numbers; zeros after the last sum.
        winner: int64 [as leaves], the largest ticket that claimed each row.
        ticket: int64 [1], the next update's first ticket.
        refused: int64 [2]: number of NaN, infinite or negative priorities, in the update in progress and in all earlier ones.
        clipped: int64 [4]: numbers of priorities that were stored as the smallest and as the largest possible one, in the update in
            progress (two numbers) and in all earlier ones (two numbers).
    """

    rows: int
    leaves: Any
    sums: tuple[Any, ...]
    winner: Any
    ticket: Any
    refused: Any
    clipped: Any

    @property
    def total(self) -> Any:
        """int64 [], the sum of all leaves; computed on the device."""
        return self.sums[-1].sum()


def make_tree(rows: int, device: Any) -> Tree:
    """A tree of leaves 0.

    Raises:
        ConfigError: There is no row, or more than 2^31 - 1 rows.
    """
    import torch

    if not 1 <= rows <= LARGEST:
        raise ConfigError(f"Expected from 1 to {LARGEST} rows, got {rows}")

    def zeros(count: int, dtype: Any) -> Any:
        return torch.zeros(tiles(count, FAN_OUT) * FAN_OUT, dtype=dtype, device=device)

    sums: list[Any] = []
    count = rows
    while not sums or count > FAN_OUT:
        count = tiles(count, FAN_OUT)
        sums.append(zeros(count, torch.int64))
    winner = zeros(rows, torch.int64) - 1
    ticket, refused, clipped = (torch.zeros(n, dtype=torch.int64, device=device) for n in (1, 2, 4))
    return Tree(rows, zeros(rows, torch.uint32), tuple(sums), winner, ticket, refused, clipped)


def _resum(tree: Tree, rows: Any) -> None:
    """Sum the blocks of rows again, level by level; all blocks if `rows` is None, or has at least as many rows as there are blocks."""
    lower, span = tree.leaves, FAN_OUT
    for upper in tree.sums:
        blocks = len(lower) // FAN_OUT
        touched = None if rows is None or len(rows) >= blocks else rows
        launch(
            _sum,
            blocks if touched is None else len(touched),
            lower,
            upper,
            touched,
            tree.ticket,
            tree.refused,
            tree.clipped,
            0 if rows is None else len(rows),
            tree.rows,
            num_warps=1,
            SPAN=span,
            FIRST=int(lower is tree.leaves),
            LAST=int(upper is tree.sums[-1]),
        )
        lower, span = upper, span * FAN_OUT


def build(tree: Tree) -> None:
    """Sum all leaves again, after other code has written them."""
    _resum(tree, None)


def update(tree: Tree, rows: Any, priorities: Any, leaves: Any, *, rule: Priorities) -> None:
    """Set priorities of rows, and update the sums; if a row occurs twice, its last priority counts.

    Rows outside the table (-1 for rows that have been overwritten) are ignored. If a priority is NaN, infinite or negative, the tree does
    not change, and `tree.refused[1]` grows by the number of such priorities.

    Args:
        tree: The tree.
        rows: int64 [count].
        priorities: float32 or float64 [count].
        leaves: uint32 [count], overwritten with the leaves.
        rule: The table's `Priorities`.

    Raises:
        FieldError: Wrong tensors.
    """
    check(rows, "rows", "int64", (None,), like=tree.leaves)
    count = len(rows)
    check(priorities, "priorities", ("float32", "float64"), (count,), like=rows)
    check(leaves, "leaves", "uint32", (count,), like=rows)
    if count == 0:
        return
    if count > LARGEST_PART:
        raise ConfigError(f"Expected at most {LARGEST_PART} updates at once, got {count}")
    grid = tiles(count, _BLOCK)
    launch(
        _leaves,
        grid,
        priorities,
        leaves,
        tree.refused,
        tree.clipped,
        count,
        num_warps=4,
        ALPHA=float(rule.alpha),
        EPS=float(rule.eps),
        UNIT=rule.unit,
        LARGEST=float(largest_of(tree.rows)),
        BLOCK=_BLOCK,
    )
    claims = (tree.winner, rows, tree.ticket, tree.refused)
    launch(_claim, grid, *claims, count, tree.rows, num_warps=4, BLOCK=_BLOCK)
    launch(_write, grid, *claims, leaves, tree.leaves, count, tree.rows, num_warps=4, BLOCK=_BLOCK)
    _resum(tree, rows)
