"""The algorithm of examples/sac_pendulum.py in one process over plain numpy arrays: the reference for Conduit.

Run it in examples/ with `python -m reference.sac_pendulum_numpy`. Agent and settings are the example's own. One step, one
update: what the limiter holds the example's two processes to.
"""

from collections.abc import Iterator

import numpy as np
import torch
from sac_pendulum import NAME, STEPS, Agent, Settings
from training import make_envs, mean_return, run


def train(seed: int, steps: int, settings: Settings | None = None) -> Iterator[tuple[int, float]]:
    """Train for so many steps; yields (steps so far, mean return of an evaluation without noise)."""
    settings = settings or Settings()
    env = make_envs(1, NAME)
    agent, rng, size = Agent(seed, settings), np.random.default_rng([seed, 1]), settings.capacity
    columns = {
        "obs": np.zeros((size, 3), np.float32),
        "action": np.zeros((size, 1), np.float32),
        "reward": np.zeros(size, np.float32),
        "next_obs": np.zeros((size, 3), np.float32),
        "terminated": np.zeros(size, bool),
    }
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed)
    written, ended = 0, False
    while written < steps:
        action = agent.act(obs) if written > settings.warmup else env.action_space.sample()
        after, reward, terminated, truncated, _ = env.step(action)
        if not ended:  # after an end, a step only resets the environment
            values = (obs[0], action[0], reward[0], after[0], terminated[0])
            for column, value in zip(columns.values(), values, strict=True):
                column[written % size] = value
            written += 1
            if written > settings.warmup:
                rows = rng.integers(0, min(written, size), settings.batch_size)
                agent.learn({name: torch.from_numpy(column[rows]) for name, column in columns.items()})
            if written > settings.warmup and written % settings.evaluate_every == 0:
                yield written, mean_return(agent.greedy, seed=1_000_000 * seed + written, name=NAME)
        obs, ended = after, bool(terminated[0] | truncated[0])


if __name__ == "__main__":
    run(train, __doc__, STEPS)
