"""The pool: a slab of device memory with copies of the table's newest pages.

The slab is divided into slots for one page each, and has the same columns as the table. A page that a writer is still filling is copied
in parts of at least an eighth of a page. A slot's rows are listed in `places` only after their copy is done and the page was found in
the same generation afterwards. So rows that a writer overwrote during the copy are dropped, and never read. A page replaces the
oldest page of the pool only if it is newer. Only `close` and `fill` wait for the device.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit.contracts.device import Device, Event, Tensor
from conduit.errors import CapacityError, ConfigError, DeviceError
from conduit.native.jit import entry
from conduit.numbers import whole
from conduit.plane.device.columns import columns_in
from conduit.plane.device.registration import Registration
from conduit.plane.device.row_sources import BASE, GENERATION, ROWS, Residence, column_places, no_places
from conduit.store.format import words as w
from conduit.store.format.sizes import align, parse_bytes
from conduit.store.pages import protocol
from conduit.store.pages.image import Extent, bytes_by_row, row_parts
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

_PARTS = 8
"""An open page is copied whenever one part in this many is new: each time costs a copy per column."""
MOST_FLYING = 16
"""Most pages whose copies are under way at a time: enough to use the whole bus, few enough that the newest pages come soon."""
_NEWEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of a page into a slot, done when the event has passed."""

    extent: Extent
    slot: int
    event: Event


