"""Stable-Baselines3: ReplayBuffer and RolloutBuffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perf.peers.adapter import Adapter, Arrays, main, one_thread, to_float
from perf.peers.cases import ROLLOUT, Case, Rows, Tick


class StableBaselines(Adapter):
    name = "sb3"
    distributions = ("stable-baselines3", "torch")

    def start(self) -> None:
        import torch
        from gymnasium import spaces
        from stable_baselines3.common import buffers

        self.buffers, self.torch, self.spaces = buffers, torch, spaces
        one_thread()

    def cannot(self, case: Case) -> str | None:
        return {
            "priorities": "has no prioritized buffer",
            "frames": "stores the stacks that a wrapper makes; does not stack when it samples",
            "sequences": "draws single transitions",
            "tokens": "observations have one shape; its buffers cannot hold a Box of the longest shape with a length beside it",
        }.get(case.kind)

    def open(self, case: Case) -> None:
        self.case, load = case, case.workload
        obs = load.parts[0]
        bounds = (0, 255) if obs.dtype == "uint8" else (-np.inf, np.inf)
        space = self.spaces.Box(*bounds, obs.shape, np.dtype(obs.dtype))
        actions = self.spaces.Discrete(1 << 31)
        if case.kind == "rollout":
            self.buffer = self.buffers.RolloutBuffer(ROLLOUT, space, actions, device="cpu", n_envs=load.lanes)
        else:
            self.buffer = self.buffers.ReplayBuffer(load.rows, space, actions, device="cpu", n_envs=load.lanes)
        self.infos: list[dict[str, Any]] = [{} for _ in range(load.lanes)]
        self.zeros = self.torch.zeros(load.lanes)

    def write(self, ticks: Sequence[Tick]) -> None:
        add, infos = self.buffer.add, self.infos
        if self.case.workload.num_envs is None:
            for o, a, r, d, n in ticks:
                add(o[None], n[None], np.array([a]), np.array([r]), np.array([d]), infos)
            return
        for o, a, r, d, n in ticks:
            add(o, n, a, r, d, infos)

    def fill(self, rows: Rows, case: Case) -> None:
        if case.kind != "rollout":
            super().fill(rows, case)

    def sample(self) -> Any:
        batch = self.buffer.sample(self.case.workload.batch)
        return batch, to_float(batch.observations), to_float(batch.next_observations)

    def rollout(self, ticks: Sequence[Tick]) -> Any:
        buffer, zeros = self.buffer, self.zeros
        buffer.reset()
        for o, a, r, d, _ in ticks:
            buffer.add(o, a, r, d, zeros, zeros)
        buffer.compute_returns_and_advantage(zeros, ticks[-1][3])
        return next(buffer.get())

    def arrays(self, batch: Any) -> Arrays:
        if self.case.kind != "rollout":
            return {
                "obs": batch[1].numpy(),
                "next_obs": batch[2].numpy(),
                "action": batch[0].actions.numpy()[:, 0],
                "reward": batch[0].rewards.numpy()[:, 0],
                "terminated": batch[0].dones.numpy()[:, 0],
            }
        # it hands out shuffled rows without rewards: those are in the buffer, environment by environment
        order = batch.actions.numpy()[:, 0].argsort()
        lanes = self.case.workload.lanes
        return {
            "obs": batch.observations.numpy()[order].reshape(ROLLOUT, lanes, -1),
            "action": batch.actions.numpy()[order, 0].reshape(ROLLOUT, lanes),
            "reward": self.buffer.rewards.copy(),
            "terminated": self.buffer.episode_starts.copy(),
        }

    def close(self) -> None:
        self.buffer = None


if __name__ == "__main__":
    main(StableBaselines())
