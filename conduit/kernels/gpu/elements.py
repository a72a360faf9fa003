"""One element's conversion, as conduit.kernels.spec.transforms.Transform promises it; shared by the kernels that copy rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from conduit.errors import ConfigError, FieldError
from conduit.kernels.gpu.launch import VECTOR_BYTES, dtype_of, item_bytes
from conduit.kernels.spec.transforms import Transform, is_narrow


class Work(NamedTuple):
    """What is done to each element, as a kernel's constant: equal for equal transforms.

    Attributes:
        double: 1: computed in float64, 0: in float32.
        affine, low_bound, high_bound: 1 where a product and sum, or a bound is asked for.
        factor, offset, low, high: Of these; 0 where they are not, since a constant cannot be infinite.
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

    WORKS[f] begins with a `Work`. It is looked up here, since only a whole constant can be handed on before Triton 3.9, and one
    that nests no deeper than this.
    """
    if WORKS[f][1] + WORKS[f][2] + WORKS[f][3] > 0:
        y = x.to(tl.float64) if WORKS[f][0] else x.to(tl.float32)
        if WORKS[f][1]:
            y = y * WORKS[f][4] + WORKS[f][5]
        # min and max would make NaN a bound
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
    """True when `convert` may make something else of 0."""
    return WORKS[f][1] + WORKS[f][2] + WORKS[f][3] > 0


def work_of(transform: Transform, source: Any, out: Any, at: str) -> Work:
    """Check that a transform leads from one tensor's dtype to another's, and give it as a constant.

    Raises:
        FieldError: The output has another dtype.
        ConfigError: The transform has no meaning for the source, or no kernel here: integers that are only clipped.
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
    """Elements of a tile of which each thread moves 16 bytes of the wider dtype.

    Fewer where rows begin at other multiples in the column than in the output: a thread would load more at a time than it can
    store, and exchange them with others through shared memory.
    """
    sizes = item_bytes(dtype_of(source)), item_bytes(dtype_of(out))
    most = VECTOR_BYTES // max(sizes)
    apart = stride * sizes[0], elements * sizes[1]
    wide = [min(most, math.gcd(row, VECTOR_BYTES) // size or 1) for row, size in zip(apart, sizes, strict=True)]
    return 32 * num_warps * (most if wide[0] == wide[1] else min(wide))
