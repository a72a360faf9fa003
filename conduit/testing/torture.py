"""Processes that write, read and lease one small table while a driver kills them at random, again and again.

    python -m conduit.testing.torture --seconds 60 --seed 7

Every role attaches afresh, works until it dies, and is replaced. Writers use each form of writing; readers check every
value of every row that validation let pass; lease holders look three times at pages that must not change. The driver also
stops processes for a while: a stopped one must be neither robbed nor waited for. Since everybody recovers what dead ones
left, recoverers die in the middle of it as well. In the end the table must be whole.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import conduit
from conduit.errors import Overwritten
from conduit.native.compile.declare import declared
from conduit.native.jit import entry
from conduit.plane.client import Client
from conduit.plane.deliver.loader import Loader
from conduit.plane.engine import Engine
from conduit.store.format.table_spec import Table
from conduit.testing import optimism, rows
from conduit.testing.invariants import (
    check_each_row_is_drawn_from_one_page,
    check_every_page_can_be_claimed,
    check_nothing_leaked,
    check_proving_rows,
    kinds,
)

Array = np.ndarray[Any, Any]

WRITTEN, TORN_BEFORE, TORN_AFTER, VALID, OVERWRITTEN, DELIVERED, REDRAWN, LEASES, LEASED_ROWS = range(9)
"""Words of a process's statistics; four of them lie as optimism.gather_and_look fills them."""
_STATISTICS = 16

_PAGES, _PAGE_ROWS = 24, 40
_ENVS = 4
_BATCH = 64
_PAUSE = 0.0004


def small_table() -> Table:
    """A table that is overwritten many times a second; its halo is 3 ticks."""
    return Table(rows.SCHEMA, capacity=(_PAGES - 1) * _PAGE_ROWS, page_rows=_PAGE_ROWS, max_stack=2, max_n_step=2)


class _Step:
    """Values of one step, made by the compiled functions of `rows`."""

    def __init__(self) -> None:
        self.obs = np.zeros(rows.WORDS, np.int64)
        self.final = np.zeros(rows.WORDS, np.int64)
        self._write = entry(rows.write_observation)
        self._action, self._reward = entry(rows.action_of), entry(rows.reward_of)
        self._addresses = self.obs.ctypes.data, self.final.ctypes.data

    def make(self, environment: int, number: int) -> tuple[int, float, int]:
        """Fill `obs`, and `final` where the step ends its episode; returns action, reward and the end (0, 1, 2)."""
        end = self._write(self._addresses[0], environment, number)
        if end:
            self._write(self._addresses[1], environment, -1 - number)
        return self._action(environment, number), self._reward(environment, number), end


def append_steps(client: Client, statistics: Array, life: int) -> None:
    """Single steps of one environment by `append`, final observations handed over."""
    writer = client.writer("replay")
    step = _Step()
    for number in range(1 << 62):
        action, reward, end = step.make(life * _ENVS, number)
        writer.append(
            obs=step.obs,
            action=action,
            reward=reward,
            terminated=end == 1,
            truncated=end == 2,
            final=step.final if end else None,
        )
        statistics[WRITTEN] += 1


