"""Writer processes, and the ways in which their rows reach a learner.

The module that runs in a writer imports numpy and this file; whatever the writers need of a library comes with `connect`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from perf.peers.cases import Case, Rows, Tick

if TYPE_CHECKING:
    from perf.peers.adapter import Adapter

DEPTH = 64
"""Ticks that a queue holds before its writers wait."""
PERIOD = 0.002
"""Seconds between the steps whose way is timed."""
_START = 60.0


def end_with_parent() -> None:
    """Ask the kernel to end this process when its parent is gone."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _queue_writer(target: Any, ticks: list[Tick], ready: Any) -> None:
    end_with_parent()
    ready.release()
    while True:
        for tick in ticks:
            target.put(tick)


def _queue_pinger(target: Any, ticks: list[Tick], ready: Any) -> None:
    end_with_parent()
    ready.release()
    for tick in ticks:
        time.sleep(PERIOD)
        target.put((time.perf_counter_ns(), tick))


@contextlib.contextmanager
def processes(work: Callable[..., None], arguments: list[tuple[Any, ...]]) -> Iterator[list[Any]]:
    """Processes that call `work(*arguments[i], ready)`, once all of them have released `ready`; killed at the end."""
    context = multiprocessing.get_context("spawn")
    ready = context.Semaphore(0)
    running = [context.Process(target=work, args=(*given, ready), daemon=True) for given in arguments]
    try:
        for process in running:
            process.start()
        for _ in running:
            if not ready.acquire(timeout=_START):
                raise RuntimeError("expected the writer processes to start within 60 s")
        yield running
    finally:
        for process in running:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in running:
            if process.pid is not None:
                process.join()


def parts_of(rows: Rows, case: Case, writers: int) -> list[list[Tick]]:
    """Each writer's own ticks: 256 of them."""
    ticks = rows.ticks(case.workload.num_envs, 256 * writers)
    return [ticks[i::writers] for i in range(writers)]


def learn(
    seconds: float,
    step: Callable[[], int],
    drawn: Callable[[], Any],
    batch: int,
    counted: Callable[[], int] | None = None,
) -> dict[str, float]:
    """A learner for some seconds after it has warmed up for half a second.

    Args:
        seconds: How long to count.
        step: What it does before each batch; returns how many rows it stored itself.
        drawn: Draws a batch.
        batch: Rows of one.
        counted: Rows stored so far by whoever writes directly; None where `step` stores them.
    """
    until = time.perf_counter() + 0.5
    while time.perf_counter() < until:
        step()
        drawn()
    rows = out = 0
    before = counted() if counted is not None else 0
    begun = now = time.perf_counter()
    while now < begun + seconds:
        rows += step()
        drawn()
        out += batch
        now = time.perf_counter()
    if counted is not None:
        rows = counted() - before
    return {"in_per_s": rows / (now - begun), "out_per_s": out / (now - begun)}


def through_queue(adapter: Adapter, case: Case, rows: Rows, seconds: float) -> dict[str, float]:
    """Writers put ticks into one queue; before each batch the learner stores what has arrived, at most a queue's depth."""
    lanes = case.workload.lanes
    context = multiprocessing.get_context("spawn")
    target = context.Queue(DEPTH)
    adapter.fill(Rows.of(case, 1, 4096), case)
    adapter.write(rows.ticks(case.workload.num_envs, 4))
    adapter.sample()  # whatever it compiles at first is not the learner's speed

    def step() -> int:
        arrived = []
        for _ in range(DEPTH):
            try:
                arrived.append(target.get_nowait())
            except queue.Empty:
                break
        if arrived:
            adapter.write(arrived)
        return len(arrived) * lanes

    with processes(_queue_writer, [(target, part) for part in parts_of(rows, case, case.writers)]):
        found = learn(seconds, step, adapter.sample, case.workload.batch)
    target.cancel_join_thread()
    target.close()
    return found


def visible_through_queue(adapter: Adapter, case: Case, rows: Rows, count: int) -> list[int]:
    """One writer puts steps into a queue; the learner looks for them without a pause and stores each."""
    context = multiprocessing.get_context("spawn")
    target = context.Queue(DEPTH)
    ticks = rows.ticks(case.workload.num_envs, count)
    adapter.write(ticks[:8])
    times: list[int] = []
    with processes(_queue_pinger, [(target, ticks)]):
        deadline = time.perf_counter() + _START
        while len(times) < len(ticks) and time.perf_counter() < deadline:
            try:
                begun, tick = target.get_nowait()
            except queue.Empty:
                continue
            adapter.write([tick])
            times.append(time.perf_counter_ns() - begun)
    target.cancel_join_thread()
    target.close()
    return times
