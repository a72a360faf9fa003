"""Row operations that do more than an affine cast: bounds, running statistics, unit vectors, moved images.

They have the form of conduit.kernels.cpu.gather and are chosen by `describe`; each combination is compiled on its own, so that what
is not asked for costs nothing. A moved image is read row by row: the inner part is a contiguous conversion, only the repeated
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
from conduit.kernels.cpu.gather import (
    _POINTERS,
    _READ,
    _SIGNATURE,
    _WRITE,
    OP_CLASSES,
    OP_ELEMENTS,
    OP_FACTOR,
    OP_HEIGHT,
    OP_HIGH,
    OP_INDEX,
    OP_INNER,
    OP_INVERSE,
    OP_LANES,
    OP_LOW,
    OP_MEAN,
    OP_OFFSET,
    OP_OUT,
    OP_OUT_STRIDE,
    OP_OUTER,
    OP_PAD,
    OP_PICK,
    OP_RANDOM,
    OP_REFUSED,
    OP_SOURCE,
    OP_START,
    OP_STRIDE,
    OP_WIDTH,
    _as_is,
)
from conduit.kernels.spec.plan import NEXT, Output
from conduit.kernels.spec.transforms import FLOATS, Transform, is_narrow
from conduit.native.jit import address, inner
from conduit.native.memory import copy_bytes, peek_f64, peek_i64, poke_i64, zero_bytes
from conduit.native.philox import pick_lane, random_pair, scale_to

_LIMITS = np.iinfo(np.int64)


@inner
def moves(seed, batch, pick, slot, pad):
    """Move of an image in height and width, each from -pad to pad, as a function of all that is named."""
    first, second = random_pair(seed, batch, pick_lane(pick, slot))
    return scale_to(first, 2 * pad + 1) - pad, scale_to(second, 2 * pad + 1) - pad


def _element(source_dtype: str, dtype: str, normalized: bool, affine: bool, clipped: bool, narrow: bool) -> Any:
    """One element's conversion, and the type that factors and bounds have in it."""
    read, write = _READ.get(source_dtype, _as_is), _WRITE[dtype]
    whole = source_dtype not in FLOATS and dtype not in FLOATS
    work = np.int64 if whole and clipped else np.float32 if narrow and not normalized else np.float64

    @inner
    def convert(x, mean, inverse, factor, offset, low, high):
        if not (normalized or affine or clipped):
            return write(read(x))
        value = work(read(x))
        if normalized:
            value = (value - mean) * inverse
        if affine:
            value = value * factor + offset
        if clipped:
            # min and max would make NaN a bound
            value = low if value < low else value  # noqa: FURB136
            value = high if value > high else value  # noqa: FURB136
        return write(value)

    return convert, work


def _converter(
    source_dtype: str, dtype: str, normalized: bool, affine: bool, clipped: bool, is_narrow: bool
) -> Callable[..., int]:
    convert, work = _element(source_dtype, dtype, normalized, affine, clipped, is_narrow)
    bound = peek_i64 if work is np.int64 else peek_f64
    source_pointer, out_pointer, real = _POINTERS[source_dtype], _POINTERS[dtype], _POINTERS["float64"]

    def convert_rows(descriptor, slots, count, unused):
        source = peek_i64(descriptor + OP_SOURCE)
        stride = peek_i64(descriptor + OP_STRIDE)
        out = peek_i64(descriptor + OP_OUT)
        out_stride = peek_i64(descriptor + OP_OUT_STRIDE)
        elements = peek_i64(descriptor + OP_ELEMENTS)
        factor, offset = work(peek_f64(descriptor + OP_FACTOR)), work(peek_f64(descriptor + OP_OFFSET))
        low, high = work(bound(descriptor + OP_LOW)), work(bound(descriptor + OP_HIGH))
        mean, inverse = real(peek_i64(descriptor + OP_MEAN)), real(peek_i64(descriptor + OP_INVERSE))
        index = peek_i64(descriptor + OP_INDEX)
        lanes = peek_i64(descriptor + OP_LANES)
        for i in range(count):
            slot = peek_i64(slots + 8 * i) * lanes
            for lane in range(slot, slot + lanes):
                row = peek_i64(index + 8 * lane)
                if row < 0:
                    zero_bytes(out + out_stride * lane, out_stride)
                    continue
                x = source_pointer(source + stride * row)
                y = out_pointer(out + out_stride * lane)
                if normalized:
                    for j in range(elements):
                        y[j] = convert(x[j], mean[j], inverse[j], factor, offset, low, high)
                else:
                    for j in range(elements):
                        y[j] = convert(x[j], 0.0, 1.0, factor, offset, low, high)
        return 0

    return convert_rows


