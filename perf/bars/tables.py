"""Tables: queues, limits, checkpoints, offline data."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import conduit
from conduit import offline
from perf import checkpoints, subjects
from perf.bars import Bar
from perf.bars.engine import _hear, _Others
from perf.measure import Method, Spread, compare, time_text
from perf.workloads import ATARI, CARTPOLE, Workload, ticks

TITLE = "queues, limits, checkpoints, offline data"

TICKS, ENVS = 128, 64
_ROUNDS = 5
FIELDS = ("obs", "action", "reward", "terminated", "truncated")


def hand_over_times(rollouts: int = 220) -> tuple[dict[str, list[int]], int, int]:
    """Hands a 128 x 64 rollout over, from before the last commit in a writer's process to torch tensors in the learner's.

    Args:
        rollouts: Of each way; the first 20 are not counted.

    Returns:
        Nanoseconds of each hand-over where the learner slept, and where it polled; tensors that lie where the writer wrote, of how
        many.
    """
    workload = CARTPOLE.sized(8 * TICKS * ENVS)
    times: dict[str, list[int]] = {"slept": [], "polled": []}
    lying = 0
    checked = 0
    with contextlib.ExitStack() as stack:
        client, name = stack.enter_context(subjects.engine(workload, kind="queue", rollout_length=TICKS))
        others = stack.enter_context(_Others())
        writer = others.start("queue-writer", name, "--envs", str(ENVS), "--repeats", str(2 * rollouts))
        _hear(writer)
        consumer = stack.enter_context(client.consumer(subjects.TABLE, timeout=20.0))
        # on one core a writer that goes on writing would hold up the learner that it has woken
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        view = client._views[subjects.TABLE]
        for count in range(2 * rollouts):
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
    return times, lying, checked


def hand_over() -> Iterator[Bar]:
    """Queue hand-over of a 128 x 64 rollout, from the last commit in a writer's process to torch tensors in the learner's."""
    times, lying, checked = hand_over_times()
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
                with conduit.Engine.create(name, {subjects.TABLE: table}) as engine:
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


def limiter_on_a_draw() -> Iterator[Bar]:
    """What a limiter costs a draw: the same loader on the same rows, with and without, while rows come and are evicted."""
    rng = np.random.default_rng()
    wide = conduit.SampleToInsertRatio(1.0, 1000, 1e15)
    with contextlib.ExitStack() as stack:
        methods = []
        for name, limiter in (("without", None), ("with", wide)):
            client, _ = stack.enter_context(subjects.engine(CARTPOLE, limiter=limiter))
            writer = stack.enter_context(subjects.filler(client, CARTPOLE))
            subjects.fill(writer, CARTPOLE, rng, rows=CARTPOLE.rows + 64)
            loader = stack.enter_context(client.loader(subjects.TABLE, batch_size=CARTPOLE.batch, seed=0))

            def batches(loader: Any = loader) -> None:
                for _ in range(64):
                    loader.next()

            def more(writer: Any = writer) -> None:
                subjects.fill(writer, CARTPOLE, rng, rows=1024)

            methods.append(Method(name, batches, more, units=64))
        result = compare(methods, clock="thread", seconds=6.0, precision=0.002, least_rounds=60)
        counts = client.table(subjects.TABLE).limiter.counts
    assert counts.sampled >= 60 * 64 * CARTPOLE.batch
    difference = Spread.of(result.costs["with"] - result.costs["without"])
    note = f"CPU time of a batch of {CARTPOLE.batch}: {time_text(result.cost('without'))} without, {time_text(result.cost('with'))} with"
    yield Bar(
        "limiter on the path of a draw", time_text(difference), "< 2 us a batch", difference.median < 2000, (note,)
    )


def _check_import(engine: Any, flat: Mapping[str, Any], ended: Any, finals: Any) -> None:
    """Hold what was imported to what was exported, row by row."""
    done = kept = 0
    for steps in engine.table(subjects.TABLE).scan():
        here = slice(done, done + len(steps))
        for name, values in (*steps.columns.items(), ("terminated", steps.terminated)):
            np.testing.assert_array_equal(values, flat[name][here])
        np.testing.assert_array_equal(steps.places + done, ended[kept : kept + len(steps.places)])
        np.testing.assert_array_equal(steps.finals["obs"], finals[kept : kept + len(steps.places)])
        done, kept = done + len(steps), kept + len(steps.places)
    assert (done, kept) == (len(flat["terminated"]), len(ended))


def checkpoint(size: int = 4 << 30) -> Iterator[Bar]:
    """Checkpoint of 4 GiB, writers' pauses beside it, and restore."""
    envs = 16
    frames = Workload("84x84", ATARI.parts, rows=size // sum(part.row_bytes for part in ATARI.parts))
    table = conduit.Table(subjects.schema(frames), capacity=frames.rows, num_envs=envs)
    name = f"perf-{os.getpid()}-checkpoint"
    with tempfile.TemporaryDirectory(prefix="conduit-perf-", dir=os.environ.get("CONDUIT_PERF_DISK")) as folder:
        path = Path(folder)
        with conduit.Engine.create(name, {subjects.TABLE: table}) as engine:
            _fill(engine, frames.rows // envs, envs)
            made, plain = [], []
            for _ in range(_ROUNDS):
                plain.append(checkpoints.plain_write(path / "plain", size, direct=True))
                started = time.perf_counter()
                where = engine.checkpoint(path)
                made.append(time.perf_counter() - started)
                shutil.rmtree(where)
            cached = checkpoints.plain_write(path / "plain", size // 8, direct=False) * 8
            pauses = _pauses(engine, name, path, envs)
            where = engine.checkpoint(path, keep=1)
        del engine  # its memory lives as long as it does
        files = [one for one in where.rglob("*.npy") if one.stat().st_size > checkpoints.BLOCK]
        stored = sum(one.stat().st_size for one in where.rglob("*.npy"))
        rates = Spread.of(np.array([stored / one for one in made]) / (size / np.array(plain)))
        yield Bar(
            f"checkpoint of {stored / 2**30:.1f} GiB",
            f"{rates.median:.2f}x (IQR {rates.q25:.2f}-{rates.q75:.2f}) of plain writes ({stored / min(made) / 1e9:.2f} GB/s)",
            ">= 0.7x",
            rates.median >= 0.7,
            (
                f"best of {_ROUNDS} of dd bs=16M conv=fsync oflag=direct, in turns: {size / min(plain) / 1e9:.2f} GB/s; through the page "
                f"cache (no oflag=direct): {size / cached / 1e9:.2f} GB/s. Each with fsync; what is removed afterwards is not counted",
            ),
        )
        yield from pauses
        restored, read = [], []
        for _ in range(_ROUNDS):
            read.append(checkpoints.plain_read(files, direct=True))
            checkpoints.forget(files)
            checkpoints.warm_memory(stored)
            restored.append(_restore(where))
        cached = checkpoints.plain_read(files, direct=False)
        speed = Spread.of(np.array(read) / np.array(restored))
        yield Bar(
            "restore of it",
            f"{speed.median:.2f}x (IQR {speed.q25:.2f}-{speed.q75:.2f}) of plain reads ({stored / min(restored) / 1e9:.2f} GB/s)",
            ">= 0.7x",
            speed.median >= 0.7,
            (
                "the files are dropped from the page cache first (posix_fadvise DONTNEED). Plain reads go into one buffer of "
                f"16 MiB, in turns, best of {_ROUNDS}: {stored / min(read) / 1e9:.2f} GB/s past the cache, {stored / cached / 1e9:.2f} "
                "GB/s through it; a restore also allocates the memory, and compares digests. As much shared memory is written and freed "
                "before each restore: a virtual machine whose host has taken free memory back waits for it otherwise",
            ),
        )


def _fill(engine: Any, count: int, envs: int) -> None:
    """Append `count` ticks of random frames."""
    images = np.random.default_rng().integers(0, 256, (8, envs, 84, 84), np.uint8)
    with engine.writer(subjects.TABLE, num_envs=envs, autoreset="next_step") as writer:
        for tick in range(count):
            writer.append(
                obs=images[tick % 8],
                action=np.full(envs, tick),
                reward=np.zeros(envs, np.float32),
                terminated=np.zeros(envs, bool),
            )


def _restore(where: Path) -> float:
    """Seconds that a restore takes; its memory is free again afterwards."""
    started = time.perf_counter()
    with conduit.Engine.restore(where):
        return time.perf_counter() - started


def _pauses(engine: Any, name: str, path: Path, envs: int) -> list[Bar]:
    """Longest time between two commits of a flat-out writer, without a checkpoint and beside one."""
    command = [sys.executable, "-m", "perf.checkpoints", name, str(envs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:

        def longest() -> tuple[float, float]:
            writer.stdin.write("\n")
            writer.stdin.flush()
            told = json.loads(writer.stdout.readline())
            return told["longest_ns"] / 1e6, told["held_ns"] / 1e6

        longest()
        beside, alone, left_out = [], [], 0
        for _ in range(5):
            longest()
            started = time.perf_counter()
            where = engine.checkpoint(path, keep=1)
            took = time.perf_counter() - started
            beside.append(longest())
            left_out += json.loads((where / "manifest.json").read_text())["manifest"]["tables"][subjects.TABLE][
                "pages_left_out"
            ]
            time.sleep(took)
            alone.append(longest())
        writer.stdin.close()
        writer.wait(30)
    (wall, held), (wall_alone, held_alone) = np.median(beside, 0), np.median(alone, 0)
    return [
        Bar(
            "longest pause of a writer beside it, less waiting for a core",
            f"{held:.1f} ms ({held_alone:.1f} ms without a checkpoint)",
            "< 20 ms",
            bool(held < 20.0),
            (
                f"a flat-out writer, {envs} frames a tick, medians of 5 stretches as long as a checkpoint; with what it waited for a "
                f"core (/proc/thread-self/schedstat): {wall:.1f} ms beside one, {wall_alone:.1f} ms without, load "
                f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; pages overwritten before they could be copied: {left_out} in all",
            ),
        )
    ]


GROUPS = (hand_over, limiter_on_a_draw, checkpoint, offline_import)
"""One function for each row of the issue's table."""
