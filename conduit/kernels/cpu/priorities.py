"""Leaf priorities: p = (|priority| + eps)^alpha as an integer, so that sums have no rounding, no drift and no order.

A leaf is p in steps of the rule's scale * 2^-20, as a code of 32 bits: m << e, with 27 bits of m and 5 of e, and e = 0 below 2^27 steps. So
codes are in the order of what they stand for, and small ones are it. What they stand for are whole numbers, at most `largest_of` the
table's rows, so that all leaves of a table add up to less than 2^63. A positive p is at least 1 step. The same leaf comes out wherever
it is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.arrays import as_numbers
from conduit.errors import FieldError
from conduit.native.jit import entry, inner, intrinsic, ir, kernel, types
from conduit.native.memory import fetch_add, peek_i64, poke_i64
from conduit.numbers import within
from conduit.store.format import words as w
from conduit.store.format.table_spec import Priorities

Array = np.ndarray[Any, Any]

ONE = 1 << 20
"""The leaf of p = scale."""
MANTISSA_BITS = 27
MANTISSA = (1 << MANTISSA_BITS) - 1
_MOST = 57
"""log2 of the largest steps that a code of its kind stands for."""
RAISED, LOWERED = 0, 8
"""Words of a count of priorities that were not stored as they are: below half a step, and above the largest."""


def largest_of(rows: int) -> int:
    """The largest p of a table of so many rows, in steps; a power of 2."""
    return 1 << min(_MOST, 62 - (rows - 1).bit_length())


def values_of(codes: Any) -> Array:
    """What leaves stand for, int64 of their shape, in steps."""
    words: Array = np.asarray(codes).astype(np.int64)
    return (words & MANTISSA) << (words >> MANTISSA_BITS)


@inner
def value_of(code):
    """What a leaf stands for, in steps."""
    return (code & MANTISSA) << (code >> MANTISSA_BITS)


def _pointer(dtype: str) -> Any:
    @intrinsic
    def pointer(typingctx: Any, at: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(getattr(types, dtype))(types.int64), codegen

    return pointer


_doubles = _pointer("float64")
_singles = _pointer("uint32")


@intrinsic
def _bits_of(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), codegen


@intrinsic
def _double_of(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


@inner(error_model="numpy", forceinline=True)  # a test for division by zero is a branch, and m + 1 is never 0
def _log2(x):
    """log2 of a positive normal number: x = 2^e m with m from 1/sqrt(2) to sqrt(2), and the series of 2 atanh for ln m."""
    # 2048 more in the exponent's place keeps it positive; a vector has no signed shift and no int64 to float64
    bits = _bits_of(x) - 0x3FE6A09E667F3BCD
    exponent = _double_of((((bits >> 52) + 2048) & 0xFFF) | 0x4330000000000000) - (4503599627370496.0 + 2048.0)
    m = _double_of((bits & 0xFFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD)
    t = (m - 1.0) / (m + 1.0)
    u = t * t
    series = 1.0 / 17.0
    series = series * u + 1.0 / 15.0
    series = series * u + 1.0 / 13.0
    series = series * u + 1.0 / 11.0
    series = series * u + 1.0 / 9.0
    series = series * u + 1.0 / 7.0
    series = series * u + 1.0 / 5.0
    series = series * u + 1.0 / 3.0
    series = series * u + 1.0
    return exponent + 2.8853900817779268 * t * series


@inner(forceinline=True)
def _exp2(y):
    """2^y for y from -1000 to 1000: 2^round(y), times the series of exp for what is left."""
    # adding 1.5 * 2^52 rounds to a whole number, and leaves it in the low bits
    shifted = y + 6755399441055744.0
    z = (y - (shifted - 6755399441055744.0)) * 0.6931471805599453
    series = 1.0 / 39916800.0
    series = series * z + 1.0 / 3628800.0
    series = series * z + 1.0 / 362880.0
    series = series * z + 1.0 / 40320.0
    series = series * z + 1.0 / 5040.0
    series = series * z + 1.0 / 720.0
    series = series * z + 1.0 / 120.0
    series = series * z + 1.0 / 24.0
    series = series * z + 1.0 / 6.0
    series = series * z + 1.0 / 2.0
    series = series * z + 1.0
    series = series * z + 1.0
    return series * _double_of((_bits_of(shifted) + 1023) << 52)


@inner
def _widen(source, count, alpha, eps, unit, largest, clipped, leaves):
    """The part of `to_leaves` for leaves of more than 27 bits, and for counting those that were clipped."""
    small = high = 0
    for i in range(count):
        x = source[i] + eps
        powered = _exp2(min(max(alpha * _log2(x), -1000.0), 1000.0)) * unit
        if x == 0.0 and alpha != 0.0:
            continue
        small += powered < 0.5
        high += powered > largest
        kept = min(max(powered, 1.0), largest)
        shift = max(((_bits_of(kept) >> 52) & 0x7FF) - (1023 + MANTISSA_BITS - 1), 0)
        mantissa = _bits_of(kept * _double_of((1023 - shift) << 52) + 4503599627370496.0) & 0xFFFFFFFF
        # rounded up to one bit more than there are
        carry = mantissa >> MANTISSA_BITS
        leaves[i] = np.uint32(((shift + carry) << MANTISSA_BITS) + mantissa - (carry << (MANTISSA_BITS - 1)))
    poke_i64(clipped + RAISED, peek_i64(clipped + RAISED) + small)
    poke_i64(clipped + LOWERED, peek_i64(clipped + LOWERED) + high)


@kernel("int64(int64, int64, float64, float64, float64, float64, int64, int64)")
def to_leaves(priorities, count, alpha, eps, unit, largest, clipped, out):
    """Leaves (uint32) of float64 priorities; returns -1, or the index of the first that is none.

    The power is worked out here, without branches, so that several are done at once and every machine makes the same leaves.

    Args:
        priorities: Address of float64 [count].
        count: How many.
        alpha: The rule's exponent.
        eps: What the rule adds to each priority.
        unit: Steps in 1.
        largest: The largest p, in steps.
        clipped: int64 [2], raised by how many were below half a step (RAISED) and above the largest (LOWERED).
        out: Address of uint32 [count].
    """
    source, leaves = _doubles(priorities), _singles(out)
    bad = 0
    for i in range(count):
        bad += not 0.0 <= source[i] < np.inf
    if bad != 0:
        for i in range(count):
            if not 0.0 <= source[i] < np.inf:
                return i
    for i in range(count):
        x = source[i] + eps
        powered = _exp2(min(max(alpha * _log2(x), -1000.0), 1000.0)) * unit
        leaf = _bits_of(min(max(powered, 1.0), float(MANTISSA)) + 4503599627370496.0)
        # 0 to the power of 0 is 1, and alpha 0 means uniform; otherwise what is 0 stays 0
        leaves[i] = np.uint32(0 if x == 0.0 and alpha != 0.0 else leaf)
    ends = 0
    for i in range(count):
        ends += (leaves[i] == 1) | (leaves[i] == MANTISSA)
    if ends != 0:
        _widen(source, count, alpha, eps, unit, largest, clipped, leaves)
    return -1


@kernel("int64(int64, int64)")
def count_clipped(control, clipped):
    """Add a count of clipped priorities (RAISED, LOWERED) to the table's, by the address of its control words."""
    for word in (RAISED, LOWERED):
        fetch_add(control + w.TABLE_CLIPPED + word, peek_i64(clipped + word))
    return 0


