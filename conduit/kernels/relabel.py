"""Hindsight: steps of an episode with the goal that was reached instead of the one that was wanted.

Andrychowicz et al., "Hindsight Experience Replay" (2017), section 3.3: a share of the steps gets, as its goal, what a step of
the same episode achieved (the same or a later one, the last, or any), and the reward that it would have earned under that goal.
What a step achieved is in the observation that followed it, the true final one of an episode's last step.
Which steps, and which goals, is a function of (seed, batch number, sample, step), so batches can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from conduit.errors import ConfigError, FieldError
from conduit.jit import entry, kernel
from conduit.kernels.augment import PICK, PICK_SHIFT
from conduit.kernels.batchwise import Array, BatchTransform, Contents, as_numpy
from conduit.kernels.philox import random_pair, scale_to
from conduit.kernels.plan import INTERNAL, NEXT, Computed, Plan
from conduit.kernels.windows import Episode, Sequence, Transition
from conduit.numbers import within
from conduit.store.atomics import peek_i64, poke_i64

Strategy = Literal["future", "final", "episode"]
STRATEGIES = ("future", "final", "episode")
_NEXT_ACHIEVED = f"{INTERNAL}next achieved"
_PICK_GOALS = 1 << 30
"""Number of what is drawn, behind those of a schema's images."""


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def choose(seed, batch, samples, length, lengths, strategy, threshold, out):  # type: ignore[no-untyped-def]
    """For each step, the step whose achievement becomes its goal.

    Args:
        seed: Of the loader.
        batch: Number of the batch.
        samples: Samples of the batch.
        length: Steps of a window.
        lengths: Address of int64 [samples], steps that are there.
        strategy: Number in STRATEGIES.
        threshold: A step is relabelled when 62 random bits are below it.
        out: Address of int64 [samples, length]: the step that achieved it, or -1 for a step that stays.

    Returns:
        How many are relabelled.
    """
    relabelled = 0
    for sample in range(samples):
        known = min(peek_i64(lengths + 8 * sample), length)
        for t in range(length):
            place = -1
            if t < known:
                at = sample * length + t
                first, second = random_pair(seed, batch, PICK | (_PICK_GOALS << PICK_SHIFT) | at)
                if np.int64(first >> np.uint64(2)) < threshold:
                    if strategy == 0:
                        place = t + scale_to(second, known - t)
                    elif strategy == 1:
                        place = known - 1
                    else:
                        place = scale_to(second, known)
                    relabelled += 1
            poke_i64(out + 8 * (sample * length + t), place)
    return relabelled


