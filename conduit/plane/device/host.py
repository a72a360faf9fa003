"""The machine's own memory as a device: the host and Triton's interpreter run every step that a CUDA device runs.

It is slow, and meant for trying and testing programs on machines without a GPU. The current stream is the calling thread; every other
stream is a thread of its own, so copies into the pool overlap with other work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from conduit.contracts.device import Device, Event, Stream, Tensor
from conduit.errors import MissingDevice

_ALIGNMENT = 128


class _Done(Event):
    """An event of the calling thread. It has passed: the thread has done all earlier work."""

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        return


class _Work(Event):
    stream = 1

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def passed(self) -> bool:
        return self._future.done() and self._future.result() is None

    def wait(self) -> None:
        self._future.result()


class _Thread(Stream):
    def __init__(self, after: Event) -> None:
        self._thread = ThreadPoolExecutor(1, "conduit-copies")
        self._thread.submit(after.wait)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        def work() -> None:
            for event in after:
                event.wait()
            for target, source in pairs:
                target.copy_(source)

        return _Work(self._thread.submit(work))

    def close(self) -> None:
        self._thread.shutdown()


class HostDevice(Device):
    """Host memory, used as a device.

    Args:
        memory: Initial value of `free_bytes`: the most that a pool may take.

    Raises:
        MissingDevice: Triton does not run its interpreter: set TRITON_INTERPRET=1 before Triton is first imported.
    """

    place = "cpu"

    def __init__(self, memory: int = 1 << 30) -> None:
        from conduit.kernels.gpu.launch import is_interpreted

        if not is_interpreted():
            raise MissingDevice(
                "Expected Triton to interpret kernels on host memory, it compiles them for a GPU: set TRITON_INTERPRET=1 in the "
                'environment before Triton is first imported, or use device="cuda"'
            )
        self._memory = memory
        self.registered: dict[int, int] = {}

    def free_bytes(self) -> int:
        """The bytes of `memory` that are not allocated."""
        return self._memory

    def _aligned(self, size: int) -> Tensor:
        import torch

        whole = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        start = -whole.data_ptr() % _ALIGNMENT
        return whole[start : start + size]

    def empty(self, size: int) -> Tensor:
        """Host memory."""
        return self._aligned(size)

    def pinned(self, size: int) -> Tensor:
        """Host memory."""
        return self._aligned(size)

    def upload(self, target: Tensor, source: Tensor) -> None:
        """A copy."""
        target.copy_(source)

    def record(self) -> Event:
        """An event that has passed: the calling thread has done all earlier work."""
        return _Done()

    def stream(self, after: Event) -> Stream:
        """A thread that copies."""
        return _Thread(after)

    def register(self, address: int, size: int) -> str:
        """Adds the range to `registered`."""
        if size < 1 or address in self.registered:
            return f"{size} bytes at {address:#x} cannot be registered, or are already"
        self.registered[address] = size
        return ""

    def unregister(self, address: int) -> None:
        """Removes the range from `registered`."""
        del self.registered[address]

    def mapped(self, address: int, size: int) -> Tensor:
        """The same memory; the caller keeps it alive."""
        import torch

        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)

    def guard(self) -> AbstractContextManager[None]:
        """An empty context: host memory reports no errors."""
        return nullcontext()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs the work and returns it: there is nothing to capture."""
        work()
        work()
        return work
