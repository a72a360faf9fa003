"""Final observations handed over with the step that ends an episode: found in the object that came, and kept in the page's tail."""

from __future__ import annotations

from conduit.native.cpython_abi import DATA
from conduit.native.jit import inner
from conduit.native.memory import copy_bytes, peek_i64, peek_u8
from conduit.store.format import words as w
from conduit.store.ingest.field_specs import (
    FIELD_COLUMN,
    FIELD_LISTED,
    FIELD_ROW_BYTES,
    FIELD_STRIDE,
    FIELD_TYPE_NUMBER,
    OBJECT_NONE,
)
from conduit.store.ingest.final_rows import forget_rows, keep_final_row
from conduit.store.ingest.match_objects import dtype_of_array, is_array, pointers_of


@inner
def _observation(field, at, env, envs, objects):
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


@inner
def keep_finals(writer, row, at):
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
            source = 0 if field == 0 else _observation(field, at, env, envs, objects)
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
