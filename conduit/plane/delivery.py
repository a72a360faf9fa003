"""Control point *delivery*: how batches are made and handed out.

The contract is `Delivery`: an iterator of batches with a deadline. The default, `Loader`, is synchronous: a batch is drawn,
gathered, transformed and validated by one compiled call when it is asked for.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from conduit.clock import Deadline
from conduit.errors import BuffersBusy, Closed, ConfigError, DataTimeout, MissingExtra
from conduit.jit import entry
from conduit.kernels import cpu
from conduit.kernels.plan import Plan, make_plan
from conduit.kernels.transforms import Transform
from conduit.plane.batch import Batch, Buffer, Format, Maker
from conduit.sampling.uniform import Uniform
from conduit.store.table import TableView

Array = np.ndarray[Any, Any]
OnBusy = Literal["error", "wait"]

_BLOCK_BYTES = 1 << 20
_SHORTEST_BLOCK = 16
_BUSY_SLEEP = 0.0005


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """What a loader has done so far.

    Attributes:
        batches, rows: Delivered.
        redrawn: Rows drawn again because a writer overwrote them between draw and check.
        waited_s: Seconds spent waiting for rows or for a free buffer.
    """

    batches: int
    rows: int
    redrawn: int
    waited_s: float


class Delivery(ABC):
    """Contract of the control point *delivery*.

    `next` returns a batch, or raises WaitTimeout's children within its deadline, or Closed; a failed call takes nothing
    away from later ones. A batch stays valid until everything made from it is gone. One thread at a time.
    """

    @abstractmethod
    def next(self, timeout: float | None = None) -> Batch:
        """The next batch; waits for rows up to `timeout` seconds (None: the delivery's own)."""

    @abstractmethod
    def close(self) -> None:
        """Give the buffers back; batches that are still held stay valid. Idempotent."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.next()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Loader(Delivery):
    """Uniform batches of transitions from one table, made on the CPU when they are asked for.

    Iterating never ends by itself; it waits for rows as long as `timeout` allows.

    Attributes:
        plan: What a batch is made of.
        sampler: The sampler; `sampler.batch` is the number of the next batch.
    """

    def __init__(
        self,
        table: TableView,
        *,
        batch_size: int,
        transform: Mapping[str, Transform] | None,
        seed: int,
        format: Format,  # noqa: A002 - the natural word in a call
        buffers: int,
        on_busy: OnBusy,
        timeout: float | None,
        min_rows: int | None,
        fields: Iterable[str] | None,
    ) -> None:
        if format not in ("torch", "numpy"):
            raise ConfigError(f"Expected format 'torch' or 'numpy', got {format!r}")
        if on_busy not in ("error", "wait"):
            raise ConfigError(f"Expected on_busy 'error' or 'wait', got {on_busy!r}")
        if not isinstance(buffers, int) or buffers < 2:
            raise ConfigError(f"Expected at least 2 buffers (the loop variable holds one), got {buffers!r}")
        if not isinstance(seed, int):
            raise ConfigError(f"Expected an int as seed, got {seed!r}")
        Deadline(timeout)
        table.check_open()
        self.plan: Plan = make_plan(table.layout.schema, batch_size, transform, fields)
        least = batch_size if min_rows is None else min_rows
        if not isinstance(least, int) or not 1 <= least <= table.layout.rows:
            raise ConfigError(f"Expected min_rows from 1 to the table's {table.layout.rows} rows, got {least!r}")
        self.sampler = Uniform(seed, table.layout.pages, least)
        self._table = table
        self._timeout = timeout
        self._on_busy = on_busy
        self._least = least
        self._scratch = np.zeros((5, batch_size), np.int64)
        block = min(batch_size, max(_SHORTEST_BLOCK, _BLOCK_BYTES // max(1, self.plan.sample_bytes)))
        self._buffers = [Buffer(table, self.plan, self._scratch, self.sampler, block) for _ in range(buffers)]
        self._turn = 0
        self._batches = 0
        self._redrawn = 0
        self._waited = 0.0
        self._closed = False
        self._make: Maker = _torch_maker() if format == "torch" else np.ndarray.view

    def next(self, timeout: float | None = None) -> Batch:
        """The next batch.

        Args:
            timeout: Seconds to wait for rows, and with on_busy="wait" for a buffer; None takes the loader's.

        Raises:
            DataTimeout: Too few rows came.
            BuffersBusy: Every buffer is still referred to.
            Closed: The loader, client or engine has closed.
        """
        if self._closed:
            raise Closed("Expected an open loader, this one was closed")
        self._table.check_open()
        buffer = self._free_buffer(timeout)
        if not buffer.fill():
            self._wait_for_rows(buffer, self._timeout if timeout is None else timeout)
        buffer.take()
        self._batches += 1
        self.sampler.advance()
        return Batch(buffer, self._make, self._table.layout.schema)

    def _free_buffer(self, timeout: float | None) -> Buffer:
        count = len(self._buffers)
        for i in range(count):
            index = (self._turn + i) % count
            if self._buffers[index].is_free():
                self._turn = index + 1
                return self._buffers[index]
        if self._on_busy == "wait":
            begun = time.monotonic()
            deadline = Deadline(self._timeout if timeout is None else timeout)
            # another thread of this process lets go of a batch by dropping a reference: nothing announces that
            while not deadline.passed():
                time.sleep(_BUSY_SLEEP)
                free = next((buffer for buffer in self._buffers if buffer.is_free()), None)
                if free is not None:
                    self._waited += time.monotonic() - begun
                    return free
        raise BuffersBusy(
            f"Expected at most {count - 1} batches of this loader to be in use, all {count} buffers are: drop or "
            "batch.release() some, clone what you keep, or open the loader with more buffers"
        )

    def _wait_for_rows(self, buffer: Buffer, timeout: float | None) -> None:
        begun = time.monotonic()
        filled = self._table.wait(lambda: buffer.fill() or None, for_space=False, deadline=Deadline(timeout))
        self._waited += time.monotonic() - begun
        if filled is None:
            raise DataTimeout(
                f"Expected at least {self._least} sampleable rows in table {self._table.layout.name!r}, got "
                f"{self.sampler.candidates} within {timeout} s: are its writers alive (`conduit status`)? "
                "Lower min_rows or raise timeout"
            )

    def valid(self, ids: Any) -> Array:
        """Which row ids still name the rows they were given for.

        Args:
            ids: int64, any shape, from `Batch.ids`.

        Returns:
            bool of that shape; False where the row has been overwritten since, or the id is none of this table's.
        """
        keys = np.asarray(ids, np.int64, order="C")
        out = np.zeros(keys.shape, bool)
        entry(cpu.still_valid)(self._table.address, keys.ctypes.data, keys.size, out.ctypes.data)
        return out

    @property
    def stats(self) -> LoaderStats:
        """Counts since the loader was opened."""
        redrawn = self._redrawn + sum(buffer.redrawn for buffer in self._buffers)
        return LoaderStats(self._batches, self._batches * self.plan.batch_size, redrawn, self._waited)

    def close(self) -> None:
        """Let the buffers go; batches that are still held stay valid."""
        self._redrawn = self.stats.redrawn
        self._closed = True
        self._buffers = []

    def __enter__(self) -> Self:
        return self


def _torch_maker() -> Maker:
    try:
        import torch  # writers never need it
    except ImportError as error:
        raise MissingExtra(
            'Expected torch to be installed for format="torch": pip install torch, or use format="numpy"'
        ) from error
    maker: Maker = torch.from_numpy
    return maker
