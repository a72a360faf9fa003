"""docs/benchmarks.md: tables and words made of a run's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perf.measure import Spread, rate
from perf.plots import plot
from perf.verdicts import Verdict, costs, least_bytes, verdicts

OTHERS = Path(__file__).with_name("other_machines.md")
"""What was found on processors of other kinds; written by hand, and taken up as it is."""

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Writing", ("write",)),
    ("Batches, ready to learn from", ("batch", "frames", "priorities", "sequences", "rollout", "tokens")),
    ("Writers and a learner at the same time", ("concurrent",)),
)
"""Tables of rows per second, by kind of case."""

LAG = (
    "A row can be drawn only when the step after it has been appended, since its next observation is the next row's observation. "
    'The time of the row "becomes visible" starts at the `append` of that later step. A buffer that is given whole transitions '
    "has the row one environment step earlier. A step that ends its episode waits for its successor as well."
)


def write(result: Mapping[str, Any], folder: Path) -> None:
    """Writes benchmarks.md and benchmarks/*.png into a folder."""
    (folder / "benchmarks").mkdir(parents=True, exist_ok=True)
    rows = list(verdicts(result))
    pictures = plot(result, rows, folder / "benchmarks")
    parts = [_head(result), _losses(result, rows), _against(rows), _pictures(pictures)]
    parts += [_rates(result, title, kinds) for title, kinds in GROUPS]
    parts += [_visible(result), _memory(result), _cold(result), _refusals(result), OTHERS.read_text(), _how(result)]
    (folder / "benchmarks.md").write_text("\n\n".join(part.strip() for part in parts if part) + "\n")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(heads), *[list(row) for row in rows]]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def times(spread: Spread) -> str:
    """`3.4 (3.2-3.6)`."""
    digits = 0 if spread.median >= 30 else 1 if spread.median >= 10 else 2
    return f"{spread.median:.{digits}f} ({spread.q25:.{digits}f}-{spread.q75:.{digits}f})"


def _head(result: Mapping[str, Any]) -> str:
    here = result["machine"]
    kinds = [data["kind"] for data in result["cases"].values()]
    # each is looked at before its case; the rows with writer processes are a load of their own
    before = zip(result["loads"], [None, *kinds], strict=False)
    loads = [here["load"], *(load for load, kind in before if kind not in ("concurrent", "visible"))]
    caches = ", ".join(f"{level} {size}" for level, size in here["caches"].items())
    lines = [
        "# Benchmarks",
        "",
        "`make benchmarks` writes this page. Every figure below comes from one run, in which all libraries took turns on the same "
        "rows. Compare figures within this page only.",
        "",
        f"* {here['date'][:10]}, commit {here['commit']}, {result['seconds'] / 60:.0f} minutes",
        f"* {here['processor']}, {here['cores']} cores ({caches}), {here['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {here['kernel']}, Python {here['python']}, no GPU",
        f"* load in the rows of one process: {min(loads):.1f} to {max(loads):.1f}"
        + (". **The machine was busy with other jobs**: rates are lower than on a quiet one; ratios hold, with more spread"
           if max(loads) > 2.0 else ""),
        "* to repeat it: `make benchmarks` (it first makes the other libraries' environments, about 14 GB)",
    ]  # fmt: skip
    if result.get("quick"):
        lines.append("* **made with `--quick`**: few and short rounds, for trying out")
    versions = []
    for name, facts in result["peers"].items():
        if "missing" in facts:
            versions.append((name, "", "", f"not measured: {facts['missing']}"))
            continue
        found = ", ".join(f"{one} {version}" for one, version in facts["versions"].items())
        versions.append((name, facts["python"], found, "; ".join(x for x in (facts["tensors"], facts["note"]) if x)))
    return "\n".join(lines) + "\n\n" + table(("library", "Python", "versions", "delivers"), versions)


def _losses(result: Mapping[str, Any], rows: list[Verdict]) -> str:
    lines = ["## Where Conduit loses", ""]
    slower = [row for row in rows if not row.first]
    short = [row for row in rows if row.first and not row.ok]
    ring = [row for row in rows if row.roofline is not None and row.roofline.median < 1.0 and row.against != "reverb"]
    for row in slower:
        assert row.ratio is not None
        lines.append(
            f"* **{row.title}**: {row.against} is faster; Conduit has {times(row.ratio)} of its speed. {row.reason}"
        )
    for row in short:
        assert row.ratio is not None
        lines.append(
            f"* {row.title}: {times(row.ratio)} times as fast as {row.against}, which misses the bar of "
            f"{row.bar:g}. {row.reason}"
        )
    if ring:
        named = "; ".join(f"{row.title} {times(row.roofline)}" for row in ring if row.roofline is not None)
        lines.append(
            f"* A private numpy ring, which checks nothing and which no other process can read, is faster in these rows "
            f"(Conduit's share of its speed): {named}."
        )
    cold = {name: _median_cold(rounds) for name, rounds in result["cold"].items()}
    ours = cold.get("conduit")
    quicker = {
        name: value for name, value in cold.items() if value is not None and ours is not None and value < 0.97 * ours
    }
    if quicker:
        named = ", ".join(f"{name} {value:.1f} s" for name, value in sorted(quicker.items(), key=lambda item: item[1]))
        lines.append(f"* Cold start: a learner's first batch takes {ours:.1f} s. Faster are {named}.")
    for case, held in result["memory"].items():
        if "conduit" in held:
            less = {name: value for name, value in held.items() if least_bytes(case) <= value < 0.97 * held["conduit"]}
            if less:
                named = ", ".join(f"{name} {value:,.0f}" for name, value in less.items())
                where = result["cases"][case]["workload"] if case in result["cases"] else case
                lines.append(f"* Memory, {where}: {held['conduit']:,.0f} bytes a transition; less: {named}.")
    lines.append("* " + LAG)
    if not slower:
        lines.insert(
            2, "No library measured here is faster than Conduit in any row. Rows that miss a bar, and costs:\n"
        )
    return "\n".join(line.rstrip() for line in lines)


def _against(rows: list[Verdict]) -> str:
    heads = ("row", "rows/s", "best peer", "times as fast", "bar", "", "of memcpy", "of a numpy ring")
    lines = []
    for row in rows:
        value = f"{row.ours.median / 1e3:.0f} us" if row.part == "visible" else rate(row.rows_per_s)
        lines.append(
            (
                row.title,
                value,
                row.against or "none can",
                times(row.ratio) if row.ratio is not None else "",
                f"{row.bar:g}",
                "ok" if row.ok else "SHORT",
                f"{row.share.median:.2f}" if row.share is not None else "",
                f"{row.roofline.median:.2f}" if row.roofline is not None else "",
            )
        )
    text = (
        "Ratios are medians of paired ratios, one per round, with quartiles. The share of memcpy is the least number of bytes that "
        "must be written or delivered, per second, divided by the bytes per second of one memcpy of as many bytes (at least 1 MiB) "
        "in the same round."
    )
    kept = "\n".join(
        f"* {row.title}: {row.beside[0]} keeps the caller's arrays and copies nothing, so it is no peer in this row, which compares "
        f"libraries that copy. Conduit, which copies, takes in {times(row.beside[1])} times as many rows as {row.beside[0]}."
        for row in rows
        if row.beside is not None
    )
    return "\n\n".join(["## Conduit against the best of the others", text, table(heads, lines), kept]).strip()


def _pictures(pictures: Mapping[str, str]) -> str:
    return "\n\n".join(f"![{title}](benchmarks/{file})" for file, title in pictures.items())


def _rates(result: Mapping[str, Any], title: str, kinds: tuple[str, ...]) -> str:
    names = [name for name, facts in result["peers"].items() if "missing" not in facts]
    lines = []
    for data in result["cases"].values():
        if data["kind"] not in kinds:
            continue
        for part, figures in data["figures"].items():
            label = data["title"] if len(data["figures"]) == 1 else f"{data['title']}: {part}"
            unit = 1 if data["kind"] == "concurrent" else data["unit_rows"]
            lines.append(
                (label, *(_cell(figures, name, lambda ns, unit=unit: rate(unit / ns * 1e9)) for name in names))
            )
    return f"## {title}\n\nRows per second, medians.\n\n" + table(("", *names), lines) if lines else ""


def _cell(figures: Mapping[str, Any], name: str, text: Callable[[float], str]) -> str:
    found = costs(figures, name)
    if found is not None:
        return text(float(np.median(found)))
    why = figures.get(name, {}).get("cannot", "")
    return "refused" if why.startswith("refused") else "cannot" if why else "not run"


def _visible(result: Mapping[str, Any]) -> str:
    data = result["cases"].get("visible")
    if data is None:
        return ""
    figures = data["figures"]["visible"]
    lines = []
    for name in figures:
        found = costs(figures, name)
        if found is not None:
            low, middle, high = np.percentile(found, (25, 50, 99)) / 1e3
            lines.append((name, f"{low:.0f}", f"{middle:.0f}", f"{high:,.0f}"))
        else:
            lines.append((name, _cell(figures, name, str), "", ""))
    text = (
        "Microseconds from just before one process writes a step to when a learner in another process could draw it. The learner "
        "polls all the time. Buffers that belong to one process get steps through a multiprocessing queue."
    )
    return f"## From commit to visible\n\n{text}\n\n" + table(("", "lower quartile", "median", "99 %"), lines)


def _memory(result: Mapping[str, Any]) -> str:
    names = [name for name, facts in result["peers"].items() if "missing" not in facts]
    lines = []
    for case, held in result["memory"].items():
        data = result["cases"].get(case)
        cells = [
            "cannot" if n not in held else f"{held[n]:,.0f}" if held[n] >= least_bytes(case) else "no copy of the rows"
            for n in names
        ]
        lines.append((data["workload"] if data else case, *cells))
    text = (
        "Growth of a fresh process's resident memory, shared pages counted in full, while the table is made and filled, per stored "
        "row. Every library except Conduit stores the next observation beside the observation here."
    )
    return f"## Memory per transition\n\n{text} Bytes.\n\n" + table(("", *names), lines) if lines else ""


def _median_cold(rounds: list[dict[str, Any]]) -> float | None:
    walls = [one["wall_s"] for one in rounds if "wall_s" in one]
    return float(np.median(walls)) if walls else None


def _cold(result: Mapping[str, Any]) -> str:
    lines = []
    for name, rounds in result["cold"].items():
        done = [one for one in rounds if "wall_s" in one]
        if not done:
            lines.append((name, "failed", "", ""))
            continue
        middle = {key: float(np.median([one[key] for one in done])) for key in ("wall_s", "cpu_s", "peak_mb")}
        lines.append((name, f"{middle['wall_s']:.2f}", f"{middle['cpu_s']:.2f}", f"{middle['peak_mb']:.0f}"))
    text = (
        "The time from starting a process to its first batch of 256 in memory: imports, a table of 4,096 rows, 1,024 rows written. "
        "Files are in the page cache and kernels are compiled. A Conduit actor imports no torch and is ready much sooner (README)."
    )
    return f"## Cold start\n\n{text}\n\n" + table(("", "seconds", "CPU seconds", "peak MB"), lines) if lines else ""


def _refusals(result: Mapping[str, Any]) -> str:
    lines: dict[tuple[str, str], list[str]] = {}
    for data in result["cases"].values():
        for figures in data["figures"].values():
            for name, figure in figures.items():
                if "cannot" in figure:
                    titles = lines.setdefault((name, figure["cannot"]), [])
                    if data["title"] not in titles:
                        titles.append(data["title"])
    rows = [(name, "; ".join(titles), why) for (name, why), titles in lines.items()]
    if not rows:
        return ""
    return "## What a library cannot do\n\n" + table(("library", "row", "why"), rows)


def _how(result: Mapping[str, Any]) -> str:
    compared = sum(sum(data["compared"].values()) for data in result["cases"].values())
    held = {}
    for data in result["cases"].values():
        most = max(data.get("rows", {}).values(), default=0)
        held |= {name: None for name, rows in data.get("rows", {}).items() if rows < most}
    smaller = ", ".join(held)
    return f"""## How it is measured

* Each library runs in a process and a virtual environment of its own behind one small protocol (`perf/peers/`). It makes its
  rows from a seed. The digests of all libraries' rows are compared, so all have the same rows.
* Before anything is timed, the rows that a library delivers are compared with the rows that were written, {compared:,} rows in this run.
  A library that differs is not timed. Outputs are the same: float32 observations (bytes times 1/255), actions, rewards, flags, with the
  true final observation where an episode ended.
* Libraries take turns, one burst each per round, in an order that rotates. Meanwhile a signal stops all other libraries,
  threads and servers included. Each has one thread for arithmetic. The garbage collector is off inside a burst.
* The cost of a burst is the smaller of its wall time and its process's CPU time. So time that another job takes does not count, and
  threads that work at the same time do not count twice. With writer processes beside the learner, wall time counts.
* In the rows with writer processes, each writes the steps of 64 environments as fast as it can. cpprb uses its shared-memory buffer there and
  Reverb its server. The others get a multiprocessing queue of 64 steps, whose content the learner stores before each batch, as
  their users do. Rows in and rows out are counted over the same seconds: a library that does more of one has less time for the other.
* {"Tables hold fewer rows where filling takes too long (" + smaller + "); that can only make these faster." if smaller else "All tables hold the same rows."}
* The numpy ring is a roofline and not a peer, because it does less. In most rows it stores the next observation as well, which Conduit does
  not.
* `python -m perf.bars perf` prints each row with its bar; the figures of this page are in benchmarks/figures.json.
"""
