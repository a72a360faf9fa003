"""Tables: queues, limits, checkpoints, offline data."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from conduit import offline
from perf import subjects
from perf.bars import Bar
from perf.bars.engine import _hear, _Others
from perf.measure import Spread, time_text
from perf.workloads import CARTPOLE, Workload, ticks

TITLE = "queues, limits, checkpoints, offline data"

TICKS, ENVS = 128, 64
FIELDS = ("obs", "action", "reward", "terminated", "truncated")


def hand_over() -> Iterator[Bar]:
    """Queue hand-over of a 128 x 64 rollout, from the last commit in a writer's process to torch tensors in the learner's."""
    workload = CARTPOLE.sized(8 * TICKS * ENVS)
    times: dict[str, list[int]] = {"slept": [], "polled": []}
    lying = 0
    checked = 0
    with contextlib.ExitStack() as stack:
        client, name = stack.enter_context(subjects.engine(workload, kind="queue", rollout_length=TICKS))
        others = stack.enter_context(_Others())
        writer = others.start("queue-writer", name, "--envs", str(ENVS), "--repeats", str(2 * 220))
        _hear(writer)
        consumer = stack.enter_context(client.consumer(subjects.TABLE, timeout=20.0))
        # on one core a writer that goes on writing would hold up the learner that it has woken
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        view = client._views[subjects.TABLE]
        for count in range(2 * 220):
            way = "polled" if count % 2 else "slept"
            if way == "slept":
                claim = consumer.next()
            else:
                while (claim := consumer.poll()) is None:
                    pass
            tensors = [claim[field] for field in FIELDS]
            now = time.monotonic_ns()
            # the last tick carries the moment at which its writer began to append it
            action = tensors[1].numpy()
            if count >= 40:
                times[way].append(now - int(action[-1, 0]))
            start = claim._row
            for field, tensor in zip(FIELDS, tensors, strict=True):
                column = view.columns[field] if field in view.columns else getattr(view, field)
                lying += tensor.data_ptr() == column.ctypes.data + start * column.strides[0]
                checked += 1
            broken = _broken(tensors, count)
            if broken:
                raise AssertionError(f"{broken} rows of rollout {count} are not what was written")
            claim.ack()
            del claim, tensors, tensor, action
    yield Bar(
        "hand-over of a 128 x 64 rollout: tensors that lie where the writer wrote",
        f"{lying} of {checked}",
        "all: no byte copied",
        lying == checked,
        ("by address of each field's tensor; its values compared as well",),
    )
    for way, most in (("slept", 150e3), ("polled", 30e3)):
        spread = Spread.of(np.array(times[way], np.float64))
        p95 = float(np.percentile(times[way], 95)) / 1e3
        note = (
            f"wall time across two processes on two cores, {spread.count} rollouts: from before the last append to torch tensors of "
            f"{len(FIELDS)} fields; fastest {spread.least / 1e3:.1f} us, p95 {p95:.0f} us"
        )
        yield Bar(
            f"the same, p50 from the last commit, learner {way}",
            time_text(spread),
            f"< {most / 1e3:g} us",
            spread.median < most,
            (note,),
        )


def _broken(tensors: list[Any], rollout: int) -> int:
    obs, action, reward = (tensor.numpy() for tensor in tensors[:3])
    numbers = rollout * TICKS + np.arange(TICKS)
    wrong = (obs[..., 0] != numbers[:, None]) | (obs[..., 1] != np.arange(ENVS)) | (reward != -numbers[:, None])
    wrong[:-1] |= action[:-1] != numbers[:-1, None]
    return int(wrong.sum())


def offline_import(rows: int = 1_000_000, rounds: int = 7) -> Iterator[Bar]:
    """Import of CartPole rows from Parquet and from npz."""
    rng = np.random.default_rng()
    columns = ticks(Workload("one environment", CARTPOLE.parts, rows), rows, rng, ends=1 / 20)
    flat = {name: column[:, 0] for name, column in columns.items()}
    ended = np.flatnonzero(flat["terminated"])
    finals = rng.standard_normal((len(ended), 4), np.float32)
    wall: dict[str, list[float]] = {"parquet": [], "npz": []}
    cpu: dict[str, list[float]] = {"parquet": [], "npz": []}
    with tempfile.TemporaryDirectory() as folder:
        with subjects.engine(Workload("source", CARTPOLE.parts, rows + len(ended) + (1 << 16))) as (client, _):
            with client.writer(subjects.TABLE) as writer:
                fields = {part.name: flat[part.name] for part in CARTPOLE.parts}
                writer.extend(fields, terminated=flat["terminated"], places=ended, finals=finals)
            for kind in wall:
                offline.save(client, subjects.TABLE, f"{folder}/{kind}", format=kind)
        # every file is read once before it is timed: what is measured is the import, not the disk
        for turn in range(rounds + 1):
            for kind, times in wall.items():
                table = offline.table_for(f"{folder}/{kind}")
                name = f"perf-import-{os.getpid()}"
                with subjects.conduit.Engine.create(name, {subjects.TABLE: table}) as engine:
                    begun, spent = time.perf_counter(), time.process_time()
                    offline.load(engine, subjects.TABLE, f"{folder}/{kind}")
                    if turn:
                        cpu[kind].append((time.process_time() - spent) / rows * 1e9)
                        times.append((time.perf_counter() - begun) / rows * 1e9)
                    else:
                        _check_import(engine, flat, ended, finals)
    for kind, label in (("parquet", "Parquet"), ("npz", "npz")):
        spread = Spread.of(np.array(wall[kind]))
        note = (
            f"wall time of `load` into a fresh table, files in the page cache, {rounds} rounds, {time_text(spread)} a row; CPU "
            f"time {time_text(Spread.of(np.array(cpu[kind])))} a row; {len(ended)} episodes; every row compared before"
        )
        speed = 1e9 / spread.median
        yield Bar(
            f"{label} import of {rows:,} CartPole rows",
            f"{speed / 1e6:.1f} M rows/s",
            ">= 1 M rows/s",
            speed >= 1e6,
            (note,),
        )


def _check_import(engine: Any, flat: Mapping[str, Any], ended: Any, finals: Any) -> None:
    """Hold what was imported to what was exported, row by row."""
    done = kept = 0
    for steps in engine.scan(subjects.TABLE):
        here = slice(done, done + len(steps))
        for name, values in (*steps.columns.items(), ("terminated", steps.terminated)):
            np.testing.assert_array_equal(values, flat[name][here])
        np.testing.assert_array_equal(steps.places + done, ended[kept : kept + len(steps.places)])
        np.testing.assert_array_equal(steps.finals["obs"], finals[kept : kept + len(steps.places)])
        done, kept = done + len(steps), kept + len(steps.places)
    assert (done, kept) == (len(flat["terminated"]), len(ended))


GROUPS = (hand_over, offline_import)
"""One function for each row of the issue's table."""
