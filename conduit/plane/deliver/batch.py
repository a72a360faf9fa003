"""Batches and the buffers they lie in."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn, cast

import numpy as np

from conduit.arrays import import_torch
from conduit.contracts.sampler import Sampler
from conduit.errors import ConfigError, ReadOnly
from conduit.kernels.cpu import counted_deliveries, deliver, hindsight, windows
from conduit.kernels.cpu.gather import OP_WORDS
from conduit.kernels.cpu.ragged import describe_ragged
from conduit.kernels.cpu.window_job import Summed, describe_window
from conduit.kernels.ops.hindsight import RELABELLED
from conduit.kernels.spec.plan import EPISODES, IDS, INTERNAL, KEYS, STEPS, VERSIONS, Goals, Plan
from conduit.kernels.spec.windows import Transition, has_next, lanes
from conduit.native.jit import entry
from conduit.plane.deliver.transform_state import Transforming
from conduit.plane.views import Arrays
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.format.sizes import align
from conduit.store.tables.appearance import never_raises
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]
Format = Literal["torch", "numpy"]

Maker = Callable[[Array], Any]
"""Makes what is handed out from a buffer's array: a tensor, or a view."""


class _InMaking(Arrays):
    """A batch whose attributes can still be assigned: once they are there it becomes a Batch, whose cannot."""

    __slots__ = ("_buffer", "_keys", "_make", "_schema", "_turn", "_values")

    def __init__(self, buffer: Buffer, make: Maker, schema: Schema) -> None:
        self._buffer = buffer
        self._turn = buffer.turn
        self._make = make
        self._schema = schema
        self._values: dict[str, Any] = dict(zip(buffer.names, map(make, buffer.delivered), strict=True))
        for names, starts in buffer.narrowed:
            for name in names:
                self._values[name] = make(buffer.arrays[name][: starts[-1]])
        for name in buffer.brains:
            self._values[name] = as_bfloat16(self._values[name])
        self._keys: dict[str, Any] = {}
        # costs a tenth of six calls of object.__setattr__
        self.__class__ = Batch

    def __getitem__(self, name: str) -> Any:
        value = self._values.get(name)
        return self._find(name) if value is None else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Batch(_InMaking):
    """One delivered batch: names to tensors (or arrays), and where the rows come from.

    `batch["obs.camera"]` is `batch.obs.camera` too; a field that is called as something the batch has itself (ids, steps, keys,
    items and so on) is reached by its name in brackets.

    Its memory stays valid and unchanged as long as anything made from it is alive: the batch, a tensor of it, a view of
    such a tensor. `release()` gives it back earlier.

    Tensors may be written to in place: the memory is this process's own, and no stored row is changed by it. The batch itself
    takes no assignment; `dict(batch)` is a mapping that does. A copy, by `clone`, `copy.deepcopy` or `pickle`, has memory of its
    own, needs neither loader nor engine, and takes assignments of entries.
    """

    __slots__ = ()

    def _key(self, name: str) -> Any:
        if name not in self._keys:
            self._keys[name] = self._make(self._buffer.arrays[name])
        return self._keys[name]

    @property
    def ids(self) -> Any:
        """Row ids, int64 [B]: they name the rows until these are overwritten (`Loader.valid`)."""
        return self._key(IDS)

    @property
    def versions(self) -> Any:
        """Policy versions that acted, int64 [B]."""
        return self._key(VERSIONS)

    @property
    def episodes(self) -> Any:
        """Episode numbers, unique in the table, int64 [B]."""
        return self._key(EPISODES)

    @property
    def steps(self) -> Any:
        """Steps in the episode, int64 [B], from 0."""
        return self._key(STEPS)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the rewards in the batch, or of the returns that were made of them."""
        return self._buffer.reward_names

    def __setitem__(self, name: str, value: object) -> None:
        raise ReadOnly(
            f"Expected no assignment to batch[{name!r}], a batch is what was delivered: own = dict(batch) takes assignments "
            f"and shares its tensors, own = batch.clone() has tensors of its own too, batch[{name!r}][...] = value writes into these"
        )

    def __delitem__(self, name: str) -> None:
        raise ReadOnly(
            f"Expected batch[{name!r}] to stay, a batch is what was delivered: own = dict(batch) lets names go, fields=[...] of the "
            "loader delivers what is needed only"
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ReadOnly(
            f"Expected no assignment to batch.{name}, a batch is what was delivered: own = dict(batch) takes entries of your own"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise ReadOnly(f"Expected batch.{name} to stay, a batch is what was delivered")

    def transform(self, transforming: Transforming, number: int) -> None:
        """Run a loader's steps on the whole batch; called once, before it is handed out."""
        transforming.finish(self._values, self._buffer.arrays, number)

    def nest(self) -> dict[str, Any]:
        """The batch with nested fields as nested dicts and tuples; what is no field keeps its name."""
        own = {f"{prefix}{name}" for name in self._schema.names for prefix in ("", "next_")} | {
            "terminated",
            "truncated",
        }
        fields = {name: value for name, value in self._values.items() if name in own}
        return self._schema.nest(fields) | {name: value for name, value in self._values.items() if name not in own}

    def clone(self) -> Batch:
        """A copy with memory of its own, which no buffer of the loader stands behind; on the same device. It takes assignments."""
        return self._with(cloned)

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        """The batch on a device, ids and the like included.

        Args:
            device: As of `torch.Tensor.to`: a torch.device, its name or its number.
            non_blocking: As of `torch.Tensor.to`.

        Returns:
            This batch itself where all of its tensors are there already, otherwise a batch with memory of its own.

        Raises:
            ConfigError: A batch of numpy arrays.
        """
        if any(isinstance(value, np.ndarray) for value in self._values.values()):
            raise ConfigError(
                f"Expected a batch of torch tensors to move to {device!r}, this one has numpy arrays: open the loader with "
                'format="torch"'
            )
        moved = {
            name: value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value
            for name, value in self._values.items()
        }
        if all(value is moved[name] for name, value in self._values.items()):
            return self
        return self._with(lambda value: value.to(device, non_blocking=non_blocking), moved)

    def _with(self, change: Callable[[Any], Any], values: dict[str, Any] | None = None) -> Batch:
        """A batch of its own, whose arrays are these ones changed, or `values` where they are there already."""
        from conduit.plane.deliver.owned import OwnedBatch  # which is a Batch

        changed = {name: change(value) for name, value in self._values.items()} if values is None else values
        return OwnedBatch(changed, {name: change(self._key(name)) for name in KEYS}, self._schema, self.reward_names)

    def __copy__(self) -> Batch:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Batch:
        return self.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        return self.clone().__reduce__()

    def release(self) -> None:
        """Promise not to look at this batch or anything made from it again; its memory may be reused at once. Idempotent."""
        if self._buffer.turn == self._turn:  # else the memory is another batch's by now
            self._buffer.released = True

    @never_raises
    def __repr__(self) -> str:
        inner = ", ".join(f"{name}: {tuple(value.shape)} {value.dtype}" for name, value in self._values.items())
        return f"Batch({inner})"


