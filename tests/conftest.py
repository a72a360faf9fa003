"""Fixtures of all tests: names for engines, the check that nothing is left in /dev/shm, Hypothesis profiles."""

import contextlib
import itertools
import os
import re
import signal
from pathlib import Path

import pytest

from conduit.native.compile.library import PATH_VARIABLE, VARIABLE
from conduit.store.format.layout import HEADER_PID
from tests import library

# perf/gpu_check.py runs tests that do not need it, on machines without it
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("local", deadline=None)
    # The same examples in every run of CI, so that a change caused a red run, and the run can be repeated elsewhere.
    settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "local")

SHM = Path("/dev/shm")
PREFIX = f"cdt.{os.getuid()}."

_numbers = itertools.count()
_left_by: dict[str, str] = {}
_BEFORE = pytest.StashKey[set[str]]()

# Every process of the run takes its kernels from the library that `make test` builds (tests/library.py), unless it is told otherwise.
if not {VARIABLE, PATH_VARIABLE} & os.environ.keys() and (built := library.found()) is not None:
    os.environ[PATH_VARIABLE] = str(built)

# Tests that read a process's stderr do not expect its lines about kernels that it compiles.
os.environ.setdefault("CONDUIT_KERNELS_QUIET", "1")

# A shell makes a background run ignore Ctrl-C, and every process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _segments() -> set[str]:
    """This user's segments, without those of other test runs that are alive."""
    names = {entry.name for entry in SHM.glob(f"{PREFIX}*")} if SHM.is_dir() else set()
    return {name for name in names if not _of_another_run(name)}


def _creator(name: str) -> int:
    with (SHM / name).open("rb") as segment:
        return int.from_bytes(segment.read(HEADER_PID + 8)[HEADER_PID:], "little")


def _of_another_run(name: str) -> bool:
    """True for a segment of a living process that does not belong to this run."""
    made_by = re.match(re.escape(PREFIX) + r"t(\d+)-", name)
    with contextlib.suppress(OSError, ValueError):
        pid = int(made_by[1]) if made_by else _creator(name)
        while pid > 1:
            if pid == os.getpid():
                return False
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return True
    return False


def _left(before: set[str]) -> str:
    """The segments that did not exist before, one per line."""
    left = sorted(_segments() - before)
    return "\n".join(f"{SHM / name}, first seen after {_left_by.get(name, 'the last test')}" for name in left)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_in_shared_memory(request):
    """Fail the run if it leaves a segment behind."""
    before = _segments()
    yield
    # one of several processes cannot tell its leftovers from segments that the others use: the process that started them checks at the end
    if not hasattr(request.config, "workerinput") and (left := _left(before)):
        pytest.fail(f"segments left behind:\n{left}", pytrace=False)


def pytest_sessionstart(session):
    session.config.stash[_BEFORE] = _segments()


def pytest_sessionfinish(session):
    """Fail a run of several processes if one of them left a segment behind."""
    if session.config.getoption("dist", "no") == "no" or hasattr(session.config, "workerinput"):
        return
    if left := _left(session.config.stash[_BEFORE]):
        session.config.get_terminal_writer().line(f"\nsegments left behind:\n{left}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_runtest_teardown(item, nextitem):
    for name in _segments() - _left_by.keys():
        _left_by[name] = item.nodeid


@pytest.fixture
def engine_name() -> str:
    """A short engine name that no other test, and no other test run on this machine, uses."""
    return f"t{os.getpid()}-{next(_numbers)}"
