"""Conduit doing the work of each workload, and the check that it delivers the rows that were written."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import conduit
from perf.baselines import Row
from perf.workloads import Columns, Log, Workload, ticks

_numbers = itertools.count()

TABLE = "replay"
SMALL = 1 << 12
"""Rows of the tables that only check."""


def schema(workload: Workload) -> conduit.Schema:
    """The workload's fields as a schema."""
    return conduit.Schema(
        [conduit.Field(p.name, p.dtype, p.shape, observation=p.observation) for p in workload.parts],
    )


@contextlib.contextmanager
def engine(workload: Workload, **table: Any) -> Iterator[tuple[Any, str]]:
    """An engine of a name of its own with one table of the workload's capacity; closed at the end.

    The page size is the default one for `lanes` environments per writer, but for tables so small that a page would not
    hold a few ticks.

    Yields:
        The engine and its name.
    """
    name = f"perf-{os.getpid()}-{next(_numbers)}"
    if workload.rows <= SMALL:
        table.setdefault("page_rows", max(8 * workload.lanes, 64))
    table.setdefault("num_envs", workload.lanes)
    tables = {TABLE: conduit.Table(schema(workload), capacity=workload.rows, **table)}
    with conduit.Engine.create(name, tables=tables) as made:
        yield made, name


def append_loop(writer: Any, workload: Workload) -> Callable[[Sequence[Row]], None]:
    """A function that writes rows (or ticks) with `append`: every check it makes, keyword arguments as users write them."""
    append = writer.append
    if len(workload.parts) == 4:

        def write(data: Sequence[Row]) -> None:
            for o, g, a, r, d in data:
                append(obs=o, goal=g, action=a, reward=r, terminated=d)

        return write

    def write_four(data: Sequence[Row]) -> None:
        for o, a, r, d in data:
            append(obs=o, action=a, reward=r, terminated=d)

    return write_four


def unchecked_loop(writer: Any, workload: Workload) -> Callable[[Sequence[Row]], None]:
    """A function that writes rows (or ticks) through the unchecked handle: the same assignments as the ring's, then commit."""
    handle = writer.unchecked()
    commit = handle.commit
    obs, action, reward, terminated = handle.obs, handle.action, handle.reward, handle.terminated
    lanes = workload.lanes
    if workload.num_envs is None:
        goal = handle.goal

        def write_single(data: Sequence[Row]) -> None:
            i = handle.row
            for o, g, a, r, d in data:
                obs[i] = o
                goal[i] = g
                action[i] = a
                reward[i] = r
                terminated[i] = d
                i = commit()

        return write_single
    if len(workload.parts) == 4:
        goal = handle.goal

        def write(data: Sequence[Row]) -> None:
            i = handle.row
            for o, g, a, r, d in data:
                j = i + lanes
                obs[i:j] = o
                goal[i:j] = g
                action[i:j] = a
                reward[i:j] = r
                terminated[i:j] = d
                i = commit()

        return write

    def write_four(data: Sequence[Row]) -> None:
        i = handle.row
        for o, a, r, d in data:
            j = i + lanes
            obs[i:j] = o
            action[i:j] = a
            reward[i:j] = r
            terminated[i:j] = d
            i = commit()

    return write_four


LOOPS: Mapping[str, Callable[[Any, Workload], Callable[[Sequence[Row]], None]]] = {
    "append": append_loop,
    "unchecked handle": unchecked_loop,
}


def rows_of(workload: Workload, columns: Columns) -> list[Row]:
    """Ticks as the tuples that the loops take: arrays [lanes, *shape], or for one environment arrays and Python scalars."""
    names = [*(part.name for part in workload.parts), "terminated"]
    if workload.num_envs is not None:
        return [tuple(columns[name][t] for name in names) for t in range(len(columns["action"]))]
    lists = [list(columns[n][:, 0]) if columns[n].ndim > 2 else columns[n][:, 0].tolist() for n in names]
    return list(zip(*lists, strict=True))


