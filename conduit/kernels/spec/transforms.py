"""The transforms of a field on its way into a batch: steps, declared as data, so that plans can be compared and sent.

A field's pipeline is a tuple of steps, which conduit.kernels.spec.conversion folds into one. Transforms of a whole batch are in
conduit.kernels.ops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from conduit.errors import ConfigError
from conduit.field import DTYPES
from conduit.numbers import at_least, real, whole, within

FLOATS = ("float16", "bfloat16", "float32", "float64")
EXACT_IN_FLOAT32 = ("bool", "int8", "uint8", "int16", "uint16", "float16", "bfloat16", "float32")
"""Dtypes whose values float32 represents exactly."""
_LARGEST = 1 << 53
"""float64 represents all integers up to this one exactly."""


def check_float(dtype: str, what: str) -> None:
    """Refuse a dtype that is not a float.

    Raises:
        ConfigError: The dtype is not a float.
    """
    if dtype not in FLOATS:
        raise ConfigError(f"Expected a float dtype for {what} ({', '.join(FLOATS)}), got {dtype!r}")


def _keep_numbers(step: object, *names: str) -> None:
    """Turn attributes into floats."""
    for name in names:
        number = real(getattr(step, name))
        if number is None:
            raise ConfigError(f"Expected a number as {name}, got {getattr(step, name)!r}")
        object.__setattr__(step, name, number)


@dataclass(frozen=True, slots=True)
class Transform:
    """out = cast(clip(x * factor + offset, low, high)).

    The product and sum are computed in float32 if the field's values and the result fit it: for sources of at most 16-bit integers or
    32-bit floats, and results of at most 32 bits. Otherwise they are computed in float64; so are float32 sources with an offset, since
    the sum may be much smaller than its terms, and earlier rounding would dominate it. Integers that are only clipped are compared as
    int64. Results of 16 bits are rounded to float32 first, as torch does. Integers that do not fit an integer result wrap around. NaN
    stays NaN.

    Attributes:
        dtype: Result dtype.
        factor, offset: Applied when either differs from 1 and 0.
        low, high: Bounds of the result, inclusive.
    """

    dtype: str
    factor: float = 1.0
    offset: float = 0.0
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"Expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        _keep_numbers(self, "factor", "offset", "low", "high")
        if not (math.isfinite(self.factor) and math.isfinite(self.offset)):
            raise ConfigError(f"Expected a finite factor and offset, got {self.factor!r} and {self.offset!r}")
        if not self.low <= self.high:
            raise ConfigError(f"Expected low of at most high, got {self.low!r} and {self.high!r}")
        if self.is_affine:
            check_float(self.dtype, "a scaled field")

    @property
    def is_affine(self) -> bool:
        """True when values are scaled or moved."""
        return self.factor != 1.0 or self.offset != 0.0

    @property
    def is_clipped(self) -> bool:
        """True if the transform has a finite bound."""
        return self.low != -math.inf or self.high != math.inf

    @property
    def is_cast(self) -> bool:
        """True if the transform is only a cast."""
        return not self.is_affine and not self.is_clipped

    def check_source(self, source: str, name: str) -> None:
        """Refuse a conversion that would silently lose values.

        Raises:
            ConfigError: A conversion from floats to integers or from another dtype to bool, or bounds that the dtype cannot represent.
        """
        if source in FLOATS and self.dtype not in FLOATS:
            raise ConfigError(
                f"Expected a float dtype for a field of `{source}`, got `{self.dtype}` - at transform[{name!r}]"
            )
        if self.dtype == "bool" and source != "bool":
            raise ConfigError(f"Expected a number for a field of `{source}`, got `bool` - at transform[{name!r}]")
        if not self.is_clipped or self.dtype in FLOATS:
            return
        if source in ("bool", "uint64"):
            raise ConfigError(
                f"Expected a number of at most 63 bits to clip, got `{source}`: add conduit.cast('float64') - at "
                f"transform[{name!r}]"
            )
        if any(math.isfinite(bound) and bound != int(bound) for bound in (self.low, self.high)):
            raise ConfigError(
                f"Expected whole numbers as bounds of `{self.dtype}`, got {self.low!r} and {self.high!r}: add "
                f"conduit.cast('float32') - at transform[{name!r}]"
            )


def is_narrow(transform: Transform, source: str) -> bool:
    """True if a transform of values of the dtype `source` computes in float32."""
    if source not in EXACT_IN_FLOAT32 or transform.dtype == "float64":
        return False
    return source != "float32" or transform.offset == 0.0


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds, inclusive; the dtype stays. See `clip`."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _keep_numbers(self, "low", "high")
        if self.low > self.high:
            raise ConfigError(f"Expected low of at most high, got {self.low!r} and {self.high!r}")
        if any(math.isfinite(bound) and abs(bound) > _LARGEST for bound in (self.low, self.high)):
            raise ConfigError(f"Expected bounds within 2^53, got {self.low!r} and {self.high!r}")


@dataclass(frozen=True, slots=True)
class OneHot:
    """Integers as unit vectors in a new last axis. See `one_hot`."""

    n: int
    dtype: str = "float32"
    start: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", at_least("a number of classes", self.n, 1))
        start = whole(self.start)
        if start is None or not -(1 << 63) <= start < 1 << 63:
            raise ConfigError(f"Expected an integer of 64 bits as the first class, got {self.start!r}")
        object.__setattr__(self, "start", start)
        if self.dtype not in DTYPES:
            raise ConfigError(f"Expected one of {', '.join(DTYPES)}, got {self.dtype!r}")


@dataclass(frozen=True, slots=True)
class Normalize:
    """Running mean and deviation, element by element. See `normalize`."""

    eps: float = 1e-8
    update: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", within("eps", self.eps, 0, math.inf))
        check_float(self.dtype, "a normalized field")


@dataclass(frozen=True, slots=True)
class RandomShift:
    """Images moved by a few pixels. See `random_shift`."""

    pad: int
    same: bool = False
    axes: tuple[int, int] = (-2, -1)

    def __post_init__(self) -> None:
        pad = whole(self.pad)
        if pad is None or not 1 <= pad <= 1 << 15:
            raise ConfigError(f"Expected a pad of 1 to {1 << 15} pixels, got {self.pad!r}")
        object.__setattr__(self, "pad", pad)
        if len(self.axes) != 2 or self.axes[1] != self.axes[0] + 1 or self.axes == (-1, 0):
            raise ConfigError(
                f"Expected two neighbouring axes for height and width, such as (-2, -1) or (0, 1), got {self.axes!r}"
            )

    def extents(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """An image field's shape as four numbers: elements before the height axis, height, width, and elements after the width axis."""
        first = self.axes[0] % len(shape)
        return math.prod(shape[:first]), shape[first], shape[first + 1], math.prod(shape[first + 2 :])


