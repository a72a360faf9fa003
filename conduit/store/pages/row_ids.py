"""Which row ids can be those of a table's rows: another table's are refused, instead of being taken for rows here.

A row id is generation << ROW_BITS | physical row (store.format.words). The generations of a table's pages begin at a number of the
table's own, and these lie as far apart, in the circle of 23 bits, as the engine's tables are many: half the circle for two, a quarter for
up to four. So an id of another table is of a generation that no page here has had. That holds until pages of one table have been
reused 2^22 times, or 2^21 times, more often than those of the other; then such an id is ignored, like that of a row that was
overwritten, unless it names the present generation to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.errors import FieldError
from conduit.native.jit import inner, kernel
from conduit.native.memory import load_relaxed, peek_i64, words_at
from conduit.store.format import words as w
from conduit.store.pages.protocol import block_of

NO_ROW = -1
"""What stands in the place of an id where there is no row; it is nobody's, and is ignored."""


@inner
def newest_generation(table):
    """How often a page of the table has been claimed, of the page that was most often."""
    newest = 0
    for page in range(peek_i64(table + w.VIEW_COUNT)):
        state = load_relaxed(block_of(table, page) + w.PAGE_STATE)
        newest = max(newest, (state >> w.GENERATION_SHIFT) - peek_i64(table + w.VIEW_FIRST_GENERATION))
    return min(newest, w.GENERATION_MASK)


@inner
def are_own(table, ids, count, newest):
    """True when all ids are of rows of the table, up to generation `newest` of its own; without branches."""
    first = peek_i64(table + w.VIEW_FIRST_GENERATION)
    rows = peek_i64(table + w.VIEW_COUNT) * peek_i64(table + w.VIEW_ROWS)
    keys = words_at(ids)
    foreign = 0
    for i in range(count):
        key = keys[i]
        # below 0 where it is generation 0 or an id below 0, above where it is later than the newest
        claims = (((key >> w.ROW_BITS) & w.GENERATION_MASK) - first) & w.GENERATION_MASK
        foreign |= (claims - 1) | (newest - claims) | (rows - 1 - (key & w.ROW_MASK)) | key
    return foreign >= 0


@inner
def first_foreign(table, ids, count):
    """Place of the first id that cannot be of a row of the table, or -1; NO_ROW is none."""
    newest = newest_generation(table)
    for i in range(count):
        if peek_i64(ids + 8 * i) != NO_ROW and not are_own(table, ids + 8 * i, 1, newest):
            return i
    return -1


@kernel("int64(int64, int64, int64)")
def find_foreign(table, ids, count):
    """Place of the first of int64 [count] at `ids` that cannot be of a row of the table, or -1."""
    return first_foreign(table, ids, count)


def not_a_row(table: str, key: int, index: int) -> FieldError:
    """The error for an id that no row of the table ever had."""
    return FieldError(
        f"Expected ids of rows of table {table!r}, got {key} at index {index}, which none of its rows ever had: nothing was "
        "changed; pass the `ids` of batches of this table, from this engine",
        at="ids",
    )


def as_ids(ids: Any) -> np.ndarray[Any, Any]:
    """Row ids of any shape, as C-contiguous int64 of that shape.

    Raises:
        FieldError: These are no integers.
    """
    keys = np.asarray(ids)
    if keys.dtype.kind not in "iu" and keys.size:
        raise FieldError(f"Expected ids as int64, from batch.ids, got {keys.dtype}", at="ids")
    return np.asarray(keys, np.int64, order="C")
