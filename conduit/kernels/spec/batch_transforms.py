"""Transforms of a whole batch after it was gathered: the contract, and `apply` for a function of the user's.

Batch transforms are data too, and part of a plan's fingerprint. They run in the given order, in the process that requested the
batch, on arrays that belong to this batch only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conduit.arrays import as_numbers
from conduit.errors import ConfigError, FieldError
from conduit.kernels.spec.plan import Computed, Plan
from conduit.kernels.spec.windows import Episode, Rollout, Sequence, Window
from conduit.nesting import hint

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a batch before a batch transform.

    Attributes:
        window: What its samples are built from.
        arrays: {name: Computed}; `lanes` are all axes after the batch axis.
        is_open: True after a user's function has run: then the batch may hold more arrays, or others.
        reward_names: The names in `arrays` that are rewards.
    """

    window: Window
    arrays: Mapping[str, Computed]
    is_open: bool
    reward_names: tuple[str, ...] = ()

    def need(self, names: Iterable[str], step: BatchTransform) -> None:
        """Refuse a step whose inputs are not in the batch.

        Raises:
            ConfigError: An input is missing; names it.
        """
        missing = [name for name in names if name not in self.arrays]
        if missing and not self.is_open:
            raise ConfigError(
                f"Expected {missing} in the batch (store such a field, list it in fields=..., or make it with conduit.apply "
                f"first), got {list(self.arrays)}{hint(missing[0], self.arrays)} - at batch_transforms, {step}"
            )

    def reward(self, step: BatchTransform) -> str:
        """The name of the reward, for a step that was not given it.

        Raises:
            ConfigError: The batch has no reward, or several.
        """
        if len(self.reward_names) != 1:
            raise ConfigError(
                f"Expected one field of the batch to be the reward, got {list(self.reward_names)}: declare it in the schema by "
                f"reward=, list it in fields=..., or name what the step is to take, reward='...' - at batch_transforms, {step}"
            )
        return self.reward_names[0]

    def need_steps(self, step: BatchTransform) -> tuple[int, ...]:
        """Axes of the consecutive steps that the window has.

        Raises:
            ConfigError: Its samples are single transitions.
        """
        if isinstance(self.window, Sequence):
            return (self.window.length,)
        if isinstance(self.window, Episode):
            return (self.window.max_length,)
        if isinstance(self.window, Rollout):
            return self.window.ticks, self.window.num_envs
        raise ConfigError(
            f"Expected a window of consecutive steps, got {self.window}: open the loader with window=conduit.Rollout(...), "
            f"Sequence(...) or Episode(...) - at batch_transforms, {step}"
        )


class BatchTransform(ABC):
    """Contract of a transform of a whole batch; implementations are frozen dataclasses.

    `run` may write into arrays of the batch. The thread that requests the batch calls it once per batch, without locks.
    """

    __slots__ = ()

    def bound(self, contents: Contents) -> BatchTransform:
        """The step with the names of inputs that it finds by their role; called when the loader is opened.

        Raises:
            ConfigError: There is no field with such a role, or several.
        """
        return self

    def extended(self, plan: Plan) -> Plan:
        """The plan with further inputs that the step needs and the batch does not have; called when the loader is opened.

        Raises:
            ConfigError: Such an input cannot be read.
        """
        return plan

    @abstractmethod
    def outputs(self, contents: Contents) -> tuple[Computed, ...]:
        """Arrays that the step adds to the batch; called when the loader is opened.

        Raises:
            ConfigError: The batch lacks an input of the step.
        """

    @abstractmethod
    def run(self, values: dict[str, Any], arrays: Mapping[str, Array], draw: tuple[int, int]) -> None:
        """Transform a batch.

        Args:
            values: {name: tensor or array} of the batch, in the loader's format; may be changed.
            arrays: {name: array}: the memory of `outputs`, which `values` has under the same names, and the inputs of `extended`.
            draw: Seed of the loader, and number of the batch.
        """

    def check_device(self, place: str) -> None:
        """Refuse a device that the step cannot work on.

        Raises:
            ConfigError: The step cannot work on it; this is the default.
        """
        raise ConfigError(
            f"Expected batch_transforms that work on {place}, got one that runs on the host: use device='cpu', or leave it out - "
            f"at batch_transforms, {self}"
        )

    def run_on_device(self, values: dict[str, Any], draw: tuple[int, int]) -> None:
        """Launch the step for a batch on a device, without waiting; called only if `check_device` does not refuse.

        Args:
            values: {name: tensor} of the batch, including the uninitialized tensors of `outputs`; may be changed.
            draw: As for `run`.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Apply(BatchTransform):
    """A user's own function. See `apply`."""

    function: Callable[[dict[str, Any]], Mapping[str, Any]]

    def __post_init__(self) -> None:
        name = getattr(self.function, "__qualname__", "")
        if not callable(self.function) or not name or "<lambda>" in name:
            raise ConfigError(
                f"Expected a function or method with a qualified name, got {self.function!r}: the name distinguishes plans, "
                "so write `def`"
            )

    def outputs(self, contents: Contents) -> tuple[Computed, ...]:
        """No arrays: what the function adds is not known before it has run."""
        return ()

    def run(self, values: dict[str, Any], arrays: Mapping[str, Array], draw: tuple[int, int]) -> None:
        """Replace the batch by what the function returns."""
        made = self.function(dict(values))
        if not isinstance(made, Mapping):
            raise FieldError(
                f"Expected a mapping of names to tensors, got {type(made).__name__}: return the batch with what you add - "
                f"at batch_transforms, {self.function.__qualname__}"
            )
        made = dict(made)
        values.clear()
        values.update(made)

    def check_device(self, place: str) -> None:
        """Accepts every device: the function gets the batch's tensors."""

    def run_on_device(self, values: dict[str, Any], draw: tuple[int, int]) -> None:
        """As `run`."""
        self.run(values, {}, draw)


