"""A plan: which outputs a batch has, where each comes from, and what is done to it. Data, not code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from conduit.errors import ConfigError
from conduit.field import Field
from conduit.kernels.transforms import Transform
from conduit.schema import Schema

NEXT = "next_"
FLAGS = ("terminated", "truncated")


@dataclass(frozen=True, slots=True)
class Output:
    """One array of a batch.

    Attributes:
        name: Name in the batch, "next_" + field for the observation that follows.
        field: The schema's field it is read from.
        following: Read from the row of the next observation instead of the anchor row.
        transform: What is done to it.
    """

    name: str
    field: Field
    following: bool
    transform: Transform

    @property
    def numpy_dtype(self) -> np.dtype:
        """Dtype of the output array; bfloat16 as its uint16 bits."""
        return np.dtype(Field("out", self.transform.dtype).numpy_dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the output."""
        return self.numpy_dtype.itemsize * int(np.prod(self.field.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Plan:
    """What one batch is made of.

    Attributes:
        batch_size: Rows.
        outputs: In the order of the batch.
        flags: Which of "terminated" and "truncated" are delivered, as bool.
    """

    batch_size: int
    outputs: tuple[Output, ...]
    flags: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Names in the batch, in its order."""
        return [*(output.name for output in self.outputs), *self.flags]

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal characters: equal plans have equal ones, in every process."""
        document = [
            self.batch_size,
            self.flags,
            [
                (
                    o.name,
                    o.field.name,
                    o.field.dtype,
                    o.field.shape,
                    o.following,
                    o.transform.dtype,
                    o.transform.factor,
                    o.transform.offset,
                )
                for o in self.outputs
            ],
        ]
        return hashlib.sha256(msgspec.json.encode(document)).hexdigest()[:16]

    @property
    def sample_bytes(self) -> int:
        """Bytes of output per row of the batch."""
        return sum(output.row_bytes for output in self.outputs)


def make_plan(
    schema: Schema,
    batch_size: int,
    transform: Mapping[str, Transform] | None = None,
    fields: Iterable[str] | None = None,
) -> Plan:
    """Compile the plan for 1-step transitions of a schema.

    Args:
        schema: The table's.
        batch_size: Rows per batch, at least 1.
        transform: {field: Transform}; one for an observation also applies to what follows it. A dotted name's parent
            ("obs" for "obs.camera") stands for all below it that are not named themselves.
        fields: Outputs to deliver, in this order, flags last; None for all: fields, next observations, terminated,
            truncated.

    Raises:
        ConfigError: Unknown names, sizes or casts.
    """
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ConfigError(f"Expected a batch_size of at least 1, got {batch_size!r}")
    if transform is not None and not isinstance(transform, Mapping):
        raise ConfigError(f"Expected a mapping of fields to transforms, got {type(transform).__name__} - at transform")
    if isinstance(fields, str):
        raise ConfigError(f"Expected a list of outputs, got the string {fields!r} - at fields")
    chosen = _transforms(schema, transform or {})
    every = [*schema.names, *(NEXT + name for name in schema.observation_names), *FLAGS]
    wanted = every if fields is None else list(fields)
    for name in wanted:
        if name not in every:
            raise ConfigError(f"Expected outputs among {every}, got {name!r}")
    if len(set(wanted)) != len(wanted) or not wanted:
        raise ConfigError(f"Expected each output once and at least one, got {wanted}")
    outputs = []
    for name in wanted:
        if name in FLAGS:
            continue
        following = name not in schema.names
        field = schema[name.removeprefix(NEXT) if following else name]
        outputs.append(Output(name, field, following, chosen.get(field.name, Transform(field.dtype))))
    return Plan(batch_size, tuple(outputs), tuple(name for name in wanted if name in FLAGS))


def _transforms(schema: Schema, given: Mapping[str, Transform]) -> dict[str, Transform]:
    chosen: dict[str, Transform] = {}
    # what is named more exactly comes later and wins
    for name, item in sorted(given.items(), key=lambda pair: str(pair[0]).count(".")):
        names = [field for field in schema.names if field == name or field.startswith(f"{name}.")]
        if not names:
            raise ConfigError(f"Expected a field among {list(schema.names)}, got {name!r} - at transform")
        if not isinstance(item, Transform):
            raise ConfigError(
                f"Expected conduit.scale(...) or conduit.cast(...), got {type(item).__name__} - at transform[{name!r}]"
            )
        for field in names:
            item.check_source(schema[field].dtype, field)
            chosen[field] = item
    return chosen
