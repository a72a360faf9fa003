"""A plan: which outputs a batch has, where each comes from, and what is done to it. Data, not code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from conduit.errors import ConfigError
from conduit.field import Field
from conduit.kernels.transforms import Transform
from conduit.kernels.windows import Episode, Rollout, Sequence, Transition, Window, lanes
from conduit.schema import Schema

NEXT = "next_"
FLAGS = ("terminated", "truncated")


Rows = Literal["anchor", "following", "stack", "following_stack", "lanes"]
"""Which row numbers of a window an output reads."""


@dataclass(frozen=True, slots=True)
class Output:
    """One array of a batch that is read from a field.

    Attributes:
        name: Name in the batch, "next_" + field for the observation that follows.
        field: The schema's field it is read from.
        rows: Which rows of the window it reads.
        lanes: Axes between the batch and the field's shape.
        transform: What is done to it.
    """

    name: str
    field: Field
    rows: Rows
    lanes: tuple[int, ...]
    transform: Transform

    @property
    def lane_count(self) -> int:
        """Rows read per sample."""
        return int(np.prod(self.lanes, dtype=np.int64))

    @property
    def numpy_dtype(self) -> np.dtype:
        """Dtype of the output array; bfloat16 as its uint16 bits."""
        return np.dtype(Field("out", self.transform.dtype).numpy_dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the output."""
        return self.numpy_dtype.itemsize * int(np.prod(self.field.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Computed:
    """One array of a batch that the window makes from flags and rewards.

    Attributes:
        name: Name in the batch.
        dtype: numpy dtype name.
        lanes: Axes behind the batch.
    """

    name: str
    dtype: str
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one batch is made of.

    Attributes:
        batch_size: Samples.
        window: What a sample is built from.
        outputs: Arrays read from fields.
        computed: Arrays that the window makes.
        names: All of them, in the order of the batch.
        reward: Transform of single rewards before they are summed up, where the window sums.
    """

    batch_size: int
    window: Window
    outputs: tuple[Output, ...]
    computed: tuple[Computed, ...]
    names: tuple[str, ...]
    reward: Transform | None = None

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal characters: equal plans have equal ones, in every process."""
        return hashlib.sha256(msgspec.json.encode([type(self.window).__name__, self])).hexdigest()[:16]

    @property
    def sample_bytes(self) -> int:
        """Bytes of output per sample."""
        return sum(output.row_bytes * output.lane_count for output in self.outputs)


def _computed(window: Window, reward: Field | None) -> dict[str, Computed]:
    """Everything that a window can make, by name."""
    axes = lanes(window)
    made = {flag: Computed(flag, "bool", axes) for flag in FLAGS}
    if isinstance(window, Transition):
        if window.n_step > 1:
            made["discount"] = Computed("discount", "float32", ())
            made["n_steps"] = Computed("n_steps", "int64", ())
            if reward is not None:
                made[reward.name] = Computed(reward.name, "float64" if reward.dtype == "float64" else "float32", ())
        return made
    made |= {name: Computed(name, "bool", axes) for name in ("is_first", "mask")}
    if isinstance(window, Sequence):
        made["loss_mask"] = Computed("loss_mask", "bool", axes)
    if not isinstance(window, Rollout):
        made["lengths"] = Computed("lengths", "int64", ())
    return made


def _source(schema: Schema, window: Window, name: str) -> tuple[Field, Rows, tuple[int, ...]]:
    """Field, rows and lanes of an output by its name."""
    is_next = name not in schema
    field = schema[name.removeprefix(NEXT) if is_next else name]
    if not isinstance(window, Transition):
        return field, "lanes", lanes(window)
    if field.observation and window.stack > 1:
        return field, "following_stack" if is_next else "stack", (window.stack,)
    return field, "following" if is_next else "anchor", ()


def make_plan(
    schema: Schema,
    batch_size: int,
    window: Window | None = None,
    transform: Mapping[str, Transform] | None = None,
    fields: Iterable[str] | None = None,
    extra: tuple[Computed, ...] = (),
) -> Plan:
    """Compile a plan for a schema.

    Args:
        schema: The table's.
        batch_size: Samples per batch, at least 1.
        window: What a sample is built from; default 1-step transitions.
        transform: {field: Transform}; one for an observation also applies to what follows it, one for a reward that the
            window sums up to every single reward. A dotted name's parent ("obs" for "obs.camera") stands for all
            below it that are not named themselves.
        extra: Arrays that the sampler makes, always delivered.
        fields: Outputs to deliver, in this order; None for all: fields, next observations (transitions), what the window
            makes.

    Raises:
        ConfigError: Unknown names, sizes, windows or casts.
    """
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ConfigError(f"Expected a batch_size of at least 1, got {batch_size!r}")
    window = Transition() if window is None else window
    if not isinstance(window, Transition | Sequence | Episode | Rollout):
        raise ConfigError(f"Expected a window (Transition, Sequence, Episode, Rollout), got {type(window).__name__}")
    chosen = _transforms(schema, transform or {})
    summed = schema["reward"] if isinstance(window, Transition) and window.n_step > 1 and "reward" in schema else None
    if summed is not None and (summed.shape != () or summed.dtype not in ("float32", "float64")):
        raise ConfigError(
            f"Expected a `float32` or `float64` scalar as reward of n-step returns, got {summed} - at `reward`"
        )
    made = _computed(window, summed)
    following = [NEXT + name for name in schema.observation_names] if isinstance(window, Transition) else []
    every = [*schema.names, *following, *(name for name in made if name not in schema)]
    wanted = every if fields is None else list(fields)
    for name in wanted:
        if name not in every:
            raise ConfigError(f"Expected outputs among {every}, got {name!r}")
    if len(set(wanted)) != len(wanted) or not wanted:
        raise ConfigError(f"Expected each output once and at least one, got {wanted}")
    outputs, computed = [], []
    for name in wanted:
        if name in made:
            computed.append(made[name])
            continue
        field, rows, axes = _source(schema, window, name)
        outputs.append(Output(name, field, rows, axes, chosen.get(field.name, Transform(field.dtype))))
    reward = None if summed is None else chosen.get("reward", Transform(made["reward"].dtype))
    names = (*wanted, *(item.name for item in extra))
    return Plan(batch_size, window, tuple(outputs), (*computed, *extra), names, reward)


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
