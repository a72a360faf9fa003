"""A loader's buffers, which take turns: the next one that nobody refers to, or what the loader does where there is none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from conduit.clock import Deadline
from conduit.kernels.cpu.deliver import JOB_REDRAWN
from conduit.plane.deliver.batch_maker import BatchMaker
from conduit.plane.deliver.buffers import Buffer
from conduit.plane.deliver.busy import OnBusy, refused, warn_of_copies
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

_BUSY_SLEEP = 0.0005


class BufferRing:
    """Buffers of one maker.

    Args:
        maker: What fills them.
        table: The table, which may be closed while somebody waits.
        beside: For each buffer the one in whose memory it lies, or None.
        on_busy: What is done when every buffer is in use.

    Attributes:
        buffers: Those whose memory is used again.
        waited_s: Seconds spent waiting for one of them.
        allocated: Buffers that were made for one batch alone.
    """

    def __init__(self, maker: BatchMaker, table: TableView, beside: Sequence[Buffer | None], on_busy: OnBusy) -> None:
        self._maker, self._table, self._on_busy = maker, table, on_busy
        self.buffers = [maker.open_buffer(other) for other in beside]
        self.waited_s = 0.0
        self.allocated = 0
        self._turn = 0
        self._redrawn = 0
        self._newest: Array | None = (
            None  # the job of the newest buffer for one batch alone, which nobody here keeps alive
        )

    def take(self, timeout: float | None) -> Buffer:
        """The next free buffer; waits for one with on_busy="wait", and where buffers come free by themselves.

        Raises:
            BuffersBusy: There is none.
            Closed, OwnerGone: The table was closed meanwhile.
        """
        buffers = self.buffers
        count = len(buffers)
        for i in range(count):
            index = (self._turn + i) % count
            if buffers[index].is_free():
                self._turn = index + 1
                return buffers[index]
        begun = time.monotonic()
        first = buffers[self._turn % count]
        if first.wait():
            self._turn += 1
            self.waited_s += time.monotonic() - begun
            return first
        if self._on_busy == "wait":
            deadline = Deadline(timeout)
            # another thread of this process lets go of a batch by dropping a reference: nothing announces that
            while not deadline.passed():
                time.sleep(_BUSY_SLEEP)
                self._table.check_open()
                free = next((buffer for buffer in buffers if buffer.is_free()), None)
                if free is not None:
                    self.waited_s += time.monotonic() - begun
                    return free
        if self._on_busy != "allocate":
            raise refused(buffers)
        if not self.allocated:
            warn_of_copies(self._table.layout.name, buffers)
        return self.fresh()

    def fresh(self, beside: Buffer | None = None) -> Buffer:
        """A buffer for one batch, which goes with everything that is made from it."""
        buffer = self._maker.open_buffer(beside)
        self._redrawn = self._redrawn_alone()
        self.allocated, self._newest = self.allocated + 1, buffer.job.words
        return buffer

    def _redrawn_alone(self) -> int:
        """Rows drawn again, but for those of the buffers that are used again."""
        return self._redrawn + (0 if self._newest is None else int(self._newest[JOB_REDRAWN // 8]))

    @property
    def redrawn(self) -> int:
        """Rows drawn again because a writer overwrote them."""
        return self._redrawn_alone() + sum(buffer.job.redrawn for buffer in self.buffers)

    def close(self) -> None:
        """Wait for what a device still reads, and let the buffers go; batches that are still held stay valid. Idempotent."""
        try:
            for buffer in self.buffers:
                buffer.wait()
        finally:
            self._redrawn, self._newest = self.redrawn, None
            self.buffers = []
