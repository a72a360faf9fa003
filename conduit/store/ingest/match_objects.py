"""Whether a Python object is what a field takes, exactly as it is: looked up in the object itself, by type, dtype number and shape.

What is not recognised is left to the exact path in conduit.plane, which converts it or explains.
"""

from __future__ import annotations

import sys

import numpy as np

from conduit.native.cpython_abi import (
    ALIGNED,
    BYTE_ORDER,
    C_CONTIGUOUS,
    DATA,
    DESCR,
    DIMS,
    FLAGS,
    ITEMS,
    NDIM,
    TYPE,
    TYPE_NUMBER,
    VALUE,
)
from conduit.native.jit import inner
from conduit.native.memory import peek_f64, peek_i64, peek_u8, peek_u32
from conduit.store.ingest.field_specs import (
    ARRAY,
    BOOL,
    FIELD_DIMS,
    FIELD_ELEMENTS,
    FIELD_FALSE_IS_NOTHING,
    FIELD_FROM_DOUBLE,
    FIELD_HIGHEST,
    FIELD_ITEMSIZE,
    FIELD_KIND,
    FIELD_LISTED,
    FIELD_LOWEST,
    FIELD_NDIM,
    FIELD_ROW_BYTES,
    FIELD_SCALAR,
    FIELD_TYPE_NUMBER,
    INT,
    OBJECT_ARRAY,
    OBJECT_DOUBLE,
    OBJECT_FALSE,
    OBJECT_FLOAT,
    OBJECT_INT,
    OBJECT_LIST,
    OBJECT_NUMPY_FALSE,
    OBJECT_NUMPY_TRUE,
    OBJECT_TAGGED,
    OBJECT_TRUE,
    OBJECT_TUPLE,
    UNKNOWN,
)

_SWAPPED = ord(">" if sys.byteorder == "little" else "<")

_FLOAT_MAX = float(np.finfo(np.float32).max)
_DOUBLE_NUMBER = np.dtype(np.float64).num
_OBJECT_NUMBER = np.dtype(object).num


@inner
def is_vector(value, kind, number):
    """True for an aligned, contiguous array of one axis, of a dtype by numpy's type number; `kind` is the address of arrays' type."""
    whole = C_CONTIGUOUS | ALIGNED
    if peek_i64(value + TYPE) != kind or peek_u32(value + NDIM) != 1 or (peek_u32(value + FLAGS) & whole) != whole:
        return False
    descr = peek_i64(value + DESCR)
    return peek_u32(descr + TYPE_NUMBER) == number and peek_u8(descr + BYTE_ORDER) != _SWAPPED


@inner
def dtype_of_array(field, value, skip, objects):
    """Numpy type number of a contiguous array of this field's shape less its first `skip` axes, in this machine's byte order, else -1."""
    if peek_i64(value + TYPE) != peek_i64(objects + OBJECT_ARRAY):
        return -1
    ndim = peek_i64(field + FIELD_NDIM) - skip
    if peek_u32(value + NDIM) != ndim or (peek_u32(value + FLAGS) & C_CONTIGUOUS) == 0:
        return -1
    wanted, given = peek_i64(field + FIELD_DIMS) + 8 * skip, peek_i64(value + DIMS)
    for i in range(ndim):
        if peek_i64(wanted + 8 * i) != peek_i64(given + 8 * i):
            return -1
    descr = peek_i64(value + DESCR)
    if peek_u8(descr + BYTE_ORDER) == _SWAPPED:
        return -1
    return np.int64(peek_u32(descr + TYPE_NUMBER))


@inner
def is_array(field, value, objects):
    """1 when an object is an array of exactly this field's dtype and shape, 2 when it only has to be rounded, else 0."""
    number = dtype_of_array(field, value, 0, objects)
    if number == peek_i64(field + FIELD_TYPE_NUMBER):
        return 1
    return 2 if number == _DOUBLE_NUMBER and peek_i64(field + FIELD_FROM_DOUBLE) != 0 else 0


@inner
def pointers_of(field, at, envs, objects):
    """Address of the pointers to a field's arrays, one per environment; 0 for what is no list of so many.

    `at` is the address of the pointer to the value: of the array itself, or of a list, tuple or array of objects.
    """
    if peek_i64(field + FIELD_LISTED) == 0:
        return at
    value = peek_i64(at)
    type_ = peek_i64(value + TYPE)
    if type_ == peek_i64(objects + OBJECT_LIST):
        return peek_i64(value + ITEMS) if peek_i64(value + VALUE) == envs else 0
    if type_ == peek_i64(objects + OBJECT_TUPLE):
        return value + ITEMS if peek_i64(value + VALUE) == envs else 0
    if (
        type_ == peek_i64(objects + OBJECT_ARRAY)
        and peek_u32(peek_i64(value + DESCR) + TYPE_NUMBER) == _OBJECT_NUMBER
        and peek_u32(value + NDIM) == 1
        and peek_i64(peek_i64(value + DIMS)) == envs
        and peek_u32(value + FLAGS) & C_CONTIGUOUS
    ):
        return peek_i64(value + DATA)
    return 0


