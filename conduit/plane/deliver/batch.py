"""Batches: a buffer's arrays by name, and copies that have memory of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Literal, NoReturn, cast

import numpy as np

from conduit.arrays import import_torch
from conduit.errors import ConfigError, ReadOnly
from conduit.kernels.spec.plan import EPISODES, IDS, KEYS, STEPS, VERSIONS
from conduit.plane.deliver.buffers import Buffer
from conduit.plane.deliver.transform_state import Transforming
from conduit.plane.views import Arrays
from conduit.schema import Schema
from conduit.store.tables.appearance import never_raises

Array = np.ndarray[Any, Any]
Format = Literal["torch", "numpy"]

Wrap = Callable[[Array], Any]
"""Makes the delivered value of a buffer's array: a tensor, or a numpy view."""


class _InMaking(Arrays):
    """A batch under construction: its attributes can be assigned. Once they are, its class becomes Batch, which refuses assignment."""

    __slots__ = ("_buffer", "_keys", "_schema", "_turn", "_values", "_wrap")

    def __init__(self, buffer: Buffer, wrap: Wrap, schema: Schema) -> None:
        self._buffer = buffer
        self._turn = buffer.turn
        self._wrap = wrap
        self._schema = schema
        self._values: dict[str, Any] = dict(zip(buffer.names, map(wrap, buffer.delivered), strict=True))
        for names, starts in buffer.narrowed:
            for name in names:
                self._values[name] = wrap(buffer.arrays[name][: starts[-1]])
        for name in buffer.brains:
            self._values[name] = as_bfloat16(self._values[name])
        self._keys: dict[str, Any] = {}
        # a tenth of the cost of six calls of object.__setattr__
        self.__class__ = _BATCH

    def __getitem__(self, name: str) -> Any:
        value = self._values.get(name)
        return self._find(name) if value is None else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Batch(_InMaking):
    """One delivered batch: names to tensors (or arrays), and where the rows come from.

    `batch["obs.camera"]` is `batch.obs.camera` too. A field with the name of one of the batch's own attributes (ids, steps, keys,
    items and so on) is reached by its name in brackets.

    Its memory stays valid and unchanged as long as anything made from it is alive: the batch, a tensor of it, a view of
    such a tensor. `release()` gives it back earlier.

    Tensors may be written to in place: the memory belongs to this process, and stored rows do not change. The batch itself
    refuses assignments; `dict(batch)` is a mapping that takes them. A copy, by `clone`, `copy.deepcopy` or `pickle`, has memory of its
    own, needs neither loader nor engine, and takes assignments of entries.
    """

    __slots__ = ()

    def _key(self, name: str) -> Any:
        if name not in self._keys:
            self._keys[name] = self._wrap(self._buffer.arrays[name])
        return self._keys[name]

    @property
    def ids(self) -> Any:
        """Row ids, int64 [B]. An id names its row until a writer overwrites the row (`Loader.valid`)."""
        return self._key(IDS)

    @property
    def versions(self) -> Any:
        """Versions of the policy that acted, int64 [B]."""
        return self._key(VERSIONS)

    @property
    def episodes(self) -> Any:
        """Episode numbers, unique in the table, int64 [B]."""
        return self._key(EPISODES)

    @property
    def steps(self) -> Any:
        """Steps in the episode, int64 [B], from 0."""
        return self._key(STEPS)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the rewards in the batch, or of the returns that were made of them."""
        return self._buffer.reward_names

    def __setitem__(self, name: str, value: object) -> None:
        raise ReadOnly(
            f"Expected no assignment to batch[{name!r}], since the loader owns the batch: own = dict(batch) takes assignments and "
            f"shares its tensors, own = batch.clone() takes them and copies the tensors, batch[{name!r}][...] = value writes into a tensor"
        )

    def __delitem__(self, name: str) -> None:
        raise ReadOnly(
            f"Expected no deletion of batch[{name!r}], since the loader owns the batch: own = dict(batch) takes deletions, and the "
            "loader's fields=[...] delivers only the fields that you need"
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ReadOnly(
            f"Expected no assignment to batch.{name}, since the loader owns the batch: own = dict(batch) takes entries of your own"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise ReadOnly(
            f"Expected no deletion of batch.{name}, since the loader owns the batch: own = dict(batch) takes deletions"
        )

    def _transform(self, transforming: Transforming, number: int) -> None:
        """Run a loader's steps on the whole batch; called once, before the batch is delivered."""
        transforming.finish(self._values, self._buffer.arrays, number)

    def nest(self) -> dict[str, Any]:
        """The batch with nested fields as nested dicts and tuples; other columns keep their names."""
        own = {f"{prefix}{name}" for name in self._schema.names for prefix in ("", "next_")} | {
            "terminated",
            "truncated",
        }
        fields = {name: value for name, value in self._values.items() if name in own}
        return self._schema.nest(fields) | {name: value for name, value in self._values.items() if name not in own}

    def clone(self) -> Batch:
        """A copy on the same device with memory of its own, apart from the loader's buffers. It takes assignments."""
        return self._with(cloned)

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        """The batch on a device, ids and the like included.

        Args:
            device: As of `torch.Tensor.to`: a torch.device, its name or its number.
            non_blocking: As of `torch.Tensor.to`.

        Returns:
            This batch itself if all of its tensors are on the device already, otherwise a batch with memory of its own.

        Raises:
            ConfigError: A batch of numpy arrays.
        """
        if any(isinstance(value, np.ndarray) for value in self._values.values()):
            raise ConfigError(
                f"Expected a batch of torch tensors to move to {device!r}, got one that has numpy arrays: open the loader with "
                'format="torch"'
            )
        moved = {
            name: value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value
            for name, value in self._values.items()
        }
        if all(value is moved[name] for name, value in self._values.items()):
            return self
        return self._with(lambda value: value.to(device, non_blocking=non_blocking), moved)

    def _with(self, change: Callable[[Any], Any], values: dict[str, Any] | None = None) -> Batch:
        """A new batch with its own memory: `values` if given, otherwise this batch's arrays after `change`."""
        changed = {name: change(value) for name, value in self._values.items()} if values is None else values
        return OwnedBatch(changed, {name: change(self._key(name)) for name in KEYS}, self._schema, self.reward_names)

    def __copy__(self) -> Batch:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Batch:
        return self.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        return self.clone().__reduce__()

    def release(self) -> None:
        """Promise not to use this batch or anything made from it again; its memory may be reused at once. Idempotent."""
        if self._buffer.turn == self._turn:  # otherwise the memory belongs to a later batch by now
            self._buffer.released = True

    @never_raises
    def __repr__(self) -> str:
        inner = ", ".join(f"{name}: {tuple(value.shape)} {value.dtype}" for name, value in self._values.items())
        return f"Batch({inner})"


