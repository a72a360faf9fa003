"""Contract *device*: memory, streams and events of the device that batches are made on.

The words are CUDA's: a *stream* is work that is done in order, and beside that of other streams; the *current stream* is the one that
the caller's kernels are launched on. Host memory that passes for a device can do everything at once, and then has nothing to wait for.

Unless a method says otherwise, it may be called from any thread, as long as no other call on the same object runs at the same time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

Tensor = Any
"""A torch tensor; torch ships types, but is imported only where a device is in use."""


class Event(ABC):
    """A point in the work of a stream.

    Once it has passed it stays so. `passed` and `wait` may be called from several threads at the same time.

    Attributes:
        stream: Number of its stream: of two events of one stream the one that was made later passes no earlier.
    """

    stream: int = 0

    @abstractmethod
    def passed(self) -> bool:
        """True once all work before it is done. Never blocks.

        Raises:
            LostDevice: The device does not work any more.
        """

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread until it has passed; without a deadline, since a device that works gets there.

        Raises:
            LostDevice: The device does not work any more.
        """


class Stream(ABC):
    """A stream of its own: copies from host memory, beside the work of the current stream."""

    @abstractmethod
    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        """Copy each pair's second tensor (host) into its first (device), in order, once all of `after` have passed.

        Does not block: the copies may all lie ahead when it returns. The caller keeps both tensors alive and unchanged until the
        event has passed; until then the targets may hold anything.

        Returns:
            An event behind the last copy. It has passed only when all bytes are there.

        Raises:
            LostDevice: The device does not work any more; which copies were made is unknown.
        """

    @abstractmethod
    def close(self) -> None:
        """Block until all work of this stream is done, and let it go. Idempotent; `copy` must not be called behind it.

        Raises:
            LostDevice: The device does not work any more.
        """


class Device(ABC):
    """Memory and streams of one device.

    Attributes:
        place: What torch calls it, such as "cuda:0".
    """

    place: str

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes of device memory that are free now. An estimate: others take and give back memory at any time."""

    @abstractmethod
    def empty(self, size: int) -> Tensor:
        """uint8 [size] on the device, uninitialized; its address is a multiple of 128. It is freed with the tensor.

        Raises:
            Exception: What the device's library raises when there is not so much memory; nothing is allocated then.
        """

    @abstractmethod
    def pinned(self, size: int) -> Tensor:
        """uint8 [size] in host memory that the device copies from by itself, uninitialized; its address is a multiple of 128.

        Raises:
            NoPinnedMemory: The system does not lock so much memory; nothing is allocated then.
        """

    @abstractmethod
    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy pinned memory to the device, in the order of the current stream.

        Does not block: `source` must stay unchanged until an event that is recorded behind this call has passed.
        """

    @abstractmethod
    def record(self) -> Event:
        """An event behind everything that the current stream was given so far. Does not block."""

    @abstractmethod
    def stream(self, after: Event) -> Stream:
        """A stream of its own, whose work begins once an event has passed. Does not block.

        Memory from `empty` may still be in use by what the current stream was given before it was asked for: whoever works in such
        memory on a stream of its own hands in an event that was recorded behind `empty`.
        """

    @abstractmethod
    def register(self, address: int, size: int) -> str:
        """Register host memory, of at least one byte, so that the device reads it by itself. Takes about as long as a copy of it.

        Returns:
            "" when it is registered, otherwise a reason in words: the memory is registered already, or the device or the system
            refuses. Nothing has changed then.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register`. The caller has waited for everything that reads the memory; what was `mapped` is void behind this."""

    @abstractmethod
    def mapped(self, address: int, size: int) -> Tensor:
        """uint8 [size]: registered host memory as a tensor on the device, without a copy.

        The tensor keeps nothing alive. There is no order between the device's reads and writes of the host, but what events give.
        """

    @abstractmethod
    def guard(self) -> AbstractContextManager[None]:
        """A context for launches: what the device reports inside is raised as DeviceError; other exceptions leave it as they are.

        A device that does not work any more is LostDevice.
        """

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` twice, and return what launches the same work again.

        The function that is returned launches the operations of the last run on the same addresses, without running `work`'s
        Python: it reads what is at these addresses by then. `work` must allocate nothing that outlives it, and wait for nothing.
        Calls of this method must not overlap. Where it raises, `work` may have run in part, and the device can be used as before,
        unless the error is LostDevice.
        """
