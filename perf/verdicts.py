"""The verdict on a run's figures: Conduit against the best peer of each row, and the row's goal (its bar)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from perf.measure import Spread
from perf.peers.cases import CASES

BARS: Mapping[str, float] = {
    "write": 2.0,
    "small-batch": 2.5,
    "humanoid-batch": 1.8,
    "pixels-batch": 1.8,
    "frames-batch": 1.8,
    "concurrent": 5.0,
}
"""How many times as fast as the best peer, by name or kind of a case; elsewhere Conduit must be first."""
REVERB_BARS: Mapping[str, float] = {"write": 100.0, "small-batch": 100.0, "pixels-batch": 10.0}


REASONS: Mapping[tuple[str, str], str] = {
    (
        "write",
        "",
    ): "Both sides spend most of this row on copying bytes, which memcpy bounds. Conduit can only gain the copy of the next "
    "observation, which the others store as well: a factor of two at most.",
    (
        "small-batch",
        "",
    ): "Both wait for memory; Conduit also checks each row against being overwritten and reads its meta. Transitions of "
    "one step are resolved a chunk at a time.",
    (
        "concurrent",
        "",
    ): "In the same seconds Conduit's writers store several times as many rows, and use the processor for that: on two "
    "cores rows out get the time that rows in leave.",
    (
        "write",
        "reverb",
    ): "The row is 28 KB. Copying it from memory to memory alone took 1.2 to 1.5 microseconds on this machine (measured apart), "
    "which limits the factor to 70 to 90. Tried: stores past the caches, which made 64 steps a call a fifth shorter; a "
    "single step gained nothing from them.",
    ("small-batch", "reverb"): "Reverb's table holds fewer rows here, and its threads make batches ahead of time.",
    (
        "pixels-batch",
        "",
    ): "Both write 58 MB of float32 a batch, which memory bounds: a loop that only stores zeros past the caches, and reads "
    "nothing, took 1.34 ms on this machine (measured apart), 1.7 times as fast as that library. Tried: such stores, which "
    "Conduit makes already; two threads, which store no faster than one.",
    (
        "pixels-batch",
        "reverb",
    ): "Conduit delivers these bytes faster than memcpy copies them, and Reverb's threads, which work in parallel, at more than a "
    "tenth of memcpy's speed. So a factor of ten is not possible. Tried: stores past the caches, which Conduit uses; narrower "
    "output, which would be a different row.",
    (
        "visible",
        "",
    ): "The scheduler takes most of this time: it has to wake the writer beside a learner that never sleeps.",
}
"""The reason why a row misses its bar, by name or kind of its case, and "reverb" for the rows about it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row.

    Attributes:
        case, kind, part, title: Which.
        ours: Conduit's cost of a unit in nanoseconds.
        rows_per_s: Conduit's rows per second; of "visible" the unit is one step.
        against: The best peer, or Reverb in rows about it; None where no peer can do it.
        ratio: How many times as fast as that peer, paired by round.
        bar: What the ratio must reach.
        share: Conduit's bytes per second as a share of a memcpy's in the same rounds; None where that means nothing.
        roofline: How many times as fast as the plain numpy ring; None where that cannot do it.
        beside: The fastest peer that is left out, since it keeps the caller's arrays and copies nothing, and how many times as fast
            Conduit is as that one.
    """

    case: str
    kind: str
    part: str
    title: str
    ours: Spread
    rows_per_s: float
    against: str | None
    ratio: Spread | None
    bar: float
    share: Spread | None
    roofline: Spread | None
    beside: tuple[str, Spread] | None = None

    @property
    def ok(self) -> bool:
        """Whether the bar is reached; a row that no peer can do is."""
        return self.ratio is None or self.ratio.median >= self.bar

    @property
    def reason(self) -> str:
        """Why it is short, where that is known."""
        about = "reverb" if self.against == "reverb" and self.bar >= 10 else ""
        return REASONS.get((self.case, about), REASONS.get((self.kind, about), ""))

    @property
    def first(self) -> bool:
        """Whether Conduit is faster than every peer."""
        return self.ratio is None or self.ratio.median >= 1.0


def costs(figures: Mapping[str, Any], name: str) -> np.ndarray | None:
    """Nanoseconds per unit by round; None where there are none."""
    found = figures.get(name, {})
    return np.asarray(found["ns"], np.float64) if found.get("ns") else None


def least_bytes(case: str) -> int:
    """Bytes of a row as it comes; who grows by less has kept the caller's arrays. Token rows may be compressed."""
    return 0 if CASES[case].kind == "tokens" else CASES[case].workload.row_bytes