_BATCH: Any = Batch
"""The later class of a batch under construction; typed Any, since type checkers do not let an object change its class."""


class OwnedBatch(Batch, MutableMapping[str, Any]):
    """A batch with memory of its own, apart from a loader's buffers. The memory is freed with the last object made from it.

    It is a mutable mapping. torch's DataLoader applies default_convert and pin_memory to a copy of it, and the copy keeps the ids.

    Args:
        values: {name: tensor or array}.
        keys: Where the rows come from, {conduit.kernels.spec.plan.KEYS: int64 [B]}.
        schema: The table's schema, with the names that fields have in the batch.
        reward_names: Names of the rewards in `values`.
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

    def _transform(self, transforming: Transforming, number: int) -> None:
        """Does nothing: the steps on the whole batch have been run."""

    def release(self) -> None:
        """Does nothing: the memory is freed with the last object made from the batch."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnedBatch, (self._values, self._keys, self._schema, self._reward_names)


batch_of = cast(Callable[[Buffer, Wrap, Schema], Batch], _InMaking)
"""Makes the Batch of a buffer's contents."""


def cloned(value: Any) -> Any:
    """A copy of a batch's value with memory of its own and without an autograd graph: a tensor, an array, or any value of a user's step."""
    return value.detach().clone() if hasattr(value, "detach") else copy.deepcopy(value)


def as_bfloat16(value: Any) -> Any:
    """A tensor of bfloat16 bits as bfloat16; numpy has no such dtype and keeps the bits."""
    if isinstance(value, np.ndarray):
        return value
    import torch

    return value.view(torch.bfloat16)


def torch_wrap() -> Wrap:
    """The function that makes tensors of arrays.

    Raises:
        MissingExtra: torch is not installed.
    """
    wrap: Wrap = import_torch('format="torch"', 'ask for format="numpy"').from_numpy
    return wrap
