"""The arrays of a batch that describe its steps: the reward, and the arrays that say which rows are steps and how they end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conduit.errors import FieldError
from conduit.kernels.spec.batch_transforms import Contents
from conduit.kernels.spec.windows import Rollout

_FLAGS = ("terminated", "truncated", "mask", "is_first")


def needed(contents: Contents, *names: str | None) -> tuple[str, ...]:
    """The given names of a transform's inputs, without None, and the arrays that say which rows are steps and how they end."""
    lengths = () if isinstance(contents.window, Rollout) else ("lengths",)
    return (*(name for name in names if name is not None), *_FLAGS, *lengths)


def reward_in(batch: Mapping[str, Any], reward: str | None) -> str:
    """Name of the reward in a batch: the given name, or the field with that role. In a plain mapping, without roles, it is "reward".

    Raises:
        FieldError: There is no reward, there are several, or the batch lacks an array that says which of its rows are steps.
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


def taken(values: Mapping[str, Any], name: str) -> Any:
    """An array of a batch.

    Raises:
        FieldError: The batch has no such array.
    """
    if name not in values:
        raise FieldError(f"Expected {name!r} in the batch, got {list(values)}", at=name)
    return values[name]
