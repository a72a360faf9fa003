"""A loader whose batches lie on a device."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from conduit.contracts.device import Device
from conduit.errors import ConfigError
from conduit.plane.deliver.batch import Batch, Buffer
from conduit.plane.deliver.loader import Loader
from conduit.plane.device.buffers import DeviceBatch, DeviceBuffer, can_gather
from conduit.plane.device.graphs import Draws
from conduit.plane.device.mirror import Mirror
from conduit.plane.device.registration import Registration
from conduit.plane.device.row_sources import Nowhere, Registered, Residence
from conduit.sampling.uniform import Uniform
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

WIDE = 1024
"""Bytes of a field's row from which on the device reads registered rows by itself; batches of narrower ones are made by the host,
which costs less than reading them over the bus one by one. To be settled by measurement on the machine."""


class DeviceLoader(Loader):
    """Batches on a device: the rows that a loader on the CPU with the same seed would deliver, as tensors there.

    `next` returns when everything has been launched; it waits for the device only when `buffers` batches are under way.

    Attributes:
        residence: Where the device reads rows by itself, or None where the host makes whole batches.
    """

    def __init__(self, table: TableView, *, device: Device, pool: str | int | None, **options: Any) -> None:
        if options.get("format", "torch") != "torch":
            raise ConfigError(f"Expected format='torch' for batches on {device.place}, got {options['format']!r}")
        if table.layout.table.max_times_sampled is not None:
            raise ConfigError(
                f"Expected a table without max_times_sampled for batches on {device.place}, table {table.layout.name!r} has it: "
                "its deliveries are counted by the host, use device='cpu'"
            )
        self.device = device
        self.residence: Residence | None = None
        self._pool = pool
        self._seed: int = options["seed"]
        self._chosen = False
        self._far = 0
        try:
            super().__init__(table, **options)
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        if self.residence is not None:
            self.residence.close()

    def _choose(self) -> None:
        """Where rows are read, by what the plan needs, the bytes of a row, and what was asked for."""
        from conduit.kernels.gpu.launch import LARGEST

        self._chosen = True
        for step in self.plan.batchwise:
            step.check_device(self.device.place)
        table, lacks = self._table, can_gather(self.plan)
        if self._pool is not None and lacks:
            raise ConfigError(
                f"Expected a plan that the device can make out of a pool, got {lacks}: leave pool= out, the host makes such "
                "batches, or leave the field out by fields="
            )
        widest = max((output.field.row_bytes for output in self.plan.outputs), default=0)
        if lacks or (self._pool is None and widest < WIDE):
            return
        registration = Registration(self.device, table)
        if self._pool is not None:
            self.residence = Mirror(self.device, table, self._pool, None if registration.refused else registration)
        elif registration.refused or table.layout.rows > LARGEST:
            self.residence = Nowhere(table)
        else:
            self.residence = Registered(table, registration)

    def _open_buffer(self, beside: Buffer | None) -> Buffer:  # noqa: ARG002 - nothing lies beside
        if not self._chosen:
            self._choose()
        return DeviceBuffer(
            self.device,
            self._table,
            self.plan,
            self._transforming,
            self.sampler,
            self._seed,
            self._block,
            self.residence,
            self._scratch.ages,
        )

    def _free_buffer(self, timeout: float | None) -> Buffer:  # noqa: ARG002 - a device's work ends by itself
        if self.residence is not None:
            self.residence.refresh()
        buffer = self._buffers[self._turn % len(self._buffers)]
        self._turn += 1
        assert isinstance(buffer, DeviceBuffer)  # noqa: S101 - for the type checker
        if not buffer.is_free():
            begun = time.monotonic()
            buffer.wait()
            self._waited += time.monotonic() - begun
        return buffer

    def _hand_out(self, buffer: Buffer) -> Batch:
        assert isinstance(buffer, DeviceBuffer)  # noqa: S101 - for the type checker
        with self.device.guard():
            values, keys = buffer.send(self.sampler.batch)
        self._far += buffer.far
        return DeviceBatch(values, keys, self._shown, self.device, self.plan.reward_names)

    def draws(self) -> Draws:
        """Batches that the device draws by itself out of the pool, for a CUDA graph.

        They begin with the batch that would be next. Use them in the place of `next`: both bring the pool up to date.

        Raises:
            ConfigError: The loader has no pool, or draws in a way that the device does not.
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
        """Samples whose rows the host copied, of all that were delivered; the device read the others by itself."""
        return self._far

    def valid(self, ids: Any) -> Array:
        """As `Loader.valid`; it waits for the device."""
        return super().valid(ids.cpu() if hasattr(ids, "cpu") else ids)

    def close(self) -> None:
        """Wait for what is under way, give the pool and the registered memory back. Batches that are held stay valid."""
        try:
            for buffer in self._buffers:
                assert isinstance(buffer, DeviceBuffer)  # noqa: S101 - for the type checker
                buffer.wait()
        finally:
            # a device that was lost keeps neither the loader's name nor memory of the host
            super().close()
            self._give_back()
