"""SAC on Pendulum-v1."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from training import follow, run

NAME = "Pendulum-v1"
STEPS = 6_000


@dataclass(frozen=True, slots=True)
class Settings:
    """Hyperparameters."""

    capacity: int = 10_000
    warmup: int = 500  # steps of random actions before the first update; then one update a step
    batch_size: int = 128
    gamma: float = 0.98
    learning_rate: float = 2e-3
    target_rate: float = 0.02
    hidden: int = 64
    evaluate_every: int = 250


class Agent:
    """Policy, two critics, their targets, and the temperature. Acts, learns from a batch, evaluates itself; knows of no buffer."""

    def __init__(self, seed: int, settings: Settings) -> None:
        torch.manual_seed(seed)
        self.settings = settings
        self.random = torch.Generator().manual_seed(seed)
        width = settings.hidden

        def network(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
            )

        self.policy = network(3, 2)
        self.critics = nn.ModuleList([network(4, 1), network(4, 1)])
        self.targets = copy.deepcopy(self.critics)
        self.log_temperature = torch.zeros((), requires_grad=True)
        rate = settings.learning_rate
        self.optimizers = {
            "policy": torch.optim.Adam(self.policy.parameters(), lr=rate, fused=True),
            "critics": torch.optim.Adam(self.critics.parameters(), lr=rate, fused=True),
            "temperature": torch.optim.Adam([self.log_temperature], lr=rate),
        }

    def _sample(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions in (-1, 1) [n, 1] and their log probabilities [n]."""
        mean, log_std = self.policy(obs).chunk(2, dim=1)
        log_std = log_std.clamp(-10, 2)
        noise = torch.empty_like(mean).normal_(generator=self.random)
        raw = mean + log_std.exp() * noise
        logp = -0.5 * noise.square() - log_std - 0.919 - 2 * (0.693 - raw - nn.functional.softplus(-2 * raw))
        return raw.tanh(), logp.sum(1)

    @torch.no_grad()
    def greedy(self, obs: np.ndarray, _: None = None) -> tuple[np.ndarray, None]:
        """The mean action for each observation, float32 [n, 1]; there is no state to hand on."""
        return 2 * self.policy(torch.from_numpy(obs)).chunk(2, dim=1)[0].tanh().numpy(), None

    @torch.no_grad()
    def act(self, obs: np.ndarray, *, at_random: bool) -> np.ndarray:
        """Actions to take, float32 [n, 1] in [-2, 2]."""
        if at_random:
            return torch.empty(len(obs), 1).uniform_(-2, 2, generator=self.random).numpy()
        return 2 * self._sample(torch.from_numpy(obs))[0].numpy()

    def _values(self, critics: nn.ModuleList, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        inputs = torch.cat([obs, action], dim=1)
        return torch.stack([critic(inputs).squeeze(1) for critic in critics])

    def learn(self, batch: Mapping[str, torch.Tensor]) -> None:
        """One gradient step of everything."""
        obs, action, temperature = batch["obs"], batch["action"] / 2, self.log_temperature.exp().detach()
        with torch.no_grad():
            later, logp = self._sample(batch["next_obs"])
            value = self._values(self.targets, batch["next_obs"], later).amin(0) - temperature * logp
            goal = batch["reward"] / 8 + self.settings.gamma * value * ~batch["terminated"]
        self._descend("critics", (self._values(self.critics, obs, action) - goal).square().mean())
        fresh, logp = self._sample(obs)
        self._descend("policy", (temperature * logp - self._values(self.critics, obs, fresh).amin(0)).mean())
        self._descend("temperature", -(self.log_temperature * (logp.detach() - 1.0)).mean())
        follow(self.targets, self.critics, self.settings.target_rate)

    def _descend(self, which: str, loss: torch.Tensor) -> None:
        optimizer = self.optimizers[which]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train(seed: int, steps: int, settings: Settings | None = None) -> Iterator[tuple[int, float]]:
    raise NotImplementedError


if __name__ == "__main__":
    run(train, __doc__, STEPS)
