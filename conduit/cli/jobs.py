"""The jobs of `conduit bench`: the same work done by Conduit and by a plain numpy ring; results are compared before timing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import conduit

Array = np.ndarray[Any, Any]
Burst = Callable[[], object]
_TABLE = "bench"


@dataclass(frozen=True, slots=True)
class Job:
    """Two ways of the same work.

    Attributes:
        name: Shown.
        rows: Rows of one call of either.
        ours, plain: The work; each call does it once.
        expected: Least ratio on a machine that is well.
    """

    name: str
    rows: int
    ours: Burst
    plain: Burst
    expected: float


class _Ring:
    """A private numpy ring: no checks, no other process, the next observation stored beside the observation."""

    def __init__(self, rows: int, columns: dict[str, Array]) -> None:
        self.columns = {name: np.full((rows, *one.shape[1:]), 1, one.dtype) for name, one in columns.items()}
        self.rows = rows
        self.at = 0

    def fill(self, columns: dict[str, Array]) -> None:
        for name, column in columns.items():
            self.columns[name][: len(column)] = column


def _columns(rows: int, shape: tuple[int, ...], dtype: str) -> dict[str, Array]:
    """Random rows whose action is their number."""
    rng = np.random.default_rng()
    values = (
        rng.integers(0, 256, (rows, *shape), np.uint8) if dtype == "uint8" else rng.random((rows, *shape), np.float32)
    )
    return {"obs": values, "action": np.arange(rows), "reward": rng.random(rows, np.float32)}


def _engine(
    stack: contextlib.ExitStack, rows: int, shape: tuple[int, ...], dtype: str, **options: Any
) -> conduit.Engine:
    schema = conduit.Schema(
        [
            conduit.Field("obs", dtype, shape, observation=True),
            conduit.Field("action", "int64"),
            conduit.Field("reward", "float32"),
        ]
    )
    table = conduit.Table.replay(schema, capacity=rows, **options)
    name = f"bench-{os.getpid()}-{time.monotonic_ns()}"
    return stack.enter_context(conduit.Engine.create(name, {_TABLE: table}))


def _steps(stack: contextlib.ExitStack) -> Job:
    data = _columns(1024, (21,), "float32")
    rows = list(zip(list(data["obs"]), data["action"].tolist(), data["reward"].tolist(), strict=True))
    engine = _engine(stack, 1 << 16, (21,), "float32")
    writer = stack.enter_context(engine.writer(_TABLE))
    ring = _Ring(1 << 16, data | {"terminated": np.zeros(1, bool)})
    append = writer.append
    obs, action, reward, terminated = ring.columns.values()

    def ours() -> None:
        for o, a, r in rows:
            append(obs=o, action=a, reward=r, terminated=False)

    def plain() -> None:
        i = ring.at
        for o, a, r in rows:
            obs[i] = o
            action[i] = a
            reward[i] = r
            terminated[i] = False
            i += 1
        ring.at = i if i < ring.rows else 0

    return Job("write, one step a call", len(rows), ours, plain, 0.45)


def _slabs(stack: contextlib.ExitStack) -> Job:
    envs, ticks = 64, 64
    data = _columns(envs * ticks, (21,), "float32")
    shaped = {name: column.reshape(ticks, envs, *column.shape[1:]) for name, column in data.items()}
    rows = list(zip(*shaped.values(), strict=True))
    engine = _engine(stack, 1 << 17, (21,), "float32", num_envs=envs)
    writer = stack.enter_context(engine.writer(_TABLE, num_envs=envs, autoreset="next_step"))
    ring = _Ring(1 << 17, data | {"terminated": np.zeros(1, bool)})
    append, ended = writer.append, np.zeros(envs, bool)
    obs, action, reward, terminated = ring.columns.values()

    def ours() -> None:
        for o, a, r in rows:
            append(obs=o, action=a, reward=r, terminated=ended)

    def plain() -> None:
        i = ring.at
        for o, a, r in rows:
            j = i + envs
            obs[i:j] = o
            action[i:j] = a
            reward[i:j] = r
            terminated[i:j] = ended
            i = j
        ring.at = i if i < ring.rows else 0

    return Job("write, 64 environments a call", envs * ticks, ours, plain, 0.5)


def _reading(
    stack: contextlib.ExitStack, rows: int, shape: tuple[int, ...], dtype: str, size: int, **loader: Any
) -> tuple[conduit.Loader, _Ring]:
    """A table and a ring with the same rows, and a loader whose batches were compared with them."""
    envs = 16
    data = _columns(rows, shape, dtype)
    options = {"priorities": conduit.Priorities(alpha=0.6)} if "sampling" in loader else {}
    engine = _engine(stack, rows, shape, dtype, num_envs=envs, **options)
    writer = stack.enter_context(engine.writer(_TABLE, num_envs=envs, autoreset="next_step"))
    for start in range(0, rows - rows // 8, envs):
        writer.append(**{name: column[start : start + envs] for name, column in data.items()})
    following = np.concatenate([data["obs"][envs:], data["obs"][:envs]])
    ring = _Ring(rows, data)
    ring.fill(data)
    ring.columns["next_obs"] = following
    batches = stack.enter_context(engine.loader(_TABLE, batch_size=size, seed=0, format="numpy", **loader))
    factor = 1 / 255 if dtype == "uint8" else 1.0
    for _ in range(4):
        batch = batches.next()
        for name in ("obs", "reward", "next_obs"):
            np.testing.assert_allclose(
                batch[name],
                ring.columns[name][batch["action"]] * (1.0 if name == "reward" else factor),
                rtol=1e-6,
                err_msg=f"{name} is not what was written",
            )
    return batches, ring


def _taker(ring: _Ring, rows: int, size: int) -> Callable[[], dict[str, Array]]:
    rng = np.random.default_rng()
    outs = {name: np.empty((size, *column.shape[1:]), column.dtype) for name, column in ring.columns.items()}

    def take() -> dict[str, Array]:
        index = rng.integers(0, rows, size)
        for name, column in ring.columns.items():
            np.take(column, index, axis=0, out=outs[name], mode="clip")
        return outs

    return take


def _small(stack: contextlib.ExitStack) -> Job:
    rows, size = 1 << 17, 256
    loader, ring = _reading(stack, rows, (21,), "float32", size)
    return Job("batch of 256, 97-byte rows", size, loader.next, _taker(ring, rows, size), 0.6)


def _pixels(stack: contextlib.ExitStack) -> Job:
    rows, size = 1 << 11, 128
    transform = {"obs": conduit.scale(1 / 255, dtype="float32")}
    loader, ring = _reading(stack, rows, (4, 84, 84), "uint8", size, transform=transform)
    take = _taker(ring, rows, size)
    floats = [np.empty((size, 4, 84, 84), np.float32) for _ in range(2)]

    def plain() -> None:
        outs = take()
        for name, wide in zip(("obs", "next_obs"), floats, strict=True):
            np.multiply(outs[name], np.float32(1 / 255), out=wide)

    return Job("batch of 128, 4x84x84 bytes to float32", size, loader.next, plain, 1.5)


def _priorities(stack: contextlib.ExitStack) -> Job:
    rows, size = 1 << 17, 256
    loader, ring = _reading(stack, rows, (21,), "float32", size, sampling=conduit.Prioritized())
    take, rng = _taker(ring, rows, size), np.random.default_rng()
    leaves = np.ones(rows)
    errors = rng.random(size)

    def ours() -> None:
        batch = loader.next()
        loader.update_priorities(batch.ids, errors)

    def plain() -> None:
        sums = np.cumsum(leaves)
        index = np.searchsorted(sums, rng.random(size) * sums[-1])
        take()
        leaves[index] = errors**0.6

    return Job("prioritized batch of 256, with update", size, ours, plain, 2.0)


JOBS: tuple[Callable[[contextlib.ExitStack], Job], ...] = (_steps, _slabs, _small, _pixels, _priorities)
"""Each makes its engine and ring, which live as long as the stack."""
