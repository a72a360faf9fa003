"""Checks of callers' numbers and flags: Python and numpy numbers, and 0-d arrays and tensors, are accepted; a bool is not a number.

A number is converted to Python's int or float once, where the caller passes it, so that later code meets no other type.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np

from conduit.errors import ConfigError

MOST = 1 << 53
"""The largest integer that is accepted as a size or a count. Up to it, floats are exact, and sums of a few such numbers fit 64 bits."""


def _is_number(value: object) -> bool:
    """Whether a value is a number, or a 0-d array or tensor of a number; a bool is not."""
    if isinstance(value, bool):
        return False
    if isinstance(value, numbers.Real) and not hasattr(value, "dtype"):
        return True
    # arrays, tensors and scalars of numpy, ml_dtypes, torch and JAX use the same names for their dtypes
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    return getattr(value, "shape", None) == () and dtype.startswith(("int", "uint", "float", "bfloat"))


def whole(value: Any) -> int | None:
    """`value` as an int if it has an integer type, else None.

    >>> import numpy as np
    >>> whole(np.int64(64)), whole(64.0), whole(True)
    (64, None, None)
    """
    if type(value) is int:
        return value
    if not _is_number(value):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def real(value: Any) -> float | None:
    """`value` as a float if it is a number other than NaN, else None; it may be infinite."""
    if type(value) is not float:
        if not _is_number(value):
            return None
        try:
            value = float(value)
        except OverflowError:
            return None
    return None if math.isnan(value) else value


def at_least(name: str, value: object, least: int) -> int:
    """`value` as an int.

    Raises:
        ConfigError: The value is not an integer, below `least`, or above MOST; the message has `name`.
    """
    number = whole(value)
    if number is None or number < least:
        raise ConfigError(f"Expected {name} of at least {least}, got {value!r}")
    if number > MOST:
        raise ConfigError(f"Expected {name} of at most 2^53, got a number of {number.bit_length()} bits")
    return number


def within(name: str, value: object, low: float, high: float) -> float:
    """`value` as a float.

    Raises:
        ConfigError: The value is not a number, or not from `low` to `high`, both inclusive; an infinite `high` allows every finite
            number. The message has `name`.
    """
    number = real(value)
    if number is None or not low <= number <= high or math.isinf(number):
        bounds = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise ConfigError(f"Expected {name} {bounds}, got {value!r}")
    return number


def flag(name: str, value: object) -> bool:
    """`value` as a bool.

    Raises:
        ConfigError: The value is not a bool of Python or numpy; the message has `name`.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"Expected {name} True or False, got {value!r}")
    return bool(value)
