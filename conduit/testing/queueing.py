"""Exactly-once delivery under random SIGKILL: producers and consumers of queues are killed and replaced, and every row is accounted for.

`python -m conduit.testing.queueing --seconds 60 --seed 1` prints a report as JSON; the exit status says whether all checks held.

Rows can be checked (conduit.testing.rows) and are numbered by tick, so a claim shows which ticks of which stream it has. A consumer records
a claim before it acknowledges it, and records the acknowledgement afterwards, in memory that outlives the consumer. If the consumer is
killed in between, it is unknown whether the claim was acknowledged: its rows must either come again or be done, never both. Producers
record how many ticks they have committed. In the end, each of these ticks was acknowledged exactly once.
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
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import conduit
from conduit.native.compile.declare import declared
from conduit.native.jit import entry
from conduit.plane.client import Client
from conduit.plane.deliver.claim import Claim
from conduit.plane.engine import Engine
from conduit.store.format.table_spec import Table
from conduit.testing import rows
from conduit.testing.invariants import check_every_page_can_be_claimed, check_nothing_leaked

Array = np.ndarray[Any, Any]

TABLES = ("rollouts", "rows")
_ENVS, _TICKS = 2, 6
_LIVES = 1 << 16
_RECORDS = 1 << 16
DELIVERED, ACKNOWLEDGED, GIVEN_BACK = 1, 2, 3
RECORD_TABLE, RECORD_STREAM, RECORD_TICK, RECORD_TICKS, RECORD_PHASE, RECORD_AT, RECORD_ENDED, RECORD_BAD = range(8)
"""A record: table, stream, first tick, ticks, phase, when it was delivered, when it ended, rows that were not as written."""


def tables() -> dict[str, Table]:
    """Two small queues, of rollouts and of rows, that are full most of the time."""
    common = {"page_rows": 40, "kind": "queue", "num_envs": _ENVS}
    return {
        "rollouts": Table(rows.SCHEMA, capacity=160, rollout_length=_TICKS, **common),  # type: ignore[arg-type]
        "rows": Table(rows.SCHEMA, capacity=240, **common),  # type: ignore[arg-type]
    }


class _Shared:
    """What processes tell the driver, in memory that outlives them.

    Attributes:
        written: Committed ticks of each life of a producer, int64 [lives].
        streams: Table and stream + 1 of each such life, int64 [lives, 2].
        counts: Records of each consumer's place, int64 [places].
        records: int64 [places, records, 8].
    """

    def __init__(self, places: int) -> None:
        self.written = self._array((_LIVES,))
        self.streams = self._array((_LIVES, 2))
        self.counts = self._array((places,))
        self.records = self._array((places, _RECORDS, 8))

    @staticmethod
    def _array(shape: tuple[int, ...]) -> Array:
        return np.frombuffer(mmap.mmap(-1, 8 * int(np.prod(shape))), np.int64).reshape(shape)


def _ticks(environment: int) -> Callable[[Array, Array, Array, Array, int, int], int]:
    write = entry(rows.write_ticks)

    def fill(obs: Array, action: Array, reward: Array, ends: Array, number: int, ticks: int) -> int:
        addresses = [array.ctypes.data for array in (obs, action, reward, ends[0], ends[1])]
        return write(*addresses, environment, _ENVS, number, ticks)

    return fill


def _begin(client: Client, shared: _Shared, life: int, place: int) -> conduit.Writer:
    writer = client.writer(TABLES[place], num_envs=_ENVS, autoreset="next_step", timeout=30.0)
    shared.streams[life] = place, writer.stream + 1
    return writer


def append_rollouts(client: Client, shared: _Shared, life: int, _place: int) -> None:
    """Tick after tick; every third rollout is followed by its observations, and some end early."""
    writer = _begin(client, shared, life, 0)
    obs, action, reward = np.zeros((_ENVS, rows.WORDS), np.int64), np.zeros(_ENVS, np.int64), np.zeros(_ENVS)
    ends, behind = np.zeros((2, _ENVS), bool), np.zeros((_ENVS, rows.WORDS), np.int64)
    fill, write = _ticks(life * _ENVS), entry(rows.write_observation)
    for number in range(1 << 62):
        fill(obs, action, reward, ends, number, 1)
        bootstrap = None
        if (writer.ticks_left == 1 and number % 3) or number % 50 == 7:
            for env in range(_ENVS):
                write(behind[env].ctypes.data, life * _ENVS + env, number + 1)
            bootstrap = behind
        writer.append(obs=obs, action=action, reward=reward, terminated=ends[0], truncated=ends[1], bootstrap=bootstrap)
        shared.written[life] = number + 1


def roll_out(client: Client, shared: _Shared, life: int, _place: int) -> None:
    """Whole rollouts in place; every fifth is aborted first."""
    writer = _begin(client, shared, life, 0)
    fill = _ticks(life * _ENVS)
    number = 0
    for count in range(1 << 62):
        rollout = writer.rollout(_TICKS)
        ends = [rollout.terminated, rollout.truncated]
        fill(rollout.obs, rollout.action, rollout.reward, ends, number, _TICKS)  # type: ignore[arg-type]
        if count % 5 == 0:
            rollout.abort()
            continue
        rollout.commit()
        number += _TICKS
        shared.written[life] = number


def append_rows(client: Client, shared: _Shared, life: int, _place: int) -> None:
    """Tick after tick into the queue of rows, with a pause now and then, so that consumers come to its end."""
    writer = _begin(client, shared, life, 1)
    obs, action, reward = np.zeros((_ENVS, rows.WORDS), np.int64), np.zeros(_ENVS, np.int64), np.zeros(_ENVS)
    ends = np.zeros((2, _ENVS), bool)
    fill = _ticks(life * _ENVS)
    for number in range(1 << 62):
        fill(obs, action, reward, ends, number, 1)
        writer.append(obs=obs, action=action, reward=reward, terminated=ends[0], truncated=ends[1])
        shared.written[life] = number + 1
        if number % 200 == 0:
            time.sleep(0.001)


def check_claim(claim: Claim) -> int:
    """Rows of a claim that are not what their writer wrote there, and observations behind it that are not the next ones."""
    obs, action, reward = claim["obs"], claim["action"], claim["reward"]
    count = claim.ticks * claim.num_envs
    torn = np.zeros(count, np.uint8)
    addresses = [a.ctypes.data for a in (obs, action, reward, claim["terminated"], claim["truncated"])]
    bad = entry(rows.find_torn_rows)(*addresses, count, torn.ctypes.data)
    numbers = claim.first_tick + np.arange(claim.ticks)
    bad += int((obs[:, :, 1] != numbers[:, None]).sum())
    behind = claim.bootstrap
    if behind is not None:
        bad += int((behind["obs"][:, 1] != claim.first_tick + claim.ticks).sum())
        bad += int((behind["obs"][:, 0] != obs[0, :, 0]).sum())
    return bad


def consume(client: Client, shared: _Shared, life: int, place: int) -> None:
    """Claim, check, and acknowledge at once, late, or not at all; some arrays are kept and looked at again."""
    chance = random.Random(life)
    table = place % 2
    records, counts = shared.records[place], shared.counts
    consumer = client.consumer(TABLES[table], format="numpy", timeout=30.0)
    kept: list[tuple[Array, Array, Array]] = []
    while True:
        claim = consumer.next(max_ticks=chance.choice((None, 1, 5)) if table == 1 else None)
        record = records[counts[place]]
        record[:RECORD_PHASE] = table, claim.stream, claim.first_tick, claim.ticks
        record[RECORD_AT] = time.monotonic_ns()
        record[RECORD_BAD] = check_claim(claim)
        record[RECORD_PHASE] = DELIVERED
        counts[place] += 1
        way = chance.random()
        if way < 0.2:
            time.sleep(0.002 * chance.random())
        if way > 0.9:
            claim.give_back()
            record[RECORD_PHASE] = GIVEN_BACK
            continue
        if way > 0.6:
            kept.append((claim["obs"], claim["obs"].copy(), record))
        claim.ack()
        record[RECORD_ENDED] = time.monotonic_ns()
        record[RECORD_PHASE] = ACKNOWLEDGED
        del claim
        if len(kept) > 3:
            array, copy, where = kept.pop(0)
            where[RECORD_BAD] += int((array != copy).sum())


PRODUCERS: tuple[Callable[[Client, _Shared, int, int], None], ...] = (append_rollouts, roll_out, append_rows)
CONSUMERS = (consume,) * 4
ROLES = (*CONSUMERS, *PRODUCERS)
"""By place; consumers first."""


@dataclass
class Report:
    """What a run did and found.

    Attributes:
        seed: Of the driver's choices.
        kills: {role: processes killed}.
        failures: What was wrong.
        written: Ticks that producers had committed for certain.
        acknowledged: Ticks acknowledged.
        open: Claims whose consumer was killed between delivery and the note of its end.
        open_and_done: Of these, claims that had been acknowledged as it turned out.
        again: Claims of dead consumers that were given back.
        claims: Claims delivered.
        drained: Ticks that were left in the end.
    """

    seed: int
    kills: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    written: int = 0
    acknowledged: int = 0
    open: int = 0
    open_and_done: int = 0
    again: int = 0
    claims: int = 0
    drained: int = 0


class _Crew:
    def __init__(self, name: str, seed: int) -> None:
        self._name, self._seed = name, seed
        self.shared = _Shared(len(CONSUMERS))
        self.records: list[Array] = []
        self.report = Report(seed)
        self._pids = [0] * len(ROLES)
        self._lives = 0
        for place in range(len(ROLES)):
            self._start(place)

    def _start(self, place: int) -> None:
        self._lives += 1
        self._pids[place] = os.fork()
        if self._pids[place] == 0:
            try:
                with conduit.attach(self._name) as client:
                    ROLES[place](client, self.shared, self._lives, place)
            except BaseException:
                print(traceback.format_exc(), file=sys.stderr, flush=True)
            os._exit(1)

    def _reap(self, place: int) -> None:
        os.kill(self._pids[place], signal.SIGKILL)
        _, status = os.waitpid(self._pids[place], 0)
        if os.WIFEXITED(status):
            self.report.failures.append(f"{ROLES[place].__name__} ended by itself")
        if place < len(CONSUMERS):
            self.records.append(self.shared.records[place, : self.shared.counts[place]].copy())
            self.shared.counts[place] = 0
            self.shared.records[place, :, RECORD_ENDED] = 0

    def kill_one(self, chance: random.Random) -> None:
        place = chance.randrange(len(ROLES))
        self._reap(place)
        name = ROLES[place].__name__
        self.report.kills[name] = self.report.kills.get(name, 0) + 1
        self._start(place)

    def end(self) -> None:
        for place in range(len(ROLES)):
            self._reap(place)


def _drain(engine: Engine, report: Report) -> Array:
    """Acknowledge what is left; returns its records."""
    found = []
    for number, table in enumerate(TABLES):
        consumer = engine.consumer(table, format="numpy")
        while (claim := consumer.poll()) is not None:
            bad = check_claim(claim)
            now = time.monotonic_ns()
            claim.ack()
            found.append((number, claim.stream, claim.first_tick, claim.ticks, ACKNOWLEDGED, now, now, bad))
            report.drained += claim.ticks
            del claim
    return np.array(found, np.int64).reshape(-1, 8)


def account(records: Array, written: dict[tuple[int, int], int], report: Report) -> None:
    """Hold the records against what was written; adds to the report's counts and failures."""
    report.claims = len(records)
    report.open = int((records[:, RECORD_PHASE] == DELIVERED).sum())
    for bad in records[records[:, RECORD_BAD] != 0]:
        report.failures.append(f"rows not as they were written: {bad.tolist()}")
    by_stream = defaultdict(list)
    for record in records.tolist():
        by_stream[record[RECORD_TABLE], record[RECORD_STREAM]].append(record)
    for key, own in by_stream.items():
        end = max(one[RECORD_TICK] + one[RECORD_TICKS] for one in own)
        done, done_at = np.zeros(end, np.int64), np.full(end, np.iinfo(np.int64).max)
        could_be = np.zeros(end, bool)
        for one in own:
            span = slice(one[RECORD_TICK], one[RECORD_TICK] + one[RECORD_TICKS])
            if one[RECORD_PHASE] == ACKNOWLEDGED:
                done[span] += 1
                done_at[span] = one[RECORD_ENDED]
        for one in own:
            span = slice(one[RECORD_TICK], one[RECORD_TICK] + one[RECORD_TICKS])
            if one[RECORD_PHASE] == ACKNOWLEDGED:
                continue
            if (one[RECORD_AT] > done_at[span]).any():
                report.failures.append(f"stream {key}: delivered after it was acknowledged: {one}")
            if one[RECORD_PHASE] == DELIVERED:
                could_be[span] = True
                report.open_and_done += bool((done[span] == 0).all())
        if (done > 1).any():
            report.failures.append(f"stream {key}: ticks {np.flatnonzero(done > 1).tolist()} acknowledged twice")
        sure = written.get(key, 0)
        lost = np.flatnonzero((done[:sure] == 0) & ~could_be[:sure])
        if len(lost) or sure > end:
            report.failures.append(f"stream {key}: {sure} ticks written, lost {lost.tolist()} and those from {end} on")
        if end > sure + _TICKS:
            report.failures.append(f"stream {key}: {sure} ticks written, {end} delivered")
        report.acknowledged += int((done == 1).sum())
    for key, sure in written.items():
        report.written += sure
        if sure and key not in by_stream:
            report.failures.append(f"stream {key}: none of its {sure} ticks was delivered")


