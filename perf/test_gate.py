"""The smoke alarm: no hot path has slowed since its ratio was recorded, and a slow-down of 1.3 times would be seen."""

from __future__ import annotations

import contextlib
import json

import pytest

from perf import gate

PATHS = pytest.mark.parametrize("name", list(gate.PATHS))


@PATHS
def test_a_hot_path_is_as_fast_as_it_was(name):
    assert gate.slowed(name) is None


@PATHS
def test_a_slow_down_of_1_3_times_sets_the_alarm_off(name):
    known, limit = gate.recorded()
    if limit != gate.LIMIT:
        pytest.skip(f"nothing was recorded for {gate.kind()}: python -m perf.gate --record")
    with contextlib.ExitStack() as stack:  # against what this machine does now: the recorded one has its own test
        path = gate.PATHS[name](stack)
        now = min(gate.ratio(path) for _ in range(2))
        assert gate.ratio(path, slowed=1.3) > now * gate.LIMIT
    assert known[name] > 0


def test_a_slow_down_is_told_with_its_numbers(monkeypatch, tmp_path):
    record = tmp_path / "gate.json"
    record.write_text(json.dumps({gate.kind(): dict.fromkeys(gate.PATHS, 1e-6)}))
    monkeypatch.setattr(gate, "RECORDED", record)
    monkeypatch.setattr(gate, "SECONDS", 0.01)
    said = gate.slowed("append", tries=1)
    assert said is not None
    assert "times as slow" in said
