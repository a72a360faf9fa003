"""Every case on every library, interleaved: what `make benchmarks` runs.

A case is opened by all of them, what they hand out is compared with what was written, and only then are bursts timed: one per
library and round, in an order that rotates, everybody else stopped. A burst's cost is the lesser of its wall time and its CPU
time (of all threads): what another job takes from it is not its own, and threads that work side by side are not added up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perf import machine
from perf.peers.cases import CASES, Case, Rows, shrunk
from perf.peers.driver import PEERS, Process, Refused, cold_start, compare, missing, turn_order
from perf.rooflines import memcpy

_LEAST_COPY = 1 << 20
_MOST_UNITS = 1 << 15
MEMORY_CASES = ("small-batch", "pixels-batch", "frames-batch", "tokens-batch")


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: Bursts per library and figure.
        burst: Seconds that a burst aims at.
        concurrent: Seconds that writers and learner run, per library and round.
        concurrent_rounds, cold_rounds: Rounds of these.
        pings: Steps whose way to another process is timed, per library and round.
        batches: Batches to compare before anything is timed.
        rows: Most rows of any table; None: as the case has it.
    """

    rounds: int = 9
    burst: float = 0.06
    concurrent: float = 2.0
    concurrent_rounds: int = 3
    cold_rounds: int = 3
    pings: int = 80
    batches: int = 4
    rows: int | None = None


