"""Kernels made ready before they are needed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from conduit.native import jit
from conduit.native.compile import catalogue, library, turns


@dataclass(slots=True)
class Warmth:
    """What was made ready.

    Attributes:
        library: The library that has them all; "" where they are compiled.
        compiled: Kernels that were compiled now.
        loaded: Kernels that were compiled already.
        folders: Where they are kept.
        seconds: It took.
        kept: Whether all could be kept for the next process.
    """

    library: str = ""
    compiled: int = 0
    loaded: int = 0
    folders: tuple[str, ...] = ()
    seconds: float = 0.0
    kept: bool = True


def warm(*, every: bool = False) -> Iterator[tuple[int, int, Warmth]]:
    """Have kernels loaded or compiled, one after the other; yields how many of how many, and what was done so far.

    Args:
        every: All operations on rows, of every pair of dtypes, too; the usual ones otherwise.
    """
    done, began = Warmth(), time.monotonic()
    turns.hush()
    choice = library.chosen()
    if choice.library is not None:
        done.library = choice.path
        yield 0, 0, done
        return
    jobs: list[Callable[[], object]] = [lambda one=one: jit.entry(one) for one in catalogue.kernels()]  # type: ignore[misc]
    jobs += [lambda one=one: jit.address(*one) for one in catalogue.callbacks(every=every)]  # type: ignore[misc]
    for number, job in enumerate(jobs, 1):
        job()
        compiler = sys.modules["conduit.native.compile.compiler"]
        done.compiled, done.loaded = len(compiler.compiled), len(compiler.loaded)
        done.folders, done.kept = tuple(sorted(compiler.folders)), not compiler.warned
        done.seconds = time.monotonic() - began
        yield number, len(jobs), done
