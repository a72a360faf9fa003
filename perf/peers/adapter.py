"""The far side of the protocol: what each library implements, and the loop that serves it.

One line of JSON comes in on stdin, `{"op": ..., ...}`; one goes out, `{"ok": true, ...}` or `{"error": ...}`. Arrays follow an
answer as raw bytes, in the order and with the dtypes and shapes of its `arrays`. Nothing else is written to stdout: the
descriptor that the answers use is taken away from the library's prints first.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import resource
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
from numpy.typing import NDArray

from perf.peers import feed
from perf.peers.cases import CASES, SCALE, Case, Rows, Tick, shrunk

Arrays = dict[str, NDArray[np.generic]]
_RING_TICKS = 512
"""Distinct ticks that a timed write goes through; their data fit no cache in the pixel cases and the second one in others."""


class Adapter(ABC):
    """One library. `open` is called with each case that `cannot` does not refuse, and everything below works on that case.

    Attributes:
        name: In results.
        distributions: Whose versions are told.
        fill_limit: Most rows that `fill` can be asked for within seconds; None where it is fast.
        tensors: What its batches are, for readers.
    """

    name: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    tensors: ClassVar[str] = "torch tensors"
    fill_limit: ClassVar[int | None] = None

    def start(self) -> None:  # noqa: B027 -- not everybody has something to import
        """Import the library; one thread."""

    def cannot(self, case: Case) -> str | None:
        """Why it cannot do a case; None if it can."""
        return None

    @abstractmethod
    def open(self, case: Case) -> None:
        """Make an empty buffer."""

    @abstractmethod
    def write(self, ticks: Sequence[Tick]) -> None:
        """Store ticks one call each, as a user's loop does."""

    def fill(self, rows: Rows, case: Case) -> None:
        """Store all rows, in whatever way is fast; not timed."""
        self.write(rows.ticks(case.workload.num_envs))

    def sample(self) -> Any:
        """One batch, ready to be learned from."""
        raise NotImplementedError

    def arrays(self, batch: Any) -> Arrays:
        """A batch as named numpy arrays, for comparison; not timed."""
        return {name: np.asarray(value) for name, value in batch.items()}

    def update(self, batch: Any, priorities: NDArray[np.float64]) -> None:
        """New priorities for the rows of a batch."""
        raise NotImplementedError

    def rollout(self, ticks: Sequence[Tick]) -> Any:
        """Store a rollout's ticks one call each, and deliver the rollout as [ticks, lanes, ...]."""
        raise NotImplementedError

    def concurrent(self, case: Case, rows: Rows, seconds: float) -> dict[str, float]:
        """Writer processes flat out while a learner draws; rows per second in and out.

        Here as users of a buffer that is private to a process do it: writers put each tick into a queue, and the learner
        stores what has arrived before each batch.
        """
        return feed.through_queue(self, case, rows, seconds)

    def visible(self, case: Case, rows: Rows, count: int) -> list[int]:
        """Nanoseconds from just before a writer process hands a step over to when the learner could draw it.

        Here through a queue; the learner looks into its other end all the time.
        """
        return feed.visible_through_queue(self, case, rows, count)

    def close(self) -> None:  # noqa: B027 -- nor to close
        """Let the buffer go."""


def to_float(value: Any) -> Any:
    """A torch tensor as float32; bytes scaled by 1/255. The fewest passes that plain torch offers."""
    import torch

    if value.dtype == torch.uint8:
        return value.to(torch.float32).mul_(SCALE)
    return value.to(torch.float32)


def one_thread() -> None:
    """One thread for torch's operations, as everybody has."""
    import torch

    torch.set_num_threads(1)


