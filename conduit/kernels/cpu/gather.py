"""Row operations: copy or convert the rows that a job lists into the slots of a batch.

Each operation is a C function `op(descriptor, slots, count, 0) -> 0`, compiled for one row size or one pair of dtypes, and
called through its address, so that one delivery kernel serves every plan without recompiling. A slot has one or more lanes
(the frames of a stack, the steps of a sequence), each a row number in the operation's index; -1 gives zeros:

    for slot in slots: for lane in range(lanes): out[slot, lane] = f(column[index[slot, lane]])

`descriptor` is int64 [OP_WORDS]. The row size is a constant of the compiled copy where rows are short and of a usual size: they become a
few vector moves. All others are a call of the C library's copy, which is as fast as memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conduit.kernels.cpu.elements import POINTERS, WRITE, conversion
from conduit.kernels.spec.plan import Output
from conduit.kernels.spec.transforms import FLOATS, Transform, is_narrow
from conduit.native.jit import address, inner, intrinsic, ir, types
from conduit.native.memory import copy_bytes, fence_full, peek_f64, peek_i64, prefetch, zero_bytes

OP_FUNCTION, OP_SOURCE, OP_STRIDE, OP_OUT, OP_OUT_STRIDE, OP_ELEMENTS, OP_FACTOR, OP_OFFSET, OP_INDEX, OP_LANES = range(
    0, 80, 8
)
(
    OP_LOW,
    OP_HIGH,
    OP_MEAN,
    OP_INVERSE,
    OP_CLASSES,
    OP_REFUSED,
    OP_PAD,
    OP_PICK,
    OP_OUTER,
    OP_HEIGHT,
    OP_WIDTH,
    OP_INNER,
    OP_RANDOM,
) = range(80, 184, 8)
OP_START = OP_PAD  # no output has both classes and a move
"""Words of a descriptor; the second group is conduit.kernels.cpu.augment's."""
OP_WORDS = 23

SIGNATURE = "int64(int64, int64, int64, int64)"
_LANES = 16
_COPIED_AT_ONCE = frozenset((*range(1, 16), *range(16, 257, 4)))
"""Row sizes in bytes that have a copy of their own."""
_STREAM_BYTES = 4 << 20
"""An output array of this size is written past the caches; a smaller one is likely to be read from them soon."""


