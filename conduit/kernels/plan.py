"""A plan: which outputs a batch has, where each comes from, and what is done to it. Data, not code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import numpy as np

from conduit.errors import ConfigError
from conduit.field import Field
from conduit.kernels.packing import Layout, Ragged, layouts, ragged_output
from conduit.kernels.transforms import Conversion, Normalise, Pipeline, RandomShift, Transform, as_steps, fuse
from conduit.kernels.windows import Episode, Rollout, Sequence, Transition, Window, has_next, lanes
from conduit.nesting import check_known, hint, with_parents
from conduit.numbers import at_least
from conduit.schema import Schema

NEXT = "next_"
FLAGS = ("terminated", "truncated")


Rows = Literal["anchor", "following", "stack", "following_stack", "lanes", "following_lanes"]
"""Which row numbers of a window an output reads."""


@dataclass(frozen=True, slots=True)
class Output:
    """One array of a batch that is read from a field.

    Attributes:
        name: Name in the batch, "next_" + field for the observation that follows.
        field: The schema's field it is read from.
        rows: Which rows of the window it reads.
        lanes: Axes between the batch and the field's shape.
        transform: What is done to it, element by element.
        classes: One-hot classes, a last axis; 0 for none.
        normalise: Running statistics that are applied first.
        shift: Where an image is read.
    """

    name: str
    field: Field
    rows: Rows
    lanes: tuple[int, ...]
    transform: Transform
    classes: int = 0
    normalise: Normalise | None = None
    shift: RandomShift | None = None

    @property
    def is_augmented(self) -> bool:
        """True when more than an affine cast is asked for (conduit.kernels.augment)."""
        return bool(self.classes or self.normalise or self.shift or self.transform.is_clipped)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row of the output."""
        return (*self.field.shape, self.classes) if self.classes else self.field.shape

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
        return self.numpy_dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


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
        ragged: Arrays read from ragged fields.
        batchwise: What is done to the whole batch after that, in this order (conduit.kernels.batchwise).
        added: Arrays that these steps add.
    """

    batch_size: int
    window: Window
    outputs: tuple[Output, ...]
    computed: tuple[Computed, ...]
    names: tuple[str, ...]
    reward: Transform | None = None
    ragged: tuple[Ragged, ...] = ()
    batchwise: tuple[Any, ...] = ()
    added: tuple[Computed, ...] = ()

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal characters: equal plans have equal ones, in every process."""
        return hashlib.sha256(json.dumps(describe(self)).encode()).hexdigest()[:16]

    @property
    def sample_bytes(self) -> int:
        """Bytes of output per sample."""
        fixed = sum(output.row_bytes * output.lane_count for output in self.outputs)
        return fixed + sum(item.row_bytes for item in self.ragged)


def describe(value: Any) -> Any:
    """A plan, or a part of one, as JSON can hold it: dataclasses with their names, functions by their qualified names."""
    if is_dataclass(value):
        return [type(value).__name__, {item.name: describe(getattr(value, item.name)) for item in fields(value)}]
    if isinstance(value, tuple):
        return [describe(item) for item in value]
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    # JSON knows no infinities
    return repr(value) if isinstance(value, float) else value


def _computed(window: Window, reward: Field | None, transform: Transform | None) -> dict[str, Computed]:
    """Everything that a window can make, by name."""
    axes = lanes(window)
    made = {flag: Computed(flag, "bool", axes) for flag in FLAGS}
    if isinstance(window, Transition):
        if window.n_step > 1:
            made["discount"] = Computed("discount", "float32", ())
            made["n_steps"] = Computed("n_steps", "int64", ())
            if reward is not None:
                made[reward.name] = Computed(reward.name, reward.dtype if transform is None else transform.dtype, ())
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
        return field, "following_lanes" if is_next else "lanes", lanes(window)
    if field.observation and window.stack > 1:
        return field, "following_stack" if is_next else "stack", (window.stack,)
    return field, "following" if is_next else "anchor", ()


