"""The algorithm of examples/r2d2_cartpole.py over plain numpy arrays in the learner's own memory: the reference for Conduit.

Run it in examples/ with `python -m reference.r2d2_cartpole_numpy`. Agent and settings are the example's own; sequences,
masks, priorities and batches are made here, in the plainest way. The same seed gives the same first weights, environments
and exploration; draws from the buffer come from another generator, so runs part with the first batch.
"""

from collections.abc import Iterator

import numpy as np
import torch
from r2d2_cartpole import STEPS, Agent, Settings, seen
from training import make_envs, mean_return, run


class Replay:
    """A ring of ticks, [ticks, envs] each; a draw sums the priorities of all sequence starts up anew."""

    def __init__(self, seed: int, settings: Settings) -> None:
        self.settings = settings
        self.ticks = settings.capacity // settings.envs
        self.rng = np.random.default_rng([seed, 1])
        shape = (self.ticks, settings.envs)
        self.obs = np.zeros((*shape, 2), np.float32)
        self.action = np.zeros(shape, np.int64)
        self.reward = np.zeros(shape, np.float32)
        self.terminated, self.truncated, self.is_first = (np.zeros(shape, bool) for _ in range(3))
        self.mass = np.zeros(shape)  # priority to the power of alpha; 0 where no sequence starts
        self.written = 0
        self.age = np.zeros(settings.envs, int)  # steps since the episode's start
        self.largest = [0.0, 0.0]  # mass: of the last 2^17 updates or fewer, and of as many before
        self.updates = 0

    def append(self, obs: np.ndarray, action: np.ndarray, reward: np.ndarray, terminated: np.ndarray,
               truncated: np.ndarray, final: np.ndarray) -> None:  # fmt: skip
        """Take one tick; `final` says where it only shows the last observation of an episode."""
        settings, at = self.settings, self.written % self.ticks
        self.obs[at], self.action[at], self.reward[at] = obs, action, reward
        self.terminated[at], self.truncated[at] = terminated, truncated
        self.is_first[at] = (self.age == 0) & ~final
        # sequences start every so many steps of an episode, so that neighbours share the burn-in and one step
        starts = (self.age % (settings.length - settings.burn_in - 1) == 0) & ~final
        self.mass[at] = np.where(starts, max(self.largest) or 1.0, 0.0)
        self.age = np.where(final, 0, self.age + 1)
        self.written += 1

    def draw(self) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        """Flat numbers of the sequences' starts, and a batch: one draw from each of equal slices of the mass."""
        settings, count = self.settings, self.settings.batch_size
        mass = self.mass.copy()
        newest = np.arange(self.written - settings.length + 1, self.written) % self.ticks
        mass[newest] = 0.0  # a sequence from there would run into what is not written yet
        sums = np.cumsum(mass)
        marks = (np.arange(count) + self.rng.random(count)) * (sums[-1] / count)
        starts = np.searchsorted(sums, marks, side="right")
        weights = (np.count_nonzero(mass) * mass.ravel()[starts] / sums[-1]) ** -settings.beta
        batch = self.gather(starts) | {"weights": (weights / weights.max()).astype(np.float32)}
        return starts, {name: torch.from_numpy(array) for name, array in batch.items()}

    def gather(self, starts: np.ndarray) -> dict[str, np.ndarray]:
        """The sequences from these starts, [n, length, ...]: to the episode's first end, that step included, then zeros."""
        settings = self.settings
        rows = (starts // settings.envs)[:, None] + np.arange(settings.length)
        rows, envs = rows % self.ticks, (starts % settings.envs)[:, None]
        terminated, truncated = self.terminated[rows, envs], self.truncated[rows, envs]
        ended = terminated | truncated
        mask = np.cumsum(ended, axis=1) - ended == 0
        return {
            "obs": self.obs[rows, envs] * mask[:, :, None],
            "action": self.action[rows, envs] * mask,
            "reward": self.reward[rows, envs] * mask * np.float32(settings.reward_scale),
            "terminated": terminated & mask,
            "is_first": self.is_first[rows, envs] & mask,
            "mask": mask,
            "loss_mask": mask & (np.arange(settings.length) >= settings.burn_in),
        }

    def update(self, starts: np.ndarray, errors: torch.Tensor, counts: torch.Tensor) -> None:
        """Set priorities from the errors of those steps that count; of duplicates the last one wins."""
        sizes, counted = np.abs(errors.numpy()) * counts.numpy(), counts.numpy().sum(1)
        priority = 0.9 * sizes.max(1) + 0.1 * sizes.sum(1) / np.maximum(counted, 1)
        mass = (priority.astype(np.float64) + 1e-6) ** self.settings.alpha
        self.mass.ravel()[starts] = mass
        self.updates += len(starts)
        self.largest[0] = max(self.largest[0], mass.max())
        if self.updates >= 1 << 17:
            self.largest, self.updates = [mass.max(), self.largest[0]], 0


def train(seed: int, steps: int, settings: Settings | None = None) -> Iterator[tuple[int, float]]:
    """Train for so many steps; yields (steps so far, mean return of a greedy evaluation)."""
    settings = settings or Settings()
    envs, agent, replay = make_envs(settings.envs), Agent(seed, settings), Replay(seed, settings)
    obs, first, ended = envs.reset(seed=seed)[0], np.ones(settings.envs, bool), np.zeros(settings.envs, bool)
    for step in range(settings.envs, steps + 1, settings.envs):
        action = agent.act(obs, first, step)
        after, reward, terminated, truncated, _ = envs.step(action)
        replay.append(seen(obs), action, reward, terminated, truncated, final=ended)
        obs, first, ended = after, ended, terminated | truncated
        for _ in range(settings.envs // settings.steps_per_update if step >= settings.warmup else 0):
            starts, batch = replay.draw()
            replay.update(starts, *agent.learn(batch))
        if step % settings.evaluate_every == 0:
            yield step, mean_return(agent.greedy, seed=1_000_000 * seed + step)


if __name__ == "__main__":
    run(train, __doc__, STEPS)
