"""Imports and exports whose process is killed half-way: what is in a table is whole, and what is at a path is complete."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit import offline
from conduit.offline.columns import joined

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = conduit.Schema.from_example({"obs": np.zeros(2, np.float32), "action": 0})
ROWS = 200_000

CHILD = """
import sys, time
import conduit
from conduit import offline

what, name, path = sys.argv[1:]


def progress(done, total):
    print(done, flush=True)
    time.sleep(60)


client = conduit.attach(name)
if what == "import":
    offline.load(client, "t", path, progress=progress)
else:
    offline.saving._PART_BYTES = 1 << 20
    offline.save(client, "t", path, progress=progress)
"""


def killed_after_the_first_report(what, engine, path):
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, what, engine.name, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    done = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    return done


@pytest.fixture
def engine(engine_name):
    with conduit.Engine.create(engine_name, {"t": conduit.Table(SCHEMA, 3 * ROWS)}) as made:
        yield made


def columns():
    numbers = np.arange(ROWS)
    return {"obs": np.repeat(numbers[:, None], 2, 1).astype(np.float32), "action": numbers}


def test_a_killed_import_leaves_a_prefix_and_the_table_in_order(engine, tmp_path):
    np.savez(tmp_path / "a.npz", **columns(), terminated=np.arange(ROWS) % 100 == 99)
    done = killed_after_the_first_report("import", engine, tmp_path)
    assert 0 < done < ROWS
    engine.recover()
    steps = joined(list(engine.table("t").scan()))
    np.testing.assert_array_equal(steps.columns["action"], np.arange(done))
    np.testing.assert_array_equal(steps.columns["obs"][:, 0], np.arange(done))
    assert offline.load(engine, "t", tmp_path).rows == ROWS
    assert sum(map(len, engine.table("t").scan())) == done + ROWS


def test_a_killed_export_leaves_nothing_at_its_path_and_can_be_repeated(engine, tmp_path):
    with engine.writer("t") as writer:
        writer.extend(columns())
    done = killed_after_the_first_report("export", engine, tmp_path / "out")
    assert 0 < done < ROWS
    assert not (tmp_path / "out").exists()
    assert offline.save(engine, "t", tmp_path / "out").rows == ROWS
    assert offline.describe(tmp_path / "out").rows == ROWS
