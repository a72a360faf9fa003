"""The gather of all fields of a batch in one launch: copies or converts the listed rows of each column into the batch's arrays.

    for i in range(count): out[i] = f(column[index[i]])

An index of -1 gives zeros, as on the CPU. A lower index leaves the place unchanged, for a row that another launch copies.

The kernel takes tuples of pointers and one constant, the plan, which has the shape of each field's rows and its range of programs. So
each field keeps its own dtype, width and transform, and a plan compiles once: the same plan has the same constant. A wide row is divided
into tiles, one per program; for narrow rows a program takes as many rows as fill a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from conduit.errors import ConfigError, FieldError
from conduit.kernels.gpu.elements import changes_zero, convert, tile_of, work_of
from conduit.kernels.gpu.launch import LARGEST_PART, as_words, check, launch, power_of_two, row_stride, tiles
from conduit.kernels.spec.transforms import Transform

NUM_WARPS = 4
MOST_FIELDS = 64
"""Most fields of one launch; the host time of a launch grows with their number."""
_MOST_ROWS = 128


_FIRST, _END, _COUNT, _ELEMENTS, _STRIDE, _WIDTH, _TILES, _AT_ONCE = (tl.constexpr(8 + i) for i in range(8))
"""The words after elements.Work in a field's constant: its first program, and the first one after its last; rows to make, elements of a
row, elements from row to row of the column; elements of a tile, tiles of a row; rows of a program, 1 if a program takes a tile of a row.
"""


@triton.jit
def _wide(src, dst, index, work, PLAN: tl.constexpr, f: tl.constexpr):
    """One tile of one row."""
    row = work // PLAN[f][_TILES]
    c = (work % PLAN[f][_TILES]) * PLAN[f][_WIDTH] + tl.arange(0, PLAN[f][_WIDTH])
    at = tl.load(index + row).to(tl.int64)
    inside = c < tl.where(at >= 0, PLAN[f][_ELEMENTS], 0)
    y = convert(tl.load(src + at * PLAN[f][_STRIDE] + c, mask=inside, other=0), dst.dtype.element_ty, PLAN, f)
    if changes_zero(PLAN, f):
        y = tl.where(at >= 0, y, tl.zeros_like(y))
    tl.store(dst + row.to(tl.int64) * PLAN[f][_ELEMENTS] + c, y, mask=c < tl.where(at >= -1, PLAN[f][_ELEMENTS], 0))


@triton.jit
def _narrow(src, dst, index, work, PLAN: tl.constexpr, f: tl.constexpr):
    """Some whole rows."""
    row = work * PLAN[f][_AT_ONCE] + tl.arange(0, PLAN[f][_AT_ONCE])
    wanted = row < PLAN[f][_COUNT]
    at = tl.load(index + row, mask=wanted, other=-1).to(tl.int64)
    c = tl.arange(0, PLAN[f][_WIDTH])
    inside = (c < PLAN[f][_ELEMENTS])[None, :]
    source = src + at[:, None] * PLAN[f][_STRIDE] + c[None, :]
    y = convert(tl.load(source, mask=(at >= 0)[:, None] & inside, other=0), dst.dtype.element_ty, PLAN, f)
    if changes_zero(PLAN, f):
        y = tl.where((at >= 0)[:, None], y, tl.zeros_like(y))
    out = dst + row.to(tl.int64)[:, None] * PLAN[f][_ELEMENTS] + c[None, :]
    tl.store(out, y, mask=(wanted & (at >= -1))[:, None] & inside)


@triton.jit
def _gather(srcs, dsts, indices, PLAN: tl.constexpr):
    """Every program finds its field by its number."""
    program = tl.program_id(0)
    for f in tl.static_range(len(PLAN)):
        if (program >= PLAN[f][_FIRST]) & (program < PLAN[f][_END]):
            if PLAN[f][_AT_ONCE] == 1:
                _wide(srcs[f], dsts[f], indices[f], program - PLAN[f][_FIRST], PLAN, f)
            else:
                _narrow(srcs[f], dsts[f], indices[f], program - PLAN[f][_FIRST], PLAN, f)


@dataclass(frozen=True, slots=True)
class Gather:
    """One array of a batch.

    Attributes:
        source: The column, [rows, *shape] on the device; rows may be padded.
        index: Row numbers, int64 [batch] or [batch, *lanes]; -1 for zeros, a lower number for a place that stays unchanged.
        out: [batch, *lanes, *shape], of the transform's dtype.
        transform: Applied to each element.
        name: The array's name, for errors.
    """

    source: Any
    index: Any
    out: Any
    transform: Transform
    name: str


def _field(item: Gather, first: int, like: Any) -> tuple[Any, ...]:
    """Check an item, and return its part of the kernel's plan."""
    name = item.name
    check(item.source, f"{name}.source", (), (None,) * item.source.dim(), like=like, strided=True)
    check(item.index, f"{name}.index", "int64", (None,) * item.index.dim(), like=like)
    if item.source.dim() == 0 or item.index.dim() == 0:
        raise FieldError("Expected a column [rows, *shape] and an index [batch, *lanes], got a scalar", at=name)
    shape = (*item.index.shape, *item.source.shape[1:])
    check(item.out, f"{name}.out", (), shape, like=like)
    work = work_of(item.transform, item.source, item.out, name)
    count, elements = item.index.numel(), math.prod(item.source.shape[1:])
    if count > LARGEST_PART:
        raise FieldError(f"Expected at most {LARGEST_PART} rows in a batch, got {count}", at=name)
    stride = row_stride(item.source)
    width = tile_of(item.source, item.out, elements, stride, NUM_WARPS)
    if elements >= width:
        per_row = tiles(elements, width)
        return (*work, first, first + count * per_row, count, elements, stride, width, per_row, 1)
    tile, width = width, power_of_two(max(elements, 1))
    at_once = max(2, min(tile // width, _MOST_ROWS))
    return (*work, first, first + tiles(count, at_once), count, elements, stride, width, 1, at_once)


def gather(items: Sequence[Gather]) -> None:
    """Fill arrays of a batch in one launch.

    Row numbers are not checked against the columns' lengths; they must come from a draw over the same rows.

    Args:
        items: Up to 64; outputs must not overlap.

    Raises:
        FieldError: A tensor has the wrong dtype, shape, device or layout.
        ConfigError: There is no field, there are too many, or a transform has no kernel here.
    """
    if not 1 <= len(items) <= MOST_FIELDS:
        raise ConfigError(f"Expected from 1 to {MOST_FIELDS} arrays in one gather, got {len(items)}")
    plan: list[tuple[Any, ...]] = []
    used: list[Gather] = []
    programs = 0
    for item in items:
        field = _field(item, programs, items[0].source)
        # an array without elements needs no program
        if item.out.numel():
            plan.append(field)
            used.append(item)
            programs = field[_END.value]
    if not used:
        return
    launch(
        _gather,
        programs,
        tuple(as_words(item.source) for item in used),
        tuple(as_words(item.out) for item in used),
        tuple(item.index for item in used),
        num_warps=NUM_WARPS,
        PLAN=tuple(plan),
    )
