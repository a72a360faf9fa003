"""RLlib's episode buffers: EpisodeReplayBuffer and PrioritizedEpisodeReplayBuffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perf.peers.adapter import Adapter, Arrays, main, one_thread, to_float
from perf.peers.cases import ALPHA, BETA, ROLLOUT, Case, Rows, Tick

FRAGMENT = 64
"""Steps that an environment collects before they are handed to the buffer, or fewer at an episode's end."""


class RLlib(Adapter):
    name = "rllib"
    distributions = ("ray", "torch")
    fill_limit = 1 << 17

    def start(self) -> None:
        import torch
        from ray.rllib.env.single_agent_episode import SingleAgentEpisode
        from ray.rllib.utils.replay_buffers import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer

        self.torch, self.Episode = torch, SingleAgentEpisode
        self.kinds = EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer
        one_thread()

    def cannot(self, case: Case) -> str | None:
        return {
            "frames": "frames are stacked by a connector outside of the buffer",
            "sequences": "where an episode ends, its rows of T steps continue in another episode, drawn at random",
            "tokens": "observations have one space; no field varies in length",
        }.get(case.kind)

    def open(self, case: Case) -> None:
        self.case, load = case, case.workload
        plain, prioritized = self.kinds
        if case.kind == "priorities":
            self.buffer = prioritized(capacity=load.rows, alpha=ALPHA)
        else:
            self.buffer = plain(capacity=load.rows)
        self.open_episodes: list[Any] = [None] * load.lanes
        self.fragment = ROLLOUT if case.kind == "rollout" else FRAGMENT

    def _steps(self, lane: int, o: Any, a: Any, r: Any, d: Any, n: Any, done: list[Any]) -> None:
        episode = self.open_episodes[lane]
        if episode is None:
            episode = self.open_episodes[lane] = self.Episode(observations=[o], len_lookback_buffer=0)
        episode.add_env_step(n, a, r, terminated=d)
        if d or len(episode) >= self.fragment:
            # a fragment is an episode of its own: the buffer evicts whole episodes, new fragments with them
            self.open_episodes[lane] = None if d else self.Episode(observations=[n], len_lookback_buffer=0)
            done.append(episode.to_numpy())

    def write(self, ticks: Sequence[Tick]) -> None:
        single = self.case.workload.num_envs is None
        for o, a, r, d, n in ticks:
            done: list[Any] = []
            if single:
                self._steps(0, o, a, r, d, n, done)
            else:
                for lane in range(len(a)):
                    self._steps(lane, o[lane], a[lane], r[lane], bool(d[lane]), n[lane], done)
            if done:
                self.buffer.add(done)

    def fill(self, rows: Rows, case: Case) -> None:
        if case.kind != "rollout":
            super().fill(rows, case)

    def sample(self) -> Any:
        size = self.case.workload.batch
        if self.case.kind == "priorities":
            drawn = self.buffer.sample(num_items=size, n_step=1, beta=BETA)
        else:
            drawn = self.buffer.sample(num_items=size, n_step=1, sample_episodes=True)
        return self._ready(drawn)

    def _ready(self, drawn: list[Any]) -> Any:
        from_numpy = self.torch.from_numpy
        batch = {
            "obs": to_float(from_numpy(np.stack([one.get_observations(0) for one in drawn]))),
            "next_obs": to_float(from_numpy(np.stack([one.get_observations(-1) for one in drawn]))),
            "action": from_numpy(np.array([one.get_actions(0) for one in drawn])),
            "reward": from_numpy(np.array([one.get_rewards(0) for one in drawn], np.float32)),
            "terminated": from_numpy(np.array([one.is_terminated for one in drawn])),
        }
        if self.case.kind == "priorities":
            weights = [one.get_extra_model_outputs("weights", 0) for one in drawn]
            batch["weights"] = from_numpy(np.array(weights, np.float32).reshape(len(drawn)))
        return batch

    def rollout(self, ticks: Sequence[Tick]) -> Any:
        lanes = self.case.workload.lanes
        self.open_episodes = [None] * lanes
        done: list[Any] = []
        for o, a, r, d, n in ticks:
            for lane in range(lanes):
                self._steps(lane, o[lane], a[lane], r[lane], bool(d[lane]), n[lane], done)
        from_numpy = self.torch.from_numpy
        return {
            "obs": from_numpy(np.stack([one.get_observations(slice(0, ROLLOUT)) for one in done], 1)),
            "action": from_numpy(np.stack([one.get_actions() for one in done], 1)),
            "reward": from_numpy(np.stack([one.get_rewards() for one in done], 1).astype(np.float32)),
            "terminated": from_numpy(np.zeros((ROLLOUT, lanes), bool)),
        }

    def arrays(self, batch: Any) -> Arrays:
        return {name: value.numpy() for name, value in batch.items()}

    def update(self, batch: Any, priorities: Any) -> None:
        # it remembers which rows it drew last, and forgets them when they are updated
        remembered = list(self.buffer._last_sampled_indices)
        self.buffer.update_priorities(np.asarray(priorities)[: len(remembered)])
        self.buffer._last_sampled_indices.extend(remembered)

    def close(self) -> None:
        self.buffer = None


if __name__ == "__main__":
    main(RLlib())
