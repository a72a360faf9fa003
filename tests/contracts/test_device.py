"""A device of numpy arrays, and broken ones that the suite must catch; tests/gpu/device runs the suite on those that Conduit has."""

import contextlib
import ctypes
import threading

import numpy as np
import pytest

from conduit.contracts.device import Device, Event, Stream
from conduit.testing.suites.contract import failures
from conduit.testing.suites.device import DeviceTests


class Passed(Event):
    def passed(self):
        return True

    def wait(self):
        pass


class Copies(Event):
    """An event behind copies that a thread makes."""

    stream = 1

    def __init__(self):
        self.done = threading.Event()

    def passed(self):
        return self.done.is_set()

    def wait(self):
        self.done.wait()


class Threads(Stream):
    """Starts a thread for each call; each waits for the one before it."""

    def __init__(self, after):
        self.last = after
        self.threads = []

    def copy(self, pairs, after):
        event, before = Copies(), (self.last, *after)

        def work():
            for one in before:
                one.wait()
            for target, source in pairs:
                target[:] = source
            event.done.set()

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()
        self.last = event
        return event

    def close(self):
        for thread in self.threads:
            thread.join()


class NumpyDevice(Device):
    """Arrays in host memory; everything but copies of streams is done when it is asked for."""

    place = "numpy"
    streams = Threads

    def __init__(self):
        self.registered = set()

    def free_bytes(self):
        return 1 << 30

    def empty(self, size):
        memory = np.empty(size + 128, np.uint8)
        start = -memory.ctypes.data % 128
        return memory[start : start + size]

    def pinned(self, size):
        return self.empty(size)

    def upload(self, target, source):
        target[:] = source

    def record(self):
        return Passed()

    def stream(self, after):
        return self.streams(after)

    def register(self, address, size):
        if size < 1:
            return "no bytes"
        if address in self.registered:
            return "it is registered already"
        self.registered.add(address)
        return ""

    def unregister(self, address):
        self.registered.remove(address)

    def mapped(self, address, size):
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def guard(self):
        return contextlib.nullcontext()

    def capture(self, work):
        work()
        work()
        return work


class NumpyTests(DeviceTests):
    kind = NumpyDevice

    def make(self):
        return self.kind()

    def address(self, tensor):
        return tensor.ctypes.data

    def read(self, tensor):
        return tensor.copy()

    def write(self, tensor, values):
        tensor[:] = values

    def copy(self, target, source):
        target[:] = source


class TestNumpyDevice(NumpyTests):
    pass


class Unaligned(NumpyDevice):
    """Takes memory as numpy gives it."""

    def empty(self, size):
        return np.empty(size + 16, np.uint8)[16:]


class Eager(Threads):
    """Its events pass when copies are asked for."""

    def copy(self, pairs, after):
        held = threading.Event()
        thread = threading.Thread(target=lambda: (held.wait(0.2), super(Eager, self).copy(pairs, after)))
        thread.start()
        self.threads.append(thread)
        return Passed()


class Leaving(Threads):
    """Is closed while copies are made."""

    def copy(self, pairs, after):
        slow = Copies()
        timer = threading.Timer(0.2, slow.done.set)
        timer.start()
        return super().copy(pairs, (*after, slow))

    def close(self):
        pass


class Backwards(Threads):
    """Makes the copies of a call in another order."""

    def copy(self, pairs, after):
        return super().copy(pairs[::-1], after)


class Snapshotting(NumpyDevice):
    """Maps a copy of registered memory."""

    def mapped(self, address, size):
        return super().mapped(address, size).copy()


class Idle(NumpyDevice):
    """Has done the work twice, and takes that for enough."""

    def capture(self, work):
        super().capture(work)
        return lambda: None


class Swallowing(NumpyDevice):
    """Takes every error for the device's."""

    @contextlib.contextmanager
    def guard(self):
        try:
            yield
        except Exception as error:
            raise RuntimeError("the device reported an error") from error


def with_streams(kind):
    return type(kind.__name__, (NumpyDevice,), {"streams": kind})


@pytest.mark.parametrize(
    ("broken", "test", "why"),
    [
        (Unaligned, "test_memory_begins_at_multiples_of_128_bytes_and_belongs_to_one_tensor", "behind a multiple"),
        (
            with_streams(Eager),
            "test_copies_of_a_stream_are_there_when_their_event_has_passed",
            "an event has passed before its copies",
        ),
        (
            with_streams(Leaving),
            "test_closing_a_stream_waits_for_its_copies_and_is_idempotent",
            "a stream was closed before its copies were made",
        ),
        (
            with_streams(Backwards),
            "test_copies_of_one_call_and_of_later_ones_are_made_in_order",
            "copies were made in another order",
        ),
        (
            Snapshotting,
            "test_registered_memory_is_seen_by_the_device_without_a_copy",
            "the device does not see what the host has written",
        ),
        (
            Idle,
            "test_what_was_captured_launches_the_same_work_on_what_is_there_by_then",
            "launching again did not do the work",
        ),
        (Swallowing, "test_other_exceptions_leave_a_guard_as_they_are", "RuntimeError('the device reported an error')"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_suite_catches_a_device_that_breaks_its_contract(broken, test, why):
    class Broken(NumpyTests):
        kind = broken

    assert why in failures(Broken, test)[test]
