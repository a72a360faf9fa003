"""Every named case, once as a test and, when measured, as a benchmark; and the protocol that the other libraries are run by."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from perf.peers import driver, setup
from perf.peers.adapter import Server
from perf.peers.cases import CASES, Rows
from perf.peers.conduit_engine import ConduitEngine
from perf.report import write
from perf.suite import Effort, Suite, names
from perf.verdicts import verdicts

TIMED = [case.name for case in CASES.values() if case.kind not in ("concurrent", "visible")]
ONCE = Effort(
    rounds=1, burst=0.001, concurrent=0.2, concurrent_rounds=1, cold_rounds=0, batches=2, pings=20, rows=1 << 11
)
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", TIMED)
def test_a_case_delivers_what_was_written(benchmark, name):
    rows = None if benchmark.enabled else 1 << 11
    server = Server(ConduitEngine())
    server.adapter.start()
    held = server.open(name, seed=5, rows=rows)
    try:
        assert server.case is not None
        case = server.case
        if case.kind != "write":
            _, batches = server.check(2)
            assert driver.compare(case, Rows.of(case, 5, held["rows"]), batches) >= 2 * case.workload.batch
        for part in case.parts[1:]:
            assert server.time(part, 1)["wall_ns"] > 0
        benchmark(server._prepared(case.parts[0], 1), None)
    finally:
        server.close()


@pytest.fixture(scope="module")
def result():
    """A run of everything with Conduit and the ring, as short as can be."""
    told: list[str] = []
    found = Suite(setup.FOLDER, ["conduit", "numpy", "pufferlib"], ONCE, say=told.append).run(
        ("small-vector", "small-batch", "small-priorities", "two-writers", "visible"), cold=False
    )
    assert len(told) >= 5
    return found


def test_both_sides_are_timed_only_after_their_rows_were_compared(result):
    batch = result["cases"]["small-batch"]
    assert batch["compared"] == {"conduit": 512, "numpy": 512}
    for case, part in (("small-batch", "sample"), ("small-vector", "write"), ("two-writers", "rows in")):
        figures = result["cases"][case]["figures"][part]
        assert all(min(figures[name]["ns"]) > 0 for name in ("conduit", "numpy")), case
    assert min(result["cases"]["visible"]["figures"]["visible"]["conduit"]["ns"]) > 0
    assert "missing" in result["peers"]["pufferlib"] or "versions" in result["peers"]["pufferlib"]


def test_who_cannot_says_why(result):
    assert "no priorities" in result["cases"]["small-priorities"]["figures"]["update"]["numpy"]["cannot"]
    assert "ns" in result["cases"]["small-priorities"]["figures"]["update"]["conduit"]


def test_the_page_is_written_from_the_figures(result, tmp_path):
    result = json.loads(json.dumps(result))
    assert all(row.against is None for row in verdicts(result)), "the ring is a roofline, no peer"
    # as if the ring were one, so that ratios are there
    result["peers"]["numpy"]["roofline"] = False
    rows = {row.case: row for row in verdicts(result)}
    assert rows["small-batch"].against == "numpy"
    costs = [
        np.median(result["cases"]["small-batch"]["figures"]["sample"][name]["ns"]) for name in ("numpy", "conduit")
    ]
    assert rows["small-batch"].ratio.median == pytest.approx(costs[0] / costs[1])
    write(result, tmp_path)
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.index("Where Conduit loses") < page.index("## Writing")
    assert "cannot" in page
    for picture in (tmp_path / "benchmarks").glob("*.png"):
        assert f"benchmarks/{picture.name}" in page


def test_a_write_is_held_against_those_that_copy(result, tmp_path):
    result = json.loads(json.dumps(result))
    result["peers"] |= {
        name: {"roofline": False, "versions": {}, "python": "", "tensors": "", "note": ""} for name in "ab"
    }
    case = result["cases"]["small-vector"]
    ours = np.array(case["figures"]["write"]["conduit"]["ns"])
    case["figures"]["write"] |= {"a": {"ns": (ours / 2).tolist()}, "b": {"ns": (ours * 3).tolist()}}
    result["memory"] = {"small-batch": {"conduit": 121.0, "a": 8.0, "b": 181.0}}
    row = next(row for row in verdicts(result) if row.case == "small-vector")
    assert (row.against, row.ratio.median) == ("b", pytest.approx(3.0))
    assert (row.beside[0], row.beside[1].median) == ("a", pytest.approx(0.5))
    write(result, tmp_path)
    assert "a keeps the caller's arrays and copies nothing" in (tmp_path / "benchmarks.md").read_text()


@pytest.mark.parametrize("name", ["small-batch", "sequences-batch", "tokens-batch"])
def test_a_batch_with_one_wrong_value_refuses_the_timing(name):
    server = Server(ConduitEngine())
    server.adapter.start()
    held = server.open(name, seed=6, rows=1 << 10)
    try:
        assert server.case is not None
        _, batches = server.check(1)
        rows = Rows.of(server.case, 6, held["rows"])
        field = "tokens" if name == "tokens-batch" else "obs"
        batches[0][field].reshape(-1)[0] += 1
        with pytest.raises(AssertionError, match=field):
            driver.compare(server.case, rows, batches)
    finally:
        server.close()


def test_rows_come_from_the_seed_alone():
    case = CASES["small-batch"]
    assert Rows.of(case, 1, 256).digest == Rows.of(case, 1, 256).digest != Rows.of(case, 2, 256).digest


def test_a_process_that_ends_or_errs_is_a_refusal_with_its_reason():
    with driver.Process(driver.PEERS["numpy"], setup.FOLDER) as process:
        with pytest.raises(driver.Refused, match="KeyError"):
            process.ask("open", case="nonesuch", seed=0)
        process.kill()
        with pytest.raises(driver.Refused, match=r"ended|broke off"):
            process.ask("hello")


def test_adapters_of_others_import_no_conduit():
    for path in (ROOT / "perf" / "peers").glob("*.py"):
        if path.name != "conduit_engine.py":
            assert "\nimport conduit" not in path.read_text(), path
            assert "from conduit" not in path.read_text(), path
    assert {peer.module for peer in driver.PEERS.values()} <= {p.stem for p in (ROOT / "perf" / "peers").glob("*.py")}


def test_an_unknown_peer_is_refused_and_conduit_always_takes_part():
    assert list(names(["numpy"])) == ["conduit", "numpy"]
    with pytest.raises(SystemExit, match="expected peers of"):
        list(names(["nonesuch"]))
    assert driver.missing(driver.PEERS["numpy"], setup.FOLDER) is None
    assert driver.interpreter(driver.PEERS["numpy"], setup.FOLDER) == Path(sys.executable)
