"""Returns-to-go: the discounted sums of future rewards, for steps [B, T, N] (rollouts) or [B, T] (sequences, episodes)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conduit.errors import ConfigError
from conduit.kernels.cpu.returns import TRACE_RETURNS, Job, sum_up, sum_up_wide
from conduit.kernels.ops.step_arrays import needed, reward_in
from conduit.kernels.spec.batch_transforms import BatchTransform, Contents
from conduit.kernels.spec.plan import Computed
from conduit.native.jit import entry
from conduit.numbers import within

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class ReturnsToGo(BatchTransform):
    """Sums of future rewards. See `returns_to_go`."""

    gamma: float
    reward: str | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", within("gamma", self.gamma, 0, 1))

    def bound(self, contents: Contents) -> BatchTransform:
        """The step with the reward's name."""
        return replace(self, reward=contents.reward(self)) if self.reward is None else self

    def outputs(self, contents: Contents) -> tuple[Computed, ...]:
        """The returns."""
        axes = contents.need_steps(self)
        contents.need(needed(contents, self.reward), self)
        known = contents.arrays.get(self.reward or "")
        if known is not None and known.lanes != axes:
            raise ConfigError(f"Expected scalars per step, got {known} - at batch_transforms, {self}")
        return (Computed("returns_to_go", "float32", axes),)

    def run(self, values: dict[str, Any], arrays: Mapping[str, Array], draw: tuple[int, int]) -> None:
        """Fill in the returns."""
        job = Job(values, reward_in(values, self.reward))
        job.put(TRACE_RETURNS, arrays["returns_to_go"])
        entry(sum_up_wide if job.is_wide else sum_up)(job.words.ctypes.data, self.gamma)

    def check_device(self, place: str) -> None:
        """Accepts every device: there is a kernel for it."""

    def run_on_device(self, values: dict[str, Any], draw: tuple[int, int]) -> None:
        """Fill in the returns, in one launch."""
        from conduit.kernels.gpu.batch_returns import returns_to_go

        returns_to_go(self.gamma, reward_in(values, self.reward), values, values["returns_to_go"])


def returns_to_go(gamma: float = 1.0, *, reward: str | None = None) -> ReturnsToGo:
    """The discounted sum of a step's own and all later rewards of its episode inside the window: "returns_to_go", float32.

    Chen et al., "Decision Transformer" (2021), condition on it. Nothing is added after a truncation or the window's end; to
    bootstrap from values, use the "returns" of `gae(gamma, 1.0)`.

    Args:
        gamma: From 0 to 1.
        reward: Name of the reward in the batch; None for the one that the schema says is the reward, in a plain mapping "reward".

    Raises:
        ConfigError: gamma out of range.
    """
    return ReturnsToGo(gamma, reward)
