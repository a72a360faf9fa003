"""Where things lie in Python's objects and numpy's arrays, for kernels that look into them (conduit.store.ingest.append_objects).

The offsets are those of numpy's public `PyArrayObject_fields` and of CPython's objects in builds with the interpreter lock.
`is_supported()` proves them on this interpreter by reading known objects.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

TYPE = 8
VALUE = 16
"""Offset of the value in a float or a numpy scalar, and of the size word in an int, a tuple or a list."""
ITEMS = 24
"""Offset of the first digit of an int, of the first item of a tuple, and of the pointer to a list's."""
DATA, NDIM, DIMS, DESCR, FLAGS = 16, 24, 32, 56, 64
BYTE_ORDER, TYPE_NUMBER = 26, 28
C_CONTIGUOUS, ALIGNED = 1, 256


def _read(kind: Any, at: int) -> int:
    return int(kind.from_address(at).value)


@functools.cache
def is_supported() -> bool:
    """True when objects of this interpreter and numpy lie as this module assumes."""
    if getattr(sys, "_is_gil_enabled", lambda: True)() is False or sys.byteorder != "little":
        return False
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    crooked = np.zeros(9, np.uint8)[1:].view(np.int64)
    number, small, large, scalar = 2.5, 7, -(5 << 31), np.float32(1.5)
    pair = (array, number)
    listed, objects = [array, number], np.array([None, array], dtype=object)
    tagged = sys.version_info >= (3, 12)
    wide = ctypes.c_int64
    descr = _read(wide, id(array) + DESCR)
    facts = (
        _read(wide, id(array) + TYPE) == id(np.ndarray),
        _read(wide, id(array) + DATA) == array.ctypes.data,
        _read(ctypes.c_int32, id(array) + NDIM) == array.ndim,
        _read(wide, _read(wide, id(array) + DIMS)) == array.shape[0],
        _read(wide, _read(wide, id(array) + DIMS) + 8) == array.shape[1],
        descr == id(array.dtype),
        _read(ctypes.c_int32, id(array) + FLAGS) & C_CONTIGUOUS == 1,
        _read(ctypes.c_int32, id(array.T) + FLAGS) & C_CONTIGUOUS == 0,
        _read(ctypes.c_int32, id(array) + FLAGS) & ALIGNED != 0,
        _read(ctypes.c_int32, id(crooked) + FLAGS) & ALIGNED == 0,
        _read(ctypes.c_int32, descr + TYPE_NUMBER) == array.dtype.num,
        chr(_read(ctypes.c_uint8, descr + BYTE_ORDER)) == array.dtype.byteorder,
        float(ctypes.c_double.from_address(id(number) + VALUE).value) == number,
        float(ctypes.c_float.from_address(id(scalar) + VALUE).value) == float(scalar),
        _read(wide, id(small) + VALUE) == (8 if tagged else 1),
        _read(ctypes.c_uint32, id(small) + ITEMS) == small,
        _read(wide, id(large) + VALUE) == (2 << 3 | 2 if tagged else -2),
        _read(ctypes.c_uint32, id(large) + ITEMS + 4) == -large >> 30,
        _read(wide, id(pair) + VALUE) == len(pair),
        _read(wide, id(pair) + ITEMS) == id(array),
        _read(wide, id(listed) + VALUE) == len(listed),
        _read(wide, _read(wide, id(listed) + ITEMS)) == id(array),
        _read(wide, _read(wide, id(objects) + DATA) + 8) == id(array),
    )
    return all(facts)
