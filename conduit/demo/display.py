"""The display of a running demo: a live table on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TextIO

from conduit.demo.crew import ActorView
from conduit.demo.settings import ENVIRONMENT, SOLVED_AT

_LINES_EVERY = 2.0
_NOTES = 4
_MOST = 500.0
_BARS = "▁▂▃▄▅▆▇█"
_SPARKS = 40


@dataclass(frozen=True, slots=True)
class View:
    """The state of a run at one moment.

    Attributes:
        engine: Engine name.
        seed: Of the run.
        seconds, limit: Since the run began, and at most.
        training: Whether the first update has begun.
        rows, episodes, updates, version: Counts until now.
        rows_per_s, batches_per_s: Lately.
        batch_microseconds: Mean time of a `loader.next()`, or None before the first.
        waited_share: Part of the learner's time that it waited for experience, 0 to 1.
        recent_return: Mean return of the actors' last episodes, or None before the first.
        evaluations: Mean returns of the greedy evaluations.
        actors: The actors.
    """

    engine: str
    seed: int
    seconds: float
    limit: float
    training: bool
    rows: int
    episodes: int
    updates: int
    version: int
    rows_per_s: float
    batches_per_s: float
    batch_microseconds: float | None
    waited_share: float
    recent_return: float | None
    evaluations: Sequence[float]
    actors: tuple[ActorView, ...]


class Display(ABC):
    """Contract of a display: calls return soon and do not raise; `show` may be called often, and skips calls that come too soon.

    A context manager, active while the run is.
    """

    @abstractmethod
    def show(self, view: View) -> None:
        """The state changed."""

    @abstractmethod
    def note(self, text: str, detail: str = "") -> None:
        """Something happened that a person should know; the detail may have several lines."""

    @abstractmethod
    def close(self) -> None:
        """The run is over: leave what was shown last. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Silent(Display):
    """Shows nothing."""

    def show(self, view: View) -> None:
        """Nothing."""

    def note(self, text: str, detail: str = "") -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines(Display):
    """A line every two seconds, and one per event; for logs and pipes.

    Args:
        stream: Where to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next = 0.0

    def show(self, view: View) -> None:
        """Print a line if the last one is two seconds old."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LINES_EVERY
        self._print(_line(view))

    def note(self, text: str, detail: str = "") -> None:
        """Print it, its detail indented."""
        self._print("\n    ".join([f"! {text}", *detail.splitlines()]))

    def close(self) -> None:
        """Nothing: every line is out."""

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _line(view: View) -> str:
    head = f"{view.seconds:6.1f} s  {view.rows:>7,} steps"
    if not view.training:
        states = ", ".join(f"{actor.pid} {actor.state}" for actor in view.actors)
        return f"{head}  starting: actors {states}"
    returns = "" if view.recent_return is None else f"  return {view.recent_return:5.1f}"
    greedy = f"  greedy {view.evaluations[-1]:5.1f}" if view.evaluations else ""
    return (
        f"{head}  {view.rows_per_s:>6,.0f} rows/s  {view.batches_per_s:>6,.0f} batches/s"
        f"  waited {view.waited_share:5.1%}{returns}{greedy}"
    )


class Live(Display):
    """A table that stays in place, on a terminal.

    Args:
        console: A rich console.
    """

    def __init__(self, console: Any) -> None:
        from rich.live import Live as RichLive

        self._console = console
        # Refreshed by `show` alone: a thread that redraws would take the interpreter from the update.
        self._live = RichLive(console=console, auto_refresh=False)
        self._notes: deque[str] = deque(maxlen=_NOTES)

    def show(self, view: View) -> None:
        """Redraw."""
        self._live.update(self._panel(view), refresh=True)

    def note(self, text: str, detail: str = "") -> None:
        """Keep it below the table; the last few stay."""
        last = detail.strip().splitlines()[-1:]
        self._notes.append(": ".join([text, *last]))

    def _panel(self, view: View) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        counts = Table.grid(padding=(0, 2))
        counts.add_column(style="bold")
        for _ in range(2):
            counts.add_column(justify="right", min_width=16)
        counts.add_column()
        counts.add_row("in", f"{view.rows_per_s:,.0f} rows/s", f"{view.rows:,} steps", f"{view.episodes:,} episodes")
        counts.add_row(
            "out",
            f"{view.batches_per_s:,.0f} batches/s",
            f"{view.updates:,} updates",
            "" if view.batch_microseconds is None else f"{view.batch_microseconds:.0f} us to deliver a batch",
        )
        counts.add_row("waited", f"{view.waited_share:.1%}", "", "of the learner's time, for experience")
        recent = "-" if view.recent_return is None else f"{view.recent_return:.1f}"
        counts.add_row("return", recent, "", "recent episodes of the actors, who also explore")
        greedy = f"{view.evaluations[-1]:.1f}" if view.evaluations else "-"
        counts.add_row("greedy", greedy, "", Text(self._sparks(view.evaluations), style="cyan"))

        actors = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
        for name in ("actor", "pid", "", "version", "rows", "restarts"):
            actors.add_column(name, justify="left" if not name else "right")
        for one in view.actors:
            style = "" if one.state == "acting" else "yellow"
            cells = (one.index, one.pid, one.state, f"{one.version:,}", f"{one.rows:,}", one.restarts)
            actors.add_row(*(str(cell) for cell in cells), style=style)

        state = "" if view.training else "  starting"
        title = f"DQN on {ENVIRONMENT}  seed {view.seed}  {view.seconds:.0f} of {view.limit:.0f} s{state}"
        footer = f"engine {view.engine}  bar {SOLVED_AT:.0f}  weights version {view.version:,}"
        notes = [Text(note, style="yellow") for note in self._notes]
        return Panel(
            Group(counts, Text(), actors, *([Text(), *notes] if notes else [])),
            title=title,
            subtitle=footer,
            title_align="left",
            subtitle_align="left",
            expand=False,
            padding=(1, 2),
        )

    def _sparks(self, scores: Sequence[float]) -> str:
        last = scores[-_SPARKS:]
        if not (self._console.encoding or "").lower().startswith("utf"):
            return " ".join(f"{score:.0f}" for score in last[-8:])
        return "".join(_BARS[min(len(_BARS) - 1, int(score / _MOST * len(_BARS)))] for score in last)

    def close(self) -> None:
        """Leave the last table standing and give the cursor back."""
        self._live.stop()

    def __enter__(self) -> Self:
        self._live.start()
        return self


def choose(*, shown: bool, stream: TextIO | None = None) -> Display:
    """The display that fits: live on a terminal, lines elsewhere.

    Args:
        shown: Whether to show anything.
        stream: Where to; None takes standard output.
    """
    if not shown:
        return Silent()
    out = stream or sys.stdout
    if out.isatty():
        from rich.console import Console

        console = Console(file=out)
        if console.is_terminal and not console.is_dumb_terminal:
            return Live(console)
    return Lines(out)
