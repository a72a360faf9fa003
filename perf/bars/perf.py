"""The suite's rows against the best peer of each, in one run: `python -m perf.bars perf`.

Runs the suite with every library that is installed (`python -m perf.peers.setup`, folder by PEERS_VENVS), or reads the figures of
an earlier run where PERF_FIGURES names its figures.json. A row that Conduit does not lead, or not by its bar, is SHORT.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perf.bars import Bar, unmeasured
from perf.measure import ratio_text, time_text
from perf.peers.driver import PEERS, missing
from perf.peers.setup import FOLDER
from perf.suite import Suite
from perf.verdicts import Verdict, verdicts

TITLE = "every row against the best peer, all libraries by turns"


def _result() -> dict[str, Any]:
    given = os.environ.get("PERF_FIGURES")
    if given:
        found: dict[str, Any] = json.loads(Path(given).read_text())
        return found
    venvs = Path(os.environ.get("PEERS_VENVS", FOLDER))
    return Suite(venvs, list(PEERS), say=lambda _line: None).run(cold=False)


def _bar(row: Verdict) -> Bar:
    name = row.title + (" (against Reverb)" if row.against == "reverb" and row.bar >= 10 else "")
    notes = [f"{time_text(row.ours)} a unit, {row.rows_per_s:,.0f} rows/s"]
    if row.share is not None:
        notes.append(f"{row.share.median:.2f} of memcpy")
    if row.roofline is not None:
        notes.append(f"{row.roofline.median:.2f} of the speed of a private numpy ring")
    if row.ratio is None:
        return Bar(name, "no peer can", f">= {row.bar:g}x", ok=True, notes=("; ".join(notes),))
    if row.beside is not None:
        notes.append(f"{row.beside[0]} keeps the caller's arrays and copies nothing: {ratio_text(row.beside[1])} of it")
    if not row.ok and row.reason:
        notes.append(row.reason)
    bar = f">= {row.bar:g}x of {row.against}"
    return Bar(name, ratio_text(row.ratio), bar, row.ok, ("; ".join(notes),))


def rows() -> Iterator[Bar]:
    """Every row of the suite."""
    result = _result()
    for name, facts in result["peers"].items():
        if "missing" in facts and missing(PEERS[name], FOLDER) is not None and name != "pufferlib":
            yield unmeasured(f"{name} takes part", "it does", facts["missing"])
    for row in verdicts(result):
        yield _bar(row)
    for case, data in result["cases"].items():
        for name, why in sorted(
            {n: f["cannot"] for p in data["figures"].values() for n, f in p.items() if "cannot" in f}.items()
        ):
            if why.startswith("refused"):
                yield unmeasured(f"{case}: {name}", "its output is what was written", why)


GROUPS = (rows,)
