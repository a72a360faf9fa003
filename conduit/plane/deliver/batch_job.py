"""The job of one buffer: the words that tell the delivery kernel what to draw, which memory to read, and where to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conduit.contracts.sampler import Sampler
from conduit.kernels.cpu import hindsight, job, near_far, windows
from conduit.kernels.cpu.gather import OP_WORDS
from conduit.kernels.cpu.ragged import RAGGED_END, describe_ragged
from conduit.kernels.cpu.window_job import Summed, describe_window
from conduit.kernels.ops.hindsight import RELABELLED
from conduit.kernels.spec.plan import EPISODES, IDS, STEPS, VERSIONS, Goals, Plan
from conduit.kernels.spec.windows import Transition, has_next, lanes
from conduit.native.jit import entry
from conduit.plane.deliver import counted_deliveries, fill
from conduit.plane.deliver.transform_state import Transforming
from conduit.store.format import words as w
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

AGAIN = 1 << 10
"""First attempt number of draws after a batch's first draw, so that they use other random bits."""
_MADE = {
    "discount": windows.WINDOW_DISCOUNT,
    "n_steps": windows.WINDOW_USED,
    "lengths": windows.WINDOW_USED,
    "terminated": windows.WINDOW_TERMINATED,
    "truncated": windows.WINDOW_TRUNCATED,
    "is_first": windows.WINDOW_IS_FIRST,
    "mask": windows.WINDOW_MASK,
    "loss_mask": windows.WINDOW_LOSS_MASK,
}


class Scratch:
    """Row numbers and pages of the batch that is being made, shared by a maker's buffers.

    Attributes:
        index: {kind of rows that an output reads: int64 [batch_size, *lanes]}, physical rows.
        pages, generations: int64 [batch_size], the page of each sample and the page's generation at the draw.
        addresses: Addresses of the index arrays that a window fills, by its words (kernels.cpu.windows.WINDOW_*).
        ages: int64 [AGES], rows refused as too old, by age.
        counted: Words for the counted deliveries of the batch (plane.deliver.counted_deliveries), in a table that counts them.
    """

    def __init__(self, plan: Plan, ages: Array | None = None) -> None:
        size = plan.batch_size
        stack = plan.window.stack if isinstance(plan.window, Transition) else 1
        shapes: dict[str, tuple[int, ...]] = {
            "anchor": (),
            "following": (),
            "stack": (stack,),
            "following_stack": (stack,),
            "goal": (),
        }
        shapes["lanes"] = shapes["following_lanes"] = lanes(plan.window)
        self.index = {name: np.zeros((size, *shape), np.int64) for name, shape in shapes.items()}
        self.pages, self.generations, self.entries, self.slots = np.zeros((4, size), np.int64)
        self.ages = np.zeros(windows.AGES, np.int64) if ages is None else ages
        self.counted = np.zeros(counted_deliveries.words_needed(size), np.int64)
        self.addresses = {
            windows.WINDOW_FOLLOWING: self.index["following"].ctypes.data,
            windows.WINDOW_STACKED: self.index["stack"].ctypes.data,
            windows.WINDOW_FOLLOWING_STACKED: self.index["following_stack"].ctypes.data,
            windows.WINDOW_LANES: self.index["lanes"].ctypes.data,
            windows.WINDOW_AGES: self.ages.ctypes.data,
            windows.WINDOW_FOLLOWING_LANES: self.index["following_lanes"].ctypes.data if has_next(plan.window) else 0,
        }


def _made(plan: Plan, at: dict[str, int]) -> dict[int, int]:
    """Addresses of the arrays that the window fills, by its words."""
    return {_MADE[item.name]: at[item.name] for item in plan.computed if item.name in _MADE}


def _rewards(table: TableView, plan: Plan, at: dict[str, int]) -> list[Summed]:
    """The rewards that the window sums up: where they lie, and where their sums go."""
    columns = (table.columns[item.field.name] for item in plan.returns)
    return [
        Summed(item, column.ctypes.data, column.strides[0], at[item.name])
        for item, column in zip(plan.returns, columns, strict=True)
    ]


