"""The pictures of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perf.measure import rate
from perf.verdicts import Verdict, costs

_SETS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("writes.png", "Writing: rows per second", ("write",)),
    ("batches.png", "Batches: rows per second", ("batch", "frames", "priorities", "sequences", "rollout", "tokens")),
    ("concurrent.png", "Writers and a learner at the same time: rows per second", ("concurrent",)),
)
_COLOURS = {"conduit": "#0b6e4f", "numpy": "#9a9a9a"}
_OTHERS = ("#4477aa", "#ee6677", "#ccbb44", "#66ccee", "#228833", "#aa3377", "#dd8833", "#7755bb", "#885533")


def plot(result: Mapping[str, Any], rows: list[Verdict], folder: Path) -> dict[str, str]:
    """Writes the pictures; {file name: what it shows}."""
    import matplotlib as mpl

    mpl.use("Agg")
    pictures = {}
    for file, title, kinds in _SETS:
        panels = [
            (data["title"] if len(data["figures"]) == 1 else f"{data['title']}: {part}", data, figures)
            for data in result["cases"].values()
            if data["kind"] in kinds
            for part, figures in data["figures"].items()
        ]
        if panels:
            _bars(result, panels, title, folder / file)
            pictures[file] = title
    shares = [row for row in rows if row.share is not None and row.against != "reverb"]
    if shares:
        _shares(shares, folder / "rooflines.png")
        pictures["rooflines.png"] = "Conduit's bytes per second as a share of memcpy's in the same rounds"
    return pictures


def _bars(result: Mapping[str, Any], panels: list[tuple[str, Any, Any]], title: str, file: Path) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    names = [name for name, facts in result["peers"].items() if "missing" not in facts]
    colours = {n: _COLOURS.get(n) or _OTHERS[i % len(_OTHERS)] for i, n in enumerate(names)}
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.6 * columns, 0.6 + 2.9 * lines), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (label, data, figures) in zip(axes.flat, panels, strict=False):
        unit = 1 if data["kind"] == "concurrent" else data["unit_rows"]
        rates = {n: unit / c * 1e9 for n in names if (c := costs(figures, n)) is not None}
        order = sorted(rates, key=lambda name: float(np.median(rates[name])))
        middles = [unit / float(np.median(costs(figures, name))) * 1e9 for name in order]  # as the tables have them
        axis.barh(order, middles, color=[colours[name] for name in order], height=0.75)
        for at, name in enumerate(order):
            low, high = np.percentile(rates[name], (25, 75))
            axis.plot([low, high], [at, at], color="black", linewidth=1)
            axis.text(max(middles[at], high) * 1.08, at, rate(middles[at]), va="center", fontsize=7)
        axis.set_xscale("log")
        axis.set_xlim(min(middles) / 3, max(middles) * 8)
        axis.set_title(label, fontsize=8.5)
        axis.tick_params(labelsize=7.5)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(axis="x", alpha=0.25, which="major")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(title + " (medians; lines: quartiles; logarithmic)", fontsize=11)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _shares(rows: list[Verdict], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8.6, 0.9 + 0.3 * len(rows)))
    shares = [row.share for row in rows if row.share is not None]
    titles = [row.title for row in rows]
    axis.barh(titles[::-1], [share.median for share in shares][::-1], color=_COLOURS["conduit"], height=0.7)
    for at, share in enumerate(shares[::-1]):
        axis.plot([share.q25, share.q75], [at, at], color="black", linewidth=1)
        axis.text(max(share.median, share.q75) + 0.02, at, f"{share.median:.2f}", va="center", fontsize=8)
    axis.set_xlim(0, 1.15 * max(1.0, *(share.q75 for share in shares)))  # room for the figures
    axis.axvline(1.0, color="#555555", linewidth=1, linestyle="--")
    axis.set_xlabel("bytes per second over those of memcpy (dashed: as fast as memcpy)", fontsize=8.5)
    axis.tick_params(labelsize=8)
    axis.set_title("Conduit's share of memcpy", fontsize=10)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)
