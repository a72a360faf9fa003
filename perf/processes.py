"""The other processes of the bars: writers that write flat out, and probes that attach.

`python -m perf.processes ROLE ENGINE ...`; each prints one line of JSON per event to stdout.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

TABLE = "replay"


def say(**facts: Any) -> None:
    """One JSON line."""
    print(json.dumps(facts), flush=True)


def sealed_rows(rng: np.random.Generator, count: int, lanes: int | None) -> list[dict[str, Any]]:
    """CartPole rows (or ticks of `lanes`) whose fields follow from each other, so that a mixed row shows.

    obs = x * (1, 2, 4, 8) for a whole number x, action = x, reward = -x.
    """
    x = rng.integers(1, 1 << 20, (count, lanes or 1))
    obs = (x[..., None] * np.array([1, 2, 4, 8])).astype(np.float32)
    rows = [{"obs": obs[i], "action": x[i], "reward": -x[i].astype(np.float32)} for i in range(count)]
    if lanes is None:
        return [{"obs": r["obs"][0], "action": int(r["action"][0]), "reward": float(r["reward"][0])} for r in rows]
    return rows


def broken_rows(batch: Any) -> int:
    """How many rows of a batch are not as `sealed_rows` made them: torn, or mixed from two rows."""
    obs, action, reward = (np.asarray(batch[name]) for name in ("obs", "action", "reward"))
    whole = (obs == action[:, None] * np.array([1, 2, 4, 8], np.float32)).all(1) & (reward == -action)
    follower = np.asarray(batch["next_obs"])
    whole &= (follower == follower[:, :1] * np.array([1, 2, 4, 8], np.float32)).all(1)
    return int((~whole).sum())


def flat_out(engine: str, envs: int | None, seed: int) -> None:
    """Appends without a pause until SIGTERM; then says how many rows and CPU seconds it was."""
    import conduit

    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    with (
        conduit.attach(engine, timeout=10.0) as client,
        client.writer(TABLE, num_envs=envs, autoreset="next_step" if envs else None) as writer,
    ):
        append = writer.append
        rows = sealed_rows(np.random.default_rng(seed), 512, envs)
        ended = np.zeros(envs, np.bool_) if envs else False
        calls = 0
        say(ready=True)
        started = time.process_time()
        while not stopped:
            for row in rows:
                append(**row, terminated=ended)
            calls += len(rows)
        say(rows=calls * (envs or 1), cpu_s=time.process_time() - started)


def _mappings() -> dict[str, int]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in lines if line.split()[1].endswith("s")]
    return {"fds": sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1, "maps": len(lines), "shared_maps": len(shared)}


def attach_probe(engine: str, repeats: int) -> None:
    """Times attach (and a writer after it) with everything imported, and counts descriptors and mappings."""
    import conduit

    def once() -> tuple[int, int]:
        start = time.perf_counter_ns()
        client = conduit.attach(engine)
        attached = time.perf_counter_ns()
        writer = client.writer(TABLE)
        ready = time.perf_counter_ns()
        writer.close()
        client.close()
        return attached - start, ready - start

    once()
    times = [once() for _ in range(repeats)]
    gc.collect()
    before = _mappings()
    with (
        conduit.attach(engine) as client,
        client.writer(TABLE),
        client.loader(TABLE, batch_size=256, format="numpy") as loader,
    ):
        loader.next()
        after = _mappings()
    say(
        attach_ns=[a for a, _ in times],
        writer_ns=[w for _, w in times],
        held={key: after[key] - before[key] for key in before},
    )


def cold_writer(engine: str) -> None:
    """Becomes a writer from a cold interpreter, appends a row, and says that it is ready."""
    import conduit

    with conduit.attach(engine) as client, client.writer(TABLE) as writer:
        writer.append(obs=np.zeros(4, np.float32), action=1, reward=1.0, terminated=False)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        # not ru_maxrss, which starts with what the parent had at the fork
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        say(
            ready=True,
            torch="torch" in sys.modules,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_mb=int(status["VmHWM"].split()[0]) / 1024,
        )


def queue_writer(engine: str, envs: int, rollouts: int) -> None:
    """Appends rollouts of 128 ticks to a queue; between the last tick of each and those before it a learner falls asleep.

    obs = (number of the tick, environment, 0, 0), action = number of the tick, reward = -action; the last tick's action is the
    moment before its append, in ns of the monotonic clock.
    """
    import conduit

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the learner takes another one
    with (
        conduit.attach(engine, timeout=10.0) as client,
        client.writer(TABLE, num_envs=envs, autoreset="next_step", timeout=30.0) as writer,
    ):
        ticks = writer.ticks_left
        obs = np.zeros((envs, 4), np.float32)
        obs[:, 1] = np.arange(envs)
        action, reward = np.zeros(envs, np.int64), np.zeros(envs, np.float32)
        say(ready=True)
        for number in range(rollouts * ticks):
            obs[:, 0], action[:], reward[:] = number, number, -number
            if number % ticks == ticks - 1:
                time.sleep(0.004)
                action[:] = time.monotonic_ns()
            writer.append(obs=obs, action=action, reward=reward)


def main(arguments: list[str] | None = None) -> int:
    """Runs one role."""
    parser = argparse.ArgumentParser(prog="python -m perf.processes", description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("flat-out", "attach-probe", "cold-writer", "queue-writer"))
    parser.add_argument("engine")
    parser.add_argument("--envs", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args(arguments)
    if given.role == "flat-out":
        flat_out(given.engine, given.envs, given.seed)
    elif given.role == "attach-probe":
        attach_probe(given.engine, given.repeats)
    elif given.role == "cold-writer":
        cold_writer(given.engine)
    else:
        queue_writer(given.engine, given.envs, given.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
