"""The host side that all GPU kernels share: the checks before a launch, and the launch itself.

A wrapper checks everything that it can without waiting for the device, and raises before it launches. The kernels themselves bound
values that lie on the device (row numbers, lengths).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import triton

from conduit.errors import ConfigError, FieldError

ALIGNMENT = 16
"""Required alignment of every tensor, in bytes, so that threads can move 16 bytes at a time."""
LARGEST = 2**31 - 1
"""Most programs of a launch, and most rows of a table."""
LARGEST_PART = 2**30
"""Most elements of a row, and most rows of a batch: rounded up to whole tiles, these numbers still fit 32 bits."""
VECTOR_BYTES = 16
"""Bytes that a thread moves at a time."""

_ITEM_BYTES = {"bool": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def is_interpreted() -> bool:
    """True when kernels run in Triton's interpreter, on host memory."""
    return bool(triton.knobs.runtime.interpret)


def dtype_of(tensor: Any) -> str:
    """Name of a tensor's dtype, as in conduit.field.DTYPES."""
    return str(tensor.dtype).removeprefix("torch.")


def item_bytes(dtype: str) -> int:
    """Bytes of one value of a dtype."""
    return _ITEM_BYTES.get(dtype) or int(dtype.lstrip("uint")) // 8


def check(
    tensor: Any,
    name: str,
    dtype: str | tuple[str, ...],
    shape: tuple[int | None, ...],
    *,
    like: Any = None,
    strided: bool = False,
) -> Any:
    """Refuse a tensor that a kernel cannot work with.

    Args:
        tensor: torch tensor.
        name: The argument's name, for the error.
        dtype: Allowed dtypes, one name or several, as in conduit.field.DTYPES; () for any.
        shape: Expected shape; None for an axis of any length.
        like: A tensor that must be on the same device.
        strided: Whether rows may have gaps between them (with a stride of a multiple of 16 bytes if the row's size is one). Each row
            must be contiguous.

    Returns:
        The tensor.

    Raises:
        FieldError: The tensor does not fit; the message says why.
    """
    if not hasattr(tensor, "data_ptr"):
        raise FieldError(f"Expected a torch tensor, got {type(tensor).__name__}", at=name)
    wanted = (dtype,) if isinstance(dtype, str) else dtype
    if wanted and dtype_of(tensor) not in wanted:
        raise FieldError(f"Expected {' or '.join(f'`{one}`' for one in wanted)}, got `{dtype_of(tensor)}`", at=name)
    got = tuple(tensor.shape)
    if len(got) != len(shape) or any(want is not None and want != have for want, have in zip(shape, got, strict=True)):
        text = ", ".join("any" if want is None else str(want) for want in shape)
        raise FieldError(f"Expected shape [{text}], got {list(got)}", at=name)
    if like is not None and tensor.device != like.device:
        raise FieldError(
            f"Expected a tensor on {like.device}, as the others, got one on {tensor.device}: move it", at=name
        )
    row = tensor[0] if strided and tensor.dim() and len(tensor) else tensor
    if not row.is_contiguous() or (strided and tensor.dim() and tensor.stride(0) < row.numel() and len(tensor) > 1):
        raise FieldError(
            f"Expected contiguous {'rows' if strided else 'memory'}, got strides {tuple(tensor.stride())}: pass "
            "tensor.contiguous()",
            at=name,
        )
    if tensor.numel() and tensor.data_ptr() % ALIGNMENT:
        raise FieldError(
            f"Expected an address that is a multiple of {ALIGNMENT} bytes, got {tensor.data_ptr() % ALIGNMENT} more than "
            "one: pass a tensor of its own (tensor.clone()), not a view into another one",
            at=name,
        )
    if tensor.dim() and (len(tensor) > LARGEST or (len(tensor) and tensor[0].numel() > LARGEST_PART)):
        raise FieldError(
            f"Expected at most {LARGEST} rows of at most {LARGEST_PART} elements each, got {list(got)}", at=name
        )
    return tensor


def row_stride(tensor: Any) -> int:
    """Elements from one row of a checked column to the next."""
    return int(tensor.stride(0)) if tensor.dim() else 1


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that a wrapper requested.

    Attributes:
        kernel: The jit function.
        grid: Number of programs.
        args: Its arguments in order.
        meta: Its constants by name.
        options: Compile options: warps, registers, no fused multiply-add.
    """

    kernel: Any
    grid: int
    args: tuple[Any, ...]
    meta: dict[str, Any]
    options: dict[str, Any]


_records: list[list[Launch]] = []


@contextlib.contextmanager
def recorded() -> Generator[list[Launch]]:
    """Record the wrappers' launches in this block instead of making them; tensors may then be on any device."""
    _records.append([])
    try:
        yield _records[-1]
    finally:
        _records.pop()


def _tensors(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _tensors(value)
        elif hasattr(value, "data_ptr"):
            yield value


def launch(kernel: Any, grid: int, *args: Any, num_warps: int, max_registers: int | None = None, **meta: Any) -> None:
    """Launch a kernel on the stream of its first tensor's device; a grid of 0 launches nothing.

    Multiply-adds are not fused, so that results do not depend on the Triton release, and equal the CPU's where the documentation says so.

    Args:
        kernel: The jit function.
        grid: Number of programs, on the axis whose limit is 2^31 - 1.
        args: Its arguments in order.
        num_warps: Warps per program.
        max_registers: Most registers per thread, for kernels that need fewer than the compiler would use; None for no limit.
        meta: Its constants by name.

    Raises:
        FieldError: A tensor is on a device without kernels.
        ConfigError: There are more programs than a launch can have.
    """
    if grid > LARGEST:
        raise ConfigError(f"Expected at most {LARGEST} programs, got {grid}: make the batch smaller")
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": False}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    if _records:
        if grid:
            _records[-1].append(Launch(kernel, grid, args, meta, options))
        return
    device = next(_tensors(args)).device
    if device.type != "cuda" and not is_interpreted():
        raise FieldError(
            f"Expected tensors on a CUDA device, got {device}: the CPU has kernels of its own (conduit.kernels), and "
            "TRITON_INTERPRET=1, set before the first import, runs these without a GPU, slowly"
        )
    if grid == 0:
        return
    if device.type != "cuda":
        kernel[(grid,)](*args, **meta, **options)
        return
    import torch

    with torch.cuda.device(device):
        kernel[(grid,)](*args, **meta, **options)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n, for n of at least 1."""
    return 1 << (n - 1).bit_length()


def tiles(n: int, size: int) -> int:
    """Number of tiles of a size that cover n."""
    return -(-n // size)


def as_words(tensor: Any) -> Any:
    """A view that Triton can take a pointer of: bools as bytes."""
    import torch

    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
