"""Counted deliveries, priorities of any size, and row ids: counts, draws and refusals are right."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Iterator

import numpy as np

import conduit
from conduit.testing import deliveries
from perf.bars import Bar

SECONDS = float(os.environ.get("CONDUIT_DELIVERIES_SECONDS", "600"))
"""How long writers and loaders are killed, both kinds of sampling together."""

_SCHEMA = conduit.Schema([conduit.Field("obs", "int64", (), observation=True), conduit.Field("reward", "float32")])
_DRAWS = 200


def _name() -> str:
    return f"counts-{uuid.uuid4().hex[:8]}"


def _deliveries() -> Iterator[Bar]:
    """Cases of deliveries."""
    for sampling in ("uniform", "prioritized"):
        report = deliveries.run(_name(), 20.0, sampling=sampling, kills=False, seed=1)  # type: ignore[arg-type]
        wrong = report.above + len(report.failures)
        yield Bar(
            f"B4 rows delivered more often than 3 times, or counted otherwise, 20 s, {sampling}",
            str(wrong),
            "0",
            wrong == 0,
        )
    for sampling in ("uniform", "prioritized"):
        report = deliveries.run(_name(), SECONDS / 2, sampling=sampling, kills=True, seed=2)  # type: ignore[arg-type]
        wrong = report.above + len(report.failures)
        yield Bar(
            f"B4 deliveries per row above their limit in {SECONDS / 2:.0f} s of overwriting under {report.kills} kills and "
            f"{report.stops} stops, {sampling} ({report.deliveries:,} deliveries)",
            str(wrong),
            "0",
            wrong == 0 and report.used_up > 0,
        )


def _share(values: np.ndarray, scale: float) -> float:
    """Share of draws that the last of some priorities has."""
    rule = conduit.Priorities(alpha=1.0, eps=0.0, scale=scale)
    table = conduit.Table(_SCHEMA, 1000, priorities=rule)
    with conduit.Engine.create(_name(), {"t": table}) as engine, engine.writer("t") as writer:
        for number in range(len(values) + 1):
            writer.append(obs=number, reward=0.0)
        sampling = conduit.Prioritized(stratified=False)
        with engine.loader("t", batch_size=1000, min_rows=1, sampling=sampling, format="numpy", seed=3) as loader:
            ids = np.full(len(values), -1)
            while (ids < 0).any():
                batch = loader.next()
                ids[batch["obs"]] = batch.ids
            loader.update_priorities(ids, values)
            last = len(values) - 1
            return float(np.mean([(loader.next()["obs"] == last).mean() for _ in range(_DRAWS)]))


def _priorities() -> Iterator[Bar]:
    """Cases of priorities."""
    for low, high, scale in ((2e3, 2e6, 1.0), (2e-9, 2e-6, 1e-9)):
        values = np.append(np.full(110, low), high)
        right = high / values.sum()
        got = _share(values, scale)
        yield Bar(
            f"A8 share of draws of the largest of {low:g} to {high:g}, alpha 1, scale {scale:g}",
            f"{got:.3f}",
            f"{right:.3f}",
            abs(got - right) < 0.005,
        )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _share(np.array([1.0, 1e30]), 1.0)
    yield Bar("A8 warnings of a priority that does not fit", str(len(told)), "1", len(told) == 1)


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (conduit.errors.FieldError, conduit.errors.ConfigError) as error:
        return type(error).__name__
    return "accepted"


def _ids() -> Iterator[Bar]:
    """Cases of ids."""
    table = conduit.Table(_SCHEMA, 100, priorities=conduit.Priorities())
    with conduit.Engine.create(_name(), {"one": table, "two": table}) as engine:
        for name in ("one", "two"):
            with engine.writer(name) as writer:
                for number in range(50):
                    writer.append(obs=number, reward=0.0)
        options = {"batch_size": 8, "min_rows": 1, "format": "numpy", "sampling": conduit.Prioritized()}
        with engine.loader("one", **options) as one, engine.loader("two", **options) as two:  # type: ignore[arg-type]
            ids, own = one.next().ids, two.next().ids
            cases: tuple[tuple[str, Callable[[], object], str], ...] = (
                (
                    "update_priorities of another table's ids",
                    lambda: two.update_priorities(ids, np.ones(8)),
                    "FieldError",
                ),
                ("delete of another table's ids", lambda: engine.table("two").delete(ids), "FieldError"),
                ("complex priorities", lambda: two.update_priorities(own, np.ones(8) * 1j), "FieldError"),
                ("NaN as beta", lambda: setattr(two.sampler, "beta", float("nan")), "ConfigError"),
            )
            for what, call, right in cases:
                got = _refused(call)
                yield Bar(f"A16 {what}", got, right, got == right)


GROUPS: tuple[Callable[[], Iterator[Bar]], ...] = (_priorities, _ids, _deliveries)
