"""cpprb 11: a ring per field in C++ and Cython."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any

import numpy as np

from perf.peers import feed
from perf.peers.adapter import Adapter, Arrays, main, one_thread, to_float
from perf.peers.cases import ALPHA, BETA, EPS, ROLLOUT, Case, Rows, Tick


def _writer_process(buffer: Any, ticks: list[Tick], count: Any, ready: Any) -> None:
    feed.end_with_parent()
    ready.release()
    while True:
        for o, a, r, d, n in ticks:
            buffer.add(obs=o, action=a, reward=r, terminated=d, next_obs=n)
            count.value += len(a)


class Cpprb(Adapter):
    name = "cpprb"
    distributions = ("cpprb", "torch")

    def start(self) -> None:
        import cpprb
        import torch

        self.cpprb, self.torch = cpprb, torch
        one_thread()

    def cannot(self, case: Case) -> str | None:
        if case.kind == "frames":
            return "stack_compress stores each frame once, but takes and returns stacks; it makes no stacks of single frames"
        if case.kind == "sequences":
            return "draws single rows; sequences must be stored as rows of their own"
        return None

    def open(self, case: Case) -> None:
        self.case, load = case, case.workload
        kinds: dict[str, Any] = {
            part.name: {"shape": part.shape or 1, "dtype": np.dtype(part.dtype)} for part in load.parts
        }
        kinds["terminated"] = {"shape": 1, "dtype": np.dtype(bool)}
        if case.kind == "tokens":
            kinds["lengths"] = {"shape": 1, "dtype": np.dtype(np.int64)}
        else:
            kinds["next_obs"] = kinds["obs"]
        size = ROLLOUT * load.lanes if case.kind == "rollout" else load.rows
        if case.kind == "priorities":
            self.buffer = self.cpprb.PrioritizedReplayBuffer(size, kinds, alpha=ALPHA, eps=EPS)
        elif case.kind == "concurrent":
            context = multiprocessing.get_context("spawn")
            self.buffer = self.cpprb.MPReplayBuffer(size, kinds, ctx=context, backend="SharedMemory")
        else:
            self.buffer = self.cpprb.ReplayBuffer(size, kinds)

    def write(self, ticks: Sequence[Tick]) -> None:
        add = self.buffer.add
        if self.case.kind == "tokens":
            for t, count, a, r, d in ticks:
                add(tokens=t, lengths=count, action=a, reward=r, terminated=d)
            return
        for o, a, r, d, n in ticks:
            add(obs=o, action=a, reward=r, terminated=d, next_obs=n)

    def fill(self, rows: Rows, case: Case) -> None:
        if case.kind == "rollout":
            return
        flat = rows.flat()
        for start in range(0, len(flat["action"]), 1 << 12):
            self.buffer.add(**{name: column[start : start + (1 << 12)] for name, column in flat.items()})

    def sample(self) -> Any:
        size = self.case.workload.batch
        if self.case.kind == "priorities":
            batch = self.buffer.sample(size, BETA)
            return {n: v if n == "indexes" else self.torch.from_numpy(v) for n, v in batch.items()}
        return self._ready(self.buffer.sample(size))

    def _ready(self, arrays: dict[str, Any]) -> Any:
        batch = {name: self.torch.from_numpy(value) for name, value in arrays.items()}
        if self.case.kind not in ("tokens", "rollout"):
            batch["obs"], batch["next_obs"] = to_float(batch["obs"]), to_float(batch["next_obs"])
        return batch

    def rollout(self, ticks: Sequence[Tick]) -> Any:
        self.buffer.clear()
        self.write(ticks)
        lanes = self.case.workload.lanes
        batch = self._ready(self.buffer.get_all_transitions())
        return {name: value.view(ROLLOUT, lanes, *value.shape[1:]) for name, value in batch.items()}

    def arrays(self, batch: Any) -> Arrays:
        found = {n: np.asarray(v) for n, v in batch.items() if n != "indexes"}
        axes = 2 if self.case.kind == "rollout" else 1
        for name in ("action", "reward", "terminated", "lengths"):
            if name in found:
                found[name] = found[name].reshape(found[name].shape[:axes])
        found.pop("next_obs" if self.case.kind == "rollout" else "", None)
        if self.case.kind == "tokens":
            del found["terminated"]
        return found

    def update(self, batch: Any, priorities: Any) -> None:
        self.buffer.update_priorities(batch["indexes"], priorities)

    def concurrent(self, case: Case, rows: Rows, seconds: float) -> dict[str, float]:
        """Its MPReplayBuffer: explorers write into shared memory."""
        self.fill(Rows.of(case, 1, 4096), case)
        context = multiprocessing.get_context("spawn")
        counts = [context.Value("q", 0, lock=False) for _ in range(case.writers)]
        parts = feed.parts_of(rows, case, case.writers)
        given = [(self.buffer, part, count) for part, count in zip(parts, counts, strict=True)]
        with feed.processes(_writer_process, given):
            return feed.learn(
                seconds, lambda: 0, self.sample, case.workload.batch, lambda: sum(count.value for count in counts)
            )

    def close(self) -> None:
        self.buffer = None


if __name__ == "__main__":
    main(Cpprb())
