"""A process's mapping of a table, registered with a device once for all loaders that read it."""

from __future__ import annotations

import contextlib
import sys
import threading

from conduit.contracts.device import Device, Tensor
from conduit.errors import DeviceError
from conduit.forking import renew_in_child
from conduit.store.format.sizes import align
from conduit.store.tables.view import TableView

_PAGE = 4096


class _Held:
    """One registered range: its device, and the number of `Registration`s that hold it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.holders = 1


_held: dict[tuple[int, str], _Held] = {}
"""The registered ranges, by address and device. Memory that one device has registered cannot be registered with a second one."""
# reentrant, since a Registration may be garbage-collected while this thread holds the lock
_mutex = threading.RLock()
renew_in_child(__name__, "_mutex", threading.RLock)


class Registration:
    """A hold on the registered memory of a table's columns. It keeps the mapping alive; closing the last hold unregisters the memory.

    Attributes:
        start: Offset of the registered range in the segment.
        size: Its bytes, at least 1.
        refused: Why the memory could not be registered, or "".
    """

    def __init__(self, device: Device, table: TableView) -> None:
        self._segment = table.segment
        self._device = device
        self.start = min(table.layout.columns.values())
        self.size = align(table.layout.end, _PAGE) - self.start
        self._address = table.segment.base + self.start
        self._key = self._address, device.place
        self._open = False
        self.refused = ""
        with _mutex:
            held = _held.get(self._key)
            if held is None:
                self.refused = device.register(self._address, self.size)
                if self.refused:
                    return
                _held[self._key] = _Held(device)
            else:
                held.holders += 1
            self._open = True

    def memory(self) -> Tensor:
        """uint8 [size], the registered memory as the device sees it."""
        return self._device.mapped(self._address, self.size)

    def close(self) -> None:
        """Release the hold; the device must have finished reading. Idempotent."""
        with _mutex:
            if not self._open:
                return
            self._open = False
            held = _held[self._key]
            held.holders -= 1
            if held.holders == 0:
                del _held[self._key]
                held.device.unregister(self._address)

    def __del__(self) -> None:
        if hasattr(self, "_open") and not sys.is_finalizing():  # at exit the operating system undoes the registration
            with contextlib.suppress(DeviceError):
                self.close()
