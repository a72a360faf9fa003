"""A CUDA device, through torch: the current stream is torch's, memory comes from torch's allocators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

from conduit.arrays import import_torch
from conduit.contracts.device import Device, Event, Stream, Tensor
from conduit.errors import ConfigError, DeviceError, LostDevice, MissingDevice, NoPinnedMemory

_PORTABLE, _MAPPED = 1, 2
_ALREADY_REGISTERED = 712


@contextlib.contextmanager
def _guarded(place: str) -> Generator[None]:
    """Raise torch's errors about a device that does not work any more as LostDevice."""
    import torch

    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DeviceError | torch.OutOfMemoryError) or "CUDA" not in str(error):
            raise
        if "out of memory" in str(error):
            raise DeviceError(
                f"Expected {place} to have enough free memory, it reported: {error}. The device goes on working: lower "
                "batch_size, buffers or pool, or let other programs on it end"
            ) from error
        raise LostDevice(
            f"Expected {place} to go on working, it reported: {error}. Batches made since are not to be trusted; start a new "
            "process, and look at the driver's log (dmesg, nvidia-smi) before you go on"
        ) from error


class _CudaEvent(Event):
    def __init__(self, event: Any, place: str, stream: int) -> None:
        self._event, self._place, self.stream = event, place, stream

    def passed(self) -> bool:
        with _guarded(self._place):
            return bool(self._event.query())

    def wait(self) -> None:
        with _guarded(self._place):
            self._event.synchronize()

    def before(self, stream: Any) -> None:
        """Make a stream wait for the event, on the device."""
        stream.wait_event(self._event)


class _CudaStream(Stream):
    def __init__(self, place: str, after: Event) -> None:
        import torch

        self._place = place
        with _guarded(place):
            self._stream: Any = torch.cuda.Stream(device=place)  # type: ignore[no-untyped-call]
            self._wait_for((after,))

    def _wait_for(self, events: Sequence[Event]) -> None:
        """Make the stream wait for events, on the device."""
        for event in events:
            assert isinstance(event, _CudaEvent)  # noqa: S101 - for the type checker
            event.before(self._stream)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        import torch

        with _guarded(self._place), torch.cuda.stream(self._stream):
            self._wait_for(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _CudaEvent(event, self._place, self._stream.cuda_stream)

    def close(self) -> None:
        with _guarded(self._place):
            self._stream.synchronize()


class CudaDevice(Device):
    """One CUDA device.

    Args:
        place: "cuda", or "cuda:0" and so on; "cuda" is the current device.

    Raises:
        MissingExtra: torch or Triton is not installed, or too old.
        MissingDevice: There is no such device.
        ConfigError: It is not a CUDA device.
    """

    def __init__(self, place: str) -> None:
        torch = import_torch(f'device="{place}"', extra="gpu")
        kind, _, number = place.partition(":")
        if kind != "cuda" or (number and not number.isdecimal()):
            raise ConfigError(f"Expected device 'cpu', 'cuda' or 'cuda:0' and so on, got {place!r}")
        if not torch.cuda.is_available():
            built = (
                f"torch {torch.__version__} was built without CUDA"
                if torch.version.cuda is None
                else "it finds no driver"
            )
            raise MissingDevice(
                f"Expected a CUDA device for device={place!r}, torch finds none ({built}): install a torch built for CUDA and "
                "the NVIDIA driver, look at CUDA_VISIBLE_DEVICES, or use device='cpu'"
            )
        count = torch.cuda.device_count()
        index = int(number) if number else torch.cuda.current_device()
        if index >= count:
            raise MissingDevice(f"Expected one of {count} CUDA devices (cuda:0 to cuda:{count - 1}), got {place!r}")
        from conduit.kernels.gpu import launch

        if launch.is_interpreted():
            raise ConfigError(
                f"Expected Triton to compile for device={place!r}, it interprets: unset TRITON_INTERPRET and start anew"
            )
        self.place = f"cuda:{index}"

    def free_bytes(self) -> int:
        """The number from the driver."""
        import torch

        with _guarded(self.place):
            return int(torch.cuda.mem_get_info(self.place)[0])

    def empty(self, size: int) -> Tensor:
        """Memory of torch's caching allocator, whose blocks begin at multiples of 512."""
        import torch

        return torch.empty(size, dtype=torch.uint8, device=self.place)

    def pinned(self, size: int) -> Tensor:
        """Memory of torch's pinned allocator, whose blocks are whole pages."""
        import torch

        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, MemoryError) as error:
            # torch raises the same error for a limit on locked memory, for a full device, and for some lost devices
            if isinstance(error, RuntimeError) and not _is_about_memory(error):
                with _guarded(self.place):
                    raise
            raise NoPinnedMemory(
                f"Expected {size:,} bytes of host memory that is locked for {self.place}, the system gave none: {error}. Raise the "
                "limit on locked memory (`ulimit -l`), free memory, or lower batch_size or buffers"
            ) from error

    def upload(self, target: Tensor, source: Tensor) -> None:
        """On the current stream of the device."""
        import torch

        with _guarded(self.place), torch.cuda.device(self.place):
            target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        """On the current stream of the device."""
        import torch

        with _guarded(self.place):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            current = torch.cuda.current_stream(self.place)
            event.record(current)
        return _CudaEvent(event, self.place, current.cuda_stream)

    def stream(self, after: Event) -> Stream:
        """A CUDA stream."""
        return _CudaStream(self.place, after)

    def register(self, address: int, size: int) -> str:
        """cudaHostRegister, portable and mapped; the driver locks the memory, which takes about as long as a copy."""
        import torch

        if size < 1:
            # CUDA would keep the error, and later calls would report it
            return "no bytes"
        with torch.cuda.device(self.place):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE | _MAPPED))  # type: ignore[no-untyped-call]
        if code == 0:
            return ""
        # CUDA keeps the error, and the next launch would report it as its own: clear it
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.place).add_(1)
        known = (
            "another library of this process has registered it" if code == _ALREADY_REGISTERED else f"CUDA error {code}"
        )
        return f"{size:,} bytes cannot be registered: {known} (the limit on locked memory, `ulimit -l`, may be too low)"

    def unregister(self, address: int) -> None:
        """cudaHostUnregister, after all launched work is done."""
        import torch

        with _guarded(self.place), torch.cuda.device(self.place):
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def mapped(self, address: int, size: int) -> Tensor:
        """The registered memory under the host's address: with unified addressing, the device uses the same address."""
        import torch

        return torch.as_tensor(_Memory(address, size), device=self.place)

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Raises errors that CUDA reported, and that torch or Triton raise as RuntimeError, as DeviceError."""
        return _guarded(self.place)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures a CUDA graph. The work runs once before, so that all compilation and allocation is done."""
        import torch

        with _guarded(self.place), torch.cuda.device(self.place):
            beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                work()
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            # calls of other threads meanwhile, such as queries of events, are not captured. The stream is explicit, since torch's
            # default stream for captures belongs to the device that was captured on first
            with torch.cuda.graph(graph, stream=beside, capture_error_mode="thread_local"):
                work()
            graph.replay()
        replay: Callable[[], None] = graph.replay
        return replay


def _is_about_memory(error: RuntimeError) -> bool:
    """Whether an error of torch's pinned allocator means that there is no memory, or that the system does not lock it."""
    text = str(error).lower()
    return any(word in text for word in ("out of memory", "memory allocation", "not supported", "not permitted"))


class _Memory:
    """Memory as CUDA's array interface describes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