def _mover(
    source_dtype: str, dtype: str, normalized: bool, affine: bool, clipped: bool, is_narrow: bool
) -> Callable[..., int]:
    convert, work = _element(source_dtype, dtype, normalized, affine, clipped, is_narrow)
    bound = peek_i64 if work is np.int64 else peek_f64
    source_pointer, out_pointer, real = _POINTERS[source_dtype], _POINTERS[dtype], _POINTERS["float64"]
    wide, narrow = DTYPES[source_dtype].itemsize, DTYPES[dtype].itemsize
    copies = source_dtype == dtype and not (normalized or affine or clipped)

    @inner
    def run(x, y, mean, inverse, count, factor, offset, low, high):
        """Convert elements that lie side by side."""
        if copies:
            copy_bytes(y, x, narrow * count)
            return
        values, out = source_pointer(x), out_pointer(y)
        if normalized:
            means, inverses = real(mean), real(inverse)
            for j in range(count):
                out[j] = convert(values[j], means[j], inverses[j], factor, offset, low, high)
        else:
            for j in range(count):
                out[j] = convert(values[j], 0.0, 1.0, factor, offset, low, high)

    def move_rows(descriptor, slots, count, unused):
        source = peek_i64(descriptor + OP_SOURCE)
        stride = peek_i64(descriptor + OP_STRIDE)
        out = peek_i64(descriptor + OP_OUT)
        out_stride = peek_i64(descriptor + OP_OUT_STRIDE)
        factor, offset = work(peek_f64(descriptor + OP_FACTOR)), work(peek_f64(descriptor + OP_OFFSET))
        low, high = work(bound(descriptor + OP_LOW)), work(bound(descriptor + OP_HIGH))
        mean, inverse = peek_i64(descriptor + OP_MEAN), peek_i64(descriptor + OP_INVERSE)
        index = peek_i64(descriptor + OP_INDEX)
        lanes = peek_i64(descriptor + OP_LANES)
        outer, height = peek_i64(descriptor + OP_OUTER), peek_i64(descriptor + OP_HEIGHT)
        width, depth = peek_i64(descriptor + OP_WIDTH), peek_i64(descriptor + OP_INNER)
        pad, pick = peek_i64(descriptor + OP_PAD), peek_i64(descriptor + OP_PICK)
        random = peek_i64(descriptor + OP_RANDOM)
        seed, batch = peek_i64(random), peek_i64(random + 8)
        line = width * depth
        for i in range(count):
            sample = peek_i64(slots + 8 * i)
            down, right = moves(seed, batch, pick, sample, pad)
            # columns [begin, end) come from inside the image, those beside them repeat its border
            begin, end = min(max(-right, 0), width), min(max(width - right, 0), width)
            for lane in range(sample * lanes, (sample + 1) * lanes):
                row = peek_i64(index + 8 * lane)
                if row < 0:
                    zero_bytes(out + out_stride * lane, out_stride)
                    continue
                x = source + stride * row
                y = out + out_stride * lane
                for h in range(outer * height):
                    image = h // height
                    start = line * (image * height + min(max(h - image * height + down, 0), height - 1))
                    # the inside, then the left and the right border a pixel at a time
                    k, at = start + depth * (begin + right), line * h + depth * begin
                    run(
                        x + wide * k,
                        y + narrow * at,
                        mean + 8 * k,
                        inverse + 8 * k,
                        depth * max(end - begin, 0),
                        factor,
                        offset,
                        low,
                        high,
                    )
                    for w in range(begin + width - end):
                        column = w if w < begin else end + w - begin
                        k, at = start + depth * (0 if w < begin else width - 1), line * h + depth * column
                        run(
                            x + wide * k,
                            y + narrow * at,
                            mean + 8 * k,
                            inverse + 8 * k,
                            depth,
                            factor,
                            offset,
                            low,
                            high,
                        )
        return 0

    return move_rows


