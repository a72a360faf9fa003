"""Conduit, behind the same protocol as everybody else."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import conduit
from perf.peers import feed
from perf.peers.adapter import Adapter, Arrays, main, one_thread
from perf.peers.cases import ALPHA, BETA, EPS, LENGTH, LONGEST, ROLLOUT, SCALE, SHORTEST, STACK, Case, Rows, Tick

TABLE = "replay"
_numbers = itertools.count()


def _writer_process(name: str, ticks: list[Tick], lanes: int, ready: Any) -> None:
    feed.end_with_parent()
    with (
        conduit.attach(name, timeout=30.0) as client,
        client.writer(TABLE, num_envs=lanes, autoreset="same_step") as writer,
    ):
        ready.release()
        while True:
            _append(writer, ticks)


def _pinging_process(name: str, ticks: list[Tick], times: Any, ready: Any) -> None:
    feed.end_with_parent()
    with conduit.attach(name, timeout=30.0) as client, client.writer(TABLE, autoreset="same_step") as writer:
        ready.release()
        for i, (obs, action, reward, _, following) in enumerate(ticks):
            time.sleep(feed.PERIOD)
            times[i] = time.perf_counter_ns()
            writer.append(obs=obs, action=action, reward=reward, terminated=True, final=following)
        time.sleep(60)


def _append(writer: Any, ticks: Sequence[Tick]) -> None:
    """The next observation is handed over as the final one: it is used where an episode ended."""
    append = writer.append
    for obs, action, reward, ended, following in ticks:
        append(obs=obs, action=action, reward=reward, terminated=ended, final=following)


class ConduitEngine(Adapter):
    name = "conduit"
    distributions = ("torch", "numba")

    def start(self) -> None:
        one_thread()
        self.stack = contextlib.ExitStack()

    def open(self, case: Case) -> None:
        self.case, load = case, case.workload
        fields = [
            conduit.Field(p.name, p.dtype, p.shape, observation=p.observation, ragged=p.name == "tokens")
            for p in load.parts
        ]
        table: dict[str, Any] = {"num_envs": load.lanes}
        reader: dict[str, Any] = {"batch_size": load.batch, "seed": 0}
        if case.kind == "priorities":
            table["priorities"] = conduit.Priorities(alpha=ALPHA, eps=EPS)
            reader["sampling"] = conduit.Prioritized(beta=BETA)
        elif case.kind == "frames":
            table["max_stack"] = STACK
            reader["window"] = conduit.Transition(stack=STACK)
        elif case.kind == "sequences":
            table["max_length"] = LENGTH
            reader["window"] = conduit.Sequence(LENGTH, across=True)
        elif case.kind == "rollout":
            table |= {"kind": "queue", "rollout_length": ROLLOUT}
        elif case.kind == "tokens":
            table["mean_lengths"] = {"tokens": (SHORTEST + LONGEST) / 2}
            reader["ragged"] = "pad"
            reader["fields"] = (*(p.name for p in load.parts), "terminated", "truncated")
        elif case.kind == "visible":
            reader |= {"batch_size": 1, "min_rows": 1}
        if load.rows <= 1 << 12 and case.kind not in ("rollout", "tokens"):
            table.setdefault("page_rows", max(16 * load.lanes, 256))  # several pages even in a small table
        if load.parts[0].dtype == "uint8":
            reader["transform"] = {"obs": conduit.scale(SCALE, dtype="float32")}
        elif load.parts[0].dtype == "float64":
            reader["transform"] = {"obs": conduit.cast("float32")}
        self.engine_name = f"peers-{os.getpid()}-{next(_numbers)}"
        tables = {TABLE: conduit.Table(conduit.Schema(fields), capacity=load.rows, **table)}
        self.stack = contextlib.ExitStack()
        engine = self.stack.enter_context(conduit.Engine.create(self.engine_name, tables=tables))
        self.writer = self.stack.enter_context(engine.writer(TABLE, num_envs=load.num_envs, autoreset="same_step"))
        self.claim: Any = None
        if case.kind == "rollout":
            self.consumer = self.stack.enter_context(engine.consumer(TABLE, timeout=10.0))
        else:
            self.loader = self.stack.enter_context(engine.loader(TABLE, **reader))

    def write(self, ticks: Sequence[Tick]) -> None:
        if self.case.kind == "tokens":
            for tokens, length, action, reward, ended in ticks:
                self.writer.append(tokens=tokens[:length], action=action, reward=reward, terminated=ended)
            return
        _append(self.writer, ticks)

    def fill(self, rows: Rows, case: Case) -> None:
        if case.kind != "rollout":  # what a queue holds would come before what is timed
            super().fill(rows, case)

    def sample(self) -> Any:
        if self.case.kind == "rollout":
            if self.claim is not None:
                self.claim.ack()
            batch = self.claim = self.consumer.next()
            return batch, batch["obs"], batch["action"], batch["reward"], batch["terminated"]
        batch = self.loader.next()
        if self.case.kind == "tokens":
            return batch["tokens"], batch["tokens_mask"], batch["action"], batch["reward"]
        if self.case.kind == "sequences":
            return batch, batch["obs"], batch["action"], batch["reward"], batch["terminated"]
        if self.case.kind == "priorities":
            return (
                batch, batch["obs"], batch["action"], batch["reward"], batch["terminated"], batch["next_obs"], batch["weights"],
            )  # fmt: skip
        return batch, batch["obs"], batch["action"], batch["reward"], batch["terminated"], batch["next_obs"]

    def arrays(self, batch: Any) -> Arrays:
        if self.case.kind == "tokens":
            tokens, mask, action, reward = (value.numpy() for value in batch)
            return {"tokens": tokens, "lengths": mask.sum(1), "action": action, "reward": reward}
        if self.case.kind == "rollout":
            return dict(
                zip(("obs", "action", "reward", "terminated"), (value.numpy() for value in batch[1:]), strict=True)
            )
        names = [n for n in ("obs", "action", "reward", "terminated", "next_obs", "weights") if n in batch[0]]
        return {n: batch[0][n].numpy() for n in names}

    def update(self, batch: Any, priorities: Any) -> None:
        self.loader.update_priorities(batch[0].ids, priorities)

    def rollout(self, ticks: Sequence[Tick]) -> Any:
        _append(self.writer, ticks)
        return self.sample()

    def concurrent(self, case: Case, rows: Rows, seconds: float) -> dict[str, float]:
        _append(self.writer, rows.ticks(case.workload.num_envs, 64))
        given = [(self.engine_name, part, case.workload.lanes) for part in feed.parts_of(rows, case, case.writers)]
        with feed.processes(_writer_process, given):
            return feed.learn(seconds, lambda: 0, self.sample, case.workload.batch, lambda: _written(self.engine_name))

    def visible(self, case: Case, rows: Rows, count: int) -> list[int]:
        """A row that ends its episode can be drawn at once: counted from its own `append`."""
        ticks = rows.ticks(None, count + 1)
        sent = multiprocessing.get_context("spawn").RawArray("q", count + 1)
        obs, action, reward, _, following = ticks[0]
        for _ in range(2):
            self.writer.append(obs=obs, action=action, reward=reward, terminated=True, final=following)
        self.writer.close()
        seen: list[int] = []
        loader, sampler = self.loader, self.loader.sampler
        loader.next()
        known = sampler.offered
        with feed.processes(_pinging_process, [(self.engine_name, ticks, sent)]):
            deadline = time.perf_counter() + 60
            while len(seen) < count and time.perf_counter() < deadline:
                loader.next()
                while sampler.offered > known:
                    known += 1
                    seen.append(time.perf_counter_ns())
        return (np.array(seen) - np.array(sent)[: len(seen)]).tolist()

    def close(self) -> None:
        self.stack.close()
        self.writer = self.loader = self.consumer = self.claim = None  # they keep the memory mapped


def _written(name: str) -> int:
    from conduit.plane.observe import inspect

    return inspect.inspect(name).tables[0].rows_written


if __name__ == "__main__":
    main(ConduitEngine())
