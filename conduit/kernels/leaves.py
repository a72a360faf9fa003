"""Leaf priorities: p = (|priority| + eps)^alpha as an integer, so that sums have no rounding, no drift and no order.

A leaf is p in multiples of 2^-20, at most 2^32 - 1; a positive p is at least 1. The same leaf comes out wherever it is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.errors import FieldError
from conduit.store.layout import Priorities

Array = np.ndarray[Any, Any]

ONE = 1 << 20
"""The leaf of p = 1."""
LARGEST = (1 << 32) - 1


def checked_priorities(values: Any, count: int) -> Array:
    """Priorities as float64 [count].

    Raises:
        FieldError: Another shape, or a NaN, infinite or negative one; names the first.
    """
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, np.float64)
    if array.shape != (count,):
        raise FieldError(f"Expected {count} priorities, one per row, got shape {array.shape}", at="priorities")
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if bad.size:
        raise FieldError(
            f"Expected finite priorities of at least 0, got {array[bad[0]]} at index {bad[0]}: nothing was changed; "
            "pass absolute TD errors",
            at="priorities",
        )
    return array


def leaves_of(priorities: Array, rule: Priorities) -> Array:
    """Leaves, uint32, of priorities that have been checked."""
    powered = np.power(priorities + rule.eps, rule.alpha)
    leaves = np.clip(np.rint(powered * ONE), 1, LARGEST)
    # 0 to the power of 0 is 1, and alpha 0 means uniform; otherwise what is 0 stays 0
    return np.where(powered > 0, leaves, 0).astype(np.uint32)
