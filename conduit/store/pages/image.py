"""A page as bytes: which rows a copy has, where they lie, and whether the page still has these rows.

A copy of a page has its first rows up to a committed count, the final observations that are kept at its end, and, for each ragged field,
the arena up to the last item of those rows. Committed rows never change within a generation, so a copy is sound if no writer took the
page meanwhile. There are two ways to make sure:

* with a lease: take the lease, check that the page `holds` the extent, copy. No writer takes a leased page.
* without a lease: copy, then check that the page `is_current`; otherwise drop the copy.

Priorities and counts of deliveries do change; a copy has their values at the time of copying.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from conduit.native.jit import entry
from conduit.store.format import words as w
from conduit.store.format.columns import Column, columns_of
from conduit.store.format.layout import TableLayout
from conduit.store.format.soundness import check_spans
from conduit.store.pages import protocol

Array = np.ndarray[Any, Any]


def row_parts(page_rows: int, rows: int, tail: int, known: int = 0) -> list[slice]:
    """Slices of a page's local rows to copy: the committed rows, then the kept final observations; empty slices are left out.

    Args:
        page_rows: Rows of a page.
        rows: Committed rows.
        tail: Kept final observations, from the page's end.
        known: Number of first rows to leave out, because the copy has them already.
    """
    parts = (slice(known, rows), slice(page_rows - tail, page_rows))
    return [part for part in parts if part.start < part.stop]


def bytes_by_row(memory: Any, columns: Iterable[tuple[str, int, int]], rows: int) -> dict[str, Any]:
    """Columns as bytes, with the padding after each row.

    Args:
        memory: uint8 [n], an array or a tensor.
        columns: (name, offset of row 0, bytes from row to row).
        rows: Rows of a column.

    Returns:
        {name: view [rows, bytes from row to row]}.
    """
    return {name: memory[offset : offset + rows * stride].reshape(rows, stride) for name, offset, stride in columns}


def values_of(layout: TableLayout, name: str, page: int, arena: Array, spans: Array) -> list[Array]:
    """Views of a ragged field's values in its page's arena.

    Args:
        layout: The table's layout.
        name: The field.
        page: The leased page.
        arena: The page's values, [items, *shape[1:]].
        spans: SPAN_DTYPE [n].

    Returns:
        n views [length, *shape[1:]].

    Raises:
        BadSegment: A span leads out of the arena.
    """
    check_spans(layout, name, page, spans)
    pairs = zip(spans["start"].tolist(), spans["length"].tolist(), strict=True)
    return [arena[start : start + length] for start, length in pairs]


@dataclass(frozen=True, slots=True)
class Extent:
    """The rows of a page that are copied.

    Attributes:
        page: The page's number.
        generation: The page's generation.
        stream, tick: The stream of the page's first rows, and the tick of local row 0.
        rows: Committed rows, from the page's start.
        tail: Kept final observations, from its end.
    """

    page: int
    generation: int
    stream: int
    tick: int
    rows: int
    tail: int

    @classmethod
    def of(cls, page: int, words: Array, page_rows: int) -> Self:
        """The extent according to a page's words, int64 [16]. Even words of two generations never give more rows than a page has."""
        rows = min(max(int(words[w.PAGE_COMMITTED // 8]), 0), page_rows)
        tail = min(int(words[w.PAGE_TAIL // 8]) & w.TAIL_MASK, page_rows - rows)
        generation = int(words[w.PAGE_STATE // 8]) >> w.GENERATION_SHIFT
        return cls(page, generation, int(words[w.PAGE_STREAM // 8]), int(words[w.PAGE_TICK // 8]), rows, tail)


class PageImages:
    """The pages of one table as bytes.

    Args:
        layout: The table's layout.
        memory: The segment, uint8 [n] from its first byte.

    Attributes:
        columns: The table's columns.
    """

    def __init__(self, layout: TableLayout, memory: Array) -> None:
        self.columns: tuple[Column, ...] = columns_of(layout)
        self._layout = layout
        self._memory = memory
        self._blocks = memory.ctypes.data + layout.blocks
        self._rows: dict[str, Array] = bytes_by_row(
            memory, ((one.name, one.offset, one.stride) for one in self.columns), layout.rows
        )

    def _word(self, page: int, offset: int) -> int:
        return entry(protocol.load)(self._blocks + page * w.LINE + offset)

    def is_current(self, extent: Extent) -> bool:
        """Whether the page still has rows of that generation. Loads before this call are not reordered to after it."""
        state = entry(protocol.load_after)(self._blocks + extent.page * w.LINE + w.PAGE_STATE)
        return state >> w.GENERATION_SHIFT == extent.generation and state & w.KIND_MASK in (w.OPEN, w.SEALED)

    def holds(self, extent: Extent) -> bool:
        """Whether a leased page has the extent's rows.

        Its generation may be higher than the extent's: a writer that claims a page and gives it back raises the generation and leaves
        the rows.
        """
        return (
            self._word(extent.page, w.PAGE_STREAM) == extent.stream
            and self._word(extent.page, w.PAGE_TICK) == extent.tick
            and self._word(extent.page, w.PAGE_COMMITTED) >= extent.rows
        )

    def rows(self, column: Column, extent: Extent) -> list[Array]:
        """Views of a column's rows in the extent, uint8 [n, row_bytes] each."""
        page_rows = self._layout.page_rows
        page = self._rows[column.name][extent.page * page_rows : (extent.page + 1) * page_rows]
        return [page[part, : column.row_bytes] for part in row_parts(page_rows, extent.rows, extent.tail)]

    def values(self, extent: Extent) -> Iterator[tuple[str, Array]]:
        """Views of the arenas up to the last item of the extent's rows, uint8 [items, bytes of an item] each, by ragged field.

        Raises:
            BadSegment: A span leads out of its arena.
        """
        by_name = {one.name: one for one in self.columns if one.is_field}
        for name, arena in self._layout.arenas.items():
            used = 0
            for part in self.rows(by_name[name], extent):
                spans = part.reshape(-1).view(by_name[name].dtype)
                check_spans(self._layout, name, extent.page, spans)
                ends = spans["start"].astype(np.int64) + spans["length"]
                used = max(used, int(ends[spans["length"] > 0].max(initial=0)))
            size = self._layout.schema[name].item_bytes
            start = arena.offset + extent.page * arena.page_bytes
            yield name, self._memory[start : start + used * size].reshape(used, size)
