"""The hot paths against plain work of the same kind, in one process: a smoke alarm for slow-downs of 1.3 times.

Times are useless on a machine that others use as well; ratios of minima are not. A path and its reference run by turns in
bursts of about a millisecond, far shorter than a time slice, until each has had bursts that nothing disturbed; the ratio of
their fastest bursts is compared with what it was when it was recorded for this kind of processor. A ratio that is too high is
measured again, up to `TRIES` times: a slow-down stays, a disturbance does not. Tables are small, so that caches hold them and
the paths' own work shows rather than the memory's.

`python -m perf.gate` prints the ratios, `--record` makes them the ones to hold to.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perf import machine, subjects
from perf.baselines import PlainRing
from perf.measure import Spread
from perf.workloads import CARTPOLE, SLAB_97B, STEP_97B, Part, Workload, ticks

RECORDED = Path(__file__).with_name("gate.json")
LIMIT = 1.17
"""Ratio over the recorded one at which a path has slowed; halfway to 1.3 in logarithms is 1.14."""
FOREIGN_LIMIT = 2.5
"""The same on a processor for which nothing was recorded: only gross slow-downs show there."""
TRIES = 5
SECONDS = 0.5
_ROWS = 1 << 12
SMALL_PIXELS = Workload(
    "4x21x21 uint8",
    (Part("obs", "uint8", (4, 21, 21), observation=True), Part("action", "int64"), Part("reward", "float32")),
    rows=512,
    num_envs=8,
)
"""Pixels whose table and batches fit a second-level cache: bandwidth, which neighbours take, has no say."""


@dataclass(frozen=True, slots=True)
class HotPath:
    """A hot path ready to run, and the plain work beside it; both are bursts of about a millisecond."""

    run: Callable[[], object]
    reference: Callable[[], object]


Build = Callable[[contextlib.ExitStack], HotPath]


def writing(workload: Workload, count: int, rows: int = _ROWS) -> Build:
    """Ticks of a workload through `append`, beside a plain ring."""

    def build(stack: contextlib.ExitStack) -> HotPath:
        load = workload.sized(rows)
        data = subjects.rows_of(load, ticks(load, count, np.random.default_rng(0)))
        client, _ = stack.enter_context(subjects.engine(load))
        writer = stack.enter_context(
            client.writer(subjects.TABLE, num_envs=load.num_envs, autoreset="next_step" if load.num_envs else None)
        )
        append = subjects.append_loop(writer, load)
        ring = PlainRing(load)
        plain = ring.slab_loop() if load.num_envs else ring.step_loop()
        return HotPath(lambda: append(data), lambda: plain(data))

    return build


def taking(workload: Workload, size: int, count: int, scale: bool) -> Callable[[], None]:
    """Let numpy take as many rows of the same fields, twice the observation, into reused arrays."""
    rng = np.random.default_rng(1)
    columns = [np.ones((workload.rows, *part.shape), part.dtype) for part in workload.parts]
    columns.append(columns[0])
    outs = [np.empty((size, *column.shape[1:]), column.dtype) for column in columns]
    floats = [np.empty(out.shape, np.float32) for out in outs]
    index = rng.integers(0, workload.rows, (count, size))

    def run() -> None:
        for rows in index:
            for column, out, wide in zip(columns, outs, floats, strict=True):
                np.take(column, rows, axis=0, out=out, mode="clip")
                if scale and out.dtype == np.uint8:
                    np.multiply(out, np.float32(1 / 255), out=wide)

    return run


def loader_of(
    stack: contextlib.ExitStack,
    workload: Workload,
    size: int,
    *,
    table: Mapping[str, Any] | None = None,
    format: str = "numpy",  # noqa: A002 - the word of the loader's own option
    **options: Any,
) -> Any:
    """A loader of batches of `size` rows, over a table of which three quarters are filled; `table` is what it has besides."""
    client, _ = stack.enter_context(subjects.engine(workload, **(table or {})))
    writer = stack.enter_context(
        client.writer(subjects.TABLE, num_envs=workload.num_envs, autoreset="next_step" if workload.num_envs else None)
    )
    append = subjects.append_loop(writer, workload)
    rows = workload.rows * 3 // 4 // workload.lanes
    append(subjects.rows_of(workload, ticks(workload, rows, np.random.default_rng(2))))
    return stack.enter_context(client.loader(subjects.TABLE, batch_size=size, seed=0, format=format, **options))


def _small_batch(stack: contextlib.ExitStack) -> HotPath:
    load, count = CARTPOLE.sized(_ROWS), 24
    loader = loader_of(stack, load, 256)

    def run() -> None:
        for _ in range(count):
            loader.next()

    return HotPath(run, taking(load, 256, count, scale=False))


def _pixel_batch(stack: contextlib.ExitStack) -> HotPath:
    load, size = SMALL_PIXELS, 16
    transform = {"obs": subjects.conduit.scale(1 / 255, dtype="float32")}
    loader = loader_of(stack, load, size, transform=transform)

    def run() -> None:
        for _ in range(16):
            loader.next()

    return HotPath(run, taking(load, size, 6, scale=True))


def _prioritized(stack: contextlib.ExitStack, load: Workload) -> Any:
    table = {"priorities": subjects.conduit.Priorities(alpha=0.6, eps=1e-6)}
    return loader_of(stack, load, 256, table=table, sampling=subjects.conduit.Prioritized(), buffers=4)


def prioritized_sample(stack: contextlib.ExitStack, rows: int = _ROWS) -> HotPath:
    """Batches of 256 by priority, with weights."""
    load = CARTPOLE.sized(rows)
    loader = _prioritized(stack, load)

    def run() -> None:
        for _ in range(16):
            loader.next()

    return HotPath(run, taking(load, 256, 24, scale=False))


def prioritized_update(stack: contextlib.ExitStack, rows: int = _ROWS) -> HotPath:
    """Priorities of 256 rows."""
    load = CARTPOLE.sized(rows)
    loader = _prioritized(stack, load)
    ids = [loader.next().ids.copy() for _ in range(96)]
    values = np.random.default_rng(3).random(256)

    def run() -> None:
        for one in ids:
            loader.update_priorities(one, values)

    return HotPath(run, taking(load, 256, 24, scale=False))


PATHS: Mapping[str, Build] = {
    "append": writing(STEP_97B, 1024),
    "vector append": writing(SLAB_97B, 256),
    "small batch": _small_batch,
    "pixel batch": _pixel_batch,
    "prioritized sample": prioritized_sample,
    "prioritized update": prioritized_update,
}


def ratio(path: HotPath, seconds: float = SECONDS, *, slowed: float = 1.0) -> float:
    """The path's fastest burst over its reference's.

    Args:
        path: What to run.
        seconds: How long, both together.
        slowed: Pretend that the path is so many times as slow, by repeating it for that part: what the alarm must see.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(3):
            path.run()
            path.reference()
        best = [float("inf"), float("inf")]
        clock = time.perf_counter
        deadline = clock() + seconds
        while clock() < deadline:
            for at, work in ((0, path.run), (1, path.reference)):
                begun = clock()
                work()
                best[at] = min(best[at], clock() - begun)
    finally:
        if collecting:
            gc.enable()
    return best[0] * slowed / best[1]


