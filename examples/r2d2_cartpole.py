"""Recurrent Q-learning in the manner of R2D2 on a CartPole that hides its velocities, so that one observation is not enough.

One process acts and learns in turns, on one core: `python examples/r2d2_cartpole.py`. A GRU learns from sequences within
episodes, drawn by R2D2's priority; its state starts from zeros and warms up over the burn-in. Sequences overlap by the burn-in and
by their last step, whose successor is only in the next sequence, so every step is learned from once. The same algorithm over plain numpy
buffers is examples/reference/r2d2_cartpole_numpy.py; docs/learning.md compares the two.
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

STEPS = 24_000


def seen(obs: np.ndarray) -> np.ndarray:
    """The agent's observations, float32 [n, 2] from about -2 to 2: the cart's position and the pole's angle."""
    return obs[:, [0, 2]] * np.array([1.0, 10.0], np.float32)


def ahead(steps: torch.Tensor) -> torch.Tensor:
    """The values one step later, [batch, length]; 0 after the last."""
    return nn.functional.pad(steps[:, 1:], (0, 1))


@dataclass(frozen=True, slots=True)
class Settings:
    """Hyperparameters; a step is one step of one environment."""

    envs: int = 8
    capacity: int = 30_000
    warmup: int = 1_000
    steps_per_update: int = 2
    batch_size: int = 64
    length: int = 16
    burn_in: int = 4
    reward_scale: float = 0.1  # keeps values in the range that a GRU's outputs reach
    n_step: int = 2
    gamma: float = 0.99
    alpha: float = 0.6
    beta: float = 0.4
    learning_rate: float = 5e-4
    target_rate: float = 0.01
    hidden: int = 32
    explore: int = 6_000  # steps over which the chance of a random action falls from 1 to
    floor: float = 0.05
    evaluate_every: int = 1_000


class Network(nn.Module):
    """Values of both actions along sequences."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, hidden), nn.Linear(hidden, 2)
        self.memory = nn.GRU(hidden, hidden, batch_first=True)

    def forward(self, obs: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """From obs [batch, length, 2] and a state [1, batch, hidden] or None for zeros: values, state behind the last."""
        remembered, state = self.memory(torch.relu(self.embed(obs)), state)
        return self.head(remembered), state


class Agent:
    """Online and target network. Acts, learns from a batch, evaluates itself; does not know the buffer."""

    def __init__(self, seed: int, settings: Settings) -> None:
        torch.manual_seed(seed)
        self.settings = settings
        self.rng = np.random.default_rng(seed)
        self.online = Network(settings.hidden)
        self.target = copy.deepcopy(self.online)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=settings.learning_rate, fused=True)
        self.state = torch.zeros(1, settings.envs, settings.hidden)

    @torch.no_grad()
    def greedy(self, obs: np.ndarray, state: torch.Tensor | None) -> tuple[np.ndarray, torch.Tensor]:
        """The best actions, int64 [n], and the state behind these observations, float32 [1, n, hidden]."""
        values, state = self.online(torch.from_numpy(seen(obs)).unsqueeze(1), state)
        return values[:, 0].argmax(1).numpy(), state

    def act(self, obs: np.ndarray, first: np.ndarray, step: int) -> np.ndarray:
        """Actions with exploration, int64 [envs]; where an episode comes `first`, the state starts anew."""
        best, self.state = self.greedy(obs, self.state * torch.from_numpy(~first).unsqueeze(1))
        return explore(self.rng, best, max(self.settings.floor, 1 - step / self.settings.explore))

    def learn(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """One gradient step; returns errors and which of them count, [batch, length]."""
        values, _ = self.online(batch["obs"])
        with torch.no_grad():
            after, _ = self.target(batch["obs"])
            future = after.gather(2, values.argmax(2, keepdim=True)).squeeze(2)
            # a goal needs the step behind it, unless the episode is over: there is none at a time limit's cut
            has_goal = batch["terminated"] | ahead(batch["mask"])
            goal = future
            for _ in range(self.settings.n_step):  # fewer near the end of the sequence
                longer = batch["reward"] + self.settings.gamma * ahead(goal) * ~batch["terminated"]
                goal = torch.where(has_goal, longer, future)
            # where the episode starts the zero state is the true one: nothing to warm up
            counts = has_goal & torch.where(batch["is_first"][:, :1], batch["mask"], batch["loss_mask"])
        errors = goal - values.gather(2, batch["action"].unsqueeze(2)).squeeze(2)
        losses = nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none") * counts
        loss = (batch["weights"].unsqueeze(1) * losses).sum() / counts.sum().clamp(min=1)
        descend(self.optimizer, self.online, loss)
        follow(self.target, self.online, self.settings.target_rate)
        return errors.detach(), counts


def train(seed: int, steps: int, settings: Settings | None = None) -> Iterator[tuple[int, float]]:
    """Train for so many steps; yields (steps so far, mean return of a greedy evaluation)."""
    settings = settings or Settings()
    schema = conduit.Schema.from_example({"obs": np.zeros(2, np.float32), "action": 0, "reward": np.float32(0)})
    kept = {"max_length": settings.length, "priorities": conduit.Priorities(alpha=settings.alpha)}
    table = conduit.Table.replay(schema, settings.capacity, num_envs=settings.envs, **kept)
    draws = {
        "window": conduit.Sequence(settings.length, burn_in=settings.burn_in, overlap=settings.burn_in + 1),
        "sampling": conduit.Prioritized(beta=settings.beta),
        "transform": {"reward": conduit.scale(settings.reward_scale)},
    }
    envs, agent = make_envs(settings.envs), Agent(seed, settings)
    obs, first, ended = envs.reset(seed=seed)[0], np.ones(settings.envs, bool), np.zeros(settings.envs, bool)
    with (
        conduit.Engine.create(f"r2d2-{os.getpid()}", tables={"replay": table}) as engine,
        engine.writer("replay", num_envs=settings.envs, autoreset="next_step") as writer,
        engine.loader("replay", batch_size=settings.batch_size, seed=seed, **draws) as loader,
    ):
        for step in range(settings.envs, steps + 1, settings.envs):
            action = agent.act(obs, first, step)
            after, reward, terminated, truncated, _ = envs.step(action)
            writer.append(obs=seen(obs), action=action, reward=reward, terminated=terminated, truncated=truncated)
            # in the step behind an episode's end an environment resets itself: what it shows then comes first
            obs, first, ended = after, ended, terminated | truncated
            for _ in range(settings.envs // settings.steps_per_update if step >= settings.warmup else 0):
                batch = loader.next()
                loader.update_priorities(batch.ids, conduit.sequence_priority(*agent.learn(batch)))
            if step % settings.evaluate_every == 0:
                yield step, mean_return(agent.greedy, seed=1_000_000 * seed + step)


if __name__ == "__main__":
    run(train, __doc__, STEPS)
