"""Descriptors: int64 words by which Python tells a kernel what to do. A word is named by its byte offset, as kernels read it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np


def fill(words: np.ndarray[Any, Any] | memoryview, values: Mapping[int, Any]) -> None:
    """Set words of a descriptor.

    Args:
        words: int64 [n], an array or a memoryview; or the same as float64, for words that are real numbers.
        values: {byte offset of a word: its value}.

    Raises:
        IndexError: An offset lies behind the descriptor.
    """
    for offset, value in values.items():
        words[offset // 8] = value


def words_at(address: int, count: int) -> memoryview:
    """Memory of somebody else, which must outlive it, as int64 [count]; its elements are Python's ints."""
    return memoryview((ctypes.c_int64 * count).from_address(address)).cast("B").cast("q")
