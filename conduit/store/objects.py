"""Storing a row straight from Python objects: one compiled call checks every value, copies it into the page and commits.

Assigning field by field from Python costs about 100 ns a field, and checking as much again. Here a kernel is handed the
tuple of values, looks into the objects themselves (type, dtype number, shape, contiguity), and copies. It never creates,
changes or releases a Python object; whatever it does not recognise it leaves to the exact path in conduit.plane, which
converts or explains. Nothing is stored before every value has passed.

What a field takes is said in conduit.store.descriptions. Where things lie in objects is said and proven in
conduit.store.interpreter; where its `is_supported()` fails, everything takes the exact path.
"""

from __future__ import annotations

import sys

import numpy as np
from numba import types

from conduit.jit import inner, kernel
from conduit.store.arguments import ObjectType, address_of, data_of
from conduit.store.atomics import (
    copy_bytes,
    peek_f64,
    peek_i64,
    peek_u8,
    peek_u32,
    poke_f32,
    poke_f64,
    poke_i64,
    poke_u8,
    poke_u16,
    poke_u32,
)
from conduit.store.committing import _commit
from conduit.store.descriptions import (
    ARRAY,
    BOOL,
    F_ARENA,
    F_COLUMN,
    F_DIMS,
    F_ELEMENTS,
    F_FALSE_IS_NOTHING,
    F_FROM_DOUBLE,
    F_HIGHEST,
    F_ITEMSIZE,
    F_KIND,
    F_LISTED,
    F_LOWEST,
    F_NDIM,
    F_ROW_BYTES,
    F_SCALAR,
    F_STRIDE,
    F_TYPE_NUMBER,
    F_WORDS,
    INT,
    O_ARRAY,
    O_DOUBLE,
    O_FALSE,
    O_FLOAT,
    O_INT,
    O_LIST,
    O_NUMPY_FALSE,
    O_NUMPY_TRUE,
    O_TAGGED,
    O_TRUE,
    O_TUPLE,
    RAGGED,
    UNKNOWN,
)
from conduit.store.interpreter import (
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
from conduit.store.limiter import ask_for_rows, give_back_rows
from conduit.store.spans import forget_values, has_room, place_value
from conduit.store.words import (
    A_BYTES,
    W_ARENA_COUNT,
    W_ARENAS,
    W_BASE,
    W_BUSY,
    W_ENVS,
    W_FIELD_COUNT,
    W_FIELDS,
    W_LOCAL,
    W_OBJECTS,
    W_PAGE,
    W_RESERVE,
)
from conduit.store.writing import _is_stale, _room

NEED_PAGE = -(1 << 40)
"""Result: the values fit, but the page has no room, the table was reset or frozen, or another form of writing is in progress;
nothing was stored."""
REFUSED = -(1 << 41)
"""Result REFUSED - k: value k was not recognised; nothing was stored."""

_SWAPPED = ord(">" if sys.byteorder == "little" else "<")

_FLOAT_MAX = float(np.finfo(np.float32).max)
_DOUBLE_NUMBER = np.dtype(np.float64).num
_OBJECT_NUMBER = np.dtype(object).num


@inner
def _is_array(field, value, objects):  # type: ignore[no-untyped-def]
    """1 when an object is an array of exactly this field's dtype and shape, 2 when it only has to be rounded, else 0."""
    if peek_i64(value + TYPE) != peek_i64(objects + O_ARRAY):
        return 0
    ndim = peek_i64(field + F_NDIM)
    if peek_u32(value + NDIM) != ndim or (peek_u32(value + FLAGS) & C_CONTIGUOUS) == 0:
        return 0
    wanted, given = peek_i64(field + F_DIMS), peek_i64(value + DIMS)
    for i in range(ndim):
        if peek_i64(wanted + 8 * i) != peek_i64(given + 8 * i):
            return 0
    descr = peek_i64(value + DESCR)
    if peek_u8(descr + BYTE_ORDER) == _SWAPPED:
        return 0
    number = peek_u32(descr + TYPE_NUMBER)
    if number == peek_i64(field + F_TYPE_NUMBER):
        return 1
    return 2 if number == _DOUBLE_NUMBER and peek_i64(field + F_FROM_DOUBLE) != 0 else 0


@inner
def _pointers(field, at, envs, objects):  # type: ignore[no-untyped-def]
    """Address of the pointers to a ragged field's arrays, one per environment; 0 for what is no list of so many.

    `at` is the address of the pointer to the value: of the array itself, or of a list, tuple or array of objects.
    """
    if peek_i64(field + F_LISTED) == 0:
        return at
    value = peek_i64(at)
    type_ = peek_i64(value + TYPE)
    if type_ == peek_i64(objects + O_LIST):
        return peek_i64(value + ITEMS) if peek_i64(value + VALUE) == envs else 0
    if type_ == peek_i64(objects + O_TUPLE):
        return value + ITEMS if peek_i64(value + VALUE) == envs else 0
    if (
        type_ == peek_i64(objects + O_ARRAY)
        and peek_u32(peek_i64(value + DESCR) + TYPE_NUMBER) == _OBJECT_NUMBER
        and peek_u32(value + NDIM) == 1
        and peek_i64(peek_i64(value + DIMS)) == envs
        and peek_u32(value + FLAGS) & C_CONTIGUOUS
    ):
        return peek_i64(value + DATA)
    return 0


@inner
def _ragged_length(field, at, envs, objects):  # type: ignore[no-untyped-def]
    """Items of a ragged field's arrays together, or -1 when one is no array of its dtype, shape and lengths."""
    pointers = _pointers(field, at, envs, objects)
    if pointers == 0:
        return -1
    ndim = peek_i64(field + F_NDIM)
    wanted = peek_i64(field + F_DIMS)
    total = 0
    for env in range(envs):
        value = peek_i64(pointers + 8 * env)
        # an array of objects may hold null pointers, which read as None
        if value == 0 or peek_i64(value + TYPE) != peek_i64(objects + O_ARRAY) or peek_u32(value + NDIM) != ndim:
            return -1
        given = peek_i64(value + DIMS)
        descr = peek_i64(value + DESCR)
        if (
            (peek_u32(value + FLAGS) & C_CONTIGUOUS) == 0
            or peek_i64(given) > peek_i64(wanted)
            or peek_u8(descr + BYTE_ORDER) == _SWAPPED
            or peek_u32(descr + TYPE_NUMBER) != peek_i64(field + F_TYPE_NUMBER)
        ):
            return -1
        for i in range(1, ndim):
            if peek_i64(wanted + 8 * i) != peek_i64(given + 8 * i):
                return -1
        total += peek_i64(given)
    return total


@inner
def _put_ragged(writer, field, row, at, envs, objects):  # type: ignore[no-untyped-def]
    arena = peek_i64(writer + W_ARENAS) + A_BYTES * peek_i64(field + F_ARENA)
    pointers = _pointers(field, at, envs, objects)
    for env in range(envs):
        value = peek_i64(pointers + 8 * env)
        length = peek_i64(peek_i64(value + DIMS))
        place_value(arena, peek_i64(writer + W_PAGE), row + env, peek_i64(value + DATA), length)


@inner
def _fits_float32(value, elements):  # type: ignore[no-untyped-def]
    """True when a float64 array has no finite number that is no float32; such a one is the exact path's to refuse."""
    data = peek_i64(value + DATA)
    for i in range(elements):
        if _FLOAT_MAX < abs(peek_f64(data + 8 * i)) < np.inf:
            return False
    return True


@inner
def _int_size(value, objects):  # type: ignore[no-untyped-def]
    """Digits of an int, negative for a negative one."""
    word = peek_i64(value + VALUE)
    if peek_i64(objects + O_TAGGED) == 0:
        return word
    return -(word >> 3) if (word & 3) == 2 else word >> 3


@inner
def _int_value(value, size):  # type: ignore[no-untyped-def]
    """Value of an int of at most two digits of 30 bits."""
    magnitude = 0
    if size != 0:
        magnitude = peek_u32(value + ITEMS)
    if abs(size) == 2:
        magnitude |= peek_u32(value + ITEMS + 4) << 30
    return -magnitude if size < 0 else magnitude


@inner
def _recognised(field, value, objects):  # type: ignore[no-untyped-def]
    """True when `_put` can store this object exactly."""
    kind = peek_i64(field + F_KIND)
    if peek_i64(field + F_FALSE_IS_NOTHING) != 0 and value == peek_i64(objects + O_FALSE):
        return True
    type_ = peek_i64(value + TYPE)
    if kind == ARRAY:
        how = _is_array(field, value, objects)
        return how == 1 or (how == 2 and _fits_float32(value, peek_i64(field + F_ELEMENTS)))
    if kind == BOOL:
        return (
            value == peek_i64(objects + O_TRUE)
            or value == peek_i64(objects + O_FALSE)
            or value == peek_i64(objects + O_NUMPY_TRUE)
            or value == peek_i64(objects + O_NUMPY_FALSE)
        )
    if kind == UNKNOWN:
        return False
    if type_ == peek_i64(field + F_SCALAR):
        return True
    is_int = type_ == peek_i64(objects + O_INT)
    if is_int and abs(_int_size(value, objects)) > 2:
        return False
    if kind == INT:
        if not is_int:
            return False
        number = _int_value(value, _int_size(value, objects))
        return peek_i64(field + F_LOWEST) <= number <= peek_i64(field + F_HIGHEST)
    if is_int:
        return True
    if type_ != peek_i64(objects + O_FLOAT) and type_ != peek_i64(objects + O_DOUBLE):
        return False
    if peek_i64(field + F_ITEMSIZE) == 8:
        return True
    real = peek_f64(value + VALUE)
    # a finite number that is no float32 is the exact path's to refuse
    return not (_FLOAT_MAX < abs(real) < np.inf)


@inner
def _put_bytes(target, source, size):  # type: ignore[no-untyped-def]
    if size == 8:
        poke_i64(target, peek_i64(source))
    elif size == 4:
        poke_u32(target, peek_u32(source))
    elif size == 1:
        poke_u8(target, peek_u8(source))
    else:
        poke_u16(target, peek_u32(source))


@inner
def _put_array(field, target, value, envs, objects):  # type: ignore[no-untyped-def]
    data = peek_i64(value + DATA)
    if _is_array(field, value, objects) == 2:
        for i in range(peek_i64(field + F_ELEMENTS)):
            poke_f32(target + 4 * i, peek_f64(data + 8 * i))
        return
    stride, size = peek_i64(field + F_STRIDE), peek_i64(field + F_ROW_BYTES)
    if stride == size:
        copy_bytes(target, data, size * envs)
    else:
        for env in range(envs):
            copy_bytes(target + stride * env, data + size * env, size)


@inner
def _put(field, row, value, envs, objects):  # type: ignore[no-untyped-def]
    """Store a recognised object at a physical row (and the `envs` - 1 rows behind it)."""
    target = peek_i64(field + F_COLUMN) + peek_i64(field + F_STRIDE) * row
    kind = peek_i64(field + F_KIND)
    if peek_i64(field + F_FALSE_IS_NOTHING) != 0 and value == peek_i64(objects + O_FALSE):
        return
    if kind == ARRAY:
        _put_array(field, target, value, envs, objects)
        return
    if kind == BOOL:
        true = value == peek_i64(objects + O_TRUE) or value == peek_i64(objects + O_NUMPY_TRUE)
        poke_u8(target, 1 if true else 0)
        return
    size = peek_i64(field + F_ITEMSIZE)
    type_ = peek_i64(value + TYPE)
    if type_ == peek_i64(field + F_SCALAR):
        _put_bytes(target, value + VALUE, size)
        return
    is_int = type_ == peek_i64(objects + O_INT)
    number = _int_value(value, _int_size(value, objects)) if is_int else 0
    if kind == INT:
        if size == 8:
            poke_i64(target, number)
        elif size == 4:
            poke_u32(target, number)
        elif size == 2:
            poke_u16(target, number)
        else:
            poke_u8(target, number)
        return
    real = np.float64(number) if is_int else peek_f64(value + VALUE)
    if size == 8:
        poke_f64(target, real)
    else:
        poke_f32(target, real)


@inner
def _store_row(writer, values):  # type: ignore[no-untyped-def]
    envs = peek_i64(writer + W_ENVS)
    fields = peek_i64(writer + W_FIELDS)
    count = peek_i64(writer + W_FIELD_COUNT)
    objects = peek_i64(writer + W_OBJECTS)
    items = address_of(values) + ITEMS
    for k in range(count):
        if peek_i64(fields + 8 * F_WORDS * k + F_KIND) == RAGGED:
            if _ragged_length(fields + 8 * F_WORDS * k, items + 8 * k, envs, objects) < 0:
                return REFUSED - k
        elif not _recognised(fields + 8 * F_WORDS * k, peek_i64(items + 8 * k), objects):
            return REFUSED - k
    if peek_i64(writer + W_BUSY) != 0 or _is_stale(writer) or _room(writer) < envs + peek_i64(writer + W_RESERVE):
        return NEED_PAGE
    if peek_i64(writer + W_ARENA_COUNT) != 0:
        forget_values(writer)
        for k in range(count):
            field = fields + 8 * F_WORDS * k
            if peek_i64(field + F_KIND) == RAGGED:
                arena = peek_i64(writer + W_ARENAS) + A_BYTES * peek_i64(field + F_ARENA)
                if not has_room(arena, _ragged_length(field, items + 8 * k, envs, objects)):
                    return NEED_PAGE
    row = peek_i64(writer + W_BASE) + peek_i64(writer + W_LOCAL)
    for k in range(count):
        field = fields + 8 * F_WORDS * k
        if peek_i64(field + F_KIND) == RAGGED:
            _put_ragged(writer, field, row, items + 8 * k, envs, objects)
        else:
            _put(field, row, peek_i64(items + 8 * k), envs, objects)
    return row


_SIGNATURE = types.int64(ObjectType(), ObjectType())


@kernel(_SIGNATURE)
def store_row(state, values):  # type: ignore[no-untyped-def]
    """Check and store one tick from a tuple of values, without committing it.

    Args:
        state: Array of the writer's words; its W_FIELDS, W_FIELD_COUNT and W_OBJECTS say what the tuple holds.
        values: The tuple: one value per schema field, then terminated and truncated.

    Returns:
        Physical row, NEED_PAGE, or REFUSED - k.
    """
    return _store_row(data_of(state), values)


@kernel(_SIGNATURE)
def append_row(state, values):  # type: ignore[no-untyped-def]
    """`store_row`, then `commit`.

    Returns:
        What `commit` returns, or NEED_PAGE, or REFUSED - k.
    """
    writer = data_of(state)
    row = _store_row(writer, values)
    return _commit(writer, 1) if row >= 0 else row


@kernel(_SIGNATURE, nogil=True)
def append_large_row(state, values):  # type: ignore[no-untyped-def]
    """`append_row` without the interpreter lock, for ticks whose copying takes long; the caller keeps the tuple alive."""
    writer = data_of(state)
    row = _store_row(writer, values)
    return _commit(writer, 1) if row >= 0 else row


@kernel(_SIGNATURE, nogil=True)
def append_limited_row(state, values):  # type: ignore[no-untyped-def]
    """`append_row` in a table with a limiter; NEED_PAGE also where the limiter does not grant the tick at once."""
    writer = data_of(state)
    if peek_i64(writer + W_BUSY) != 0 or not ask_for_rows(writer, peek_i64(writer + W_ENVS)):
        return NEED_PAGE
    row = _store_row(writer, values)
    if row < 0:
        give_back_rows(writer)
        return row
    return _commit(writer, 1)