Step = Transform | Clip | OneHot | Normalize | RandomShift
"""One step of a field's pipeline."""
Pipeline = Step | tuple[Step, ...]
"""What a loader takes for a field."""


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
    check_float(dtype, "a scaled field")
    return Transform(str(dtype), factor, offset)


def cast(dtype: str) -> Transform:
    """Deliver the field as another dtype.

    Raises:
        ConfigError: Unknown dtype.
    """
    return Transform(str(dtype))


def clip(low: float | None = None, high: float | None = None) -> Clip:
    """Deliver values below `low` as `low` and values above `high` as `high`; the dtype stays. NaN stays NaN.

    If n-step returns sum up the field, every single reward is clipped before the sum.

    Args:
        low: Lower bound, inclusive; None for none.
        high: Upper bound, inclusive; None for none.

    Raises:
        ConfigError: `low` above `high`, or a NaN.
    """
    return Clip(-math.inf if low is None else low, math.inf if high is None else high)


def one_hot(n: int, *, start: int = 0, dtype: str = "float32") -> OneHot:
    """Deliver integers from start to start + n - 1 as unit vectors [..., n]; padding is zeros.

    A batch with an integer out of that range raises FieldError.

    Args:
        n: Classes, at least 1.
        start: The first class, as in Gymnasium's Discrete(n, start=...).
        dtype: Result dtype.

    Raises:
        ConfigError: n is below 1, the start is not an integer, or the dtype is unknown.
    """
    return OneHot(n, str(dtype), start)


def normalize(*, eps: float = 1e-8, update: bool = False, dtype: str = "float32") -> Normalize:
    """Deliver (x - mean) / sqrt(variance + eps), element by element, with the table's running statistics.

    The table must have been created with `statistics=(<field>, ...)`; all processes share them. Each batch is made with one
    consistent reading of them. Before the first update, values are delivered as they are.

    Args:
        eps: Added to the variance.
        update: Add every delivered batch's stored values (not those of the next observation) to the statistics.
        dtype: A float dtype.

    Raises:
        ConfigError: Not a float dtype, or a negative eps.
    """
    return Normalize(eps, bool(update), str(dtype))


def random_shift(pad: int, *, same: bool = False, axes: tuple[int, int] = (-2, -1)) -> RandomShift:
    """Move each sample's image by up to `pad` pixels in height and width, repeating the border.

    As in Yarats et al., "Image Augmentation Is All You Need" (DrQ, 2020): pad with the border's values, crop at a random place;
    out[h, w] = x[clamp(h + dy), clamp(w + dx)] with integers dy, dx from -pad to pad, both inclusive. All frames of a sample move
    alike. A move is a function of (seed, batch number, slot), so batches can be made again.

    Args:
        pad: Pixels, at least 1.
        same: Move the next observation like the observation; by default it moves independently.
        axes: Axes of height and width in the field's shape, which must be adjacent: (-2, -1) for [..., H, W], (0, 1) for [H, W, C].

    Raises:
        ConfigError: Bad pad or axes.
    """
    return RandomShift(pad, bool(same), _pair(axes))


def _pair(axes: Any) -> tuple[int, int]:
    pair = tuple(map(whole, axes)) if isinstance(axes, Iterable) else ()
    first, second = pair if len(pair) == 2 else (None, None)
    if first is None or second is None:
        raise ConfigError(f"Expected two whole numbers as axes, such as (-2, -1), got {axes!r}")
    return first, second
