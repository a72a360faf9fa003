"""The plain alternatives that Conduit is compared with, each as a careful user would write it.

They own private memory of the same capacity as Conduit's table, see the same data, draw their own random rows, and write
into reused output buffers where their library offers it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perf.workloads import Columns, Log, Workload

if TYPE_CHECKING:
    import torch

CPPRB_MISSING = "cpprb not installed: pip install 'conduit-rl[peers]' (or pip install 'cpprb>=11,<12')"

Row = tuple[Any, ...]


def cpprb_absent() -> str | None:
    """Why cpprb 11 cannot be measured, with the remedy; None if it can."""
    if importlib.util.find_spec("cpprb") is None:
        return CPPRB_MISSING
    version = importlib.metadata.version("cpprb")
    return None if version.split(".")[0] == "11" else f"expected cpprb 11, found {version}: pip install 'cpprb>=11,<12'"


class PlainRing:
    """A private numpy ring: one array per field, one cursor, no checks, nobody else reads it.

    Attributes:
        columns: Field to [rows, *shape], every page touched.
    """

    def __init__(self, workload: Workload) -> None:
        self.columns: Columns = {
            part.name: np.full((workload.rows, *part.shape), 1, part.dtype) for part in workload.parts
        }
        self.columns["terminated"] = np.full(workload.rows, fill_value=False)
        self.rows = workload.rows
        self.lanes = workload.lanes
        self.at = 0

    def step_loop(self) -> Callable[[Sequence[Row]], None]:
        """A function that writes (obs, goal, action, reward, terminated) rows one by one: five assignments each."""
        obs, goal, action, reward, terminated = (
            self.columns[n] for n in ("obs", "goal", "action", "reward", "terminated")
        )
        rows = self.rows

        def write(data: Sequence[Row]) -> None:
            i = self.at
            for o, g, a, r, d in data:
                obs[i] = o
                goal[i] = g
                action[i] = a
                reward[i] = r
                terminated[i] = d
                i += 1
                if i == rows:
                    i = 0
            self.at = i

        return write

    def slab_loop(self) -> Callable[[Sequence[Row]], None]:
        """A function that writes ticks of `lanes` rows: one slice assignment per field, in the order of `columns`."""
        columns = tuple(self.columns.values())
        rows, lanes = self.rows, self.lanes
        if len(columns) == 5:
            obs, goal, action, reward, terminated = columns

            def write(data: Sequence[Row]) -> None:
                i = self.at
                for o, g, a, r, d in data:
                    j = i + lanes
                    obs[i:j] = o
                    goal[i:j] = g
                    action[i:j] = a
                    reward[i:j] = r
                    terminated[i:j] = d
                    i = j if j < rows else 0
                self.at = i

            return write
        obs, action, reward, terminated = columns

        def write_four(data: Sequence[Row]) -> None:
            i = self.at
            for o, a, r, d in data:
                j = i + lanes
                obs[i:j] = o
                action[i:j] = a
                reward[i:j] = r
                terminated[i:j] = d
                i = j if j < rows else 0
            self.at = i

        return write_four


def cpprb_batches(workload: Workload, columns: Columns, next_obs: NDArray[np.generic]) -> Callable[[], Any]:
    """Fills the uniform ReplayBuffer of cpprb with all rows; a call gives one batch as torch tensors.

    `next_obs` is stored beside `obs`, which is cpprb's faster form (`next_of` computes it per batch). Its arrays are fresh
    copies, so the tensors share their memory.

    Args:
        workload: Batch size and capacity.
        columns: Field and `terminated` to [rows, *shape].
        next_obs: [rows, *shape of obs].
    """
    import cpprb
    import torch

    kinds = {name: {"shape": column.shape[1:] or 1, "dtype": column.dtype} for name, column in columns.items()}
    kinds["done"] = kinds.pop("terminated")
    kinds["next_obs"] = kinds["obs"]
    buffer = cpprb.ReplayBuffer(workload.rows, kinds)
    rows = {name: column for name, column in columns.items() if name != "terminated"}
    for start in range(0, len(next_obs), 1 << 14):
        piece = slice(start, start + (1 << 14))
        chunk = {name: column[piece] for name, column in rows.items()}
        buffer.add(**chunk, done=columns["terminated"][piece], next_obs=next_obs[piece])
    size, from_numpy, sample = workload.batch, torch.from_numpy, buffer.sample

    def batch() -> dict[str, torch.Tensor]:
        return {name: from_numpy(array) for name, array in sample(size).items()}

    return batch


class PrioritizedRing:
    """cpprb's PrioritizedReplayBuffer, filled with all rows."""

    def __init__(self, workload: Workload, columns: Columns, next_obs: NDArray[np.generic], alpha: float) -> None:
        import cpprb

        kinds = {name: {"shape": column.shape[1:] or 1, "dtype": column.dtype} for name, column in columns.items()}
        kinds["done"] = kinds.pop("terminated")
        kinds["next_obs"] = kinds["obs"]
        self._buffer = cpprb.PrioritizedReplayBuffer(workload.rows, kinds, alpha=alpha)
        rows = {name: column for name, column in columns.items() if name != "terminated"}
        for start in range(0, len(next_obs), 1 << 14):
            piece = slice(start, start + (1 << 14))
            chunk = {name: column[piece] for name, column in rows.items()}
            self._buffer.add(**chunk, done=columns["terminated"][piece], next_obs=next_obs[piece])
        self._size = workload.batch

    def sample(self, beta: float) -> dict[str, NDArray[np.generic]]:
        """A batch, with "weights" and "indexes"."""
        batch: dict[str, NDArray[np.generic]] = self._buffer.sample(self._size, beta)
        return batch

    def update(self, indexes: NDArray[np.generic], priorities: NDArray[np.float64]) -> None:
        """New priorities for rows of a batch."""
        self._buffer.update_priorities(indexes, priorities)


