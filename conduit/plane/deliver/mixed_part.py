"""The loader of one table of a mixture: it fills slots of batches that the loaders of other tables fill too (plane.deliver.mixed)."""

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
    """The loader of one table of a mixture; it fills slots of batches that others fill too."""

    def __init__(self, table: TableView, *, share: Share, **options: Any) -> None:
        super().__init__(table, share=share, **options)
        self._rows = 0
        self._drawable: Drawable | None = None
        if isinstance(self._sampler, Uniform) and WEIGHTS[0] in share.extra:
            self._drawable = Drawable(table)
        if not share.buffers:
            share.buffers = self._ring.buffers

    def settle(self) -> None:
        """Take the references to the shared arrays that there are now for the loaders' own."""
        for buffer in self._ring.buffers:
            buffer.settle()

    def free_buffer(self, timeout: float | None) -> tuple[Buffer, int | None]:
        """A buffer that nobody refers to, and its number; None for one with memory of its own.

        Raises:
            BuffersBusy: There is none.
        """
        buffer, own = self._ring.take(self._timeout if timeout is None else timeout), self._ring.buffers
        return buffer, own.index(buffer) if buffer in own else None

    def beside(self, first: Buffer, number: int | None) -> Buffer:
        """This table's buffer in the memory of the first one's, which has this number."""
        return self._ring.fresh(first) if number is None else self._ring.buffers[number]

    def draw(self, buffer: Buffer, first: int, end: int, timeout: float | None) -> None:
        """Fill the slots [first, end) of a buffer.

        Raises:
            DataTimeout: Too few rows came.
            FieldError: A stored value that a transform cannot take.
        """
        buffer.narrow(first, end)
        if self._maker.prepares:
            self._maker.prepare(self._sampler.batch)
        self._wanted = end - first
        if not self._attempt(buffer):
            self._wait_for_rows(buffer, timeout)
        if self._drawable is not None:
            # every row is as likely as any other: nothing to make up for
            buffer.arrays["weights"][first:end] = 1.0
            # a writer may have gone on since the draw, and rows may have gone
            buffer.arrays["probabilities"][first:end] = 1.0 / max(
                1, self._drawable.count(buffer.job.window.ctypes.data)
            )

    def batch_of(self, buffer: Buffer) -> Batch:
        """The batch whose slots have all been filled."""
        return self._maker.batch(buffer, self._sampler.batch)

    def cancel(self, buffer: Buffer) -> None:
        """What it has drawn into a buffer is not handed out: neither its table's limiter nor its rows' deliveries count it."""
        self._maker.give_back(buffer)
        if self._gate is not None:
            self._gate.cancel()

    def advance(self, buffer: Buffer, rows: int) -> None:
        """Go on to the next batch; of the one in a buffer it gave `rows`."""
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
