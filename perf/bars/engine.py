"""The node engine: rows in, batches out, beside writers that never stop, and processes that come and go.

Every ratio is of two costs of the same run, methods interleaved round-robin. Writes and batches are held to CPU time of
this process (all its threads), attaching and starting to the wall clock. What Conduit delivers is compared with what was
written before a group is timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from perf import subjects
from perf.bars import Bar, at_least, at_most, unmeasured
from perf.baselines import PixelGather, PlainRing, cpprb_absent, cpprb_batches
from perf.measure import CLOCK_WORDS, Comparison, Method, Spread, compare, time_text
from perf.processes import broken_rows
from perf.rooflines import memcpy
from perf.workloads import CARTPOLE, FLAT_OUT, PIXELS, SLAB_28KB, SLAB_97B, STEP_97B, Workload, ticks

TITLE = "many processes write, a learner pulls batches"

TRANSITION = ("obs", "next_obs", "action", "reward", "terminated", "truncated")
"""What a learner reads from a batch; taken out of it in the timed part, in case tensors are made when they are asked for."""

ROOT = Path(__file__).resolve().parents[2]


def _times(result: Comparison) -> str:
    parts = ", ".join(f"{name} {time_text(result.cost(name))}" for name in result.costs)
    return f"{CLOCK_WORDS[result.clock]}: {parts}"


def _writes(workload: Workload, what: str, bars: dict[str, float], distinct: int, burst: int) -> Iterator[Bar]:
    """One method per kind of write and the plain ring, over the same `distinct` ticks."""
    rng = np.random.default_rng()
    compared = {kind: subjects.check_writes(workload, kind, rng) for kind in bars}
    data = subjects.rows_of(workload, ticks(workload, distinct, rng)) * (burst // distinct)
    with contextlib.ExitStack() as stack:
        plain = PlainRing(workload)
        write = plain.slab_loop() if workload.num_envs else plain.step_loop()
        methods = [Method("plain ring", lambda: write(data), units=burst)]
        for kind in bars:
            _, name = stack.enter_context(subjects.engine(workload))
            client = stack.enter_context(subjects.conduit.attach(name))
            writer = stack.enter_context(
                client.writer(
                    subjects.TABLE, num_envs=workload.num_envs, autoreset="next_step" if workload.num_envs else None
                )
            )
            loop = subjects.LOOPS[kind](writer, workload)
            for _ in range(-(-workload.rows // (burst * workload.lanes)) + 1):
                loop(data)
            methods.append(Method(kind, lambda loop=loop: loop(data), units=burst))
        result = compare(methods, clock="process", seconds=9.0, precision=0.005, least_rounds=60)
    for kind, factor in bars.items():
        speed = result.speed(kind, "plain ring")
        notes = (f"{compared[kind]} rows compared before; {_times(result)}",)
        yield at_least(f"{what}, {kind}", speed, factor, " of a plain ring", *notes)


def single_steps() -> Iterator[Bar]:
    """One step, 5 fields, 97 B, from Python."""
    yield from _writes(STEP_97B, "one step, 5 fields, 97 B", {"append": 0.6, "unchecked handle": 0.85}, 1024, 1024)


def small_slabs() -> Iterator[Bar]:
    """64 environments per call, small rows."""
    yield from _writes(SLAB_97B, "64 environments per call, 97 B", {"append": 0.6, "unchecked handle": 0.75}, 128, 256)


def pixel_slabs() -> Iterator[Bar]:
    """64 environments per call, 28 KB observations."""
    yield from _writes(SLAB_28KB, "64 environments per call, 28 KB", {"append": 0.8, "unchecked handle": 0.85}, 8, 8)


def cartpole_batches() -> Iterator[Bar]:
    """Learner-ready batch, 256 rows, CartPole fields, as torch tensors."""
    title, factor = "batch of 256, CartPole, torch tensors", 2.5
    absent = cpprb_absent()
    rng = np.random.default_rng()
    with subjects.engine(CARTPOLE) as (client, _), subjects.filler(client, CARTPOLE) as writer:
        log = subjects.fill(writer, CARTPOLE, rng, rows=CARTPOLE.rows * 7 // 8)
        with client.loader(subjects.TABLE, batch_size=CARTPOLE.batch, seed=0) as loader:
            compared = subjects.check_batches(loader, log, batches=20)
            held: list[Any] = [None]

            def conduit_batch() -> None:
                for _ in range(16):
                    batch = loader.next()
                    held[0] = [batch[name] for name in TRANSITION]

            methods = [Method("conduit", conduit_batch, units=16)]
            if absent is None:
                flat = {name: c.reshape(-1, *c.shape[2:]) for name, c in log.columns.items()}
                following = log.expected(flat["action"])["next_obs"]
                sample = cpprb_batches(CARTPOLE, flat, following)
                for got in (sample() for _ in range(20)):
                    want = log.expected(got["action"].numpy().ravel())
                    for theirs, ours in (("obs", "obs"), ("next_obs", "next_obs"), ("done", "terminated")):
                        np.testing.assert_array_equal(got[theirs].numpy().reshape(want[ours].shape), want[ours])

                def cpprb_batch() -> None:
                    for _ in range(16):
                        held[0] = sample()

                methods.append(Method("cpprb", cpprb_batch, units=16))
            result = compare(methods, clock="process", seconds=9.0, precision=0.005, least_rounds=100)
            held.clear()
    notes = (f"{compared} rows compared before", _times(result))
    if absent is not None:
        short = unmeasured(title, f">= {factor}x of cpprb 11", absent)
        yield Bar(short.name, short.measured, short.bar, ok=False, notes=notes)
        return
    yield at_least(title, result.speed("conduit", "cpprb"), factor, " of cpprb 11", *notes)


def pixel_batches() -> Iterator[Bar]:
    """Learner-ready batch, 256 rows, 4x84x84 uint8 obs and next_obs to float32 scaled."""
    import torch

    rng = np.random.default_rng()
    transform = {"obs": subjects.conduit.scale(1 / 255, dtype="float32")}
    with subjects.engine(PIXELS) as (client, _), subjects.filler(client, PIXELS) as writer:
        log = subjects.fill(writer, PIXELS, rng, rows=PIXELS.rows * 7 // 8)
        table = log.columns["obs"].reshape(-1, *PIXELS.parts[0].shape)
        with client.loader(subjects.TABLE, batch_size=PIXELS.batch, transform=transform, seed=0) as loader:
            compared = subjects.check_batches(loader, log, batches=4, scaled=1 / 255)
            by_numpy, by_torch = (PixelGather(PIXELS, table, PIXELS.lanes) for _ in range(2))
            torch_pass = by_torch.with_torch()
            for gather, once in ((by_numpy, by_numpy.with_numpy), (by_torch, torch_pass)):
                once()
                gather.check()
            held: list[Any] = [None]

            def conduit_batch() -> None:
                held[0] = loader.next()

            methods = [
                Method("conduit", conduit_batch),
                Method("numpy", by_numpy.with_numpy),
                Method("torch", torch_pass),
                memcpy(by_numpy.obs.nbytes * 2),
            ]
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                result = compare(methods, clock="process", seconds=15.0, precision=0.005, least_rounds=100)
            finally:
                torch.set_num_threads(threads)
            wall = compare([methods[0], methods[2]], clock="wall", seconds=4.0)
            held.clear()
    name = "batch of 256, 4x84x84 uint8 obs and next_obs to float32"
    notes = (f"{compared} rows compared before; torch with 1 thread", _times(result))
    yield at_least(name, result.speed("conduit", "numpy"), 1.8, " of numpy take+multiply", *notes)
    fastest = ", ".join(f"{n} {wall.cost(n).least / 1e6:.2f} ms" for n in wall.costs)
    beside = f"beside, wall time of the fastest rounds, torch with {threads} threads: {fastest}"
    yield at_least(name, result.speed("conduit", "torch"), 1.8, " of torch index_select+mul", beside)
    share = Spread.of(result.costs["conduit"] / result.costs["memcpy"])
    rate = by_numpy.obs.nbytes * 2 / result.cost("memcpy").median
    yield at_most(name, share, 1.2, " of a memcpy of the output", f"memcpy here: {rate:.1f} GB/s of output bytes")


class _Others:
    """Processes started by a group; killed with it. Each is `python -m perf.processes ROLE ENGINE ...`."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def start(self, role: str, engine: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "perf.processes", role, engine, *options]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.running.append(process)
        return process


