"""Storing a row straight from Python objects: one compiled call checks every value, copies it into the page and commits.

Assigning field by field from Python costs about 100 ns a field, and checking as much again. Here a kernel is handed the
tuple of values, looks into the objects themselves (type, dtype number, shape, contiguity), and copies. It never creates,
changes or releases a Python object; whatever it does not recognise it leaves to the exact path in conduit.plane, which
converts or explains. Nothing is stored before every value has passed.

What a field takes is said in conduit.store.ingest.field_specs. Where things lie in objects is said and proven in
conduit.native.cpython_abi; where its `is_supported()` fails, everything takes the exact path.
"""

from __future__ import annotations

import numpy as np

from conduit.native.cpython_abi import DATA, DIMS, ITEMS, TYPE, VALUE
from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    address_of,
    copy_bytes,
    copy_rows,
    data_of,
    load_relaxed,
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
from conduit.store.format import words as w
from conduit.store.ingest.commit import commit_ticks, forget_rows, keep_final_row
from conduit.store.ingest.field_specs import (
    ARRAY,
    BOOL,
    FIELD_ARENA,
    FIELD_COLUMN,
    FIELD_ELEMENTS,
    FIELD_FALSE_IS_NOTHING,
    FIELD_ITEMSIZE,
    FIELD_KIND,
    FIELD_ROW_BYTES,
    FIELD_SCALAR,
    FIELD_STRIDE,
    FIELD_WORDS,
    INT,
    OBJECT_FALSE,
    OBJECT_INT,
    OBJECT_NONE,
    OBJECT_NUMPY_TRUE,
    OBJECT_TRUE,
    RAGGED,
)
from conduit.store.ingest.match_objects import (
    int_size,
    int_value,
    is_array,
    is_recognised,
    observation_of,
    pointers_of,
    ragged_length,
)
from conduit.store.ingest.page_writer import next_page, page_is_stale, rows_free
from conduit.store.pages.ragged_values import forget_values, has_room, place_value
from conduit.store.pages.rate_limiter import ask_for_rows, give_back_rows

NEED_PAGE = -(1 << 40)
"""Result: the values fit, but the page has no room, the table was reset or frozen, or another form of writing is in progress;
nothing was stored."""
REFUSED = -(1 << 41)
"""Result REFUSED - k: value k was not recognised; nothing was stored."""


@inner
def _put_ragged(writer, field, row, at, envs, objects):
    arena = peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * peek_i64(field + FIELD_ARENA)
    pointers = pointers_of(field, at, envs, objects)
    for env in range(envs):
        value = peek_i64(pointers + 8 * env)
        length = peek_i64(peek_i64(value + DIMS))
        place_value(arena, peek_i64(writer + w.WRITER_PAGE), row + env, peek_i64(value + DATA), length)


@inner
def _put_bytes(target, source, size):
    if size == 8:
        poke_i64(target, peek_i64(source))
    elif size == 4:
        poke_u32(target, peek_u32(source))
    elif size == 1:
        poke_u8(target, peek_u8(source))
    else:
        poke_u16(target, peek_u32(source))


@inner
def _put_array(field, target, value, envs, objects):
    data = peek_i64(value + DATA)
    if is_array(field, value, objects) == 2:
        for i in range(peek_i64(field + FIELD_ELEMENTS)):
            poke_f32(target + 4 * i, peek_f64(data + 8 * i))
        return
    copy_rows(target, peek_i64(field + FIELD_STRIDE), data, peek_i64(field + FIELD_ROW_BYTES), envs)


