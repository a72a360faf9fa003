"""The picture of a run: returns over environment steps and over time, and how the time was spent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conduit.demo.record import DemoResult, History, Scored
from conduit.demo.settings import ENVIRONMENT, SOLVED_AT
from conduit.errors import ConfigError

_INK = "#1b1f24"
_FAINT = "#9aa4af"
_EPISODE = "#7aa6d8"
_MEAN = "#1f5fa8"
_GREEDY = "#d1495b"
_WAIT = "#e0912f"
_MEAN_OVER = 40

Array = np.ndarray[Any, Any]


def check_place(path: Path) -> None:
    """Refuse a path that no picture can be written to, before a run is spent on it.

    Raises:
        ConfigError: The folder is not there or takes no file, or the ending stands for no kind of picture.
    """
    if path.suffix not in {"", ".png"}:
        from matplotlib.backend_bases import FigureCanvasBase

        kinds = FigureCanvasBase.get_supported_filetypes()
        if path.suffix[1:].lower() not in kinds:
            raise ConfigError(f"Expected plot to end in one of .{', .'.join(sorted(kinds))}, got {str(path)!r}")
    try:
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"Expected plot to lie in a folder that exists, got {str(path)!r}")
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"Expected plot to be a file that can be written, got {str(path)!r}: {error.strerror}"
        ) from error


def draw(history: History, result: DemoResult, path: Path) -> None:
    """Write the picture of a run that has at least one episode.

    Args:
        history: What happened.
        result: How it ended.
        path: File to write; its suffix chooses the format, PNG without one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["rows", "time"], ["wait", "rates"]], height_ratios=[3, 2])
    _returns(axes["rows"], history, "environment steps", lambda one: one.rows)
    _returns(axes["time"], history, "seconds", lambda one: one.seconds)
    axes["time"].sharey(axes["rows"])
    axes["time"].set_ylabel("")
    axes["rows"].legend(loc="upper left", frameon=False, fontsize=9)
    _waiting(axes["wait"], history, result)
    _rates(axes["rates"], history)
    for name in ("time", "wait", "rates"):
        axes[name].set_xlim(0, result.seconds)
        for seconds in history.restarts:
            axes[name].axvline(seconds, color=_INK, linewidth=0.9, linestyle=(0, (2, 2)))
    if history.restarts:
        axes["time"].text(
            history.restarts[0], 515, " actor restarted", fontsize=8, color=_INK, ha="left", va="bottom", clip_on=False
        )
    for one in axes.values():
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color="#e4e8ec", linewidth=0.8)
        one.set_axisbelow(True)
    figure.suptitle(result.verdict.splitlines()[0], fontsize=12, fontweight="bold", color=_INK, x=0.01, ha="left")
    figure.savefig(path, format=None if path.suffix else "png")


def _returns(axes: Any, history: History, label: str, along: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    episodes, evaluations = history.episodes, history.evaluations
    x = np.array([along(one) for one in episodes])
    scores = np.array([one.score for one in episodes])
    axes.scatter(x, scores, s=9, color=_EPISODE, alpha=0.55, linewidths=0, label="episode of an actor (explores)")
    axes.plot(x, _running_mean(scores), color=_MEAN, linewidth=1.6, label=f"mean of {_MEAN_OVER} episodes")
    if evaluations:
        axes.plot(
            *_points(evaluations, along),
            color=_GREEDY,
            marker="o",
            markersize=4,
            linewidth=1.1,
            label="greedy evaluation",
        )
    axes.axhline(SOLVED_AT, color=_FAINT, linewidth=1, linestyle="--", zorder=1)
    axes.set_ylim(0, 515)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(label)
    axes.set_ylabel(f"return ({ENVIRONMENT})")
    axes.set_title(f"Return over {label}", fontsize=10, loc="left", color=_INK)


def _points(scored: Sequence[Scored], along: Any) -> tuple[Array, Array]:
    return np.array([along(one) for one in scored]), np.array([one.score for one in scored])


def _running_mean(values: Array) -> Array:
    """Mean of each value and up to `_MEAN_OVER` - 1 before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - _MEAN_OVER, 0)
    means: Array = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def _waiting(axes: Any, history: History, result: DemoResult) -> None:
    seconds, waiting = _differences(history, "waited")
    _, delivering = _differences(history, "delivering")
    axes.stackplot(
        seconds,
        100 * waiting,
        100 * delivering,
        colors=(_WAIT, _EPISODE),
        labels=("waiting for actors to write", "drawing and gathering batches"),
        linewidth=0,
    )
    axes.axvspan(0, result.startup_seconds, color="#eef1f4", zorder=0)
    top = max(10.0, 140 * float((waiting + delivering).max(initial=0.0)))
    axes.text(result.startup_seconds, top, "start-up ", ha="right", va="top", fontsize=8, color=_FAINT, rotation=90)
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    axes.set_ylim(0, top)
    axes.set_xlabel("seconds")
    axes.set_ylabel("% of the learner's time")
    axes.set_title(
        f"Time that experience costs the learner; waiting is {result.waited_share:.1%} in all",
        fontsize=10,
        loc="left",
        color=_INK,
    )


def _rates(axes: Any, history: History) -> None:
    for name, label, color in (("rows", "rows/s in", _MEAN), ("updates", "batches/s out", _GREEDY)):
        seconds, rate = _differences(history, name)
        axes.plot(seconds, rate, color=color, linewidth=1.3, label=label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("seconds")
    axes.set_ylabel("per second")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    axes.set_title("Rows written, batches delivered", fontsize=10, loc="left", color=_INK)


def _differences(history: History, name: str) -> tuple[Array, Array]:
    """A counter's growth per second over spans of about a second, at the middle of each."""
    samples = history.samples
    step = max(1, round(len(samples) / 120), min(5, len(samples) // 4))
    chosen = samples[::step]
    seconds = np.array([one.seconds for one in chosen])
    counts = np.array([getattr(one, name) for one in chosen], float)
    return (seconds[1:] + seconds[:-1]) / 2, np.diff(counts) / np.maximum(np.diff(seconds), 1e-9)
