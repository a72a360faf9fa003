"""Fixtures of the benchmark files: workloads at full size when measured, small when run once as tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from perf import machine
from perf.workloads import Workload


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, object]) -> None:
    """The JSON of a run says what it ran on, as the suite's figures do."""
    machine_info["conduit"] = machine.describe()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.fixture
def sized(benchmark: BenchmarkFixture) -> Callable[[Workload], Workload]:
    """A workload as it is when benchmarks are enabled; with 4096 rows when each runs once."""
    return lambda workload: workload if benchmark.enabled else workload.sized(1 << 12)
