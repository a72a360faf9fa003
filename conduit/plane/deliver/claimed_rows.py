"""The arrays of a claim: views of the rows in their page, or arrays of the claim's own for fields with transforms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from conduit.errors import ConfigError
from conduit.field import Field
from conduit.kernels.spec.batch_transforms import Apply, BatchTransform, Contents, check_new
from conduit.kernels.spec.names import shown
from conduit.kernels.spec.plan import FLAGS, Computed
from conduit.kernels.spec.windows import Rollout
from conduit.plane.deliver.batch import Wrap, as_bfloat16
from conduit.plane.deliver.convert import Converting
from conduit.store.format.columns import META_DTYPE
from conduit.store.format.soundness import check_spans
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

MARKS = ("is_first", "mask")
BOOTSTRAP = "bootstrap_"
"""Names in a claim as a batch beside the fields: MARKS describe its rows, BOOTSTRAP is the prefix of a bootstrap observation."""


class Columns:
    """Makes the arrays of all claims of a consumer.

    Args:
        table: The queue.
        make: Makes a delivered value of a view of shared memory.
        own: Makes a delivered value of an array that belongs to the claim.
        steps: Steps on each claim's arrays as a batch of one rollout.
        rename: {field, or parent: name in claims}.
        converting: The consumer's transforms.

    Raises:
        ConfigError: A step is not a batch transform, lacks its inputs, or adds a column that exists already; or a name is not possible.
    """

    def __init__(
        self,
        table: TableView,
        make: Wrap,
        own: Wrap,
        steps: Iterable[BatchTransform],
        rename: Mapping[str, str] | None,
        converting: Converting,
    ) -> None:
        self.table = table
        self.converting = converting
        self.schema = shown(table.layout.schema, rename)
        # {name in claims: name in the table}
        self.stored = dict(zip(self.schema.names, table.layout.schema.names, strict=True))
        self.converted = {name: field for name, field in self.stored.items() if field in converting.outputs}
        self.make = make
        self.own = own
        self.page_rows = table.layout.page_rows
        self.names = (*self.schema.names, *FLAGS)
        base = table.segment.base
        arrays = {name: table.columns[stored] for name, stored in self.stored.items()}
        arrays |= {"terminated": table.terminated, "truncated": table.truncated}
        # by name: dtype, shape and strides of a row, stride from row to row, place in the segment
        self._described = {
            name: (array.dtype, array.shape[1:], array.strides[1:], array.strides[0], array.ctypes.data - base)
            for name, array in arrays.items()
        }
        meta = table.meta.ctypes.data - base
        for name, (dtype, offset, *_) in (META_DTYPE.fields or {}).items():
            self._described[f".{name}"] = (dtype, (), (), META_DTYPE.itemsize, meta + offset)
        self._brains = frozenset(field.name for field in self.schema.fields if field.dtype == "bfloat16")
        self._odd = self._brains | frozenset(self.schema.ragged_names)
        self.steps = tuple(steps) if isinstance(steps, Iterable) else (steps,)
        for step in self.steps:
            if not isinstance(step, BatchTransform):
                raise ConfigError(
                    f"Expected conduit.gae, vtrace, returns_to_go, normalize_advantages or apply, got "
                    f"{type(step).__name__} - at batch_transforms"
                )
        if self.steps:
            self._check_steps()

    def check_batch(self) -> None:
        """Refuse a field that has the name of another column of a claim's batch.

        Raises:
            ConfigError: There is such a field.
        """
        for name in (*MARKS, *map(BOOTSTRAP.__add__, self.schema.observation_names)):
            if name in self.stored:
                stored = self.stored[name]
                raise ConfigError(
                    f"Expected each name in a batch once, got the stored field `{stored}` and the `{name}` of a claim as a "
                    f"batch: open the consumer with rename={{{stored!r}: 'stored_{name}'}} - at `{name}`"
                )

    def _check_steps(self) -> None:
        """Check that the steps have their inputs, for a claim that has every optional column."""
        self.check_batch()
        table = self.table.layout.table
        lead = (table.rollout_length or 1, table.num_envs or 1)
        fields = [field for field in self.schema.fields if not field.ragged]
        kinds = {field.name: self._kind(field) for field in fields}
        known = {name: Computed(name, dtype, (*lead, *shape)) for name, (dtype, shape) in kinds.items()}
        known |= {name: Computed(name, "bool", lead) for name in (*FLAGS, *MARKS)}
        for field in fields:
            if field.observation:
                name = BOOTSTRAP + field.name
                dtype, shape = kinds[field.name]
                known[name] = Computed(name, dtype, (lead[1], *shape))
        self.steps = tuple(
            step.bound(Contents(Rollout(*lead), known, False, self.schema.reward_names)) for step in self.steps
        )
        is_open = False
        for step in self.steps:
            for item in step.outputs(Contents(Rollout(*lead), known, is_open, self.schema.reward_names)):
                check_new(item.name, known, step)
                known[item.name] = item
            is_open = is_open or isinstance(step, Apply)

    def _kind(self, field: Field) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of a field's rows in a claim."""
        if field.name not in self.converted:
            return field.dtype, field.shape
        output = self.converting.outputs[self.converted[field.name]]
        return output.transform.dtype, output.shape

    def array(self, hold: Any, name: str, row: int, lead: tuple[int, ...]) -> Array:
        """View of consecutive rows of a column from physical row `row` on, [*lead, *shape], that keeps `hold` alive."""
        dtype, shape, inner, stride, offset = self._described[name]
        outer = (stride,) if len(lead) == 1 else (lead[1] * stride, stride)
        return np.ndarray((*lead, *shape), dtype, hold, offset + row * stride, (*outer, *inner))

    def deliver(self, hold: Any, name: str, row: int, lead: tuple[int, ...]) -> Any:
        """`array` as it is delivered; for a ragged field a list of one value per row."""
        if name in self._odd:
            if name not in self._brains or self.schema[name].ragged:
                return self._values(hold, name, row, lead)
            return as_bfloat16(self.make(self.array(hold, name, row, lead)))
        # `array`, written out, since learners wait for this call
        dtype, shape, inner, stride, offset = self._described[name]
        outer = (stride,) if len(lead) == 1 else (lead[1] * stride, stride)
        return self.make(np.ndarray((*lead, *shape), dtype, hold, offset + row * stride, (*outer, *inner)))

    def _values(self, hold: Any, name: str, row: int, lead: tuple[int, ...]) -> list[Any]:
        arena = self.table.arenas[self.stored[name]][row // self.page_rows]
        item = arena.strides[0]
        start = arena.ctypes.data - self.table.segment.base
        spans = self.table.columns[self.stored[name]][row : row + int(np.prod(lead))]
        check_spans(self.table.layout, self.stored[name], row // self.page_rows, spans)
        found = []
        for first, length in spans.tolist():
            shape = (length, *arena.shape[1:])
            value = self.make(np.ndarray(shape, arena.dtype, hold, start + first * item, arena.strides))
            found.append(as_bfloat16(value) if name in self._brains else value)
        return found
