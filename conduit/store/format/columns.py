"""The columns of a table: its fields and the system columns, each with the dtype of a row and the offset of row 0.

A ragged field's column holds spans: the position and length of a row's value in its page's arena.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from conduit.store.format.layout import TableLayout
from conduit.store.format.sizes import row_stride

SPAN_DTYPE = np.dtype([("start", "<u4"), ("length", "<u4")])
"""Where a ragged value lies in its page's arena, in items; the same word as words.SPAN_*."""

META_DTYPE = np.dtype([("version", "<i4"), ("step", "<i4"), ("episode", "<u4"), ("link", "<u4")])
"""A row's meta; `link` is the distance to the next observation << 6 | flags (conduit.store.format.words)."""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: Name of the field or of the system column.
        is_field: False for system columns.
        dtype, shape: Dtype and shape of a row.
        offset: Offset of row 0, bytes from the segment's start.
        row_bytes: Bytes of a row.
        stride: Bytes from row to row, at least `row_bytes`.
    """

    name: str
    is_field: bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    row_bytes: int
    stride: int

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in bytes along the axes of [rows, *shape]."""
        return (self.stride, *np.empty(self.shape, self.dtype).strides)


def columns_of(layout: TableLayout) -> tuple[Column, ...]:
    """A table's columns: the fields in the schema's order, then terminated, truncated, meta, and, if it has them, priority and sampled."""
    found = []
    for field in layout.schema.fields:
        dtype = SPAN_DTYPE if field.ragged else np.dtype(field.numpy_dtype)
        shape = () if field.ragged else field.shape
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        found.append(Column(field.name, True, dtype, shape, layout.columns[field.name], size, row_stride(field)))
    system: list[tuple[str, np.dtype[Any], int]] = [
        ("terminated", np.dtype(bool), layout.terminated),
        ("truncated", np.dtype(bool), layout.truncated),
        ("meta", META_DTYPE, layout.meta),
    ]
    if layout.table.priorities is not None:
        system.append(("priority", np.dtype(np.uint32), layout.priority))
    if layout.table.max_times_sampled is not None:
        system.append(("sampled", np.dtype(np.int64), layout.sampled))
    found += [Column(name, False, dtype, (), at, dtype.itemsize, dtype.itemsize) for name, dtype, at in system]
    return tuple(found)