@dataclass(frozen=True, slots=True)
class Hindsight(BatchTransform):
    """Relabelled goals. See `hindsight`."""

    function: Callable[[Array, Array], Any]
    goal: str
    achieved: str
    reward: str | None
    strategy: Strategy
    ratio: float
    outcome: Literal["next", "same"]

    def __post_init__(self) -> None:
        name = getattr(self.function, "__qualname__", "")
        if not callable(self.function) or not name or "<lambda>" in name:
            raise ConfigError(
                f"Expected a reward function with a name of its own, got {self.function!r}: plans are told apart by it, so "
                "write `def`"
            )
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"Expected strategy {', '.join(map(repr, STRATEGIES))}, got {self.strategy!r}")
        if self.outcome not in ("next", "same"):
            raise ConfigError(f"Expected outcome 'next' or 'same', got {self.outcome!r}")
        if self.goal == self.achieved:
            raise ConfigError(f"Expected two fields, wanted and achieved, got {self.goal!r} twice")

    def bound(self, contents: Contents) -> BatchTransform:
        """The same with the reward's name."""
        return replace(self, reward=contents.reward(self)) if self.reward is None else self

    def outputs(self, contents: Contents) -> tuple[Computed, ...]:
        """Which steps were relabelled."""
        window = contents.window
        if not isinstance(window, Sequence | Episode) or (isinstance(window, Sequence) and window.across):
            raise ConfigError(
                f"Expected steps of one episode, got {window}: open the loader with window=conduit.Episode(...) or "
                f"Sequence(..., across=False) - at batch_transforms, {self}"
            )
        axes = contents.need_steps(self)
        taken = (self.goal, self.achieved, self.reward or "")
        contents.need((*taken, "lengths"), self)
        goal, achieved, reward = (contents.arrays.get(name) for name in taken)
        if goal is not None and achieved is not None and (goal.lanes, goal.dtype) != (achieved.lanes, achieved.dtype):
            raise ConfigError(
                f"Expected wanted and achieved goals of one shape and dtype, got {goal} and {achieved}: give both the same "
                f"transform - at batch_transforms, {self}"
            )
        if reward is not None and reward.lanes != axes:
            raise ConfigError(f"Expected scalars per step, got {reward} - at batch_transforms, {self}")
        return (Computed("relabelled", "bool", axes),)

    def extended(self, plan: Plan) -> Plan:
        """The plan with the achievements of next observations, where they are asked for and not delivered anyway."""
        if self.outcome == "same" or NEXT + self.achieved in plan.names:
            return plan
        found = next((output for output in plan.outputs if output.name == self.achieved), None)
        if found is None or not found.field.observation or isinstance(plan.window, Transition):
            raise ConfigError(
                f"Expected {self.achieved!r} to be delivered as a field of the observation, since outcome='next' takes it from what "
                f"follows a step: list it in fields=..., or store it beside the step and use outcome='same' - at "
                f"batch_transforms, {self}"
            )
        following = replace(found, name=_NEXT_ACHIEVED, rows="following_lanes")
        return replace(plan, window=replace(plan.window, next_obs=True), outputs=(*plan.outputs, following))

    def run(self, values: dict[str, Any], arrays: Mapping[str, Array], draw: tuple[int, int]) -> None:
        """Change goals and rewards in place; the goals of next observations too, where they are in the batch."""
        out = arrays["relabelled"]
        samples, length = out.shape
        lengths = as_numpy(values, "lengths", np.int64, (samples,))
        places = np.empty(out.shape, np.int64)
        seed = int(np.uint64(draw[0] % 2**64).astype(np.int64))
        entry(choose)(
            seed,
            draw[1],
            samples,
            length,
            lengths.ctypes.data,
            STRATEGIES.index(self.strategy),
            round(self.ratio * 2**62),
            places.ctypes.data,
        )
        np.greater_equal(places, 0, out=out)
        rows, steps = np.nonzero(out)
        if not len(rows):
            return
        goal, achieved, reward = (_in_place(values, name) for name in (self.goal, self.achieved, self.reward or ""))
        if self.outcome == "next":
            achieved = (
                _in_place(values, NEXT + self.achieved) if NEXT + self.achieved in values else arrays[_NEXT_ACHIEVED]
            )
        goals = achieved[rows, places[rows, steps]]
        rewards = self.function(achieved[rows, steps], goals)
        rewards = np.asarray(rewards.detach().cpu() if hasattr(rewards, "detach") else rewards)
        if rewards.shape != (len(rows),):
            raise FieldError(
                f"Expected {len(rows)} rewards from {self.function.__qualname__}, one per pair of goals, got shape "
                f"{rewards.shape}",
                at=self.reward,
            )
        goal[rows, steps] = goals
        if NEXT + self.goal in values:
            _in_place(values, NEXT + self.goal)[rows, steps] = goals
        reward[rows, steps] = rewards


def _in_place(values: Mapping[str, Any], name: str) -> Array:
    if name not in values:
        raise FieldError(f"Expected {name!r} in the batch, got {list(values)}", at=name)
    value = values[name]
    return value if isinstance(value, np.ndarray) else value.detach().numpy()


def hindsight(
    function: Callable[[Array, Array], Any],
    *,
    goal: str = "obs.desired_goal",
    achieved: str = "obs.achieved_goal",
    reward: str | None = None,
    strategy: Strategy = "future",
    ratio: float = 0.8,
    outcome: Literal["next", "same"] = "next",
) -> Hindsight:
    """Replace goals by what was achieved, and rewards by what they would have been; adds "relabelled", bool.

    What a step achieved stands in the observation behind it, in every autoreset mode the true final one behind an episode's last
    step; so the table's max_length is one more than the window is long, as for windows with next_obs=True. Open writers with
    keep_final (the default): a step that terminated without its final observation has its own in the place of it. Steps are
    relabelled one by one, so consecutive steps of a window may have different goals. "future" and "final" mean the window's part of
    the episode; open the loader with conduit.Episode for all of it.

    Args:
        function: f(achieved [n, *shape], goals [n, *shape]) -> rewards [n], numpy arrays as the loader delivers them, with
            its transforms applied; plans are told apart by its qualified name.
        goal: Field of the wanted goal.
        achieved: Field of the achieved goal, of the same shape and dtype.
        reward: Field of the reward; None for the one that the schema says is the reward.
        strategy: What the same or a later step achieved ("future"), the last one ("final"), or any ("episode").
        ratio: Share of steps that are relabelled; 0.8 are four for one that stays.
        outcome: Where a step's achievement is stored: in the "next" observation, or in the "same" row.

    Raises:
        ConfigError: A lambda, or an option out of range.
    """
    return Hindsight(function, goal, achieved, reward, strategy, within("a ratio", ratio, 0, 1), outcome)