def keepers(result: Mapping[str, Any], workload: str) -> set[str]:
    """The libraries that store rows of a workload by keeping the caller's arrays: their memory did not grow by a row's bytes."""
    return {
        name
        for case, held in result["memory"].items()
        if CASES[case].workload.name == workload
        for name, grown in held.items()
        if grown < least_bytes(case)
    }


def _ratio(theirs: np.ndarray | None, ours: np.ndarray, *, paired: bool) -> Spread | None:
    if theirs is None:
        return None
    if not paired:  # single events of another process have no rounds in common
        middle = float(np.median(theirs) / np.median(ours))
        low, high = (float(np.percentile(theirs, q) / np.median(ours)) for q in (25, 75))
        return Spread(middle, low, high, low, min(len(theirs), len(ours)))
    count = min(len(theirs), len(ours))
    return Spread.of(theirs[:count] / ours[:count])


def _beside(name: str | None, there: Mapping[str, np.ndarray], ours: np.ndarray) -> tuple[str, Spread] | None:
    ratio = None if name is None else _ratio(there[name], ours, paired=True)
    return None if name is None or ratio is None else (name, ratio)


def verdicts(result: Mapping[str, Any]) -> Iterator[Verdict]:
    """The rows of a run, then those about Reverb."""
    peers = [name for name, facts in result["peers"].items() if name != "conduit" and not facts["roofline"]]
    about_reverb = []
    for case, data in result["cases"].items():
        kind = data["kind"]
        for part, figures in data["figures"].items():
            ours = costs(figures, "conduit")
            if ours is None:
                continue
            there = {name: found for name in peers if (found := costs(figures, name)) is not None}
            # a write is held against those that write
            kept = keepers(result, data["workload"]) if kind == "write" else set()
            ranked = sorted(there, key=lambda name: float(np.median(there[name])))
            best = next((name for name in ranked if name not in kept), None)
            beside = next((name for name in ranked if name in kept), None)
            paired = kind != "visible"
            memcpy = costs(figures, "memcpy")
            single = kind in ("concurrent", "visible")
            unit_rows = 1 if single else data["unit_rows"]
            title = data["title"] if len(data["figures"]) == 1 else f"{data['title']}: {part}"
            spread = Spread.of(ours)

            def row(name: str | None, bar: float) -> Verdict:
                return Verdict(
                    case,  # noqa: B023 -- called before the next turn of the loop
                    kind,  # noqa: B023
                    part,  # noqa: B023
                    title,  # noqa: B023
                    spread,  # noqa: B023
                    unit_rows / spread.median * 1e9,  # noqa: B023
                    name,
                    _ratio(there[name], ours, paired=paired) if name else None,  # noqa: B023
                    bar,
                    None if memcpy is None or part == "update" else Spread.of(memcpy / ours),  # noqa: B023
                    _ratio(costs(figures, "numpy"), ours, paired=paired),  # noqa: B023
                    _beside(beside, there, ours) if name == best else None,  # noqa: B023
                )

            yield row(best, BARS.get(case, BARS.get(kind, 1.0)))
            reverb_bar = REVERB_BARS.get(case, REVERB_BARS.get(kind))
            if reverb_bar is not None and "reverb" in there:
                about_reverb.append(row("reverb", reverb_bar))
    yield from about_reverb
