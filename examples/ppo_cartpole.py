"""PPO on CartPole-v1: an actor process hands whole rollouts to the learner through a queue table, without a copy.

`python examples/ppo_cartpole.py`. The actor waits for a version of the weights, plays one rollout with it in eight environments,
and writes it where the learner will read it. The learner claims the rollout as tensors that are views of the same memory, learns,
acknowledges the claim and publishes new weights. The same algorithm in one process over plain numpy arrays is
examples/reference/ppo_cartpole_numpy.py.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from training import make_envs, mean_return, run

import conduit

STEPS = 61_440


@dataclass(frozen=True, slots=True)
class Settings:
    """Hyperparameters; a step is one step of one environment."""

    envs: int = 8
    ticks: int = 32  # of a rollout
    epochs: int = 12
    gamma: float = 0.98
    lam: float = 0.8
    clip: float = 0.2
    learning_rate: float = 1e-3  # falls to 0 over the run, as `clip` does
    hidden: int = 64
    evaluate_every: int = 2_048


class Agent:
    """Policy and value network. Acts, learns from one rollout, evaluates itself; does not know the buffer."""

    def __init__(self, seed: int, settings: Settings) -> None:
        torch.manual_seed(seed)
        self.settings = settings
        self.random = torch.Generator().manual_seed(seed)
        width = settings.hidden
        self.policy, self.value = (
            nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))
            for out in (2, 1)
        )
        self.network = nn.ModuleList([self.policy, self.value])
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=settings.learning_rate, fused=True)

    @torch.no_grad()
    def greedy(self, obs: np.ndarray, _: None = None) -> tuple[np.ndarray, None]:
        """The best action for each observation, int64 [n]; there is no state to hand on."""
        return self.policy(torch.from_numpy(obs)).argmax(1).numpy(), None

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Actions, int64 [envs], and their log probabilities, float32 [envs]."""
        logits = torch.log_softmax(self.policy(torch.from_numpy(obs)), 1)
        action = torch.multinomial(logits.exp(), 1, generator=self.random)
        return action.squeeze(1).numpy(), logits.gather(1, action).squeeze(1).numpy()

    @torch.no_grad()
    def values(self, obs: torch.Tensor) -> torch.Tensor:
        """Values of observations [..., 4], float32 [...]."""
        return self.value(obs).squeeze(-1)

    def learn(self, rollout: dict[str, torch.Tensor], left: float) -> None:
        """Some epochs of gradient steps on one rollout [steps, ...], with what is left of the run, from 1 to 0."""
        clip = self.settings.clip * left
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * left
        advantage = rollout["advantages"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _ in range(self.settings.epochs):
            logits = torch.log_softmax(self.policy(rollout["obs"]), 1)
            ratio = (logits.gather(1, rollout["action"].unsqueeze(1)).squeeze(1) - rollout["logp"]).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
            error = (self.value(rollout["obs"]).squeeze(1) - rollout["returns"]).square().mean()
            self.optimizer.zero_grad()
            (0.5 * error - gain).backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), 0.5)
            self.optimizer.step()


def play(_: conduit.Actor, engine: str, seed: int, settings: Settings) -> None:
    """The actor's process: one rollout with each version of the weights, until a wait ends because the actor should stop."""
    torch.set_num_threads(1)
    agent, envs = Agent(seed, settings), make_envs(settings.envs)
    obs, _ = envs.reset(seed=seed)
    with conduit.attach(engine) as client:
        policy = client.policy()
        with client.writer("rollouts", num_envs=settings.envs, autoreset="next_step", policy=policy) as writer:
            while True:
                agent.network.load_state_dict(policy.wait().state_dict())
                for left in reversed(range(settings.ticks)):
                    action, logp = agent.act(obs)
                    after, reward, terminated, truncated, _ = envs.step(action)
                    writer.append(
                        obs=obs, action=action, logp=logp, reward=reward, terminated=terminated, truncated=truncated,
                        bootstrap=after if left == 0 else None,
                    )  # fmt: skip
                    obs = after


def with_advantages(agent: Agent, rollout: conduit.typing.Claim) -> dict[str, torch.Tensor]:
    """The steps of a rollout, [steps, ...], with advantages and returns; rows that only show an episode's end are left out."""
    values, bootstrap = agent.values(rollout["obs"]), agent.values(rollout.bootstrap["obs"])
    gae = conduit.gae(gamma=agent.settings.gamma, lam=agent.settings.lam)
    made = gae(rollout.batch(), values=values[None], bootstrap=bootstrap[None])
    steps = {name: rollout[name] for name in ("obs", "action", "logp")}
    steps |= {name: made[name][0] for name in ("advantages", "returns")}
    return {name: value[made["advantage_mask"][0]] for name, value in steps.items()}


def train(seed: int, steps: int, settings: Settings | None = None) -> Iterator[tuple[int, float]]:
    """Train for so many steps; yields (steps so far, mean return of a greedy evaluation)."""
    settings = settings or Settings()
    agent, name = Agent(seed, settings), f"ppo-{os.getpid()}"
    per_rollout = settings.ticks * settings.envs
    schema = conduit.Schema.from_example(
        {"obs": np.zeros(4, np.float32), "action": 0, "logp": np.float32(0), "reward": np.float32(0)}
    )
    table = conduit.Table.queue(
        schema,
        capacity=2 * per_rollout,
        rollout_length=settings.ticks,
        num_envs=settings.envs,
    )
    with (
        conduit.Engine.create(name, {"rollouts": table}, policies={"policy": agent.network.state_dict()}) as engine,
        engine.consumer("rollouts", timeout=120) as consumer,
        conduit.launch(play, 1, args=(name, seed, settings)) as actors,
    ):
        for step in range(per_rollout, steps + 1, per_rollout):
            engine.policy().publish(agent.network.state_dict())
            actors.check()
            with consumer.next() as rollout:
                agent.learn(with_advantages(agent, rollout), 1 - step / steps)
            if step % settings.evaluate_every == 0:
                yield step, mean_return(agent.greedy, seed=1_000_000 * seed + step)


if __name__ == "__main__":
    run(train, __doc__, STEPS)
