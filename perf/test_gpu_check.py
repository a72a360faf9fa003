"""perf/gpu_check.py runs: every part of it once in Triton's interpreter, what it says of what is missing, and that it always ends."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (extra `gpu`)"
)


BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {others!r}:
            raise ImportError(f"{{name}} is not there")

sys.meta_path.insert(0, Block())
"""


def others():
    """What Conduit installs besides torch, Triton, numpy and the two wheels that the script may need."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in declared}
    assert {"numpy", "numba", "posix_ipc"} < names
    return sorted(names - {"numpy", "numba", "posix_ipc"})


def command(tmp_path, *options):
    return [sys.executable, str(ROOT / "perf" / "gpu_check.py"), "--out", str(tmp_path), *options]


def environment():
    kept = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTHONPATH")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("BESIDES", "")}


def run(tmp_path, *options):
    return subprocess.run(
        command(tmp_path, *options),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        timeout=170,
        check=False,
    )


def written(tmp_path):
    return json.loads((tmp_path / "gpu_check.json").read_text())


def test_every_part_of_it_runs_in_the_interpreter_without_other_wheels_and_is_written_down(tmp_path, monkeypatch):
    assert {"msgspec", "xxhash"} <= set(others())
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKED.format(others=set(others())))
    monkeypatch.setenv("BESIDES", str(site))
    is_there = subprocess.run(
        [sys.executable, "-c", "import msgspec"],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        check=False,
    )
    assert b"msgspec is not there" in is_there.stderr
    done = run(tmp_path, "--interpret")
    assert done.returncode == 0, done.stdout + done.stderr
    content = written(tmp_path)
    assert content["interpreted"] is True
    assert content["problems"] == []
    assert {result["ended"] for kind in ("tests", "parts") for result in content[kind].values()} == {"passed"}
    rows = {row["name"]: row for row in content["rows"]}
    for begin in (
        "device copy",
        "copy from pinned host memory",
        "Atari",
        "random shift",
        "loader, Atari, pool",
        "loader, Atari, registered",
        "loader, CartPole",
        "draws of the device",
        "CartPole",
        "sequences",
        "draw of",
        "n-step(5)",
        "priorities",
        "GAE",
        "V-trace",
        "pad",
        "pack",
    ):
        found = [name for name in rows if name.startswith(begin)]
        assert found, begin
        assert all(rows[name]["call_us"] > 0 for name in found)
        assert f"{found[0]:<66}" in done.stdout
    assert len(content["bars"]) == 7
    assert all(bar["value"] is not None for bar in content["bars"])
    assert done.stdout.count("not measured") >= 7
    assert "SHORT" not in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_status_2(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("No CUDA device: torch ")
    (problem,) = written(tmp_path)["problems"]
    assert problem.startswith("No CUDA device: torch ")


HIDDEN = """
import importlib.machinery
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in {hidden!r}:
            brought = [path for path in sys.path if path.endswith("wheels")]
            spec = importlib.machinery.PathFinder.find_spec(name, brought)
            if spec is None:
                raise ImportError(name)
            return spec