def apply(function: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Apply:
    """Pass the batch to your own function, {name: tensor} to {name: tensor}; the batch then holds what the function returns.

    The function runs after the gather, with the interpreter lock. It may change tensors in place, add some and leave some out. To
    send the plan to another process, use a function of a module.

    Args:
        function: A function or bound method; its qualified name distinguishes plans.

    Raises:
        ConfigError: A lambda, or an object without a qualified name.
    """
    return Apply(function)


def with_batch_transforms(plan: Plan, steps: Iterable[Any]) -> Plan:
    """The plan with steps on its whole batches.

    Raises:
        ConfigError: A step is not a batch transform, lacks its inputs, or adds an array that exists already.
    """
    listed = tuple(steps) if isinstance(steps, Iterable) else (steps,)
    axes = {item.name: (*item.lanes, *item.shape) for item in plan.outputs}
    arrays = {item.name: Computed(item.name, item.transform.dtype, axes[item.name]) for item in plan.outputs}
    arrays |= {item.name: Computed(item.name, item.transform.dtype, item.field.shape) for item in plan.returns}
    arrays |= {item.name: item for item in plan.computed}
    for ragged in plan.ragged:
        parts = ragged.arrays(plan.batch_size).items()
        arrays |= {name: Computed(name, dtype.name, shape[1:]) for name, (dtype, shape) in parts}
    arrays = {name: arrays[name] for name in plan.names}
    is_open = False
    added: list[Computed] = []
    bound: list[BatchTransform] = []
    adds: list[int] = []
    for step in listed:
        if not isinstance(step, BatchTransform):
            raise ConfigError(
                f"Expected conduit.gae, vtrace, returns_to_go, normalize_advantages, hindsight or apply, got "
                f"{type(step).__name__} - at batch_transforms"
            )
        contents = Contents(plan.window, arrays, is_open, plan.reward_names)
        bound.append(step.bound(contents))
        made = bound[-1].outputs(contents)
        plan = bound[-1].extended(plan)
        for item in made:
            check_new(item.name, arrays, step, ", or leave it out by fields=(...)")
            arrays[item.name] = item
        added += made
        adds.append(len(made))
        is_open = is_open or isinstance(step, Apply)
    names = (*plan.names, *(item.name for item in added))
    return replace(plan, names=names, batchwise=tuple(bound), added=tuple(added), adds=tuple(adds))


def check_new(name: str, arrays: Mapping[str, Any], step: BatchTransform, more: str = "") -> None:
    """Refuse a step that adds an array that exists already.

    Args:
        name: The name of the array that the step adds.
        arrays: The arrays that the batch has.
        step: The step.
        more: A further remedy, for the error.

    Raises:
        ConfigError: The batch has an array of this name.
    """
    if any(name in (there, there.partition(".")[0]) for there in arrays):
        raise ConfigError(
            f"Expected one step to make {name!r}, it is there already: deliver a stored field under another name, "
            f"rename={{{name!r}: 'stored_{name}'}}{more}, or leave out a step - at batch_transforms, {step}"
        )


def as_numpy(values: Mapping[str, Any], name: str, dtype: Any, shape: tuple[int, ...] | None = None) -> Array:
    """One of the batch's arrays as a C-contiguous numpy array of a dtype; copied only if needed.

    Raises:
        FieldError: The array is missing, or does not have the shape `shape`.
    """
    if name not in values:
        raise FieldError(f"Expected {name!r} in the batch, got {list(values)}", at=name)
    return checked_array(values[name], name, dtype, shape)


_NARROW = ("bool", "int8", "uint8", "int16", "uint16", "float16", "bfloat16", "float32")


def is_wide(value: Any) -> bool:
    """True for a tensor, array or list whose dtype has values that float32 cannot represent; False for None."""
    if value is None:
        return False
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    return str(dtype).removeprefix("torch.") not in _NARROW


def checked_array(value: Any, name: str, dtype: Any, shape: tuple[int, ...] | None = None) -> Array:
    """A tensor or array as a C-contiguous numpy array of a dtype; copied only if needed.

    Raises:
        FieldError: It does not have the shape `shape`.
    """
    value = as_numbers(value)
    array = np.ascontiguousarray(value, dtype)
    if np.ndim(value) == 0:
        array = array.reshape(())
    if shape is not None and array.shape != shape:
        raise FieldError(f"Expected shape {shape}, got {array.shape}", at=name)
    return array
