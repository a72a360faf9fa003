"""The error for stored values that a transform refuses; it names the first one. Loaders and consumers use it."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.arrays import from_bfloat16
from conduit.errors import FieldError
from conduit.kernels.spec.plan import Output

Array = np.ndarray[Any, Any]

FINITE = "finite values for the field's running statistics"
MORE_CLASSES = "raise n in conduit.one_hot(n), or name the first class, one_hot(n, start=...)"


def classes_of(output: Output) -> str:
    """The classes that a one-hot output takes, as text."""
    return f"classes from {output.start} to {output.start + output.classes - 1}"


def numbers(output: Output, stored: Array) -> Array:
    """Stored values of a field as numbers: bfloat16 bits become float32, other values stay as they are."""
    return from_bfloat16(stored) if output.field.dtype == "bfloat16" else stored


def refusal(
    output: Output,
    what: str,
    stored: Array,
    inside: tuple[int, ...],
    row: tuple[str, int],
    among: tuple[int, str],
    remedy: str,
) -> FieldError:
    """The error for one value.

    Args:
        output: The output that the transform makes.
        what: The expected values, as text.
        stored: The row's stored value, [*shape].
        inside: Index of the refused element in `stored`.
        row: The text before the row's id, and the id.
        among: How many values were refused, and in what, as text.
        remedy: The remedy, as text.
    """
    value = numbers(output, stored)[inside].item()
    where = f"{inside} of " if inside else ""
    return FieldError(
        f"Expected {what}, got {value!r} in {where}{output.field.name!r} of {row[0]} {row[1]}, the first of {among[0]} such "
        f"values in the {among[1]}: {remedy}",
        at=output.field.name,
        row_id=row[1],
        value=value,
    )
