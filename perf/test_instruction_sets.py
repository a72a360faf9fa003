"""Rows by instruction set: what is asked of processes by turns, and what is said where a set does not run."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest

from perf import instruction_sets
from perf.sides import Side, by_turns

FIGURES = {"level": lambda: float(os.environ["PERF_LEVEL"]), "half": lambda: float(os.environ["PERF_LEVEL"]) / 2}


def test_sides_answer_by_turns_with_their_own_environments():
    with contextlib.ExitStack() as stack:
        sides = {
            level: stack.enter_context(
                Side("perf.test_instruction_sets", environment={"PERF_LEVEL": level})
            )
            for level in ("3", "4")
        }  # fmt: skip
        found = dict(by_turns(sides, iter(FIGURES), 3))
    assert found["level"]["3"].tolist() == [3.0] * 3
    assert found["half"]["4"].tolist() == [2.0] * 3


def test_a_side_that_ends_is_an_error_and_no_wait():
    side = Side("perf.test_instruction_sets", environment={"PERF_LEVEL": "none"})
    with side, pytest.raises(RuntimeError, match="ended with 1"):
        side.ready()


def test_a_set_that_does_not_run_here_is_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(instruction_sets, "lacking", lambda name: f"no {name}" if name.endswith("v4") else None)
    (bar,) = instruction_sets.rows()
    assert not bar.ok
    assert bar.measured == "no x86-64-v4"


def test_a_row_is_the_speed_at_the_narrower_set_over_that_at_the_wider_one(monkeypatch):
    costs = {"x86-64-v3": np.array([1.0, 1.25, 2.0]), "x86-64-v4": np.array([1.0, 1.0, 1.0])}
    monkeypatch.setattr(instruction_sets, "compared", lambda *_: iter([("a row", costs)]))
    (bar,) = instruction_sets.rows()
    assert bar.measured.startswith("0.80x")
    assert not bar.ok


@pytest.mark.parametrize("name", list(instruction_sets.LOADERS))
def test_a_row_is_made_of_its_draw_its_delivery_and_python_around_it(name):
    took = instruction_sets.parts(name, 0.2)
    assert 0 < took["draw"] < took["delivery"] < took["next"]
