"""`python -m perf.bars NAME`."""

from __future__ import annotations

import argparse
import sys

from perf.bars import load, names, run


def main(arguments: list[str] | None = None) -> int:
    """Runs the tables named, or lists them."""
    parser = argparse.ArgumentParser(prog="python -m perf.bars", description="Measures the bars of an issue.")
    parser.add_argument("name", nargs="*", help=f"one or more of: {', '.join(names())}")
    asked = parser.parse_args(arguments).name
    if not asked:
        for name in names():
            print(f"{name}: {load(name).TITLE}")
        return 0
    return max(run(name) for name in asked)


if __name__ == "__main__":
    sys.exit(main())
