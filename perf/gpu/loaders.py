"""Batches end to end: out of an engine, on the device, into a training step; and frames read from registered host memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

import conduit
from conduit.contracts.device import Device
from conduit.plane.device.loader import DeviceLoader
from conduit.plane.device.mirror import Mirror
from perf.gpu.found import Found
from perf.gpu.kernels import SCALE, Frames
from perf.gpu.measuring import Bench, close

Step = Callable[[torch.Tensor, torch.Tensor], None]


def registered(bench: Bench, device: Device) -> None:
    """The Atari batch read over the bus: single frames, each once, and storage that repeats them."""
    rows, shape = (bench.size(60_000, 40), (84, 84)) if not bench.interpret else (40, (8, 16))
    stride = -(-shape[0] * shape[1] // 128) * 128
    batch = bench.size(512, 3)
    host = np.random.default_rng(0).integers(0, 256, rows * stride + 4096, np.uint8)
    address = -(-host.ctypes.data // 4096) * 4096
    refused = device.register(address, rows * stride)
    if refused:
        bench.found.append(Found("Atari from registered host memory", note=refused))
        return
    memory = device.mapped(address, rows * stride)
    try:
        source = Frames(bench, memory.as_strided((rows, *shape), (stride, shape[1], 1)), batch)
        made = source.outputs("bfloat16", bench)
        transform = conduit.scale(SCALE, dtype="bfloat16")
        first = host[address - host.ctypes.data :][: rows * stride].reshape(rows, stride)[:, : shape[0] * shape[1]]

        def check() -> None:
            at = source.stack.cpu().numpy()
            want = torch.from_numpy(first[at].reshape(made[0].shape)).float() * SCALE
            close(made[0].cpu(), want.bfloat16())

        bench.measure(
            f"Atari {batch} to bfloat16 from registered host memory",
            lambda: source.make(transform, *made),
            moved=source.read,
            over_bus=True,
            check=check,
        )
        # storage of whole stacks: 4 frames a row, the next observation's stack stored again
        stacked = memory[: rows // 8 * 8 * stride].as_strided((rows // 8, 4, *shape), (8 * stride, stride, shape[1], 1))
        _stacked(bench, stacked, batch, made)
    finally:
        bench.sync()
        del memory
        device.unregister(address)


def _stacked(bench: Bench, stacked: torch.Tensor, batch: int, made: list[torch.Tensor]) -> None:
    from conduit.kernels.gpu.gather import Gather, gather

    rows, stride = len(stacked), stacked.stride(0) // 2
    frame = stacked[0, 0].numel()
    # a gather's rows are contiguous: 4 frames side by side, without the padding of single ones
    flat = stacked.as_strided((2 * rows, 4 * frame), (stride, 1))
    at = torch.randint(0, rows, (batch,), device=bench.device)
    outs = [out.view(batch, 4 * frame) for out in made]
    transform = conduit.scale(SCALE, dtype="bfloat16")
    items = [
        Gather(flat, index, out, transform, "stacks") for index, out in zip((2 * at, 2 * at + 1), outs, strict=True)
    ]
    bench.measure(
        f"Atari {batch} to bfloat16 from registered host memory, stacked storage",
        lambda: gather(items),
        moved=2 * batch * 4 * frame,
        over_bus=True,
    )


@contextmanager
def filled(schema: conduit.Schema, rows: int, envs: int, **options: int) -> Iterator[conduit.Engine]:
    """An engine whose table `replay` is full of random rows."""
    rng = np.random.default_rng(0)
    table = conduit.Table(schema, rows, num_envs=envs, **options)
    with conduit.Engine.create(f"gpu-check-{os.getpid()}", {"replay": table}, backing="memfd") as engine:
        with engine.writer("replay", num_envs=envs, autoreset="next_step") as writer:
            for _ in range(rows // envs):
                values = {field.name: _random(rng, field, envs) for field in schema.fields}
                writer.append(**values, terminated=rng.random(envs) < 0.005)
        yield engine


def _random(rng: np.random.Generator, field: conduit.Field, envs: int) -> np.ndarray:
    shape = (envs, *field.shape)
    if field.dtype.startswith("float"):
        return rng.normal(size=shape).astype(field.dtype)
    return (
        rng.integers(0, 6, shape).astype(field.dtype)
        if field.dtype == "int64"
        else rng.integers(0, 256, shape, np.uint8)
    )


def _convolutions(bench: Bench, side: tuple[int, int]) -> Step:
    """A step of training like that of a DQN on images."""
    kind = torch.float32 if bench.interpret else torch.bfloat16
    layers: list[torch.nn.Module] = [torch.nn.Conv2d(4, 32, 8, 4), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 4, 2)]
    layers += [torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3, 1), torch.nn.ReLU(), torch.nn.Flatten()]
    if bench.interpret:
        layers = [torch.nn.Flatten()]
    sized = torch.nn.Sequential(*layers)(torch.zeros(1, 4, *side)).shape[1]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(sized, 512), torch.nn.ReLU(), torch.nn.Linear(512, 18))
    net = net.to(bench.device, kind)
    optimiser = torch.optim.Adam(net.parameters(), 1e-4)

    def step(obs: torch.Tensor, following: torch.Tensor) -> None:
        with torch.no_grad():
            want = net(following.to(kind)).amax(1)
        loss = ((net(obs.to(kind)).mean(1) - want) ** 2).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()

    return step


def _dense(bench: Bench) -> Step:
    net = torch.nn.Sequential(torch.nn.Linear(4, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2)).to(bench.device)
    optimiser = torch.optim.Adam(net.parameters(), 1e-4)

    def step(obs: torch.Tensor, following: torch.Tensor) -> None:
        loss = ((net(obs).mean(1) - net(following).amax(1).detach()) ** 2).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()

    return step


def _waits(bench: Bench, name: str, loader: DeviceLoader, step: Step, *, graph: bool = False) -> None:
    """Steps on fresh batches against steps on one batch; the difference is what the learner waits."""
    bench.check(10.0)
    print(f"  {name} ...", flush=True)
    draws = loader.draws() if graph else None

    def fresh() -> None:
        if draws is None:
            batch = loader.next()
            step(batch["obs"], batch["next_obs"])
        else:
            draws.refresh()
            outputs = draws.replay()
            step(outputs["obs"], outputs["next_obs"])

    batch = loader.next()
    one = {key: value.clone() for key, value in batch.items()}
    rounds = 1 if bench.interpret else 6
    count = 1 if bench.interpret else 40
    ways = {"fresh": fresh, "same": lambda: step(one["obs"], one["next_obs"])}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            run()
            bench.sync()
            begun = time.perf_counter()
            for _ in range(count):
                run()
            bench.sync()
            times[way].append((time.perf_counter() - begun) / count)
    medians = {way: 1e6 * float(np.median(found)) for way, found in times.items()}
    found = Found(name, call_us=medians["fresh"], others={"step on one batch": medians["same"]})
    found.share = max(0.0, 1.0 - medians["same"] / medians["fresh"])
    found.note = "share: of the step's time spent waiting for batches"
    bench.found.append(found)


def end_to_end(bench: Bench, device: Device) -> None:
    """Loaders of Atari frames and of CartPole rows, into training steps."""
    side = (84, 84) if not bench.interpret else (32, 40)
    images = conduit.Schema(
        [
            conduit.Field("obs", "uint8", side, observation=True),
            conduit.Field("action", "int64"),
            conduit.Field("reward", "float32"),
        ]
    )
    dtype = "float32" if bench.interpret else "bfloat16"
    options = {
        "batch_size": bench.size(512, 3),
        "window": conduit.Transition(stack=4),
        "transform": {"obs": conduit.scale(SCALE, dtype=dtype)},
        "device": device,
        "seed": 1,
    }
    step = _convolutions(bench, side)
    rows, envs = bench.size(65_536, 64), bench.size(64, 2)
    with filled(images, rows, envs, max_stack=4) as engine:
        pool = rows * (7 << 10) * 2
        with engine.loader("replay", pool=min(pool, device.free_bytes() // 2), **options) as loader:
            _settle(loader)
            host = {key: options[key] for key in ("batch_size", "window", "transform", "seed")}
            with engine.loader("replay", **host) as cpu:
                want, have = cpu.next(), loader.next()
                for name, value in want.items():
                    close(have[name], value, name)
            _waits(bench, "loader, Atari, pool", loader, step)
            print(f"    rows that the host copied: {loader.copied_rows} of {loader.stats.rows}")
            _waits(bench, "draws of the device, Atari, pool, one graph", loader, step, graph=True)
        with engine.loader("replay", **options) as loader:
            _waits(bench, f"loader, Atari, {type(loader.residence).__name__.lower()} host memory", loader, step)
            print(f"    rows that the host copied: {loader.copied_rows} of {loader.stats.rows}")
    small = conduit.Schema(
        [
            conduit.Field("obs", "float32", (4,), observation=True),
            conduit.Field("action", "int64"),
            conduit.Field("reward", "float32"),
        ]
    )
    batch = bench.size(4096, 8)
    with (
        filled(small, bench.size(1 << 18, 64), envs) as engine,
        engine.loader("replay", batch_size=batch, device=device, seed=1) as loader,
    ):
        _waits(bench, "loader, CartPole, one copy per batch", loader, _dense(bench))


def _settle(loader: DeviceLoader) -> None:
    assert isinstance(loader.residence, Mirror)
    loader.residence.fill()
