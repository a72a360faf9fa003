"""Advantages and returns of a batch on the device: converts its tensors for one launch of conduit.kernels.gpu.returns.

If any input is wider than float32, all are converted to float64, otherwise to float32. Results have no gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conduit.errors import FieldError
from conduit.kernels.cpu.returns import has_lengths
from conduit.kernels.gpu.returns import trace
from conduit.kernels.spec.batch_transforms import is_wide
from conduit.kernels.spec.returns import Rates


def _steps(batch: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """The flags, masks and lengths of a batch of steps [B, T] or [B, T, N], by the names of `trace`'s arguments."""
    found = {name: batch[name] for name in ("mask", "is_first") if name in batch}
    return found | ({"lengths": batch["lengths"]} if has_lengths(batch, shape) else {})


def as_reals(reward: Any, *others: Any) -> Any:
    """The reward, as float64 if it or another of the tensors is wider than float32; otherwise as float32."""
    import torch

    wide = any(is_wide(one) for one in (reward, *others))
    return reward.detach().to(torch.float64 if wide else torch.float32).contiguous()


def _float32_like(tensor: Any) -> Any:
    import torch

    return torch.empty_like(tensor, dtype=torch.float32)


def advantages_of(
    rates: Rates,
    batch: Mapping[str, Any],
    given: Mapping[str, Any],
    made: Mapping[str, Any] | None,
    *,
    reward: str,
    target: str,
) -> dict[str, Any]:
    """`trace` for a batch.

    Args:
        rates: The estimator's rates.
        batch: {name: tensor} with reward, terminated, truncated, and mask, is_first and lengths if there are any.
        given: {"values", "bootstrap", "final_values", "log_ratios": tensor or None}; detached from their gradients.
        made: Tensors to fill, by name, or None for new ones.
        reward: Name of the reward.
        target: Name of the targets.

    Returns:
        {"advantages", target, "advantage_mask"}.

    Raises:
        FieldError: Missing or wrong tensors.
    """
    for name in (reward, "terminated", "truncated"):
        if name not in batch:
            raise FieldError(f"Expected {name!r} in the batch, got {list(batch)}", at=name)
    rewards = as_reals(batch[reward], *given.values())
    if made is None:
        flags = batch["terminated"]
        made = {
            "advantages": _float32_like(rewards),
            target: _float32_like(rewards),
            "advantage_mask": flags.new_empty(flags.shape),
        }
    tensors = {
        key: None if value is None else value.detach().to(rewards.dtype).contiguous() for key, value in given.items()
    }
    trace(
        rates,
        rewards,
        tensors.pop("values"),
        batch["terminated"],
        batch["truncated"],
        made["advantages"],
        made[target],
        made["advantage_mask"],
        **_steps(batch, tuple(rewards.shape)),
        **tensors,
    )
    return {name: made[name] for name in ("advantages", target, "advantage_mask")}


def returns_to_go(gamma: float, reward: str, batch: Mapping[str, Any], out: Any) -> None:
    """The sums of conduit.returns_to_go, float32: the advantages with lam = 1 when all values, also after ends, are 0."""
    rewards = as_reals(batch[reward])
    zeros = rewards.new_zeros(rewards.shape)
    trace(
        Rates(gamma, 1.0),
        rewards,
        zeros,
        batch["terminated"],
        batch["truncated"],
        out,
        _float32_like(zeros),
        batch["terminated"].new_empty(zeros.shape),
        bootstrap=rewards.new_zeros((rewards.shape[0], *rewards.shape[2:])),
        final_values=zeros,
        **_steps(batch, tuple(rewards.shape)),
    )
