"""Advantages with mean 0 and deviation 1 over a batch, in place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit.errors import ConfigError, FieldError
from conduit.kernels.cpu.returns import standardise
from conduit.kernels.ops.step_arrays import taken
from conduit.kernels.spec.batch_transforms import BatchTransform, Contents, as_numpy, checked_array
from conduit.kernels.spec.plan import Computed
from conduit.native.jit import entry
from conduit.numbers import within

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class NormalizeAdvantages(BatchTransform):
    """Advantages with mean 0 and deviation 1. See `normalize_advantages`."""

    eps: float
    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", within("eps", self.eps, 0, math.inf))

    def outputs(self, contents: Contents) -> tuple[Computed, ...]:
        """No new arrays: the advantages are normalized in place."""
        contents.need((self.name,), self)
        known = contents.arrays.get(self.name)
        if known is not None and known.dtype != "float32":
            raise ConfigError(f"Expected `float32`, got {known} - at batch_transforms, {self}")
        return ()

    def run(self, values: dict[str, Any], arrays: Mapping[str, Array], draw: tuple[int, int]) -> None:
        """Normalize the advantages in place."""
        array = as_numpy(values, self.name, np.float32)
        mask = next((name for name in ("advantage_mask", "mask") if name in values), None)
        flags = None if mask is None else as_numpy(values, mask, bool)
        if flags is not None and flags.shape != array.shape:
            flags = None
        if not np.shares_memory(array, checked_array(values[self.name], self.name, np.float32)):
            raise FieldError("Expected contiguous `float32` to normalize in place", at=self.name)
        entry(standardise)(array.ctypes.data, 0 if flags is None else flags.ctypes.data, array.size, self.eps)

    def check_device(self, place: str) -> None:
        """Accepts every device: the step uses torch's own operations."""

    def run_on_device(self, values: dict[str, Any], draw: tuple[int, int]) -> None:
        """Normalize the advantages in place, without waiting."""
        tensor = taken(values, self.name)
        mask = next((values[name] for name in ("advantage_mask", "mask") if name in values), None)
        wide = tensor.double()
        weights = wide.new_ones(()) if mask is None or mask.shape != tensor.shape else mask.double()
        count = weights.expand_as(wide).sum().clamp(min=1.0)
        mean = (wide * weights).sum() / count
        deviation = (((wide - mean) ** 2) * weights).sum().div(count).sqrt()
        changed = (wide - mean) / (deviation + self.eps)
        tensor.copy_(changed.where(weights.bool(), wide))


def normalize_advantages(*, eps: float = 1e-8, name: str = "advantages") -> NormalizeAdvantages:
    """Normalize advantages in place: (A - mean) / (deviation + eps), over the batch's steps that have one.

    Such steps are True in "advantage_mask", or, if the batch does not have it, in "mask". The deviation is the population's, so a
    single step gives 0 and not NaN.

    Args:
        eps: At least 0.
        name: The array to normalize, float32.

    Raises:
        ConfigError: A negative eps.
    """
    return NormalizeAdvantages(eps, name)
