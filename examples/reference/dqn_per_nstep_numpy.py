"""The algorithm of examples/dqn_per_nstep.py over plain numpy arrays in the learner's own memory: the reference for Conduit.

Run it in examples/ with `python -m reference.dqn_per_nstep_numpy`. Agent and settings are the
example's own; n-step returns, priorities and batches are made here, in the plainest way. The same seed gives the same first
weights, environments and exploration; draws from the buffer come from another generator, so runs part with the first batch.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from dqn_per_nstep import STEPS, Agent, Settings
from training import make_envs, mean_return, run


class Replay:
    """A ring of finished n-step transitions; a draw sums all priorities up anew."""

    def __init__(self, seed: int, settings: Settings) -> None:
        size = settings.capacity
        self.settings = settings
        self.rng = np.random.default_rng([seed, 1])
        self.columns = {
            "obs": np.zeros((size, 4), np.float32),
            "action": np.zeros(size, np.int64),
            "reward": np.zeros(size, np.float32),
            "discount": np.zeros(size, np.float32),
            "next_obs": np.zeros((size, 4), np.float32),
            "terminated": np.zeros(size, bool),
        }
        self.mass = np.zeros(size)  # priority to the power of alpha
        self.written = 0
        self.pending: list[deque[tuple[np.ndarray, int, float]]] = [deque() for _ in range(settings.envs)]
        self.ended = np.zeros(settings.envs, bool)
        self.largest = [0.0, 0.0]  # mass: of the last 2^17 updates or fewer, and of as many before
        self.updates = 0

    def append(self, obs: np.ndarray, action: np.ndarray, reward: np.ndarray, after: np.ndarray,
               terminated: np.ndarray, truncated: np.ndarray) -> None:  # fmt: skip
        """Take one step of each environment; `after` is what it showed next."""
        for env in range(self.settings.envs):
            if self.ended[env]:  # this step only reset the environment
                continue
            pending = self.pending[env]
            pending.append((obs[env], action[env], float(reward[env])))
            if terminated[env] or truncated[env]:
                while pending:
                    self._store(pending, after[env], terminated[env])
                    pending.popleft()
            elif len(pending) == self.settings.n_step:
                self._store(pending, after[env], terminated=False)
                pending.popleft()
        self.ended = terminated | truncated

    def _store(self, steps: deque[tuple[np.ndarray, int, float]], after: np.ndarray, terminated: bool) -> None:
        gamma, at = self.settings.gamma, self.written % self.settings.capacity
        obs, action, _ = steps[0]
        reward = sum(gamma**k * step[2] for k, step in enumerate(steps))
        values = (obs, action, reward, gamma ** len(steps), after, terminated)
        for column, value in zip(self.columns.values(), values, strict=True):
            column[at] = value
        self.mass[at] = max(self.largest) or 1.0
        self.written += 1

    def draw(self, beta: float) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        """Row numbers and a batch: one draw from each of equal slices of the mass."""
        count = self.settings.batch_size
        sums = np.cumsum(self.mass[: self.written])
        marks = (np.arange(count) + self.rng.random(count)) * (sums[-1] / count)
        rows = np.minimum(np.searchsorted(sums, marks, side="right"), len(sums) - 1)
        weights = (len(sums) * self.mass[rows] / sums[-1]) ** -beta
        batch = {name: torch.from_numpy(column[rows]) for name, column in self.columns.items()}
        return rows, batch | {"weights": torch.from_numpy((weights / weights.max()).astype(np.float32))}

    def update(self, rows: np.ndarray, errors: torch.Tensor) -> None:
        """Set priorities; of duplicates the last one wins."""
        mass = (errors.numpy().astype(np.float64) + 1e-6) ** self.settings.alpha
        self.mass[rows] = mass
        self.updates += len(rows)
        self.largest[0] = max(self.largest[0], mass.max())
        if self.updates >= 1 << 17:
            self.largest, self.updates = [mass.max(), self.largest[0]], 0


def train(seed: int, steps: int, settings: Settings | None = None) -> Iterator[tuple[int, float]]:
    """Train for so many steps; yields (steps so far, mean return of a greedy evaluation)."""
    settings = settings or Settings()
    envs = make_envs(settings.envs)
    agent, replay = Agent(seed, settings), Replay(seed, settings)
    obs, _ = envs.reset(seed=seed)
    for step in range(settings.envs, steps + 1, settings.envs):
        action = agent.act(obs, step)
        after, reward, terminated, truncated, _ = envs.step(action)
        replay.append(obs, action, reward, after, terminated, truncated)
        obs = after
        if step >= settings.warmup:
            beta = settings.beta + (1 - settings.beta) * step / steps
            for _ in range(settings.envs // settings.steps_per_update):
                rows, batch = replay.draw(beta)
                replay.update(rows, agent.learn(batch))
        if step % settings.evaluate_every == 0:
            yield step, mean_return(agent.greedy, seed=1_000_000 * seed + step)


if __name__ == "__main__":
    run(train, __doc__, STEPS)
