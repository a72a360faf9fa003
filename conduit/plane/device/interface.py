"""What batches on a device need of it. `conduit.plane.device.cuda` is the one that is meant; `host` runs the same code here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

Tensor = Any
"""A torch tensor; torch ships types, but is imported only where a device is in use."""


class Event(ABC):
    """A point in a stream's work.

    Attributes:
        stream: Number of that stream: of two events of one stream the later one is behind the earlier.
    """

    stream: int = 0

    @abstractmethod
    def passed(self) -> bool:
        """True once all work before it is done; never waits.

        Raises:
            LostDevice: The device does not work any more.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait on the host until it has passed.

        Raises:
            LostDevice: The device does not work any more.
        """


class Stream(ABC):
    """Work beside that of the current stream: copies from host memory into the pool."""

    @abstractmethod
    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        """Copy each pair's second tensor (host) into its first (device) once all of `after` have passed; never waits for the copies.

        Returns:
            An event behind the last copy.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait until all work of this stream is done, and let it go. Idempotent."""


class Device(ABC):
    """Memory and streams of one device.

    Attributes:
        place: What torch calls it, such as "cuda:0".
    """

    place: str

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes of device memory that are free now."""

    @abstractmethod
    def empty(self, size: int) -> Tensor:
        """uint8 [size] on the device, uninitialised; its address is a multiple of 128."""

    @abstractmethod
    def pinned(self, size: int) -> Tensor:
        """uint8 [size] in host memory that the device copies from by itself; its address is a multiple of 128.

        Raises:
            NoPinnedMemory: The system does not lock so much memory.
        """

    @abstractmethod
    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy pinned memory to the device in the order of the current stream, without waiting."""

    @abstractmethod
    def record(self) -> Event:
        """An event behind everything that the current stream was given so far."""

    @abstractmethod
    def stream(self, after: Event) -> Stream:
        """A stream of its own, whose work begins behind an event.

        Memory from `empty` may still be in use by what the current stream was given before it was asked for: whoever works in such
        memory on a stream of its own hands in an event that was recorded behind `empty`.
        """

    @abstractmethod
    def register(self, address: int, size: int) -> str:
        """Register host memory, of at least one byte, so that the device reads it by itself.

        Returns:
            "" when it is registered, otherwise why it cannot be.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register`; the device must have finished reading."""

    @abstractmethod
    def mapped(self, address: int, size: int) -> Tensor:
        """uint8 [size]: registered host memory as a tensor on the device, without a copy."""

    @abstractmethod
    def guard(self) -> AbstractContextManager[None]:
        """Around launches: what the device reports in the block is raised as LostDevice."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` twice, and return what launches the same work again, with all addresses as they were.

        `work` must allocate nothing that outlives it, and wait for nothing.
        """


def columns_in(
    memory: Tensor, base: int, places: dict[str, tuple[int, int, str, tuple[int, ...]]], rows: int
) -> dict[str, Tensor]:
    """Columns that lie in one block of device memory.

    Args:
        memory: uint8 [size].
        base: Offset of byte 0 of `memory` in the terms of `places`.
        places: {name: offset of row 0, bytes from row to row, torch dtype, shape of a row}.
        rows: Rows of each.

    Returns:
        {name: tensor [rows, *shape]}, rows as far apart as said.
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
