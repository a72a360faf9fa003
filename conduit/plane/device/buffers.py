"""From a draw to a batch on the device.

The host draws as for a batch on the CPU (the same rows, in the same order), and makes the columns that need no stored field. Then
one copy brings row numbers, flags, returns and keys to the device, and launches gather the fields. A row is near if the device can
read it where it lies; otherwise it is far, and the host copies it. A batch is one piece of device memory. torch's allocator takes it
back, in the order of the stream, when nothing refers to the batch any more. The pinned memory on the host is used again once the
batch's event has passed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from conduit.contracts.device import Device, Event, Tensor
from conduit.errors import SchemaMismatch
from conduit.kernels.cpu import augment, near_far
from conduit.kernels.cpu import gather as rows
from conduit.kernels.spec.plan import INTERNAL, KEYS, NEXT, Output, Plan
from conduit.kernels.spec.transforms import FLOATS, Transform
from conduit.kernels.spec.windows import Transition
from conduit.native.jit import entry
from conduit.plane.deliver import fill
from conduit.plane.deliver.batch import OwnedBatch
from conduit.plane.deliver.batch_job import AGAIN, BatchJob, Scratch
from conduit.plane.deliver.buffers import Buffer, offsets_of, spans_of
from conduit.plane.deliver.transform_state import Transforming
from conduit.plane.device.row_sources import Residence
from conduit.schema import Schema
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]
Spans = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]

_STATE, _SHIFT = f"{INTERNAL}state", f"{INTERNAL}shift"
"""Arrays that are sent and not delivered: seed and number of the batch, and by how many rows a next observation's stack lies after
the observation's stack.
"""
_INT64 = np.dtype(np.int64)


def can_gather(plan: Plan) -> str:
    """The first output of a plan that the device cannot make from stored rows, as text, or an empty string."""
    if plan.ragged:
        return f"ragged fields ({plan.ragged[0].field.name!r})"
    for output in plan.outputs:
        if output.classes or output.normalize is not None or output.is_internal:
            return f"one_hot and normalize ({output.name!r})"
        if output.transform.is_clipped and output.transform.dtype not in FLOATS:
            return f"clipped integers ({output.name!r})"
    return ""


def check_plan(plan: Plan, schema: Schema) -> None:
    """Refuse a plan that was made for another schema: it would read the wrong bytes.

    Raises:
        SchemaMismatch: A field of the plan is not in the schema, or differs there.
    """
    for field in [
        *(item.field for item in plan.outputs),
        *(item.field for item in plan.ragged),
        *(item.field for item in plan.returns),
    ]:
        name = field.name
        have = schema[name] if name in schema.names else None
        if have != field:
            raise SchemaMismatch(
                f"Expected a plan that was made for this table's schema ({schema.fingerprint}), got one of {field} where the "
                f"table has {have}: make it with this schema - at `{name}`"
            )


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def view_of(memory: Tensor, offset: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor [*shape] that begins at byte `offset` of `memory`, uint8 [size]; `dtype` is a name in torch."""
    kind = _torch_dtype(dtype)
    size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    return memory[offset : offset + size].view(kind).view(shape)


class DeviceBatch(OwnedBatch):
    """A batch on a device, made on the stream that was current at the call of `next`.

    Use it on that stream, or tell the allocator about another stream by `tensor.record_stream`. The batch has memory of its own, which
    is freed with the last tensor made from it.
    """

    __slots__ = ("_device",)
    _device: Device

    def __init__(
        self,
        values: dict[str, Tensor],
        keys: dict[str, Tensor],
        schema: Schema,
        device: Device,
        reward_names: tuple[str, ...],
    ) -> None:
        super().__init__(values, keys, schema, reward_names)
        object.__setattr__(self, "_device", device)

    def _transform(self, transforming: Transforming, number: int) -> None:
        """Launch a loader's steps on the whole batch."""
        with self._device.guard():
            transforming.finish_on_device(self._values, number)


