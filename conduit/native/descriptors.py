"""Descriptors: int64 words by which Python tells a kernel what to do. A word is named by its byte offset, as kernels read it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np


def fill(words: np.ndarray[Any, Any] | memoryview, values: Mapping[int, Any]) -> None:
    """Set words of a descriptor.

    Args:
        words: int64 [n], an array or a memoryview; or float64 [n] for words that are real numbers.
        values: {byte offset of a word: its value}.

    Raises:
        IndexError: An offset lies outside the descriptor.
    """
    for offset, value in values.items():
        words[offset // 8] = value


def words_at(address: int, count: int) -> memoryview:
    """Memory at an address as int64 [count], with elements as Python ints. The caller keeps the memory alive."""
    return memoryview((ctypes.c_int64 * count).from_address(address)).cast("B").cast("q")
