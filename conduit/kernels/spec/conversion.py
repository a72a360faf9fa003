"""Folds a field's pipeline into one conversion, which a row operation applies while it copies: more steps cost no further pass.

    out = cast(clip(((x - mean) / deviation) * factor + offset)),   read at shifted places for a random shift

Factors are folded in float64, and values are rounded once, at the end. Bounds before a scale are scaled too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from conduit.errors import ConfigError
from conduit.field import Field
from conduit.kernels.spec.transforms import FLOATS, Clip, Normalize, OneHot, Pipeline, RandomShift, Step, Transform
from conduit.nesting import hint, with_parents
from conduit.schema import Schema


@dataclass(frozen=True, slots=True)
class Conversion:
    """A pipeline folded into one row operation.

    Attributes:
        transform: The conversion of each element, and the dtype of the result.
        classes: Number of one-hot classes, 0 for none.
        start: The first class.
        normalize: Normalization by running statistics, applied first, or None.
        shift: Random shift of images, or None.
    """

    transform: Transform
    classes: int = 0
    normalize: Normalize | None = None
    shift: RandomShift | None = None
    start: int = 0


def _scaled(bound: float, step: Transform) -> float:
    return bound * step.factor + step.offset if math.isfinite(bound) else math.copysign(bound, bound * step.factor)


def _then(first: Transform, step: Transform) -> Transform:
    """The composition: `first`, then `step`, without the casts of `first`."""
    if step.is_affine:
        low, high = (
            sorted((_scaled(first.low, step), _scaled(first.high, step))) if step.factor else (-math.inf, math.inf)
        )
        first = replace(
            first,
            dtype=step.dtype,
            factor=first.factor * step.factor,
            offset=first.offset * step.factor + step.offset,
            low=low,
            high=high,
        )
    return _clipped(replace(first, dtype=step.dtype), step.low, step.high)


def _clipped(first: Transform, low: float, high: float) -> Transform:
    return replace(first, low=min(max(first.low, low), high), high=min(max(first.high, low), high))


def as_steps(pipeline: Any, name: str) -> tuple[Step, ...]:
    """A pipeline as a tuple of steps; a single step becomes a tuple of one.

    Raises:
        ConfigError: An element is not a step.
    """
    steps = tuple(pipeline) if isinstance(pipeline, Iterable) else (pipeline,)
    for step in steps:
        if not isinstance(step, Step):
            raise ConfigError(
                "Expected conduit.scale, cast, clip, one_hot, normalize or random_shift, or a tuple of them, got "
                f"{type(step).__name__} - at transform[{name!r}]"
            )
    return steps


def fuse(steps: tuple[Step, ...], field: Field) -> Conversion:
    """Fold a field's pipeline.

    Raises:
        ConfigError: Steps do not fit the field or each other; names the field and the remedy.
    """
    where = f" - at transform[{field.name!r}]"
    made = Conversion(Transform(field.dtype))
    if field.ragged and not all(isinstance(step, Transform | Clip) for step in steps):
        raise ConfigError(
            f"Expected conduit.cast, scale or clip for a ragged field, whose elements have no fixed place, got {steps}{where}"
        )
    for place, step in enumerate(steps):
        done = made.transform
        if done.dtype not in (*FLOATS, field.dtype) and made.classes == 0:
            raise ConfigError(f"Expected a cast to `{done.dtype}` to be the last step, got {step} behind it{where}")
        if isinstance(step, Transform):
            made = replace(made, transform=_then(done, step))
        elif isinstance(step, Clip):
            made = replace(made, transform=_clipped(done, step.low, step.high))
        elif isinstance(step, OneHot):
            if place or field.dtype in FLOATS:
                raise ConfigError(f"Expected one_hot as the first step of an integer field, got `{field.dtype}`{where}")
            made = replace(made, classes=step.n, start=step.start, transform=Transform(step.dtype))
        elif isinstance(step, Normalize):
            if place:
                raise ConfigError(f"Expected normalize as the first step: statistics are of stored values{where}")
            made = replace(made, normalize=step, transform=Transform(step.dtype))
        else:
            if made.shift is not None or made.classes:
                raise ConfigError(f"Expected one random_shift of an image, got {steps}{where}")
            rank = len(field.shape)
            if rank < 2 or not all(-rank <= axis < rank for axis in step.axes):
                raise ConfigError(
                    f"Expected an image with axes {step.axes}, got shape {field.shape}: name its height and width, "
                    f"conduit.random_shift(pad, axes=...){where}"
                )
            made = replace(made, shift=step)
    source = "float64" if made.normalize is not None else "uint8" if made.classes else field.dtype
    if not (made.classes and made.transform.is_cast):
        made.transform.check_source(source, field.name)
    return made


def conversions(schema: Schema, given: Mapping[str, Pipeline]) -> dict[str, Conversion]:
    """{field: conversion} from {field, or parent: pipeline}.

    Raises:
        ConfigError: A name is not in the schema, or steps do not fit their field.
    """
    chosen: dict[str, Conversion] = {}
    # longer, more specific names come later and replace their parents' pipelines
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
