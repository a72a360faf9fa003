"""The memory of batches: a ring of buffers, the test whether a buffer is free, and the choices when all buffers are in use."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from conduit.clock import Deadline
from conduit.errors import BuffersBusy, ConfigError
from conduit.kernels.cpu.job import JOB_REDRAWN
from conduit.kernels.spec.plan import INTERNAL, KEYS, Plan
from conduit.plane.deliver.batch_job import BatchJob
from conduit.store.format.sizes import align
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]
Spans = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
OnBusy = Literal["allocate", "error", "wait"]

_BUSY_SLEEP = 0.0005
_REMEDY = "drop batches, or batch.release() them, when you are done, batch.clone() what you keep, or open the loader with more buffers"


def check_on_busy(given: object) -> None:
    """Refuse a value that is not an OnBusy.

    Raises:
        ConfigError: The value is not an OnBusy.
    """
    if given not in get_args(OnBusy):
        raise ConfigError(f"Expected on_busy 'allocate', 'error' or 'wait', got {given!r}")


def spans_of(plan: Plan) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """{name: dtype and shape} of every array of a batch, internal arrays included."""
    size = plan.batch_size
    spans = {item.name: (item.numpy_dtype, (size, *item.lanes, *item.shape)) for item in plan.outputs}
    spans |= {item.name: (item.numpy_dtype, (size, *item.field.shape)) for item in plan.returns}
    spans |= {item.name: (np.dtype(item.dtype), (size, *item.lanes)) for item in (*plan.computed, *plan.added)}
    for item in plan.ragged:
        spans |= item.arrays(size)
    return spans | {name: (np.dtype(np.int64), (size,)) for name in KEYS}


def offsets_of(spans: Spans) -> tuple[dict[str, int], int]:
    """{name: offset} of arrays in one piece of memory, each at a multiple of 128 bytes, and the total size in bytes."""
    offsets, end = {}, 0
    for name, (dtype, shape) in spans.items():
        offsets[name] = end
        end = align(end + dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
    return offsets, end


def arrays_in(memory: Array, start: int, spans: Spans) -> dict[str, Array]:
    """Arrays at their offsets from byte `start` of some memory, uint8 [...]."""
    offsets, _ = offsets_of(spans)
    return {name: np.ndarray(shape, dtype, memory, start + offsets[name]) for name, (dtype, shape) in spans.items()}


def _allocate(plan: Plan) -> tuple[Array, dict[str, Array]]:
    """Memory for a batch, and its arrays by name."""
    spans = spans_of(plan)
    memory = np.empty(offsets_of(spans)[1] + 128, np.uint8)
    return memory, arrays_in(memory, -memory.ctypes.data % 128, spans)


class Buffer:
    """Memory for one batch, which a maker fills (conduit.plane.deliver.batch_maker).

    A buffer is free when only the buffer itself refers to its arrays. A torch tensor made by `from_numpy` keeps its array
    alive, and so does every view of it. So reference counts are enough, and users need not give memory back.

    Args:
        plan: The plan of a batch.
        beside: A buffer whose memory this one shares, to fill a part of its slots; both plans have the same arrays.
        memory: The memory to use, uint8, aligned to 128 bytes; the arrays lie at `offsets_of(spans_of(plan))` from its first
            byte. None for memory of its own.

    Attributes:
        arrays: Every output by name, and internal arrays (conduit.kernels.spec.plan.INTERNAL).
        names, delivered: Names and arrays that are delivered, in the order of the batch.
        reward_names: Names of the rewards that are delivered.
        narrowed: Names of arrays that are delivered only up to their last start, and the starts.
        brains: Names of arrays whose elements are bfloat16 bits.
        released: Whether the caller has released the present batch.
        turn: Number of batches that this memory has been delivered for.
        part: Slots [first, end) to fill, or None for all of them.
        job, job_address: The job by which its maker fills it.
    """

    job: BatchJob
    job_address: int

    def __init__(self, plan: Plan, beside: Buffer | None = None, memory: Array | None = None) -> None:
        self._memory: Array
        self.arrays: dict[str, Array]
        if beside is not None:
            self._memory, self.arrays = beside._memory, beside.arrays  # noqa: SLF001
        elif memory is not None:
            self._memory, self.arrays = memory, arrays_in(memory, 0, spans_of(plan))
        else:
            self._memory, self.arrays = _allocate(plan)
        self.part: tuple[int, int] | None = None
        self.released = False
        self.turn = 0
        self.names, self.reward_names = plan.names, plan.reward_names
        self.delivered = [self.arrays[name] for name in plan.names]
        self.narrowed = [(item.narrowed, self.arrays[item.parts[1]]) for item in plan.ragged if item.narrowed]
        self.brains = [
            item.name for item in plan.outputs if item.transform.dtype == "bfloat16" and item.name in plan.names
        ]
        self.brains += [item.name for item in plan.ragged if item.transform.dtype == "bfloat16"]
        self._every = list(self.arrays.values())
        self.settle()

    def given(self, job: BatchJob) -> None:
        """Set the job that fills it."""
        self.job, self.job_address = job, job.address

    def settle(self) -> None:
        """Count the references to the memory now as the buffer's own; further ones mean that it is in use."""
        self._array_count = self._counts()
        self._memory_count = sys.getrefcount(self._memory)

    def narrow(self, first: int, end: int) -> None:
        """Fill only the slots [first, end) from now on."""
        self.job.narrow(first, end)
        self.part = first, end

    def _counts(self) -> list[int]:
        return [sys.getrefcount(array) for array in self._every]

    def is_free(self) -> bool:
        """True when no batch, tensor or view of this buffer is alive, or the caller has released its batch."""
        if self.released:
            return True
        return sys.getrefcount(self._memory) == self._memory_count and self._counts() == self._array_count

    def wait(self) -> bool:
        """Wait until the buffer is free, if it gets free by itself; False if a caller has to release it."""
        return False

    def held(self) -> list[str]:
        """Names of the arrays that are still referred to. Numpy views are not found: they refer to the whole memory."""
        counts = dict(zip(self.arrays, zip(self._counts(), self._array_count, strict=True), strict=True))
        return [name.removeprefix(INTERNAL) for name, (now, own) in counts.items() if now > own]

    def take(self) -> None:
        """Begin a new batch's turn; `release` of an earlier batch has no effect from now on."""
        self.released = False
        self.turn += 1


