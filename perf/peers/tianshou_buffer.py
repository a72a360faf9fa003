"""Tianshou: ReplayBuffer, VectorReplayBuffer and PrioritizedReplayBuffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perf.peers.adapter import Adapter, Arrays, main, one_thread, to_float
from perf.peers.cases import ALPHA, BETA, LENGTH, NAMES, ROLLOUT, Case, Rows, Tick


class Tianshou(Adapter):
    name = "tianshou"
    distributions = ("tianshou", "torch")
    fill_limit = 1 << 17

    def start(self) -> None:
        import torch
        from tianshou.data import (
            Batch,
            PrioritizedVectorReplayBuffer,
            ReplayBuffer,
            VectorReplayBuffer,
        )

        self.Batch, self.torch = Batch, torch
        self.kinds = (ReplayBuffer, VectorReplayBuffer, PrioritizedVectorReplayBuffer)
        one_thread()

    def cannot(self, case: Case) -> str | None:
        if case.kind == "frames":
            return "stack_num stacks frames when it samples, but takes an episode's final observation from the next row"
        return None

    def open(self, case: Case) -> None:
        self.case, load = case, case.workload
        single, vector, prioritized = self.kinds
        rows = ROLLOUT * load.lanes if case.kind == "rollout" else load.rows
        if case.kind == "priorities":
            self.buffer = prioritized(rows, load.lanes, alpha=ALPHA, beta=BETA)
        elif load.num_envs is None:
            self.buffer = single(rows, ignore_obs_next=case.kind in ("tokens", "sequences"))
        else:
            self.buffer = vector(rows, load.lanes, ignore_obs_next=case.kind == "rollout")

    def write(self, ticks: Sequence[Tick]) -> None:
        add, Batch = self.buffer.add, self.Batch
        if self.case.kind == "tokens":
            for t, count, a, r, d in ticks:
                add(Batch(obs=Batch(tokens=t, lengths=count), act=a, rew=r, terminated=d, truncated=False, info={}))
            return
        if self.case.workload.num_envs is None:
            for o, a, r, d, n in ticks:
                add(Batch(obs=o, act=a, rew=r, terminated=d, truncated=False, obs_next=n, info={}))
            return
        never = np.zeros(self.case.workload.lanes, bool)
        for o, a, r, d, n in ticks:
            add(Batch(obs=o, act=a, rew=r, terminated=d, truncated=never, obs_next=n, info={}))

    def fill(self, rows: Rows, case: Case) -> None:
        if case.kind == "rollout":
            return
        super().fill(rows, case)

    def _ready(self, batch: Any) -> Any:
        batch.to_torch_()
        ready = {"action": batch.act, "reward": batch.rew, "terminated": batch.terminated}
        if self.case.kind == "tokens":
            return ready | {"tokens": batch.obs.tokens, "lengths": batch.obs.lengths}
        ready["obs"] = to_float(batch.obs)
        if self.case.kind != "rollout":
            ready["next_obs"] = to_float(batch.obs_next)
        return ready

    def sample(self) -> Any:
        if self.case.kind == "sequences":
            return self._sequences()
        batch, index = self.buffer.sample(self.case.workload.batch)
        ready = self._ready(batch)
        if self.case.kind == "priorities":
            ready |= {"weights": batch.weight, "index": index}
        return ready

    def _sequences(self) -> Any:
        """Windows that end at drawn rows: `get` stacks any column."""
        size = self.case.workload.batch
        index = np.random.default_rng().integers(LENGTH, len(self.buffer), size)
        return {
            name: self.torch.from_numpy(self.buffer.get(index, key, stack_num=LENGTH))
            for name, key in zip(NAMES[:4], ("obs", "act", "rew", "terminated"), strict=True)
        }

    def rollout(self, ticks: Sequence[Tick]) -> Any:
        self.buffer.reset()
        self.write(ticks)
        batch, _ = self.buffer.sample(0)
        lanes = self.case.workload.lanes
        return {n: v.view(lanes, ROLLOUT, *v.shape[1:]).transpose(0, 1) for n, v in self._ready(batch).items()}

    def arrays(self, batch: Any) -> Arrays:
        names = {"index"} | ({"terminated"} if self.case.kind == "tokens" else set())
        return {name: np.asarray(value) for name, value in batch.items() if name not in names}

    def update(self, batch: Any, priorities: Any) -> None:
        self.buffer.update_weight(batch["index"], priorities)

    def close(self) -> None:
        self.buffer = None


if __name__ == "__main__":
    main(Tianshou())
