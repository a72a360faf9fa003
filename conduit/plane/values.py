"""Checking and converting what callers hand to a writer; the slow and exact path behind `append`."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.errors import FieldError
from conduit.field import Field, dtype_name
from conduit.store.weights import as_array

Array = np.ndarray[Any, Any]

MISSING: Any = object()
"""Default of every field's argument in `append`."""


def checked(field: Field, value: Any, lead: tuple[int, ...]) -> Array:
    """`value` as an array of the field's exact dtype and shape.

    Arrays and tensors must have the field's dtype, or one of the same kind where the field says `casting="same_kind"`.
    Python numbers and sequences of them are taken by value: they must be representable.

    Args:
        field: The field it is for.
        value: What came.
        lead: Leading axes in front of the field's shape, (num_envs,) for vector environments.

    Raises:
        FieldError: Wrong dtype, shape or range, with the field's path.
    """
    shape = (*lead, *field.shape)
    if value is MISSING:
        raise FieldError("Expected a value for every field of the schema, got none for this one", at=field.name)
    has_dtype = hasattr(value, "dtype")
    try:
        name = dtype_name(value.dtype) if has_dtype else ""
        array = as_array(value)
    except (TypeError, ValueError) as error:
        raise FieldError(
            f"Expected `{field.dtype}` of shape {shape}, got {type(value).__name__}: {error}", at=field.name
        ) from error
    if array.dtype.kind not in "biuf":
        raise FieldError(f"Expected `{field.dtype}` of shape {shape}, got {_kind(value)}", at=field.name)
    if array.shape != shape:
        raise FieldError(f"Expected shape {shape}, got {array.shape}", at=field.name)
    if has_dtype and name == field.dtype:
        return array
    wanted = np.dtype(np.float32 if field.dtype == "bfloat16" else field.numpy_dtype)
    if has_dtype and (field.casting == "no" or not np.can_cast(array.dtype, wanted, "same_kind")) and array.shape != ():
        raise FieldError(
            f"Expected `{field.dtype}`, got `{name}`: convert it with .astype({field.dtype!r})", at=field.name
        )
    return _by_value(field, array, wanted, value)


def _kind(value: Any) -> str:
    return f"`{value.dtype}`" if hasattr(value, "dtype") else type(value).__name__


def _by_value(field: Field, array: Array, wanted: np.dtype[Any], value: Any) -> Array:
    if wanted.kind in "iub":
        if array.dtype.kind == "f" or (wanted.kind == "b") != (array.dtype.kind == "b"):
            raise FieldError(f"Expected `{field.dtype}`, got {_kind(value)} {value!r}", at=field.name)
        if (
            wanted.kind != "b"
            and array.size
            and not (np.iinfo(wanted).min <= int(array.min()) and int(array.max()) <= np.iinfo(wanted).max)
        ):
            raise FieldError(f"Expected values that fit `{field.dtype}`, got {value!r}", at=field.name)
        return array.astype(wanted)
    if array.dtype.kind == "b":
        raise FieldError(f"Expected `{field.dtype}`, got {_kind(value)} {value!r}", at=field.name)
    with np.errstate(over="ignore"):
        result = array.astype(wanted)
    if field.dtype == "bfloat16":
        return to_bfloat16(result)
    return result


def to_bfloat16(values: Array) -> Array:
    """float32 values as bfloat16 bits (uint16), rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), (bits >> np.uint32(16)) | np.uint32(64), rounded).astype(np.uint16)


def flag(value: Any, name: str) -> bool:
    """One bool for a single environment.

    Raises:
        FieldError: Not a bool.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if hasattr(value, "dtype") and dtype_name(value.dtype) == "bool" and tuple(value.shape) == ():
        return bool(value)
    raise FieldError(f"Expected `bool`, got {_kind(value)} {value!r}", at=name)


def flags(value: Any, num_envs: int, name: str) -> Array:
    """Flags of a vector environment, bool [num_envs].

    Raises:
        FieldError: Another dtype or shape.
    """
    return (
        checked(Field(name=f"flag_{name}", dtype="bool"), value, (num_envs,))
        if value is not False
        else np.zeros(num_envs, bool)
    )
