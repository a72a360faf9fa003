"""What the kernels of conduit.store.ingest.append_objects are told: which object each field takes, where its column is, and whose types these are.

Descriptions are plain words, made once for a writer; kernels only read them.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from conduit.field import Field
from conduit.native.descriptors import fill
from conduit.schema import Schema

Array = np.ndarray[Any, Any]

ARRAY, FLOAT, INT, BOOL, RAGGED, UNKNOWN = range(6)
"""Kinds of fields; values for an UNKNOWN one always take the exact path."""

(
    FIELD_KIND,
    FIELD_TYPE_NUMBER,
    FIELD_NDIM,
    FIELD_DIMS,
    FIELD_ELEMENTS,
    FIELD_COLUMN,
    FIELD_STRIDE,
    FIELD_ROW_BYTES,
    FIELD_SCALAR,
    FIELD_ITEMSIZE,
    FIELD_LOWEST,
    FIELD_HIGHEST,
    FIELD_FROM_DOUBLE,
    FIELD_FALSE_IS_NOTHING,
    FIELD_ARENA,
    FIELD_LISTED,
) = range(0, 128, 8)
FIELD_WORDS = 16
"""Words of one field: kind; numpy type number; dimensions and their address; elements; column and its row stride; bytes of a
row; type of numpy scalars; item size; range of an int; whether float64 arrays are rounded to this float32 field; whether the
object False leaves the (cleared) rows as they are; of a ragged field its number among the ragged ones, and whether a value is
a list of one array per environment (of `final`: whether it may be)."""

(
    OBJECT_ARRAY,
    OBJECT_FLOAT,
    OBJECT_DOUBLE,
    OBJECT_INT,
    OBJECT_TRUE,
    OBJECT_FALSE,
    OBJECT_NUMPY_TRUE,
    OBJECT_NUMPY_FALSE,
    OBJECT_LIST,
    OBJECT_TUPLE,
    OBJECT_NONE,
    OBJECT_TAGGED,
) = range(0, 96, 8)
"""Addresses of the types and singletons of this process; whether ints carry a tag word (Python 3.12 on)."""


@functools.cache
def known_objects() -> Array:
    """Addresses of this process's types and singletons (`OBJECT_*`), int64."""
    named = (np.ndarray, float, np.float64, int, True, False, np.True_, np.False_, list, tuple, None)
    return np.array([*(id(item) for item in named), sys.version_info >= (3, 12)], np.int64)


def describe_fields(fields: list[tuple[Field, Array]], num_envs: int | None) -> tuple[Array, Array]:
    """Field descriptions for the kernels of conduit.store.ingest.append_objects.

    Args:
        fields: (field, its whole-table column) in the order of the tuples to come.
        num_envs: None for a single environment.

    Returns:
        int64 [fields, words], and the array of dimensions that it points into (keep it alive).
    """
    lead = () if num_envs is None else (num_envs,)
    ragged = [field.name for field, _ in fields if field.ragged]
    dims = np.zeros((len(fields), 34), np.int64)
    out = np.zeros((len(fields), FIELD_WORDS), np.int64)
    for k, (field, column) in enumerate(fields):
        shape = field.shape if field.ragged else (*lead, *field.shape)
        dims[k, : len(shape)] = shape
        words = {
            FIELD_KIND: _kind(field, shape),
            FIELD_TYPE_NUMBER: column.dtype.num,
            FIELD_NDIM: len(shape),
            FIELD_DIMS: dims[k].ctypes.data,
            FIELD_ELEMENTS: int(np.prod(shape, dtype=np.int64)),
            FIELD_COLUMN: column.ctypes.data,
            FIELD_STRIDE: column.strides[0],
            FIELD_ROW_BYTES: field.row_bytes,
            FIELD_SCALAR: id(column.dtype.type),
            FIELD_ITEMSIZE: column.dtype.itemsize,
            FIELD_FROM_DOUBLE: field.dtype == "float32"
            and field.casting == "same_kind"
            and column.strides[0] == field.row_bytes,
        }
        if field.ragged:
            words[FIELD_TYPE_NUMBER] = np.dtype(field.numpy_dtype).num
            words |= {FIELD_ARENA: ragged.index(field.name), FIELD_LISTED: num_envs is not None}
        if column.dtype.kind in "iu":
            bounds = np.iinfo(column.dtype)
            words |= {FIELD_LOWEST: int(bounds.min), FIELD_HIGHEST: min(int(bounds.max), 2**63 - 1)}
        fill(out[k], words)
    return out, dims


def mark_flags(described: Array) -> None:
    """Say of the last two descriptions that they are the flags, for which the object False means nothing to store."""
    described[-2:, FIELD_FALSE_IS_NOTHING // 8] = 1


def describe_final(schema: Schema, described: Array, *, lists: bool) -> Array | None:
    """What a writer's `final` takes, as the description of a field; None where only the exact path knows.

    Args:
        schema: The table's.
        described: From `describe_fields`, in the schema's order.
        lists: Whether a list, tuple or array of objects with one observation per environment is taken as well.
    """
    names = schema.observation_names
    if schema.ragged_names or len(names) != 1 or "." in names[0]:
        return None
    out: Array = described[schema.names.index(names[0])].copy()
    out[FIELD_LISTED // 8] = lists
    return out if out[FIELD_KIND // 8] == ARRAY else None


def _kind(field: Field, shape: tuple[int, ...]) -> int:
    if field.dtype == "bfloat16" or (field.dtype == "float16" and not shape):
        return UNKNOWN
    if shape:
        return RAGGED if field.ragged else ARRAY
    return {"f": FLOAT, "b": BOOL}.get(np.dtype(field.numpy_dtype).kind, INT)
