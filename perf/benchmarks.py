"""`python -m perf.benchmarks`: runs the suite, keeps its figures as JSON, and writes docs/benchmarks.md with its plots."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from perf.peers.cases import CASES
from perf.peers.setup import FOLDER
from perf.report import write
from perf.suite import Effort, Suite, names

DOCS = Path(__file__).resolve().parents[1] / "docs"
QUICK = Effort(rounds=3, burst=0.03, concurrent=1.0, concurrent_rounds=1, cold_rounds=1, batches=2, pings=40)
QUIET = 1.0


def main(arguments: list[str] | None = None) -> int:
    """Measures, writes, or both."""
    parser = argparse.ArgumentParser(prog="python -m perf.benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=os.environ.get("PEERS", ""), help="names with commas between; all without")
    parser.add_argument("--cases", default="", help=f"of: {', '.join(CASES)}; all without")
    parser.add_argument("--venvs", type=Path, default=Path(os.environ.get("PEERS_VENVS", FOLDER)))
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of benchmarks.md, benchmarks.json and the plots")
    parser.add_argument(
        "--quick", action="store_true", help="short bursts and few rounds: for trying out, not for quoting"
    )
    parser.add_argument("--rounds", type=int, default=Effort().rounds, help="of bursts; a third of it of longer runs")
    parser.add_argument("--page-only", action="store_true", help="write the page from the figures that are there")
    asked = parser.parse_args(arguments)
    figures = asked.out / "benchmarks" / "figures.json"
    if not asked.page_only:
        load = os.getloadavg()[0]
        if load > QUIET:
            print(f"the load is {load:.1f}: other jobs run, the page will say so", file=sys.stderr)
        figures.parent.mkdir(parents=True, exist_ok=True)
        asked.venvs.mkdir(parents=True, exist_ok=True)
        log = asked.venvs / "adapters.log"  # what they print; read it when one is refused
        log.unlink(missing_ok=True)
        wanted = [one.strip() for one in asked.cases.split(",") if one.strip()] or list(CASES)
        only = [one.strip() for one in asked.peers.split(",") if one.strip()]
        suite = Suite(
            asked.venvs, list(names(only)), QUICK if asked.quick else _effort(asked.rounds), say=_say, log=log
        )
        result = suite.run(wanted)
        result["quick"] = asked.quick
        figures.write_text(json.dumps(result, indent=1) + "\n")
    write(json.loads(figures.read_text()), asked.out)
    print(f"wrote {asked.out / 'benchmarks.md'}")
    return 0


def _effort(rounds: int) -> Effort:
    longer = max(2, rounds // 3)
    return Effort(rounds=max(3, rounds), concurrent_rounds=longer, cold_rounds=longer)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
