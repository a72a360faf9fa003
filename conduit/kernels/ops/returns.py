"""Advantages and returns of consecutive steps: GAE and V-trace.

Both work on [B, T, N] (rollouts) or [B, T] (sequences, episodes), backwards in time. On the CPU, float64 inputs keep their precision,
everything is computed in float64, and results are rounded once, to float32; on a device float32 is computed in float32. The same rules
give the value of a step's successor in both:

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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conduit.errors import ConfigError
from conduit.kernels.cpu.returns import (
    TRACE_ADVANTAGES,
    TRACE_BOOTSTRAP,
    TRACE_FINALS,
    TRACE_RATIOS,
    TRACE_RETURNS,
    TRACE_USED,
    TRACE_VALUES,
    Job,
    trace,
    trace_wide,
)
from conduit.kernels.ops.step_arrays import needed, reward_in, taken
from conduit.kernels.spec.batch_transforms import BatchTransform, Contents
from conduit.kernels.spec.plan import Computed
from conduit.kernels.spec.returns import Rates
from conduit.native.jit import entry
from conduit.numbers import real, within

Array = np.ndarray[Any, Any]


def _like(values: Mapping[str, Any], reward: str, made: dict[str, Array]) -> dict[str, Any]:
    """Convert arrays to the format of the batch that they were made from."""
    if not hasattr(values[reward], "detach"):
        return dict(made)
    import torch  # already imported: the caller's batch has tensors

    return {name: torch.from_numpy(array) for name, array in made.items()}


def _keep_rates(step: object, *names: str) -> None:
    """Turn attributes into floats from 0 to 1."""
    for name in names:
        object.__setattr__(step, name, within(name, getattr(step, name), 0, 1))


class _Advantages(BatchTransform):
    """The base class of GAE and V-trace."""

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
        """The step with the reward's name."""
        assert isinstance(self, Gae | Vtrace)  # noqa: S101 - for the type checker
        return replace(self, reward=contents.reward(self)) if self.reward is None else self

    def outputs(self, contents: Contents) -> tuple[Computed, ...]:
        """Advantages, targets of the value function, and which steps have them."""
        axes = contents.need_steps(self)
        inputs = (self.reward, self.values, self.bootstrap, self.final_values, self._ratios())
        contents.need(needed(contents, *inputs), self)
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
        return {key: None if name is None else taken(values, name) for key, name in names.items()}

    def run(self, values: dict[str, Any], arrays: Mapping[str, Array], draw: tuple[int, int]) -> None:
        """Fill the arrays from the batch's own."""
        self._compute(values, self._given(values), arrays)

    def check_device(self, place: str) -> None:
        """Accepts every device: there is a kernel for it."""

    def run_on_device(self, values: dict[str, Any], draw: tuple[int, int]) -> None:
        """Fill the tensors from the batch's own, in one launch."""
        self._launch(values, self._given(values), values)

    def _launch(
        self, batch: Mapping[str, Any], given: Mapping[str, Any], made: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """As `_compute`, on the batch's device; without `made`, into new tensors."""
        from conduit.kernels.gpu.batch_returns import advantages_of

        reward = reward_in(batch, self.reward)
        return advantages_of(self.rates, batch, given, made, reward=reward, target=self._target)

    def _called(self, batch: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Advantages of values that are not in the batch, computed on the batch's device."""
        reward = reward_in(batch, self.reward)
        if getattr(taken(batch, reward), "is_cuda", False):
            return self._launch(batch, given, None)
        return _like(batch, reward, self._compute(batch, given, None))


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
        """Compute the advantages with values that are not in the batch, such as a critic's.

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
        """Compute targets and advantages with values and ratios that are not in the batch.

        Args:
            batch: A Batch or a mapping, as for `Gae`.
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

    It adds "advantages", "returns" (float32) and "advantage_mask" to a batch of rollouts, sequences or episodes.
    conduit.kernels.ops.returns has the rules for terminations, truncations and the window's end. With lam = 1, A_t = G_t - V(x_t).

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

    It adds "advantages", "targets" (v, float32) and "advantage_mask". The rules for ends are the same as for `gae`. On policy and with
    lam = 1, the targets are GAE's returns.

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
