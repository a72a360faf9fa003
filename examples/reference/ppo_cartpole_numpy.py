"""The algorithm of examples/ppo_cartpole.py in one process over plain numpy arrays: the reference for Conduit.

Run it in examples/ with `python -m reference.ppo_cartpole_numpy`. Agent and settings are the example's own; rollouts are
kept in arrays and advantages worked out here, in the plainest way. An agent that acts has its own random numbers, as the actor
process has, so the same seed plays the same steps.
"""

from collections.abc import Iterator

import numpy as np
import torch
from ppo_cartpole import STEPS, Agent, Settings
from training import make_envs, mean_return, run


def advantages(rollout: dict[str, np.ndarray], values: np.ndarray, bootstrap: np.ndarray,
               gamma: float, lam: float) -> np.ndarray:  # fmt: skip
    """Generalised advantage estimation, float64 [ticks, envs]; what a step that only shows an episode's end has is unused."""
    ticks = len(values)
    out = np.zeros(values.shape)
    flowing = np.zeros(values.shape[1])
    for t in reversed(range(ticks)):
        after = bootstrap if t == ticks - 1 else values[t + 1]
        ended = rollout["terminated"][t] | rollout["truncated"][t]
        error = rollout["reward"][t] + gamma * after * ~rollout["terminated"][t] - values[t]
        flowing = error + gamma * lam * flowing * ~ended
        flowing[rollout["final"][t]] = 0.0
        out[t] = flowing
    return out


def train(seed: int, steps: int, settings: Settings | None = None) -> Iterator[tuple[int, float]]:
    """Train for so many steps; yields (steps so far, mean return of a greedy evaluation)."""
    settings = settings or Settings()
    envs = make_envs(settings.envs)
    agent = Agent(seed, settings)
    obs, _ = envs.reset(seed=seed)
    final = np.zeros(settings.envs, bool)
    per_rollout = settings.ticks * settings.envs
    for step in range(per_rollout, steps + 1, per_rollout):
        ticks = []
        for _ in range(settings.ticks):
            action, logp = agent.act(obs)
            after, reward, terminated, truncated, _ = envs.step(action)
            ticks.append(
                {"obs": obs, "action": action, "logp": logp, "reward": reward.astype(np.float32),
                 "terminated": terminated, "truncated": truncated, "final": final}
            )  # fmt: skip
            obs, final = after, terminated | truncated
        rollout = {name: np.stack([tick[name] for tick in ticks]) for name in ticks[0]}
        values = agent.values(torch.from_numpy(rollout["obs"])).double().numpy()
        bootstrap = agent.values(torch.from_numpy(obs)).double().numpy()
        rollout["advantages"] = advantages(rollout, values, bootstrap, settings.gamma, settings.lam)
        rollout["returns"] = rollout["advantages"] + values
        batch = {
            name: torch.from_numpy(array[~rollout["final"]].astype(np.float32 if array.dtype == float else array.dtype))
            for name, array in rollout.items()
        }
        agent.learn(batch, 1 - step / steps)
        if step % settings.evaluate_every == 0:
            yield step, mean_return(agent.greedy, seed=1_000_000 * seed + step)


if __name__ == "__main__":
    run(train, __doc__, STEPS)