class Mirror(Residence):
    """Pages in device memory.

    Args:
        device: The device.
        table: The table.
        size: Most bytes of the slab, as a number or as "8 GiB".
        registration: The registered memory of the table, if it is registered: the device then copies from it without the host.

    Attributes:
        slots: Number of pages that fit.
        words: int64 [pages, 16], the pages' words (store.format.words.PAGE_* // 8) at the last refresh.
        slot_of: int64 [pages], the slot that holds a page or is being filled with it, or -1.
        dropped: Number of copies that were dropped, because a writer took the page meanwhile.
        copied: Number of pages, or parts of them, that have been copied.
        refreshed: Number of calls of `refresh`; each call may change which page a slot holds.

    Raises:
        CapacityError: The slab has no room for a page, or is larger than the device's free memory.
        ConfigError: `size` is not a size.
    """

    def __init__(self, device: Device, table: TableView, size: str | int, registration: Registration | None) -> None:
        from conduit.kernels.gpu.launch import LARGEST

        self._closed = True
        self._table = table
        self._registration = registration
        self._page_rows = table.layout.page_rows
        sources = column_places(table)
        page_bytes = sum(self._page_rows * stride for _, stride, _, _ in sources.values())
        fits = _slots(size, page_bytes, len(sources), device)
        self.slots = min(table.layout.pages, fits, LARGEST // self._page_rows)
        self.places = no_places(table.layout.pages)
        self._flying: list[_Copy] = []
        self._reads: dict[int, Event] = {}
        places, end = {}, 0
        for name, (_, stride, dtype, shape) in sources.items():
            places[name] = end, stride, dtype, shape
            end = align(end + self.slots * self._page_rows * stride)
        self._memory = device.empty(end)
        # earlier work of the current stream may still use the allocated memory: copies begin after that work
        self._stream = device.stream(device.record())
        self._closed = False
        self.columns = columns_in(self._memory, 0, places, self.slots * self._page_rows)
        # copied as bytes with their padding: for rows with gaps the host would first make a copy without gaps
        self._targets = bytes_by_row(self._memory, _strides(places), self.slots * self._page_rows)
        self._sources = bytes_by_row(_host_memory(table), _strides(sources), table.layout.rows)
        self.slot_of = np.full(table.layout.pages, -1, np.int64)
        self._page_of = np.full(self.slots, -1, np.int64)
        self._ages = np.zeros(self.slots, np.int64)
        self.words = table.pages()
        self.dropped = self.copied = self.refreshed = 0

    def refresh(self) -> None:
        """List copies that are done, forget pages that writers took, and begin copies of new rows."""
        self.refreshed += 1
        entry(protocol.copy_words)(self._table.address, self.words.ctypes.data)
        self._land()
        states = self.words[:, w.PAGE_STATE // 8]
        kinds, generations = states & w.KIND_MASK, states >> w.GENERATION_SHIFT
        lives = (kinds == w.OPEN) | (kinds == w.SEALED)
        gone = (self.places[:, BASE] >= 0) & ~(lives & (generations == self.places[:, GENERATION]))
        under_way = {copy.extent.page for copy in self._flying}
        for page in np.flatnonzero(gone).tolist():
            self.places[page, BASE] = -1
            if page not in under_way:
                self._free(page)
        # the newest first: open pages, then sealed pages by age
        ages = np.where(kinds == w.OPEN, _NEWEST, self.words[:, w.PAGE_AGE // 8])
        committed = np.minimum(self.words[:, w.PAGE_COMMITTED // 8], self._page_rows)
        have = np.where(self.places[:, BASE] >= 0, self.places[:, ROWS], 0)
        least = np.where(kinds == w.OPEN, max(1, self._page_rows // _PARTS), 1)
        wanted = lives & (committed - have >= least)
        in_place = self.slot_of >= 0
        self._ages[self.slot_of[in_place]] = ages[in_place]
        candidates = np.flatnonzero(wanted)
        for page in candidates[np.argsort(-ages[candidates], kind="stable")].tolist():
            if len(self._flying) >= MOST_FLYING:
                return
            extent = Extent.of(page, self.words[page], self._page_rows)
            if page not in under_way and not self._begin(extent, int(ages[page])):
                return

    def _land(self) -> None:
        """List copies that are done in `places`, in the order of their stream."""
        while self._flying and self._flying[0].event.passed():
            copy = self._flying.pop(0)
            extent = copy.extent
            # if a writer had touched the copied rows, the page's state would differ
            if not self._table.images.is_current(extent):
                self.dropped += 1
                self.places[extent.page, BASE] = -1
                self._free(extent.page)
                continue
            tail = self._page_rows - extent.tail
            self.places[extent.page] = copy.slot * self._page_rows, extent.generation, extent.rows, tail
            self.copied += 1

    def _free(self, page: int) -> None:
        self._page_of[self.slot_of[page]] = -1
        self.slot_of[page] = -1

    def _slot(self, page: int, age: int) -> int:
        """A slot for a page: its own, a free one, or the slot of the oldest page if that page is older; otherwise -1."""
        if self.slot_of[page] >= 0:
            return int(self.slot_of[page])
        free = np.flatnonzero(self._page_of < 0)
        if len(free):
            return int(free[0])
        busy = [copy.slot for copy in self._flying]
        ages = self._ages.copy()
        ages[busy] = _NEWEST
        oldest = int(ages.argmin())
        if ages[oldest] >= age:
            return -1
        out = int(self._page_of[oldest])
        self.places[out, BASE] = -1
        self._free(out)
        return oldest

    def _begin(self, extent: Extent, age: int) -> bool:
        """Begin to copy the new rows of a page; False if the pool is full of newer pages."""
        page = extent.page
        slot = self._slot(page, age)
        if slot < 0:
            return False
        known = self.places[page, BASE] >= 0 and self.places[page, GENERATION] == extent.generation
        # the kept final observations of all committed rows are complete. Others may belong to rows of the next commit and be half
        # written, so all of them are copied anew each time
        parts = row_parts(self._page_rows, extent.rows, extent.tail, int(self.places[page, ROWS]) if known else 0)
        first, base = page * self._page_rows, slot * self._page_rows
        pairs = [
            (self._targets[name][base + part.start : base + part.stop], source[first + part.start : first + part.stop])
            for part in parts
            for name, source in self._sources.items()
        ]
        self.slot_of[page], self._page_of[slot], self._ages[slot] = slot, page, age
        event = self._stream.copy(pairs, tuple(self._reads.values()))
        self._flying.append(_Copy(extent, slot, event))
        return True

    def settle(self, pages: Array, generations: Array) -> None:
        """Does nothing: `places` is up to date already."""

    def batched(self, event: Event) -> None:
        """Make later copies into slots wait, on the device, for this event and for the last event of each other stream."""
        self._reads[event.stream] = event
        if len(self._reads) > 1:
            self._reads = {stream: one for stream, one in self._reads.items() if one is event or not one.passed()}

    def fill(self) -> None:
        """Copy until the pool is up to date, and wait for the device; for tests, and before a program begins."""
        while True:
            self.refresh()
            if not self._flying:
                return
            self._flying[-1].event.wait()

    @property
    def closed(self) -> bool:
        """True once the pool's memory is released."""
        return self._closed

    def close(self) -> None:
        """Wait for the copies and for all work that reads the pool, and release its memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._stream.close()
            for event in self._reads.values():
                event.wait()
        finally:
            self._flying, self._reads = [], {}
            self.columns, self._targets, self._memory = {}, {}, None
            self.places[:, BASE] = -1
            if self._registration is not None:
                self._registration.close()

    def __del__(self) -> None:
        # without this, the allocator could give the memory of a dropped mirror away before the last copies into it are done.
        # `_closed` is missing or True in a mirror whose constructor failed, which has no memory
        if not sys.is_finalizing() and not getattr(self, "_closed", True):
            with contextlib.suppress(DeviceError):
                self.close()


def _slots(size: str | int, page_bytes: int, columns: int, device: Device) -> int:
    """How many pages fit into a pool; refuses a pool that is larger than the device's free memory."""
    wanted = parse_bytes(size) if isinstance(size, str) else whole(size)
    if wanted is None:
        raise ConfigError(f"Expected a size such as '8 GiB', or bytes, got {size!r} - at pool")
    slots: int = (wanted - columns * 128) // page_bytes
    if slots < 1:
        raise CapacityError(
            f"Expected a pool of at least one page of this table, {page_bytes + columns * 128:,} bytes, got {wanted:,}: raise "
            "it, or create the table with a smaller page_rows - at pool"
        )
    free = device.free_bytes()
    if wanted > free:
        raise CapacityError(
            f"Expected a pool of at most the {free:,} bytes that are free on {device.place}, got {wanted:,}: lower it, or "
            "open the loader before other things take the memory - at pool"
        )
    return int(slots)


def _host_memory(table: TableView) -> Tensor:
    """The table's segment as a torch tensor, uint8, without a copy."""
    import torch

    return torch.from_numpy(table.segment.root)


def _strides(places: dict[str, tuple[int, int, str, tuple[int, ...]]]) -> list[tuple[str, int, int]]:
    """(column, offset of row 0, bytes from row to row)."""
    return [(name, offset, stride) for name, (offset, stride, *_) in places.items()]
