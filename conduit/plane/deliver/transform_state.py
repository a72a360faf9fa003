"""The parts of a loader's transforms outside the compiled call.

Statistics are read before the call. After it, values are checked, the steps on the whole batch run, and statistics are updated last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from conduit.errors import ConfigError, FieldError
from conduit.kernels.cpu import augment
from conduit.kernels.cpu.gather import OP_REFUSED
from conduit.kernels.reference import gather
from conduit.kernels.spec.batch_transforms import BatchTransform
from conduit.kernels.spec.plan import IDS, STORED, Output, Plan
from conduit.plane.deliver.refused_values import FINITE, MORE_CLASSES, classes_of, numbers, refusal
from conduit.store.tables.statistics import Statistics
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]


class Transforming:
    """The state of a loader's transforms, shared by its buffers.

    Args:
        table: The table.
        plan: The loader's plan.
        seed: The loader's seed.

    Attributes:
        prepares: Whether `before` has anything to do.
        inspects: Whether `after` has anything to do.
        seed: The loader's seed as a word of 64 bits.

    Raises:
        ConfigError: The plan normalizes a field of which the table keeps no statistics.
    """

    def __init__(self, table: TableView, plan: Plan, seed: int) -> None:
        self._table = table
        self._plan = plan
        self._names = table.layout.schema.names
        self._seed = seed
        self.seed = int(np.uint64(seed % 2**64).astype(np.int64))
        self._draw = np.zeros(2, np.int64)
        self._draw[0] = np.uint64(seed % 2**64).astype(np.int64)
        self._scales: dict[str, Array] = {}
        self._stamps: dict[str, int] = {}
        self._eps: dict[str, float] = {}
        for output in plan.outputs:
            name = output.field.name
            if output.normalize is None or name in self._scales:
                continue
            if name not in table.layout.statistics:
                raise ConfigError(
                    f"Expected table {table.layout.name!r} to keep statistics of the field, it keeps those of "
                    f"{list(table.layout.statistics)}: create it with statistics=({name!r},) - at transform[{name!r}]"
                )
            self._scales[name] = np.zeros((2, *output.field.shape))
            self._eps[name] = output.normalize.eps
        self._updates = [output for output in plan.outputs if output.name.startswith(STORED)]
        self._indicators = [(i, output) for i, output in enumerate(plan.outputs) if output.classes]
        self._pending: dict[str, Array] = {}
        self._moves = any(output.shift is not None for output in plan.outputs)
        self.prepares = self._moves or bool(self._scales)
        self.inspects = bool(self._indicators or self._updates)

    def describe(self, output: Output, column: Array, out: int, index: int) -> Array:
        """The descriptor of an output's row operation; `column` is the field's column, `out` and `index` are addresses."""
        scales = self._scales.get(output.field.name)
        return augment.describe(
            output,
            column.ctypes.data,
            column.strides[0],
            out,
            index,
            self._plan.batch_size,
            pick=augment.pick_of(output, self._names),
            random=self._draw.ctypes.data,
            statistics=(0, 0) if scales is None else (scales[:1].ctypes.data, scales[1:].ctypes.data),
        )

    def before(self, number: int) -> None:
        """Prepare batch `number`: set the random counter of its shifts, and read the statistics."""
        if self._moves:
            self._draw[1] = number
        statistics = Statistics(self._table)
        for name, scales in self._scales.items():
            stamp = statistics.stamp(name)
            if self._stamps.get(name) == stamp:
                continue
            moments = statistics.read(name)
            scales[0] = moments.mean
            if moments.count == 0:
                scales[1] = 1.0
            else:
                with np.errstate(divide="ignore"):  # eps may be 0, and then the user's infinities are meant
                    scales[1] = 1.0 / np.sqrt(moments.variance + self._eps[name])
            self._stamps[name] = stamp

    def after(self, arrays: Mapping[str, Array], index: Mapping[str, Array], operations: Array, slots: slice) -> None:
        """Check the gathered values, and keep those that statistics take until `deliver` adds them or the next batch replaces them.

        Args:
            arrays: The batch's arrays, with its ids.
            index: {kind of rows that an output reads: physical rows} of the batch.
            operations: Descriptors of the row operations, in the plan's order.
            slots: The slots that were filled.

        Raises:
            FieldError: A class is out of range, or statistics cannot take a value; names the first one and its row.
        """
        self._pending = {}
        for i, output in self._indicators:
            if operations[i, OP_REFUSED // 8]:
                operations[i, OP_REFUSED // 8] = 0
                self._check_classes(output, arrays, index[output.rows][slots], slots)
        pending = {}
        for output in self._updates:
            values, there = arrays[output.name][slots], index[output.rows][slots] >= 0
            bad = ~np.isfinite(numbers(output, values)) & there.reshape(*there.shape, *(1 for _ in output.field.shape))
            if bad.any():
                help_ = "leave statistics alone with conduit.normalize(update=False)"
                raise self._refusal(output, arrays, index[output.rows][slots], slots, bad, FINITE, help_)
            pending[output.field.name] = values[there]
        self._pending = pending

    def deliver(self) -> None:
        """Add the values of the batch that `after` checked to the statistics, all fields in one update; the batch is delivered."""
        if self._pending:
            pending, self._pending = self._pending, {}
            Statistics(self._table).update(pending)

    def _check_classes(self, output: Output, arrays: Mapping[str, Array], index: Array, slots: slice) -> None:
        """Refuse classes that are out of range in the batch. The kernel's count also has rows that were drawn again since."""
        off, on = augment.indicators(output)
        if off == on:
            return
        array = arrays[output.name][slots]
        beside = np.asarray(off, np.float32)
        absent = gather.to_bfloat16(beside) if output.transform.dtype == "bfloat16" else beside.astype(array.dtype)
        lacks = (array == absent).all(-1) & (index >= 0).reshape(*index.shape, *(1 for _ in output.field.shape))
        if lacks.any():
            raise self._refusal(output, arrays, index, slots, lacks, classes_of(output), MORE_CLASSES)

    def _refusal(
        self,
        output: Output,
        arrays: Mapping[str, Array],
        index: Array,
        slots: slice,
        bad: Array,
        what: str,
        help_: str,
    ) -> FieldError:
        """The error for the first value that is marked in `bad`, bool [slots, *lanes, *shape]."""
        place = tuple(np.argwhere(bad)[0].tolist())
        slot, lanes, inside = place[0], place[: index.ndim], place[index.ndim :]
        row_id = int(arrays[IDS][slots][slot])
        return refusal(
            output,
            what,
            self._table.columns[output.field.name][int(index[lanes])],
            inside,
            ("the sample of row", row_id),
            (int(bad.sum()), "batch"),
            f"client.table({self._table.layout.name!r}).delete([{row_id}]) takes the row out, or {help_}; the next call draws another batch",
        )

    def finish(self, values: dict[str, Any], arrays: Mapping[str, Array], number: int) -> None:
        """Run the steps on the whole batch, {name: value}; `arrays` is the memory of the values."""
        for step in self._steps(values):
            step.run(values, arrays, (self._seed, number))

    def finish_on_device(self, values: dict[str, Any], number: int) -> None:
        """Launch the steps on a whole batch that lies on a device, {name: tensor}."""
        for step in self._steps(values):
            step.run_on_device(values, (self._seed, number))

    def _steps(self, values: dict[str, Any]) -> Iterator[BatchTransform]:
        """The steps on the whole batch, in order. The arrays that a step fills are in `values` when its turn comes, and not before.

        Raises:
            FieldError: A user's function has added an array with the name of an array of a later step.
        """
        pending = {item.name: values.pop(item.name) for item in self._plan.added}
        names = iter(pending)
        for step, count in zip(self._plan.batchwise, self._plan.adds, strict=True):
            for name in itertools.islice(names, count):
                if name in values:
                    raise FieldError(
                        f"Expected one step to make it, got two: another name for what conduit.apply's function adds - at "
                        f"batch_transforms, {step}",
                        at=name,
                    )
                values[name] = pending[name]
            yield step
