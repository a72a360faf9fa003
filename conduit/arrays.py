"""Conversion of callers' arrays and tensors to numpy arrays; bfloat16, for which numpy has no dtype, becomes its bits in uint16.

bfloat16 arrays and scalars of ml_dtypes, JAX and torch are recognized by the name of their dtype alone, so that none of these libraries
is imported for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.errors import MissingExtra

Array = np.ndarray[Any, Any]


def _is_bfloat16(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    kind = getattr(dtype, "kind", None)
    if kind is None:
        return str(dtype) == "torch.bfloat16"
    return kind == "V" and str(dtype) == "bfloat16"


def import_torch(what: str, instead: str = "", extra: str = "torch") -> Any:
    """Import torch, for a call that needs it.

    Args:
        what: The option or call that needs torch, as the caller wrote it, for the error.
        instead: An alternative without torch, for the error, or "".
        extra: The extra that installs all that is needed.

    Raises:
        MissingExtra: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        also = f", or {instead}" if instead else ""
        raise MissingExtra(
            f"Expected torch to be installed for {what}: pip install 'conduit-rl[{extra}]'{also}"
        ) from error
    return torch


def as_array(value: Any) -> Array:
    """A numpy view of a tensor, array or scalar (bfloat16 as its uint16 bits); tensors on a device are copied to the host."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        if _is_bfloat16(tensor):
            import torch  # only a process that already has tensors gets here

            tensor = tensor.view(torch.int16)
            return np.asarray(tensor.numpy()).view(np.uint16)
        return np.asarray(tensor.numpy())
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    return array.view(np.uint16) if _is_bfloat16(array) else array


def as_numbers(value: Any) -> Array:
    """A caller's value as a numpy array of numbers: bfloat16 becomes float32, which is exact; sequences, nested or not, become arrays.

    Raises:
        ValueError, TypeError: The value cannot be an array.
    """
    if not isinstance(value, list | tuple):
        array = as_array(value)
        return from_bfloat16(array) if _is_bfloat16(value) else array
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        # numpy cannot convert bfloat16 tensors and JAX scalars in a list by itself
        return np.stack([as_numbers(one) for one in value])
    if array.dtype.kind == "O" and len(value):  # numbers beside scalars of bfloat16
        return np.stack([as_numbers(one) for one in value])
    return array.astype(np.float32) if _is_bfloat16(array) else array


def to_bfloat16(values: Array) -> Array:
    """float32 values as bfloat16 bits (uint16), rounded to nearest, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), (bits >> np.uint32(16)) | np.uint32(64), rounded).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    """float32 values of bfloat16 bits (uint16); exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