def memory() -> int:
    """Bytes of this process, shared ones counted in full."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier cases let go of is no reserve for this one
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


class Server:
    """Answers one adapter's questions."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.case: Case | None = None
        self.rows: Rows | None = None
        self.ring: list[Tick] = []
        self.at = 0
        self.rng = np.random.default_rng()

    def hello(self) -> dict[str, Any]:
        """Who answers."""
        self.adapter.start()
        versions = {name: importlib.metadata.version(name) for name in ("numpy", *self.adapter.distributions)}
        return {
            "name": self.adapter.name,
            "python": platform.python_version(),
            "versions": versions,
            "tensors": self.adapter.tensors,
        }

    def cannot(self, case: str) -> dict[str, Any]:
        """Whether a case can be asked for."""
        return {"why": self.adapter.cannot(CASES[case])}

    def open(self, case: str, seed: int, rows: int | None = None) -> dict[str, Any]:
        """Makes and fills the buffer of a case."""
        asked = CASES[case] if rows is None else shrunk(CASES[case], rows)
        load = asked.workload
        self.case, limit = asked, self.adapter.fill_limit
        count = load.rows if limit is None else min(load.rows, limit)
        if load.lanes > 1:
            count -= count % load.lanes
        # every process compares the same rows, however many of them it holds
        self.rows = Rows.of(asked, seed, count)
        before = memory()
        self.adapter.open(asked)
        if asked.kind in ("concurrent", "visible"):
            held = 0
        else:
            self.adapter.fill(self.rows, asked)
            held = count
        after = memory()
        self.ring = self.rows.ticks(load.num_envs, _RING_TICKS)
        self.at = 0
        return {"digest": self.rows.digest, "rows": held, "bytes": max(0, after - before)}

    def check(self, batches: int) -> tuple[dict[str, Any], list[Arrays]]:
        """Batches to compare."""
        assert self.case is not None
        if self.case.kind == "rollout":
            return {}, [self._copied(self.adapter.rollout(self._next_ticks(128))) for _ in range(batches)]
        return {}, [self._copied(self.adapter.sample()) for _ in range(batches)]

    def _copied(self, batch: Any) -> Arrays:
        return {name: np.array(value) for name, value in self.adapter.arrays(batch).items()}

    def _next_ticks(self, count: int) -> list[Tick]:
        ring = self.ring
        if self.at + count > len(ring):
            self.at = 0
        self.at += count
        if count > len(ring):
            return (ring * (count // len(ring) + 1))[:count]
        return ring[self.at - count : self.at]

    def time(self, what: str, units: int) -> dict[str, Any]:
        """Times `units` ticks written, batches drawn or updates made."""
        assert self.case is not None
        runs = self._updates(units) if what == "update" else [(None, self._prepared(what, units))]
        took = used = 0
        gc.collect(0)
        gc.disable()
        try:
            for before, run in runs:
                given = before() if before is not None else None
                cpu, wall = time.process_time_ns(), time.perf_counter_ns()
                run(given)
                took += time.perf_counter_ns() - wall
                used += time.process_time_ns() - cpu
        finally:
            gc.enable()
        return {"wall_ns": took / units, "cpu_ns": used / units}

    def _updates(self, units: int) -> list[tuple[Callable[[], Any] | None, Callable[[Any], object]]]:
        """A learner updates what it has just drawn, one batch at a time; only the update is timed."""
        assert self.case is not None
        adapter, size = self.adapter, self.case.workload.batch
        values = [self.rng.random(size) for _ in range(units)]
        return [(adapter.sample, lambda batch, new=new: adapter.update(batch, new)) for new in values]

    def _prepared(self, what: str, units: int) -> Callable[[Any], object]:
        adapter, case = self.adapter, self.case
        assert case is not None
        if what == "write":
            ticks = self._next_ticks(units)
            return lambda _: adapter.write(ticks)
        if case.kind == "rollout":
            rollouts = [self._next_ticks(128) for _ in range(units)]

            def roll(_: Any) -> None:
                for ticks in rollouts:
                    adapter.rollout(ticks)

            return roll
        if case.kind == "priorities":  # as a learner does: what was drawn gets new priorities
            for _ in range(2):
                adapter.update(adapter.sample(), self.rng.random(case.workload.batch))

        def draw(_: Any) -> None:
            for _ in range(units):
                adapter.sample()

        return draw

    def concurrent(self, seconds: float) -> dict[str, Any]:
        """Writers and a learner for some seconds."""
        assert self.case is not None
        assert self.rows is not None
        return self.adapter.concurrent(self.case, self.rows, seconds)

    def visible(self, count: int) -> dict[str, Any]:
        """Times from commit to visible."""
        assert self.case is not None
        assert self.rows is not None
        return {"ns": self.adapter.visible(self.case, self.rows, count)}

    def close(self) -> dict[str, Any]:
        """Lets the case go."""
        self.adapter.close()
        self.case = self.rows = None
        self.ring = []
        gc.collect()
        return {}


def answer(server: Server, line: str, out: BinaryIO) -> bool:
    """Answers one line; False at the end."""
    asked = json.loads(line)
    op = asked.pop("op")
    if op == "quit":
        return False
    arrays: list[Arrays] = []
    try:
        result = getattr(server, op)(**asked)
        said, arrays = result if isinstance(result, tuple) else (result, [])
        head: Mapping[str, Any] = {"ok": True, **said}
    except Exception as error:  # noqa: BLE001 -- told to the driver, which decides
        traceback.print_exc(file=sys.stderr)
        head = {"ok": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    told = [[{"name": n, "dtype": a.dtype.str, "shape": a.shape} for n, a in one.items()] for one in arrays]
    out.write(json.dumps({**head, "arrays": told}).encode() + b"\n")
    for one in arrays:
        out.writelines(np.ascontiguousarray(array).tobytes() for array in one.values())
    out.flush()
    return True


def cold(adapter: Adapter) -> None:
    """From nothing to the first batch: imports, a buffer of 4,096 rows, 256 of them written, one batch drawn."""
    adapter.start()
    case = shrunk(CASES["small-batch"], 1 << 12)
    adapter.open(case)
    adapter.fill(Rows.of(case, 0, 1024), case)
    adapter.sample()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    answers().write(
        json.dumps(
            {"ok": True, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": int(status["VmHWM"].split()[0]) / 1024}
        ).encode()
        + b"\n"
    )
    sys.stdout.flush()
    adapter.close()


def answers() -> BinaryIO:
    """The descriptor that answers go to; what the library prints goes to stderr from now on."""
    mine = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(mine, "wb", buffering=1 << 20)


def main(adapter: Adapter) -> None:
    """Serves until stdin ends."""
    feed.end_with_parent()
    if sys.argv[1:] == ["cold"]:
        cold(adapter)
        return
    out = answers()
    server = Server(adapter)
    for line in sys.stdin:
        if not answer(server, line, out):
            break
    if server.case is not None:
        adapter.close()
    if adapter.name != "conduit" and "conduit" in sys.modules:
        raise SystemExit("an adapter imported conduit")
