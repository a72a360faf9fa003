"""What the CPU and GPU kernels must compute, in plain numpy and float64. Slow on purpose: this is the specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.kernels.plan import Output
from conduit.store.words import FINAL, FIRST, FLAG_MASK, KEPT, LINK_SHIFT, TERMINATED

Array = np.ndarray[Any, Any]


def bfloat16_to_float64(bits: Array) -> Array:
    """Values of bfloat16 bit patterns (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def float64_to_bfloat16(values: Array) -> Array:
    """Bit patterns (uint16) of values rounded to float32, then to bfloat16 (nearest, ties to even)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = ((bits >> 16) | 64).astype(np.uint16)
    return np.where(np.isnan(np.asarray(values, np.float32)), nan, rounded)


def transform(output: Output, rows: Array) -> Array:
    """Apply an output's transform to rows of its field.

    Args:
        output: The plan's output.
        rows: [n, *shape] of the field's numpy dtype (bfloat16 as uint16 bits).

    Returns:
        [n, *shape] of the output's numpy dtype.
    """
    wanted, source = output.transform, output.field.dtype
    if not wanted.is_affine and wanted.dtype == source:
        return rows.copy()
    if (
        not wanted.is_affine
        and rows.dtype.kind in "iub"
        and output.numpy_dtype.kind in "iu"
        and wanted.dtype != "bfloat16"
        and source != "bfloat16"
    ):
        return rows.astype(output.numpy_dtype)
    values = bfloat16_to_float64(rows) if source == "bfloat16" else rows.astype(np.float64)
    values = values * wanted.factor + wanted.offset
    return float64_to_bfloat16(values) if wanted.dtype == "bfloat16" else values.astype(output.numpy_dtype)


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
