"""A table as a torch dataset: every process that iterates it attaches by the engine's name and opens a loader.

The workers of a `torch.utils.data.DataLoader` attach by themselves, each with its own seat among the engine's processes. They divide
the batches of one loader by `shard`: worker w of n makes every n-th batch, beginning with the w-th. A DataLoader takes its workers'
batches in turn. So, as long as no rows are written, it delivers the batches of one loader of that seed, in its order.

The batches go through torch's shared memory, which costs a copy. A loader in the learner's process saves that copy; this dataset is
for code that needs a DataLoader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from conduit.errors import ConfigError
from conduit.plane.deliver.batch import Batch, OwnedBatch

_NEXT_SEED = 0x9E3779B97F4A7C15
"""Distance between the seeds of a worker's successive iterations."""


class Dataset(IterableDataset[Batch]):
    """Batches of one table, for `DataLoader(dataset, batch_size=None, num_workers=...)`. Use `Client.dataset`.

    Args:
        name: Engine name.
        attach: Attaches by an engine's name; it is pickled with the dataset.
        table: Table name.
        seed: The loader's seed. None takes a new seed from torch for each iteration, which `torch.manual_seed` repeats.
        shard: The loader's shard.
        policy: Name of the slot whose versions `max_staleness` counts, or None.
        options: The loader's other options.
    """

    def __init__(
        self,
        name: str,
        attach: Callable[[str], Any],
        table: str,
        *,
        seed: int | None,
        shard: tuple[int, int] | None,
        policy: str | None,
        options: Mapping[str, Any],
    ) -> None:
        self._name = name
        self._table = table
        self._attach = attach
        self._seed = seed
        self._shard = shard
        self._policy = policy
        self._options = dict(options)
        self._iterations = 0

    def __repr__(self) -> str:
        return f"Dataset(engine {self._name!r}, table {self._table!r}, {self._options})"

    def __iter__(self) -> Iterator[Batch]:
        """Attach, and deliver a loader's batches until the iterator is dropped."""
        worker = get_worker_info()
        rank, world = self._shard or (0, 1)
        if worker is None:
            seed = int(torch.empty((), dtype=torch.int64).random_()) if self._seed is None else self._seed
        else:
            # persistent workers keep torch's seed from one iteration to the next; all of them count the same iterations
            drawn = worker.seed - worker.id + _NEXT_SEED * self._iterations
            seed = drawn % 2**63 if self._seed is None else self._seed
            rank, world = rank + world * worker.id, world * worker.num_workers
        self._iterations += 1
        with self._attach(self._name) as client:
            policy = None if self._policy is None else client.policy(self._policy)
            options = {**self._options, "policy": policy, "seed": seed, "shard": (rank, world)}
            with client.loader(self._table, **options) as loader:
                for batch in loader:
                    # an OwnedBatch stays one in torch's default_convert and pin_memory
                    yield batch.clone()


def _collated(batches: list[Batch], *, collate_fn_map: object = None) -> None:  # noqa: ARG001 - torch's signature
    raise ConfigError(
        f"Expected DataLoader(dataset, batch_size=None), got {len(batches)} batches to collate: each is a batch already, of the "
        "size given by client.dataset(..., batch_size=...)"
    )


default_collate_fn_map[OwnedBatch] = _collated
