"""How soon programs work after the installation: one, a learner with its actors, a writer alone."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from perf.bars import Bar
from perf.first_hour.installed import ROOT, Environment, environment, wheel
from perf.measure import Spread

_TRIES = 3
_WARM = 5
_ACTORS = 6
_SECONDS = 300.0

TEN_LINES = """
import numpy as np, conduit
schema = conduit.Schema.from_example({"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0})
with conduit.Engine.create(NAME, {"replay": conduit.Table(schema, capacity=10_000, max_n_step=3)}) as engine:
    with engine.writer("replay", keep_final=False) as writer:
        for step in range(1000):
            writer.append(obs=np.full(4, step, np.float32), action=step % 2, reward=1.0, terminated=step % 100 == 99)
    with engine.loader("replay", batch_size=64, window=conduit.Transition(n_step=3)) as loader:
        batch = loader.next()
        assert batch["obs"].shape == (64, 4)
"""

_TELL = """
import json, sys, time
compiler = sys.modules.get("conduit.native.compile.compiler")
print(json.dumps({
    "cpu": time.process_time(),
    "compiled": [] if compiler is None else compiler.compiled,
    "memory": next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS:")) / 1024,
    "heavy": sorted({"numba", "llvmlite", "torch"} & sys.modules.keys()),
}), flush=True)
"""

LEARNER = """
import sys, time
import numpy as np, conduit
schema = conduit.Schema.from_example({"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0})
with conduit.Engine.create(NAME, {"replay": conduit.Table(schema, capacity=100_000)}) as engine:
    print("made", flush=True)
    with engine.loader("replay", batch_size=64, min_rows=600, timeout=200) as loader:
        loader.next()
    TELL
    sys.stdin.readline()
"""

ACTOR = """
import sys
import numpy as np, conduit
with conduit.attach(NAME) as client, client.writer("replay", keep_final=False) as writer:
    for step in range(1000):
        writer.append(obs=np.full(4, step, np.float32), action=step % 2, reward=1.0, terminated=step % 100 == 99)
    TELL
    sys.stdin.readline()
"""

WRITER = """
import conduit
client = conduit.attach(NAME)
writer = client.writer("replay")
TELL
writer.close()
client.close()
"""


def _program(text: str, name: str) -> str:
    lines = text.replace("NAME", repr(name)).splitlines()
    told = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        told += [indent + one for one in _TELL.splitlines()] if line.strip() == "TELL" else [line]
    return "\n".join(told)


def _name() -> str:
    return f"first-{os.getpid()}-{time.monotonic_ns()}"


def _start(python: str, program: str, variables: dict[str, str]) -> subprocess.Popen[str]:
    # without a folder of this tree on the path: what is measured is what is installed
    return subprocess.Popen(
        [python, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables, cwd="/"
    )


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a program ended with status {process.wait(30)} before it had told anything")
    return dict(json.loads(line))


@contextlib.contextmanager
def _ended(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Have processes end in order, or kill them."""
    try:
        yield
        for one in processes:
            one.communicate("\n", timeout=60)
    finally:
        for one in processes:
            if one.poll() is None:
                one.kill()
                one.communicate()


def _run_ten_lines(place: Environment) -> tuple[float, float]:
    """Wall and CPU seconds of the ten-line program, from its start to its end."""
    before, began = os.times(), time.perf_counter()
    program = TEN_LINES.replace("NAME", repr(_name()))
    done = subprocess.run(
        [place.python, "-c", program], env=place.variables(), cwd="/", timeout=_SECONDS, check=True, capture_output=True
    )
    assert not done.stderr, done.stderr
    wall, after = time.perf_counter() - began, os.times()
    return wall, after.children_user - before.children_user + after.children_system - before.children_system


def ten_lines() -> Iterator[Bar]:
    """A ten-line program from the wheel, to its first batch."""
    shares, seconds, notes = [], [], []
    with wheel() as built:
        notes.append(built.name)
        for _ in range(_TRIES):
            with environment(built) as place:
                _, cold = _run_ten_lines(place)
                warm = Spread.of([_run_ten_lines(place)[1] for _ in range(_WARM)]).median
            shares.append(cold / warm)
            seconds.append(cold)
    share, cold_seconds = Spread.of(shares), Spread.of(seconds)
    yield Bar(
        "ten-line script in a fresh environment from the wheel, times its warm time (CPU)",
        f"{share.median:.2f}x of {cold_seconds.median / share.median:.2f} s",
        "<= 1.3x",
        share.median <= 1.3,
        tuple(notes),
    )
    yield Bar("the same, CPU seconds", f"{cold_seconds.median:.2f} s", "<= 3 s", cold_seconds.median <= 3.0)


def crew() -> Iterator[Bar]:
    """Six actors and a learner at once, with empty caches."""
    with wheel() as built, environment(built) as place:
        cpu, compiled, _ = _run_crew(place.python, place.variables())
    yield Bar(
        f"{_ACTORS} actors and a learner from the wheel, empty caches, CPU to the first batch",
        f"at most {max(cpu):.2f} s, actors {max(cpu[1:]):.2f} s",
        "<= 5 s each",
        max(cpu) <= 5.0,
        (f"{len(compiled)} kernels compiled",),
    )
    with environment_of_sources() as variables:
        cpu, compiled, wall = _run_crew(sys.executable, variables)
    twice = len(compiled) - len(set(compiled))
    yield Bar(
        "the same from a checkout, kernels compiled more than once",
        f"{twice} of {len(set(compiled))}",
        "0",
        twice == 0 and len(compiled) > 0,
        (f"the first batch after {wall:.0f} s; CPU {', '.join(f'{one:.1f}' for one in cpu)} s",),
    )


@contextlib.contextmanager
def environment_of_sources() -> Iterator[dict[str, str]]:
    """Variables of a process that takes Conduit from this tree and compiles its kernels into an empty folder."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        yield os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": name, "CONDUIT_KERNELS": "compile"}


def _run_crew(python: str, variables: dict[str, str]) -> tuple[list[float], list[str], float]:
    """CPU seconds of the learner and of each actor, all that they compiled, and wall seconds to the first batch."""
    name, began = _name(), time.perf_counter()
    learner = _start(python, _program(LEARNER, name), variables)
    running = [learner]
    with _ended(running):
        assert learner.stdout is not None
        assert learner.stdout.readline() == "made\n"
        running += [_start(python, _program(ACTOR, name), variables) for _ in range(_ACTORS)]
        told = [_told(learner)]
        wall = time.perf_counter() - began
        told += [_told(one) for one in running[1:]]
        running.reverse()  # actors end before the engine does
    # a process compiles nothing twice; conversions of several dtypes have one name there
    return [one["cpu"] for one in told], [name for one in told for name in set(one["compiled"])], wall


def writer() -> Iterator[Bar]:
    """A process that only writes, imported and ready."""
    walls, cpus, sizes, heavy = [], [], [], set()
    with wheel() as built, environment(built) as place:
        name = _name()
        learner = _start(place.python, _program(LEARNER, name), place.variables())
        with _ended([learner]):
            assert learner.stdout is not None
            assert learner.stdout.readline() == "made\n"
            for _ in range(2 + 3 * _WARM):
                began = time.perf_counter()
                one = _start(place.python, _program(WRITER, name), place.variables())
                with _ended([one]):
                    told = _told(one)
                    walls.append(time.perf_counter() - began)
                cpus.append(told["cpu"])
                sizes.append(told["memory"])
                heavy |= set(told["heavy"])
            # rows for the learner, which ends with its first batch
            actor = _start(place.python, _program(ACTOR, name), place.variables())
            with _ended([actor]):
                _told(actor)
            _told(learner)
    wall, cpu, size = Spread.of(walls[2:]), Spread.of(cpus[2:]), Spread.of(sizes[2:])
    notes = (f"CPU {cpu.median:.2f} s; imported: {', '.join(sorted(heavy)) or 'neither numba nor torch'}",)
    yield Bar("writer-only process, ready: wall time", f"{wall.median:.2f} s", "<= 0.3 s", wall.median <= 0.3, notes)
    yield Bar("writer-only process, ready: resident memory", f"{size.median:.0f} MB", "<= 80 MB", size.median <= 80)


GROUPS = (ten_lines, crew, writer)
