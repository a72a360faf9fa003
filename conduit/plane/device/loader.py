"""A loader whose batches lie on a device."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from conduit.contracts.device import Device
from conduit.errors import ConfigError
from conduit.plane.deliver.loader import Loader
from conduit.plane.device.batch_maker import DeviceMaker
from conduit.plane.device.graphs import Draws
from conduit.plane.device.mirror import Mirror
from conduit.plane.device.row_sources import Residence
from conduit.sampling.uniform import Uniform
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]


class DeviceLoader(Loader):
    """Batches on a device: the rows that a loader on the CPU with the same seed would deliver, as tensors there.

    `next` returns when all work has been launched. It waits for the device only when the device still works on `buffers` batches.
    """

    _maker: DeviceMaker

    def __init__(self, table: TableView, *, device: Device, pool: str | int | None, **options: Any) -> None:
        if options.get("format", "torch") != "torch":
            raise ConfigError(f"Expected format='torch' for batches on {device.place}, got {options['format']!r}")
        if table.layout.table.max_times_sampled is not None:
            raise ConfigError(
                f"Expected a table without max_times_sampled for batches on {device.place}, table {table.layout.name!r} has it: "
                "its deliveries are counted by the host, use device='cpu'"
            )
        self.device = device
        self._pool = pool
        self._seed: int = options["seed"]
        super().__init__(table, maker=functools.partial(DeviceMaker, device=device, pool=pool), **options)

    @property
    def residence(self) -> Residence | None:
        """Where the device reads rows by itself, or None if the host makes whole batches."""
        return self._maker.residence

    def draws(self) -> Draws:
        """Batches that the device draws by itself from the pool, for a CUDA graph.

        They begin with the loader's next batch. Use them instead of `next`: both update the pool.

        Raises:
            ConfigError: The loader has no pool, or an option that the device's draws do not have.
        """
        plain = isinstance(self.sampler, Uniform) and self._policy is None and not self.plan.batchwise
        if not isinstance(self.residence, Mirror) or not plain:
            raise ConfigError(
                "Expected a loader that draws uniformly out of a pool, without max_staleness and batch_transforms, got "
                f"{type(self.sampler).__name__}, pool={self._pool!r}, batch_transforms={self.plan.batchwise} and "
                f"{'a' if self._policy is not None else 'no'} max_staleness: use next(), which has them all, or open the loader so"
            )
        return Draws(self.device, self._table, self.plan, self.residence, self._seed, self.sampler.batch)

    @property
    def copied_rows(self) -> int:
        """Number of delivered samples whose rows the host copied; the device read the others by itself."""
        return self._maker.far

    def valid(self, ids: Any) -> Array:
        """As `Loader.valid`; it waits for the device."""
        return super().valid(ids.cpu() if hasattr(ids, "cpu") else ids)
