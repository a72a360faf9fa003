"""Row operations that do more than an affine cast: bounds, running statistics, unit vectors, moved images.

They are made of conduit.kernels.cpu.gather's parts and chosen by `describe`; each combination is compiled on its own, so that what is
not asked for costs nothing. A moved image is read row by row: the inner part is a contiguous conversion, only the repeated
border is clamped.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conduit.field import DTYPES
from conduit.kernels.cpu import gather
from conduit.kernels.cpu.elements import POINTERS, WRITE, conversion
from conduit.kernels.cpu.gather import (
    OP_CLASSES,
    OP_ELEMENTS,
    OP_HEIGHT,
    OP_HIGH,
    OP_INNER,
    OP_INVERSE,
    OP_LOW,
    OP_MEAN,
    OP_OUTER,
    OP_PAD,
    OP_PICK,
    OP_RANDOM,
    OP_REFUSED,
    OP_START,
    OP_WIDTH,
    SIGNATURE,
    converter,
    each_row,
    nowhere,
    scales_of,
)
from conduit.kernels.spec.plan import NEXT, Output
from conduit.kernels.spec.transforms import FLOATS, Transform, is_narrow
from conduit.native.jit import address, inner
from conduit.native.memory import peek_f64, peek_i64, poke_i64
from conduit.native.philox import pick_lane, random_pair, scale_to

_LIMITS = np.iinfo(np.int64)


@inner
def moves(seed, batch, pick, slot, pad):
    """Move of an image in height and width, each from -pad to pad, as a function of all that is named."""
    first, second = random_pair(seed, batch, pick_lane(pick, slot))
    return scale_to(first, 2 * pad + 1) - pad, scale_to(second, 2 * pad + 1) - pad


def mover(
    source_dtype: str, dtype: str, normalized: bool, affine: bool, clipped: bool, narrow: bool
) -> Callable[..., int]:
    """Moves images and converts their elements (kernels.cpu.elements.conversion)."""
    run_inline, work = conversion(source_dtype, dtype, normalized, affine, clipped, narrow)
    scales_at = scales_of(work)
    wide, slim = DTYPES[source_dtype].itemsize, DTYPES[dtype].itemsize

    # called in two places, where one copy of its loops is faster than two
    @inner
    def run(source, out, means, inverses, count, scales):
        run_inline(source, out, means, inverses, count, scales)

    @inner(forceinline=True)
    def prepare(descriptor):
        random = peek_i64(descriptor + OP_RANDOM)
        return (
            (peek_i64(random), peek_i64(random + 8), peek_i64(descriptor + OP_PICK), peek_i64(descriptor + OP_PAD)),
            (
                peek_i64(descriptor + OP_OUTER),
                peek_i64(descriptor + OP_HEIGHT),
                peek_i64(descriptor + OP_WIDTH),
                peek_i64(descriptor + OP_INNER),
            ),
            (peek_i64(descriptor + OP_MEAN), peek_i64(descriptor + OP_INVERSE)),
            scales_at(descriptor),
        )

    # as a call, which leaves its registers to the loops
    @inner
    def place(known, slot):
        seed, batch, pick, pad = known[0]
        return moves(seed, batch, pick, slot, pad)

    @inner(forceinline=True)
    def move(known, at, source, out):
        (outer, height, width, depth), (mean, inverse), scales = known[1], known[2], known[3]
        down, right = at
        line = width * depth
        # columns [begin, end) come from inside the image, those beside them repeat its border
        begin, end = min(max(-right, 0), width), min(max(width - right, 0), width)
        for h in range(outer * height):
            image = h // height
            start = line * (image * height + min(max(h - image * height + down, 0), height - 1))
            # the inside, then the left and the right border a pixel at a time
            k, to = start + depth * (begin + right), line * h + depth * begin
            count = depth * max(end - begin, 0)
            run(source + wide * k, out + slim * to, mean + 8 * k, inverse + 8 * k, count, scales)
            for w in range(begin + width - end):
                column = w if w < begin else end + w - begin
                k, to = start + depth * (0 if w < begin else width - 1), line * h + depth * column
                run(source + wide * k, out + slim * to, mean + 8 * k, inverse + 8 * k, depth, scales)

    return each_row(prepare, place, move)


def indicator(source_dtype: str, dtype: str) -> Callable[..., int]:
    """Turns whole numbers into unit vectors."""
    source_pointer, out_pointer, write = POINTERS[source_dtype], POINTERS[dtype], WRITE[dtype]

    @inner(forceinline=True)
    def prepare(descriptor):
        return (
            descriptor,
            peek_i64(descriptor + OP_ELEMENTS),
            peek_i64(descriptor + OP_CLASSES),
            np.uint64(peek_i64(descriptor + OP_START)),
            write(peek_f64(descriptor + OP_LOW)),
            write(peek_f64(descriptor + OP_HIGH)),
        )

    @inner(forceinline=True)
    def indicate(known, at, source, out):
        descriptor, elements, classes, start, off, on = known
        x, y = source_pointer(source), out_pointer(out)
        for j in range(elements * classes):
            y[j] = off
        for j in range(elements):
            # as uint64, so that what lies below the first class is too large
            value = np.uint64(x[j]) - start
            if value < np.uint64(classes):
                y[j * classes + np.int64(value)] = on
            else:
                poke_i64(descriptor + OP_REFUSED, peek_i64(descriptor + OP_REFUSED) + 1)

    return each_row(prepare, nowhere, indicate)


@functools.cache
def _address(kind: Callable[..., Callable[..., int]], *arguments: Any) -> int:
    return address(kind(*arguments), SIGNATURE)


def callbacks() -> Iterator[tuple[Callable[..., int], str]]:
    """The usual operations, for a library of kernels; others are compiled when they are asked for.

    These are all unit vectors in the usual dtypes; floats and integers that are normalized, scaled and clipped to floats; integers that
    are clipped as they are; and images that are moved, with or without a cast or scaling to floats.
    """
    whole = [dtype for dtype in DTYPES if dtype not in FLOATS and dtype != "bool"]
    for source, dtype in itertools.product(whole, (*FLOATS, "uint8", "bool", "int64")):
        yield indicator(source, dtype), SIGNATURE
    for source, dtype, affine, narrow in _to_floats():
        yield converter(source, dtype, False, affine, True, narrow), SIGNATURE
        if not affine:
            yield converter(source, dtype, True, False, False, narrow), SIGNATURE
            yield converter(source, dtype, True, False, True, narrow), SIGNATURE
    for dtype in whole:
        if dtype != "uint64":  # it has no clipping as it is
            yield converter(dtype, dtype, False, False, True, is_narrow(Transform(dtype), dtype)), SIGNATURE
    for dtype in _IMAGES:
        yield mover(dtype, dtype, False, False, False, is_narrow(Transform(dtype), dtype)), SIGNATURE
    for source, dtype, affine, narrow in _to_floats():
        if source in _IMAGES and dtype != "float64" and (affine or source != dtype):
            yield mover(source, dtype, False, affine, False, narrow), SIGNATURE


def usual() -> Iterator[tuple[Callable[..., int], str]]:
    """None: each is for who asks for it."""
    yield from ()


_IMAGES = ("uint8", "float16", "bfloat16", "float32")


def _to_floats() -> Iterator[tuple[str, str, bool, bool]]:
    """Conversions to floats, those to the same dtype among them, as conduit.kernels.cpu.gather.conversions."""
    for source, dtype, affine, narrow in gather.conversions():
        if dtype in FLOATS:
            yield source, dtype, affine, narrow
    for dtype in FLOATS:
        yield dtype, dtype, False, is_narrow(Transform(dtype), dtype)


def _bounds(output: Output) -> np.ndarray[Any, Any]:
    """The words OP_LOW and OP_HIGH."""
    wanted = output.transform
    if output.field.dtype in FLOATS or wanted.dtype in FLOATS or output.classes:
        return np.array([wanted.low, wanted.high]).view(np.int64)
    limits = (wanted.low, _LIMITS.min), (wanted.high, _LIMITS.max)
    return np.array([int(bound) if np.isfinite(bound) else limit for bound, limit in limits], np.int64)


def indicators(output: Output) -> tuple[float, float]:
    """What a one-hot output holds beside and at its class, before the cast to the result."""
    wanted = output.transform
    off, on = (float(np.clip(value * wanted.factor + wanted.offset, wanted.low, wanted.high)) for value in (0.0, 1.0))
    return off, on


def describe(
    output: Output,
    source: int,
    stride: int,
    out: int,
    index: int,
    batch_size: int,
    *,
    pick: int = 0,
    random: int = 0,
    statistics: tuple[int, int] = (0, 0),
) -> np.ndarray[Any, Any]:
    """The descriptor of any output's operation, as conduit.kernels.cpu.gather.describe.

    Args:
        output: What is to be made.
        source: Address of the column's row 0.
        stride: Bytes from one row of the column to the next.
        out: Address of the output array, C-contiguous [batch_size, *lanes, *shape], a multiple of 64.
        index: Address of the row numbers, int64 [batch_size, *lanes]; -1 gives zeros.
        batch_size: Rows of a batch.
        pick: Number of the image whose move is drawn (`pick_of`).
        random: Address of int64 [2], seed and number of the batch.
        statistics: Addresses of mean and inverse deviation, float64 [*shape].
    """
    words = gather.describe(output, source, stride, out, index, batch_size)
    if not output.is_augmented:
        return words
    wanted = output.transform
    if output.classes:
        words[0] = _address(indicator, output.field.dtype, wanted.dtype)
        words[OP_CLASSES // 8], words[OP_START // 8] = output.classes, output.start
        words[OP_LOW // 8 : OP_HIGH // 8 + 1] = np.array(indicators(output)).view(np.int64)
        return words
    kind = converter if output.shift is None else mover
    words[0] = _address(
        kind,
        output.field.dtype,
        wanted.dtype,
        output.normalize is not None,
        wanted.is_affine,
        wanted.is_clipped,
        is_narrow(wanted, output.field.dtype),
    )
    words[OP_LOW // 8 : OP_HIGH // 8 + 1] = _bounds(output)
    words[OP_MEAN // 8], words[OP_INVERSE // 8] = statistics
    if output.shift is not None:
        words[OP_PAD // 8], words[OP_PICK // 8], words[OP_RANDOM // 8] = output.shift.pad, pick, random
        words[OP_OUTER // 8 : OP_INNER // 8 + 1] = output.shift.extents(output.field.shape)
    return words


def pick_of(output: Output, names: tuple[str, ...]) -> int:
    """Number of an output's image among a schema's fields; the next observation has its own unless it moves alike."""
    apart = output.name.startswith(NEXT) and output.shift is not None and not output.shift.same
    return 2 * names.index(output.field.name) + apart
