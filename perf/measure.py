"""Interleaved measurements that hold on a machine shared with others.

Every method of a comparison runs once per round, in an order that rotates, so that whatever else the machine does hits
all of them. A ratio is taken inside each round and the median of these paired ratios is reported with its interquartile
range: `ratio = median over rounds of cost(reference) / cost(method)`. Rounds are added until the median is known to
`precision`, or until the time cap.

Times are CPU time by default: time spent waiting for a core that another job holds is not the method's. The wall clock
is there for what CPU time cannot see (processes that start, work that blocks).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Clock = Literal["thread", "process", "wall"]

_CLOCKS: Mapping[Clock, Callable[[], int]] = {
    "thread": time.thread_time_ns,
    "process": time.process_time_ns,
    "wall": time.perf_counter_ns,
}

CLOCK_WORDS: Mapping[Clock, str] = {
    "thread": "CPU time of the calling thread",
    "process": "CPU time of all threads of the process",
    "wall": "wall time",
}


@dataclass(frozen=True, slots=True)
class Method:
    """One way to do the work.

    Attributes:
        name: Shown in results.
        run: The timed burst.
        prepare: Called before each burst, untimed: fresh indices, fresh data.
        units: How many units of work (steps, batches) one burst does; costs are per unit.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] | None = None
    units: int = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, quartiles and least of a sample; the unit is the sample's."""

    median: float
    q25: float
    q75: float
    least: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[np.float64]) -> Spread:
        """Summarises `values` (at least one)."""
        array = np.asarray(values, np.float64)
        q25, median, q75 = np.percentile(array, (25, 50, 75))
        return cls(float(median), float(q25), float(q75), float(array.min()), array.size)

    @property
    def uncertainty(self) -> float:
        """Half the 95 % interval of the median, as a share of the median (McGill's notch)."""
        if self.median == 0:
            return 0.0
        return 1.57 * (self.q75 - self.q25) / float(np.sqrt(self.count)) / abs(self.median)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rounds of one interleaved measurement.

    Attributes:
        costs: Method name to float64 [rounds], nanoseconds per unit.
        clock: What was read.
    """

    costs: Mapping[str, NDArray[np.float64]]
    clock: Clock

    def cost(self, name: str) -> Spread:
        """Nanoseconds per unit of one method."""
        return Spread.of(self.costs[name])

    def speed(self, name: str, reference: str) -> Spread:
        """How many times as fast as `reference` the method is: paired ratios of the rounds."""
        return Spread.of(self.costs[reference] / self.costs[name])

    def fastest(self, names: Sequence[str]) -> str:
        """The name with the least median cost."""
        return min(names, key=lambda name: self.cost(name).median)


def compare(
    methods: Sequence[Method],
    *,
    clock: Clock = "thread",
    seconds: float = 10.0,
    precision: float = 0.01,
    least_rounds: int = 15,
    most_rounds: int = 2000,
    warm_up: int = 2,
) -> Comparison:
    """Runs the methods interleaved until every ratio to the first one is known to `precision`, or for `seconds`.

    The garbage collector is off inside bursts and runs between rounds.

    Args:
        methods: At least one; the first is the reference for the stopping rule.
        clock: What to read around each burst.
        seconds: Cap in wall seconds, warm-up included; at least 3 rounds are made whatever it says.
        precision: Half-width of the 95 % interval of each median ratio at which to stop.
        least_rounds: Rounds before the stopping rule is asked.
        most_rounds: Rounds at which to stop in any case.
        warm_up: Rounds that are run and thrown away.

    Returns:
        All rounds, in nanoseconds per unit.
    """
    read = _CLOCKS[clock]
    deadline = time.perf_counter() + seconds
    costs: dict[str, list[float]] = {method.name: [] for method in methods}
    if len(costs) != len(methods):
        raise ValueError("expected methods of different names, got one name twice; rename one")
    collecting = gc.isenabled()
    rounds = 0
    try:
        gc.disable()
        while True:
            shift = rounds % len(methods)
            for method in (*methods[shift:], *methods[:shift]):
                if method.prepare is not None:
                    method.prepare()
                before = read()
                method.run()
                after = read()
                if rounds >= warm_up:
                    costs[method.name].append((after - before) / method.units)
            rounds += 1
            if rounds % 16 == 0:
                gc.collect(0)
            done = rounds - warm_up
            if done >= most_rounds or (done >= 3 and time.perf_counter() > deadline):
                break
            if done >= least_rounds and done % 5 == 0 and _settled(costs, methods[0].name, precision):
                break
    finally:
        if collecting:
            gc.enable()
    return Comparison({name: np.asarray(values, np.float64) for name, values in costs.items()}, clock)


def _settled(costs: Mapping[str, Sequence[float]], reference: str, precision: float) -> bool:
    base = np.asarray(costs[reference])
    if len(costs) == 1:
        return Spread.of(base).uncertainty <= precision
    return all(
        Spread.of(base / np.asarray(values)).uncertainty <= precision
        for name, values in costs.items()
        if name != reference
    )


def ratio_text(spread: Spread) -> str:
    """`0.72x (IQR 0.70-0.75, n 40)`."""
    return f"{spread.median:.2f}x (IQR {spread.q25:.2f}-{spread.q75:.2f}, n {spread.count})"


def time_text(spread: Spread) -> str:
    """A time in ns as `41.2 us (IQR 40.1-44.0)`, in the unit that fits."""
    unit, scale = next(
        (u, s) for u, s in (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1.0)) if spread.median >= s or s == 1.0
    )
    return f"{spread.median / scale:.3g} {unit} (IQR {spread.q25 / scale:.3g}-{spread.q75 / scale:.3g})"


def rate(value: float) -> str:
    """Three digits: `12.3 M`, `456 k`, `7.89 k`."""
    for unit, scale in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= 0.9995 * scale:
            return f"{value / scale:.3g}{unit}" if value < 999.5 * scale else f"{value / scale:.0f}{unit}"
    return f"{value:.3g}"
