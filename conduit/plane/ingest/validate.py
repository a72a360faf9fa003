"""Checks and conversions of the values that callers pass to a writer, for the exact path behind `append`."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.arrays import as_array, as_numbers, from_bfloat16, to_bfloat16
from conduit.errors import FieldError
from conduit.field import Field, dtype_name
from conduit.numbers import whole
from conduit.schema import Schema

Array = np.ndarray[Any, Any]

MISSING: Any = object()
"""Default of every field's argument in `append`."""


def checked(field: Field, value: Any, lead: tuple[int, ...], at: str | None = None) -> Array:
    """`value` as an array of the field's exact dtype and shape.

    Arrays and tensors must have the field's dtype, or a dtype of the same kind if the field has `casting="same_kind"`.
    numpy scalars, Python numbers and sequences of them are converted by value: the field's dtype must represent them, floats up to
    rounding. A bool is not a number.

    Args:
        field: The field.
        value: The caller's value.
        lead: Leading axes in front of the field's shape, (num_envs,) for vector environments.
        at: The path in error texts; default the field's name.

    Raises:
        FieldError: Wrong dtype, shape or range, with the path.
    """
    return _converted(
        field, value, (*lead, *field.shape), field.name if at is None else at, lead if at is None else None
    )


def checked_ragged(field: Field, value: Any, at: str | None = None) -> Array:
    """`value` as a C-contiguous array [length, *shape[1:]] of a ragged field's exact dtype; otherwise as `checked`.

    Raises:
        FieldError: Wrong dtype, shape or range, or longer than the field allows, with the path.
    """
    at = field.name if at is None else at
    inner = field.shape[1:]
    try:
        length = 0 if value is MISSING else len(value)
    except TypeError as error:
        shape = ("length", *inner)
        raise FieldError(f"Expected `{field.dtype}` of shape {shape}, got {_kind(value)} {value!r}", at=at) from error
    _check_length(field, length, at)
    if length == 0 and isinstance(value, list | tuple):
        return np.empty((0, *inner), field.numpy_dtype)
    return np.ascontiguousarray(_converted(field, value, (length, *inner), at))


def _check_length(field: Field, length: int, at: str) -> None:
    if length > field.max_length:
        raise FieldError(
            f"Expected at most {field.max_length} items, got {length}: cut the value, or create the table with a larger "
            "first size in the field's shape",
            at=at,
        )


def checked_lengths(field: Field, given: Any, num_envs: int | None) -> list[int]:
    """Lengths of a ragged field's values, one per environment: from an int, or from a sequence of num_envs ints.

    Raises:
        FieldError: The number of lengths is wrong, or a length is not an int, below 0, or longer than the field allows.
    """
    if num_envs is not None and (np.ndim(given) != 1 or len(given) != num_envs):
        raise FieldError(f"Expected {num_envs} lengths, one per environment, got {given!r}", at=field.name)
    lengths = [given] if num_envs is None else list(given)
    counts = []
    for env, length in enumerate(lengths):
        at = field.name if num_envs is None else f"{field.name}[{env}]"
        count = whole(length)
        if count is None or count < 0:
            raise FieldError(f"Expected an int of at least 0 as length, got {length!r}", at=at)
        _check_length(field, count, at)
        counts.append(count)
    return counts


def checked_values(field: Field, value: Any, num_envs: int | None, at: str | None = None) -> list[Array]:
    """One array per environment of a ragged field: from `value` itself, or from a sequence of one value per environment.

    Raises:
        FieldError: As `checked_ragged`, or the number of values is wrong.
    """
    at = field.name if at is None else at
    if num_envs is None or value is MISSING:
        return [checked_ragged(field, value, at)]
    if not isinstance(value, list | tuple) and getattr(value, "shape", ()) == ():
        raise FieldError(f"Expected a list of {num_envs} arrays, one per environment, got {_kind(value)}", at=at)
    if len(value) != num_envs:
        raise FieldError(f"Expected {num_envs} arrays, one per environment, got {len(value)}", at=at)
    return [checked_ragged(field, value[env], f"{at}[{env}]") for env in range(num_envs)]


def checked_observation(
    schema: Schema, observation: Any, lead: tuple[int, ...] = (), at: str = "final"
) -> dict[str, Any]:
    """A nested final observation as {observation name: array [*lead, *shape]} of the fields' dtypes.

    With a leading axis, a ragged observation is a list of one array per environment; None means that there is none.

    Args:
        schema: The table's schema.
        observation: The caller's value.
        lead: Leading axes.
        at: The beginning of paths in error texts.

    Raises:
        FieldError: A key or value does not fit.
    """
    flat = schema.flatten_observation(observation)
    return {name: _checked_part(schema[name], value, lead, f"{at}.{name}") for name, value in flat.items()}


