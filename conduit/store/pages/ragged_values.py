"""Ragged values: where a writer puts them in its page's arenas, and how a page's turn takes them along.

A row's span is one word in the field's column, start | length << 32, counted in items from the start of its page's arena.
Values are only ever added behind those that are there, so what a committed row's span names does not change while the page is
of that generation; staged values lie behind them and are forgotten by moving the cursor back. Who finds room wanting turns
the page, before anything is stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.native.descriptors import fill
from conduit.native.jit import inner, kernel
from conduit.native.memory import copy_bytes, peek_i64, poke_i64
from conduit.store.format import words as w

Array = np.ndarray[Any, Any]


@inner
def _take_items(arena, row, count):
    """Take `count` items behind those taken, and give the physical row their span; returns where they begin."""
    used = peek_i64(arena + w.ARENA_USED)
    poke_i64(peek_i64(arena + w.ARENA_SPANS) + w.SPAN_BYTES * row, used | (count << w.SPAN_SHIFT))
    poke_i64(arena + w.ARENA_USED, used + count)
    return used


@inner
def place_value(arena, page, row, source, count):
    """Copy `count` items to the arena of `page`, behind those taken, and give the physical row their span."""
    item = peek_i64(arena + w.ARENA_ITEM)
    start = _take_items(arena, row, count) * item
    target = peek_i64(arena + w.ARENA_VALUES) + page * peek_i64(arena + w.ARENA_PAGE_BYTES) + start
    copy_bytes(target, source, count * item)


@inner
def copy_values(writer, rows, source, destination):
    """Copy the ragged values of one physical row to the arenas of another's page; pages have `rows` rows."""
    for i in range(peek_i64(writer + w.WRITER_ARENA_COUNT)):
        arena = peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * i
        span = peek_i64(peek_i64(arena + w.ARENA_SPANS) + w.SPAN_BYTES * source)
        values = peek_i64(arena + w.ARENA_VALUES) + (source // rows) * peek_i64(arena + w.ARENA_PAGE_BYTES)
        # no further than either arena goes: a word may be damaged
        items = peek_i64(arena + w.ARENA_ITEMS)
        count = min((span >> w.SPAN_SHIFT) & w.SPAN_MASK, items - peek_i64(arena + w.ARENA_USED))
        start = min(span & w.SPAN_MASK, items - count) * peek_i64(arena + w.ARENA_ITEM)
        place_value(arena, destination // rows, destination, values + start, count)


@inner
def clear_spans(writer, row):
    """Give a physical row values of length 0."""
    for i in range(peek_i64(writer + w.WRITER_ARENA_COUNT)):
        poke_i64(
            peek_i64(peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * i + w.ARENA_SPANS) + w.SPAN_BYTES * row, 0
        )


@inner
def empty_arenas(writer):
    """Begin a page: nothing is taken."""
    for i in range(peek_i64(writer + w.WRITER_ARENA_COUNT)):
        poke_i64(peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * i + w.ARENA_USED, 0)


@inner
def keep_values(writer):
    """Staged values belong to committed rows from now on."""
    for i in range(peek_i64(writer + w.WRITER_ARENA_COUNT)):
        arena = peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * i
        poke_i64(arena + w.ARENA_KEPT, peek_i64(arena + w.ARENA_USED))


@inner
def forget_values(writer):
    """Forget staged values."""
    for i in range(peek_i64(writer + w.WRITER_ARENA_COUNT)):
        arena = peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * i
        poke_i64(arena + w.ARENA_USED, peek_i64(arena + w.ARENA_KEPT))


@inner
def kept_bytes(writer):
    """Bytes of ragged values in the writer's page that belong to committed rows."""
    total = 0
    for i in range(peek_i64(writer + w.WRITER_ARENA_COUNT)):
        arena = peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * i
        total += peek_i64(arena + w.ARENA_KEPT) * peek_i64(arena + w.ARENA_ITEM)
    return total


@inner
def has_room(arena, count):
    """True when `count` items more fit the arena of the writer's page."""
    return peek_i64(arena + w.ARENA_USED) + count <= peek_i64(arena + w.ARENA_ITEMS)


@kernel("int64(int64, int64)")
def values_fit(writer, counts):
    """1 when so many items more fit the arenas of the writer's page: int64 [arenas] at `counts`."""
    for i in range(peek_i64(writer + w.WRITER_ARENA_COUNT)):
        if not has_room(peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * i, peek_i64(counts + 8 * i)):
            return 0
    return 1


@kernel("int64(int64, int64, int64, int64, int64)")
def put_value(writer, arena, row, source, count):
    """Stage a value of an uncommitted physical row of the writer's page.

    Args:
        writer: Writer state.
        arena: Number of the field among the ragged ones.
        row: Physical row.
        source: Address of `count` items.
        count: Length.

    Returns:
        0, or -1 when the arena has no room for it: nothing was stored.
    """
    words = peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * arena
    if not has_room(words, count):
        return -1
    place_value(words, row // peek_i64(peek_i64(writer + w.WRITER_TABLE) + w.VIEW_ROWS), row, source, count)
    return 0


@kernel("int64(int64, int64, int64, int64)")
def reserve_value(writer, arena, row, count):
    """Stage a value of `count` items that the caller fills in; otherwise as `put_value`."""
    words = peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * arena
    if not has_room(words, count):
        return -1
    _take_items(words, row, count)
    return 0


def arena_words(arenas: list[tuple[int, int, int, int, int]]) -> Array:
    """A writer's words for its table's arenas.

    Args:
        arenas: For each ragged field the address of its spans, of page 0's arena, bytes from page to page, bytes of an item,
            and items that an arena holds.

    Returns:
        int64 [arenas, words].
    """
    words = np.zeros((len(arenas), w.ARENA_BYTES // 8), np.int64)
    for i, (spans, values, page_bytes, item, items) in enumerate(arenas):
        fill(
            words[i],
            {
                w.ARENA_SPANS: spans,
                w.ARENA_VALUES: values,
                w.ARENA_PAGE_BYTES: page_bytes,
                w.ARENA_ITEM: item,
                w.ARENA_ITEMS: items,
            },
        )
    return words