def least(build: Build, seconds: float = 0.25) -> float:
    """The lesser ratio of two, of a path built anew."""
    with contextlib.ExitStack() as stack:
        path = build(stack)
        return min(ratio(path, seconds) for _ in range(2))


FIGURES: Mapping[str, Callable[[], float]] = {name: functools.partial(least, build) for name, build in PATHS.items()}
"""For perf.sides."""


def kind() -> str:
    """The kind of processor and interpreter that a ratio holds for."""
    here = machine.describe()
    caches = "/".join(here["caches"].values())
    python = ".".join(here["python"].split(".")[:2])
    numpy = ".".join(here["versions"]["numpy"].split(".")[:2])
    return f"{here['processor']}, {caches}, Python {python}, numpy {numpy}"


def recorded() -> tuple[dict[str, float], float]:
    """Ratios to hold to here, and how many times them is too much."""
    known = json.loads(RECORDED.read_text())
    mine = known.get(kind())
    if mine is not None:
        return mine, LIMIT
    typical = {name: float(np.median([one[name] for one in known.values() if name in one])) for name in PATHS}
    return typical, FOREIGN_LIMIT


def slowed(name: str, *, by: float = 1.0, tries: int = TRIES) -> str | None:
    """What to say about a path that is slower than recorded; None if it is not.

    Args:
        name: In `PATHS`.
        by: Pretend a slow-down of so many times.
        tries: How often to look before believing it.
    """
    known, limit = recorded()
    seen = []
    for _ in range(tries):
        with contextlib.ExitStack() as stack:
            seen.append(ratio(PATHS[name](stack), slowed=by))
        if seen[-1] <= known[name] * limit:
            return None
    return (
        f"{name}: {min(seen):.3f} times its reference at best of {tries}, recorded {known[name]:.3f}: "
        f"{min(seen) / known[name]:.2f} times as slow. If that is meant: python -m perf.gate --record"
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints ratios, or records them."""
    parser = argparse.ArgumentParser(prog="python -m perf.gate", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--record", action="store_true", help="hold to the ratios of this run from now on, on this kind of machine"
    )
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args(arguments)
    found: dict[str, list[float]] = {name: [] for name in PATHS}
    for _ in range(asked.repeats):
        for name, build in PATHS.items():
            with contextlib.ExitStack() as stack:
                found[name].append(ratio(build(stack)))
    known, limit = recorded() if RECORDED.exists() else ({}, LIMIT)
    print(f"# {kind()}; limit {limit}")
    for name, ratios in found.items():
        spread = Spread.of(ratios)
        before = f"recorded {known[name]:.3f}, now {spread.median / known[name]:.2f} of it" if name in known else ""
        print(f"{name} | {spread.median:.3f} ({min(ratios):.3f}-{max(ratios):.3f}) of its reference | {before}")
    if asked.record:
        document = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        document[kind()] = {name: round(Spread.of(ratios).median, 4) for name, ratios in found.items()}
        RECORDED.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