def bare_steps(client: Client, statistics: Array, life: int) -> None:
    """Single steps by the unchecked handle: stores into the page, then a commit."""
    step = _Step()
    with client.writer("replay").unchecked() as unchecked:
        obs, actions, rewards, commit = unchecked.obs, unchecked.action, unchecked.reward, unchecked.commit
        terminated, truncated = unchecked.terminated, unchecked.truncated
        row = unchecked.row
        for number in range(1 << 62):
            action, reward, end = step.make(life * _ENVS, number)
            obs[row, : rows.WORDS // 2] = step.obs[: rows.WORDS // 2]
            obs[row, rows.WORDS // 2 :] = step.obs[rows.WORDS // 2 :]
            actions[row] = action
            rewards[row] = reward
            if end:
                (terminated if end == 1 else truncated)[row] = True
                unchecked.set_final(step.final)
            row = commit()
            if row >= unchecked.rows:
                row = unchecked.row
            statistics[WRITTEN] += 1


def append_ticks(client: Client, statistics: Array, life: int) -> None:
    """Four environments per `append`, final observations in the row after the end."""
    writer = client.writer("replay", num_envs=_ENVS, autoreset="next_step")
    obs = np.zeros((_ENVS, rows.WORDS), np.int64)
    action, reward = np.zeros(_ENVS, np.int64), np.zeros(_ENVS)
    ends = np.zeros((2, _ENVS), bool)
    write = entry(rows.write_ticks)
    addresses = [array.ctypes.data for array in (obs, action, reward, ends[0], ends[1])]
    for number in range(1 << 62):
        write(*addresses, life * _ENVS, _ENVS, number, 1)
        writer.append(obs=obs, action=action, reward=reward, terminated=ends[0], truncated=ends[1])
        statistics[WRITTEN] += _ENVS


def roll_out(client: Client, statistics: Array, life: int) -> None:
    """Rollouts of 12 ticks of 2 environments, filled in place by compiled code; every fifth is aborted first."""
    writer = client.writer("replay", num_envs=2, autoreset="next_step")
    write = entry(rows.write_ticks)
    number = 0
    for count in range(1 << 62):
        rollout = writer.rollout(12)
        views = (rollout.obs, rollout.action, rollout.reward, rollout.terminated, rollout.truncated)
        write(*(view.ctypes.data for view in views), life * _ENVS, 2, number, 12)
        if count % 5 == 0:
            rollout.abort()
            continue
        rollout.commit()
        number += 12
        statistics[WRITTEN] += 24


def _wait_for_rows(loader: Loader, timeout: float = 20.0) -> None:
    loader.next(timeout=timeout).release()


def read_in_parts(client: Client, statistics: Array, life: int) -> None:
    """Draw, let writers overwrite what was drawn, gather, look for torn rows, validate, look again."""
    loader = client.loader("replay", batch_size=_BATCH, seed=life, format="numpy")
    _wait_for_rows(loader)
    buffer = loader._ring.buffers[0]
    torn = np.zeros(_BATCH, np.uint8)
    arrays = [buffer.arrays[name] for name in ("obs", "next_obs", "action", "reward")]
    arguments = [array.ctypes.data for array in (*arrays, torn, statistics[TORN_BEFORE:])]
    draw, gather_and_look = entry(optimism.draw), entry(optimism.gather_and_look)
    for number in range(1 << 62):
        loader.sampler.batch = number
        if draw(buffer.job_address) < 0:
            time.sleep(_PAUSE)
            continue
        if number % 2:
            time.sleep(_PAUSE)
        gather_and_look(buffer.job_address, *arguments)


def load_batches(client: Client, statistics: Array, life: int) -> None:
    """Batches of a loader, as users get them."""
    loader = client.loader("replay", batch_size=_BATCH, seed=life, format="numpy", timeout=20.0)
    torn = np.zeros(_BATCH, np.uint8)
    find = entry(rows.find_torn_transitions)
    names = ("obs", "next_obs", "action", "reward", "terminated", "truncated")
    for batch in loader:
        statistics[TORN_AFTER] += find(*(batch[name].ctypes.data for name in names), _BATCH, torn.ctypes.data)
        statistics[DELIVERED] += _BATCH
        statistics[REDRAWN] = loader.stats.redrawn


def hold_leases(client: Client, statistics: Array, life: int) -> None:
    """Hold pages and see three times that nothing in them changes."""
    view = client._views["replay"]
    chance = random.Random(life)
    find = entry(rows.find_torn_rows)
    names = ("obs", "action", "reward", "terminated", "truncated")
    torn = np.zeros(_PAGE_ROWS, np.uint8)
    while True:
        try:
            lease = view.lease(chance.randrange(view.layout.pages))
        except Overwritten:
            time.sleep(_PAUSE)
            continue
        with lease:
            columns = [lease.column(name) for name in names]
            first = columns[0].copy()
            for _ in range(3):
                addresses = (column.ctypes.data for column in columns)
                statistics[TORN_AFTER] += find(*addresses, lease.rows, torn.ctypes.data)
                statistics[TORN_AFTER] += int((columns[0] != first).any(axis=1).sum())
                statistics[LEASED_ROWS] += lease.rows
                time.sleep(_PAUSE)
        statistics[LEASES] += 1


ROLES: tuple[Callable[[Client, Array, int], None], ...] = (
    append_steps,
    bare_steps,
    append_ticks,
    roll_out,
    read_in_parts,
    load_batches,
    hold_leases,
)


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
        self._statistics = np.frombuffer(self._shared, np.int64).reshape(-1, _STATISTICS)[: len(ROLES)]
        self._pids = [0] * len(ROLES)
        self._lives = seed * 1_000_000
        self.totals = np.zeros(_STATISTICS, np.int64)
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
        step = _Step()
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
