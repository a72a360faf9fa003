"""README's two commands on a fresh clone: `make demo` and `make test`, each with what makes it short here.

The clone has no virtual environment and no compiled kernel, so the first command installs, from the package index or pip's cache, and
compiles. Both take minutes: what is compiled is what the demo and some of the tests need.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perf.bars import Bar

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 1500.0
_MINUTES = 2.0
_COMPILING = re.compile(r"^conduit: compiling kernels .*", re.MULTILINE)
_VERDICT = re.compile(r"^CartPole-v1 (?:solved in|not solved within .* the last evaluation had) .*$", re.MULTILINE)
"""An end of the demo, after it trained and was evaluated."""
_PASSED = re.compile(r"\b[1-9]\d* passed\b")
_FAILED = re.compile(r"\b\d+ (?:failed|error)")
_TESTS = "tests/test_schema.py tests/launching -k 'fingerprint or index_and_the_arguments'"
_NAME = "README's two commands on a fresh clone"


@dataclass(frozen=True, slots=True)
class Ran:
    """A command's exit status, None where it was ended; what it printed; its seconds."""

    status: int | None
    printed: str
    seconds: float


def _run(folder: Path, *command: str) -> Ran:
    """Run a command in a folder, in an environment without this one's packages; its whole group is killed at the deadline."""
    strange = ("PYTHONPATH", "VIRTUAL_ENV", "NUMBA_CACHE_DIR", "CONDUIT_KERNELS_QUIET", "MAKEFLAGS", "MAKELEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in strange}
    begun = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        status: int | None = None
        try:
            printed, _ = process.communicate(timeout=_PATIENCE)
            status = process.returncode
        except subprocess.TimeoutExpired:
            _end(process)
            printed, _ = process.communicate()
        except BaseException:
            _end(process)
            raise
    return Ran(status, printed, time.monotonic() - begun)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last(printed: str) -> str:
    lines = printed.strip().splitlines()
    return lines[-1] if lines else "(nothing)"


def fresh_clone() -> Iterator[Bar]:
    """Both commands in a clone of the last commit, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="conduit-clone-") as folder:
        clone = Path(folder) / "conduit"
        subprocess.run(["git", "clone", "--quiet", str(_ROOT), str(clone)], check=True, timeout=120)
        demo = _run(clone, "make", "demo", f"ARGS=--minutes {_MINUTES:g} --no-plot")
        said, verdict = _COMPILING.search(demo.printed), _VERDICT.search(demo.printed)
        # the demo's 1, which make makes its own 2 of: not solved within the time that it was given
        works = verdict is not None and (demo.status == 0 or (demo.status == 2 and "Error 1" in _last(demo.printed)))
        yield Bar(
            f"{_NAME}: make demo, given {_MINUTES:g} minutes",
            f"exit {demo.status} after {demo.seconds:.0f} s, {'says' if said else 'does not say'} that it compiles",
            "works, says what it does while it compiles",
            ok=works and said is not None,
            notes=(said[0] if said else f"last line: {_last(demo.printed)}", verdict[0] if verdict else "no verdict"),
        )
        tests = _run(clone, "make", "test", f"ARGS={_TESTS}")
        passed = _PASSED.search(tests.printed)
        yield Bar(
            f"{_NAME}: make test, a few of them",
            f"exit {tests.status} after {tests.seconds:.0f} s, {passed[0] if passed else 'none passed'}",
            "works",
            ok=tests.status == 0 and passed is not None and not _FAILED.search(tests.printed),
            notes=(f"last line: {_last(tests.printed)}",),
        )


GROUPS = (fresh_clone,)
