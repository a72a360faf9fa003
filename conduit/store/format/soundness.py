"""Checks for damaged segments: readers of a segment refuse words that no process of Conduit stores.

Kernels bound the words that they read, so no word leads out of a page. The checks here are for values that Python returns to callers.
They apply to pages that are leased, or that did not change during a look: a page that changes may show words of two generations.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from conduit.errors import BadSegment
from conduit.store.format import words as w
from conduit.store.format.limit_specs import Limits

if TYPE_CHECKING:
    from conduit.store.format.layout import TableLayout

Array = np.ndarray[Any, Any]

LARGEST = 1 << 62
"""Larger than every count that a segment can hold."""
_STREAMS = 1 << 31


def damaged(where: str, what: str) -> BadSegment:
    """The error for impossible words in a part of an engine."""
    return BadSegment(
        f"Expected words that Conduit wrote in {where}, got {what}: the segment is damaged, and its contents must not be "
        "trusted; restore a checkpoint (conduit.Engine.restore), and remove this segment by `conduit clean` when no process is attached"
    )


def damaged_page(layout: TableLayout, page: int, what: str) -> BadSegment:
    """The error for impossible words of a table's page."""
    return damaged(f"page {page} of table {layout.name!r}", what)


def check_pages(layout: TableLayout, pages: Array, words: Array) -> None:
    """Refuse pages with impossible words.

    Args:
        layout: The table's layout.
        pages: Numbers of pages that hold rows, [n].
        words: Their words, int64 [n, 16]; the words of a page were read at one moment.

    Raises:
        BadSegment: A page has impossible words; names the first such page.
    """
    rows = layout.page_rows
    envs, first, halo, committed, stream, tick = (
        words[:, offset // 8]
        for offset in (w.PAGE_ENVS, w.PAGE_FIRST, w.PAGE_HALO, w.PAGE_COMMITTED, w.PAGE_STREAM, w.PAGE_TICK)
    )
    tail = words[:, w.PAGE_TAIL // 8] & w.TAIL_MASK
    good = (envs >= 1) & (envs <= rows) & (first >= 0) & (first <= rows) & (halo >= 0) & (halo <= committed)
    good &= (committed <= rows) & (tail <= rows - committed)
    good &= (stream >= 0) & (stream < _STREAMS) & (tick >= 0) & (tick < LARGEST)
    for at in np.flatnonzero(~good).tolist():
        found = {"envs": envs, "first": first, "halo": halo, "committed": committed, "stream": stream, "tick": tick}
        raise damaged_page(layout, int(pages[at]), ", ".join(f"{name} {int(word[at])}" for name, word in found.items()))


def check_spans(layout: TableLayout, name: str, page: int, spans: Array) -> None:
    """Refuse spans of a ragged field that lead out of their page's arena.

    Raises:
        BadSegment: A span leads out of the arena.
    """
    starts, lengths = spans["start"].astype(np.int64), spans["length"].astype(np.int64)
    good = (starts + lengths <= layout.arenas[name].items) & (lengths <= layout.schema[name].max_length)
    if not good.all():
        at = int(np.flatnonzero(~good)[0])
        raise damaged_page(
            layout, page, f"a value of {name!r} of {int(lengths[at])} items from item {int(starts[at])} on"
        )


def check_links(layout: TableLayout, page: int, rows: Array) -> None:
    """Refuse links to final observations that lead out of their page; `rows` are the local rows they lead to, [n].

    Raises:
        BadSegment: A link leads out of the page.
    """
    if len(rows) and not (rows.min() >= 0 and rows.max() < layout.page_rows):
        raise damaged_page(layout, page, f"a link to local row {int(rows.max())}")


def limits_of_words(layout: TableLayout, numbers: Array) -> Limits:
    """A table's limits from words of its segment: float64 [4], in the order of limit_specs.numbers_of.

    Raises:
        BadSegment: These cannot be a table's limits.
    """
    spi, size, low, high = numbers.tolist()
    bounds = [abs(one) < LARGEST or math.isinf(one) for one in (low, high)]
    if not (0 < spi < LARGEST and 1 <= size < LARGEST and all(bounds)):
        raise damaged(f"the limits of table {layout.name!r}", f"{spi}, {size}, {low}, {high}")
    return Limits(spi, int(size), low, high)
