"""`conduit warm`: kernels compiled before they are needed."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from conduit.cli.output import counted, duration
from conduit.cli.progress import bar
from conduit.plane.observe.warm import Warmth, warm


def warmed(*, every: bool, quiet: bool) -> Warmth:
    """Compile what is not compiled yet.

    Args:
        every: Every conversion of every dtype, too.
        quiet: Show no progress.
    """
    done = Warmth()
    with bar("compiling kernels", shown=not quiet) as tell:
        for number, total, sofar in warm(every=every):
            tell(number, total)
            done = sofar
    return done


def as_json(done: Warmth) -> dict[str, Any]:
    """The document of `conduit warm --json`."""
    return asdict(done)


def told(done: Warmth) -> str:
    """What was done, for people."""
    if done.library:
        return f"Nothing to do: kernels come compiled with the package, in {done.library}.\n"
    there = f"; {counted(done.loaded, 'kernel')} {'was' if done.loaded == 1 else 'were'} there"
    what = f"{counted(done.compiled, 'kernel')} compiled in {duration(done.seconds)}{there if done.loaded else ''}"
    if not done.kept:
        return f"{what}; not all could be kept: name a folder to write to in NUMBA_CACHE_DIR.\n"
    return f"{what}; kept in {os.path.commonpath(done.folders)}.\n"