def clipping(rule: Priorities, rows: int, values: Array, clipped: tuple[int, int], table: str) -> str:
    """What to say of priorities that were clipped.

    Args:
        rule: The table's.
        rows: The table's.
        values: The priorities among which they were, float64 [n].
        clipped: How many were below half a step, and above the largest.
        table: The table's name.
    """
    low, high = 1 / rule.unit, largest_of(rows) / rule.unit
    with np.errstate(over="ignore"):
        powers = (np.asarray(values, np.float64) + rule.eps) ** rule.alpha
    told = []
    if clipped[0]:
        told.append(f"{clipped[0]} below {low / 2:.3g} as {low:.3g}: such rows are drawn too often")
    if clipped[1]:
        told.append(f"{clipped[1]} above {high:.3g} as {high:.3g}: such rows are drawn too seldom")
    largest, least = float(powers.max()), float(powers[powers > 0].min())
    # the largest at half of what can be stored, or, where that is not needed, the least at a thousand steps
    scale = 2 * largest / high * rule.scale if clipped[1] else max(least * 1024, 2 * largest / high * rule.scale)
    scale = min(max(scale, 1e-60), 1e60)
    return (
        f"Table {table!r} stored p = (|priority| + {rule.eps:g})^{rule.alpha:g} of {' and '.join(told)}. Create it with "
        f"priorities=conduit.Priorities(scale={scale:.1g}, ...), of the size that p ordinarily has; `conduit status` "
        "goes on counting"
    )


def as_priorities(priorities: Any, count: int) -> Array:
    """Priorities, real [count] (numpy, torch or a list), as C-contiguous float64; a copy only where it has to be.

    Raises:
        FieldError: Another shape.
    """
    given = as_numbers(priorities)
    if given.dtype.kind not in "biuf":
        raise FieldError(f"Expected real priorities, got {given.dtype}: nothing was changed", at="priorities")
    values = np.require(given, np.float64, ["C", "A", "E"])
    if values.shape != (count,):
        raise FieldError(f"Expected {count} priorities, one per row, got shape {values.shape}", at="priorities")
    return values


