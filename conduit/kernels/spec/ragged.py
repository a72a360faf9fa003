"""The layouts of a ragged field in a batch, declared as data.

pad     <name>                [batch, max_length, *shape[1:]], zeros after each value
        <name>_mask           bool [batch, max_length], True where there is a value
        <name>_lengths        int64 [batch]
pack    <name>                [total, *shape[1:]], the values one after the other
        <name>_cu_seqlens     int32 [batch + 1], where each value begins; the last element is the total
        <name>_position_ids   int32 [total], the position of each item in its value

Attention kernels for sequences of varying lengths take the names and dtypes of "pack".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from conduit.errors import ConfigError
from conduit.field import Field
from conduit.kernels.spec.conversion import Conversion
from conduit.kernels.spec.transforms import Transform
from conduit.nesting import check_known
from conduit.schema import Schema

Layout = Literal["pad", "pack"]

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Ragged:
    """The arrays of a batch that are read from a ragged field.

    Attributes:
        name: Name of the values in the batch; "next_" + field for the next observation.
        field: The field of the schema.
        rows: Which rows of the window it reads.
        layout: "pad" or "pack".
        transform: Applied to each element.
    """

    name: str
    field: Field
    rows: Literal["anchor", "following"]
    layout: Layout
    transform: Transform

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of the values; bfloat16 as its uint16 bits."""
        return np.dtype(Field("out", self.transform.dtype).numpy_dtype)

    @property
    def is_plain(self) -> bool:
        """True if values are delivered as they are stored."""
        return self.transform.dtype == self.field.dtype and self.transform.is_cast

    @property
    def elements(self) -> int:
        """Elements of one item."""
        return math.prod(self.field.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of the longest value in a batch."""
        return self.field.max_length * self.elements * self.numpy_dtype.itemsize

    @property
    def parts(self) -> tuple[str, str, str]:
        """Names of the three arrays, the values first."""
        second, third = ("mask", "lengths") if self.layout == "pad" else ("cu_seqlens", "position_ids")
        return self.name, f"{self.name}_{second}", f"{self.name}_{third}"

    @property
    def narrowed(self) -> tuple[str, ...]:
        """Names of the arrays that are delivered only up to the last value."""
        return (self.parts[0], self.parts[2]) if self.layout == "pack" else ()

    def arrays(self, batch_size: int) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """{name: dtype and shape} of the memory that a batch needs."""
        longest, inner = self.field.max_length, self.field.shape[1:]
        values, second, third = self.parts
        if self.layout == "pad":
            return {
                values: (self.numpy_dtype, (batch_size, longest, *inner)),
                second: (np.dtype(bool), (batch_size, longest)),
                third: (np.dtype(np.int64), (batch_size,)),
            }
        return {
            values: (self.numpy_dtype, (batch_size * longest, *inner)),
            second: (np.dtype(np.int32), (batch_size + 1,)),
            third: (np.dtype(np.int32), (batch_size * longest,)),
        }


def layouts(schema: Schema, given: Layout | Mapping[str, Layout]) -> dict[str, Layout]:
    """{ragged field: layout} of a schema; fields that a mapping leaves out are padded.

    Raises:
        ConfigError: There is no such field or layout.
    """
    chosen: Mapping[str, Layout] = dict.fromkeys(schema.ragged_names, given) if isinstance(given, str) else given
    if not isinstance(chosen, Mapping):
        raise ConfigError(f"Expected ragged='pad', 'pack' or a dict of them by field, got {given!r}")
    check_known(chosen, schema.ragged_names, "names of ragged fields", "ragged")
    for layout in (given,) if isinstance(given, str) else chosen.values():
        if layout not in ("pad", "pack"):
            raise ConfigError(f"Expected 'pad' or 'pack', got {layout!r} - at ragged")
    return {name: chosen.get(name, "pad") for name in schema.ragged_names}


def ragged_output(
    name: str, field: Field, rows: str, layout: Layout, conversion: Conversion, batch_size: int
) -> Ragged:
    """Declare the arrays of a ragged field; `conversion` has an element-wise transform only.

    Raises:
        ConfigError: The window cannot be used for values of varying lengths, or the batch is too large.
    """
    if rows not in ("anchor", "following"):
        raise ConfigError(
            "Expected a window of single steps (conduit.Transition without a stack) for a ragged field, got one that puts "
            f"several rows side by side: leave the field out by fields=(...) - at `{name}`"
        )
    if layout == "pack" and batch_size * field.max_length > _INT32_MAX:
        raise ConfigError(
            f"Expected a packed batch of at most {_INT32_MAX} items, got {batch_size} of up to {field.max_length}: lower "
            f"batch_size - at `{name}`"
        )
    return Ragged(name, field, "anchor" if rows == "anchor" else "following", layout, conversion.transform)
