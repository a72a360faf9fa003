"""One element's conversion, as conduit.kernels.spec.transforms.Transform promises it; shared by the kernels that copy rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.field import DTYPES
from conduit.kernels.spec.transforms import FLOATS
from conduit.native.jit import inner, intrinsic, ir, types
from conduit.native.memory import copy_bytes


def _pointer_to(dtype: str) -> Any:
    @intrinsic
    def pointer(typingctx: Any, at: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(getattr(types, dtype))(types.int64), codegen

    return pointer


_WHOLE = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
POINTERS = {
    "bool": _pointer_to("uint8"),
    **{dtype: _pointer_to(dtype) for dtype in _WHOLE},
    "float16": _pointer_to("uint16"),
    "bfloat16": _pointer_to("uint16"),
    "float32": _pointer_to("float32"),
    "float64": _pointer_to("float64"),
}


@intrinsic
def _half_to_float(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def _float_to_half(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def _bits_to_float(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def _float_to_bits(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@inner
def _as_is(value):
    return value


@inner
def _brain_to_float(bits):
    return _bits_to_float(np.uint32(bits) << np.uint32(16))


@inner
def _float_to_brain(value):
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = _float_to_bits(np.float32(value))
    if value != value:  # noqa: PLR0124 - the test for NaN
        return np.uint16((bits >> np.uint32(16)) | np.uint32(64))
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@inner
def _half(value):
    return _float_to_half(np.float32(value))


_READ = {"float16": _half_to_float, "bfloat16": _brain_to_float}
WRITE = {
    "float16": _half,
    "bfloat16": _float_to_brain,
    "float32": np.float32,
    "float64": np.float64,
    "bool": np.uint8,
    **{dtype: getattr(np, dtype) for dtype in _WHOLE},
}


def conversion(source_dtype: str, dtype: str, normalized: bool, affine: bool, clipped: bool, narrow: bool) -> Any:
    """The conversion of elements that lie side by side.

    Args:
        source_dtype: Of the elements.
        dtype: Of the results.
        normalized: A mean is subtracted first, and the inverse of a deviation multiplied.
        affine: Multiplied by a factor, and an offset added.
        clipped: Held between two bounds.
        narrow: Computed in float32 (kernels.spec.transforms.is_narrow).

    Returns:
        run(source, out, means, inverses, count, scales), the first four addresses, scales (factor, offset, low, high); and the type of
        these scales.
    """
    read, write = _READ.get(source_dtype, _as_is), WRITE[dtype]
    source_pointer, out_pointer, real = POINTERS[source_dtype], POINTERS[dtype], POINTERS["float64"]
    whole = source_dtype not in FLOATS and dtype not in FLOATS
    work = np.int64 if whole and clipped else np.float32 if narrow and not normalized else np.float64
    copies = source_dtype == dtype and not (normalized or affine or clipped)
    item = DTYPES[dtype].itemsize

    @inner
    def convert(x, mean, inverse, scales):
        if not (normalized or affine or clipped):
            return write(read(x))
        factor, offset, low, high = scales
        value = work(read(x))
        if normalized:
            value = (value - mean) * inverse
        if affine:
            value = value * factor + offset
        if clipped:
            # min and max would make NaN a bound
            value = low if value < low else value  # noqa: FURB136
            value = high if value > high else value  # noqa: FURB136
        return write(value)

    @inner(forceinline=True)
    def run(source, out, means, inverses, count, scales):
        if copies:
            copy_bytes(out, source, item * count)
            return
        x, y = source_pointer(source), out_pointer(out)
        if normalized:
            mean, inverse = real(means), real(inverses)
            for j in range(count):
                y[j] = convert(x[j], mean[j], inverse[j], scales)
        else:
            for j in range(count):
                y[j] = convert(x[j], 0.0, 1.0, scales)

    return run, work