def not_a_priority(values: Array, index: int) -> FieldError:
    """The error for a NaN, infinite or negative priority."""
    return FieldError(
        f"Expected finite priorities of at least 0, got {values[index]} at index {index}: nothing was changed; "
        "pass absolute TD errors",
        at="priorities",
    )


class Leaves:
    """Turns priorities into leaves by a table's rule, in memory of its own that is used again.

    Args:
        rule: The table's.
        size: Priorities at once, at first.
        rows: The table's.

    Attributes:
        address: Of the leaves, uint32.
        array: The same.
        clipped: int64 [2], priorities that were stored as the least or the largest there is (RAISED, LOWERED), so far.
    """

    def __init__(self, rule: Priorities, size: int, rows: int) -> None:
        self._rule = rule
        self._largest = float(largest_of(rows))
        self.clipped = np.zeros(2, np.int64)
        self._make = entry(to_leaves)
        self._reserve(size)

    def _reserve(self, size: int) -> None:
        self._size = size
        self._priorities = np.zeros(size, np.float64)
        self.array = np.zeros(size, np.uint32)
        # asking an array for its address costs as much as a hundred leaves
        self._source, self.address = self._priorities.ctypes.data, self.array.ctypes.data

    def fill(self, priorities: Any, count: int) -> None:
        """Make leaves of priorities, real [count] (numpy, torch or a list).

        Raises:
            FieldError: Another shape, or a NaN, infinite or negative one; names the first.
        """
        values = as_priorities(priorities, count)
        if count > self._size:
            self._reserve(count)
        self._priorities[:count] = values
        rule = self._rule
        rest = (rule.unit, self._largest, self.clipped.ctypes.data, self.address)
        bad = self._make(self._source, count, rule.alpha, rule.eps, *rest)
        if bad >= 0:
            raise not_a_priority(values, bad)


def sequence_priority(errors: Any, mask: Any = None, eta: float = 0.9) -> Any:
    """Priorities of sequences from the TD errors of their steps: eta * max |d| + (1 - eta) * mean |d| (R2D2).

    Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning", 2019.

    Args:
        errors: TD errors, real [..., length]; numpy, or torch on any device.
        mask: Bool [..., length], True where a step counts (a batch's `loss_mask`), or None for all. What is masked may
            be anything, NaN too.
        eta: Share of the maximum, from 0 to 1.

    Returns:
        [...], of the library (and, for floats, dtype) that `errors` came in; 0 where no step counts.

    Raises:
        ConfigError: eta is no number from 0 to 1.
        FieldError: The errors are not real, or the shapes differ.
    """
    eta = within("eta", eta, 0.0, 1.0)
    if hasattr(errors, "detach"):
        import torch

        magnitudes = errors.detach().abs()
        magnitudes = magnitudes if magnitudes.is_floating_point() else magnitudes.to(torch.get_default_dtype())
        steps = torch.ones_like(magnitudes, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        steps = steps.to(magnitudes.device).bool()
        _check_mask(tuple(steps.shape), tuple(magnitudes.shape))
        magnitudes = magnitudes.where(steps, magnitudes.new_zeros(()))
        # in float64: a sum of many float16 errors is soon too large for one
        mean = magnitudes.sum(-1, dtype=torch.float64) / steps.sum(-1).clamp(min=1)
        return (eta * magnitudes.amax(-1).double() + (1.0 - eta) * mean).to(magnitudes.dtype)
    given: Array = np.asarray(errors)
    if given.dtype.kind not in "iuf":
        raise FieldError(f"Expected real errors [..., length], got {given.dtype}", at="errors")
    sizes: Array = np.abs(given)
    sizes = sizes if sizes.dtype.kind == "f" else sizes.astype(np.float64)
    counted: Array = np.ones(sizes.shape, bool) if mask is None else np.asarray(mask, bool)
    _check_mask(counted.shape, sizes.shape)
    sizes = np.where(counted, sizes, sizes.dtype.type(0))
    counts = np.maximum(counted.sum(-1), 1)
    mean = sizes.sum(-1, dtype=np.float64) / counts
    return (eta * sizes.max(-1).astype(np.float64) + (1.0 - eta) * mean).astype(sizes.dtype)


def _check_mask(mask: tuple[int, ...], errors: tuple[int, ...]) -> None:
    if mask != errors or not errors:
        raise FieldError(
            f"Expected errors [..., length] and a mask of the same shape, got {errors} and {mask}", at="mask"
        )
