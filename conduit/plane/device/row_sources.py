"""Which rows a device reads by itself: the contract `Residence`, and its two simplest implementations; the third is the pool, `Mirror`."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from conduit.contracts.device import Event, Tensor
from conduit.errors import DeviceError, Overwritten
from conduit.kernels.cpu.near_far import PL_BASE, PL_BYTES, PL_GENERATION, PL_ROWS, PL_TAIL
from conduit.plane.device.columns import columns_in
from conduit.plane.device.registration import Registration
from conduit.store.format import words as w
from conduit.store.format.sizes import row_stride
from conduit.store.tables.view import Lease, TableView

Array = np.ndarray[Any, Any]

BASE, GENERATION, ROWS, TAIL = (word // 8 for word in (PL_BASE, PL_GENERATION, PL_ROWS, PL_TAIL))


class Residence(ABC):
    """Pages of one table that a device can read without the host's help; such a page is "in place".

    `places` is valid from `settle` until `batched`. A page in place keeps the rows of its generation until the event given to
    `batched` has passed. The loader copies the rows of all other pages. For one thread at a time.

    Attributes:
        columns: {field, and "meta": tensor [rows, *shape] on the device}; row `places[page, BASE] + local` is row `local` of a page.
        places: int64 [pages, 4] (kernels.cpu.near_far.PL_*). For each page: the row in `columns` of its local row 0, or -1 if the
            page is not in place; its generation; n, if its first n rows are readable; and the local row from which on all rows up to
            the page's end are readable (kept final observations).
    """

    columns: dict[str, Tensor]
    places: Array

    @abstractmethod
    def refresh(self) -> None:
        """Bring more pages in place, without waiting. Called before a draw."""

    @abstractmethod
    def settle(self, pages: Array, generations: Array) -> None:
        """Update `places` for the pages of a draw.

        Args:
            pages: int64 [n], the page of each sample.
            generations: int64 [n], the page's generation at the draw.
        """

    @abstractmethod
    def batched(self, event: Event) -> None:
        """Record that all work that reads the pages in place has been launched; `event` comes after that work."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the device, and release everything. Idempotent."""


def no_places(pages: int) -> Array:
    """The value of `places` when no page is in place."""
    places = np.zeros((pages, PL_BYTES // 8), np.int64)
    places[:, BASE] = -1
    return places


def column_places(table: TableView) -> dict[str, tuple[int, int, str, tuple[int, ...]]]:
    """Where the columns lie in the segment: fields that are not ragged, and `meta` as four int32.

    Returns:
        {column: offset in the segment, bytes from row to row, torch dtype, shape of a row}.
    """
    layout = table.layout
    fields = [field for field in layout.schema.fields if not field.ragged]
    places = {field.name: (layout.columns[field.name], row_stride(field), field.dtype, field.shape) for field in fields}
    places["meta"] = layout.meta, w.META_BYTES, "int32", (w.META_BYTES // 4,)
    return places


class Nowhere(Residence):
    """No page is ever in place: all rows are copied by the host."""

    def __init__(self, table: TableView) -> None:
        self.columns = {}
        self.places = no_places(table.layout.pages)

    def refresh(self) -> None:
        """Does nothing."""

    def settle(self, pages: Array, generations: Array) -> None:
        """Does nothing: no page is in place."""

    def batched(self, event: Event) -> None:
        """Does nothing: the device read no page."""

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


class Registered(Residence):
    """Registered host memory: the device reads the table's own rows over the bus, without a copy before.

    A lease keeps writers from reusing a page. So the pages of a batch are leased until the batch's event has passed. A client has a
    limited number of leases, and `kept` of them are left to the program. The host copies the rows of pages that get no lease. So this
    works best for tables with few, large pages.

    Args:
        table: The table.
        registration: The table's memory, registered with the device.
        kept: Number of leases that are left to the program.
    """

    def __init__(self, table: TableView, registration: Registration, kept: int = 4) -> None:
        self._flying: list[tuple[Event, frozenset[int]]] = []
        self._leases: dict[int, Lease] = {}
        self._used: set[int] = set()
        self._table = table
        self._registration = registration
        self._most = w.HAZARDS_PER_PARTICIPANT - kept
        self.places = no_places(table.layout.pages)
        self.columns = columns_in(registration.memory(), registration.start, column_places(table), table.layout.rows)

    def refresh(self) -> None:
        """End the leases of pages that no unfinished batch reads."""
        while self._flying and self._flying[0][0].passed():
            self._flying.pop(0)
        reading = frozenset[int]().union(*(pages for _, pages in self._flying))
        for page in [page for page in self._leases if page not in reading]:
            self._leases.pop(page).end()
            self.places[page, BASE] = -1

    def settle(self, pages: Array, generations: Array) -> None:
        """Lease the drawn pages as long as there are leases, pages with the most samples first."""
        drawn, counts = np.unique(np.stack([pages, generations], 1), axis=0, return_counts=True)
        for page, generation in drawn[np.argsort(-counts, kind="stable")].tolist():
            if page not in self._leases and len(self._leases) < self._most:
                self._take(page, generation)
            if page in self._leases:
                self._used.add(page)

    def _take(self, page: int, generation: int) -> None:
        try:
            lease = self._table.lease(page, generation)
        except (Overwritten, BufferError):
            return
        rows = self._table.layout.page_rows
        self._leases[page] = lease
        self.places[page] = page * rows, generation, rows, rows

    def batched(self, event: Event) -> None:
        """Keep the leases until the event has passed."""
        self._flying.append((event, frozenset(self._used)))
        self._used = set()

    def close(self) -> None:
        """Wait for the unfinished batches, end the leases, and release the registration."""
        try:
            for event, _ in self._flying:
                event.wait()
        finally:
            self._flying = []
            for lease in self._leases.values():
                lease.end()
            self._leases = {}
            self.columns = {}
            self._registration.close()

    def __del__(self) -> None:
        # without this, the leases of a dropped loader would end by themselves, possibly before the device has read the pages
        if hasattr(self, "columns") and not sys.is_finalizing():
            with contextlib.suppress(DeviceError):
                self.close()