class BufferRing:
    """A loader's buffers: gives out the next free one, or does what `on_busy` says if there is none.

    Args:
        opens: Makes a buffer for the loader's maker; given another buffer, the new one shares its memory.
        table: The table; closing it ends a wait.
        beside: For each buffer of the ring, the buffer whose memory it shares, or None.
        on_busy: What to do when every buffer is in use.

    Attributes:
        buffers: The buffers that are used again.
        waited_s: Seconds spent waiting for one of them.
        allocated: Number of buffers that were made for one batch each.
    """

    def __init__(
        self,
        opens: Callable[[Buffer | None], Buffer],
        table: TableView,
        beside: Sequence[Buffer | None],
        on_busy: OnBusy,
    ) -> None:
        self._opens, self._table, self._on_busy = opens, table, on_busy
        self.buffers = [opens(other) for other in beside]
        self.waited_s = 0.0
        self.allocated = 0
        self._turn = 0
        self._redrawn = 0
        self._newest: Array | None = (
            None  # the job of the newest single-batch buffer; the ring keeps no such buffer alive
        )

    def take(self, timeout: float | None) -> Buffer:
        """The next free buffer. Waits for one with on_busy="wait", or if buffers get free by themselves.

        Raises:
            BuffersBusy: No buffer is free.
            Closed, OwnerGone: The client or engine was closed, or the owner died, during the wait.
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
            # another thread releases a batch by dropping its last reference, which sends no signal: look again and again
            while not deadline.passed():
                time.sleep(_BUSY_SLEEP)
                self._table.check_open()
                free = next((buffer for buffer in buffers if buffer.is_free()), None)
                if free is not None:
                    self.waited_s += time.monotonic() - begun
                    return free
        if self._on_busy != "allocate":
            raise _refused(buffers)
        if not self.allocated:
            _warn_of_copies(self._table.layout.name, buffers)
        return self.fresh()

    def fresh(self, beside: Buffer | None = None) -> Buffer:
        """A buffer for one batch; its memory is freed with the last object made from the batch."""
        buffer = self._opens(beside)
        self._redrawn = self._redrawn_alone()
        self.allocated, self._newest = self.allocated + 1, buffer.job.words
        return buffer

    def _redrawn_alone(self) -> int:
        """Rows drawn again in single-batch buffers."""
        return self._redrawn + (0 if self._newest is None else int(self._newest[JOB_REDRAWN // 8]))

    @property
    def redrawn(self) -> int:
        """Rows drawn again because a writer overwrote them."""
        return self._redrawn_alone() + sum(buffer.job.redrawn for buffer in self.buffers)

    def close(self) -> None:
        """Wait until a device has read the buffers, and release them; batches that callers hold stay valid. Idempotent."""
        try:
            for buffer in self.buffers:
                buffer.wait()
        finally:
            self._redrawn, self._newest = self.redrawn, None
            self.buffers = []


def _holders(buffers: Sequence[Buffer]) -> str:
    """The arrays of the buffers' batches that are still referred to, as text."""
    kinds = Counter(
        "a whole batch" if set(buffer.names) <= set(held) else f"{', '.join(f'`{name}`' for name in held)} of a batch"
        for buffer, held in ((buffer, buffer.held() or ["some array"]) for buffer in buffers)
    )
    return ", ".join(kind if count == 1 else f"{count} times {kind}" for kind, count in kinds.items())


def _refused(buffers: Sequence[Buffer]) -> BuffersBusy:
    """The error of a loader whose buffers are all in use."""
    return BuffersBusy(
        f"Expected at most {len(buffers) - 1} batches of this loader to be in use, got all {len(buffers)} buffers in use (held: "
        f"{_holders(buffers)}): {_REMEDY}"
    )


def _warn_of_copies(table: str, buffers: Sequence[Buffer]) -> None:
    """Warn that batches get memory of their own from now on, and why."""
    # the warning points at the first caller outside Conduit
    level, frame = 1, sys._getframe()  # noqa: SLF001 - there is no other door to it
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("conduit."):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"All {len(buffers)} buffers of a loader of table {table!r} are in use (held: {_holders(buffers)}), so each batch gets "
        f"memory of its own. That costs time, and only the machine's memory limits it. To reuse the buffers, {_REMEDY}; a notebook "
        "keeps everything that it displayed, in Out. This loader warns only once; on_busy='error' raises an error instead",
        RuntimeWarning,
        stacklevel=level,
    )
