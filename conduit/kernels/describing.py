"""The words of a window (kernels.resolve.V_*): what a plan asks of its resolver, and which resolver that is."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.jit import address
from conduit.kernels.plan import Plan
from conduit.kernels.resolve import (
    SIGNATURE,
    V_ACROSS,
    V_BOOTSTRAP,
    V_BURN_IN,
    V_ENVS,
    V_EVERY,
    V_FROM_FIRST,
    V_GAMMA,
    V_LENGTH,
    V_MAX_SAMPLED,
    V_N,
    V_NEED,
    V_REPEAT,
    V_RESOLVE,
    V_RETURN_DOUBLE,
    V_REWARD,
    V_REWARD_DOUBLE,
    V_REWARD_FACTOR,
    V_REWARD_HIGH,
    V_REWARD_LOW,
    V_REWARD_OFFSET,
    V_REWARD_STRIDE,
    V_SAMPLED,
    V_STACK,
    V_TABLE,
    V_UNCOUNTED,
    V_WHOLE,
    V_WORDS,
    resolve_counted,
)
from conduit.kernels.sequences import ROLLOUTS, SEQUENCES
from conduit.kernels.transitions import TRANSITIONS
from conduit.kernels.windows import Episode, Rollout, Sequence, Transition, Window, need

Array = np.ndarray[Any, Any]


def resolver(window: Window, item: int, scaled: bool) -> int:
    """Native address of a window's resolver.

    Args:
        window: The window.
        item: Bytes of a reward that a transition sums up, 0 for none.
        scaled: Whether it is transformed before.
    """
    if isinstance(window, Transition):
        return address(TRANSITIONS[item, scaled and item > 0], SIGNATURE)
    return address(ROLLOUTS if isinstance(window, Rollout) else SEQUENCES, SIGNATURE)


def describe_window(
    plan: Plan, table: int, sampled: tuple[int, int], reward: tuple[int, int, int], addresses: dict[int, int]
) -> Array:
    """The words of a plan's window.

    Args:
        plan: The plan.
        table: Table descriptor.
        sampled: Address of how often each row was delivered, and how often it may be; zeros where nothing limits that.
        reward: Address, row stride and item size of the reward column, zeros where no return is made.
        addresses: {V_*: address} of index arrays and outputs.

    Returns:
        int64 [V_WORDS].
    """
    window = plan.window
    words = np.zeros(V_WORDS, np.int64)
    reals = words.view(np.float64)
    scaled = plan.reward is not None and not plan.reward.is_cast
    values = {V_TABLE: table, V_NEED: need(window)[1], V_EVERY: 1, V_STACK: 1, **addresses}
    values[V_RESOLVE] = resolver(window, reward[2] if reward[0] else 0, scaled)
    if sampled[0] != 0:
        values |= {V_SAMPLED: sampled[0], V_MAX_SAMPLED: sampled[1], V_UNCOUNTED: values[V_RESOLVE]}
        values[V_RESOLVE] = address(resolve_counted, SIGNATURE)
    if isinstance(window, Transition):
        values |= {
            V_N: window.n_step,
            V_BOOTSTRAP: window.newest == "bootstrap",
            V_NEED: 1 if window.newest == "bootstrap" else window.n_step,
            V_STACK: window.stack,
            V_REPEAT: window.padding == "repeat",
            V_REWARD: reward[0],
            V_REWARD_STRIDE: reward[1],
        }
        reals[V_GAMMA // 8] = window.gamma
        if plan.reward is not None:
            values[V_REWARD_DOUBLE] = reward[2] == 8
            values[V_RETURN_DOUBLE] = plan.reward.dtype == "float64"
            reals[V_REWARD_FACTOR // 8], reals[V_REWARD_OFFSET // 8] = plan.reward.factor, plan.reward.offset
            reals[V_REWARD_LOW // 8], reals[V_REWARD_HIGH // 8] = plan.reward.low, plan.reward.high
    elif isinstance(window, Sequence):
        values |= {
            V_LENGTH: window.length,
            V_ACROSS: window.across,
            V_WHOLE: not window.pad,
            V_BURN_IN: window.burn_in,
            V_EVERY: 1 if window.overlap is None else window.length - window.overlap,
        }
    elif isinstance(window, Episode):
        values |= {V_LENGTH: window.max_length, V_WHOLE: 1, V_FROM_FIRST: 1}
    else:
        values |= {V_LENGTH: window.ticks, V_ENVS: window.num_envs, V_EVERY: window.stride or window.ticks}
    for offset, value in values.items():
        words[offset // 8] = value
    return words
