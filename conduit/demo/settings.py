"""The demo's hyperparameters, and the report of an actor's process.

The settings were tuned together for a fixed number of rows per update. The counts per policy version are derived from it, so other numbers
of actors and environments keep that ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TABLE = "replay"
POLICY = "policy"
ENVIRONMENT = "CartPole-v1"
SOLVED_AT = 475.0
"""Mean return over the evaluation's episodes at which Gymnasium counts CartPole-v1 as solved; the highest is 500."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Hyperparameters of the DQN and of its pacing.

    Attributes:
        actors: Actor processes, at least 1.
        envs: Environments per actor, at least 1.
        hidden: Units in each of the two hidden layers.
        batch_size: Rows per batch.
        capacity: Rows that the replay table keeps at least.
        learning_rate: Of Adam.
        discount: Per step.
        target_rate: Part of the way that the target network goes towards the online one per update, in (0, 1].
        max_grad_norm: Gradients are scaled down to this Euclidean norm.
        rows_per_update: Rows that all actors together write per update of the learner.
        rows_per_version: Rows that all actors together write with one version of the weights, at least; rounded up to
            whole ticks of all environments.
        warmup_rows: Rows that must be there before the first update; written with the first version.
        explore_rows: Rows over which the chance of a random action falls from 1 to each environment's floor.
        lowest_floor, highest_floor: The floors of the first and of the last environment; geometric in between.
        evaluate_every: Updates between two evaluations.
        evaluation_episodes: Episodes of one evaluation.
    """

    actors: int = 2
    envs: int = 8
    hidden: int = 128
    batch_size: int = 128
    capacity: int = 100_000
    learning_rate: float = 5e-4
    discount: float = 0.99
    target_rate: float = 0.01
    max_grad_norm: float = 10.0
    rows_per_update: float = 4.0
    rows_per_version: int = 64
    warmup_rows: int = 1_000
    explore_rows: int = 8_000
    lowest_floor: float = 0.01
    highest_floor: float = 0.3
    evaluate_every: int = 1_000
    evaluation_episodes: int = 20

    @property
    def highest_value(self) -> float:
        """No discounted return is above it: CartPole pays 1 a step and never less than 0."""
        return 1.0 / (1.0 - self.discount)

    @property
    def ticks_per_version(self) -> int:
        """Steps that each actor takes in each of its environments with one version."""
        return math.ceil(self.rows_per_version / (self.actors * self.envs))

    @property
    def warmup_ticks(self) -> int:
        """Steps that each actor takes in each of its environments with the first version, before any update."""
        # In the row after an episode's end nothing is done, so of N ticks fewer than N can be drawn: a tenth at most here,
        # since random play on CartPole lasts 20 steps.
        return math.ceil(1.1 * max(self.warmup_rows, self.batch_size) / (self.actors * self.envs))

    @property
    def updates_per_version(self) -> int:
        """Updates between two publications."""
        rows = self.ticks_per_version * self.actors * self.envs
        return max(1, round(rows / self.rows_per_update))

    @property
    def explore_versions(self) -> int:
        """Versions over which the chance of a random action falls."""
        return max(1, math.ceil(self.explore_rows / (self.ticks_per_version * self.actors * self.envs)))

    def floors(self, actor: int) -> tuple[float, ...]:
        """The lowest chances of a random action in each environment of an actor; every actor gets the whole range."""
        last = max(1, self.actors * self.envs - 1)
        ratio = self.highest_floor / self.lowest_floor
        return tuple(self.lowest_floor * ratio ** ((env * self.actors + actor) / last) for env in range(self.envs))


@dataclass(frozen=True, slots=True)
class Report:
    """What an actor tells the learner when it has done its steps with one version.

    Attributes:
        attempt: How often the actor had been started before.
        version: The version of the weights.
        rows: Rows written with it, without those that only close an episode.
        returns: Returns of the episodes that ended meanwhile.
    """

    attempt: int
    version: int
    rows: int
    returns: tuple[float, ...]
