"""The library of kernels that tests run with: built once for the sources as they are, for this processor, and kept below build/.

`python -m tests.library` builds it, as `make test` does before it runs the tests. tests/conftest.py names it to the run's processes where
it is there. Without one, and where a test says `CONDUIT_KERNELS=compile`, numba compiles what a process needs, which gives the same
results and takes several times as long.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from conduit.native.compile import build, library
from conduit.native.compile.sources import library_stamp

FOLDER = Path(__file__).resolve().parents[1] / "build"


def instructions() -> str | None:
    """The best instruction set of this processor that libraries are made for."""
    return next(iter(library.supported()), None)


def found() -> Path | None:
    """The library of these sources; None where it has not been built."""
    return next(FOLDER.glob(f"kernels-{instructions()}-{library_stamp()[:16]}-*.so"), None)


def main() -> int:
    """Build the library where that is possible, remove those of other sources, and say what was done."""
    best = instructions()
    if best is None:
        print("no library of kernels can be built for this processor: the tests compile them, which takes longer")
        return 0
    if found() is None:
        print(f"building the library of kernels for {best}, which takes some minutes of CPU", flush=True)
    began = time.monotonic()
    try:
        (path,) = build.made((best,), FOLDER)
    except build.CannotBuild as error:
        print(f"no library of kernels can be built here ({error}): the tests compile them, which takes longer")
        return 0
    for other in FOLDER.glob(f"kernels-{best}-*.so"):
        if other != path:
            other.unlink(missing_ok=True)
    print(f"{path} ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