def _hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise RuntimeError(f"{process.args} said nothing, exit status {process.wait()}; its stderr is above")
    heard: dict[str, Any] = json.loads(line)
    return heard


def flat_out() -> Iterator[Bar]:
    """2 writers flat out while the loader runs."""
    for envs in (None, 64):
        yield from _flat_out(envs)


def _flat_out(envs: int | None, seconds: float = 25.0, phase: float = 0.35) -> Iterator[Bar]:
    rng = np.random.default_rng()
    with subjects.engine(FLAT_OUT, num_envs=envs or 1) as (client, name), _Others() as others:
        writers = [
            others.start("flat-out", name, "--seed", str(seed), *(("--envs", str(envs)) if envs else ()))
            for seed in rng.integers(0, 1 << 30, 2)
        ]
        for writer in writers:
            _hear(writer)
        with client.loader(subjects.TABLE, batch_size=FLAT_OUT.batch, seed=0, min_rows=FLAT_OUT.batch) as loader:
            time.sleep(2.5)  # the table fills, so that writers evict from now on
            speeds: dict[str, list[float]] = {"quiet": [], "busy": []}
            drawn = redrawn = 0
            cap = time.perf_counter() + seconds
            while not _known(speeds, late=time.perf_counter() > cap):
                for state, order in (("quiet", signal.SIGSTOP), ("busy", signal.SIGCONT)):
                    for writer in writers:
                        os.kill(writer.pid, order)
                    time.sleep(0.02)
                    before = (loader.stats.rows, loader.stats.redrawn)
                    count, cpu = _drain(loader, phase)
                    speeds[state].append(count / cpu)
                    if state == "busy":
                        drawn += loader.stats.rows - before[0]
                        redrawn += loader.stats.redrawn - before[1]
            checked = broken = 0
            until = time.perf_counter() + 1.0
            while time.perf_counter() < until:
                batch = loader.next()
                broken += broken_rows(batch)
                checked += FLAT_OUT.batch
        for writer in writers:
            writer.send_signal(signal.SIGTERM)
        told = [_hear(writer) for writer in writers]
    rate = " and ".join(f"{t['rows'] / t['cpu_s'] / 1e6:.2f}" for t in told)
    what = f"2 writers flat out, {f'{envs} environments' if envs else '1 environment'} per call"
    share = redrawn / max(drawn, 1)
    notes = (
        f"writers: {rate} M rows per CPU second, {sum(t['rows'] for t in told) / 1e6:.1f} M rows in all, table {FLAT_OUT.rows} rows",
        f"{checked} rows read beside them and checked: {broken} torn or mixed",
    )
    ok = share < 0.001 and broken == 0 and drawn > 0
    yield Bar(f"{what}: rows redrawn", f"{share:.4%} ({redrawn} of {drawn})", "< 0.1 %", ok, notes)
    ratio = _busy_share(speeds)
    cost = f"quiet {1e6 / Spread.of(speeds['quiet']).median:.1f} us, busy {1e6 / Spread.of(speeds['busy']).median:.1f} us of CPU per batch"
    yield at_least(
        f"{what}: loader per core-second",
        ratio,
        0.8,
        " of its quiet speed",
        f"{cost}; CPU time of all threads of the process",
    )


