"""Advantages and returns of consecutive steps: GAE, V-trace, returns-to-go; and the normalization of advantages.

All work on [B, T, N] (rollouts) or [B, T] (sequences, episodes), backwards in time. On the CPU, float64 inputs keep their precision, everything is computed in float64, and results are rounded once, to float32; on a device
float32 is computed in float32. The same rules give the value of a step's successor in all of them:

* terminated step: the value is 0, and nothing flows back over the step.
* truncated step: the value of the true final observation, never of the reset observation after it. It is the value of the
  observation-only row that follows (autoreset "next_step"), or `final_values`, if given (a window with `next_obs=True` delivers the
  observations for them, in every mode).
* the last step of the window: `bootstrap`, if given.
* any other step: the value of the next step, whose trace flows back too.

A step whose successor's value none of these rules gives only serves as bootstrap of the step before it, and is left out itself:
advantage 0, `advantage_mask` False. So a rollout of T + 1 ticks with stored values needs nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conduit.errors import ConfigError, FieldError
from conduit.kernels.cpu.returns import (
    TRACE_ADVANTAGES,
    TRACE_BOOTSTRAP,
    TRACE_FINALS,
    TRACE_RATIOS,
    TRACE_RETURNS,
    TRACE_USED,
    TRACE_VALUES,
    Job,
    standardise,
    sum_up,
    sum_up_wide,
    trace,
    trace_wide,
)
from conduit.kernels.spec.batch_transforms import BatchTransform, Contents, as_numpy, checked_array
from conduit.kernels.spec.plan import Computed
from conduit.kernels.spec.returns import Rates
from conduit.kernels.spec.windows import Rollout
from conduit.native.jit import entry
from conduit.numbers import real, within

Array = np.ndarray[Any, Any]

_FLAGS = ("terminated", "truncated", "mask", "is_first")


def _needed(contents: Contents, *names: str | None) -> tuple[str, ...]:
    lengths = () if isinstance(contents.window, Rollout) else ("lengths",)
    return (*(name for name in names if name is not None), *_FLAGS, *lengths)


def reward_in(batch: Mapping[str, Any], reward: str | None) -> str:
    """Name of the reward in a batch: as it was told, or by its role; a plain mapping knows no roles, there it is "reward".

    Raises:
        FieldError: There is none, or several, or a batch lacks what says which of its rows are steps.
    """
    known = getattr(batch, "reward_names", None)
    if known is None:
        return "reward" if reward is None else reward
    lacking = [name for name in _FLAGS if name not in batch]
    if lacking:
        raise FieldError(f"Expected it in the batch, got {list(batch)}: list it in fields=...", at=lacking[0])
    if reward is None and len(known) != 1:
        raise FieldError(
            f"Expected one field of the batch to be the reward, got {list(known)}: name what is to be taken, reward='...'",
            at="reward",
        )
    return known[0] if reward is None else reward


def _like(values: Mapping[str, Any], reward: str, made: dict[str, Array]) -> dict[str, Any]:
    """Arrays in the format of the batch that they were made from."""
    if not hasattr(values[reward], "detach"):
        return dict(made)
    import torch  # the caller's batch holds tensors already

    return {name: torch.from_numpy(array) for name, array in made.items()}


def _keep_rates(step: object, *names: str) -> None:
    """Turn attributes into floats from 0 to 1."""
    for name in names:
        object.__setattr__(step, name, within(name, getattr(step, name), 0, 1))


class _Advantages(BatchTransform):
    """What GAE and V-trace share."""

    __slots__ = ()

    gamma: float
    lam: float
    values: str
    reward: str | None
    bootstrap: str | None
    final_values: str | None
    _target = "returns"

    def _ratios(self) -> str | None:
        return None

    @property
    def rates(self) -> Rates:
        """The numbers of the estimator."""
        return Rates(self.gamma, self.lam)

    def bound(self, contents: Contents) -> BatchTransform:
        """The same with the reward's name."""
        assert isinstance(self, Gae | Vtrace)  # noqa: S101 - for the type checker
        return replace(self, reward=contents.reward(self)) if self.reward is None else self

    def outputs(self, contents: Contents) -> tuple[Computed, ...]:
        """Advantages, targets of the value function, and which steps have them."""
        axes = contents.need_steps(self)
        inputs = (self.reward, self.values, self.bootstrap, self.final_values, self._ratios())
        contents.need(_needed(contents, *inputs), self)
        for name in (self.reward, self.values):
            known = contents.arrays.get(name or "")
            if known is not None and known.lanes != axes:
                raise ConfigError(f"Expected scalars per step, got {known} - at batch_transforms, {self}")
        return (
            Computed("advantages", "float32", axes),
            Computed(self._target, "float32", axes),
            Computed("advantage_mask", "bool", axes),
        )

    def _compute(
        self, batch: Mapping[str, Any], given: Mapping[str, Any], made: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        job = Job(batch, reward_in(batch, self.reward), given.values())
        shape = job.shape
        job.put_real(TRACE_VALUES, given["values"], self.values)
        job.put_real(TRACE_BOOTSTRAP, given["bootstrap"], "bootstrap", (shape[0], *shape[2:]))
        job.put_real(TRACE_FINALS, given["final_values"], "final_values")
        job.put_real(TRACE_RATIOS, given["log_ratios"], "log_ratios")
        out: dict[str, Array] = {}
        for word, name, dtype in (
            (TRACE_ADVANTAGES, "advantages", np.float32),
            (TRACE_RETURNS, self._target, np.float32),
            (TRACE_USED, "advantage_mask", np.bool_),
        ):
            out[name] = job.put(word, np.empty(shape, dtype) if made is None else made[name])
        entry(trace_wide if job.is_wide else trace)(job.words.ctypes.data, *map(float, self.rates))
        return out

    def _given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs that lie in the batch."""
        names = {
            "values": self.values,
            "bootstrap": self.bootstrap,
            "final_values": self.final_values,
            "log_ratios": self._ratios(),
        }
        return {key: None if name is None else _taken(values, name) for key, name in names.items()}

    def run(self, values: dict[str, Any], arrays: Mapping[str, Array], draw: tuple[int, int]) -> None:
        """Fill the arrays from the batch's own."""
        self._compute(values, self._given(values), arrays)

    def check_device(self, place: str) -> None:
        """Nothing: there is a kernel for it."""

    def run_on_device(self, values: dict[str, Any], draw: tuple[int, int]) -> None:
        """Fill the tensors from the batch's own, in one launch."""
        self._launch(values, self._given(values), values)

    def _launch(
        self, batch: Mapping[str, Any], given: Mapping[str, Any], made: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """As `_compute`, on the device that the batch lies on; without `made` in fresh tensors."""
        from conduit.kernels.gpu.returns import advantages_of

        reward = reward_in(batch, self.reward)
        return advantages_of(self.rates, batch, given, made, reward=reward, target=self._target)

    def _called(self, batch: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Advantages of values that are not in the batch, where the batch lies."""
        reward = reward_in(batch, self.reward)
        if getattr(_taken(batch, reward), "is_cuda", False):
            return self._launch(batch, given, None)
        return _like(batch, reward, self._compute(batch, given, None))


def _taken(values: Mapping[str, Any], name: str) -> Any:
    if name not in values:
        raise FieldError(f"Expected {name!r} in the batch, got {list(values)}", at=name)
    return values[name]


@dataclass(frozen=True, slots=True)
class Gae(_Advantages):
    """Generalized advantage estimation. See `gae`."""

    gamma: float
    lam: float
    values: str
    reward: str | None
    bootstrap: str | None
    final_values: str | None

    def __post_init__(self) -> None:
        _keep_rates(self, "gamma", "lam")

    def __call__(
        self, batch: Mapping[str, Any], *, values: Any, bootstrap: Any = None, final_values: Any = None
    ) -> dict[str, Any]:
        """The same for values that are not in the batch, such as those of a critic.

        Args:
            batch: A Batch, or a mapping with reward, terminated, truncated (and mask, is_first, lengths), [B, T, ...].
            values: float [B, T] or [B, T, N], V of each step's observation.
            bootstrap: float [B] or [B, N], V of the observation after the last step, or None.
            final_values: float as `values`, V of the true final observation, read at truncated steps only, or None.

        Returns:
            {"advantages", "returns", "advantage_mask"}, tensors where the batch holds tensors, on its device; without gradients.

        Raises:
            FieldError: Missing or wrongly shaped inputs.
        """
        given = {"values": values, "bootstrap": bootstrap, "final_values": final_values, "log_ratios": None}
        return self._called(batch, given)


@dataclass(frozen=True, slots=True)
class Vtrace(_Advantages):
    """Off-policy corrected targets and advantages. See `vtrace`."""

    gamma: float
    lam: float
    rho_bar: float
    c_bar: float
    pg_rho_bar: float
    values: str
    reward: str | None
    log_ratios: str | None
    bootstrap: str | None
    final_values: str | None

    _target = "targets"

    def __post_init__(self) -> None:
        _keep_rates(self, "gamma", "lam")
        for name in ("rho_bar", "c_bar", "pg_rho_bar"):
            bound = real(getattr(self, name))
            if bound is None or not bound > 0.0:
                raise ConfigError(f"Expected {name} above 0, got {getattr(self, name)!r}")
            object.__setattr__(self, name, bound)
        if self.c_bar > self.rho_bar:
            raise ConfigError(f"Expected c_bar of at most rho_bar, got {self.c_bar!r} and {self.rho_bar!r}")

    def _ratios(self) -> str | None:
        return self.log_ratios

    @property
    def rates(self) -> Rates:
        """The numbers of the estimator."""
        return Rates(self.gamma, self.lam, self.rho_bar, self.c_bar, self.pg_rho_bar, corrected=True)

    def __call__(
        self,
        batch: Mapping[str, Any],
        *,
        values: Any,
        log_ratios: Any = None,
        bootstrap: Any = None,
        final_values: Any = None,
    ) -> dict[str, Any]:
        """The same for values and ratios that are not in the batch.

        Args:
            batch: A Batch or a mapping, as that of `Gae`.
            values: float [B, T] or [B, T, N], V of each step's observation.
            log_ratios: float as `values`, log pi(a|x) - log mu(a|x); None: the policy that acted is the one that learns.
            bootstrap: float [B] or [B, N], V of the observation after the last step, or None.
            final_values: float as `values`, read at truncated steps only, or None.

        Returns:
            {"advantages", "targets", "advantage_mask"}, tensors where the batch holds tensors, on its device; without gradients.

        Raises:
            FieldError: Missing or wrongly shaped inputs.
        """
        given = {"values": values, "bootstrap": bootstrap, "final_values": final_values, "log_ratios": log_ratios}
        return self._called(batch, given)


@dataclass(frozen=True, slots=True)
class ReturnsToGo(BatchTransform):
    """Sums of the rewards to come. See `returns_to_go`."""

    gamma: float
    reward: str | None

    def __post_init__(self) -> None:
        _keep_rates(self, "gamma")

    def bound(self, contents: Contents) -> BatchTransform:
        """The same with the reward's name."""
        return replace(self, reward=contents.reward(self)) if self.reward is None else self

    def outputs(self, contents: Contents) -> tuple[Computed, ...]:
        """The returns."""
        axes = contents.need_steps(self)
        contents.need(_needed(contents, self.reward), self)
        known = contents.arrays.get(self.reward or "")
        if known is not None and known.lanes != axes:
            raise ConfigError(f"Expected scalars per step, got {known} - at batch_transforms, {self}")
        return (Computed("returns_to_go", "float32", axes),)

    def run(self, values: dict[str, Any], arrays: Mapping[str, Array], draw: tuple[int, int]) -> None:
        """Fill them in."""
        job = Job(values, reward_in(values, self.reward))
        job.put(TRACE_RETURNS, arrays["returns_to_go"])
        entry(sum_up_wide if job.is_wide else sum_up)(job.words.ctypes.data, self.gamma)

    def check_device(self, place: str) -> None:
        """Nothing: there is a kernel for it."""

    def run_on_device(self, values: dict[str, Any], draw: tuple[int, int]) -> None:
        """Fill them in, in one launch."""
        from conduit.kernels.gpu.returns import returns_to_go

        returns_to_go(self.gamma, reward_in(values, self.reward), values, values["returns_to_go"])


@dataclass(frozen=True, slots=True)
class NormalizeAdvantages(BatchTransform):
    """Advantages with mean 0 and deviation 1. See `normalize_advantages`."""

    eps: float
    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", within("eps", self.eps, 0, math.inf))

    def outputs(self, contents: Contents) -> tuple[Computed, ...]:
        """Nothing new."""
        contents.need((self.name,), self)
        known = contents.arrays.get(self.name)
        if known is not None and known.dtype != "float32":
            raise ConfigError(f"Expected `float32`, got {known} - at batch_transforms, {self}")
        return ()

    def run(self, values: dict[str, Any], arrays: Mapping[str, Array], draw: tuple[int, int]) -> None:
        """Do it in place."""
        array = as_numpy(values, self.name, np.float32)
        mask = next((name for name in ("advantage_mask", "mask") if name in values), None)
        flags = None if mask is None else as_numpy(values, mask, bool)
        if flags is not None and flags.shape != array.shape:
            flags = None
        if not np.shares_memory(array, checked_array(values[self.name], self.name, np.float32)):
            raise FieldError("Expected contiguous `float32` to normalize in place", at=self.name)
        entry(standardise)(array.ctypes.data, 0 if flags is None else flags.ctypes.data, array.size, self.eps)

    def check_device(self, place: str) -> None:
        """Nothing: torch's own operations do it."""

    def run_on_device(self, values: dict[str, Any], draw: tuple[int, int]) -> None:
        """Do it in place, without waiting."""
        tensor = _taken(values, self.name)
        mask = next((values[name] for name in ("advantage_mask", "mask") if name in values), None)
        wide = tensor.double()
        weights = wide.new_ones(()) if mask is None or mask.shape != tensor.shape else mask.double()
        count = weights.expand_as(wide).sum().clamp(min=1.0)
        mean = (wide * weights).sum() / count
        deviation = (((wide - mean) ** 2) * weights).sum().div(count).sqrt()
        changed = (wide - mean) / (deviation + self.eps)
        tensor.copy_(changed.where(weights.bool(), wide))


def gae(
    gamma: float = 0.99,
    lam: float = 0.95,
    *,
    values: str = "value",
    reward: str | None = None,
    bootstrap: str | None = None,
    final_values: str | None = None,
) -> Gae:
    """Generalized advantage estimation: Schulman et al., "High-Dimensional Continuous Control Using GAE" (2016), eq. 16.

        delta_t = r_t + gamma * V(x_{t+1}) - V(x_t),  A_t = delta_t + gamma * lam * A_{t+1},  R_t = A_t + V(x_t)

    adds "advantages", "returns" (float32) and "advantage_mask" to a batch of rollouts, sequences or episodes. Ends, truncations
    and the window's end are treated as conduit.kernels.ops.returns says. With lam = 1, A_t = G_t - V(x_t).

    In a loader it takes values that are stored, or that a `conduit.apply` before it computes. You can also call it with a tensor:
    `conduit.gae(0.99, 0.95)(batch, values=critic(batch["obs"]))`.

    Args:
        gamma: Discount per step, from 0 to 1.
        lam: From 0 (one step) to 1 (all steps).
        values: Name of V of each step's observation.
        reward: Name of the reward in the batch; None for the one that the schema says is the reward, in a plain mapping "reward".
        bootstrap: Name of V of the observation after the last step, [B] or [B, N], or None.
        final_values: Name of V of the true final observation of truncated steps, or None.

    Raises:
        ConfigError: A rate out of range.
    """
    return Gae(gamma, lam, values, reward, bootstrap, final_values)


def vtrace(
    gamma: float = 0.99,
    *,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    values: str = "value",
    reward: str | None = None,
    log_ratios: str | None = None,
    bootstrap: str | None = None,
    final_values: str | None = None,
) -> Vtrace:
    """V-trace: Espeholt et al., "IMPALA" (2018), eq. 1 and section 4.2.

        delta_t = min(rho_bar, w_t) * (r_t + gamma * V(x_{t+1}) - V(x_t)),  w_t = pi(a_t|x_t) / mu(a_t|x_t)
        v_t = V(x_t) + delta_t + gamma * lam * min(c_bar, w_t) * (v_{t+1} - V(x_{t+1}))
        A_t = min(pg_rho_bar, w_t) * (r_t + gamma * v_{t+1} - V(x_t))

    adds "advantages", "targets" (v, float32) and "advantage_mask". Ends are treated as with `gae`; on policy with lam = 1 the
    targets are GAE's returns.

    Args:
        gamma: Discount per step, from 0 to 1.
        lam: From 0 to 1.
        rho_bar: Bound of w in the temporal differences, above 0.
        c_bar: Bound of w in the traces, above 0 and of at most rho_bar.
        pg_rho_bar: Bound of w in the advantages, above 0.
        values: Name of V of each step's observation.
        reward: Name of the reward in the batch; None for the one that the schema says is the reward, in a plain mapping "reward".
        log_ratios: Name of log w, or None: on policy.
        bootstrap: Name of V of the observation after the last step, [B] or [B, N], or None.
        final_values: Name of V of the true final observation of truncated steps, or None.

    Raises:
        ConfigError: A rate out of range.
    """
    return Vtrace(
        gamma,
        lam,
        rho_bar,
        c_bar,
        pg_rho_bar,
        values,
        reward,
        log_ratios,
        bootstrap,
        final_values,
    )


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


def normalize_advantages(*, eps: float = 1e-8, name: str = "advantages") -> NormalizeAdvantages:
    """(A - mean) / (deviation + eps) over the batch's steps that have one ("advantage_mask", else "mask"), in place.

    The deviation is the population's, so a single step gives 0 and not NaN.

    Args:
        eps: At least 0.
        name: What is normalized, float32.

    Raises:
        ConfigError: A negative eps.
    """
    return NormalizeAdvantages(eps, name)
