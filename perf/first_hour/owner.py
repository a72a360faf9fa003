"""How soon the clients of a killed owner are gone or told, whatever they are doing: real processes, and a real kill -9."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

import conduit
from perf.bars import Bar

_TRIES = 5
_PATIENCE = 60.0
_BAR = 1.0

_SCHEMA = conduit.Schema.from_example({"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0})
_STEP = {"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0}
_TABLES = {
    # no page of it is turned in the time that is measured
    "replay": conduit.Table.replay(_SCHEMA, capacity=1_000_000, page_rows=50_000),
    "limited": conduit.Table.replay(_SCHEMA, capacity=10_000, limiter=conduit.SampleToInsertRatio(1.0, 10, 10.0)),
    "empty": conduit.Table.replay(_SCHEMA, capacity=1_000),
    "full": conduit.Table.queue(_SCHEMA, capacity=100, page_rows=50),
    "waiting": conduit.Table.queue(_SCHEMA, capacity=100, page_rows=50),
}


Role = Callable[[conduit.Client], Iterator[None]]
"""What a client does; it yields when it has done it once, kernels loaded, and goes on for ever then."""


def _append(client: conduit.Client) -> Iterator[None]:
    """An actor of 50 steps a second."""
    writer = client.writer("replay")
    while True:
        writer.append(**_STEP)
        yield
        time.sleep(0.02)


def _append_flat_out(client: conduit.Client) -> Iterator[None]:
    writer = client.writer("replay")
    writer.append(**_STEP)
    yield
    while True:
        writer.append(**_STEP)


def _step(client: conduit.Client) -> Iterator[None]:
    writer = client.writer("replay")
    while True:
        with writer.step() as row:
            row.obs[:] = 0.0
            row.action, row.reward = 0, 0.0
        yield
        time.sleep(0.02)


def _rollout(client: conduit.Client) -> Iterator[None]:
    writer = client.writer("replay")
    while True:
        with writer.rollout(8) as rollout:
            rollout.obs[:], rollout.action[:], rollout.reward[:] = 0.0, 0, 0.0
        yield
        time.sleep(0.02)


def _write_until_it_waits(client: conduit.Client, table: str) -> Iterator[None]:
    with contextlib.suppress(conduit.errors.SpaceTimeout), client.writer(table, timeout=0.0) as writer:
        while True:
            writer.append(**_STEP)
    yield
    writer = client.writer(table, timeout=None)
    while True:
        writer.append(**_STEP)


def _at_the_limiter(client: conduit.Client) -> Iterator[None]:
    yield from _write_until_it_waits(client, "limited")


def _at_a_full_queue(client: conduit.Client) -> Iterator[None]:
    yield from _write_until_it_waits(client, "full")


def _in_vain(wait: Callable[..., object]) -> Iterator[None]:
    with contextlib.suppress(conduit.errors.WaitTimeout):
        wait(timeout=0.0)
    yield
    wait()


def _load(client: conduit.Client) -> Iterator[None]:
    yield from _in_vain(client.loader("empty", batch_size=8, format="numpy", timeout=None).next)


def _consume(client: conduit.Client) -> Iterator[None]:
    yield from _in_vain(client.consumer("waiting", format="numpy", timeout=None).next)


def _wait_for_weights(client: conduit.Client) -> Iterator[None]:
    slot = client.policy()
    with contextlib.suppress(conduit.errors.WaitTimeout):
        slot.wait(timeout=0.0)
    yield
    slot.wait(timeout=None)


_ROLES: dict[str, Role] = {
    "append": _append,
    "append flat out": _append_flat_out,
    "step": _step,
    "rollout": _rollout,
    "at a limiter": _at_the_limiter,
    "at a full queue": _at_a_full_queue,
    "loader": _load,
    "consumer": _consume,
    "policy": _wait_for_weights,
}


def _play(role: str, name: str) -> None:
    """Say so once at it, and say when the owner was found to be gone, by the clock that all processes share."""
    if role == "owner":
        with conduit.Engine.create(name, _TABLES, policies={"policy": {"w": np.zeros(3)}}):
            print("ready", flush=True)
            time.sleep(10 * _PATIENCE)
        return
    with conduit.attach(name, timeout=_PATIENCE) as client:
        work = _ROLES[role](client)
        next(work)
        print("ready", flush=True)
        try:
            for _ in work:
                pass
        except conduit.errors.OwnerGone:
            print(time.monotonic_ns(), flush=True)


def _start(role: str, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "perf.first_hour.owner", role, name], stdout=subprocess.PIPE, text=True
    )


def _heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"a process ended with status {process.wait(10)} before it had told anything")
    return line


def seconds_until_told() -> dict[str, float]:
    """Kill an owner of nine clients, and return {what a client did: seconds until it knew}.

    Raises:
        RuntimeError: A client ended otherwise, or was not told within a minute.
    """
    name = f"owner-killed-{os.getpid()}"
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        owner = processes["owner"] = _start("owner", name)
        _heard(owner)
        for role in _ROLES:
            processes[role] = _start(role, name)
        for role in _ROLES:
            _heard(processes[role])
        time.sleep(1.0)  # each is in the midst of it
        begun = time.monotonic_ns()
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
        found = {}
        for role in _ROLES:
            with contextlib.suppress(subprocess.TimeoutExpired):
                said, _ = processes[role].communicate(timeout=_PATIENCE)
                found[role] = (int(said) - begun) / 1e9
        if len(found) < len(_ROLES):
            raise RuntimeError(f"still at work: {', '.join(_ROLES.keys() - found.keys())}")
        return found
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
        with contextlib.suppress(conduit.errors.EngineNotFound):
            conduit.Engine.adopt(name).close()


def owner_killed() -> Iterator[Bar]:
    """An owner killed with -9."""
    tries = [seconds_until_told() for _ in range(_TRIES)]
    worst = sorted(max(one.values()) for one in tries)
    slowest = {role: max(one[role] for one in tries) for role in _ROLES}
    yield Bar(
        "owner killed with -9: all of its clients gone or told",
        f"{worst[len(worst) // 2]:.2f} s (at most {worst[-1]:.2f} s)",
        f"<= {_BAR:g} s",
        worst[-1] <= _BAR,
        (
            f"{_TRIES} kills, {len(_ROLES)} processes each; the latest of each kind: "
            + ", ".join(f"{role} {seconds:.2f}" for role, seconds in slowest.items()),
        ),
    )


GROUPS = (owner_killed,)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m perf.first_hour.owner")
    parser.add_argument("role", choices=("owner", *_ROLES))
    parser.add_argument("name")
    given = parser.parse_args()
    _play(given.role, given.name)