class DeviceBuffer(Buffer):
    """Pinned memory for one batch at a time, and the launches for it.

    Args:
        device: The device.
        table: The table.
        plan: The maker's plan.
        residence: Where the device reads rows; if None, the host makes the whole batch and the device gets a copy.
        scratch: Rows and pages of the samples. Each buffer has its own, which the device may still read while the next batch is made.

    Attributes:
        made: The part of the plan that the host makes.
    """

    def __init__(
        self, device: Device, table: TableView, plan: Plan, residence: Residence | None, scratch: Scratch
    ) -> None:
        check_plan(plan, table.layout.schema)
        self._device, self._table, self._plan, self._residence = device, table, plan, residence
        self.scratch = scratch
        # the device makes the fields, if it reads rows by itself, and the columns that steps on the whole batch add
        own = () if residence is None else plan.outputs
        names = {output.name for output in own} | {item.name for item in plan.added}
        kept = tuple(name for name in plan.names if name not in names)
        self.made = made = replace(plan, outputs=() if own else plan.outputs, added=(), batchwise=(), names=kept)
        sent: Spans = spans_of(made)
        self._kinds = [] if residence is None else sorted({output.rows for output in plan.outputs})
        self._pairs = [] if residence is None else stack_pairs(plan)
        self._moves = residence is not None and any(output.shift is not None for output in plan.outputs)
        for kind in self._kinds:
            shape = self.scratch.index[kind].shape
            sent |= {f"{INTERNAL}near {kind}": (_INT64, shape), f"{INTERNAL}far {kind}": (_INT64, shape)}
        sent[_SHIFT] = np.dtype(np.int32), (plan.batch_size if self._pairs else 0,)
        sent[_STATE] = _INT64, (2 if self._moves else 0,)
        self._sent = sent
        self._sent_at, self._sent_bytes = offsets_of(sent)
        self._pinned = device.pinned(self._sent_bytes)
        memory = self._pinned.numpy()
        super().__init__(made, memory=memory)
        size = plan.batch_size
        spans = {output.name: (output.numpy_dtype, (size, *output.lanes, *output.shape)) for output in own}
        self._added = {item.name: (np.dtype(item.dtype), (size, *item.lanes)) for item in plan.added}
        spans |= self._added
        self._made_at, self._made_bytes = offsets_of(spans)
        self._event: Event | None = None

    def _array(self, memory: Array, name: str) -> Array:
        dtype, shape = self._sent[name]
        return np.ndarray(shape, dtype, memory, self._sent_at[name])

    def given(self, job: BatchJob, seed: int = 0) -> None:
        """Set the job that draws for the buffer, and the seed of its random numbers."""
        super().given(job)
        if self._residence is not None:
            self._describe(self._residence, self._pinned.numpy(), seed)

    def _describe(self, residence: Residence, memory: Array, seed: int) -> None:
        """Fill in the words of the staging (kernels.cpu.near_far), and allocate pinned memory for far rows."""
        plan, table, size = self._plan, self._table, self._plan.batch_size
        self._state = self._array(memory, _STATE)
        if self._moves:
            self._state[0] = np.uint64(seed % 2**64).astype(np.int64)
        indices = np.zeros((len(self._kinds), near_far.INDEX_WORDS), np.int64)
        listed: dict[str, Array] = {}
        for words, kind in zip(indices, self._kinds, strict=True):
            index = self.scratch.index[kind]
            listed[kind] = np.zeros(index.shape, np.int64)
            words[:] = (
                index.ctypes.data,
                index[:1].size,
                self._array(memory, f"{INTERNAL}near {kind}").ctypes.data,
                self._array(memory, f"{INTERNAL}far {kind}").ctypes.data,
                listed[kind].ctypes.data,
            )
        spans: Spans = {
            output.name: (np.dtype(output.field.numpy_dtype), (size * output.lane_count, *output.field.shape))
            for output in plan.outputs
        }
        self._far_at, far_bytes = offsets_of(spans)
        self._far_pinned = self._device.pinned(far_bytes)
        far = self._far_pinned.numpy().ctypes.data
        copies = np.zeros((len(plan.outputs), rows.OP_WORDS), np.int64)
        for words, output in zip(copies, plan.outputs, strict=True):
            column = table.columns[output.field.name]
            raw = Output(output.name, output.field, output.rows, output.lanes, Transform(output.field.dtype))
            at = listed[output.rows].ctypes.data
            words[:] = rows.describe(
                raw, column.ctypes.data, column.strides[0], far + self._far_at[output.name], at, size
            )
        self._numbers, self._near = np.zeros((2, size), np.int64)
        self._lists = np.zeros((4, size), np.int64)
        self._lists[0] = np.arange(size)
        self._staging = np.zeros(near_far.SPLIT_WORDS, np.int64)
        for offset, value in (
            (near_far.SPLIT_JOB, self.job_address),
            (near_far.SPLIT_PLACES, residence.places.ctypes.data),
            (near_far.SPLIT_PAGE_ROWS, table.layout.page_rows),
            (near_far.SPLIT_INDICES, indices.ctypes.data),
            (near_far.SPLIT_INDEX_COUNT, len(indices)),
            (near_far.SPLIT_COPIES, copies.ctypes.data),
            (near_far.SPLIT_COPY_COUNT, len(copies)),
            (near_far.SPLIT_NUMBERS, self._numbers.ctypes.data),
            (near_far.SPLIT_FAR, self._lists[1].ctypes.data),
            (near_far.SPLIT_NEAR, self._near.ctypes.data),
        ):
            self._staging[offset // 8] = value
        if self._pairs:
            for offset, value in (
                (near_far.SPLIT_STACK, self.scratch.index["stack"].ctypes.data),
                (near_far.SPLIT_FOLLOWING_STACK, self.scratch.index["following_stack"].ctypes.data),
                (near_far.SPLIT_STACK_SIZE, self.scratch.index["stack"].shape[1]),
                (near_far.SPLIT_SHIFT, self._array(memory, _SHIFT).ctypes.data),
            ):
                self._staging[offset // 8] = value
        self._own = indices, listed, copies

    def is_free(self) -> bool:
        """True when the device has read all of the last batch."""
        return self._event is None or self._event.passed()

    def wait(self) -> bool:
        """Wait until the buffer is free: the device's work ends by itself."""
        if self._event is not None:
            self._event.wait()
        return True

    def stage(self, slots: Array | None) -> bool:
        """Find out which of the drawn samples the device reads by itself, and copy the rows of the others.

        Slots whose rows a writer has overwritten meanwhile are drawn again.

        Args:
            slots: int64 [n], the slots that were drawn since the last call; None for all.

        Returns:
            False when a slot had to be drawn again and there was nothing to draw.
        """
        residence = self._residence
        assert residence is not None  # noqa: S101 - for the type checker
        residence.settle(self.scratch.pages, self.scratch.generations)
        everyone, _, lost, scratch = (self._lists[i].ctypes.data for i in range(4))
        words, count = self._staging.ctypes.data, len(self._numbers)
        if slots is None:
            self._numbers[:] = -1
            self._staging[near_far.SPLIT_USED // 8] = 0
        else:
            listed = np.ascontiguousarray(slots, np.int64)
            everyone, count = listed.ctypes.data, len(listed)
        left = entry(near_far.stage)(words, everyone, count, lost)
        attempt = AGAIN
        while left > 0:
            attempt = entry(fill.draw_again)(self.job_address, lost, left, attempt, scratch)
            if attempt < 0:
                return False
            again = self._lists[2, :left].copy()
            residence.settle(self.scratch.pages[again], self.scratch.generations[again])
            left = entry(near_far.stage)(words, again.ctypes.data, left, lost)
        return True

    @property
    def far(self) -> int:
        """Samples of the last batch whose rows the host copied."""
        return self._plan.batch_size - (int(self._near.sum()) if self._residence is not None else 0)

    def send(self, number: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Launch the copy and the gathers of the batch that was drawn, without waiting.

        Args:
            number: Number of the batch.

        Returns:
            The batch's values and its keys, by name, on the device.
        """
        if self._moves:
            self._state[1] = number
        memory = self._device.empty(self._sent_bytes + self._made_bytes)
        self._device.upload(memory[: self._sent_bytes], self._pinned)
        tensors = {
            name: view_of(memory, self._sent_at[name], dtype.name, shape) for name, (dtype, shape) in self._sent.items()
        }
        for names, starts in self.narrowed:
            for name in names:
                tensors[name] = tensors[name][: starts[-1]]
        for name in self.brains:
            tensors[name] = tensors[name].view(_torch_dtype("bfloat16"))
        for name, (dtype, shape) in self._added.items():
            tensors[name] = view_of(memory, self._sent_bytes + self._made_at[name], dtype.name, shape)
        if self._residence is not None:
            for output in self._plan.outputs:
                shape = (self._plan.batch_size, *output.lanes, *output.shape)
                at = self._sent_bytes + self._made_at[output.name]
                tensors[output.name] = view_of(memory, at, output.transform.dtype, shape)
            far = self.far
            if far < self._plan.batch_size:
                self._gather(self._residence.columns, "near", tensors)
            if far:
                # some copies may belong to samples that were drawn again since and are near now
                self._gather_far(int(self._staging[near_far.SPLIT_USED // 8]), tensors)
        self._event = self._device.record()
        if self._residence is not None:
            self._residence.batched(self._event)
        return {name: tensors[name] for name in self._plan.names}, {name: tensors[name] for name in KEYS}

    def _gather_far(self, used: int, tensors: dict[str, Tensor]) -> None:
        """Send the copies of far rows to the device, and gather from them."""
        columns: dict[str, Tensor] = {}
        for output in self._plan.outputs:
            count = used * output.lane_count
            size, at = count * output.field.row_bytes, self._far_at[output.name]
            memory = self._device.empty(size)
            self._device.upload(memory, self._far_pinned[at : at + size])
            columns[output.name] = view_of(memory, 0, output.field.dtype, (count, *output.field.shape))
        self._gather(columns, "far", tensors)

    def _gather(self, columns: dict[str, Tensor], way: str, tensors: dict[str, Tensor]) -> None:
        """Launch the gathers of near or far rows; near columns are named by field, far columns by output."""
        from conduit.kernels.gpu import augment as frames
        from conduit.kernels.gpu.gather import MOST_FIELDS, Gather, gather

        near = way == "near"
        paired = {name for pair in self._pairs for name in pair} if near else set()
        items = []
        for output in self._plan.outputs:
            column = columns[output.field.name if near else output.name]
            index, out = tensors[f"{INTERNAL}{way} {output.rows}"], tensors[output.name]
            if output.shift is not None:
                pick = augment.pick_of(output, self._table.layout.schema.names)
                frames.moved_images(
                    column,
                    index,
                    tensors[_STATE],
                    out,
                    transform=output.transform,
                    shift=output.shift,
                    pick=pick,
                    name=output.name,
                )
            elif output.name not in paired:
                items.append(Gather(column, index, out, output.transform, output.name))
        for first in range(0, len(items), MOST_FIELDS):
            gather(items[first : first + MOST_FIELDS])
        for name, following in self._pairs if near else ():
            output = next(output for output in self._plan.outputs if output.name == name)
            window = self._plan.window
            frames.frame_stacks(
                columns[output.field.name],
                tensors[f"{INTERNAL}near stack"],
                tensors[f"{INTERNAL}near following_stack"],
                tensors[_SHIFT],
                tensors[name],
                tensors[following],
                transform=output.transform,
                n_step=window.n_step if isinstance(window, Transition) else 1,
                name=name,
            )


def stack_pairs(plan: Plan) -> list[tuple[str, str]]:
    """Pairs of outputs, a stack and the next observation's stack, which one launch makes and reads each frame once."""
    outputs = {output.name: output for output in plan.outputs}
    return [
        (name, NEXT + name)
        for name, output in outputs.items()
        if output.rows == "stack"
        and output.shift is None
        and NEXT + name in outputs
        and outputs[NEXT + name].field is output.field
    ]
