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
from conduit.kernels.spec.batch_transforms import Array, BatchTransform, Contents, as_numpy
from conduit.kernels.spec.plan import INTERNAL, NEXT, Computed, Goals, Plan
from conduit.kernels.spec.windows import Episode, Sequence, Transition
from conduit.native.jit import entry, kernel
from conduit.native.memory import peek_i64, poke_i64
from conduit.native.philox import PICK_GOALS, pick_lane, random_pair, scale_to
from conduit.numbers import at_least, within

Strategy = Literal["future", "final", "episode"]
STRATEGIES = ("future", "final", "episode")
_NEXT_ACHIEVED = f"{INTERNAL}next achieved"
_GOAL = f"{INTERNAL}goal"
RELABELLED = "relabelled"
"""What the step adds: which steps have another goal."""


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def choose(seed, batch, samples, length, lengths, strategy, threshold, out):
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
                first, second = random_pair(seed, batch, pick_lane(PICK_GOALS, at))
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
    max_length: int | None

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
        if isinstance(window, Transition):
            return self._check_single(window, contents)
        if self.max_length is not None:
            raise ConfigError(
                f"Expected max_length with window=conduit.Transition() only, got {window}, which says it itself - at "
                f"batch_transforms, {self}"
            )
        if not isinstance(window, Sequence | Episode) or (isinstance(window, Sequence) and window.across):
            raise ConfigError(
                f"Expected steps of one episode, got {window}: open the loader with window=conduit.Episode(...) or "
                f"Sequence(..., across=False) - at batch_transforms, {self}"
            )
        return self._check(contents, contents.need_steps(self), "lengths")

    def _check_single(self, window: Transition, contents: Contents) -> tuple[Computed, ...]:
        """`outputs` of single transitions."""
        if window.n_step > 1 or window.stack > 1 or self.max_length is None:
            raise ConfigError(
                f"Expected single steps without a stack, Transition(), and hindsight(..., max_length=<steps of the longest episode "
                f"that is drawn>), got {window} and max_length={self.max_length!r} - at batch_transforms, {self}"
            )
        return self._check(contents, ())

    def _check(self, contents: Contents, axes: tuple[int, ...], *names: str) -> tuple[Computed, ...]:
        taken = (self.goal, self.achieved, self.reward or "")
        contents.need((*taken, *names), self)
        goal, achieved, reward = (contents.arrays.get(name) for name in taken)
        if goal is not None and achieved is not None and (goal.lanes, goal.dtype) != (achieved.lanes, achieved.dtype):
            raise ConfigError(
                f"Expected wanted and achieved goals of one shape and dtype, got {goal} and {achieved}: give both the same "
                f"transform - at batch_transforms, {self}"
            )
        if reward is not None and reward.lanes != axes:
            raise ConfigError(f"Expected scalars per step, got {reward} - at batch_transforms, {self}")
        return (Computed(RELABELLED, "bool", axes),)

    def extended(self, plan: Plan) -> Plan:
        """The plan with the achievements of next observations, where they are asked for and not delivered anyway."""
        single = isinstance(plan.window, Transition)
        lacks = self.outcome == "next" and NEXT + self.achieved not in plan.names
        if not lacks and not single:
            return plan
        found = next((output for output in plan.outputs if output.name == self.achieved), None)
        if found is None or (self.outcome == "next" and not found.field.observation):
            raise ConfigError(
                f"Expected {self.achieved!r} to be delivered as a field of the observation, since outcome='next' takes it from what "
                f"follows a step: list it in fields=..., or store it beside the step and use outcome='same' - at "
                f"batch_transforms, {self}"
            )
        outputs = plan.outputs
        if lacks:
            outputs = (*outputs, replace(found, name=_NEXT_ACHIEVED, rows="following" if single else "following_lanes"))
        if not isinstance(plan.window, Transition):
            return replace(plan, window=replace(plan.window, next_obs=True), outputs=outputs)
        assert self.max_length is not None  # noqa: S101 - `outputs` has seen it
        wanted = Goals(STRATEGIES.index(self.strategy), self._threshold, self.max_length, self.outcome == "same")
        return replace(plan, outputs=(*outputs, replace(found, name=_GOAL, rows="goal")), goals=wanted)

    @property
    def _threshold(self) -> int:
        return round(self.ratio * 2**62)

    def run(self, values: dict[str, Any], arrays: Mapping[str, Array], draw: tuple[int, int]) -> None:
        """Change goals and rewards in place; the goals of next observations too, where they are in the batch."""
        out = arrays[RELABELLED]
        if out.ndim == 1:
            at = np.nonzero(out)
            self._relabel(values, arrays, at, arrays[_GOAL][at])
            return
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
            self._threshold,
            places.ctypes.data,
        )
        np.greater_equal(places, 0, out=out)
        at = np.nonzero(out)
        achieved = self._outcomes(values, arrays)
        self._relabel(values, arrays, at, achieved[at[0], places[at]])

    def _outcomes(self, values: Mapping[str, Any], arrays: Mapping[str, Array]) -> Array:
        """What each step achieved."""
        if self.outcome == "same":
            return _in_place(values, self.achieved)
        return _in_place(values, NEXT + self.achieved) if NEXT + self.achieved in values else arrays[_NEXT_ACHIEVED]

    def _relabel(
        self, values: Mapping[str, Any], arrays: Mapping[str, Array], at: tuple[Array, ...], goals: Array
    ) -> None:
        """Give the steps at these places their goals, and what follows from them."""
        count = len(goals)
        if not count:
            return
        achieved = self._outcomes(values, arrays)
        goal, reward = _in_place(values, self.goal), _in_place(values, self.reward or "")
        made = self.function(achieved[at], goals)
        rewards, ends = made if isinstance(made, tuple) else (made, None)
        reward[at] = self._made(rewards, count, self.reward)
        if ends is not None:
            _in_place(values, "terminated")[at] = self._made(ends, count, "terminated")
        goal[at] = goals
        if NEXT + self.goal in values:
            _in_place(values, NEXT + self.goal)[at] = goals

    def _made(self, given: Any, count: int, at: str | None) -> Array:
        """One of the arrays that the user's function returned."""
        array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
        if array.shape != (count,):
            raise FieldError(
                f"Expected {count} rewards from {self.function.__qualname__}, one per pair of goals, got shape {array.shape}",
                at=at,
            )
        return array


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
    max_length: int | None = None,
) -> Hindsight:
    """Replace goals by what was achieved, and rewards by what they would have been; adds "relabelled", bool.

    What a step achieved stands in the observation behind it, in every autoreset mode the true final one behind an episode's last
    step; so the table's max_length is one more than the window is long, as for windows with next_obs=True. Open writers with
    keep_final (the default): a step that terminated without its final observation has its own in the place of it. Steps are
    relabelled one by one, so consecutive steps of a window may have different goals. "future" and "final" mean the window's part of
    the episode; open the loader with conduit.Episode for all of it.

    With window=conduit.Transition() single transitions are drawn, every step of every episode that has ended alike, and relabelled
    as Stable-Baselines3's HerReplayBuffer does it.

    Args:
        function: f(achieved [n, *shape], goals [n, *shape]) -> rewards [n], or a pair of these and "terminated", bool [n]; numpy
            arrays as the loader delivers them, with its transforms applied; plans are told apart by its qualified name.
        goal: Field of the wanted goal.
        achieved: Field of the achieved goal, of the same shape and dtype.
        reward: Field of the reward; None for the one that the schema says is the reward.
        strategy: What the same or a later step achieved ("future"), the last one ("final"), or any ("episode").
        ratio: Share of steps that are relabelled; 0.8 are four for one that stays.
        outcome: Where a step's achievement is stored: in the "next" observation, or in the "same" row.
        max_length: With window=conduit.Transition(), steps of the longest episode that is drawn; the table needs a max_length of
            one more, for strategy "episode" also a max_stack of it.

    Raises:
        ConfigError: A lambda, or an option out of range.
    """
    longest = None if max_length is None else at_least("max_length", max_length, 1)
    return Hindsight(function, goal, achieved, reward, strategy, within("a ratio", ratio, 0, 1), outcome, longest)
