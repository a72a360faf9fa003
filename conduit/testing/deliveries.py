"""Checks max_times_sampled: how often each row is delivered while writers overwrite rows and processes are killed or stopped.

    python -m conduit.testing.deliveries --seconds 60 --kills --sampling prioritized

Every row has a unique number. A loader records the numbers of each batch in memory that outlives it, so only the last delivery of a killed
process can be missing from the record. No number may be recorded more often than its table allows. In the end, each page's count of
rows that are gone must equal a recount, row by row. Without kills, the recorded deliveries of each remaining row must equal the count in
the row's own word.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

import conduit
from conduit.errors import DataTimeout
from conduit.field import Field
from conduit.native.compile.declare import declared
from conduit.native.jit import entry
from conduit.plane.client import Client
from conduit.plane.engine import Engine
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.format.table_spec import Priorities, Table, future_ticks
from conduit.store.pages.deletion import may_be_taken
from conduit.store.pages.protocol import take_ticket
from conduit.store.pages.settling import is_settled
from conduit.store.tables.view import TableView
from conduit.testing.invariants import kinds

Array = np.ndarray[Any, Any]
Sampling = Literal["uniform", "prioritized"]

_WRITERS, _LOADERS = 2, 3
_BATCH = 100
_BLOCK = 64
_PACE = 0.002
"""Seconds that a writer waits after a block of rows: its numbers have to be kept."""
_STOP, _NEXT, _BATCHES, _FAILED, _DELETED = range(5)
_WORDS = 8


def table_of(times: int, sampling: Sampling) -> Table:
    """A table of 24 pages of 40 rows that is overwritten many times a second."""
    schema = Schema([Field("obs", "int64", (), observation=True), Field("reward", "float32")])
    priorities = Priorities(span=1000) if sampling == "prioritized" else None
    return Table(schema, 900, page_rows=40, max_n_step=3, max_times_sampled=times, priorities=priorities)


def _write(client: Client, words: Array, life: int) -> None:
    """Rows of new numbers; episodes end now and then, and no final observation is handed over."""
    chance = random.Random(life)
    ticket = entry(take_ticket)
    with client.writer("replay", keep_final=False) as writer:
        while words[_STOP] == 0:
            first = ticket(words[_NEXT:].ctypes.data) * _BLOCK
            for number in range(first, first + _BLOCK):
                end = chance.random()
                writer.append(obs=number, reward=1.0, terminated=end < 0.05, truncated=0.05 <= end < 0.08)
            time.sleep(_PACE)


def _load(client: Client, words: Array, log: Array, life: int, sampling: Sampling) -> None:
    """Batches that often cannot be filled; some rows get other priorities, some are deleted."""
    chance = np.random.default_rng(life)
    options: dict[str, Any] = {"sampling": conduit.Prioritized()} if sampling == "prioritized" else {}
    window = conduit.Transition(n_step=3)
    with client.loader(
        "replay", batch_size=_BATCH, window=window, seed=life, min_rows=1, timeout=0.0, format="numpy", **options
    ) as loader:
        while words[_STOP] == 0:
            try:
                batch = loader.next()
            except DataTimeout:
                words[_FAILED] += 1
                time.sleep(0.0003)
                continue
            np.add.at(log, batch["obs"], 1)
            words[_BATCHES] += 1
            if sampling == "prioritized":
                loader.update_priorities(batch.ids, chance.pareto(1.0, _BATCH))
            if chance.random() < 0.05:
                words[_DELETED] += client.table("replay").delete(batch.ids[:2])


@dataclass
class Report:
    """What a run did and found.

    Attributes:
        sampling, times, kills, stops: How it was run.
        rows: Rows written.
        batches, failed: Batches delivered, and batches that could not be filled (both at least).
        deleted: Rows deleted by id.
        deliveries: Deliveries that were written down.
        most: How often the number that was delivered most often was.
        above: Numbers that were delivered more often than the table allows.
        used_up: Numbers that were delivered just as often.
        failures: Tracebacks of processes that ended by themselves, and what was wrong at the end.
    """

    sampling: Sampling
    times: int
    kills: int = 0
    stops: int = 0
    rows: int = 0
    batches: int = 0
    failed: int = 0
    deleted: int = 0
    deliveries: int = 0
    most: int = 0
    above: int = 0
    used_up: int = 0
    failures: list[str] = field(default_factory=list)


class _Crew:
    """The processes of a run, and what they share with the driver."""

    def __init__(self, name: str, numbers: int, seed: int, report: Report) -> None:
        self._name, self._report = name, report
        self._memory = [mmap.mmap(-1, numbers) for _ in range(_LOADERS)]
        self.logs = [np.frombuffer(memory, np.uint8) for memory in self._memory]
        self._shared = mmap.mmap(-1, 8 * _WORDS)
        self.words = np.frombuffer(self._shared, np.int64)
        self._pids = [0] * (_WRITERS + _LOADERS)
        self._lives = seed * 1_000_000
        for place in range(len(self._pids)):
            self._start(place)

    def _start(self, place: int) -> None:
        self._lives += 1
        self._pids[place] = os.fork()
        if self._pids[place] == 0:
            try:
                with conduit.attach(self._name) as client:
                    if place < _WRITERS:
                        _write(client, self.words, self._lives)
                    else:
                        _load(client, self.words, self.logs[place - _WRITERS], self._lives, self._report.sampling)
            except BaseException:
                print(traceback.format_exc(), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)

    def kill_one(self, chance: random.Random) -> None:
        """Kill a process, a loader rather than a writer, and start its successor."""
        place = chance.randrange(len(self._pids)) if chance.random() < 0.4 else _WRITERS + chance.randrange(_LOADERS)
        os.kill(self._pids[place], signal.SIGKILL)
        if os.WIFEXITED(os.waitpid(self._pids[place], 0)[1]):
            self._report.failures.append(f"process {place} ended by itself")
        self._report.kills += 1
        self._start(place)

    def stop_one(self, chance: random.Random) -> None:
        """Stop a process long enough for its page to be reused."""
        pid = self._pids[chance.randrange(len(self._pids))]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(chance.random() * 0.06)
        os.kill(pid, signal.SIGCONT)
        self._report.stops += 1

    def end(self) -> None:
        """Let all come to their ends."""
        self.words[_STOP] = 1
        for place, pid in enumerate(self._pids):
            if os.waitpid(pid, 0)[1] != 0:
                self._report.failures.append(f"process {place} ended by itself")


def recount(view: TableView) -> list[str]:
    """What is wrong with a quiet table's counts of rows that have gone: each page's against its rows' own words."""
    wrong = []
    pages, rows = view.layout.pages, view.layout.page_rows
    words = view.pages()
    sides = view.segment.array(view.layout.sides, (pages, 16), np.dtype(np.int64))
    counts = view.sampled
    assert counts is not None
    limit = view.layout.table.max_times_sampled or 0
    size = 0
    for page in np.flatnonzero(np.isin(kinds(view), (w.OPEN, w.SEALED))).tolist():
        halo, committed = (int(words[page, offset // 8]) for offset in (w.PAGE_HALO, w.PAGE_COMMITTED))
        mine = counts[page * rows : page * rows + committed]
        gone = (mine & w.HAS_GONE) != 0
        flags = view.meta["link"][page * rows : page * rows + committed]
        spent = ~may_be_taken.function(mine, limit)
        # a deleted copy is marked where it was written
        spent[halo:] |= (flags[halo:] & (w.DELETED | w.FINAL)) == w.DELETED
        told = int(sides[page, w.SIDE_GONE // 8] >> w.PAST_SHIFT)
        if told != gone[halo:].sum():
            wrong.append(f"page {page} counts {told} rows as gone, {gone[halo:].sum()} are marked")
        if (spent & ~gone).any():
            wrong.append(f"page {page} has {(spent & ~gone).sum()} rows that nobody can draw and that count as there")
        # an original may be marked for its copy, which is spent
        copied = committed - future_ticks(view.layout.table)
        if (gone & ~spent)[:copied].any():
            wrong.append(f"page {page} counts {(gone & ~spent).sum()} rows as gone that can be drawn")
        if ((mine >> 16) & w.MOST_DELIVERIES < (mine & w.MOST_DELIVERIES)).any():
            wrong.append(f"page {page} has rows that were delivered more often than taken")
        size += committed - halo - int(gone[halo:].sum())
    if size != view.counts().size:
        wrong.append(f"{view.counts().size} rows are there by the counts, {size} by a recount")
    if entry(is_settled)(view.address) != 1:
        wrong.append("deaths have not been settled")
    if (counts < 0).any() or (words[:, w.PAGE_STATE // 8] < 0).any():
        wrong.append("a word wrapped")
    return wrong


def _compare(view: TableView, delivered: Array, killed: bool) -> list[str]:
    """What was written down of the rows that are left, against their words; a killed loader wrote down less than it got."""
    counts = view.sampled
    assert counts is not None
    rows = view.layout.page_rows
    words = view.pages()
    told = np.zeros(len(delivered), np.int64)
    present = np.zeros(len(delivered), bool)
    for page in np.flatnonzero(np.isin(kinds(view), (w.OPEN, w.SEALED))).tolist():
        here = slice(page * rows, page * rows + int(words[page, w.PAGE_COMMITTED // 8]))
        numbers = view.columns["obs"][here]
        # a row and its copy: deliveries are counted in one of them
        np.add.at(told, numbers, counts[here] & w.MOST_DELIVERIES)
        whole = int(words[page, w.PAGE_HALO // 8])
        present[numbers[whole:]] = True
    different = present & ((delivered > told) if killed else (delivered != told))
    if different.any():
        first = int(np.flatnonzero(different)[0])
        return [
            f"{different.sum()} rows were delivered otherwise than counted: number {first} {delivered[first]} times, "
            f"counted {told[first]}"
        ]
    return []


def _load_kernels(engine: Engine, sampling: Sampling) -> None:
    """Compile or load everything once, so that forked processes begin to work at once."""
    for one in list(declared):
        entry(one)
    words, log = np.zeros(_WORDS, np.int64), np.zeros(1, np.uint8)
    words[_STOP] = 1
    _write(engine, words, 0)
    _load(engine, words, log, 0, sampling)
    with engine.writer("replay") as writer:
        for _ in range(_BATCH):
            writer.append(obs=0, reward=0.0)
    options: dict[str, Any] = {"sampling": conduit.Prioritized()} if sampling == "prioritized" else {}
    with engine.loader("replay", batch_size=1, min_rows=1, format="numpy", **options) as loader:
        loader.next(timeout=0.0)
    engine.table("replay").reset()


def run(name: str, seconds: float, *, sampling: Sampling = "uniform", times: int = 3, kills: bool, seed: int) -> Report:
    """Write, overwrite, deliver and kill for a while.

    Args:
        name: Engine name.
        seconds: How long.
        sampling: How loaders draw.
        times: How often a row may be delivered.
        kills: Kill and stop processes at random.
        seed: Of the driver's choices; the processes' timing is the machine's.
    """
    chance = random.Random(seed)
    report = Report(sampling, times)
    with Engine.create(name, {"replay": table_of(times, sampling)}, max_participants=_WRITERS + _LOADERS + 1) as engine:
        view = engine._views["replay"]
        _load_kernels(engine, sampling)
        crew = _Crew(name, int(2 * _BLOCK * (seconds + 30) / _PACE), seed, report)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not report.failures:
            time.sleep(chance.random() * 0.05)
            if kills:
                (crew.stop_one if chance.random() < 0.4 else crew.kill_one)(chance)
        crew.end()
        engine.recover()
        delivered: Array = np.add.reduce(np.array(crew.logs), dtype=np.int64)
        report.rows, report.batches, report.failed, report.deleted = (
            int(crew.words[word]) for word in (_NEXT, _BATCHES, _FAILED, _DELETED)
        )
        report.rows *= _BLOCK
        report.deliveries, report.most = int(delivered.sum()), int(delivered.max())
        report.above, report.used_up = int((delivered > times).sum()), int((delivered == times).sum())
        report.failures += recount(view) + _compare(view, delivered, kills)
    return report


def main() -> None:
    """Run as a program: prints the report as JSON; the exit status tells whether everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--sampling", choices=["uniform", "prioritized"], default="uniform")
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--name", default=f"deliveries-{os.getpid()}", help="engine name")
    asked = parser.parse_args()
    report = run(
        asked.name, asked.seconds, sampling=asked.sampling, times=asked.times, kills=asked.kills, seed=asked.seed
    )
    print(json.dumps(asdict(report)))
    sys.exit(bool(report.failures or report.above))


if __name__ == "__main__":
    main()
