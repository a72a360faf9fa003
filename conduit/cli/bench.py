"""`conduit bench`: Conduit beside a plain numpy ring on this machine, interleaved, in under a minute.

Each row runs both by turns in short bursts and gives the median of the paired ratios; what Conduit delivers is compared with
what was written before it is timed. It is a short answer to "is it as fast here as they say"; the suite in `perf/` measures it
against other libraries.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit.cli.jobs import JOBS, Burst, Job
from conduit.cli.output import draw

_BURST = 0.004
_LEAST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the verdict.

    Attributes:
        name: What was done.
        unit: Of the rates: "rows".
        conduit_per_s, plain_per_s: Medians of the bursts.
        ratio: How many times as fast as the plain ring, median of the rounds; `low` and `high` are its quartiles.
        rounds: How many.
        expected: The least ratio of a machine that is well.
        verdict: "ahead" where Conduit is faster, "as expected" from `expected` on, or "slow".
    """

    name: str
    unit: str
    conduit_per_s: float
    plain_per_s: float
    ratio: float
    low: float
    high: float
    rounds: int
    expected: float
    verdict: str


def measure(seconds: float, told: Callable[[str, float], None] | None = None) -> list[Result]:
    """Run all rows.

    Args:
        seconds: About how long, for all together; filling the tables comes on top.
        told: Called with a row's name and the share of all that is done, 0 to 1.

    Raises:
        AssertionError: A delivered row is not the row that was written.
    """
    results = []
    for number, build in enumerate(JOBS):
        with contextlib.ExitStack() as stack:
            job = build(stack)
            if told is not None:
                told(job.name, number / len(JOBS))

            def progress(share: float, number: int = number, name: str = job.name) -> None:
                if told is not None:
                    told(name, (number + share) / len(JOBS))

            results.append(_compare(job, seconds / len(JOBS), progress))
    return results


def _compare(job: Job, seconds: float, progress: Callable[[float], None]) -> Result:
    """Interleaved bursts; the order changes from round to round."""
    counts = [_calls(work) for work in (job.ours, job.plain)]
    costs: list[list[float]] = [[], []]
    collecting = gc.isenabled()
    gc.disable()
    begun = time.perf_counter()
    try:
        while (spent := time.perf_counter() - begun) < seconds or len(costs[0]) < _LEAST_ROUNDS:
            order = (0, 1) if len(costs[0]) % 2 else (1, 0)
            for which in order:
                work = job.ours if which == 0 else job.plain
                before = time.process_time_ns()
                for _ in range(counts[which]):
                    work()
                costs[which].append((time.process_time_ns() - before) / counts[which])
            progress(min(1.0, spent / seconds) if seconds else 1.0)
    finally:
        if collecting:
            gc.enable()
    ours, plain = (np.maximum(one, 1.0) for one in costs)
    low, middle, high = (float(value) for value in np.percentile(plain / ours, (25, 50, 75)))
    return Result(
        job.name,
        "rows",
        job.rows / float(np.median(ours)) * 1e9,
        job.rows / float(np.median(plain)) * 1e9,
        middle,
        low,
        high,
        len(ours),
        job.expected,
        "ahead" if middle >= 1.0 else "as expected" if middle >= job.expected else "slow",
    )


def _calls(work: Burst) -> int:
    """Calls of a burst; the calls that find it out warm up."""
    calls = 1
    while True:
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        spent = time.perf_counter() - begun
        if spent >= _BURST:
            return calls
        calls = max(calls + 1, min(8 * calls, int(calls * _BURST / max(spent, 1e-7)) + 1))


@contextlib.contextmanager
def progress() -> Generator[Callable[[str, float], None]]:
    """A progress bar on standard error; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _name, _share: None
        return
    columns = (TextColumn("{task.description:<40}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda name, share: bar.update(task, description=name, completed=share)


def show(results: list[Result], seconds: float) -> None:
    """Print the verdict for people, 80 columns wide."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    grid.add_column("rows per second", no_wrap=True)
    for name in ("conduit", "numpy", "times"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("", no_wrap=True)
    styles = {"ahead": "green", "as expected": "green", "slow": "red"}
    for one in results:
        grid.add_row(
            one.name,
            _rate(one.conduit_per_s),
            _rate(one.plain_per_s),
            f"{one.ratio:.2f}",
            f"[{styles[one.verdict]}]{one.verdict}[/]",
        )
    load = os.getloadavg()[0]
    busy = (
        f" Other jobs keep the machine busy (load {load:.1f})." if load > 1.5 + len(os.sched_getaffinity(0)) / 2 else ""
    )
    slow = sum(one.verdict == "slow" for one in results)
    verdict = f"{slow} slower than expected." if slow else "Conduit is as fast here as expected."
    draw(
        grid,
        "",
        f"{verdict} {seconds:.0f} s of turns with a private numpy ring,\nwhich checks nothing and no other process can read.{busy}",
    )


def _rate(value: float) -> str:
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g}"


def as_json(results: list[Result], seconds: float) -> dict[str, Any]:
    """The document of `conduit bench --json`."""
    from conduit.cli.checks import versions

    machine = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    return {"seconds": seconds, "machine": machine, "versions": versions(), "rows": results}
