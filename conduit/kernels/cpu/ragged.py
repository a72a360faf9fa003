"""Row operations of ragged fields: values of varying lengths, padded or packed one behind the other.

Called like the other row operations, `op(descriptor, slots, count, attempt) -> 0`; the descriptor's OP_OUT is the address of
further words, RAGGED_*. conduit.kernels.reference.gather has the specification.

A span may be torn, or of another generation, until the page has been checked. So whatever it says, no more than the
largest length is copied, and only from inside the page's arena. When a slot of a packed batch is drawn again, its value
may be of another length: what lies behind it in its block is moved, so that no slot has to be read twice that was right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conduit.field import Field
from conduit.kernels.cpu.augment import describe
from conduit.kernels.cpu.elements import POINTERS
from conduit.kernels.cpu.gather import (
    OP_ELEMENTS,
    OP_FUNCTION,
    OP_INDEX,
    OP_LANES,
    OP_OUT,
    OP_SOURCE,
    OP_STRIDE,
    OP_WORDS,
    SIGNATURE,
)
from conduit.kernels.spec.plan import Output
from conduit.kernels.spec.ragged import Ragged
from conduit.native.descriptors import fill
from conduit.native.jit import address, inner
from conduit.native.memory import (
    call_4,
    copy_bytes,
    load_relaxed,
    move_bytes,
    peek_i64,
    peek_u32,
    poke_i64,
    poke_u32,
    prefetch,
    zero_bytes,
)
from conduit.store.format import words as w

Array = np.ndarray[Any, Any]

(
    RAGGED_SPANS,
    RAGGED_VALUES,
    RAGGED_PAGE_BYTES,
    RAGGED_PAGE_ROWS,
    RAGGED_ITEM,
    RAGGED_ITEMS,
    RAGGED_MAX,
    RAGGED_OUT,
    RAGGED_OUT_ITEM,
    RAGGED_ELEMENTS,
    RAGGED_SECOND,
    RAGGED_THIRD,
    RAGGED_END,
    RAGGED_CONVERT,
    RAGGED_ZERO,
    RAGGED_PLACES,
) = range(0, 128, 8)
RAGGED_WORDS = 16
"""Words of an operation: addresses of the spans and of page 0's arena; bytes from arena to arena, rows of a page, bytes of an
item, items of an arena, largest length; address of the values in the batch, bytes of an item there, elements of an item;
addresses of the two other arrays; slot behind the block that is being made; descriptor of the conversion, or 0 for a plain
copy; address of a 0 that serves as its list of slots and as its row number; address of int32 0, 1, 2, ... up to the largest length."""

_AHEAD = 4
_flags = POINTERS["uint8"]


@inner
def _length(words, row):
    span = load_relaxed(peek_i64(words + RAGGED_SPANS) + w.SPAN_BYTES * row)
    return min((span >> w.SPAN_SHIFT) & w.SPAN_MASK, peek_i64(words + RAGGED_MAX))


@inner
def _source(words, row, length):
    """Address of a row's value; `length` items from it on lie in the page's arena, whatever the span says."""
    span = load_relaxed(peek_i64(words + RAGGED_SPANS) + w.SPAN_BYTES * row)
    start = min(span & w.SPAN_MASK, peek_i64(words + RAGGED_ITEMS) - length)
    page = row // peek_i64(words + RAGGED_PAGE_ROWS)
    return (
        peek_i64(words + RAGGED_VALUES)
        + page * peek_i64(words + RAGGED_PAGE_BYTES)
        + start * peek_i64(words + RAGGED_ITEM)
    )


@inner
def _copy(words, row, length, out):
    source = _source(words, row, length)
    convert = peek_i64(words + RAGGED_CONVERT)
    if convert == 0:
        copy_bytes(out, source, length * peek_i64(words + RAGGED_ITEM))
        return
    poke_i64(convert + OP_SOURCE, source)
    poke_i64(convert + OP_OUT, out)
    poke_i64(convert + OP_ELEMENTS, length * peek_i64(words + RAGGED_ELEMENTS))
    call_4(peek_i64(convert + OP_FUNCTION), convert, peek_i64(words + RAGGED_ZERO), 1, 0)


def _pad(descriptor, slots, count, attempt):
    words = peek_i64(descriptor + OP_OUT)
    index = peek_i64(descriptor + OP_INDEX)
    longest = peek_i64(words + RAGGED_MAX)
    item = peek_i64(words + RAGGED_OUT_ITEM)
    for i in range(count):
        slot = peek_i64(slots + 8 * i)
        row = peek_i64(index + 8 * slot)
        length = _length(words, row)
        out = peek_i64(words + RAGGED_OUT) + longest * item * slot
        _copy(words, row, length, out)
        zero_bytes(out + item * length, item * (longest - length))
        mask = _flags(peek_i64(words + RAGGED_SECOND) + longest * slot)
        for j in range(length):
            mask[j] = 1
        zero_bytes(peek_i64(words + RAGGED_SECOND) + longest * slot + length, longest - length)
        poke_i64(peek_i64(words + RAGGED_THIRD) + 8 * slot, length)
    return 0


@inner
def _resize(words, slot, length):
    """Make a slot of the present block as long as `length`; the slots behind it in the block move."""
    starts = peek_i64(words + RAGGED_SECOND)
    behind = peek_u32(starts + 4 * (slot + 1))
    delta = length - (behind - peek_u32(starts + 4 * slot))
    if delta == 0:
        return
    end = peek_i64(words + RAGGED_END)
    count = peek_u32(starts + 4 * end) - behind
    for base, item in ((RAGGED_OUT, peek_i64(words + RAGGED_OUT_ITEM)), (RAGGED_THIRD, 4)):
        at = peek_i64(words + base) + item * behind
        move_bytes(at + item * delta, at, item * count)
    for k in range(slot + 1, end + 1):
        poke_u32(starts + 4 * k, peek_u32(starts + 4 * k) + delta)


def _pack(descriptor, slots, count, attempt):
    words = peek_i64(descriptor + OP_OUT)
    index = peek_i64(descriptor + OP_INDEX)
    starts = peek_i64(words + RAGGED_SECOND)
    if attempt == 0:
        # a block's first call lists all of its slots in order, and the blocks before it are done
        first = peek_i64(slots)
        if first == 0:
            poke_u32(starts, 0)
        end = peek_u32(starts + 4 * first)
        for slot in range(first, first + count):
            row = peek_i64(index + 8 * slot)
            length = _length(words, row)
            source = _source(words, row, length)
            for line in range(_AHEAD):
                prefetch(source + 64 * line)
            end += length
            poke_u32(starts + 4 * (slot + 1), end)
        poke_i64(words + RAGGED_END, first + count)
    else:
        for i in range(count):
            slot = peek_i64(slots + 8 * i)
            _resize(words, slot, _length(words, peek_i64(index + 8 * slot)))
    for i in range(count):
        slot = peek_i64(slots + 8 * i)
        start = peek_u32(starts + 4 * slot)
        length = peek_u32(starts + 4 * (slot + 1)) - start
        _copy(
            words,
            peek_i64(index + 8 * slot),
            length,
            peek_i64(words + RAGGED_OUT) + peek_i64(words + RAGGED_OUT_ITEM) * start,
        )
        # values lie on few memory pages each, over which no hardware prefetch goes: the next one is asked for under these stores
        if i + 1 < count:
            coming = peek_i64(slots + 8 * (i + 1))
            size = peek_u32(starts + 4 * (coming + 1)) - peek_u32(starts + 4 * coming)
            ahead = _source(words, peek_i64(index + 8 * coming), size)
            for line in range(0, size * peek_i64(words + RAGGED_ITEM), 64):
                prefetch(ahead + line)
        copy_bytes(peek_i64(words + RAGGED_THIRD) + 4 * start, peek_i64(words + RAGGED_PLACES), 4 * length)
    return 0


def callbacks() -> Iterator[tuple[Callable[..., int], str]]:
    """Both operations, for a library of kernels."""
    yield _pad, SIGNATURE
    yield _pack, SIGNATURE


def describe_ragged(
    item: Ragged, spans: int, arenas: Array, page_rows: int, at: dict[str, int], index: int
) -> tuple[Array, list[Array]]:
    """The descriptor of a ragged field's operation.

    Args:
        item: What is to be made.
        spans: Address of row 0's span.
        arenas: The field's arenas, [pages, items, *shape[1:]].
        page_rows: Rows per page.
        at: Addresses of the batch's arrays, by name.
        index: Address of the row numbers, int64 [batch].

    Returns:
        int64 [OP_WORDS], and what must be kept alive as long as it is used.
    """
    words, zero = np.zeros(RAGGED_WORDS, np.int64), np.zeros(1, np.int64)
    places = np.arange(item.field.max_length, dtype=np.int32)
    keep: list[Array] = [words, zero, places]
    values, second, third = (at[name] for name in item.parts)
    out_item = item.elements * item.numpy_dtype.itemsize
    fill(
        words,
        {
            RAGGED_SPANS: spans,
            RAGGED_VALUES: arenas.ctypes.data,
            RAGGED_PAGE_BYTES: arenas.strides[0],
            RAGGED_PAGE_ROWS: page_rows,
            RAGGED_ITEM: item.field.item_bytes,
            RAGGED_ITEMS: arenas.shape[1],
            RAGGED_MAX: item.field.max_length,
            RAGGED_OUT: values,
            RAGGED_OUT_ITEM: out_item,
            RAGGED_ELEMENTS: item.elements,
            RAGGED_SECOND: second,
            RAGGED_THIRD: third,
            RAGGED_ZERO: zero.ctypes.data,
            RAGGED_PLACES: places.ctypes.data,
        },
    )
    if not item.is_plain:
        one = Field(item.field.name, item.field.dtype, item.field.shape[1:])
        convert = describe(Output(item.name, one, "anchor", (), item.transform), 0, 0, 0, zero.ctypes.data, 1)
        words[RAGGED_CONVERT // 8] = convert.ctypes.data
        keep.append(convert)
    out = np.zeros(OP_WORDS, np.int64)
    fill(
        out,
        {
            OP_FUNCTION: address(_pad if item.layout == "pad" else _pack, SIGNATURE),
            OP_SOURCE: spans,
            OP_STRIDE: w.SPAN_BYTES,
            OP_OUT: words.ctypes.data,
            OP_INDEX: index,
            OP_LANES: 1,
        },
    )
    return out, keep