@inner
def ragged_length(field, at, envs, objects):
    """Items of a ragged field's arrays together, or -1 when one is no array of its dtype, shape and lengths."""
    pointers = pointers_of(field, at, envs, objects)
    if pointers == 0:
        return -1
    ndim = peek_i64(field + FIELD_NDIM)
    wanted = peek_i64(field + FIELD_DIMS)
    total = 0
    for env in range(envs):
        value = peek_i64(pointers + 8 * env)
        # an array of objects may hold null pointers, which read as None
        if value == 0 or peek_i64(value + TYPE) != peek_i64(objects + OBJECT_ARRAY) or peek_u32(value + NDIM) != ndim:
            return -1
        given = peek_i64(value + DIMS)
        descr = peek_i64(value + DESCR)
        if (
            (peek_u32(value + FLAGS) & C_CONTIGUOUS) == 0
            or peek_i64(given) > peek_i64(wanted)
            or peek_u8(descr + BYTE_ORDER) == _SWAPPED
            or peek_u32(descr + TYPE_NUMBER) != peek_i64(field + FIELD_TYPE_NUMBER)
        ):
            return -1
        for i in range(1, ndim):
            if peek_i64(wanted + 8 * i) != peek_i64(given + 8 * i):
                return -1
        total += peek_i64(given)
    return total


@inner
def _fits_float32(value, elements):
    """True when a float64 array has no finite number that is no float32; such a one is the exact path's to refuse."""
    data = peek_i64(value + DATA)
    for i in range(elements):
        if _FLOAT_MAX < abs(peek_f64(data + 8 * i)) < np.inf:
            return False
    return True


@inner
def int_size(value, objects):
    """Digits of an int, negative for a negative one."""
    word = peek_i64(value + VALUE)
    if peek_i64(objects + OBJECT_TAGGED) == 0:
        return word
    return -(word >> 3) if (word & 3) == 2 else word >> 3


@inner
def int_value(value, size):
    """Value of an int of at most two digits of 30 bits."""
    magnitude = 0
    if size != 0:
        magnitude = peek_u32(value + ITEMS)
    if abs(size) == 2:
        magnitude |= peek_u32(value + ITEMS + 4) << 30
    return -magnitude if size < 0 else magnitude


@inner
def is_recognised(field, value, objects):
    """True when conduit.store.ingest.append_objects can store this object exactly."""
    kind = peek_i64(field + FIELD_KIND)
    if peek_i64(field + FIELD_FALSE_IS_NOTHING) != 0 and value == peek_i64(objects + OBJECT_FALSE):
        return True
    type_ = peek_i64(value + TYPE)
    if kind == ARRAY:
        how = is_array(field, value, objects)
        return how == 1 or (how == 2 and _fits_float32(value, peek_i64(field + FIELD_ELEMENTS)))
    if kind == BOOL:
        return (
            value == peek_i64(objects + OBJECT_TRUE)
            or value == peek_i64(objects + OBJECT_FALSE)
            or value == peek_i64(objects + OBJECT_NUMPY_TRUE)
            or value == peek_i64(objects + OBJECT_NUMPY_FALSE)
        )
    if kind == UNKNOWN:
        return False
    if type_ == peek_i64(field + FIELD_SCALAR):
        return True
    is_int = type_ == peek_i64(objects + OBJECT_INT)
    if is_int and abs(int_size(value, objects)) > 2:
        return False
    if kind == INT:
        if not is_int:
            return False
        number = int_value(value, int_size(value, objects))
        return peek_i64(field + FIELD_LOWEST) <= number <= peek_i64(field + FIELD_HIGHEST)
    if is_int:
        return True
    if type_ != peek_i64(objects + OBJECT_FLOAT) and type_ != peek_i64(objects + OBJECT_DOUBLE):
        return False
    if peek_i64(field + FIELD_ITEMSIZE) == 8:
        return True
    real = peek_f64(value + VALUE)
    # a finite number that is no float32 is the exact path's to refuse
    return not (_FLOAT_MAX < abs(real) < np.inf)


@inner
def observation_of(field, at, env, envs, objects):
    """Address of an environment's observation in what came, at the address of a pointer to it; 0 when it is not recognised."""
    value = peek_i64(at)
    if is_array(field, value, objects) == 1:
        return peek_i64(value + DATA) + env * peek_i64(field + FIELD_ROW_BYTES)
    if peek_i64(field + FIELD_LISTED) == 0:
        return 0
    pointers = pointers_of(field, at, envs, objects)
    if pointers == 0:
        return 0
    one = peek_i64(pointers + 8 * env)
    # an array of objects may hold null pointers, which read as None
    if one == 0 or dtype_of_array(field, one, 1, objects) != peek_i64(field + FIELD_TYPE_NUMBER):
        return 0
    return peek_i64(one + DATA)