def _checked_part(field: Field, value: Any, lead: tuple[int, ...], at: str) -> Any:
    if not field.ragged:
        return checked(field, value, lead, at=at)
    if not lead:
        return checked_ragged(field, value, at)
    if isinstance(value, list | tuple) or getattr(value, "dtype", None) == np.dtype(object):
        # environments whose episode did not end have no final observation
        value = [np.empty((0, *field.shape[1:]), field.numpy_dtype) if one is None else one for one in value]
    return checked_values(field, value, lead[0], at)


def _about_envs(shape: tuple[int, ...], lead: tuple[int, ...] | None, inner: tuple[int, ...]) -> str:
    """A remedy about num_envs, for a wrong shape whose only fault is a missing or superfluous axis of environments."""
    if lead == () and len(shape) == len(inner) + 1 and shape[1:] == inner:
        return f": are these {shape[0]} environments? Open the writer with num_envs={shape[0]} and their autoreset mode"
    if lead is not None and len(lead) == 1 and shape == inner:
        return f": the writer has num_envs={lead[0]}, so that values have an axis of {lead[0]} in front; open one without for one environment"
    if lead is not None and len(lead) == 1 and shape[1:] == inner:
        return f": the writer has num_envs={lead[0]}"
    return ""


def _converted(field: Field, value: Any, shape: tuple[int, ...], at: str, lead: tuple[int, ...] | None = None) -> Array:
    if value is MISSING:
        raise FieldError("Expected a value for every field of the schema, got none for this one", at=at)
    has_dtype = hasattr(value, "dtype")
    try:
        name = dtype_name(value.dtype) if has_dtype else ""
        array = as_array(value) if has_dtype else as_numbers(value)
    except (TypeError, ValueError) as error:
        raise FieldError(
            f"Expected `{field.dtype}` of shape {shape}, got {type(value).__name__}: {error}", at=at
        ) from error
    if array.dtype.kind not in "biuf":
        raise FieldError(f"Expected `{field.dtype}` of shape {shape}, got {_kind(value)}", at=at)
    if array.shape != shape:
        about = _about_envs(array.shape, lead, field.shape)
        raise FieldError(
            f"Expected shape {shape}, got {array.shape}{f' of {array.dtype}' if about else ''}{about}", at=at
        )
    if has_dtype and name == field.dtype:
        return array
    if name == "bfloat16":  # stored as an array of its bits
        array = from_bfloat16(array)
    wanted = np.dtype(np.float32 if field.dtype == "bfloat16" else field.numpy_dtype)
    if has_dtype and (field.casting == "no" or not np.can_cast(array.dtype, wanted, "same_kind")) and array.shape != ():
        raise FieldError(f"Expected `{field.dtype}`, got `{name}`: convert it to {field.dtype}", at=at)
    return _by_value(field, array, wanted, value, at)


def _kind(value: Any) -> str:
    return f"`{value.dtype}`" if hasattr(value, "dtype") else type(value).__name__


def _by_value(field: Field, array: Array, wanted: np.dtype[Any], value: Any, at: str) -> Array:
    if (wanted.kind == "b") != (array.dtype.kind == "b") or (wanted.kind in "iu" and array.dtype.kind == "f"):
        raise FieldError(f"Expected `{field.dtype}`, got {_kind(value)} {value!r}", at=at)
    if wanted.kind == "b":
        return array
    if wanted.kind in "iu":
        bounds = np.iinfo(wanted)
        fits = array.size == 0 or (bounds.min <= int(array.min()) and int(array.max()) <= bounds.max)
        result = array.astype(wanted)
    else:
        with np.errstate(over="ignore"):
            result = array.astype(wanted)
        stored = result
        if field.dtype == "bfloat16":
            result = to_bfloat16(stored)
            stored = from_bfloat16(result)
        fits = bool((np.isfinite(stored) | ~np.isfinite(array)).all())
    if not fits:
        raise FieldError(f"Expected values that fit `{field.dtype}`, got {value!r}", at=at)
    return result


def flags(value: Any, num_envs: int | None, name: str) -> Array:
    """Flags of one tick, bool [num_envs], or bool [1] of a single environment; the object False means all False.

    Raises:
        FieldError: The dtype or shape is wrong.
    """
    lead = () if num_envs is None else (num_envs,)
    if value is False:
        return np.zeros(num_envs or 1, bool)
    return _converted(_FLAG, value, lead, name, lead).reshape(-1)


_FLAG = Field("flag", "bool")
