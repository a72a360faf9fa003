"""SAC on Pendulum-v1: an actor and a learner in separate processes; a limiter holds them to one update per step; resumable.

`python examples/sac_pendulum.py --checkpoints runs/sac` begins, or resumes from the newest checkpoint there, also after a kill. The
same algorithm in one process over plain numpy arrays is examples/reference/sac_pendulum_numpy.py.
"""

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import nn
from training import follow, mean_return, mlp, pack, run, unpack

import conduit

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


class Agent(nn.Module):
    """Policy, two critics, their targets, and the temperature. Acts, learns from a batch, evaluates itself; does not know the buffer."""

    def __init__(self, seed: int, settings: Settings) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.settings = settings
        self.random = torch.Generator().manual_seed(seed)
        self.policy = mlp(3, settings.hidden, 2)
        self.critics = nn.ModuleList(mlp(4, settings.hidden, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics)
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.Adam(self.parameters(), lr=settings.learning_rate)

    def _sample(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions in (-1, 1) [n, 1] and their log probabilities [n]."""
        mean, log_std = self.policy(obs).chunk(2, dim=1)
        log_std = log_std.clamp(-10, 2)
        noise = torch.randn(mean.shape, generator=self.random)
        raw = mean + log_std.exp() * noise
        logp = -0.5 * noise.square() - log_std - 0.919 - 2 * (0.693 - raw - nn.functional.softplus(-2 * raw))
        return raw.tanh(), logp.sum(1)

    @torch.no_grad()
    def greedy(self, obs: np.ndarray, _: None = None) -> tuple[np.ndarray, None]:
        """The mean action for each observation, float32 [n, 1]; there is no state to hand on."""
        return 2 * self.policy(torch.from_numpy(obs)).chunk(2, dim=1)[0].tanh().numpy(), None

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> np.ndarray:
        """Actions to take, float32 [n, 1] in [-2, 2]."""
        return 2 * self._sample(torch.from_numpy(obs))[0].numpy()

    def _values(self, critics: nn.ModuleList, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return torch.stack([critic(torch.cat([obs, action], dim=1)).squeeze(1) for critic in critics])

    def learn(self, batch: Mapping[str, torch.Tensor]) -> None:
        """One gradient step of everything."""
        obs, action, temperature = batch["obs"], batch["action"] / 2, self.log_temperature.exp().detach()
        with torch.no_grad():
            later, logp = self._sample(batch["next_obs"])
            value = self._values(self.targets, batch["next_obs"], later).amin(0) - temperature * logp
            goal = batch["reward"] / 8 + self.settings.gamma * value * ~batch["terminated"]
        self.optimizer.zero_grad()
        (self._values(self.critics, obs, action) - goal).square().mean().backward()
        self.critics.requires_grad_(requires_grad=False)  # what the policy likes must not change what they say
        fresh, logp = self._sample(obs)
        (temperature * logp - self._values(self.critics, obs, fresh).amin(0)).mean().backward()
        self.critics.requires_grad_(requires_grad=True)
        (-self.log_temperature * (logp.detach() - 1.0)).mean().backward()
        self.optimizer.step()
        follow(self.targets, self.critics, self.settings.target_rate)


def play(actor: conduit.Actor, engine: str, seed: int, settings: Settings) -> None:
    """The actor's process: one step after the other with the newest weights, as fast as the limiter allows."""
    torch.set_num_threads(1)
    agent, env = Agent(seed, settings), gymnasium.make(NAME)
    with conduit.attach(engine) as client:
        policy = client.policy()
        with client.writer("replay", policy=policy, timeout=60.0) as writer:
            env.action_space.seed(seed)
            obs, _ = env.reset(seed=seed)
            while not actor.stopping:
                if (weights := policy.poll()) is not None:
                    agent.policy.load_state_dict(weights.state_dict())
                action = agent.act(obs[None])[0] if policy.held else env.action_space.sample()
                after, reward, terminated, truncated, _ = env.step(action)
                ended = terminated or truncated
                final = after if ended else None
                writer.append(
                    obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated, final=final
                )
                obs = env.reset()[0] if ended else after


def begin(agent: Agent, checkpoints: str | None) -> tuple[conduit.Engine, int]:
    """A new engine, or one from the newest checkpoint with the agent as it was then; and the updates done."""
    name, settings = f"sac-{os.getpid()}", agent.settings
    if checkpoints and any(Path(checkpoints).glob("[0-9]*")):
        engine = conduit.Engine.restore(checkpoints, name, limiter="keep")
        return engine, unpack(engine.restored.extra["agent"], agent)
    schema = conduit.Schema.from_example(
        {"obs": np.zeros(3, "f4"), "action": np.zeros(1, "f4"), "reward": np.float32(0)}
    )
    limiter = conduit.SampleToInsertRatio(settings.batch_size, settings.warmup, error_buffer=4 * settings.batch_size)
    table = conduit.Table.replay(schema, settings.capacity, limiter=limiter)
    return conduit.Engine.create(name, {"replay": table}, policies={"policy": agent.policy.state_dict()}), 0


def train(seed: int, steps: int, checkpoints: str | None = None) -> Iterator[tuple[int, float]]:
    """Train for so many steps; yields (steps so far, mean return of an evaluation without noise)."""
    settings = Settings()
    agent = Agent(seed, settings)
    engine, updates = begin(agent, checkpoints)
    with (
        engine,
        engine.loader("replay", batch_size=settings.batch_size, name="learner", timeout=120) as loader,
        conduit.launch(play, 1, args=(engine.name, seed + updates, settings)),  # a wait for rows raises what it died of
    ):
        for step in range(settings.warmup + updates + 1, steps + 1):
            agent.learn(loader.next())
            engine.policy().publish(agent.policy.state_dict())
            if step % settings.evaluate_every == 0:
                yield step, mean_return(agent.greedy, seed=1_000_000 * seed + step, name=NAME)
                if checkpoints:
                    engine.checkpoint(checkpoints, extra={"agent": pack(agent, step - settings.warmup)})


if __name__ == "__main__":
    run(train, __doc__, STEPS, checkpoints=True)
