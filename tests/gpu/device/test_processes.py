"""Learners in processes of their own, each with its own pool, beside a writer that goes round the table all the time."""

import multiprocessing
import time

import numpy as np
import pytest
import torch

import conduit
from tests.gpu.device.conftest import INTERPRETED, SMALL

SECONDS = 1.5


def write(name, stop):
    """Rows that can be told apart and checked: obs = (action, action, 3 * action, 1), reward = action."""
    with conduit.attach(name) as client, client.writer("replay") as writer:
        n = 0
        obs = np.ones(4, np.float32)
        while not stop.is_set():
            obs[:] = n, n, 3 * n, 1
            writer.append(obs=obs, action=n, reward=float(n))
            n = (n + 1) % (1 << 20)
            if n % 256 == 0:
                # the interpreter takes its time too: round the table in about a second, so that some pages outlive a batch
                time.sleep(0.02)


def learn(name, rank, results):
    """Draw and check batches for a while; report what came."""
    from conduit.plane.device.cuda import CudaDevice
    from conduit.plane.device.host import HostDevice

    device = HostDevice() if INTERPRETED else CudaDevice("cuda")
    batches = torn = 0
    with conduit.attach(name) as client:
        options = {"batch_size": 64, "seed": 5, "shard": (rank, 2), "transform": {"obs": conduit.scale(2.0)}}
        with client.loader("replay", device=device, pool=60_000 if rank else "1 MiB", **options) as loader:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                batch = {key: value.cpu() for key, value in loader.next().items()}
                n = batch["action"].float()
                want = torch.stack([n, n, 3 * n, torch.ones(64)], 1)
                torn += int((batch["obs"] != 2 * want).any(1).sum() + (batch["reward"] != n).sum())
                after = torch.stack([n + 1, n + 1, 3 * (n + 1), torch.ones(64)], 1)
                torn += int((batch["next_obs"] != 2 * after).any(1).sum())
                batches += 1
            copied, mirrored = loader.copied_rows, loader.residence.copied
    results.put((rank, batches, torn, copied, mirrored))


@pytest.mark.timeout(120)
def test_learners_beside_a_writer_that_never_stops_get_whole_rows_only(engine_name):
    spawn = multiprocessing.get_context("spawn")
    with conduit.Engine.create(engine_name, {"replay": conduit.Table(SMALL, 10_000, page_rows=256)}) as engine:
        with engine.writer("replay") as writer:
            for n in range(500):
                writer.append(obs=np.array([n, n, 3 * n, 1], np.float32), action=n, reward=float(n))
        stop, results = spawn.Event(), spawn.Queue()
        learners = [spawn.Process(target=learn, args=(engine_name, rank, results)) for rank in range(2)]
        writers = [spawn.Process(target=write, args=(engine_name, stop))]
        for process in [*writers, *learners]:
            process.start()
        try:
            found = sorted(results.get(timeout=90) for _ in learners)
        finally:
            stop.set()
            for process in [*writers, *learners]:
                process.join(30)
                process.kill()
    for _, batches, torn, copied, mirrored in found:
        assert batches > 5
        assert torn == 0
        assert mirrored > 5
        assert 0 < copied <= 64 * batches
