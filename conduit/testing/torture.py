"""Processes that write, read and lease one small table while a driver kills them at random, again and again.

    python -m conduit.testing.torture --seconds 60 --seed 7

The process of each role (conduit.testing.torture_roles) attaches, works until it is killed, and is replaced. The driver also stops
processes for a while: others must neither take a stopped process's pages nor wait for it. Every process recovers the pages of dead ones, so
processes also die in the middle of a recovery. In the end the table must satisfy all invariants.
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

import numpy as np

import conduit
from conduit.native.compile.declare import declared
from conduit.native.jit import entry
from conduit.plane.engine import Engine
from conduit.testing.invariants import (
    check_each_row_is_drawn_from_one_page,
    check_every_page_can_be_claimed,
    check_nothing_leaked,
    check_proving_rows,
    kinds,
)
from conduit.testing.torture_roles import ROLES, STATISTICS, MadeStep, small_table


@dataclass
class Report:
    """What a run did and found.

    Attributes:
        seed: Of the driver's choices.
        kills: {role: processes killed}.
        stops: Processes that were stopped for a while.
        failures: Tracebacks of processes that ended by themselves, and what was wrong with the table at the end.
        written: Rows committed.
        torn_before: Torn rows seen before validation: the control, which must be above 0.
        torn_after: Torn or misplaced rows among those that passed validation, were delivered or were leased.
        valid, overwritten: Rows read in parts that passed validation, and that did not.
        delivered, redrawn: Rows delivered by loaders, and rows that those drew again.
        leases, leased_rows: Leases held to their end, and rows looked at under them.
        recovered: Pages taken back from dead processes.
        pages: {kind: pages} at the end.
        rows_at_end: Rows in the table at the end, all checked.
    """

    seed: int
    kills: dict[str, int] = field(default_factory=dict)
    stops: int = 0
    failures: list[str] = field(default_factory=list)
    written: int = 0
    torn_before: int = 0
    torn_after: int = 0
    valid: int = 0
    overwritten: int = 0
    delivered: int = 0
    redrawn: int = 0
    leases: int = 0
    leased_rows: int = 0
    recovered: int = 0
    pages: dict[str, int] = field(default_factory=dict)
    rows_at_end: int = 0


class _Crew:
    """The processes of a run, and their statistics in memory they share with the driver."""

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._shared = mmap.mmap(-1, 4096)
        self._statistics = np.frombuffer(self._shared, np.int64).reshape(-1, STATISTICS)[: len(ROLES)]
        self._pids = [0] * len(ROLES)
        self._lives = seed * 1_000_000
        self.totals = np.zeros(STATISTICS, np.int64)
        self.report = Report(seed)
        for place in range(len(ROLES)):
            self._start(place)

    def _start(self, place: int) -> None:
        self._lives += 1
        self._statistics[place] = 0
        self._pids[place] = os.fork()
        if self._pids[place] == 0:
            try:
                with conduit.attach(self._name) as client:
                    ROLES[place](client, self._statistics[place], self._lives)
            except BaseException:
                print(traceback.format_exc(), file=sys.stderr, flush=True)
            os._exit(1)

    def _reap(self, place: int) -> None:
        os.kill(self._pids[place], signal.SIGKILL)
        _, status = os.waitpid(self._pids[place], 0)
        if os.WIFEXITED(status):
            self.report.failures.append(f"{ROLES[place].__name__} ended by itself")
        self.totals += self._statistics[place]

    def kill_one(self, chance: random.Random) -> None:
        """Kill a process and start its successor."""
        place = chance.randrange(len(ROLES))
        self._reap(place)
        name = ROLES[place].__name__
        self.report.kills[name] = self.report.kills.get(name, 0) + 1
        self._start(place)

    def stop_one(self, chance: random.Random) -> None:
        """Stop a process for a moment."""
        pid = self._pids[chance.randrange(len(ROLES))]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(chance.random() * 0.05)
        os.kill(pid, signal.SIGCONT)
        self.report.stops += 1

    def end(self) -> None:
        """Kill all."""
        for place in range(len(ROLES)):
            self._reap(place)


def _load_kernels(engine: Engine) -> None:
    """Compile or load everything once, so that forked processes begin to work at once."""
    for one in list(declared):
        entry(one)
    with engine.writer("replay") as writer, engine.loader("replay", batch_size=1, format="numpy") as loader:
        step = MadeStep()
        for number in range(4):
            action, reward, _ = step.make(0, number)
            writer.append(obs=step.obs, action=action, reward=reward)
        loader.next(timeout=0).release()


def run(name: str, seconds: float, seed: int) -> Report:
    """Torture a table of its own for a while.

    Args:
        name: Engine name.
        seconds: How long.
        seed: Of the driver's choices; the processes' timing is the machine's.
    """
    chance = random.Random(seed)
    # as many seats as processes, so that none can be missing
    with Engine.create(name, {"replay": small_table()}, max_participants=len(ROLES) + 1) as engine:
        view = engine._views["replay"]
        _load_kernels(engine)
        crew = _Crew(name, seed)
        report = crew.report
        end = time.monotonic() + seconds
        while time.monotonic() < end and not report.failures:
            time.sleep(chance.random() * 0.04)
            if chance.random() < 0.1:
                crew.stop_one(chance)
            else:
                crew.kill_one(chance)
        crew.end()
        engine.recover()
        for place, key in enumerate(
            (
                "written",
                "torn_before",
                "torn_after",
                "valid",
                "overwritten",
                "delivered",
                "redrawn",
                "leases",
                "leased_rows",
            )
        ):
            setattr(report, key, int(crew.totals[place]))
        report.recovered = view.pages_recovered
        found = kinds(view)
        report.pages = {
            kind: int((found == number).sum()) for number, kind in enumerate(("free", "init", "open", "sealed"))
        }
        try:
            check_nothing_leaked(view)
            report.rows_at_end = check_proving_rows(view)
            check_each_row_is_drawn_from_one_page(view)
            check_every_page_can_be_claimed(view)
        except AssertionError as error:
            report.failures.append(str(error))
    return report


def main() -> None:
    """Run as a program: prints the report as JSON; the exit status tells whether everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default=f"torture-{os.getpid()}", help="engine name")
    arguments = parser.parse_args()
    report = run(arguments.name, arguments.seconds, arguments.seed)
    print(json.dumps(asdict(report)))
    sys.exit(bool(report.failures or report.torn_after))


if __name__ == "__main__":
    main()
