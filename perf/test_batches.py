"""Learner-ready batches: Conduit's loader beside cpprb, numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest

from perf import subjects
from perf.baselines import PixelGather, cpprb_absent, cpprb_batches
from perf.workloads import CARTPOLE, PIXELS, ticks, values


def test_cartpole_batches_are_what_was_written(benchmark, sized, rng):
    workload = sized(CARTPOLE)
    with subjects.engine(workload) as (client, _), subjects.filler(client, workload) as writer:
        log = subjects.fill(writer, workload, rng, rows=workload.rows // 2)
        with client.loader(subjects.TABLE, batch_size=workload.batch, seed=0) as loader:
            assert subjects.check_batches(loader, log, batches=10) == 10 * workload.batch
            benchmark(loader.next)


@pytest.mark.skipif(cpprb_absent() is not None, reason=cpprb_absent() or "")
def test_cpprb_batches_are_what_was_written(benchmark, sized, rng):
    workload = sized(CARTPOLE)
    columns = {n: c.reshape(-1, *c.shape[2:]) for n, c in ticks(workload, workload.rows // workload.lanes, rng).items()}
    sample = cpprb_batches(workload, columns, columns["obs"] + 1)
    batch = benchmark(sample)
    assert (batch["obs"].numpy() == columns["obs"][batch["action"].numpy().ravel()]).all()
    assert (batch["next_obs"] == batch["obs"] + 1).all()


def test_pixel_batches_are_what_was_written(benchmark, sized, rng):
    workload = sized(PIXELS)
    transform = {"obs": subjects.conduit.scale(1 / 255, dtype="float32")}
    with subjects.engine(workload) as (client, _), subjects.filler(client, workload) as writer:
        log = subjects.fill(writer, workload, rng, rows=workload.rows // 2)
        with client.loader(subjects.TABLE, batch_size=workload.batch, transform=transform, seed=0) as loader:
            subjects.check_batches(loader, log, batches=2, scaled=1 / 255)
            benchmark(loader.next)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_pixel_gathers_match_float64(benchmark, sized, library, rng):
    workload = sized(PIXELS)
    table = values("uint8", (workload.rows, *PIXELS.parts[0].shape), rng).view(np.uint8)
    gather = PixelGather(workload, table, step=workload.lanes)
    benchmark(gather.with_numpy if library == "numpy" else gather.with_torch())
    gather.check()
