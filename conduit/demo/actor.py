"""The actor function that `conduit.demo.crew` launches.

An actor takes a fixed number of steps with each version of the weights and then waits for the next version. So the number of updates per
row is the tuned one, however fast each process runs. It never imports torch. It returns when it is told to stop, and fails if no new
version comes within its patience.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec
import numpy as np

import conduit
from conduit.clock import Deadline
from conduit.demo.network import Array, environments, q_values
from conduit.demo.settings import POLICY, TABLE, Report, Settings
from conduit.errors import WaitTimeout

_POLL = 0.001


class Player:
    """Steps environments and writes what happens.

    Args:
        actor: Which actor it is.
        client: An attached client.
        settings: What to do.
        seed: Of the run; environments and exploration have another one for each actor and each restart.
        patience: Seconds to wait for a new version.
    """

    def __init__(
        self, actor: conduit.Actor, client: conduit.Client, settings: Settings, seed: int, patience: float
    ) -> None:
        self._actor = actor
        self._settings = settings
        self._patience = patience
        self._policy = client.policy(POLICY)
        self._writer = client.writer(
            TABLE, num_envs=settings.envs, autoreset="next_step", policy=self._policy, timeout=patience
        )
        self._envs = environments(settings.envs)
        environment_seed, noise_seed = np.random.SeedSequence((seed, actor.index, actor.attempt)).generate_state(2)
        self._noise = np.random.default_rng(noise_seed)
        self._obs: Array = self._envs.reset(seed=int(environment_seed))[0]
        self._ended = np.zeros(settings.envs, bool)
        self._returns = np.zeros(settings.envs)
        self._floors = np.array(settings.floors(actor.index))

    def work(self, report_fd: int) -> None:
        """Act with version after version until told to stop; write a report for each, as a line of JSON."""
        while (weights := self._next_version()) is not None:
            ticks = self._settings.warmup_ticks if weights.version == 1 else self._settings.ticks_per_version
            report = self._act(weights, ticks)
            if report is None:
                return
            # The first newline ends what a killed one may have left there.
            os.write(report_fd, b"\n" + msgspec.json.encode(report) + b"\n")

    def _next_version(self) -> conduit.typing.Weights | None:
        """Newer weights than the last, or None when told to stop."""
        deadline = Deadline(self._patience)
        while not self._actor.stopping:
            weights = self._policy.poll()
            if weights is not None:
                return weights
            if deadline.passed():
                raise WaitTimeout(
                    f"Expected a version after {self._policy.held} of policy {POLICY!r} within {self._patience} s, "
                    "none was published: is the learner alive?"
                )
            self._actor.wait(_POLL)
        return None

    def _act(self, weights: conduit.typing.Weights, ticks: int) -> Report | None:
        """Take `ticks` steps in every environment; None when told to stop on the way."""
        envs = self._settings.envs
        random = np.maximum(1.0 - (weights.version - 1) / self._settings.explore_versions, self._floors)
        rows, returns = 0, list[float]()
        for _ in range(ticks):
            if self._actor.stopping:
                return None
            action = q_values(weights.arrays, self._obs).argmax(axis=1)
            action = np.where(self._noise.random(envs) < random, self._noise.integers(0, 2, envs), action)
            obs, reward, terminated, truncated, _ = self._envs.step(action)
            self._writer.append(
                obs=self._obs,
                action=action,
                reward=reward.astype(np.float32),
                terminated=terminated,
                truncated=truncated,
            )
            # In the step after an episode's end an environment resets itself and pays nothing: that row only closes it.
            rows += envs - int(np.count_nonzero(self._ended))
            self._returns += reward
            self._obs, self._ended = obs, terminated | truncated
            if self._ended.any():
                returns += self._returns[self._ended].tolist()
                self._returns[self._ended] = 0.0
        return Report(self._actor.attempt, weights.version, rows, tuple(returns))

    def close(self) -> None:
        """Close the writer and the environments."""
        self._writer.close()
        self._envs.close()


def play(
    actor: conduit.Actor, engine: str, settings: Settings, seed: int, reports: Sequence[Connection], patience: float
) -> None:
    """Play one actor of a run; `reports` has a pipe for each."""
    with conduit.attach(engine, timeout=patience) as client:
        player = Player(actor, client, settings, seed, patience)
        try:
            player.work(reports[actor.index].fileno())
        finally:
            player.close()