def _busy_share(speeds: dict[str, list[float]]) -> Spread:
    return Spread.of(np.array(speeds["busy"]) / np.array(speeds["quiet"]))


def _known(speeds: dict[str, list[float]], *, late: bool) -> bool:
    """Whether there are rounds enough: the ratio within 1.5 %, or no time left."""
    count = len(speeds["busy"])
    return count >= 3 and (late or (count >= 14 and _busy_share(speeds).uncertainty < 0.015))


def _drain(loader: Any, seconds: float) -> tuple[int, float]:
    """Draws batches for `seconds` of wall time: how many, and the CPU seconds they took."""
    until = time.perf_counter() + seconds
    count = 0
    cpu = time.process_time()
    while time.perf_counter() < until:
        for _ in range(32):
            loader.next()
        count += 32
    return count, time.process_time() - cpu


def processes() -> Iterator[Bar]:
    """Attach to an existing engine."""
    held = {}
    for label, size in (("small", 1 << 12), ("large", 1 << 22)):
        with subjects.engine(FLAT_OUT.sized(size)) as (client, name), _Others() as others:
            with subjects.filler(client, FLAT_OUT) as writer:
                subjects.fill(writer, FLAT_OUT.sized(size), np.random.default_rng(), rows=2048)
            heard = _hear(others.start("attach-probe", name))
            held[label] = heard["held"]
            starts = [_cold_start(others, name) for _ in range(1 + 7)][1:] if label == "large" else []
    attach, ready = (Spread.of(np.array(heard[key], np.float64)) for key in ("attach_ns", "writer_ns"))
    yield Bar(
        "attach to an existing engine",
        time_text(attach),
        "< 20 ms",
        attach.median < 20e6,
        (f"wall time, imported, after a first attach; with a writer: {time_text(ready)}",),
    )
    wall = Spread.of([seconds * 1e9 for seconds, _ in starts])
    torch = any(said["torch"] for _, said in starts)
    cpu, peak = (Spread.of([said[key] for _, said in starts]) for key in ("cpu_s", "peak_mb"))
    yield Bar(
        "writer-only process, cold interpreter, warm cache: ready",
        time_text(wall) + (", torch imported" if torch else ", torch not imported"),
        "< 1 s, torch not imported",
        wall.median < 1e9 and not torch,
        (
            f"wall time of {wall.count} starts, fastest {wall.least / 1e9:.2f} s; CPU {cpu.median:.2f} s, peak RSS {peak.median:.0f} MB",
        ),
    )
    small, large = held["small"], held["large"]
    same = all(small[key] == large[key] for key in ("fds", "shared_maps"))
    yield Bar(
        "descriptors and mappings of a client, its writer and its loader",
        f"{large['fds']} fds, {large['shared_maps']} shared mappings",
        "the same for 2^12 and 2^22 rows",
        same,
        (f"2^12 rows: {small}; 2^22 rows: {large} (maps: all lines of /proc/self/maps, the allocator's too)",),
    )


def _cold_start(others: _Others, name: str) -> tuple[float, dict[str, Any]]:
    start = time.perf_counter()
    process = others.start("cold-writer", name)
    said = _hear(process)
    seconds = time.perf_counter() - start
    process.wait()
    return seconds, said


GROUPS = (single_steps, small_slabs, pixel_slabs, cartpole_batches, pixel_batches, flat_out, processes)
