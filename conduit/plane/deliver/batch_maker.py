"""Batch makers: a plan, a sampler, and the job that fills a buffer. A maker does not wait, keeps no counts and has no name.

The bytes of a batch depend only on the maker's inputs: the plan with its window, the random counters (seed and number of the
batch, `prepare`), and the table's pages as the sampler lists them at the call. The same inputs give the same bytes.

A batch is made in one call (`fill`) or in two. `draw` finds rows, windows, keys, flags, returns and probabilities, and reads none of
the stored fields that are only copied. `gather` reads the fields of all slots or of listed ones. Between the two calls, `drawn`
copies the places of the samples, and two such copies can be compared: a batch that was made early can be drawn again later with
the same counters, and only the slots that differ are gathered again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit.contracts.sampler import Sampler
from conduit.errors import ConfigError
from conduit.kernels.cpu.windows import WINDOW_CURRENT, WINDOW_OLDEST
from conduit.kernels.spec.plan import Plan
from conduit.native.jit import entry
from conduit.plane.deliver import counted_deliveries, fill
from conduit.plane.deliver.batch import Batch, Wrap, batch_of
from conduit.plane.deliver.batch_job import BatchJob, Scratch
from conduit.plane.deliver.buffers import Buffer
from conduit.plane.deliver.transform_state import Transforming
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

_BLOCK_BYTES = 1 << 20
_SHORTEST_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Drawn:
    """A copy of the places of a batch's samples, as they were drawn.

    Attributes:
        pages, generations: int64 [B], the page of each sample and the page's generation at the draw.
        index: {kind of rows that an output reads: int64 [B, *lanes]}, physical rows; -1 means zeros.
    """

    pages: Array
    generations: Array
    index: dict[str, Array]

    def differing(self, other: Drawn) -> Array:
        """Slots whose samples differ in rows, window or generation, int64 [n], in order.

        Args:
            other: A draw of a maker with the same plan.
        """
        differs = (self.pages != other.pages) | (self.generations != other.generations)
        for name, rows in self.index.items():
            differs |= (rows != other.index[name]).reshape(len(rows), -1).any(1)
        return np.flatnonzero(differs)


class BatchMaker:
    """Fills buffers with batches of one plan. For use by one thread.

    Args:
        table: The table.
        plan: The plan of a batch.
        sampler: Draws the batches; `sampler.batch` is the number of the batch that is drawn.
        seed: Seed of the plan's own random numbers, such as the moves of random_shift; 64 bits.
        schema: The table's schema, with the names that fields have in the batch; None for the table's names.
        wrap: Makes the delivered value of a buffer's array.

    Attributes:
        plan: The plan of a batch.
        sampler: Draws the batches.
        scratch: Places of the samples, and counts of rows that were refused as too old.
        prepares: Whether `prepare` has anything to do.
        settles: Whether `hand_out` has anything to do.

    Raises:
        ConfigError: The plan normalizes a field of which the table keeps no statistics.
    """

    def __init__(
        self,
        table: TableView,
        plan: Plan,
        sampler: Sampler,
        seed: int,
        *,
        schema: Schema | None = None,
        wrap: Wrap = np.ndarray.view,
    ) -> None:
        self.plan, self.sampler = plan, sampler
        self._table, self._seed = table, seed
        self._schema = table.layout.schema if schema is None else schema
        self._wrap = wrap
        self._transforming = Transforming(table, plan, seed)
        self.scratch = Scratch(plan)
        self._block = min(plan.batch_size, max(_SHORTEST_BLOCK, _BLOCK_BYTES // max(1, plan.sample_bytes)))
        self._is_counted = int(table.descriptor[w.VIEW_SAMPLED // 8]) != 0
        self._deliver = entry(counted_deliveries.fill_counted if self._is_counted else fill.fill)
        self._finish = sampler.finish
        self._inspects = self._transforming.inspects
        self.prepares = self._transforming.prepares
        self.settles = self._is_counted or self._inspects

    def open_buffer(self, beside: Buffer | None = None) -> Buffer:
        """A buffer for this maker to fill.

        Args:
            beside: A buffer of another maker whose memory the new buffer shares; both plans have the same arrays.
        """
        buffer = Buffer(self.plan, beside)
        buffer.given(self._job_of(buffer, self.plan, self.scratch))
        return buffer

    def _job_of(self, buffer: Buffer, plan: Plan, scratch: Scratch) -> BatchJob:
        return BatchJob(self._table, plan, scratch, self._transforming, self.sampler, self._block, buffer.arrays)

    def prepare(self, number: int) -> None:
        """Prepare batch `number`: set the random counters of its transforms, and read the statistics once."""
        self._transforming.before(number)

    def bound(self, buffer: Buffer, current: int, oldest: int) -> None:
        """Refuse rows of policy versions below `oldest` from now on, and count them by their distance from `current`."""
        window = buffer.job.window
        window[WINDOW_CURRENT // 8], window[WINDOW_OLDEST // 8] = current, oldest

    def fill(self, buffer: Buffer) -> bool:
        """Draw and gather a batch; False when there is nothing to draw. The arrays are undefined then.

        Raises:
            FieldError: A transform refused a stored value; the drawn rows have been given back.
        """
        if self._deliver(buffer.job_address) < 0:
            return False
        try:
            if buffer.part is None:
                self._finish(buffer.arrays)
            else:
                self._finish(buffer.arrays, buffer.part[0], buffer.part[1] - buffer.part[0])
            if self._inspects:
                self._inspect(buffer)
        except BaseException:
            self.give_back(buffer)
            raise
        return True

    def draw(self, buffer: Buffer) -> bool:
        """Draw a batch and gather nothing; False when there is nothing to draw.

        Afterwards the keys, the window's columns (flags, lengths, returns) and the sampler's columns belong to this draw; the other
        arrays are unchanged.

        Raises:
            ConfigError: The table has max_times_sampled: there, rows are taken when they are gathered.
        """
        self._refuse_counted()
        if not buffer.job.draw():
            return False
        self._weigh(buffer)
        return True

    def drawn(self, buffer: Buffer) -> Drawn:
        """The places of the samples that were last drawn into `buffer`."""
        scratch = buffer.job.scratch
        index = {name: rows.copy() for name, rows in scratch.index.items()}
        return Drawn(scratch.pages.copy(), scratch.generations.copy(), index)

    def gather(self, buffer: Buffer, slots: Array | None = None) -> bool:
        """Gather the last draw. Slots whose rows a writer has overwritten since are drawn again, as in `fill`.

        Args:
            buffer: The buffer of the draw.
            slots: int64 [n], the slots to gather, each once; None for all. The other slots have been gathered before.

        Returns:
            False when a slot had to be drawn again and there was nothing to draw.

        Raises:
            FieldError: A transform refused a stored value.
            ConfigError: The table has max_times_sampled.
        """
        self._refuse_counted()
        before = buffer.job.redrawn
        if not self._gather(buffer, slots):
            return False
        if buffer.job.redrawn != before:
            self._weigh(buffer)
        if self._inspects:
            self._inspect(buffer)
        return True

    def _gather(self, buffer: Buffer, slots: Array | None) -> bool:
        if slots is None:
            first, end = buffer.part or (0, self.plan.batch_size)
            buffer.job.begin_packed(buffer.arrays, first, end)
            slots = np.arange(first, end)
        return buffer.job.gather(slots)

    def _weigh(self, buffer: Buffer) -> None:
        """Write the sampler's columns of a batch."""
        if buffer.part is None:
            self._finish(buffer.arrays)
        else:
            self._finish(buffer.arrays, buffer.part[0], buffer.part[1] - buffer.part[0])

    def _inspect(self, buffer: Buffer) -> None:
        """Look for values that a transform refuses."""
        slots = slice(None) if buffer.part is None else slice(*buffer.part)
        self._transforming.after(buffer.arrays, buffer.job.scratch.index, buffer.job.operations, slots)

    def _refuse_counted(self) -> None:
        if self._is_counted:
            raise ConfigError(
                f"Expected a table without max_times_sampled to draw and gather apart, table {self._table.layout.name!r} has it: "
                "its rows are taken when they are gathered, make whole batches"
            )

    def batch(self, buffer: Buffer, number: int) -> Batch:
        """Run the steps on the whole batch, and return a buffer's contents as batch `number`.

        Raises:
            FieldError: A step refuses the batch.
        """
        buffer.take()
        batch = batch_of(buffer, self._wrap, self._schema)
        if self.plan.batchwise:
            batch._transform(self._transforming, number)  # noqa: SLF001 - hidden from who reads the batch
        return batch

    def hand_out(self, buffer: Buffer) -> None:
        """Record that the batch in a buffer is delivered: count its rows' deliveries if the table does, and update statistics."""
        if self._is_counted:
            entry(counted_deliveries.hand_out)(buffer.job_address)
        if self._inspects:
            self._transforming.deliver()

    def give_back(self, buffer: Buffer) -> None:
        """Record that the batch in a buffer is not delivered: other loaders may deliver its rows."""
        if self._is_counted:
            entry(counted_deliveries.give_back)(buffer.job_address)

    def close(self) -> None:
        """Release resources that this maker alone uses; its buffers must be free. Idempotent."""