class StepRing:
    """n-step transitions from plain numpy arrays, vectorised over the batch.

    Final observations lie in an array of their own, as they must lie somewhere; rows are flat, tick-major.
    """

    def __init__(self, workload: Workload, log: Log, n_step: int, gamma: float) -> None:
        self.columns = {name: column.reshape(-1, *column.shape[2:]).copy() for name, column in log.columns.items()}
        self.columns["terminated"] = self.columns["terminated"].astype(bool)
        self.finals = (log.finals or log.columns)["obs"].reshape(self.columns["obs"].shape).copy()
        self.lanes = workload.lanes
        self.batch = workload.batch
        self.steps = np.arange(n_step) * workload.lanes
        self.discounts = gamma ** np.arange(n_step + 1)

    def sample(self, rng: np.random.Generator) -> Columns:
        """A batch of random rows that have n successors."""
        last = len(self.columns["reward"]) - self.lanes * len(self.steps) - self.lanes
        return self.gather(rng.integers(0, last, self.batch))

    def gather(self, rows: NDArray[np.int64]) -> Columns:
        """The transitions of these rows."""
        columns = self.columns
        lane = rows[:, None] + self.steps
        ended = columns["terminated"][lane]
        alive = np.ones(ended.shape, bool)
        np.logical_not(np.logical_or.accumulate(ended[:, :-1], 1), out=alive[:, 1:])
        used = alive.sum(1)
        reward = (columns["reward"][lane] * alive * self.discounts[:-1]).sum(1).astype(np.float32)
        final = lane[np.arange(len(rows)), used - 1]
        terminated = columns["terminated"][final]
        following = np.where(
            terminated[:, None],
            self.finals[final],
            columns["obs"][np.minimum(final + self.lanes, len(self.finals) - 1)],
        )
        return {
            "obs": columns["obs"][rows],
            "action": columns["action"][rows],
            "reward": reward,
            "next_obs": following,
            "terminated": terminated,
            "discount": self.discounts[used].astype(np.float32),
        }


class PixelGather:
    """Random rows of a uint8 table and the rows after them, to float32 times 1/255, into reused buffers.

    Attributes:
        table: uint8 [rows, 4, 84, 84], private.
        index: int64 [batch], the rows of the last call; `obs` and `next_obs`: float32 [batch, 4, 84, 84].
    """

    scale = np.float32(1 / 255)

    def __init__(self, workload: Workload, table: NDArray[np.uint8], step: int) -> None:
        self.table = table
        self.batch = workload.batch
        self.step = step
        self.rng = np.random.default_rng()
        shape = (workload.batch, *table.shape[1:])
        self.index = np.zeros(workload.batch, np.int64)
        self.raw = np.full(shape, 0xA5, np.uint8)
        self.obs = np.full(shape, np.nan, np.float32)
        self.next_obs = np.full(shape, np.nan, np.float32)

    def draw(self) -> NDArray[np.int64]:
        """Fresh random rows that have a next row."""
        self.index = self.rng.integers(0, len(self.table) - self.step, self.batch)
        return self.index

    def with_numpy(self) -> None:
        """Takes (clip mode: the one that does not buffer) and multiplies, both with `out`."""
        index = self.draw()
        for rows, out in ((index, self.obs), (index + self.step, self.next_obs)):
            np.take(self.table, rows, axis=0, out=self.raw, mode="clip")
            np.multiply(self.raw, self.scale, out=out)

    def with_torch(self) -> Callable[[], None]:
        """A function that does it with index_select and mul, both with `out`."""
        import torch

        table, raw = torch.from_numpy(self.table), torch.from_numpy(self.raw)
        outs = (torch.from_numpy(self.obs), torch.from_numpy(self.next_obs))
        scale = float(self.scale)

        def run() -> None:
            index = torch.from_numpy(self.draw())
            for rows, out in zip((index, index + self.step), outs, strict=True):
                torch.index_select(table, 0, rows, out=raw)
                torch.mul(raw, scale, out=out)

        return run

    def check(self) -> None:
        """Compares the last result with float64 arithmetic."""
        for rows, out in ((self.index, self.obs), (self.index + self.step, self.next_obs)):
            want = self.table[rows].astype(np.float64) * (1 / 255)
            np.testing.assert_allclose(out, want, rtol=1e-6)
