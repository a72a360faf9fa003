"""The batch maker of a device: the host draws and copies the rows that the device cannot read; the device gathers the fields."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.contracts.device import Device
from conduit.contracts.sampler import Sampler
from conduit.errors import ConfigError
from conduit.kernels.spec.plan import Plan
from conduit.plane.deliver.batch import Batch, Wrap
from conduit.plane.deliver.batch_job import Scratch
from conduit.plane.deliver.batch_maker import BatchMaker
from conduit.plane.deliver.buffers import Buffer
from conduit.plane.device.buffers import DeviceBatch, DeviceBuffer, can_gather
from conduit.plane.device.mirror import Mirror
from conduit.plane.device.registration import Registration
from conduit.plane.device.row_sources import Nowhere, Registered, Residence
from conduit.schema import Schema
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

WIDE = 1024
"""Least bytes of a field's row for which the device reads registered host memory. The host makes batches of narrower rows, which costs
less than reading such rows over the bus one by one. The value is an estimate: it has not been measured on a GPU.
"""


class DeviceMaker(BatchMaker):
    """Fills buffers whose batches lie on a device: the same rows, by the same draws, as on the CPU.

    Args:
        table: As for `BatchMaker`, like the next four.
        plan: The plan of a batch.
        sampler: Draws the batches.
        seed: Seed of the plan's own random numbers.
        schema: The table's schema, with the names that fields have in the batch.
        wrap: Not used: batches are of torch tensors.
        device: The device.
        pool: Device memory for a mirror of the table's newest pages, or None.

    Attributes:
        residence: The rows that the device reads by itself, or None if the host makes whole batches.
        far: Number of samples whose rows the host copied, in all batches so far.

    Raises:
        ConfigError: The device cannot make the plan's batches.
    """

    def __init__(
        self,
        table: TableView,
        plan: Plan,
        sampler: Sampler,
        seed: int,
        *,
        schema: Schema | None = None,
        wrap: Wrap = np.ndarray.view,
        device: Device,
        pool: str | int | None,
    ) -> None:
        super().__init__(table, plan, sampler, seed, schema=schema, wrap=wrap)
        self.far = 0
        self._device = device
        self.residence = _residence_of(device, table, plan, pool)
        self.prepares = self.prepares or self.residence is not None

    def open_buffer(self, beside: Buffer | None = None) -> Buffer:  # noqa: ARG002 - nothing lies beside
        """A buffer for this maker to fill."""
        scratch = Scratch(self.plan, self.scratch.ages)
        buffer = DeviceBuffer(self._device, self._table, self.plan, self.residence, scratch)
        buffer.given(self._job_of(buffer, buffer.made, scratch), self._seed)
        return buffer

    def prepare(self, number: int) -> None:
        """As `BatchMaker.prepare`; also makes more pages readable by the device (`Residence.refresh`)."""
        if self.residence is not None:
            self.residence.refresh()
        super().prepare(number)

    def fill(self, buffer: Buffer) -> bool:
        """Draw a batch, and copy the rows that the device cannot read by itself; False when there is nothing to draw."""
        if self.residence is None:
            return super().fill(buffer)
        return self.draw(buffer) and self.gather(buffer)

    def _gather(self, buffer: Buffer, slots: Array | None) -> bool:
        assert isinstance(buffer, DeviceBuffer)  # noqa: S101 - for the type checker
        return super()._gather(buffer, slots) if self.residence is None else buffer.stage(slots)

    def batch(self, buffer: Buffer, number: int) -> Batch:
        """Launch the gathers of the batch that was drawn, and the steps on the whole batch, without waiting."""
        assert isinstance(buffer, DeviceBuffer)  # noqa: S101 - for the type checker
        with self._device.guard():
            values, keys = buffer.send(number)
        self.far += buffer.far
        batch = DeviceBatch(values, keys, self._schema, self._device, self.plan.reward_names)
        if self.plan.batchwise:
            batch._transform(self._transforming, number)  # noqa: SLF001 - hidden from who reads the batch
        return batch

    def close(self) -> None:
        """Release the pool and the registered memory."""
        if self.residence is not None:
            self.residence.close()


def _residence_of(device: Device, table: TableView, plan: Plan, pool: str | int | None) -> Residence | None:
    """Choose where the device reads rows, by the plan's outputs, the bytes of a row and the option `pool`."""
    from conduit.kernels.gpu.launch import LARGEST

    for step in plan.batchwise:
        step.check_device(device.place)
    lacks = can_gather(plan)
    if pool is not None and lacks:
        raise ConfigError(
            f"Expected a plan that the device can make out of a pool, got {lacks}: leave pool= out, the host makes such "
            "batches, or leave the field out by fields="
        )
    widest = max((output.field.row_bytes for output in plan.outputs), default=0)
    if lacks or (pool is None and widest < WIDE):
        return None
    registration = Registration(device, table)
    if pool is not None:
        return Mirror(device, table, pool, None if registration.refused else registration)
    if registration.refused or table.layout.rows > LARGEST:
        return Nowhere(table)
    return Registered(table, registration)