@dataclass
class Suite:
    """One run.

    Attributes:
        venvs: Folder of the peers' environments.
        names: Who takes part, by name in `PEERS`.
        effort: How long.
        say: Told what is going on, line by line.
    """

    venvs: Path
    names: Sequence[str]
    effort: Effort = field(default_factory=Effort)
    say: Callable[[str], None] = print
    log: Path | None = None

    def run(self, cases: Iterable[str] = tuple(CASES), *, cold: bool = True) -> dict[str, Any]:
        """All figures, as data: see docs/benchmarks.md for what becomes of them."""
        begun = time.perf_counter()
        result: dict[str, Any] = {
            "machine": machine.describe(),
            "peers": {},
            "cases": {},
            "cold": {},
            "memory": {},
            "loads": [],
        }
        self._running: dict[str, Process] = {}
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [process.close() for process in self._running.values()])
            for name in self.names:
                result["peers"][name] = self._start(name)
            for name in cases:
                result["loads"].append(machine.describe()["load"])
                result["cases"][name] = self._case(CASES[name])
        if cold:
            result["cold"] = self._cold(result["peers"])
            result["memory"] = self.memory(result["peers"])
        result["seconds"] = round(time.perf_counter() - begun)
        return result

    def _start(self, name: str) -> dict[str, Any]:
        peer = PEERS[name]
        facts: dict[str, Any] = {"note": peer.note, "roofline": peer.roofline}
        why = missing(peer, self.venvs)
        if why is None:
            try:
                process = Process(peer, self.venvs, self.log)
                self._running[name] = process
                with process.turn():
                    pass
                return facts | process.facts
            except Refused as error:
                why = str(error)
        self.say(f"{name}: {why}")
        return facts | {"missing": why}

    # -- a case

    def _case(self, case: Case) -> dict[str, Any]:
        if self.effort.rows is not None:
            case = shrunk(case, self.effort.rows)
        out: dict[str, Any] = {"title": case.title, "kind": case.kind, "workload": case.workload.name}
        out |= {"unit_rows": case.unit_rows, "unit_bytes": case.unit_bytes, "compared": {}}
        refused: dict[str, str] = {}
        rows: dict[int, Rows] = {}
        seed = int(np.random.default_rng().integers(1 << 31))
        ready: list[str] = []
        for name, process in list(self._running.items()):
            with process.turn():
                try:
                    self._open(process, case, seed, rows, out)
                    ready.append(name)
                except _Cannot as reason:
                    refused[name] = str(reason)
                except (Refused, AssertionError) as error:
                    refused[name] = f"refused: {' '.join(str(error).split())[:300]}"
                    self._close(name)
        rows.clear()
        if case.kind == "concurrent":
            out["figures"] = self._rates(case, ready, refused)
        elif case.kind == "visible":
            out["figures"] = self._visible(case, ready, refused)
        else:
            out["figures"] = {part: self._timed(case, part, ready, refused) for part in case.parts}
        for name in ready:
            self._close(name)
        for name, why in refused.items():
            if why.startswith("refused"):
                self.say(f"{case.name}, {name}: {why}")
        self.say(self._line(case, out["figures"]))
        return out

    def _open(self, process: Process, case: Case, seed: int, rows: dict[int, Rows], out: dict[str, Any]) -> None:
        why = process.ask("cannot", case=case.name)["why"]
        if why is not None:
            raise _Cannot(why)
        name = process.peer.name
        said = process.ask("open", case=case.name, seed=seed, rows=self.effort.rows)
        held = said["rows"]
        if held:
            out.setdefault("rows", {})[name] = held
        if case.kind in ("write", "concurrent", "visible"):
            return
        if held not in rows:
            rows[held] = Rows.of(case, seed, held)
        assert rows[held].digest == said["digest"], "its process made other rows from the same seed"
        batches = process.ask("check", batches=self.effort.batches)["arrays"]
        out["compared"][name] = compare(case, rows[held], batches)

    def _close(self, name: str) -> None:
        process = self._running[name]
        try:
            with process.turn():
                process.ask("close")
        except Refused as error:
            self.say(f"{name}: {error}; started again")
            process.close()
            del self._running[name]
            self._start(name)

    def _timed(self, case: Case, part: str, ready: list[str], refused: dict[str, str]) -> dict[str, Any]:
        units = {}
        for name in list(ready):
            try:
                units[name] = self._units(name, part)
            except Refused as error:
                refused[name] = f"refused: {error}"
                ready.remove(name)
                self._close(name)
        size = max(case.unit_bytes, _LEAST_COPY)
        copy = memcpy(size)
        copies = max(1, int(2e-3 / (size / 5e9)))
        bursts: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
        roofline = []
        for number in range(self.effort.rounds):
            for name in turn_order(number, list(bursts)):
                with self._running[name].turn() as process:
                    said = process.ask("time", what=part, units=units[name])
                bursts[name].append({"wall_ns": said["wall_ns"], "cpu_ns": said["cpu_ns"]})
            before = time.thread_time_ns()
            for _ in range(copies):
                copy.run()
            roofline.append((time.thread_time_ns() - before) / copies * case.unit_bytes / size)
        figures: dict[str, Any] = {
            name: {key: [round(one[key], 1) for one in rounds] for key in ("wall_ns", "cpu_ns")}
            for name, rounds in bursts.items()
        }
        figures = {name: {"ns": np.minimum(f["wall_ns"], f["cpu_ns"]).tolist(), **f} for name, f in figures.items()}
        figures["memcpy"] = {"ns": [round(one, 2) for one in roofline]}
        return figures | {name: {"cannot": why} for name, why in refused.items()}

    def _units(self, name: str, part: str) -> int:
        """How many units make a burst of the length asked for; the first tries also warm up."""
        units = 1
        with self._running[name].turn() as process:
            for _ in range(8):
                said = process.ask("time", what=part, units=units)
                cost = min(said["wall_ns"], said["cpu_ns"]) or said["wall_ns"]
                wanted = min(_MOST_UNITS, max(1, int(self.effort.burst * 1e9 / max(cost, 1.0))))
                if wanted <= 2 * units:
                    return wanted
                units = min(wanted, units * 16)
        return units

    def _rates(self, case: Case, ready: list[str], refused: dict[str, str]) -> dict[str, Any]:
        rates: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
        for number in range(self.effort.concurrent_rounds):
            for name in turn_order(number, list(ready)):
                try:
                    with self._running[name].turn() as process:
                        rates[name].append(process.ask("concurrent", seconds=self.effort.concurrent))
                        # a fresh buffer for the next round: writers that were killed may have left it half-way
                        process.ask("close")
                        process.ask("open", case=case.name, seed=number, rows=self.effort.rows)
                except Refused as error:
                    refused[name] = f"refused: {error}"
                    ready.remove(name)
                    rates.pop(name)
                    self._close(name)
        parts = {"rows in": "in_per_s", "rows out": "out_per_s"}
        return {
            part: {
                name: {"ns": [1e9 / max(one[key], 1e-3) for one in rounds]} for name, rounds in rates.items() if rounds
            }
            | {name: {"cannot": why} for name, why in refused.items()}
            for part, key in parts.items()
        }

    def _visible(self, case: Case, ready: list[str], refused: dict[str, str]) -> dict[str, Any]:
        times: dict[str, list[int]] = {name: [] for name in ready}
        for number in range(self.effort.concurrent_rounds):
            for name in turn_order(number, list(ready)):
                try:
                    with self._running[name].turn() as process:
                        times[name] += process.ask("visible", count=self.effort.pings)["ns"]
                        process.ask("close")
                        process.ask("open", case=case.name, seed=number, rows=self.effort.rows)
                except Refused as error:
                    refused[name] = f"refused: {error}"
                    ready.remove(name)
                    times.pop(name)
                    self._close(name)
        figures: dict[str, Any] = {name: {"ns": found} for name, found in times.items()}
        return {"visible": figures | {name: {"cannot": why} for name, why in refused.items()}}

    def _cold(self, peers: Mapping[str, Any]) -> dict[str, Any]:
        there = [name for name in peers if "missing" not in peers[name]]
        found: dict[str, Any] = {name: [] for name in there}
        for number in range(self.effort.cold_rounds + 1):
            for name in turn_order(number, there):
                try:
                    found[name].append(cold_start(PEERS[name], self.venvs))
                except Refused as error:
                    found[name].append({"failed": str(error)})
        self.say("cold starts")
        return {name: rounds[1:] for name, rounds in found.items()}

    def memory(self, peers: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """Bytes per row by case and library, each in a process of its own: none has memory left over from other cases."""
        found: dict[str, dict[str, float]] = {}
        for case in MEMORY_CASES:
            found[case] = {}
            for name in peers:
                if "missing" in peers[name]:
                    continue
                try:
                    with Process(PEERS[name], self.venvs, self.log) as process:
                        if process.ask("cannot", case=case)["why"] is None:
                            process.ask("open", case=case, seed=1, rows=1 << 11)  # loads and compiles what it needs
                            process.ask("close")
                            said = process.ask("open", case=case, seed=1, rows=self.effort.rows)
                            found[case][name] = said["bytes"] / said["rows"]
                except Refused as error:
                    self.say(f"memory, {case}, {name}: {error}")
            self.say(f"memory, {case}: " + ", ".join(f"{n} {v:,.0f}" for n, v in found[case].items()))
        return found

    @staticmethod
    def _line(case: Case, figures: Mapping[str, Any]) -> str:
        parts = []
        for part, of in figures.items():
            costs = {name: float(np.median(f["ns"])) for name, f in of.items() if "ns" in f and name != "memcpy"}
            order = sorted(costs, key=lambda name: costs[name])
            parts.append(f"{part}: " + ", ".join(f"{name} {costs[name] / 1e3:.3g}" for name in order) + " us")
        return f"{case.name}: " + "; ".join(parts)


class _Cannot(Exception):
    """A library says that it cannot do a case."""


def names(only: Iterable[str] = ()) -> Iterator[str]:
    """Names of those who take part: all, or Conduit and those given."""
    wanted = set(only)
    unknown = wanted - PEERS.keys()
    if unknown:
        raise SystemExit(f"expected peers of {', '.join(PEERS)}; got {', '.join(sorted(unknown))}")
    for name in PEERS:
        if not wanted or name in wanted or name == "conduit":
            yield name
