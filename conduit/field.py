"""One field of a row: its name, dtype and shape, checked once when it is made.

bfloat16 has no numpy dtype: its values are held as their bits in ``uint16``. Torch tensors and ml_dtypes arrays of bfloat16 are
recognized by the name of their dtype, without importing either library.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from conduit.errors import SchemaError

Casting: TypeAlias = Literal["no", "same_kind"]

DTYPES: Mapping[str, np.dtype[Any]] = {
    **{
        name: np.dtype(name)
        for name in (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64"),
        )
    },
    "bfloat16": np.dtype("uint16"),
}
"""The dtypes a field can have: canonical name to the numpy dtype that holds one value in memory."""

SYSTEM_NAMES = ("terminated", "truncated", "meta")
"""The columns every table has besides its fields."""

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""A part of a dotted name that is the key of a dict."""

_RESERVED = (*SYSTEM_NAMES, "final")
_POSITION = re.compile(r"0|[1-9][0-9]*")
_LONGEST = 200
"""Most characters of a name: checkpoints and exports have files with the fields' names and a suffix."""


_NATIVE = {held: name for name, held in DTYPES.items() if held.name == name}
"""Names of the dtypes that numpy has itself: looking one up costs a tenth of spelling it out."""


def dtype_name(dtype: object, *, at: str | None = None) -> str:
    """Give the canonical name of a dtype.

    Args:
        dtype: A name of :data:`DTYPES`, a numpy dtype or scalar type, an ml_dtypes or torch dtype, or ``bool``.
        at: The field path to name in the error.

    Raises:
        SchemaError: The dtype is not one of :data:`DTYPES`, or is not in this machine's byte order.
    """
    if isinstance(dtype, np.dtype) and dtype in _NATIVE:
        return _NATIVE[dtype]
    if isinstance(dtype, str):
        name = dtype
    elif type(dtype).__module__.partition(".")[0] == "torch":
        name = str(dtype).removeprefix("torch.")
    elif dtype is bool or isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        resolved: np.dtype[Any] = np.dtype(dtype)
        if not resolved.isnative:
            raise SchemaError(
                f"Expected a dtype in this machine's byte order, got `{resolved.str}`: convert with `.astype()`", at=at
            )
        name = resolved.name
    else:
        # Python's int and float have no one size here: an example's float is stored as float32, numpy reads float64.
        name = dtype.__name__ if isinstance(dtype, type) else repr(dtype)
    if name not in DTYPES:
        raise SchemaError(f"Expected one of the dtypes {', '.join(DTYPES)}, got `{name}`", at=at)
    return name


@dataclass(frozen=True, slots=True, init=False)
class Field:
    """One named value of a row.

    Attributes:
        name: Dotted name, unique in its schema: ``reward``, ``obs.camera``, ``obs.0``.
        dtype: Canonical name of the dtype, a key of :data:`DTYPES`.
        shape: Shape of one row's value, without rows or environments; ``()`` is a scalar. Each size is at least 1.
        observation: Whether it is (part of) the observation; loaders also deliver it as ``next_<name>``.
        casting: What a writer accepts: ``"no"`` the exact dtype only, ``"same_kind"`` any array that numpy casts
            within its kind, such as float64 to float32.
        ragged: Whether the first axis varies from row to row, from 0 up to ``shape[0]``.
        reward: Whether it is (part of) the reward, which n-step windows sum up into returns. If no field of a schema is declared as
            the reward, :attr:`conduit.Schema.reward_names` has the rule.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    observation: bool = False
    casting: Casting = "no"
    ragged: bool = False
    reward: bool = False

    def __init__(
        self,
        name: str,
        dtype: object,
        shape: Sequence[int] = (),
        observation: bool = False,
        casting: Casting = "no",
        ragged: bool = False,
        reward: bool = False,
    ) -> None:
        """Check and normalize the parts.

        Args:
            name: Dotted name of at most 200 characters; each part matches ``[A-Za-z_][A-Za-z0-9_]*``, or is a position in
                a tuple. The first part must not be ``terminated``, ``truncated``, ``meta`` or ``final``, nor start with
                ``next_`` or ``_``.
            dtype: Anything :func:`dtype_name` knows.
            shape: Shape of one row's value.
            observation: Whether it is (part of) the observation.
            casting: ``"no"`` or ``"same_kind"``.
            ragged: Whether the first axis varies; its largest length is ``shape[0]``.
            reward: Whether it is (part of) the reward.

        Raises:
            SchemaError: A part is not as described; the message names the field.
        """
        _check_name(name)
        if casting not in ("no", "same_kind"):
            raise SchemaError(f"Expected casting 'no' or 'same_kind', got {casting!r}", at=name)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "dtype", dtype_name(dtype, at=name))
        object.__setattr__(self, "shape", _checked_shape(shape, name))
        object.__setattr__(self, "observation", bool(observation))
        object.__setattr__(self, "casting", casting)
        object.__setattr__(self, "ragged", bool(ragged))
        object.__setattr__(self, "reward", bool(reward))
        if self.observation and self.reward:
            raise SchemaError("Expected a field to be an observation or a reward, got both", at=name)
        if self.ragged and not self.shape:
            raise SchemaError("Expected a shape that begins with the largest length of a ragged field, got ()", at=name)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the value in memory; ``uint16`` (the bits) for bfloat16."""
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's value, without padding; for a ragged field, of the longest value."""
        return math.prod(self.shape) * self.itemsize

    @property
    def max_length(self) -> int:
        """Largest length of a ragged field's first axis."""
        return self.shape[0]

    @property
    def item_bytes(self) -> int:
        """Bytes that one step along a ragged field's first axis takes."""
        return math.prod(self.shape[1:]) * self.itemsize

    def __str__(self) -> str:
        notes = (", observation" if self.observation else "") + (", reward" if self.reward else "")
        notes += ", same_kind" if self.casting == "same_kind" else ""
        notes += ", ragged" if self.ragged else ""
        return f"{self.dtype} {self.shape}{notes}"


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise SchemaError(f"Expected a field name of type `str`, got {name!r} of type `{type(name).__name__}`")
    first, *rest = name.split(".")
    if not KEY.fullmatch(first) or not all(KEY.fullmatch(part) or _POSITION.fullmatch(part) for part in rest):
        raise SchemaError(
            f"Expected letters, digits and `_` in each dotted part of a name, the first not a digit, got {name!r}",
            at=name,
        )
    if len(name) > _LONGEST:
        raise SchemaError(f"Expected a name of at most {_LONGEST} characters, got {len(name)}", at=f"{name[:40]}...")
    if first in _RESERVED:
        raise SchemaError(f"The name `{first}` is Conduit's own, and not a field: leave it out or rename it", at=name)
    if first.startswith(("next_", "_")):
        raise SchemaError("Names that start with `next_` or `_` are Conduit's own: rename the field", at=name)


def _checked_shape(shape: object, name: str) -> tuple[int, ...]:
    if not isinstance(shape, tuple | list) or any(isinstance(size, bool) for size in shape):
        raise SchemaError(f"Expected a shape such as `(4,)` or `()`, got {shape!r}", at=name)
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise SchemaError(f"Expected a shape of whole numbers, got {shape!r}", at=name) from None
    if any(size < 1 for size in sizes):
        raise SchemaError(f"Expected every size of a shape to be at least 1, got {sizes}: leave the field out", at=name)
    return sizes
