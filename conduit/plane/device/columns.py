"""Columns of a table as tensors, in one block of device memory."""

from __future__ import annotations

from conduit.contracts.device import Tensor


def columns_in(
    memory: Tensor, base: int, places: dict[str, tuple[int, int, str, tuple[int, ...]]], rows: int
) -> dict[str, Tensor]:
    """Columns that lie in one block of device memory.

    Args:
        memory: uint8 [size].
        base: The offset that byte 0 of `memory` has in `places`.
        places: {name: offset of row 0, bytes from row to row, torch dtype, shape of a row}.
        rows: Rows of each column.

    Returns:
        {name: tensor [rows, *shape]}, with the distance between rows that `places` gives.
    """
    import torch

    columns = {}
    for name, (offset, stride, dtype, shape) in places.items():
        kind = getattr(torch, dtype)
        inner = [1]
        for length in reversed(shape[1:]):
            inner.insert(0, inner[0] * length)
        strides = (stride // kind.itemsize, *(inner if shape else ()))
        start = offset - base
        words = memory[start : start + rows * stride].view(kind)
        columns[name] = words.as_strided((rows, *shape), strides)
    return columns
