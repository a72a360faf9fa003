"""Values of varying lengths on the device, padded or packed: the layouts of conduit.kernels.spec.ragged.

A value lies in its page's arena; its span has the position and length (conduit.store.pages.ragged_values). A span that is half written, or
of another generation, never leads out of the arena: the kernels bound lengths by the largest length and positions by the arena, as on
the CPU.

    pad     a program takes a tile of one sample's row: values, zeros after them, the masks
    pack    one program sums up the lengths; then a program takes a tile of one sample and stores it after the earlier samples' values

`loss_mask` is for the loss: it is true for values after the sample's prompt.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from conduit.errors import ConfigError, FieldError
from conduit.kernels.gpu.elements import changes_zero, convert, tile_of, work_of
from conduit.kernels.gpu.launch import LARGEST, LARGEST_PART, as_words, check, launch, power_of_two, row_stride, tiles
from conduit.kernels.spec.transforms import Transform
from conduit.store.format import words

NUM_WARPS = 4
_SHIFT, _MASK = tl.constexpr(words.SPAN_SHIFT), tl.constexpr(words.SPAN_MASK)


@triton.jit
def _length(spans, row, mask, LONGEST: tl.constexpr):
    """Lengths in items of the values of some rows, and their spans; 0 for row -1."""
    span = tl.load(spans + row, mask=mask & (row >= 0), other=0)
    return tl.minimum((span >> _SHIFT) & _MASK, LONGEST), span


@triton.jit
def _pad(
    spans,
    arenas,
    rows,
    prompts,
    out,
    present,
    loss,
    lengths,
    WORKS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    ITEMS: tl.constexpr,
    LONGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    sample = (program // TILES).to(tl.int64)
    tile = program % TILES
    row = tl.load(rows + sample)
    length, span = _length(spans, row, True, LONGEST)
    start = tl.minimum(span & _MASK, ITEMS - length)
    source = arenas + row // PAGE_ROWS * STRIDE + start * WIDTH
    c = tile * BLOCK + tl.arange(0, BLOCK)
    inside = c < length * WIDTH
    y = convert(tl.load(source + c, mask=inside, other=0), out.dtype.element_ty, WORKS, 0)
    if changes_zero(WORKS, 0):
        y = tl.where(inside, y, tl.zeros_like(y))
    tl.store(out + sample * (LONGEST * WIDTH) + c, y, mask=c < LONGEST * WIDTH)
    # the masks have one element per item: only as many tiles as they need write them, a tile's elements each
    item = tile * BLOCK + tl.arange(0, BLOCK)
    counted = item < LONGEST
    tl.store(present + sample * LONGEST + item, (item < length).to(tl.uint8), mask=counted)
    if loss is not None:
        prompt = tl.load(prompts + sample)
        tl.store(loss + sample * LONGEST + item, ((item < length) & (item >= prompt)).to(tl.uint8), mask=counted)
    if tile == 0:
        tl.store(lengths + sample, length)


@triton.jit
def _starts(spans, rows, starts, COUNT: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr):
    """One program: where each packed value begins."""
    before = tl.zeros((), tl.int64)
    for begin in range(0, COUNT, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        row = tl.load(rows + at, mask=at < COUNT, other=-1)
        length, _ = _length(spans, row, at < COUNT, LONGEST)
        run = before + tl.cumsum(length, 0)
        tl.store(starts + 1 + at, run.to(tl.int32), mask=at < COUNT)
        before += tl.sum(length, 0)
    tl.store(starts, 0)


@triton.jit
def _pack(
    spans,
    arenas,
    rows,
    prompts,
    starts,
    out,
    places,
    loss,
    WORKS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    ITEMS: tl.constexpr,
    LONGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    sample = (program // TILES).to(tl.int64)
    tile = program % TILES
    first = tl.load(starts + sample).to(tl.int64)
    length = tl.load(starts + sample + 1).to(tl.int64) - first
    if tile * BLOCK < length * WIDTH:
        row = tl.load(rows + sample)
        _, span = _length(spans, row, True, LONGEST)
        start = tl.minimum(span & _MASK, ITEMS - length)
        source = arenas + row // PAGE_ROWS * STRIDE + start * WIDTH
        c = tile * BLOCK + tl.arange(0, BLOCK)
        inside = c < length * WIDTH
        y = convert(tl.load(source + c, mask=inside, other=0), out.dtype.element_ty, WORKS, 0)
        tl.store(out + first * WIDTH + c, y, mask=inside)
        item = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(places + first + item, item, mask=item < length)
        if loss is not None:
            prompt = tl.load(prompts + sample)
            tl.store(loss + first + item, (item >= prompt).to(tl.uint8), mask=item < length)


def _check(
    spans: Any, arenas: Any, rows: Any, prompts: Any, loss_mask: Any, page_rows: int, longest: int, name: str
) -> None:
    """Check the arguments that both layouts have."""
    check(rows, f"{name}.rows", "int64", (None,))
    check(spans, f"{name}.spans", "int64", (None,), like=rows)
    if not hasattr(arenas, "dim") or arenas.dim() < 2:
        raise FieldError("Expected arenas [pages, items, *shape]", at=name)
    check(arenas, f"{name}.arenas", (), (None,) * arenas.dim(), like=rows, strided=True)
    if page_rows < 1 or not 1 <= longest <= arenas.shape[1]:
        raise ConfigError(
            f"Expected page_rows of at least 1 and a longest value of 1 to {arenas.shape[1]} items, which an arena has, got "
            f"{page_rows} and {longest} - at `{name}`"
        )
    if (prompts is None) != (loss_mask is None):
        raise ConfigError(f"Expected both prompts and loss_mask, or neither - at `{name}`")
    if prompts is not None:
        check(prompts, f"{name}.prompts", "int64", (len(rows),), like=rows)


def _tiles(arenas: Any, out: Any, transform: Transform, longest: int, name: str) -> tuple[int, dict[str, Any]]:
    """Tiles of a sample, and the constants of both kernels; a tile counts items and elements alike."""
    width = math.prod(arenas.shape[2:])
    if longest * max(width, 1) > LARGEST_PART:
        raise FieldError(f"Expected values of at most {LARGEST_PART} elements, got {longest} items of {width}", at=name)
    block = min(
        tile_of(arenas, out, width, width, NUM_WARPS), max(32 * NUM_WARPS, power_of_two(longest * max(width, 1)))
    )
    per_sample = tiles(longest * max(width, 1), block)
    return per_sample, {
        "WORKS": (tuple(work_of(transform, arenas, out, name)),),
        "STRIDE": row_stride(arenas),
        "ITEMS": int(arenas.shape[1]),
        "LONGEST": longest,
        "WIDTH": width,
        "TILES": per_sample,
        "BLOCK": block,
    }


def pad(
    spans: Any,
    arenas: Any,
    rows: Any,
    out: Any,
    mask: Any,
    lengths: Any,
    *,
    transform: Transform,
    page_rows: int,
    prompts: Any = None,
    loss_mask: Any = None,
    name: str = "tokens",
) -> None:
    """The values of some rows, padded with zeros, in one launch.

    Args:
        spans: int64 [rows of the table], the field's column.
        arenas: [pages, items, *shape], the values; pages may be padded.
        rows: int64 [batch]; row -1 gives length 0.
        out: [batch, longest, *shape] of the transform's dtype.
        mask: bool [batch, longest], true where there is a value.
        lengths: int64 [batch].
        transform: Applied to each element.
        page_rows: Rows of a page.
        prompts: int64 [batch], number of items at the beginning of each value that have no loss.
        loss_mask: bool [batch, longest], `mask` without the prompts.
        name: The field's name, for errors.

    Raises:
        FieldError: Wrong tensors.
        ConfigError: Sizes or a transform that are not possible.
    """
    longest = int(out.shape[1]) if hasattr(out, "dim") and out.dim() > 1 else 0
    _check(spans, arenas, rows, prompts, loss_mask, page_rows, longest, name)
    batch = len(rows)
    check(out, f"{name}.out", (), (batch, longest, *arenas.shape[2:]), like=rows)
    check(mask, f"{name}.mask", "bool", (batch, longest), like=rows)
    check(lengths, f"{name}.lengths", "int64", (batch,), like=rows)
    if loss_mask is not None:
        check(loss_mask, f"{name}.loss_mask", "bool", (batch, longest), like=rows)
    per_sample, meta = _tiles(arenas, out, transform, longest, name)
    launch(
        _pad,
        batch * per_sample,
        spans,
        as_words(arenas),
        rows,
        prompts,
        as_words(out),
        as_words(mask),
        None if loss_mask is None else as_words(loss_mask),
        lengths,
        num_warps=NUM_WARPS,
        PAGE_ROWS=page_rows,
        **meta,
    )


def pack(
    spans: Any,
    arenas: Any,
    rows: Any,
    out: Any,
    cu_seqlens: Any,
    position_ids: Any,
    *,
    longest: int,
    transform: Transform,
    page_rows: int,
    prompts: Any = None,
    loss_mask: Any = None,
    name: str = "tokens",
) -> None:
    """The values of some rows, packed one after the other, in two launches; memory after the last value does not change.

    Args:
        spans: int64 [rows of the table], the field's column.
        arenas: [pages, items, *shape], the values; pages may be padded.
        rows: int64 [batch]; row -1 gives length 0.
        out: [room, *shape] of the transform's dtype, room for batch * longest items.
        cu_seqlens: int32 [batch + 1], where each value begins; the last element is the number of items.
        position_ids: int32 [room], the position of each item in its value.
        longest: Items of the longest value.
        transform: Applied to each element.
        page_rows: Rows of a page.
        prompts: int64 [batch], number of items at the beginning of each value that have no loss.
        loss_mask: bool [room], true after the prompts.
        name: The field's name, for errors.

    Raises:
        FieldError: Wrong tensors.
        ConfigError: Sizes or a transform that are not possible.
    """
    _check(spans, arenas, rows, prompts, loss_mask, page_rows, longest, name)
    batch = len(rows)
    room = batch * longest
    if room > LARGEST:
        raise ConfigError(
            f"Expected a packed batch of at most {LARGEST} items, got {batch} of up to {longest} - at `{name}`"
        )
    check(out, f"{name}.out", (), (room, *arenas.shape[2:]), like=rows)
    check(cu_seqlens, f"{name}.cu_seqlens", "int32", (batch + 1,), like=rows)
    check(position_ids, f"{name}.position_ids", "int32", (room,), like=rows)
    if loss_mask is not None:
        check(loss_mask, f"{name}.loss_mask", "bool", (room,), like=rows)
    per_sample, meta = _tiles(arenas, out, transform, longest, name)
    launch(_starts, 1, spans, rows, cu_seqlens, num_warps=NUM_WARPS, COUNT=batch, LONGEST=longest, BLOCK=512)
    launch(
        _pack,
        batch * per_sample,
        spans,
        as_words(arenas),
        rows,
        prompts,
        cu_seqlens,
        as_words(out),
        position_ids,
        None if loss_mask is None else as_words(loss_mask),
        num_warps=NUM_WARPS,
        PAGE_ROWS=page_rows,
        **meta,
    )
