"""perf/gpu_check.py runs: every part of it once in Triton's interpreter, and what it says without a GPU."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

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
    assert {"torch", "triton", "numpy", "numba", "posix_ipc"} < names
    return sorted(names - {"torch", "triton", "numpy", "numba", "posix_ipc"})


def run(tmp_path, *options):
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, str(ROOT / "perf" / "gpu_check.py"), "--out", str(tmp_path), *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("BESIDES", "")},
        timeout=170,
        check=False,
    )


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
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert written["interpreted"] is True
    assert {result["ended"] for result in written["tests"].values()} == {"passed"}
    rows = {row["name"]: row for row in written["rows"]}
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
    assert len(written["bars"]) == 7
    assert all(bar["value"] is not None for bar in written["bars"])
    assert done.stdout.count("not measured") >= 7
    assert "SHORT" not in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_status_2(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("No CUDA device: torch ")
    assert not list(tmp_path.iterdir())
