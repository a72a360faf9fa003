"""The process of one actor: `python -m conduit.demo.actor PLAN`, started and watched by `conduit.demo.crew`.

It takes a fixed number of steps with each version of the weights and then waits for the next one, so the learner's updates
per row stay where they were tuned however the machine shares its time. It never imports torch. It ends when it is told to
(SIGTERM), when the learner is gone, or with an error when no new version comes within its patience.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from types import FrameType

import msgspec
import numpy as np

import conduit
from conduit.clock import Deadline
from conduit.demo.network import Array, environments, q_values
from conduit.demo.settings import POLICY, TABLE, ActorPlan, Report
from conduit.errors import WaitTimeout

_PR_SET_PDEATHSIG = 1
_POLL = 0.001


class _Stop:
    """Set by SIGTERM, looked at between steps: an actor that is told to end closes its writer first."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True


def end_with(parent: int) -> None:
    """Have the kernel send this process SIGTERM when its parent dies; leave at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(0)


class Actor:
    """Steps environments and writes what happens.

    Args:
        plan: What to do.
        client: An attached client.
        stop: Looked at between steps.
    """

    def __init__(self, plan: ActorPlan, client: conduit.Client, stop: _Stop) -> None:
        self._plan = plan
        self._stop = stop
        self._policy = client.policy(POLICY)
        self._writer = client.writer(
            TABLE, num_envs=plan.envs, autoreset="next_step", policy=self._policy, timeout=plan.patience
        )
        self._envs = environments(plan.envs)
        environment_seed, noise_seed = np.random.SeedSequence(plan.seed).generate_state(2)
        self._noise = np.random.default_rng(noise_seed)
        self._obs: Array = self._envs.reset(seed=int(environment_seed))[0]
        self._ended = np.zeros(plan.envs, bool)
        self._returns = np.zeros(plan.envs)
        self._floors = np.array(plan.floors)

    def work(self) -> None:
        """Act with version after version until told to stop."""
        while (weights := self._next_version()) is not None:
            ticks = self._plan.warmup_ticks if weights.version == 1 else self._plan.ticks
            report = self._act(weights, ticks)
            if report is None:
                return
            os.write(self._plan.report_fd, msgspec.json.encode(report) + b"\n")

    def _next_version(self) -> conduit.Weights | None:
        """Newer weights than the last, or None when told to stop."""
        deadline = Deadline(self._plan.patience)
        while not self._stop.asked:
            weights = self._policy.poll()
            if weights is not None:
                return weights
            if deadline.passed():
                raise WaitTimeout(
                    f"Expected a version after {self._policy.held} of policy {POLICY!r} within {self._plan.patience} s, "
                    "none was published: is the learner alive?"
                )
            time.sleep(_POLL)
        return None

    def _act(self, weights: conduit.Weights, ticks: int) -> Report | None:
        """Take `ticks` steps in every environment; None when told to stop on the way."""
        envs = self._plan.envs
        random = np.maximum(1.0 - (weights.version - 1) / self._plan.explore_versions, self._floors)
        rows, returns = 0, list[float]()
        for _ in range(ticks):
            if self._stop.asked:
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
        return Report(weights.version, rows, tuple(returns))

    def close(self) -> None:
        """Close the writer and the environments."""
        self._writer.close()
        self._envs.close()


def main() -> None:
    """Run the plan that stands on the command line."""
    plan = msgspec.json.decode(sys.argv[1], type=ActorPlan)
    stop = _Stop()
    signal.signal(signal.SIGTERM, stop)
    # Ctrl-C is the learner's to answer: it ends its actors itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(plan.learner)
    with conduit.attach(plan.engine, timeout=plan.patience) as client:
        actor = Actor(plan, client, stop)
        try:
            actor.work()
        finally:
            actor.close()


if __name__ == "__main__":
    main()