def run(name: str, seconds: float, seed: int) -> Report:
    """Kill producers and consumers of queues of its own for a while.

    Args:
        name: Engine name.
        seconds: How long.
        seed: Of the driver's choices; the processes' timing is the machine's.
    """
    chance = random.Random(seed)
    with Engine.create(name, tables(), max_participants=len(ROLES) + 1) as engine:
        for one in list(declared):
            entry(one)
        crew = _Crew(name, seed)
        report = crew.report
        end = time.monotonic() + seconds
        while time.monotonic() < end and not report.failures:
            time.sleep(chance.random() * 0.04)
            crew.kill_one(chance)
        crew.end()
        engine.recover()
        records = np.concatenate([*crew.records, _drain(engine, report)])
        shared = crew.shared
        written = {
            (int(table), int(stream) - 1): int(count)
            for (table, stream), count in zip(shared.streams, shared.written, strict=True)
            if stream
        }
        account(records, written, report)
        for table in TABLES:
            view = engine._views[table]
            report.again += view.delivered_again
            try:
                check_nothing_leaked(view)
                check_every_page_can_be_claimed(view)
            except AssertionError as error:
                report.failures.append(f"{table}: {error}")
    return report


def main() -> None:
    """Run as a program: prints the report as JSON; the exit status tells whether everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default=f"queueing-{os.getpid()}", help="engine name")
    arguments = parser.parse_args()
    report = run(arguments.name, arguments.seconds, arguments.seed)
    print(json.dumps(asdict(report)))
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
