"""`conduit import` and `conduit export`, run as a user runs them, on an engine of another process."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit import offline
from conduit.cli.offline import bring, take
from conduit.offline.columns import joined

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = conduit.Schema.from_example({"obs": np.zeros(2, np.float32), "action": 0, "reward": 0.0})


def command(*arguments, **more):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "conduit.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"} | more,
        timeout=120,
        check=False,
    )


@pytest.fixture
def engine(engine_name):
    with conduit.Engine.create(
        engine_name, {"from": conduit.Table(SCHEMA, 400), "to": conduit.Table(SCHEMA, 400)}
    ) as made:
        numbers = np.arange(120)
        obs = np.repeat(numbers[:, None], 2, 1).astype(np.float32)
        with made.writer("from") as writer:
            ends = numbers % 12 == 11
            writer.extend(
                {"obs": obs, "action": numbers, "reward": numbers.astype(np.float32)},
                terminated=ends,
                places=np.flatnonzero(ends),
                finals=-obs[ends],
            )
        yield made


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_a_table_goes_out_and_comes_in(engine, tmp_path, kind):
    out = tmp_path / "out"
    done = command("export", engine.name, "from", out, "--format", kind)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"120 steps of 10 episodes now at {out} in 1 file\n"
    done = command("import", engine.name, "to", out, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["rows"] == 120
    one, other = (joined(list(engine.table(table).scan())) for table in ("from", "to"))
    np.testing.assert_array_equal(one.columns["action"], other.columns["action"])
    np.testing.assert_array_equal(one.finals["obs"], other.finals["obs"])


def test_minari_datasets_go_out_and_come_in(engine, tmp_path):
    datasets = {"MINARI_DATASETS_PATH": str(tmp_path)}
    done = command("export", engine.name, "from", "mine-v0", "--format", "minari", **datasets)
    assert (done.returncode, done.stdout) == (0, "120 steps of 10 episodes now at mine-v0\n"), done.stderr
    done = command("import", engine.name, "to", "mine-v0", **datasets)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("120 steps of 10 episodes now in to (")


def test_columns_of_other_names_are_named_and_others_not_taken(engine, tmp_path):
    numbers = np.arange(9)
    flags = np.zeros(9, bool)
    np.savez(
        tmp_path / "a.npz",
        observations=np.zeros((9, 2), np.float32),
        action=numbers,
        reward=np.zeros(9, np.float32),
        terminated=flags,
        note=numbers,
    )
    done = command("import", engine.name, "to", tmp_path, "--column", "obs=observations")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("not taken: note\n")


def test_what_cannot_be_done_is_an_error_in_one_line(engine, tmp_path):
    done = command("import", engine.name, "to", tmp_path / "nowhere.npz")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "nowhere.npz" in done.stderr
    with pytest.raises(conduit.errors.ConfigError, match="--column field=column"):
        bring(engine.name, "to", str(tmp_path), ["obs"], quiet=True)
    with pytest.raises(conduit.errors.ConfigError, match="--format"):
        take(engine.name, "from", str(tmp_path / "x"), "csv", quiet=True)
    with pytest.raises(conduit.errors.ConfigError, match="'nowhere'"):
        take(engine.name, "nowhere", str(tmp_path / "x"), "npz", quiet=True)


def test_a_bar_is_shown_on_a_terminal(engine, tmp_path):
    offline.save(engine, "from", tmp_path / "out")
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "conduit.cli", "import", engine.name, "to", str(tmp_path / "out")],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "TERM": "xterm"},
        )
        assert process.communicate(timeout=120)[0].startswith(b"120 steps")
        assert b"into to" in os.read(ours, 1 << 16)
    finally:
        os.close(ours)
        os.close(theirs)