def _indicator(source_dtype: str, dtype: str) -> Callable[..., int]:
    source_pointer, out_pointer, write = _POINTERS[source_dtype], _POINTERS[dtype], _WRITE[dtype]

    def indicate_rows(descriptor, slots, count, unused):
        source = peek_i64(descriptor + OP_SOURCE)
        stride = peek_i64(descriptor + OP_STRIDE)
        out = peek_i64(descriptor + OP_OUT)
        out_stride = peek_i64(descriptor + OP_OUT_STRIDE)
        elements = peek_i64(descriptor + OP_ELEMENTS)
        classes = peek_i64(descriptor + OP_CLASSES)
        start = np.uint64(peek_i64(descriptor + OP_START))
        off, on = write(peek_f64(descriptor + OP_LOW)), write(peek_f64(descriptor + OP_HIGH))
        index = peek_i64(descriptor + OP_INDEX)
        lanes = peek_i64(descriptor + OP_LANES)
        for i in range(count):
            slot = peek_i64(slots + 8 * i) * lanes
            for lane in range(slot, slot + lanes):
                row = peek_i64(index + 8 * lane)
                if row < 0:
                    zero_bytes(out + out_stride * lane, out_stride)
                    continue
                x = source_pointer(source + stride * row)
                y = out_pointer(out + out_stride * lane)
                for j in range(elements * classes):
                    y[j] = off
                for j in range(elements):
                    # as uint64, so that what lies below the first class is too large
                    value = np.uint64(x[j]) - start
                    if value < np.uint64(classes):
                        y[j * classes + np.int64(value)] = on
                    else:
                        poke_i64(descriptor + OP_REFUSED, peek_i64(descriptor + OP_REFUSED) + 1)
        return 0

    return indicate_rows


@functools.cache
def _address(kind: Callable[..., Callable[..., int]], *arguments: Any) -> int:
    return address(kind(*arguments), _SIGNATURE)


def callbacks() -> Iterator[tuple[Callable[..., int], str]]:
    """The usual operations, for a library of kernels; others are compiled when they are asked for.

    These are all unit vectors in the usual dtypes; floats and integers that are normalized, scaled and clipped to floats; integers that
    are clipped as they are; and images that are moved, with or without a cast or scaling to floats.
    """
    whole = [dtype for dtype in DTYPES if dtype not in FLOATS and dtype != "bool"]
    for source, dtype in itertools.product(whole, (*FLOATS, "uint8", "bool", "int64")):
        yield _indicator(source, dtype), _SIGNATURE
    for source, dtype, affine, narrow in _to_floats():
        yield _converter(source, dtype, False, affine, True, narrow), _SIGNATURE
        if not affine:
            yield _converter(source, dtype, True, False, False, narrow), _SIGNATURE
            yield _converter(source, dtype, True, False, True, narrow), _SIGNATURE
    for dtype in whole:
        if dtype != "uint64":  # it has no clipping as it is
            yield _converter(dtype, dtype, False, False, True, is_narrow(Transform(dtype), dtype)), _SIGNATURE
    for dtype in _IMAGES:
        yield _mover(dtype, dtype, False, False, False, is_narrow(Transform(dtype), dtype)), _SIGNATURE
    for source, dtype, affine, narrow in _to_floats():
        if source in _IMAGES and dtype != "float64" and (affine or source != dtype):
            yield _mover(source, dtype, False, affine, False, narrow), _SIGNATURE


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
        words[0] = _address(_indicator, output.field.dtype, wanted.dtype)
        words[OP_CLASSES // 8], words[OP_START // 8] = output.classes, output.start
        words[OP_LOW // 8 : OP_HIGH // 8 + 1] = np.array(indicators(output)).view(np.int64)
        return words
    kind = _converter if output.shift is None else _mover
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