sys.meta_path.insert(0, Hide())
"""


@pytest.fixture
def hidden(tmp_path, monkeypatch):
    """Hides modules from the script and its children, but for wheels that were brought along."""

    def hide(*names):
        site = tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(HIDDEN.format(hidden=names))
        monkeypatch.setenv("BESIDES", str(site))

    return hide


def test_what_is_missing_is_named_in_seconds_with_how_to_carry_it(tmp_path, hidden):
    hidden("posix_ipc", "pytest", "torch")
    begun = time.monotonic()
    done = run(tmp_path, "--wheels", str(tmp_path / "none"))
    assert time.monotonic() - begun < 15
    assert done.returncode == 2
    content = written(tmp_path)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert [problem.partition(" ")[0] for problem in content["problems"]] == ["torch", "posix_ipc"]
    assert f"pip download --only-binary :all: --no-deps --python-version {version} --platform" in done.stderr
    assert "--dest wheels posix-ipc`" in done.stderr
    assert "--wheels FOLDER" in done.stderr
    assert "pytest is missing: the tests are not run" in done.stdout
    assert content["versions"]["posix_ipc"] is None
    assert content["parts"] == {}


def wheel_of_posix_ipc(folder, tag):
    """The installed package as a wheel."""
    installed = importlib.metadata.distribution("posix_ipc")
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(
        folder / f"posix_ipc-{installed.version}-{tag}-{tag}-linux_{platform.machine()}.whl", "w"
    ) as file:
        for path in installed.files:
            if installed.locate_file(path).exists() and not str(path).startswith(".."):
                file.write(installed.locate_file(path), str(path))


def test_a_wheel_that_was_carried_along_is_used_where_it_fits(tmp_path, hidden):
    hidden("posix_ipc")
    wheel_of_posix_ipc(tmp_path / "brought", "cp27")
    done = run(tmp_path, "--interpret", "--only-preflight", "--wheels", str(tmp_path / "brought"))
    assert done.returncode == 2
    assert "not for this Python or machine: " in done.stdout
    wheel_of_posix_ipc(tmp_path / "brought", f"cp{sys.version_info.major}{sys.version_info.minor}")
    done = run(tmp_path, "--interpret", "--only-preflight", "--wheels", str(tmp_path / "brought"))
    assert done.returncode == 0, done.stderr
    assert written(tmp_path)["problems"] == []


BAD = """
import ctypes
import time

from perf.gpu.found import Found


def fine(bench):
    bench.found.append(Found("fine", call_us=1.0))


def fail(bench):
    bench.found.append(Found("before it failed", call_us=2.0))
    raise ValueError("of the part's own")


def crash(bench):
    bench.found.append(Found("before it crashed", call_us=3.0))
    time.sleep(1.5)
    ctypes.string_at(0)


def hang(bench):
    bench.found.append(Found("before it hung", call_us=4.0))
    while True:
        time.sleep(1)
"""


def bad(tmp_path, monkeypatch, *names):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "bad.py").write_text(BAD)
    monkeypatch.setenv("BESIDES", str(tmp_path / "site"))
    return ["--interpret", "--no-tests", *(f"--part=bad:{name}" for name in names)]


@pytest.mark.long
def test_a_part_that_fails_crashes_or_hangs_takes_nothing_else_with_it_and_the_deadline_holds(tmp_path, monkeypatch):
    options = bad(tmp_path, monkeypatch, "fail", "crash", "fine", "hang", "late")
    begun = time.monotonic()
    done = run(tmp_path, *options, "--deadline=32", "--part-seconds=60", "--least=3")
    assert time.monotonic() - begun < 60
    assert done.returncode == 1
    content = written(tmp_path)
    ended = {name.partition(":")[2]: part["ended"] for name, part in content["parts"].items()}
    assert ended == {
        "fail": "ValueError: of the part's own",
        "crash": f"killed by signal {signal.SIGSEGV.value}",
        "fine": "passed",
        "hang": "out of time",
        "late": "not reached before the deadline",
    }
    rows = {row["name"]: row["call_us"] for row in content["rows"]}
    assert rows | {"fine": 1.0, "before it failed": 2.0, "before it crashed": 3.0, "before it hung": 4.0} == rows
    assert len(content["bars"]) == 7
    assert "Segmentation fault" in done.stdout


def test_what_was_found_is_written_also_when_it_is_ended_from_outside_and_no_child_is_left(tmp_path, monkeypatch):
    options = bad(tmp_path, monkeypatch, "fine", "hang")
    process = subprocess.Popen(command(tmp_path, *options), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + 100
    while not (tmp_path / "gpu_check.json").exists() or not children.read_text():
        assert time.monotonic() < end
        time.sleep(0.1)
    left = [int(child) for child in children.read_text().split()]
    process.terminate()
    assert process.wait(20) == 1
    process.stdout.close()
    assert written(tmp_path)["parts"] == {"bad:fine": {"ended": "passed", "seconds": ANY}}
    time.sleep(0.2)
    assert not any(Path(f"/proc/{child}").exists() for child in left)
