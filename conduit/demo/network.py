"""The Q network without torch: its arrays by name, its forward pass in numpy, and greedy evaluation with them.

Names and shapes are those of the torch module that `conduit.demo.agent` trains, so a state dict goes through the policy
slot as it is. Actors import this module and no torch: they start faster and take a tenth of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conduit.demo.settings import ENVIRONMENT
from conduit.errors import MissingExtra

Array = np.ndarray[Any, Any]
Weights = Mapping[str, Array]


def empty(inputs: int, hidden: int, outputs: int) -> dict[str, Array]:
    """Zeros of the names and shapes of `conduit.demo.agent.module`: two hidden layers.

    Returns:
        float32 arrays `<layer>.weight` [outputs, inputs] and `<layer>.bias` [outputs]; layers 0, 2, 4 of a Sequential
        with rectifiers between.
    """
    sizes = ((inputs, hidden), (hidden, hidden), (hidden, outputs))
    arrays: dict[str, Array] = {}
    for layer, (columns, rows) in zip((0, 2, 4), sizes, strict=True):
        arrays[f"{layer}.weight"] = np.zeros((rows, columns), np.float32)
        arrays[f"{layer}.bias"] = np.zeros(rows, np.float32)
    return arrays


def q_values(weights: Weights, obs: Array) -> Array:
    """Values of every action.

    Args:
        weights: As `empty` makes them.
        obs: float32 [n, inputs].

    Returns:
        float32 [n, outputs].
    """
    hidden = np.maximum(obs @ weights["0.weight"].T + weights["0.bias"], 0)
    hidden = np.maximum(hidden @ weights["2.weight"].T + weights["2.bias"], 0)
    values: Array = hidden @ weights["4.weight"].T + weights["4.bias"]
    return values


def environments(count: int) -> Any:
    """A Gymnasium vector of `count` environments that reset themselves in the step after an episode's end.

    Raises:
        MissingExtra: Gymnasium is not installed.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtra("Expected gymnasium to be installed: pip install 'conduit-rl[demo]'") from error
    return gymnasium.make_vec(
        ENVIRONMENT,
        num_envs=count,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP},
    )


class Evaluation:
    """Greedy episodes in environments of its own; reused, since making environments costs more than a bad policy's run.

    Args:
        episodes: Episodes per call, run side by side.
    """

    def __init__(self, episodes: int) -> None:
        self._envs = environments(episodes)
        self._episodes = episodes

    def __call__(self, weights: Weights, seed: int) -> float:
        """Mean return of the episodes, each from a start that the seed draws; nothing is explored or trained."""
        obs, _ = self._envs.reset(seed=seed)
        returns = np.zeros(self._episodes)
        running = np.ones(self._episodes, bool)
        while running.any():
            obs, reward, terminated, truncated, _ = self._envs.step(q_values(weights, obs).argmax(axis=1))
            returns += np.where(running, reward, 0.0)
            running &= ~(terminated | truncated)
        return float(returns.mean())

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()