def filler(client: Any, workload: Workload) -> Any:
    """A writer that takes final observations in the step that ends an episode, as `fill` hands them over."""
    return client.writer(TABLE, num_envs=workload.num_envs, autoreset="same_step")


def fill(writer: Any, workload: Workload, rng: np.random.Generator, *, rows: int, ends: float = 0.02) -> Log:
    """Writes `rows` rows with `append`, with episodes that end and their final observations.

    Args:
        writer: Of one environment, or of many with autoreset "same_step".
        workload: One observation field.
        rng: Where data come from.
        rows: How many rows.
        ends: Chance that a row ends its episode.

    Returns:
        What was written.
    """
    observations = [part for part in workload.parts if part.observation]
    pieces: list[Columns] = []
    finals: list[Columns] = []
    left, at = rows // workload.lanes, 0
    while left:
        count = min(left, 256)
        columns = ticks(workload, count, rng, first=at, ends=ends)
        final = ticks(workload, count, rng)
        for row, tick in zip(rows_of(workload, columns), range(count), strict=True):
            named = dict(zip((*(p.name for p in workload.parts), "terminated"), row, strict=True))
            ended = columns["terminated"][tick].any()
            after = final[observations[0].name][tick]
            writer.append(**named, final=(after if workload.num_envs else after[0]) if ended else None)
        pieces.append(columns)
        finals.append({part.name: final[part.name] for part in observations})
        at += count
        left -= count
    join = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    return Log(workload, join, {name: np.concatenate([piece[name] for piece in finals]) for name in finals[0]})


def as_numpy(value: Any) -> NDArray[np.generic]:
    """A batch's tensor (torch or numpy) as an array on the same memory."""
    return np.asarray(value)


def check_batches(loader: Any, log: Log, *, batches: int, buffers: int = 3, scaled: float | None = None) -> int:
    """Holds a loader to what was written, after poisoning each of its buffers.

    Args:
        loader: Yields batches of `log`'s workload.
        log: What was written.
        batches: How many to compare.
        buffers: The loader's number of output buffers: all are poisoned first.
        scaled: Factor that observations were multiplied with, or None for a plain copy.

    Returns:
        Rows compared.

    Raises:
        AssertionError: A delivered row is not the row that was written.
    """
    for _ in range(buffers):
        batch = loader.next()
        for name in batch:
            as_numpy(batch[name]).view(np.uint8).fill(0xA5)
        batch.release()
    compared = 0
    observed = {part.name for part in log.workload.parts if part.observation}
    observed |= {"next_" + name for name in observed}
    for _ in range(batches):
        batch = loader.next()
        want = log.expected(as_numpy(batch["action"]).astype(np.int64))
        last = log.columns["action"][-1].min()
        for name, expected in want.items():
            got = as_numpy(batch[name])
            known = slice(None)
            if name.startswith("next_"):
                known = (as_numpy(batch["action"]) < last) | want["terminated"].astype(bool)
                if log.finals is None:
                    known &= ~want["terminated"].astype(bool)
            if scaled is not None and name in observed:
                np.testing.assert_allclose(got[known], expected[known] * np.float64(scaled), rtol=1e-6)
            else:
                np.testing.assert_array_equal(got[known], expected[known], err_msg=name)
        compared += len(want["terminated"])
        del got
        batch.release()
    return compared


def check_writes(workload: Workload, kind: str, rng: np.random.Generator) -> int:
    """Writes distinct rows through one kind of loop into an engine of its own and compares what a loader delivers.

    Returns:
        Rows compared.
    """
    small = workload.sized(SMALL)
    with engine(small) as (client, _):
        columns = ticks(small, max(2048 // small.lanes, 8), rng)
        with client.writer(TABLE, num_envs=small.num_envs, autoreset="next_step" if small.num_envs else None) as writer:
            LOOPS[kind](writer, small)(rows_of(small, columns))
            with client.loader(TABLE, batch_size=small.batch, seed=1, format="numpy") as loader:
                return check_batches(loader, Log(small, columns), batches=4)
