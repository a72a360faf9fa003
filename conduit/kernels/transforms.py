"""What a loader may do to a field on its way into a batch, declared as data so that a plan can be compared and sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from conduit.errors import ConfigError
from conduit.field import DTYPES

FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Transform:
    """out = cast(x * factor + offset).

    The product and sum are computed in float32 when the field's values and the result fit it, that is for sources of at
    most 16-bit integers or 32-bit floats and results of at most 32 bits, otherwise in float64. Results of 16 bits are
    rounded to float32 first, as torch does. Integers that do not fit an integer result wrap around.

    Attributes:
        dtype: Result dtype.
        factor, offset: Applied when either differs from 1 and 0.
    """

    dtype: str
    factor: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"Expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not (math.isfinite(self.factor) and math.isfinite(self.offset)):
            raise ConfigError(f"Expected a finite factor and offset, got {self.factor!r} and {self.offset!r}")
        if self.is_affine and self.dtype not in FLOATS:
            raise ConfigError(f"Expected a float dtype for a scaled field ({', '.join(FLOATS)}), got {self.dtype!r}")

    @property
    def is_affine(self) -> bool:
        """True when more than a cast is asked for."""
        return self.factor != 1.0 or self.offset != 0.0

    def check_source(self, source: str, name: str) -> None:
        """Refuse a cast that would silently lose values.

        Raises:
            ConfigError: From floats to integers, or anything else to bool.
        """
        if source in FLOATS and self.dtype not in FLOATS:
            raise ConfigError(
                f"Expected a float dtype for a field of `{source}`, got `{self.dtype}` - at transform[{name!r}]"
            )
        if self.dtype == "bool" and source != "bool":
            raise ConfigError(f"Expected a number for a field of `{source}`, got `bool` - at transform[{name!r}]")


def scale(factor: float, *, offset: float = 0.0, dtype: str = "float32") -> Transform:
    """Deliver `x * factor + offset` as `dtype`; for instance `scale(1 / 255)` for images.

    In float32, x * (1/255) differs from x / 255 by one unit in the last place for about half of the 256 byte values.

    Args:
        factor: Multiplier.
        offset: Added after it.
        dtype: A float dtype.

    Raises:
        ConfigError: Not a float dtype.
    """
    if dtype not in FLOATS:
        raise ConfigError(f"Expected a float dtype for a scaled field ({', '.join(FLOATS)}), got {dtype!r}")
    return Transform(str(dtype), float(factor), float(offset))


def cast(dtype: str) -> Transform:
    """Deliver the field as another dtype.

    Raises:
        ConfigError: Unknown dtype.
    """
    return Transform(str(dtype))
