"""`warm`: loads or compiles kernels before a program needs them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from conduit.native import jit
from conduit.native.compile import catalogue, library, turns


@dataclass(slots=True)
class Warmth:
    """The result of `warm`.

    Attributes:
        library: The library that has all kernels; "" if they are compiled on this machine.
        compiled: Kernels that were compiled now.
        loaded: Kernels that had been compiled before.
        folders: The folders of the cache.
        seconds: Seconds that it took.
        kept: Whether the cache kept all of them for the next process.
    """

    library: str = ""
    compiled: int = 0
    loaded: int = 0
    folders: tuple[str, ...] = ()
    seconds: float = 0.0
    kept: bool = True


def warm(*, every: bool = False) -> Iterator[tuple[int, int, Warmth]]:
    """Load or compile the kernels, one after the other; yields (kernels done, kernels in all, result so far).

    Args:
        every: Include the operations on rows for every pair of dtypes; otherwise only the usual ones.
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
