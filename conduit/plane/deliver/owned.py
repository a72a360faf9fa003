"""Batches that have memory of their own: copies, those of other processes, those on a device."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from conduit.plane.deliver.batch import Batch
from conduit.plane.deliver.transform_state import Transforming
from conduit.schema import Schema


class OwnedBatch(Batch, MutableMapping[str, Any]):
    """A batch that no buffer of a loader stands behind: its memory goes with the last thing that is made of it.

    It is a mapping of its holder's own and takes assignments. What torch's DataLoader does to mappings (default_convert, pin_memory)
    is done to a copy of such a one, which keeps its ids.

    Args:
        values: {name: tensor or array}.
        keys: Where the rows come from, {conduit.kernels.spec.plan.KEYS: int64 [B]}.
        schema: The table's, with the names that fields have in the batch.
        reward_names: Those of `values` that are rewards.
    """

    __slots__ = ("_reward_names",)
    _reward_names: tuple[str, ...]

    def __init__(
        self, values: dict[str, Any], keys: dict[str, Any], schema: Schema, reward_names: tuple[str, ...]
    ) -> None:
        put = object.__setattr__
        put(self, "_values", values)
        put(self, "_keys", keys)
        put(self, "_schema", schema)
        put(self, "_reward_names", reward_names)

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __copy__(self) -> OwnedBatch:
        return OwnedBatch(dict(self._values), self._keys, self._schema, self._reward_names)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the rewards in the batch, or of the returns that were made of them."""
        return self._reward_names

    def transform(self, transforming: Transforming, number: int) -> None:
        """Nothing: the steps on the whole batch have been run."""

    def release(self) -> None:
        """Nothing: the memory is free when nothing made of the batch is alive."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnedBatch, (self._values, self._keys, self._schema, self._reward_names)
