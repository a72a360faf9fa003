"""Windows, the rows that one sample is built from, declared as data: a transition of n steps, a sequence, an episode, a rollout.

A window is built around one row, its anchor, and lies inside that row's page. A page begins with a halo, copies of the last rows of the
page before, so that this is always possible. So one check of the page's generation covers the whole window. conduit.kernels.reference.gather
has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conduit.errors import ConfigError
from conduit.numbers import at_least, flag, whole, within

Padding = Literal["zero", "repeat"]
Newest = Literal["wait", "bootstrap"]


def _keep_whole(window: object, **leasts: int) -> None:
    """Turn attributes of a window into ints of at least the given numbers."""
    for name, least in leasts.items():
        object.__setattr__(window, name, at_least(name, getattr(window, name), least))


def _keep_flags(window: Sequence | Episode | Rollout, *names: str) -> None:
    for name in names:
        object.__setattr__(window, name, flag(name, getattr(window, name)))


def _one_of(name: str, value: object, among: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in among:
        raise ConfigError(f"Expected {name} to be one of {', '.join(map(repr, among))}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Transition:
    """A step, and the observation n steps later.

    For every field that is a reward (conduit.Schema), and each of its elements: reward = sum of gamma^k * reward_k over the steps used,
    k = 0 .. m - 1. Here m = n_step, or fewer if a step before terminates or truncates; that step is included. discount = gamma^m. The
    next observation is the one after the last step used, and `terminated` / `truncated` are those of that step: bootstrap with
    `discount * (1 - terminated)`.

    Attributes:
        n_step: Steps, at least 1.
        gamma: Discount per step.
        stack: Observations per sample: [stack, *shape], oldest first; 1 leaves the axis out.
        padding: Frames before the episode's start: "repeat" its first one, or "zero".
        newest: What to do with rows whose n successors are not all written yet (the newest of a stream that goes on): "wait" for them, or
            "bootstrap" from a shorter window. Where no successor will ever come (after the last row of a stream that has ended, before
            `writer.cut`, at a truncated step without its final observation) the window is shorter in either case, and
            bootstraps from the newest observation.
    """

    n_step: int = 1
    gamma: float = 0.99
    stack: int = 1
    padding: Padding = "repeat"
    newest: Newest = "wait"

    def __post_init__(self) -> None:
        _keep_whole(self, n_step=1, stack=1)
        _one_of("padding", self.padding, ("zero", "repeat"))
        _one_of("newest", self.newest, ("wait", "bootstrap"))
        object.__setattr__(self, "gamma", within("gamma", self.gamma, 0, 1))


@dataclass(frozen=True, slots=True)
class Sequence:
    """Consecutive steps of one environment: every field becomes [batch, length, *shape].

    Attributes:
        length: Steps, at least 1.
        burn_in: Leading steps that only warm up a recurrent state; `loss_mask` is False there.
        overlap: Steps that neighboring sequences share; None lets them start anywhere. The grid of starts counts from the beginning
            of the episode, or of the stream with `across`.
        across: Cross episodes (`is_first` marks their starts); otherwise a sequence ends with its episode, and the rest
            is zeros with `mask` False.
        pad: Accept sequences that the end of their episode or stream cuts short; only without `across`.
        next_obs: Deliver `next_<observation field>` too, see `Rollout`.
    """

    length: int
    burn_in: int = 0
    overlap: int | None = None
    across: bool = False
    pad: bool = True
    next_obs: bool = False

    def __post_init__(self) -> None:
        _keep_whole(self, length=1, burn_in=0)
        _keep_flags(self, "across", "pad", "next_obs")
        if self.burn_in >= self.length:
            raise ConfigError(f"Expected burn_in below the length {self.length}, got {self.burn_in}")
        if self.overlap is not None:
            overlap = whole(self.overlap)
            if overlap is None or not 0 <= overlap < self.length:
                raise ConfigError(f"Expected overlap from 0 to {self.length - 1}, got {self.overlap!r}")
            object.__setattr__(self, "overlap", overlap)


@dataclass(frozen=True, slots=True)
class Episode:
    """Whole episodes, from their first step to their last, padded to `max_length`.

    Attributes:
        max_length: Longest episode that is drawn; longer ones are not.
        next_obs: Deliver `next_<observation field>` too, see `Rollout`.
    """

    max_length: int
    next_obs: bool = False

    def __post_init__(self) -> None:
        _keep_whole(self, max_length=1)
        _keep_flags(self, "next_obs")


@dataclass(frozen=True, slots=True)
class Rollout:
    """Consecutive steps of all environments of one writer: every field becomes [batch, ticks, num_envs, *shape].

    Attributes:
        ticks: Steps.
        num_envs: Environments; only streams with as many are drawn.
        stride: Rollouts start at multiples of this many ticks of their stream; None: at multiples of `ticks`.
        next_obs: Deliver `next_<observation field>` too, [batch, ticks, num_envs, *shape]: for every step, the next
            observation that a 1-step Transition of its row would have. A step that ends its episode has its true final observation in
            every autoreset mode (or its own as a stand-in, if it terminated and none was kept). Where `mask` is False there are zeros. The
            window then needs one more tick: T steps need a table with max_length=T+1. A window is not drawn if one of its steps has no
            next observation: the last before `writer.cut`, the newest of a stream that ended, or a truncated one
            of a writer with keep_final=False.
    """

    ticks: int
    num_envs: int
    stride: int | None = None
    next_obs: bool = False

    def __post_init__(self) -> None:
        _keep_whole(self, ticks=1, num_envs=1)
        _keep_flags(self, "next_obs")
        if self.stride is not None:
            _keep_whole(self, stride=1)


Window = Transition | Sequence | Episode | Rollout


def need(window: Window) -> tuple[int, int]:
    """Ticks of history and of future that a window needs around its anchor."""
    if isinstance(window, Transition):
        return window.stack - 1, window.n_step
    return 0, lanes(window)[0] - (0 if window.next_obs else 1)


def crosses(window: Window) -> bool:
    """True when a window may go from one episode into the next."""
    if isinstance(window, Rollout):
        return window.ticks > 1
    return isinstance(window, Sequence) and window.across and window.length > 1


def has_next(window: Window) -> bool:
    """True when a window delivers the observation after each of its steps."""
    return isinstance(window, Transition) or window.next_obs


def lanes(window: Window) -> tuple[int, ...]:
    """Axes that a window puts between the batch and a field's shape."""
    if isinstance(window, Sequence):
        return (window.length,)
    if isinstance(window, Episode):
        return (window.max_length,)
    if isinstance(window, Rollout):
        return (window.ticks, window.num_envs)
    return ()