batch_of = cast(Callable[["Buffer", Maker, Schema], Batch], _InMaking)
"""What a buffer holds as a batch."""


def cloned(value: Any) -> Any:
    """A tensor, array or whatever else a user's step put into a batch, with memory of its own and no graph behind it."""
    return value.detach().clone() if hasattr(value, "detach") else copy.deepcopy(value)


def as_bfloat16(value: Any) -> Any:
    """A tensor of bfloat16 bits as bfloat16; numpy has no such dtype and keeps the bits."""
    if isinstance(value, np.ndarray):
        return value
    import torch

    return value.view(torch.bfloat16)


def torch_maker() -> Maker:
    """What makes tensors of arrays.

    Raises:
        MissingExtra: torch is not installed.
    """
    maker: Maker = import_torch('format="torch"', 'ask for format="numpy"').from_numpy
    return maker


class Scratch:
    """Row numbers and page words of the batch being made, shared by a loader's buffers.

    Attributes:
        index: {rows of an output: int64 [batch_size, *lanes]}.
        addresses: Addresses of the index arrays that a window fills, by its words (kernels.cpu.windows.WINDOW_*).
        ages: int64 [AGES], rows refused as too old, by age.
        counted: What is counted of the batch being made (kernels.cpu.counted_deliveries), where deliveries are.
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
        self.pages, self.generations, self.slots = np.zeros((3, size), np.int64)
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


def _made(plan: Plan, at: dict[str, int]) -> dict[int, int]:
    """Addresses of the arrays that the window makes, by its words."""
    return {_MADE[item.name]: at[item.name] for item in plan.computed if item.name in _MADE}


def _rewards(table: TableView, plan: Plan, at: dict[str, int]) -> list[Summed]:
    """Where the rewards lie that the window sums up, and where their sums go."""
    columns = (table.columns[item.field.name] for item in plan.returns)
    return [
        Summed(item, column.ctypes.data, column.strides[0], at[item.name])
        for item, column in zip(plan.returns, columns, strict=True)
    ]


def _goals(wanted: Goals, scratch: Scratch, flags: int, seed: int, batch_at: int) -> Array:
    """The words of a plan's goals, but for the resolver."""
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


