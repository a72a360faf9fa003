"""Contract *device*: memory, streams and events of the device that batches are made on.

The words are CUDA's. The work of a *stream* is done in order; works of different streams may overlap. The *current stream* is the stream
that the caller launches kernels on. An implementation over host memory (conduit.plane.device.host) may do all work at once; then its
events have always passed.

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

    An event that has passed stays passed. Several threads may call `passed` and `wait` at the same time.

    Attributes:
        stream: Number of its stream. Of two events of one stream, the later one does not pass before the earlier one.
    """

    stream: int = 0

    @abstractmethod
    def passed(self) -> bool:
        """Whether all work before the event is done. Never blocks.

        Raises:
            LostDevice: The device does not work any more.
        """

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread until the event has passed. There is no deadline: a working device finishes its work.

        Raises:
            LostDevice: The device does not work any more.
        """


class Stream(ABC):
    """A stream for copies from host memory, which may overlap with the work of the current stream."""

    @abstractmethod
    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        """Copy each pair's second tensor (host) into its first (device), in order, once all of `after` have passed.

        Does not block: none of the copies may have begun when it returns. The caller keeps both tensors alive and unchanged until the
        returned event has passed; until then the contents of the targets are undefined.

        Returns:
            An event after the last copy. It has passed only when all bytes are copied.

        Raises:
            LostDevice: The device does not work any more; which copies were made is unknown.
        """

    @abstractmethod
    def close(self) -> None:
        """Block until all work of this stream is done, and release the stream. Idempotent; `copy` must not be called afterwards.

        Raises:
            LostDevice: The device does not work any more.
        """


class Device(ABC):
    """Memory and streams of one device.

    Attributes:
        place: Its name in torch, such as "cuda:0".
    """

    place: str

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes of device memory that are free now. An estimate: other programs allocate and free memory at any time."""

    @abstractmethod
    def empty(self, size: int) -> Tensor:
        """uint8 [size] on the device, uninitialized; its address is a multiple of 128. It is freed with the tensor.

        Raises:
            Exception: The device's library has too little memory and raises its own error; nothing is allocated.
        """

    @abstractmethod
    def pinned(self, size: int) -> Tensor:
        """uint8 [size] of page-locked host memory, uninitialized; its address is a multiple of 128.

        Raises:
            NoPinnedMemory: The system does not lock so much memory; nothing is allocated.
        """

    @abstractmethod
    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy pinned memory to the device, in the order of the current stream.

        Does not block: `source` must stay unchanged until an event that is recorded after this call has passed.
        """

    @abstractmethod
    def record(self) -> Event:
        """An event after all work that the current stream has been given so far. Does not block."""

    @abstractmethod
    def stream(self, after: Event) -> Stream:
        """A new stream for copies, whose work begins once an event has passed. Does not block.

        Earlier work of the current stream may still use the memory that `empty` returns. To copy into such memory on a stream of its
        own, pass an event that was recorded after the call of `empty`.
        """

    @abstractmethod
    def register(self, address: int, size: int) -> str:
        """Register at least one byte of host memory, so that kernels read it directly. Takes about as long as a copy of it.

        Returns:
            "" if the memory is registered now. Otherwise nothing has changed, and the text is the reason: the memory was registered
            already, or the device or the system refuses.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register`. The caller has waited for all work that reads the memory; tensors from `mapped` are invalid afterwards."""

    @abstractmethod
    def mapped(self, address: int, size: int) -> Tensor:
        """uint8 [size]: registered host memory as a tensor on the device, without a copy.

        The tensor keeps nothing alive. Only events order the device's reads and the host's writes.
        """

    @abstractmethod
    def guard(self) -> AbstractContextManager[None]:
        """A context for launches: errors that the device reports inside are raised as DeviceError; other exceptions pass unchanged.

        If the device does not work any more, LostDevice is raised.
        """

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` twice, and return a function that launches the same work again.

        The returned function launches the operations of the second run on the same addresses, without running `work`'s Python; the
        operations read the values that lie at these addresses then. `work` must allocate nothing that outlives it, and must not
        wait. Calls of this method must not overlap. If it raises, `work` may have run in part; the device can be used as before,
        unless the error is LostDevice.
        """
