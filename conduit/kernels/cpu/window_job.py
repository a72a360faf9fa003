"""The words of a window (kernels.cpu.windows.V_*): what a plan asks of its resolver, and which resolver that is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit.kernels.cpu.hindsight import K_ANCHORS, K_RESOLVE, K_WORDS, goal_anchors, resolve_goals
from conduit.kernels.cpu.sequences import ROLLOUT_ANCHORS, ROLLOUTS, SEQUENCE_ANCHORS, SEQUENCES
from conduit.kernels.cpu.transitions import TRANSITIONS, transition_anchors
from conduit.kernels.cpu.windows import (
    S_WORDS,
    SIGNATURE,
    V_ACROSS,
    V_ANCHORS,
    V_BOOTSTRAP,
    V_BURN_IN,
    V_ENVS,
    V_EVERY,
    V_FROM_FIRST,
    V_GAMMA,
    V_GOALS,
    V_LENGTH,
    V_MAX_SAMPLED,
    V_N,
    V_NEED,
    V_REACH,
    V_REPEAT,
    V_RESOLVE,
    V_RETURN,
    V_RETURN_DOUBLE,
    V_REWARD,
    V_REWARD_DOUBLE,
    V_REWARD_FACTOR,
    V_REWARD_HIGH,
    V_REWARD_LOW,
    V_REWARD_OFFSET,
    V_REWARD_STRIDE,
    V_SAMPLED,
    V_SHORT,
    V_STACK,
    V_SUM_COUNT,
    V_SUMS,
    V_TABLE,
    V_UNCOUNTED,
    V_WHOLE,
    V_WORDS,
    resolve_counted,
)
from conduit.kernels.spec.plan import Plan, Return
from conduit.kernels.spec.windows import Episode, Rollout, Sequence, Transition, Window, need
from conduit.native.jit import address

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


def anchors_of(window: Window) -> int:
    """Native address of what tells which rows anchor a window."""
    if isinstance(window, Transition):
        return address(transition_anchors, SIGNATURE)
    return address(ROLLOUT_ANCHORS if isinstance(window, Rollout) else SEQUENCE_ANCHORS, SIGNATURE)


def callbacks() -> Iterator[tuple[Callable[..., int], str]]:
    """Every resolver, and what tells anchors, for a library of kernels."""
    resolvers = (*TRANSITIONS.values(), ROLLOUTS, SEQUENCES, resolve_goals, resolve_counted)
    for function in (*resolvers, transition_anchors, ROLLOUT_ANCHORS, SEQUENCE_ANCHORS, goal_anchors):
        yield function, SIGNATURE


@dataclass(frozen=True, slots=True)
class Summed:
    """A return in memory.

    Attributes:
        plan: What it is.
        source, stride: Address of its field's row 0, and bytes from row to row.
        out: Address of the sums, [batch, *shape].
    """

    plan: Return
    source: int
    stride: int
    out: int


def describe_window(
    plan: Plan, table: int, sampled: tuple[int, int], rewards: Listed[Summed], addresses: dict[int, int]
) -> tuple[Array, Array]:
    """The words of a plan's window.

    Args:
        plan: The plan.
        table: Table descriptor.
        sampled: Address of how often each row was delivered, and how often it may be; zeros where nothing limits that.
        rewards: The plan's returns.
        addresses: {V_*: address} of index arrays and outputs.

    Returns:
        int64 [V_WORDS], and what its V_SUMS points to.
    """
    window = plan.window
    words = np.zeros(V_WORDS, np.int64)
    reals = words.view(np.float64)
    lone = rewards[0] if plan.lone_return is not None else None
    sums = np.zeros((0 if lone is not None else len(rewards), S_WORDS), np.int64)
    values = {V_TABLE: table, V_NEED: need(window)[1], V_EVERY: 1, V_STACK: 1, **addresses}
    item = 0 if lone is None else lone.plan.field.itemsize
    values[V_RESOLVE] = resolver(window, item, lone is not None and not lone.plan.transform.is_cast)
    values[V_ANCHORS] = anchors_of(window)
    if addresses.get(V_GOALS):
        goals = np.ctypeslib.as_array((ctypes.c_int64 * K_WORDS).from_address(addresses[V_GOALS]))
        goals[K_RESOLVE // 8], goals[K_ANCHORS // 8] = values[V_RESOLVE], values[V_ANCHORS]
        values[V_RESOLVE], values[V_ANCHORS] = address(resolve_goals, SIGNATURE), address(goal_anchors, SIGNATURE)
    if sampled[0] != 0:
        values |= {V_SAMPLED: sampled[0], V_MAX_SAMPLED: sampled[1], V_UNCOUNTED: values[V_RESOLVE]}
        values[V_RESOLVE] = address(resolve_counted, SIGNATURE)
    if isinstance(window, Transition):
        values |= {
            V_N: window.n_step,
            V_BOOTSTRAP: window.newest == "bootstrap",
            V_NEED: 1 if window.newest == "bootstrap" else window.n_step,
            V_SHORT: 1,
            V_STACK: window.stack,
            V_REPEAT: window.padding == "repeat",
            V_SUMS: sums.ctypes.data,
            V_SUM_COUNT: len(sums),
        }
        reals[V_GAMMA // 8] = window.gamma
        for one, made in zip(sums, rewards, strict=False):
            transform = made.plan.transform
            one[:4] = made.source, made.stride, made.plan.elements, made.plan.field.itemsize == 8
            one[4:8] = np.array([transform.factor, transform.offset, transform.low, transform.high]).view(np.int64)
            one[8:] = made.out, transform.dtype == "float64"
        if lone is not None:
            transform = lone.plan.transform
            values |= {
                V_REWARD: lone.source,
                V_REWARD_STRIDE: lone.stride,
                V_REWARD_DOUBLE: item == 8,
                V_RETURN: lone.out,
                V_RETURN_DOUBLE: transform.dtype == "float64",
            }
            reals[V_REWARD_FACTOR // 8], reals[V_REWARD_OFFSET // 8] = transform.factor, transform.offset
            reals[V_REWARD_LOW // 8], reals[V_REWARD_HIGH // 8] = transform.low, transform.high
    elif isinstance(window, Sequence):
        values |= {
            V_LENGTH: window.length,
            V_ACROSS: window.across,
            V_WHOLE: not window.pad,
            V_BURN_IN: window.burn_in,
            V_SHORT: window.pad and not window.across,
            V_EVERY: 1 if window.overlap is None else window.length - window.overlap,
        }
    elif isinstance(window, Episode):
        values |= {V_LENGTH: window.max_length, V_WHOLE: 1, V_FROM_FIRST: 1, V_SHORT: 1}
    else:
        values |= {V_LENGTH: window.ticks, V_ENVS: window.num_envs, V_EVERY: window.stride or window.ticks}
    values[V_REACH] = values[V_NEED] if plan.goals is None else plan.reach[1]
    for offset, value in values.items():
        words[offset // 8] = value
    return words, sums
