"""The conversion of one element, as conduit.kernels.spec.transforms.Transform specifies it; shared by the kernels that copy rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from conduit.errors import ConfigError, FieldError
from conduit.kernels.gpu.launch import VECTOR_BYTES, dtype_of, item_bytes
from conduit.kernels.spec.transforms import Transform, is_narrow


class Work(NamedTuple):
    """The conversion of each element as a kernel's constant; equal transforms have equal constants.

    Attributes:
        double: 1: computed in float64, 0: in float32.
        affine, low_bound, high_bound: 1 if the transform has a product and sum, a lower bound, an upper bound.
        factor, offset, low, high: Their numbers; 0 if the transform does not have them, since a constant cannot be infinite.
    """

    double: int
    affine: int
    low_bound: int
    high_bound: int
    factor: float
    offset: float
    low: float
    high: float


@triton.jit
def convert(x, dtype: tl.constexpr, WORKS: tl.constexpr, f: tl.constexpr):
    """cast(clip(x * factor + offset)), or a cast alone; results of 16 bits are rounded to float32 first.

    WORKS[f] begins with a `Work`. The lookup is here, since before Triton 3.9 a kernel can only pass on a whole constant, nested no
    deeper than this one.
    """
    if WORKS[f][1] + WORKS[f][2] + WORKS[f][3] > 0:
        y = x.to(tl.float64) if WORKS[f][0] else x.to(tl.float32)
        if WORKS[f][1]:
            y = y * WORKS[f][4] + WORKS[f][5]
        # min and max would turn NaN into a bound
        if WORKS[f][2]:
            low = tl.full((), WORKS[f][6], y.dtype)
            y = tl.where(y < low, low, y)
        if WORKS[f][3]:
            high = tl.full((), WORKS[f][7], y.dtype)
            y = tl.where(y > high, high, y)
        if WORKS[f][0] and dtype.primitive_bitwidth == 16:
            y = y.to(tl.float32)
        return y.to(dtype)
    if x.dtype == dtype:
        return x
    if dtype.is_floating() and dtype.primitive_bitwidth == 16:
        return x.to(tl.float32).to(dtype)
    return x.to(dtype)


@triton.jit
def changes_zero(WORKS: tl.constexpr, f: tl.constexpr):
    """True if `convert` may change 0."""
    return WORKS[f][1] + WORKS[f][2] + WORKS[f][3] > 0


def work_of(transform: Transform, source: Any, out: Any, at: str) -> Work:
    """Check that a transform fits the dtypes of source and output, and return it as a constant.

    Raises:
        FieldError: The output does not have the transform's dtype.
        ConfigError: The transform does not fit the source, or has no kernel here: integers that are only clipped.
    """
    have = dtype_of(source)
    if dtype_of(out) != transform.dtype:
        raise FieldError(f"Expected an output of `{transform.dtype}`, got `{dtype_of(out)}`", at=at)
    transform.check_source(have, at)
    floats = transform.dtype.startswith(("float", "bfloat"))
    if not floats and (transform.is_clipped or (transform.dtype == "bool" and have != "bool")):
        raise ConfigError(f"Expected a float dtype for a field that is clipped on a GPU, got {transform} - at {at}")
    return constants_of(transform, double=not is_narrow(transform, have))


def constants_of(transform: Transform, *, double: bool) -> Work:
    """A transform as a constant, unchecked."""
    bounds = math.isfinite(transform.low), math.isfinite(transform.high)
    return Work(
        int(double),
        int(transform.is_affine),
        int(bounds[0]),
        int(bounds[1]),
        float(transform.factor),
        float(transform.offset),
        float(transform.low) if bounds[0] else 0.0,
        float(transform.high) if bounds[1] else 0.0,
    )


def tile_of(source: Any, out: Any, elements: int, stride: int, num_warps: int) -> int:
    """Elements of a tile, so that each thread moves 16 bytes of the wider dtype.

    The tile is smaller if rows are aligned differently in the column and in the output: a thread would otherwise load more at a time than
    it can store, and exchange elements with other threads through shared memory.
    """
    sizes = item_bytes(dtype_of(source)), item_bytes(dtype_of(out))
    most = VECTOR_BYTES // max(sizes)
    apart = stride * sizes[0], elements * sizes[1]
    wide = [min(most, math.gcd(row, VECTOR_BYTES) // size or 1) for row, size in zip(apart, sizes, strict=True)]
    return 32 * num_warps * (most if wide[0] == wide[1] else min(wide))
