"""Interrupts: an exception between any two bytecodes, and forms of writing whose commit fails or that are dropped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import conduit
from conduit.errors import Closed, Frozen
from conduit.testing.interrupted.scenario import SCHEMA, check_rows, values
from conduit.testing.interrupting import Sweep, sweep
from conduit.testing.interruptions import SCENARIOS
from perf.bars import Bar

_EVERY = {"Attach": 5, "Create": 5, "Checkpoint": 25}
"""Most points of these lie in reading a specification, and in copying files."""

_OPENING = """
import signal, sys
import numpy as np
import conduit
schema = conduit.Schema.from_example({"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0})
engine = conduit.Engine.create(sys.argv[1], {"t": conduit.Table(schema, capacity=1000)})
engine.writer("t").close()
caught = 0
while True:
    try:
        print("ready", flush=True)
        while caught < 300:
            try:
                engine.writer("t").close()
            except KeyboardInterrupt:
                caught += 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        break
    except KeyboardInterrupt:
        caught += 1
engine.close()
print("done", flush=True)
"""
_PATIENCE = 120.0


def _opens(name: str) -> bool:
    """Whether a process opens and closes writers under 300 interrupts and ends well."""
    with subprocess.Popen(
        [sys.executable, "-c", _OPENING, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ends = time.monotonic() + _PATIENCE
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(random.uniform(0.001, 0.004))
            process.send_signal(signal.SIGINT)
        process.kill()
        return process.wait() == 0 and process.stdout.read().endswith("done\n")


def _opened() -> Iterator[Bar]:
    """B1 writers opened under interrupts."""
    died = sum(not _opens(f"bars-{os.getpid()}-{run}") for run in range(3))
    yield Bar("B1 processes that open writers under 300 interrupts and die", f"{died} of 3", "0 of 3", ok=died == 0)


def _swept(name: str) -> Sweep:
    scenario = SCENARIOS[name](f"bars-{os.getpid()}-{name}")
    try:
        return sweep(scenario.operate, scenario.check, every=_EVERY.get(name, 1))
    finally:
        scenario.close()


def _points() -> Iterator[Bar]:
    """B2 interrupt sweep."""
    found = {name: _swept(name) for name in SCENARIOS}
    points, bad = sum(one.points for one in found.values()), sum(len(one.bad) for one in found.values())
    yield Bar(
        "B2 interrupt sweep: bad points of all",
        f"{bad} of {points:,}",
        f"0 of {points:,}",
        bad == 0,
        tuple(
            f"{name}: {len(one.bad)} of {one.points:,}, {one.raised:,} raised{''.join(f'; {line}' for line in one.bad[:3])}"
            for name, one in found.items()
        ),
    )


def _discarded() -> Iterator[Bar]:
    """B3 forms of writing that fail or are dropped."""

    def frozen(engine: conduit.Engine, writer: conduit.Writer) -> None:
        try:
            with writer.step() as step:
                step.obs, step.action[...], step.reward[...] = values(0)["obs"], 0, 0
                engine.table("t").freeze()
        except Frozen:
            engine.table("t").thaw()

    def dropped_rollout(engine: conduit.Engine, writer: conduit.Writer) -> None:
        writer.rollout(4).terminated[:] = True

    def dropped_unchecked(engine: conduit.Engine, writer: conduit.Writer) -> None:
        unchecked = writer.unchecked()
        unchecked.terminated[unchecked.row] = True

    cases: dict[str, Callable[[conduit.Engine, conduit.Writer], None]] = {
        "a step frozen in its middle": frozen,
        "a rollout that was dropped": dropped_rollout,
        "an unchecked handle that was dropped": dropped_unchecked,
    }
    for name, spoil in cases.items():
        with conduit.Engine.create(
            f"bars-{os.getpid()}", {"t": conduit.Table(SCHEMA, capacity=120, page_rows=24)}
        ) as engine:
            writer = engine.writer("t")
            spoil(engine, writer)
            try:
                writer.append(**values(1))
                measured = str(check_rows(engine._views["t"]))
            except Closed as error:
                measured = str(error)[:60]
        yield Bar(f"B3 the next append after {name}", measured, "[1]", measured == "[1]")


GROUPS: tuple[Callable[[], Iterator[Bar]], ...] = (_opened, _points, _discarded)