@intrinsic
def _stream_16_bytes(typingctx: Any, out: Any, source: Any, factor: Any, offset: Any) -> Any:
    """Store 16 bytes as 16 float32 (x * factor + offset) past the caches; `out` is a multiple of 64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        byte, single = ir.VectorType(ir.IntType(8), _LANES), ir.VectorType(ir.FloatType(), _LANES)

        def spread(value: Any) -> Any:
            one = builder.insert_element(ir.Constant(single, ir.Undefined), value, ir.Constant(word, 0))
            zeros = ir.Constant(ir.VectorType(word, _LANES), [0] * _LANES)
            return builder.shuffle_vector(one, ir.Constant(single, ir.Undefined), zeros)

        bytes_ = builder.load(builder.inttoptr(args[1], byte.as_pointer()), align=1)
        scaled = builder.fmul(builder.uitofp(bytes_, single), spread(args[2]))
        shifted = builder.fadd(scaled, spread(args[3]))
        store = builder.store(shifted, builder.inttoptr(args[0], single.as_pointer()), align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(word, 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32), codegen


@inner(forceinline=True)
def nothing(descriptor):
    """What is known of an operation whose code says it all."""
    return 0


@inner(forceinline=True)
def nowhere(known, slot):
    """What is known of a slot that is like all others."""
    return 0


def each_row(prepare: Any, place: Any, one: Any, row_bytes: int = 0) -> Callable[..., int]:
    """A row operation that goes from lane to lane.

    Args:
        prepare: prepare(descriptor) -> known, what is read once a call: nothing that rows are stored to can change it, which a compiler
            cannot know.
        place: place(known, slot) -> at, what is computed once a slot.
        one: one(known, at, source, out) makes a row of the output from a row of the column, both addresses.
        row_bytes: Bytes of a row of the output, as a constant; 0: the descriptor says it.
    """

    def rows(descriptor, slots, count, unused):
        source = peek_i64(descriptor + OP_SOURCE)
        stride = peek_i64(descriptor + OP_STRIDE)
        out = peek_i64(descriptor + OP_OUT)
        out_stride = row_bytes or peek_i64(descriptor + OP_OUT_STRIDE)
        index = peek_i64(descriptor + OP_INDEX)
        lanes = peek_i64(descriptor + OP_LANES)
        known = prepare(descriptor)
        for i in range(count):
            slot = peek_i64(slots + 8 * i)
            at = place(known, slot)
            first = slot * lanes
            for lane in range(lanes):
                row = peek_i64(index + 8 * (first + lane))
                target = out + out_stride * (first + lane)
                if row < 0:
                    zero_bytes(target, out_stride)
                else:
                    one(known, at, source + stride * row, target)
        return 0

    return rows


def copier(row_bytes: int) -> Callable[..., int]:
    """Copies rows as they are, of so many bytes; 0: as the descriptor says."""

    @inner(forceinline=True)
    def size_of(descriptor):
        return row_bytes or peek_i64(descriptor + OP_OUT_STRIDE)

    @inner(forceinline=True)
    def copy(size, at, source, out):
        copy_bytes(out, source, row_bytes or size)

    return each_row(size_of, nowhere, copy, row_bytes)


def scales_of(work: Any) -> Any:
    """What reads (factor, offset, low, high) of a descriptor, as that type; bounds of whole numbers are stored as such."""
    bound = peek_i64 if work is np.int64 else peek_f64

    @inner(forceinline=True)
    def scales(descriptor):
        return (
            work(peek_f64(descriptor + OP_FACTOR)),
            work(peek_f64(descriptor + OP_OFFSET)),
            work(bound(descriptor + OP_LOW)),
            work(bound(descriptor + OP_HIGH)),
        )

    return scales


def converter(
    source_dtype: str, dtype: str, normalized: bool, affine: bool, clipped: bool, narrow: bool
) -> Callable[..., int]:
    """Converts rows element by element (kernels.cpu.elements.conversion)."""
    run, work = conversion(source_dtype, dtype, normalized, affine, clipped, narrow)
    scales = scales_of(work)

    @inner(forceinline=True)
    def prepare(descriptor):
        return (
            peek_i64(descriptor + OP_MEAN),
            peek_i64(descriptor + OP_INVERSE),
            peek_i64(descriptor + OP_ELEMENTS),
            scales(descriptor),
        )

    @inner(forceinline=True)
    def convert(known, at, source, out):
        run(source, out, known[0], known[1], known[2], known[3])

    return each_row(prepare, nowhere, convert)


def _stream_rows(descriptor, slots, count, unused):
    """Scaled bytes to float32, stored past the caches; rows must be a multiple of 16 elements and outputs 64-byte aligned."""
    source = peek_i64(descriptor + OP_SOURCE)
    stride = peek_i64(descriptor + OP_STRIDE)
    out = peek_i64(descriptor + OP_OUT)
    elements = peek_i64(descriptor + OP_ELEMENTS)
    factor = np.float32(peek_f64(descriptor + OP_FACTOR))
    offset = np.float32(peek_f64(descriptor + OP_OFFSET))
    index = peek_i64(descriptor + OP_INDEX)
    lanes = peek_i64(descriptor + OP_LANES)
    for i in range(count):
        slot = peek_i64(slots + 8 * i) * lanes
        for lane in range(slot, slot + lanes):
            row = peek_i64(index + 8 * lane)
            y = out + 4 * elements * lane
            if row < 0:
                zero_bytes(y, 4 * elements)
                continue
            x = source + stride * row
            coming = row
            if lane + 1 < slot + lanes:
                coming = peek_i64(index + 8 * (lane + 1))
            elif i + 1 < count:
                coming = peek_i64(index + 8 * lanes * peek_i64(slots + 8 * (i + 1)))
            ahead = source + stride * coming
            for j in range(0, elements, _LANES):
                if j % 64 == 0:
                    prefetch(ahead + j)
                _stream_16_bytes(y + 4 * j, x + j, factor, offset)
    # such stores are not ordered by a release: they must have left before anyone is told of the batch
    fence_full()
    return 0


@functools.cache
def _copy_address(row_bytes: int) -> int:
    return address(copier(row_bytes if row_bytes in _COPIED_AT_ONCE else 0), SIGNATURE)


@functools.cache
def _convert_address(source_dtype: str, dtype: str, affine: bool, narrow: bool) -> int:
    return address(converter(source_dtype, dtype, False, affine, False, narrow), SIGNATURE)


def conversions() -> Iterator[tuple[str, str, bool, bool]]:
    """Every conversion of `_convert_address`: source and result dtype, whether it is affine, whether it computes in float32."""
    for source, dtype in itertools.product(POINTERS, WRITE):
        legal = dtype in FLOATS or (source not in FLOATS and dtype != "bool")
        if legal and source != dtype:
            yield source, dtype, False, is_narrow(Transform(dtype), source)
        if dtype in FLOATS:
            narrow = {is_narrow(Transform(dtype, 2.0, offset), source) for offset in (0.0, 1.0)}
            yield from ((source, dtype, True, one) for one in sorted(narrow))


def callbacks() -> Iterator[tuple[Callable[..., int], str]]:
    """Every operation there is, for a library of kernels."""
    yield _stream_rows, SIGNATURE
    for row_bytes in (0, *sorted(_COPIED_AT_ONCE)):
        yield copier(row_bytes), SIGNATURE
    for source, dtype, affine, narrow in conversions():
        yield converter(source, dtype, False, affine, False, narrow), SIGNATURE


def usual() -> Iterator[tuple[Callable[..., int], str]]:
    """Those that most batches are made with."""
    for row_bytes in (0, 1, 2, 4, 8, 16, 32, 64):
        yield copier(row_bytes), SIGNATURE
    for source, dtype, affine, narrow in conversions():
        if dtype == "float32" and source in ("bool", "uint8", "float64"):
            yield converter(source, dtype, False, affine, False, narrow), SIGNATURE


def _can_stream(output: Output, batch_size: int) -> bool:
    """True for large scaled images: their batch fits no cache, so reading its lines before writing them is wasted."""
    transform, elements = output.transform, output.row_bytes // 4
    large = output.row_bytes * output.lane_count * batch_size >= _STREAM_BYTES
    kind = output.field.dtype in ("uint8", "bool") and transform.dtype == "float32" and transform.is_affine
    return kind and large and elements % _LANES == 0


def describe(output: Output, source: int, stride: int, out: int, index: int, batch_size: int) -> np.ndarray[Any, Any]:
    """The descriptor of an output's operation.

    Args:
        output: What is to be made.
        source: Address of the column's row 0.
        stride: Bytes from one row of the column to the next.
        out: Address of the output array, C-contiguous [batch_size, *lanes, *shape], a multiple of 64.
        index: Address of the row numbers, int64 [batch_size, *lanes]; -1 gives zeros.
        batch_size: Rows of a batch.
    """
    transform = output.transform
    if output.is_augmented:
        function = 0
    elif transform.dtype == output.field.dtype and not transform.is_affine:
        function = _copy_address(output.field.row_bytes)
    elif _can_stream(output, batch_size):
        function = address(_stream_rows, SIGNATURE)
    else:
        narrow = is_narrow(transform, output.field.dtype)
        function = _convert_address(output.field.dtype, transform.dtype, transform.is_affine, narrow)
    elements = int(np.prod(output.field.shape, dtype=np.int64))
    words = np.zeros(OP_WORDS, np.int64)
    words[:6] = function, source, stride, out, output.row_bytes, elements
    words[6:8].view(np.float64)[:] = transform.factor, transform.offset
    words[8:10] = index, output.lane_count
    return words
