"""Conformance suite of the contract *device*."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from conduit.contracts.device import Device, Event, Tensor
from conduit.testing.suites.contract import Array, ContractTests

SIZES = (1, 127, 128, 4_096, 1 << 20)
_PATIENCE = 60.0


class DeviceTests(ContractTests):
    """Any device passes this. Tensors are torch's, unless a subclass says by `address`, `read`, `write` and `copy` what else they are."""

    def make(self) -> Device:
        """The device under test."""
        raise NotImplementedError

    def address(self, tensor: Tensor) -> int:
        """Address of a tensor's first byte."""
        return int(tensor.data_ptr())

    def read(self, tensor: Tensor) -> Array:
        """A copy of a tensor's bytes, uint8 [size], behind everything that the current stream was given."""
        values: Array = tensor.cpu().numpy().copy()
        return values

    def write(self, tensor: Tensor, values: Array) -> None:
        """Write the bytes of a tensor in host memory."""
        tensor.numpy()[:] = values

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy one tensor on the device into another, as work of the current stream."""
        target.copy_(source)

    def test_it_has_a_place_and_free_memory(self) -> None:
        device = self.make()
        assert isinstance(device.place, str)
        assert device.place
        assert device.free_bytes() > 0

    def test_memory_begins_at_multiples_of_128_bytes_and_belongs_to_one_tensor(self) -> None:
        device = self.make()
        for get in (device.empty, device.pinned):
            held = [(get(size), size) for size in SIZES * 2]
            spans = sorted((self.address(tensor), size) for tensor, size in held)
            for tensor, size in held:
                assert len(self.read(tensor)) == size, f"{get.__name__}({size}) gave {len(self.read(tensor))} bytes"
            for (start, size), (behind, _) in zip(spans, [*spans[1:], (1 << 63, 0)], strict=True):
                assert start % 128 == 0, f"{get.__name__}({size}) begins at {start:#x}, {start % 128} behind a multiple"
                assert start + size <= behind, f"{get.__name__}: two tensors share memory"

    def test_uploads_are_made_in_order(self) -> None:
        device = self.make()
        target = device.empty(1 << 16)
        sources = [self._pinned(device, _bytes(1 << 16, seed)) for seed in range(4)]
        for source in sources:
            device.upload(target, source)
        event = device.record()
        event.wait()
        assert np.array_equal(self.read(target), _bytes(1 << 16, 3)), "the last upload is not what is there"

    def test_an_event_that_was_waited_for_has_passed_and_stays_so(self) -> None:
        device = self.make()
        target, source = device.empty(1 << 20), self._pinned(device, _bytes(1 << 20))
        device.upload(target, source)
        first, second = device.record(), device.record()
        second.wait()
        assert first.passed(), "an earlier event of the stream has not passed"
        assert first.stream == second.stream, "two events of one stream have two numbers"
        for _ in range(3):
            assert second.passed(), "an event that was waited for has not passed"
            second.wait()

    def test_threads_may_wait_for_one_event(self) -> None:
        device = self.make()
        device.upload(device.empty(1 << 20), self._pinned(device, _bytes(1 << 20)))
        event = device.record()
        threads = [threading.Thread(target=event.wait, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE)
            assert not thread.is_alive(), "a thread waits on"

    def test_copies_of_a_stream_are_there_when_their_event_has_passed(self) -> None:
        device = self.make()
        targets = [device.empty(1 << 20) for _ in range(4)]
        stream = device.stream(device.record())
        for _ in range(5):
            pairs = [
                (target, self._pinned(device, _bytes(1 << 20, seed)))
                for seed, target in enumerate(targets, int(time.monotonic() * 1_000) % 1_000)
            ]
            event = stream.copy(pairs, (device.record(),))
            _wait_for(event)
            for target, source in pairs:
                assert np.array_equal(self.read(target), self.read(source)), "an event has passed before its copies"
        stream.close()

    def test_copies_of_one_call_and_of_later_ones_are_made_in_order(self) -> None:
        device = self.make()
        target = device.empty(4_096)
        first, second, third = (self._pinned(device, _bytes(4_096, seed)) for seed in range(3))
        stream = device.stream(device.record())
        one = stream.copy([(target, second), (target, first)], ())
        other = stream.copy([(target, third), (target, second)], (one,))
        other.wait()
        assert one.passed()
        assert one.stream == other.stream
        assert np.array_equal(self.read(target), self.read(second)), "copies were made in another order"
        stream.close()

    def test_closing_a_stream_waits_for_its_copies_and_is_idempotent(self) -> None:
        device = self.make()
        pairs = [(device.empty(1 << 20), self._pinned(device, _bytes(1 << 20, seed))) for seed in range(16)]
        stream = device.stream(device.record())
        event = stream.copy(pairs, ())
        stream.close()
        assert event.passed(), "a stream was closed before its copies were made"
        for target, source in pairs:
            assert np.array_equal(self.read(target), self.read(source)), (
                "a stream was closed before its copies were made"
            )
        stream.close()

    def test_registered_memory_is_seen_by_the_device_without_a_copy(self) -> None:
        device = self.make()
        memory = _pages(1 << 16)
        address = memory.ctypes.data
        assert device.register(address, memory.size) == ""
        tensor = device.mapped(address, memory.size)
        for seed in range(2):
            memory[:] = _bytes(memory.size, seed)
            assert np.array_equal(self.read(tensor), memory), "the device does not see what the host has written"
        reason = device.register(address, memory.size)
        assert reason, "memory was registered twice"
        device.unregister(address)
        assert device.register(address, memory.size) == "", "memory cannot be registered again"
        device.unregister(address)

    def test_no_bytes_cannot_be_registered(self) -> None:
        device = self.make()
        memory = _pages(1 << 12)
        assert device.register(memory.ctypes.data, 0), "no bytes were registered"
        assert device.register(memory.ctypes.data, memory.size) == ""
        device.unregister(memory.ctypes.data)

    def test_other_exceptions_leave_a_guard_as_they_are(self) -> None:
        device = self.make()
        came: object = None
        try:
            with device.guard():
                _fail()
        except Exception as error:
            came = error
        assert isinstance(came, KeyError), f"{came!r} came out of the guard"
        with device.guard():
            device.record().wait()

    def test_what_was_captured_launches_the_same_work_on_what_is_there_by_then(self) -> None:
        device = self.make()
        size = 4_096
        given, source, target = self._pinned(device, _bytes(size)), device.empty(size), device.empty(size)
        device.upload(source, given)
        runs = []

        def work() -> None:
            runs.append(1)
            self.copy(target, source)

        launch = device.capture(work)
        device.record().wait()
        assert len(runs) == 2, f"the work ran {len(runs)} times"
        assert np.array_equal(self.read(target), _bytes(size)), "capturing did not run the work"
        for seed in (1, 2):
            self.write(given, _bytes(size, seed))
            device.upload(source, given)
            launch()
            device.record().wait()
            assert np.array_equal(self.read(target), _bytes(size, seed)), "launching again did not do the work"

    def _pinned(self, device: Device, values: Array) -> Tensor:
        tensor = device.pinned(len(values))
        self.write(tensor, values)
        return tensor


def _fail() -> None:
    raise KeyError("mine")


def _wait_for(event: Event) -> None:
    """Ask until it has passed: what `wait` would not show."""
    end = time.monotonic() + _PATIENCE
    while not event.passed():
        assert time.monotonic() < end, "an event does not pass"
        time.sleep(0.0005)


def _bytes(size: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def _pages(size: int) -> Array:
    """Zeros that begin with a page of the system, as segments do."""
    memory: Any = np.zeros(size + 4_096, np.uint8)
    start = -memory.ctypes.data % 4_096
    found: Array = memory[start : start + size]
    return found
