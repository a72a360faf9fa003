"""One table's loader inside a mixed loader (plane.deliver.mixed): it fills its table's slots of each batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conduit.plane.deliver.batch import Batch
from conduit.plane.deliver.buffers import Buffer
from conduit.plane.deliver.loader import Loader, LoaderStats
from conduit.plane.deliver.shared_buffers import Share
from conduit.sampling.drawable import Drawable
from conduit.sampling.prioritized import WEIGHTS
from conduit.sampling.uniform import Uniform
from conduit.store.tables.view import TableView


class MixedPart(Loader):
    """One table's loader inside a mixed loader; other parts fill the other slots of the same batches."""

    def __init__(self, table: TableView, *, share: Share, **options: Any) -> None:
        super().__init__(table, share=share, **options)
        self._rows = 0
        self._drawable: Drawable | None = None
        if isinstance(self._sampler, Uniform) and WEIGHTS[0] in share.extra:
            self._drawable = Drawable(table)
        if not share.buffers:
            share.buffers = self._ring.buffers

    def settle(self) -> None:
        """Count the references to the shared arrays now as the buffers' own; further ones mean that a buffer is in use."""
        for buffer in self._ring.buffers:
            buffer.settle()

    def free_buffer(self, timeout: float | None) -> tuple[Buffer, int | None]:
        """A free buffer and its number in the ring; the number is None for a buffer that was made for this batch.

        Raises:
            BuffersBusy: No buffer is free.
        """
        buffer, own = self._ring.take(self._timeout if timeout is None else timeout), self._ring.buffers
        return buffer, own.index(buffer) if buffer in own else None

    def beside(self, first: Buffer, number: int | None) -> Buffer:
        """This table's buffer that shares the memory of the first part's buffer; `number` is from `free_buffer`."""
        return self._ring.fresh(first) if number is None else self._ring.buffers[number]

    def draw(self, buffer: Buffer, first: int, end: int, timeout: float | None) -> None:
        """Fill the slots [first, end) of a buffer.

        Raises:
            DataTimeout: Too few rows came.
            FieldError: A transform refused a stored value.
        """
        buffer.narrow(first, end)
        if self._maker.prepares:
            self._maker.prepare(self._sampler.batch)
        self._wanted = end - first
        if not self._attempt(buffer):
            self._wait_for_rows(buffer, timeout)
        if self._drawable is not None:
            # the draw is uniform, so the importance weights are 1
            buffer.arrays["weights"][first:end] = 1.0
            # the count may have changed since the draw, by writers; it is 1 at least
            buffer.arrays["probabilities"][first:end] = 1.0 / max(
                1, self._drawable.count(buffer.job.window.ctypes.data)
            )

    def batch_of(self, buffer: Buffer) -> Batch:
        """The batch in a buffer whose slots have all been filled."""
        return self._maker.batch(buffer, self._sampler.batch)

    def cancel(self, buffer: Buffer) -> None:
        """Give back the rows drawn into a buffer: neither the table's limiter nor the rows' delivery counts include them."""
        self._maker.give_back(buffer)
        if self._gate is not None:
            self._gate.cancel()

    def advance(self, buffer: Buffer, rows: int) -> None:
        """Record the delivery of the batch in a buffer, with `rows` rows of this table, and go on to the next batch."""
        number = self._sampler.batch + 1
        self._maker.hand_out(buffer)
        if self._gate is not None:
            self._gate.deliver(self._sampler.batch_at, number)
        self._batches += 1
        self._rows += rows
        self._sampler.batch = number

    @property
    def stats(self) -> LoaderStats:
        """Counts since the loader was opened; rows are those of this table."""
        return replace(super().stats, rows=self._rows)
