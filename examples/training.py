"""Shared by the examples that train: environments, exploration, greedy evaluation, updates of networks and targets, a command line."""

import argparse
import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn


def make_envs(count: int, name: str = "CartPole-v1") -> Any:
    """`count` environments side by side; each resets itself in the step after its episode's end."""
    mode = "vector_entry_point" if name == "CartPole-v1" else "sync"
    return gymnasium.make_vec(name, num_envs=count, vectorization_mode=mode)


def explore(rng: np.random.Generator, actions: np.ndarray, chance: float) -> np.ndarray:
    """The actions, int64 [n], each replaced by a random one with this chance."""
    return np.where(rng.random(len(actions)) < chance, rng.integers(0, 2, len(actions)), actions)


@torch.no_grad()
def mean_return(
    policy: Callable[[np.ndarray, Any], tuple[np.ndarray, Any]],
    seed: int,
    episodes: int = 20,
    name: str = "CartPole-v1",
) -> float:
    """Mean return of episodes side by side, each until its first end.

    Args:
        policy: From observations float32 [episodes, n] and its state to actions [episodes, ...] and its next state; the
            first state is None.
        seed: Of their starts.
        episodes: How many.
        name: Of the environment.
    """
    envs = make_envs(episodes, name)
    obs, state = envs.reset(seed=seed)[0], None
    returns, running = np.zeros(episodes), np.ones(episodes, bool)
    while running.any():
        action, state = policy(obs, state)
        obs, reward, terminated, truncated, _ = envs.step(action)
        returns += reward * running
        running &= ~(terminated | truncated)
    return float(returns.mean())


def mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Two hidden layers of this width with ReLU."""
    hidden = (nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def descend(optimizer: torch.optim.Optimizer, network: nn.Module, loss: torch.Tensor) -> None:
    """One gradient step, the gradient's norm clipped to 10."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 10.0)
    optimizer.step()


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module, rate: float) -> None:
    """Move the target network's weights towards the online ones, by this part of the way."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), rate)


def pack(agent: Any, updates: int) -> bytes:
    """Everything that an agent (a module with an `optimizer`) needs to resume learning after this many updates."""
    content = io.BytesIO()
    torch.save((agent.state_dict(), agent.optimizer.state_dict(), updates), content)
    return content.getvalue()


def unpack(content: bytes, agent: Any) -> int:
    """Restore an agent as it was when it was packed; returns the number of updates it had done."""
    network, optimizer, updates = torch.load(io.BytesIO(content))
    agent.load_state_dict(network)
    agent.optimizer.load_state_dict(optimizer)
    return updates


def run(train: Callable[..., Iterator[tuple[int, float]]], doc: str, steps: int, *, checkpoints: bool = False) -> None:
    """Train once, as the command line says, and print what greedy evaluations give.

    Args:
        train: From a seed and a number of environment steps to (steps so far, mean return) of each evaluation.
        doc: The script's docstring; its first line describes it.
        steps: The default.
        checkpoints: Whether `train` also takes the folder of checkpoints that the run begins from and adds to.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps, help="environment steps (default %(default)s)")
    if checkpoints:
        parser.add_argument(
            "--checkpoints", help="folder of checkpoints; a run that finds some goes on from the newest"
        )
    options = parser.parse_args()
    torch.set_num_threads(1)  # these networks gain nothing from more
    begun = time.monotonic()
    scores = []
    more = (options.checkpoints,) if checkpoints else ()
    for step, score in train(options.seed, options.steps, *more):
        scores.append(score)
        print(f"step {step:6,}  mean return {score:6.1f}", flush=True)
    best, last = max(scores, default=np.nan), np.mean(scores[-5:] or [np.nan])
    print(f"best mean return {best:.1f}, of the last evaluations {last:.1f}, {time.monotonic() - begun:.0f} s")