@inner
def _put(field, row, value, envs, objects):
    """Store a recognised object at a physical row (and the `envs` - 1 rows behind it)."""
    target = peek_i64(field + FIELD_COLUMN) + peek_i64(field + FIELD_STRIDE) * row
    kind = peek_i64(field + FIELD_KIND)
    if peek_i64(field + FIELD_FALSE_IS_NOTHING) != 0 and value == peek_i64(objects + OBJECT_FALSE):
        return
    if kind == ARRAY:
        _put_array(field, target, value, envs, objects)
        return
    if kind == BOOL:
        true = value == peek_i64(objects + OBJECT_TRUE) or value == peek_i64(objects + OBJECT_NUMPY_TRUE)
        poke_u8(target, 1 if true else 0)
        return
    size = peek_i64(field + FIELD_ITEMSIZE)
    type_ = peek_i64(value + TYPE)
    if type_ == peek_i64(field + FIELD_SCALAR):
        _put_bytes(target, value + VALUE, size)
        return
    is_int = type_ == peek_i64(objects + OBJECT_INT)
    number = int_value(value, int_size(value, objects)) if is_int else 0
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
def _find_row(writer, items):
    """Physical row of the tick, once every value has passed and there is room; NEED_PAGE or REFUSED - k."""
    envs = peek_i64(writer + w.WRITER_ENVS)
    fields = peek_i64(writer + w.WRITER_FIELDS)
    count = peek_i64(writer + w.WRITER_FIELD_COUNT)
    objects = peek_i64(writer + w.WRITER_OBJECTS)
    for k in range(count):
        field = fields + 8 * FIELD_WORDS * k
        if peek_i64(field + FIELD_KIND) == RAGGED:
            if ragged_length(field, items + 8 * k, envs, objects) < 0:
                return REFUSED - k
        elif not is_recognised(field, peek_i64(items + 8 * k), objects):
            return REFUSED - k
    if (
        peek_i64(writer + w.WRITER_BUSY) != 0
        or page_is_stale(writer)
        or rows_free(writer) < envs + peek_i64(writer + w.WRITER_RESERVE)
    ):
        return NEED_PAGE
    if peek_i64(writer + w.WRITER_ARENA_COUNT) != 0:
        forget_values(writer)
        for k in range(count):
            field = fields + 8 * FIELD_WORDS * k
            if peek_i64(field + FIELD_KIND) == RAGGED:
                arena = peek_i64(writer + w.WRITER_ARENAS) + w.ARENA_BYTES * peek_i64(field + FIELD_ARENA)
                if not has_room(arena, ragged_length(field, items + 8 * k, envs, objects)):
                    return NEED_PAGE
    return peek_i64(writer + w.WRITER_BASE) + peek_i64(writer + w.WRITER_LOCAL)


@inner
def _put_values(writer, row, items, first, last):
    """Store the values from number `first` up to `last`, which have passed."""
    envs = peek_i64(writer + w.WRITER_ENVS)
    objects = peek_i64(writer + w.WRITER_OBJECTS)
    for k in range(first, last):
        field = peek_i64(writer + w.WRITER_FIELDS) + 8 * FIELD_WORDS * k
        if peek_i64(field + FIELD_KIND) == RAGGED:
            _put_ragged(writer, field, row, items + 8 * k, envs, objects)
        else:
            _put(field, row, peek_i64(items + 8 * k), envs, objects)


@inner
def _ends(writer, items):
    """True when one of the flags that came, which have passed, ends an episode."""
    envs, objects = peek_i64(writer + w.WRITER_ENVS), peek_i64(writer + w.WRITER_OBJECTS)
    count = peek_i64(writer + w.WRITER_FIELD_COUNT)
    for k in range(count - 2, count):
        value = peek_i64(items + 8 * k)
        if value == peek_i64(objects + OBJECT_FALSE):
            continue
        if peek_i64(peek_i64(writer + w.WRITER_FIELDS) + 8 * FIELD_WORDS * k + FIELD_KIND) == ARRAY:
            data = peek_i64(value + DATA)
            for env in range(envs):
                if peek_u8(data + env):
                    return True
        elif value == peek_i64(objects + OBJECT_TRUE) or value == peek_i64(objects + OBJECT_NUMPY_TRUE):
            return True
    return False


@inner
def _turned(writer, items):
    """Physical row of the tick on a next page, or NEED_PAGE where none is to be had at once, or the exact path has to see it.

    A tick that ends an episode is its: it may be refused for its final observation, and no page is turned for it then.
    """
    turns = peek_i64(writer + w.WRITER_TURNS)
    if (
        turns == 0
        or peek_i64(writer + w.WRITER_PAGE) < 0
        or peek_i64(writer + w.WRITER_BUSY) != 0
        or page_is_stale(writer)
    ):
        return NEED_PAGE
    if _ends(writer, items):
        return NEED_PAGE
    if load_relaxed(peek_i64(writer + w.WRITER_CLOSED)) != 0:
        return NEED_PAGE
    poke_i64(writer + w.WRITER_TURNS, turns - 1)
    row = next_page(writer)
    return row if row >= 0 else NEED_PAGE