def _goals(wanted: Goals, scratch: Scratch, flags: int, seed: int, batch_at: int) -> Array:
    """The words of a plan's goals, except the resolver's address."""
    words = np.zeros(hindsight.GOAL_WORDS, np.int64)
    for offset, value in (
        (hindsight.GOAL_ROWS, scratch.index["goal"].ctypes.data),
        (hindsight.GOAL_FLAGS, flags),
        (hindsight.GOAL_STRATEGY, wanted.strategy),
        (hindsight.GOAL_THRESHOLD, wanted.threshold),
        (hindsight.GOAL_LONGEST, wanted.longest),
        (hindsight.GOAL_SAME, wanted.same),
        (hindsight.GOAL_SEED, seed),
        (hindsight.GOAL_BATCH_AT, batch_at),
    ):
        words[offset // 8] = value
    return words


class BatchJob:
    """A job of kernels.cpu.job. It keeps all memory alive that the words lead to, except the arrays of the batch.

    Args:
        table: The table.
        plan: The plan of a batch.
        scratch: Rows and pages of the samples.
        transforming: The maker's transforms.
        sampler: The maker's sampler.
        block: Rows that are drawn, gathered and checked at a time.
        arrays: The batch's arrays, by name; the caller keeps their memory alive.

    Attributes:
        scratch: Rows and pages of the samples.
        words: int64 [JOB_WORDS].
        address: Address of `words`.
        operations: int64 [outputs, OP_WORDS], the row operations in the plan's order, ragged fields last.
        window: int64 words of the window (kernels.cpu.windows.WINDOW_*).
    """

    def __init__(
        self,
        table: TableView,
        plan: Plan,
        scratch: Scratch,
        transforming: Transforming,
        sampler: Sampler,
        block: int,
        arrays: Mapping[str, Array],
    ) -> None:
        at = {name: array.ctypes.data for name, array in arrays.items()}
        count = len(plan.outputs) + len(plan.ragged)
        self._kept: list[Any] = [transforming, sampler]
        self.scratch = scratch
        self._table, self._size = table, plan.batch_size
        self.operations = np.zeros((max(1, count), OP_WORDS), np.int64)
        for i, output in enumerate(plan.outputs):
            column = table.columns[output.field.name]
            index = scratch.index[output.rows].ctypes.data
            self.operations[i] = transforming.describe(output, column, at[output.name], index)
        self._packed: list[tuple[Array, str]] = []
        for i, item in enumerate(plan.ragged, len(plan.outputs)):
            index = scratch.index[item.rows].ctypes.data
            spans_at, arenas = table.columns[item.field.name].ctypes.data, table.arenas[item.field.name]
            self.operations[i], kept = describe_ragged(item, spans_at, arenas, table.layout.page_rows, at, index)
            self._kept += kept
            if item.narrowed:
                self._packed.append((kept[0], item.parts[1]))
        sampled = int(table.descriptor[w.VIEW_SAMPLED // 8]), int(table.descriptor[w.VIEW_MAX_SAMPLED // 8])
        addresses = scratch.addresses | _made(plan, at)
        if plan.goals is not None:
            self._kept.append(_goals(plan.goals, scratch, at[RELABELLED], transforming.seed, sampler.batch_at))
            addresses[windows.WINDOW_GOALS] = self._kept[-1].ctypes.data
        self.window, summed = describe_window(plan, table.address, sampled, _rewards(table, plan, at), addresses)
        self._kept.append(summed)
        self.words = np.zeros(job.JOB_WORDS, np.int64)
        for offset, value in (
            (job.JOB_TABLE, table.address),
            (job.JOB_BATCH, plan.batch_size),
            (job.JOB_BLOCK, block),
            (job.JOB_DRAW, sampler.function),
            (job.JOB_DRAW_STATE, sampler.state),
            (job.JOB_WINDOW, self.window.ctypes.data),
            (job.JOB_OPERATIONS, self.operations.ctypes.data),
            (job.JOB_OPERATION_COUNT, count),
            (job.JOB_ROWS, scratch.index["anchor"].ctypes.data),
            (job.JOB_FOLLOWING, scratch.index["following"].ctypes.data),
            (job.JOB_PAGES, scratch.pages.ctypes.data),
            (job.JOB_GENERATIONS, scratch.generations.ctypes.data),
            (job.JOB_ENTRIES, scratch.entries.ctypes.data),
            (job.JOB_SLOTS, scratch.slots.ctypes.data),
            (job.JOB_IDS, at[IDS]),
            (job.JOB_VERSIONS, at[VERSIONS]),
            (job.JOB_EPISODES, at[EPISODES]),
            (job.JOB_STEPS, at[STEPS]),
        ):
            self.words[offset // 8] = value
        self.address: int = self.words.ctypes.data
        if sampled[0]:
            self.words[job.JOB_COUNTED // 8] = scratch.counted.ctypes.data
            self.words[job.JOB_SEAT // 8] = table.seat_line()
        self._count = count
        self._staging: Array | None = None
        self.begin_packed(arrays, 0, plan.batch_size)

    def narrow(self, first: int, end: int) -> None:
        """Fill only the slots [first, end) from now on."""
        self.words[job.JOB_FIRST // 8] = first
        self.words[job.JOB_BATCH // 8] = end

    @property
    def redrawn(self) -> int:
        """Rows drawn again because a writer overwrote them, over this job's life."""
        return int(self.words[job.JOB_REDRAWN // 8])

    def draw(self) -> bool:
        """Draw a batch without gathering it; False when there is nothing to draw."""
        words, at = self.words, job.JOB_OPERATION_COUNT // 8
        words[at] = 0
        try:
            return entry(fill.fill)(self.address) >= 0
        finally:
            words[at] = self._count

    def begin_packed(self, arrays: Mapping[str, Array], first: int, end: int) -> None:
        """Make the packed values of the slots [first, end) empty, so that a gather finds no values of an earlier batch there."""
        for words, name in self._packed:
            starts = arrays[name]
            starts[first : end + 1] = starts[first] if first else 0
            words[RAGGED_END // 8] = end

    def gather(self, slots: Array) -> bool:
        """Gather listed slots as they were drawn. If a writer has overwritten a slot's rows, the slot is drawn again.

        Args:
            slots: int64 [n], each once.

        Returns:
            False when a slot had to be drawn again and there was nothing to draw.
        """
        if self._staging is None:
            self._stage()
        assert self._staging is not None  # noqa: S101 - for the type checker
        lost, scratch = self._lists.ctypes.data, self._lists[1].ctypes.data
        words, again = self._staging.ctypes.data, np.ascontiguousarray(slots, np.int64)
        left, attempt = len(again), AGAIN
        left = entry(near_far.stage)(words, again.ctypes.data, left, lost)
        while left > 0:
            attempt = entry(fill.draw_again)(self.address, lost, left, attempt, scratch)
            if attempt < 0:
                return False
            again = self._lists[0, :left].copy()
            left = entry(near_far.stage)(words, again.ctypes.data, left, lost)
        return True

    def _stage(self) -> None:
        """Describe the host's own gather to kernels.cpu.near_far, as if every slot were far and its copy lay in the batch."""
        size = self._size
        places = np.full((self._table.layout.pages, near_far.PL_BYTES // 8), -1, np.int64)
        self._lists = np.zeros((5, size), np.int64)
        self._lists[2] = np.arange(size)
        self._staging = np.zeros(near_far.SPLIT_WORDS, np.int64)
        for offset, value in (
            (near_far.SPLIT_JOB, self.address),
            (near_far.SPLIT_PLACES, places.ctypes.data),
            (near_far.SPLIT_PAGE_ROWS, self._table.layout.page_rows),
            (near_far.SPLIT_COPIES, self.operations.ctypes.data),
            (near_far.SPLIT_COPY_COUNT, self._count),
            (near_far.SPLIT_NUMBERS, self._lists[2].ctypes.data),
            (near_far.SPLIT_FAR, self._lists[3].ctypes.data),
            (near_far.SPLIT_NEAR, self._lists[4].ctypes.data),
        ):
            self._staging[offset // 8] = value
        self._kept.append(places)
