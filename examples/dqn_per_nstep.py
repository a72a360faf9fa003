"""DQN on CartPole-v1 with n-step returns and prioritized replay (Rainbow's two most useful parts), on a double Q target.

One process acts and learns in turns, on one core: `python examples/dqn_per_nstep.py`. The loader makes, in one pass,
n-step returns with their discounts, true final observations, and importance weights. The same algorithm over
plain numpy buffers is examples/reference/dqn_per_nstep_numpy.py; docs/learning.md compares the two.
"""

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from training import descend, explore, follow, make_envs, mean_return, run

import conduit

STEPS = 30_000


@dataclass(frozen=True, slots=True)
class Settings:
    """Hyperparameters; a step is one step of one environment."""

    envs: int = 8
    capacity: int = 20_000
    warmup: int = 1_000
    steps_per_update: int = 2
    batch_size: int = 128
    n_step: int = 3
    gamma: float = 0.99
    alpha: float = 0.6
    beta: float = 0.4  # grows to 1 over the run
    learning_rate: float = 5e-4
    target_rate: float = 0.02
    hidden: int = 128
    explore: int = 8_000  # steps over which the chance of a random action falls from 1 to
    floor: float = 0.05
    evaluate_every: int = 1_000


class Agent:
    """Online and target network. Acts, learns from a batch, evaluates itself; does not know the buffer."""

    def __init__(self, seed: int, settings: Settings) -> None:
        torch.manual_seed(seed)
        self.settings = settings
        self.rng = np.random.default_rng(seed)
        width = settings.hidden
        self.online = nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )
        self.target = copy.deepcopy(self.online)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=settings.learning_rate, fused=True)

    @torch.no_grad()
    def greedy(self, obs: np.ndarray, _: None = None) -> tuple[np.ndarray, None]:
        """The best action for each observation, int64 [n]; there is no state to hand on."""
        return self.online(torch.from_numpy(obs)).argmax(1).numpy(), None

    def act(self, obs: np.ndarray, step: int) -> np.ndarray:
        """Actions with exploration, int64 [envs]."""
        chance = max(self.settings.floor, 1 - step / self.settings.explore)
        return explore(self.rng, self.greedy(obs)[0], chance)

    def learn(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One gradient step; returns absolute n-step errors, float32 [batch]."""
        with torch.no_grad():
            best = self.online(batch["next_obs"]).argmax(1, keepdim=True)
            future = self.target(batch["next_obs"]).gather(1, best).squeeze(1)
            # fewer than n steps where the episode ended; one that was cut by the time limit (truncated) has a future
            goal = batch["reward"] + batch["discount"] * future * ~batch["terminated"]
        value = self.online(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        loss = (batch["weights"] * nn.functional.smooth_l1_loss(value, goal, reduction="none")).mean()
        descend(self.optimizer, self.online, loss)
        follow(self.target, self.online, self.settings.target_rate)
        return (goal - value.detach()).abs()


def train(seed: int, steps: int, settings: Settings | None = None) -> Iterator[tuple[int, float]]:
    """Train for so many steps; yields (steps so far, mean return of a greedy evaluation)."""
    settings = settings or Settings()
    envs = make_envs(settings.envs)
    schema = conduit.Schema.from_spaces(envs.single_observation_space, envs.single_action_space)
    table = conduit.Table.replay(
        schema,
        capacity=settings.capacity,
        max_n_step=settings.n_step,
        num_envs=settings.envs,
        priorities=conduit.Priorities(alpha=settings.alpha),
    )
    agent = Agent(seed, settings)
    obs, _ = envs.reset(seed=seed)
    with (
        conduit.Engine.create(f"dqn-{os.getpid()}", tables={"replay": table}) as engine,
        engine.writer("replay", num_envs=settings.envs, autoreset="next_step") as writer,
        engine.loader(
            "replay",
            batch_size=settings.batch_size,
            window=conduit.Transition(n_step=settings.n_step, gamma=settings.gamma),
            sampling=conduit.Prioritized(beta=settings.beta),
            seed=seed,
        ) as loader,
    ):
        for step in range(settings.envs, steps + 1, settings.envs):
            action = agent.act(obs, step)
            after, reward, terminated, truncated, _ = envs.step(action)
            writer.append(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
            obs = after
            if step >= settings.warmup:
                loader.beta = settings.beta + (1 - settings.beta) * step / steps
                for _ in range(settings.envs // settings.steps_per_update):
                    batch = loader.next()
                    loader.update_priorities(batch.ids, agent.learn(batch))
            if step % settings.evaluate_every == 0:
                yield step, mean_return(agent.greedy, seed=1_000_000 * seed + step)


if __name__ == "__main__":
    run(train, __doc__, STEPS)
