"""The record of a run: samples over time for the display and the plot, and the result."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from conduit.demo.settings import ENVIRONMENT, SOLVED_AT

_RATE_WINDOW = 2.0
_RECENT = 40


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters at one moment.

    Attributes:
        seconds: Since the run began.
        rows: Environment steps reported by actors.
        updates: Gradient steps, one batch each.
        waited: Seconds that the learner waited for experience, after its first update.
        delivering: Seconds that it spent in `loader.next()`, without waits.
    """

    seconds: float
    rows: int
    updates: int
    waited: float
    delivering: float


@dataclass(frozen=True, slots=True)
class Scored:
    """An episode's return, or an evaluation's mean return, and when it was.

    Attributes:
        seconds: Since the run began.
        rows: Environment steps until then.
        score: The return.
    """

    seconds: float
    rows: int
    score: float


@dataclass(slots=True)
class History:
    """Everything that happened, in order.

    Attributes:
        samples: The counters, a few times a second.
        episodes: Episodes that actors finished, exploration included.
        evaluations: Greedy evaluations.
        restarts: Seconds at which an actor was started again.
        trained_from: Seconds at which the first update began, or None.
    """

    samples: list[Sample] = field(default_factory=list)
    episodes: list[Scored] = field(default_factory=list)
    evaluations: list[Scored] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    trained_from: float | None = None
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def finish_episode(self, seconds: float, rows: int, score: float) -> None:
        """Add an episode of an actor."""
        self.episodes.append(Scored(seconds, rows, score))
        self._recent.append(score)

    @property
    def recent_return(self) -> float | None:
        """Mean return of the last few episodes of the actors, or None before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    def rates(self) -> tuple[float, float]:
        """Rows and batches per second, lately."""
        if len(self.samples) < 2:
            return 0.0, 0.0
        last = self.samples[-1]
        first = next(
            one for one in self.samples if last.seconds - one.seconds <= _RATE_WINDOW or one is self.samples[-2]
        )
        span = max(last.seconds - first.seconds, 1e-9)
        return (last.rows - first.rows) / span, (last.updates - first.updates) / span

    def waited_share(self) -> float:
        """The part of the learner's time since its first update that it waited for experience, 0 to 1."""
        if self.trained_from is None or not self.samples:
            return 0.0
        last = self.samples[-1]
        return last.waited / max(last.seconds - self.trained_from, 1e-9)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """How a run went.

    Attributes:
        solved: An evaluation reached the bar and a second one with other starts confirmed it.
        interrupted: Ctrl-C or a signal ended it.
        seed: Of the run. Processes race, so the same seed gives similar runs, not equal ones.
        evaluation: Mean return of the last evaluation, or None when there was none.
        best_evaluation: The highest one.
        seconds: From the call to the end of training.
        startup_seconds: The part of them before the first update: imports, processes, warm-up.
        rows: Environment steps.
        episodes: Episodes that actors finished.
        updates: Gradient steps.
        versions: Versions of the weights published.
        rows_per_s, batches_per_s: Over the time since the first update, evaluations included.
        waited_share: Part of that time that the learner waited for experience, 0 to 1.
        batch_microseconds: Mean time of a `loader.next()`, or None without one.
        restarts: Actors that died and were started again.
        plot: Path of the picture, or None.
    """

    solved: bool
    interrupted: bool
    seed: int
    evaluation: float | None
    best_evaluation: float | None
    seconds: float
    startup_seconds: float
    rows: int
    episodes: int
    updates: int
    versions: int
    rows_per_s: float
    batches_per_s: float
    waited_share: float
    batch_microseconds: float | None
    restarts: int
    plot: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The attributes by name, for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """One JSON object, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @property
    def verdict(self) -> str:
        """A few lines for people."""
        if self.solved:
            head = f"{ENVIRONMENT} solved in {self.seconds:.0f} s: mean return {self.evaluation:.1f} over a fresh evaluation"
        elif self.interrupted:
            head = f"Interrupted after {self.seconds:.0f} s"
        else:
            head = f"{ENVIRONMENT} not solved within {self.seconds:.0f} s: the bar is a mean return of {SOLVED_AT:.0f}"
        if not self.solved:
            head += (
                "; no evaluation yet" if self.evaluation is None else f"; the last evaluation had {self.evaluation:.1f}"
            )
        lines = [
            head + ".",
            f"{self.rows:,} environment steps, {self.episodes:,} episodes, {self.updates:,} updates, {self.versions:,} versions "
            f"of the weights; {self.startup_seconds:.1f} s of it was start-up and warm-up.",
        ]
        if self.batch_microseconds is not None:
            lines.append(
                f"{self.rows_per_s:,.0f} rows/s in, {self.batches_per_s:,.0f} batches/s out, "
                f"{self.batch_microseconds:.0f} us per batch; the learner waited for experience {self.waited_share:.1%} of the time."
            )
        if self.restarts:
            lines.append(
                f"{self.restarts} actor{'s' * (self.restarts > 1)} died and {'were' if self.restarts > 1 else 'was'} restarted."
            )
        if self.plot is not None:
            lines.append(f"Plot: {self.plot}")
        return "\n".join(lines)