@inner
def _keep_finals(writer, row, at):
    """Keep what came as `final` for those of the tick's rows whose flags, which are stored, say that their episode ends.

    Args:
        writer: Writer state.
        row: Physical row of the tick.
        at: Address of the pointer to what came.

    Returns:
        1, or 0 when the exact path has to see it; nothing is staged then, and the flags are cleared.
    """
    objects = peek_i64(writer + w.WRITER_OBJECTS)
    if peek_i64(at) == peek_i64(objects + OBJECT_NONE):
        return 1
    table, envs, field = (
        peek_i64(writer + w.WRITER_TABLE),
        peek_i64(writer + w.WRITER_ENVS),
        peek_i64(writer + w.WRITER_FINAL),
    )
    terminated, truncated = peek_i64(table + w.VIEW_TERMINATED) + row, peek_i64(table + w.VIEW_TRUNCATED) + row
    if peek_i64(writer + w.WRITER_NEXT_STEP) != 0 or (field == 0 and peek_i64(writer + w.WRITER_STRICT) == 0):
        forget_rows(writer, envs)
        return 0
    for env in range(envs):
        if peek_u8(terminated + env) | peek_u8(truncated + env):
            source = 0 if field == 0 else observation_of(field, at, env, envs, objects)
            kept = -1 if source == 0 else keep_final_row(writer, row + env, row + envs)
            if kept < 0:
                forget_rows(writer, envs)
                return 0
            copy_bytes(
                peek_i64(field + FIELD_COLUMN) + peek_i64(field + FIELD_STRIDE) * kept,
                source,
                peek_i64(field + FIELD_ROW_BYTES),
            )
    return 1


@inner
def _append(writer, values):
    items = address_of(values) + ITEMS
    count = peek_i64(writer + w.WRITER_FIELD_COUNT)
    row = _find_row(writer, items)
    if row == NEED_PAGE:
        row = _turned(writer, items)
    if row < 0:
        return row
    # the flags first: they say which final observations are needed, and a refusal should not have copied anything large
    _put_values(writer, row, items, count - 2, count)
    if _keep_finals(writer, row, items + 8 * count) == 0:
        return REFUSED - count
    _put_values(writer, row, items, 0, count - 2)
    result = commit_ticks(writer, 1)
    if result < -1:
        forget_rows(writer, peek_i64(writer + w.WRITER_ENVS))
    return result


_SIGNATURE = "int64(object, object)"


@kernel(_SIGNATURE)
def store_row(state, values):
    """Check and store one tick from a tuple of values, without committing it.

    Args:
        state: Array of the writer's words; its WRITER_FIELDS, WRITER_FIELD_COUNT and WRITER_OBJECTS say what the tuple holds.
        values: The tuple: one value per schema field, then terminated and truncated.

    Returns:
        Physical row, NEED_PAGE, or REFUSED - k.
    """
    writer = data_of(state)
    items = address_of(values) + ITEMS
    row = _find_row(writer, items)
    if row >= 0:
        poke_i64(writer + w.WRITER_BUSY, 1)
        _put_values(writer, row, items, 0, peek_i64(writer + w.WRITER_FIELD_COUNT))
    return row


@kernel(_SIGNATURE)
def append_row(state, values):
    """`store_row`, then `commit`.

    Returns:
        What `commit` returns, or NEED_PAGE, or REFUSED - k.
    """
    return _append(data_of(state), values)


@kernel(_SIGNATURE, nogil=True)
def append_large_row(state, values):
    """`append_row` without the interpreter lock, for ticks whose copying takes long; the caller keeps the tuple alive."""
    return _append(data_of(state), values)


@kernel(_SIGNATURE, nogil=True)
def append_limited_row(state, values):
    """`append_row` in a table with a limiter; NEED_PAGE also where the limiter does not grant the tick at once."""
    writer = data_of(state)
    if peek_i64(writer + w.WRITER_BUSY) != 0 or not ask_for_rows(writer, peek_i64(writer + w.WRITER_ENVS)):
        return NEED_PAGE
    row = _append(writer, values)
    if row < -1:
        give_back_rows(writer)
    return row
