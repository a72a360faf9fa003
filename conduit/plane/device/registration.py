"""A process's mapping of a table, registered with a device once, however many loaders read it."""

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
    """One registered range: what it is registered with, and how many hold it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.holders = 1


_held: dict[tuple[int, str], _Held] = {}
"""By address and device: memory that one device has registered is refused to another one of the same process."""
# a registration may be collected while this thread holds it
_mutex = threading.RLock()
renew_in_child(__name__, "_mutex", threading.RLock)


class Registration:
    """A hold on the registered memory of a table's columns. It keeps the mapping alive; the last one unregisters.

    Attributes:
        start: Offset in the segment at which it begins.
        size: Bytes, more than zero.
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
        """Let go; the device must have finished reading. Idempotent."""
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
        if hasattr(self, "_open") and not sys.is_finalizing():  # the kernel undoes it then
            with contextlib.suppress(DeviceError):
                self.close()
