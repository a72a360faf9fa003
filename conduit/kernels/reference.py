"""What the CPU and GPU kernels must compute, in plain numpy. Slow on purpose: this is the specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.kernels.plan import Output
from conduit.store.words import FINAL, FIRST, FLAG_MASK, KEPT, LINK_SHIFT, TERMINATED

Array = np.ndarray[Any, Any]


EXACT_IN_FLOAT32 = ("bool", "int8", "uint8", "int16", "uint16", "float16", "bfloat16", "float32")
"""Dtypes all of whose values float32 holds."""


def from_bfloat16(bits: Array) -> Array:
    """float32 values of bfloat16 bit patterns (uint16); exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: Array) -> Array:
    """Bit patterns (uint16) of values rounded to float32, then to bfloat16 (nearest, ties to even)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = ((bits >> 16) | 64).astype(np.uint16)
    return np.where(np.isnan(np.asarray(values, np.float32)), nan, rounded)


def transform(output: Output, rows: Array) -> Array:
    """Apply an output's transform to rows of its field, in the precision that `Transform` promises: equal bit for bit.

    Args:
        output: The plan's output.
        rows: [n, *shape] of the field's numpy dtype (bfloat16 as uint16 bits).

    Returns:
        [n, *shape] of the output's numpy dtype.
    """
    wanted, source = output.transform, output.field.dtype
    if not wanted.is_affine and wanted.dtype == source:
        return rows.copy()
    values = from_bfloat16(rows) if source == "bfloat16" else rows
    if wanted.is_affine:
        narrow = source in EXACT_IN_FLOAT32 and wanted.dtype != "float64"
        work = np.dtype(np.float32 if narrow else np.float64)
        values = values.astype(work) * work.type(wanted.factor) + work.type(wanted.offset)
    if wanted.dtype == "bfloat16":
        return to_bfloat16(values)
    if wanted.dtype == "float16":
        values = values.astype(np.float32)
    return values.astype(output.numpy_dtype)


def following_row(local: int, meta: Array, committed: int) -> int | None:
    """Where the next observation of a 1-step transition lies.

    Args:
        local: Row within its page.
        meta: META_DTYPE [page rows].
        committed: Rows committed in the page.

    Returns:
        Row within the page; the row itself when it terminated and no final observation was kept (its value is masked by
        `terminated`); None when the row is no anchor: an observation-only row, a row whose successor is not there yet or
        belongs to another episode, or a truncated row without its final observation.
    """
    word = int(meta["link"][local])
    flags, link = word & FLAG_MASK, word >> LINK_SHIFT
    if flags & FINAL:
        return None
    if link == 0:
        return local if flags & TERMINATED else None
    if flags & KEPT:
        return local + link
    after = local + link
    if after >= committed or int(meta["link"][after]) & FLAG_MASK & FIRST:
        return None
    return after
