"""The measuring itself: what it reports holds for costs that are known."""

from __future__ import annotations

import numpy as np
import pytest

from perf.bars import Bar, load, measure, names, run, unmeasured
from perf.measure import Method, Spread, compare, ratio_text, time_text
from perf.rooflines import memcpy


def spin(turns: int) -> None:
    for _ in range(turns):
        pass


def test_a_method_that_does_twice_the_work_is_half_as_fast():
    result = compare(
        [Method("one", lambda: spin(20_000)), Method("two", lambda: spin(40_000))],
        clock="thread",
        seconds=5.0,
    )
    assert result.speed("two", "one").median == pytest.approx(0.5, rel=0.2)
    assert result.fastest(["two", "one"]) == "one"


def test_costs_are_per_unit_of_a_burst():
    result = compare(
        [Method("burst", lambda: spin(50_000), units=10), Method("single", lambda: spin(5_000))],
        seconds=5.0,
    )
    assert result.speed("burst", "single").median == pytest.approx(1.0, rel=0.25)


def test_every_burst_is_prepared_and_warm_up_rounds_are_thrown_away():
    calls: list[str] = []
    method = Method("m", lambda: calls.append("run"), prepare=lambda: calls.append("prepare"))
    result = compare([method], seconds=0.0, warm_up=2)
    assert result.cost("m").count == 3
    assert calls == ["prepare", "run"] * 5


def test_two_methods_of_one_name_are_refused():
    with pytest.raises(ValueError, match="different names"):
        compare([Method("m", spin), Method("m", spin)])


def test_a_spread_is_the_median_and_the_quartiles():
    spread = Spread.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (spread.median, spread.q25, spread.q75, spread.least, spread.count) == (3.0, 2.0, 4.0, 1.0, 5)
    assert ratio_text(spread) == "3.00x (IQR 2.00-4.00, n 5)"
    assert time_text(Spread.of(np.array([41_200.0]))) == "41.2 us (IQR 41.2-41.2)"


def test_an_unknown_table_lists_those_that_exist(capsys):
    assert run("nonesuch") == 2
    assert "engine" in capsys.readouterr().err
    assert "engine" in names()


def test_every_table_has_a_title_and_groups_that_say_what_they_measure():
    for name in names():
        table = load(name)
        assert table.TITLE
        assert all(group.__doc__ for group in table.GROUPS)


def test_a_group_that_fails_is_short_with_its_reason_and_hides_no_other(capsys):
    def broken():
        """The broken one."""
        yield Bar("first", "1", ">= 1", ok=True)
        raise RuntimeError("no luck")

    def whole():
        """The whole one."""
        yield Bar("last", "2", ">= 1", ok=True)

    bars = list(measure((broken, whole)))
    assert [(bar.name, bar.ok) for bar in bars] == [("first", True), ("The broken one", False), ("last", True)]
    assert str(bars[1]) == "The broken one | RuntimeError: no luck | measured | SHORT"
    assert "no luck" in capsys.readouterr().err


def test_a_row_that_was_not_measured_is_short():
    assert not unmeasured("a", ">= 1x", "cpprb not installed").ok


def test_memcpy_of_64_mib(benchmark):
    benchmark(memcpy(64 << 20).run)