def spans_of(plan: Plan) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """{name: dtype and shape} of every array of a batch, those included that are not delivered under their names."""
    size = plan.batch_size
    spans = {item.name: (item.numpy_dtype, (size, *item.lanes, *item.shape)) for item in plan.outputs}
    spans |= {item.name: (item.numpy_dtype, (size, *item.field.shape)) for item in plan.returns}
    spans |= {item.name: (np.dtype(item.dtype), (size, *item.lanes)) for item in (*plan.computed, *plan.added)}
    for item in plan.ragged:
        spans |= item.arrays(size)
    return spans | {name: (np.dtype(np.int64), (size,)) for name in KEYS}


def offsets_of(spans: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> tuple[dict[str, int], int]:
    """{name: offset} of arrays that lie in one piece of memory, each at a multiple of 128 bytes, and where they end."""
    offsets, end = {}, 0
    for name, (dtype, shape) in spans.items():
        offsets[name] = end
        end = align(end + dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
    return offsets, end


def arrays_in(
    memory: Array, start: int, spans: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
) -> dict[str, Array]:
    """Arrays at their offsets from byte `start` of some memory, uint8 [...]."""
    offsets, _ = offsets_of(spans)
    return {name: np.ndarray(shape, dtype, memory, start + offsets[name]) for name, (dtype, shape) in spans.items()}


def _allocate(plan: Plan) -> tuple[Array, dict[str, Array]]:
    """Memory for a batch, and its arrays by name."""
    spans = spans_of(plan)
    memory = np.empty(offsets_of(spans)[1] + 128, np.uint8)
    return memory, arrays_in(memory, -memory.ctypes.data % 128, spans)


class Buffer:
    """Memory for one batch, with the job that fills it.

    A buffer is free when nobody but itself refers to its arrays. A torch tensor made by `from_numpy` keeps its array
    alive, and so does every view of it, so reference counts tell the truth without any bookkeeping by users.

    Attributes:
        arrays: Every output by name, and what is not delivered under its name (conduit.kernels.spec.plan.INTERNAL).
        reward_names: Of what is delivered.
        narrowed: Names of arrays that are handed out only up to their last start, and the starts.
        released: The present batch's holder has promised not to look at it again.
        turn: Number of batches this memory has been handed out for.
        settles: Whether `hand_out` has anything to do.
    """

    def __init__(
        self,
        table: TableView,
        plan: Plan,
        scratch: Scratch,
        transforming: Transforming,
        sampler: Sampler,
        block: int,
        beside: Buffer | None = None,
        memory: Array | None = None,
    ) -> None:
        """Allocate, or with `beside` fill a part of the slots of that buffer's memory, whose plan has the same arrays.

        With `memory` (uint8, aligned to 128 bytes) the arrays lie there, from its first byte on, as `offsets_of(spans_of(plan))`.
        """
        size = plan.batch_size
        self._memory: Array
        self.arrays: dict[str, Array]
        if beside is not None:
            self._memory, self.arrays = beside._memory, beside.arrays  # noqa: SLF001
        elif memory is not None:
            self._memory, self.arrays = memory, arrays_in(memory, 0, spans_of(plan))
        else:
            self._memory, self.arrays = _allocate(plan)
        self._part: tuple[int, int] | None = None
        self.released = False
        self.turn = 0
        at = {name: array.ctypes.data for name, array in self.arrays.items()}
        count = len(plan.outputs) + len(plan.ragged)
        self._operations = np.zeros((max(1, count), OP_WORDS), np.int64)
        for i, output in enumerate(plan.outputs):
            column = table.columns[output.field.name]
            index = scratch.index[output.rows].ctypes.data
            self._operations[i] = transforming.describe(output, column, at[output.name], index)
        self._kept: list[Array] = []
        for i, item in enumerate(plan.ragged, len(plan.outputs)):
            index = scratch.index[item.rows].ctypes.data
            spans_at, arenas = table.columns[item.field.name].ctypes.data, table.arenas[item.field.name]
            self._operations[i], kept = describe_ragged(item, spans_at, arenas, table.layout.page_rows, at, index)
            self._kept += kept
        self.narrowed = [(item.narrowed, self.arrays[item.parts[1]]) for item in plan.ragged if item.narrowed]
        sampled = int(table.descriptor[w.VIEW_SAMPLED // 8]), int(table.descriptor[w.VIEW_MAX_SAMPLED // 8])
        addresses = scratch.addresses | _made(plan, at)
        if plan.goals is not None:
            self._kept.append(_goals(plan.goals, scratch, at[RELABELLED], transforming.seed, sampler.batch_at))
            addresses[windows.WINDOW_GOALS] = self._kept[-1].ctypes.data
        self.window, summed = describe_window(plan, table.address, sampled, _rewards(table, plan, at), addresses)
        self._kept.append(summed)
        self.job = np.zeros(deliver.JOB_WORDS, np.int64)
        for offset, value in (
            (deliver.JOB_TABLE, table.address),
            (deliver.JOB_BATCH, size),
            (deliver.JOB_BLOCK, block),
            (deliver.JOB_DRAW, sampler.function),
            (deliver.JOB_DRAW_STATE, sampler.state),
            (deliver.JOB_WINDOW, self.window.ctypes.data),
            (deliver.JOB_OPERATIONS, self._operations.ctypes.data),
            (deliver.JOB_OPERATION_COUNT, count),
            (deliver.JOB_ROWS, scratch.index["anchor"].ctypes.data),
            (deliver.JOB_FOLLOWING, scratch.index["following"].ctypes.data),
            (deliver.JOB_PAGES, scratch.pages.ctypes.data),
            (deliver.JOB_GENERATIONS, scratch.generations.ctypes.data),
            (deliver.JOB_SLOTS, scratch.slots.ctypes.data),
            (deliver.JOB_IDS, at[IDS]),
            (deliver.JOB_VERSIONS, at[VERSIONS]),
            (deliver.JOB_EPISODES, at[EPISODES]),
            (deliver.JOB_STEPS, at[STEPS]),
        ):
            self.job[offset // 8] = value
        self.job_address = self.job.ctypes.data
        self.names, self.reward_names = plan.names, plan.reward_names
        self.delivered = [self.arrays[name] for name in plan.names]
        self.brains = [
            item.name for item in plan.outputs if item.transform.dtype == "bfloat16" and item.name in plan.names
        ]
        self.brains += [item.name for item in plan.ragged if item.transform.dtype == "bfloat16"]
        self._transforming, self._index = transforming, scratch.index
        self._fill = entry(deliver.deliver)
        self._is_counted = sampled[0] != 0
        if self._is_counted:
            self._fill = entry(counted_deliveries.deliver_counted)
            self.job[deliver.JOB_COUNTED // 8] = scratch.counted.ctypes.data
            self.job[deliver.JOB_SEAT // 8] = table.seat_line()
        self.settles = self._is_counted or transforming.inspects
        self._finish = sampler.finish
        self._every = list(self.arrays.values())
        self.settle()

    def settle(self) -> None:
        """Take the references that there are now for its own."""
        self._array_count = self._counts()
        self._memory_count = sys.getrefcount(self._memory)

    def narrow(self, first: int, end: int) -> None:
        """Fill only the slots [first, end) from now on."""
        self.job[deliver.JOB_FIRST // 8] = first
        self.job[deliver.JOB_BATCH // 8] = end
        self._part = first, end

    def _counts(self) -> list[int]:
        return [sys.getrefcount(array) for array in self._every]

    def is_free(self) -> bool:
        """True when no batch, tensor or view of this buffer is alive, or its holder has released it."""
        if self.released:
            return True
        return sys.getrefcount(self._memory) == self._memory_count and self._counts() == self._array_count

    def held(self) -> list[str]:
        """Names of the arrays that somebody refers to, as far as one can tell: a numpy view refers to all of the memory."""
        counts = dict(zip(self.arrays, zip(self._counts(), self._array_count, strict=True), strict=True))
        return [name.removeprefix(INTERNAL) for name, (now, own) in counts.items() if now > own]

    def fill(self) -> bool:
        """Draw and gather a batch into the arrays; False when there is nothing to draw.

        Raises:
            FieldError: A stored value that a transform cannot take.
        """
        if self._fill(self.job_address) < 0:
            return False
        try:
            if self._part is None:
                self._finish(self.arrays)
            else:
                self._finish(self.arrays, self._part[0], self._part[1] - self._part[0])
            if self._transforming.inspects:
                slots = slice(None) if self._part is None else slice(*self._part)
                self._transforming.after(self.arrays, self._index, self._operations, slots)
        except BaseException:
            self.give_back()
            raise
        return True

    def hand_out(self) -> None:
        """The batch that was filled in is handed out: where deliveries are counted, its rows have been delivered."""
        if self._is_counted:
            entry(counted_deliveries.hand_out)(self.job_address)
        if self._transforming.inspects:
            self._transforming.deliver()

    def give_back(self) -> None:
        """The batch that was filled in is not handed out: its rows may be delivered to others."""
        if self._is_counted:
            entry(counted_deliveries.give_back)(self.job_address)

    def take(self) -> None:
        """Begin the turn of the batch that was filled in; an earlier one's release means nothing from now on."""
        self.released = False
        self.turn += 1

    @property
    def redrawn(self) -> int:
        """Rows drawn again because a writer overwrote them, over this buffer's life."""
        return int(self.job[deliver.JOB_REDRAWN // 8])