def make_plan(
    schema: Schema,
    batch_size: int,
    window: Window | None = None,
    transform: Mapping[str, Pipeline] | None = None,
    fields: Iterable[str] | None = None,
    extra: tuple[Computed, ...] = (),
    ragged: Layout | Mapping[str, Layout] = "pad",
) -> Plan:
    """Compile a plan for a schema.

    Args:
        schema: The table's.
        batch_size: Samples per batch, at least 1.
        window: What a sample is built from; default 1-step transitions.
        transform: {field: step or tuple of steps}; one for an observation also applies to what follows it, one for a reward
            that the window sums up to every single reward. A dotted name's parent ("obs" for "obs.camera") stands for all
            below it that are not named themselves.
        extra: Arrays that the sampler makes, always delivered.
        fields: Outputs to deliver, in this order; None for all: fields, next observations (transitions, and windows with
            next_obs), what the window makes.
        ragged: How ragged fields are laid out (conduit.kernels.packing), for all of them or {field: layout}. What comes with
            a field's values is delivered right behind them.

    Raises:
        ConfigError: Unknown names, sizes, windows or casts.
    """
    batch_size = at_least("a batch_size", batch_size, 1)
    if transform is not None and not isinstance(transform, Mapping):
        raise ConfigError(f"Expected a mapping of fields to transforms, got {type(transform).__name__} - at transform")
    if isinstance(fields, str) or not (fields is None or isinstance(fields, Iterable)):
        raise ConfigError(f"Expected a list of outputs, got {fields!r} - at fields")
    window = Transition() if window is None else window
    if not isinstance(window, Transition | Sequence | Episode | Rollout):
        raise ConfigError(f"Expected a window (Transition, Sequence, Episode, Rollout), got {type(window).__name__}")
    chosen = _transforms(schema, transform or {})
    summed = schema["reward"] if isinstance(window, Transition) and window.n_step > 1 and "reward" in schema else None
    if summed is not None and (summed.shape != () or summed.dtype not in ("float32", "float64")):
        raise ConfigError(
            f"Expected a `float32` or `float64` scalar as reward of n-step returns, got {summed} - at `reward`"
        )
    reward = None if summed is None else _summand(chosen.get("reward"), summed)
    made = _computed(window, summed, reward)
    following = [NEXT + name for name in schema.observation_names] if has_next(window) else []
    every = [*schema.names, *following, *(name for name in made if name not in schema)]
    wanted = every if fields is None else list(fields)
    check_known(wanted, every, "outputs", "fields")
    if len(set(wanted)) != len(wanted) or not wanted:
        raise ConfigError(f"Expected each output once and at least one, got {wanted}")
    chosen_layouts = layouts(schema, ragged)
    outputs, computed, uneven = [], [], []
    for name in wanted:
        if name in made:
            computed.append(made[name])
            continue
        field, rows, axes = _source(schema, window, name)
        done = chosen.get(field.name, Conversion(Transform(field.dtype)))
        if field.ragged:
            uneven.append(ragged_output(name, field, rows, chosen_layouts[field.name], done, batch_size))
            continue
        outputs.append(Output(name, field, rows, axes, done.transform, done.classes, done.normalise, done.shift))
        if done.normalise is not None and done.normalise.update and name == field.name:
            outputs.append(Output(f"_{name}", field, rows, axes, Transform(field.dtype)))
    parts = {item.name: item.parts for item in uneven}
    names = (*(part for name in wanted for part in parts.get(name, (name,))), *(item.name for item in extra))
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"Expected no field of the name of what comes with a ragged field, got {twice}: rename it")
    return Plan(batch_size, window, tuple(outputs), (*computed, *extra), names, reward, tuple(uneven))


def _summand(done: Conversion | None, field: Field) -> Transform:
    """What is done to each reward that a return sums up."""
    if done is None:
        return Transform(field.dtype)
    if done.normalise is not None or done.classes or done.transform.dtype not in ("float32", "float64"):
        raise ConfigError(
            f"Expected rewards of n-step returns to be scaled or clipped, to `float32` or `float64`, got {done}: use "
            "n_step=1, or divide by a fixed number - at transform['reward']"
        )
    return done.transform


def _transforms(schema: Schema, given: Mapping[str, Pipeline]) -> dict[str, Conversion]:
    chosen: dict[str, Conversion] = {}
    # what is named more exactly comes later and wins
    for name, pipeline in sorted(given.items(), key=lambda pair: str(pair[0]).count(".")):
        names = [field for field in schema.names if field == name or field.startswith(f"{name}.")]
        if not names:
            raise ConfigError(
                f"Expected fields of the schema, got {name!r}{hint(name, with_parents(schema.names))} - at transform"
            )
        steps = as_steps(pipeline, name)
        for field in names:
            chosen[field] = fuse(steps, schema[field])
    return chosen
