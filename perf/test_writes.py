"""Writing from Python: `append` and the unchecked handle beside a plain private ring, one burst per benchmark round."""

from __future__ import annotations

import pytest

from perf import subjects
from perf.baselines import PlainRing
from perf.workloads import SLAB_28KB, SLAB_97B, STEP_97B, ticks

WORKLOADS = pytest.mark.parametrize("workload", [STEP_97B, SLAB_97B, SLAB_28KB], ids=lambda w: w.name.replace(" ", ""))
DISTINCT = 8


@WORKLOADS
def test_a_plain_ring_holds_the_last_ticks(benchmark, sized, workload, rng):
    workload = sized(workload)
    columns = ticks(workload, DISTINCT, rng)
    ring = PlainRing(workload)
    write = ring.slab_loop() if workload.num_envs else ring.step_loop()
    data = subjects.rows_of(workload, columns)
    benchmark(write, data)
    last = slice(ring.at - DISTINCT * workload.lanes, ring.at) if ring.at else slice(-DISTINCT * workload.lanes, None)
    for name, column in columns.items():
        assert (ring.columns[name][last] == column.reshape(-1, *column.shape[2:])).all(), name


@WORKLOADS
@pytest.mark.parametrize("kind", list(subjects.LOOPS))
def test_written_rows_are_the_rows_delivered(benchmark, sized, workload, kind, rng):
    workload = sized(workload)
    assert subjects.check_writes(workload, kind, rng) > 0
    data = subjects.rows_of(workload, ticks(workload, DISTINCT, rng))
    with (
        subjects.engine(workload) as (client, _),
        client.writer(
            subjects.TABLE, num_envs=workload.num_envs, autoreset="next_step" if workload.num_envs else None
        ) as writer,
    ):
        benchmark(subjects.LOOPS[kind](writer, workload), data)
