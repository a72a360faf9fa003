"""The machine's best speed (a memcpy), measured in the same run as the figures that are compared with it."""

from __future__ import annotations

import ctypes

import numpy as np

from perf.measure import Method


def memcpy(size: int, name: str = "memcpy") -> Method:
    """One memcpy of `size` bytes between two private buffers that were touched before.

    libc's memcpy, so it uses the stores that it finds best for this size (non-temporal ones beyond the caches).
    """
    rng = np.random.default_rng()
    source = rng.integers(0, 256, size, np.uint8)
    target = np.full(size, 0xA5, np.uint8)
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    copy.restype = ctypes.c_void_p
    arguments = (target.ctypes.data, source.ctypes.data, size)

    def run(_keep: object = (source, target)) -> None:
        copy(*arguments)

    run()
    if not np.array_equal(source, target):
        raise AssertionError("memcpy did not copy")
    return Method(name, run)
