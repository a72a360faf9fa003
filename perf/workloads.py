"""The measured workloads, with names, and new random data for them.

Every tick's `action` is unique within a run (tick * lanes + lane), so that a delivered row names the row that was written
and a `Log` can hold the loader to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Part:
    """One field of a workload's row: dtype, shape of one row, whether loaders deliver the next row's value too."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    observation: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of this field."""
        return np.dtype(self.dtype).itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of one kind, written by `num_envs` environments per call.

    Attributes:
        name: Shown in results.
        parts: The schema's fields; `terminated` (1 byte) comes on top.
        rows: Capacity of the table and of every baseline's ring, in rows.
        num_envs: Environments per call; None is a single environment without a leading axis.
        batch: Rows per learner-ready batch.
    """

    name: str
    parts: tuple[Part, ...]
    rows: int
    num_envs: int | None = None
    batch: int = 256

    @property
    def lanes(self) -> int:
        """Rows per tick."""
        return self.num_envs or 1

    @property
    def row_bytes(self) -> int:
        """Bytes of the fields of a row and its `terminated` flag."""
        return sum(part.row_bytes for part in self.parts) + 1

    def sized(self, rows: int) -> Workload:
        """The same workload with another capacity."""
        return dataclasses.replace(self, rows=rows)


_CARTPOLE = (Part("obs", "float32", (4,), observation=True), Part("action", "int64"), Part("reward", "float32"))
_STEP = (
    Part("obs", "float32", (10,), observation=True),
    Part("goal", "float32", (10,)),
    Part("action", "int64"),
    Part("reward", "float64"),
)

STEP_97B = Workload("97 B", _STEP, rows=1 << 20)
SLAB_97B = Workload("97 B x 64", _STEP, rows=1 << 20, num_envs=64)
SLAB_28KB = Workload(
    "28 KB x 64",
    (Part("obs", "uint8", (84, 84, 4), observation=True), Part("action", "int64"), Part("reward", "float32")),
    rows=1 << 14,
    num_envs=64,
)
CARTPOLE = Workload("CartPole", _CARTPOLE, rows=1 << 20, num_envs=64)
PIXELS = Workload(
    "4x84x84 uint8",
    (Part("obs", "uint8", (4, 84, 84), observation=True), Part("action", "int64"), Part("reward", "float32")),
    rows=1 << 13,
    num_envs=64,
)
ATARI = Workload(
    "84x84 uint8",
    (Part("obs", "uint8", (84, 84), observation=True), Part("action", "int64"), Part("reward", "float32")),
    rows=1 << 14,
    num_envs=64,
)
FLAT_OUT = Workload("CartPole", _CARTPOLE, rows=1 << 22)

WORKLOADS: Mapping[str, Workload] = {
    "step_97b": STEP_97B,
    "slab_97b": SLAB_97B,
    "slab_28kb": SLAB_28KB,
    "cartpole": CARTPOLE,
    "pixels": PIXELS,
    "atari": ATARI,
    "flat_out": FLAT_OUT,
}


def values(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.generic]:
    """Random numbers that use the dtype's range: normal floats, whole bytes, ints below 2**31."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return rng.standard_normal(shape, np.float32).astype(kind)
    if kind == np.uint8:
        return rng.integers(0, 256, shape, np.uint8)
    return rng.integers(0, 1 << 31, shape).astype(kind)


def ticks(workload: Workload, count: int, rng: np.random.Generator, *, first: int = 0, ends: float = 0.0) -> Columns:
    """Data for `count` ticks, each field [count, lanes, *shape].

    Args:
        workload: Whose fields to make.
        count: Ticks.
        rng: Where from.
        first: Number of the first tick; makes `action` unique across calls.
        ends: Chance that a row ends its episode (`terminated`).
    """
    lanes = workload.lanes
    columns: Columns = {}
    for part in workload.parts:
        if part.name == "action":
            numbers = np.arange(first * lanes, (first + count) * lanes, dtype=np.int64)
            columns["action"] = numbers.reshape(count, lanes)
        else:
            columns[part.name] = values(part.dtype, (count, lanes, *part.shape), rng)
    columns["terminated"] = rng.random((count, lanes)) < ends
    return columns


@dataclass(frozen=True, slots=True)
class Log:
    """Everything that was written to a table, in order: what a loader's batches are compared with.

    Attributes:
        columns: Field to [ticks, lanes, *shape]; `action` is tick * lanes + lane.
        finals: Field to [ticks, lanes, *shape]: the observation after a row that ended; None where none was given.
    """

    workload: Workload
    columns: Columns
    finals: Columns | None = None

    def expected(self, actions: NDArray[np.int64]) -> Columns:
        """The columns that a batch with these actions must have.

        Args:
            actions: int64 [B], as delivered.

        Returns:
            Field, `terminated` and `next_<observation>` to [B, *shape].
        """
        tick, lane = np.divmod(actions, self.workload.lanes)
        want = {name: column[tick, lane] for name, column in self.columns.items()}
        for part in self.workload.parts:
            if not part.observation:
                continue
            follower = self.columns[part.name][np.minimum(tick + 1, len(self.columns[part.name]) - 1), lane]
            if self.finals is not None:
                ended = want["terminated"].astype(bool)
                follower[ended] = self.finals[part.name][tick[ended], lane[ended]]
            want["next_" + part.name] = follower
        return want
