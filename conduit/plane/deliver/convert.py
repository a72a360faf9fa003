"""A consumer's transforms: they make arrays of the claim's own, by the same row operations as a loader's.

Transforms run when the rows are claimed, with one reading of the running statistics; a claim with a refused row is not delivered.
`normalize(update=True)` adds a claim to the statistics when it is acknowledged, so rows that are delivered again are counted once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from conduit.errors import ConfigError
from conduit.kernels.cpu import augment
from conduit.kernels.cpu.gather import OP_REFUSED
from conduit.kernels.spec.conversion import conversions
from conduit.kernels.spec.plan import Output
from conduit.kernels.spec.transforms import Pipeline
from conduit.plane.deliver.batch import Wrap, as_bfloat16
from conduit.plane.deliver.refused_values import FINITE, MORE_CLASSES, classes_of, numbers, refusal
from conduit.store.format import words as w
from conduit.store.tables.statistics import Statistics
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

_ALIGNED = 64

Reading = dict[str, Array]
"""{field: float64 [2, *shape], mean and inverse standard deviation}; read-only once made."""


@functools.cache
def _operation(address: int) -> Callable[[int, int, int, int], int]:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(address)


class Converting:
    """The transforms of one consumer.

    Args:
        table: The queue.
        transform: {field, or parent: step or tuple of steps}.
        own: Makes a delivered value of an array that belongs to the claim.

    Attributes:
        outputs: {field: its output after the transforms}.

    Raises:
        ConfigError: A transform does not fit its field, or does not work in a consumer.
    """

    def __init__(self, table: TableView, transform: Mapping[str, Pipeline] | None, own: Wrap) -> None:
        if transform is not None and not isinstance(transform, Mapping):
            raise ConfigError(
                f"Expected a mapping of fields to transforms, got {type(transform).__name__} - at transform"
            )
        self._table, self._own = table, own
        self.outputs: dict[str, Output] = {}
        self._reading: Reading = {}
        self._stamps: dict[str, int] = {}
        for name, done in conversions(table.layout.schema, transform or {}).items():
            field = table.layout.schema[name]
            if field.ragged or done.shift is not None:
                what = "a ragged field, whose values a claim gives one by one" if field.ragged else "random_shift"
                raise ConfigError(
                    f"Expected conduit.scale, cast, clip, one_hot or normalize of fields of a fixed shape in a consumer, got {what}: "
                    f"leave it out, and apply it to the claim's arrays - at transform[{name!r}]"
                )
            if done.normalize is not None and name not in table.layout.statistics:
                raise ConfigError(
                    f"Expected table {table.layout.name!r} to keep statistics of the field, it keeps those of "
                    f"{list(table.layout.statistics)}: create it with statistics=({name!r},) - at transform[{name!r}]"
                )
            self.outputs[name] = Output(
                name, field, "anchor", (), done.transform, done.classes, done.normalize, None, done.start
            )

    def read(self) -> Reading:
        """The statistics as they are now."""
        statistics = Statistics(self._table)
        for name, output in self.outputs.items():
            if output.normalize is None or self._stamps.get(name) == (stamp := statistics.stamp(name)):
                continue
            moments = statistics.read(name)
            scales = np.ones((2, *output.field.shape))
            scales[0] = moments.mean
            if moments.count:
                with np.errstate(divide="ignore"):  # eps may be 0, and then the user's infinities are meant
                    scales[1] = 1.0 / np.sqrt(moments.variance + output.normalize.eps)
            self._reading = {**self._reading, name: scales}
            self._stamps[name] = stamp
        return self._reading

    def make(
        self,
        name: str,
        rows: Array,
        generation: int,
        lead: tuple[int, ...],
        reading: Reading,
        counts: Array | None = None,
    ) -> Any:
        """A field's rows, converted, as they are delivered.

        Args:
            name: The field.
            rows: int64 [n], physical rows that the caller has claimed.
            generation: Generation of their page.
            lead: Axes before the field's shape; n elements.
            reading: The statistics, from `read`.
            counts: bool [n], True for rows whose values are checked; None for all.

        Returns:
            [*lead, *shape], of the transform's dtype; numpy arrays hold bfloat16 as its uint16 bits.

        Raises:
            FieldError: A class out of range.
        """
        output, column = self.outputs[name], self._table.columns[name]
        memory = np.empty(output.row_bytes * len(rows) + _ALIGNED, np.uint8)
        made = np.ndarray((len(rows), *output.shape), output.numpy_dtype, memory, -memory.ctypes.data % _ALIGNED)
        scales = reading.get(name)
        at = (0, 0) if scales is None else (scales[:1].ctypes.data, scales[1:].ctypes.data)
        slots = np.arange(len(rows))
        words = augment.describe(
            output,
            column.ctypes.data,
            column.strides[0],
            made.ctypes.data,
            rows.ctypes.data,
            len(rows),
            statistics=at,
        )
        _operation(int(words[0]))(words.ctypes.data, slots.ctypes.data, len(rows), 0)
        if words[OP_REFUSED // 8]:
            values = column[rows]
            bad = (values < output.start) | (values > output.start + (output.classes - 1))
            self._refuse(output, rows, generation, bad, counts, classes_of(output), MORE_CLASSES)
        value = self._own(made.reshape(*lead, *output.shape))
        return as_bfloat16(value) if output.transform.dtype == "bfloat16" else value

    def check(self, name: str, rows: Array, generation: int, counts: Array) -> None:
        """Refuse values that statistics cannot take.

        Raises:
            FieldError: A value is not finite.
        """
        output = self.outputs[name]
        if output.normalize is not None and output.normalize.update:
            bad = ~np.isfinite(self._values(output, rows))
            self._refuse(output, rows, generation, bad, counts, FINITE, "use conduit.normalize(update=False)")

    def count(self, rows: Array, is_step: Array) -> None:
        """Add acknowledged rows to the statistics; rows that are only an observation count for the observations only."""
        taken = {
            name: self._values(output, rows if output.field.observation else rows[is_step])
            for name, output in self.outputs.items()
            if output.normalize is not None and output.normalize.update
        }
        if taken:
            Statistics(self._table).update(taken)

    def _values(self, output: Output, rows: Array) -> Array:
        return numbers(output, self._table.columns[output.field.name][rows])

    def _refuse(
        self, output: Output, rows: Array, generation: int, bad: Array, counts: Array | None, what: str, help_: str
    ) -> None:
        if counts is not None and not output.field.observation:
            bad = bad & counts.reshape(-1, *(1 for _ in output.field.shape))
        if not bad.any():
            return
        place = tuple(np.argwhere(bad)[0].tolist())
        row = int(rows[place[0]])
        row_id = (generation & w.GENERATION_MASK) << w.ROW_BITS | row
        raise refusal(
            output,
            what,
            self._table.columns[output.field.name][row],
            place[1:],
            ("row", row_id),
            (int(bad.sum()), "claim"),
            f"{help_}, or open the consumer with on_refused='drop' to pass such claims over",
        )
