"""The memory that a batch lies in, and how one finds out that nobody looks at it any more."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from conduit.kernels.spec.plan import INTERNAL, KEYS, Plan
from conduit.plane.deliver.batch_job import BatchJob
from conduit.store.format.sizes import align

Array = np.ndarray[Any, Any]
Spans = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]


def spans_of(plan: Plan) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """{name: dtype and shape} of every array of a batch, those included that are not delivered under their names."""
    size = plan.batch_size
    spans = {item.name: (item.numpy_dtype, (size, *item.lanes, *item.shape)) for item in plan.outputs}
    spans |= {item.name: (item.numpy_dtype, (size, *item.field.shape)) for item in plan.returns}
    spans |= {item.name: (np.dtype(item.dtype), (size, *item.lanes)) for item in (*plan.computed, *plan.added)}
    for item in plan.ragged:
        spans |= item.arrays(size)
    return spans | {name: (np.dtype(np.int64), (size,)) for name in KEYS}


def offsets_of(spans: Spans) -> tuple[dict[str, int], int]:
    """{name: offset} of arrays that lie in one piece of memory, each at a multiple of 128 bytes, and where they end."""
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

    A buffer is free when nobody but itself refers to its arrays. A torch tensor made by `from_numpy` keeps its array
    alive, and so does every view of it, so reference counts tell the truth without any bookkeeping by users.

    Args:
        plan: What a batch is made of.
        beside: A buffer in whose memory this one lies too, to fill a part of its slots; its plan has the same arrays.
        memory: Memory to lie in, uint8, aligned to 128 bytes: the arrays lie there from its first byte on, as
            `offsets_of(spans_of(plan))`. None for memory of its own.

    Attributes:
        arrays: Every output by name, and what is not delivered under its name (conduit.kernels.spec.plan.INTERNAL).
        names, delivered: What is delivered, in the order of the batch: names and arrays.
        reward_names: Of what is delivered.
        narrowed: Names of arrays that are handed out only up to their last start, and the starts.
        brains: Names of arrays whose elements are bfloat16 bits.
        released: The present batch's holder has promised not to look at it again.
        turn: Number of batches this memory has been handed out for.
        part: Slots [first, end) to fill, or None for all of them.
        job, job_address: What its maker fills it by.
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
        """Take the job that fills it."""
        self.job, self.job_address = job, job.address

    def settle(self) -> None:
        """Take the references that there are now for its own."""
        self._array_count = self._counts()
        self._memory_count = sys.getrefcount(self._memory)

    def narrow(self, first: int, end: int) -> None:
        """Let only the slots [first, end) be filled from now on."""
        self.job.narrow(first, end)
        self.part = first, end

    def _counts(self) -> list[int]:
        return [sys.getrefcount(array) for array in self._every]

    def is_free(self) -> bool:
        """True when no batch, tensor or view of this buffer is alive, or its holder has released it."""
        if self.released:
            return True
        return sys.getrefcount(self._memory) == self._memory_count and self._counts() == self._array_count

    def wait(self) -> bool:
        """Wait until it is free, where that comes by itself; False where somebody has to let go of it."""
        return False

    def held(self) -> list[str]:
        """Names of the arrays that somebody refers to, as far as one can tell: a numpy view refers to all of the memory."""
        counts = dict(zip(self.arrays, zip(self._counts(), self._array_count, strict=True), strict=True))
        return [name.removeprefix(INTERNAL) for name, (now, own) in counts.items() if now > own]

    def take(self) -> None:
        """Begin the turn of the batch that was filled in; an earlier one's release means nothing from now on."""
        self.released = False
        self.turn += 1
