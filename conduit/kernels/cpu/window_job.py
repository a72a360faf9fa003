"""The words of a window (kernels.cpu.windows.WINDOW_*): what a plan asks of its resolver, and which resolver that is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit.kernels.cpu.hindsight import GOAL_ANCHORS, GOAL_RESOLVE, GOAL_WORDS, goal_anchors, resolve_goals
from conduit.kernels.cpu.job import JOB_ROWS
from conduit.kernels.cpu.sequences import ROLLOUT_ANCHORS, ROLLOUTS, SEQUENCE_ANCHORS, SEQUENCES
from conduit.kernels.cpu.transitions import TRANSITIONS, transition_anchors
from conduit.kernels.cpu.windows import (
    SIGNATURE,
    SUM_WORDS,
    WINDOW_ACROSS,
    WINDOW_ANCHORS,
    WINDOW_BOOTSTRAP,
    WINDOW_BURN_IN,
    WINDOW_ENVS,
    WINDOW_EVERY,
    WINDOW_FROM_FIRST,
    WINDOW_GAMMA,
    WINDOW_GOALS,
    WINDOW_LENGTH,
    WINDOW_MAX_SAMPLED,
    WINDOW_N,
    WINDOW_NEED,
    WINDOW_REACH,
    WINDOW_REPEAT,
    WINDOW_RESOLVE,
    WINDOW_RETURN,
    WINDOW_RETURN_DOUBLE,
    WINDOW_REWARD,
    WINDOW_REWARD_DOUBLE,
    WINDOW_REWARD_FACTOR,
    WINDOW_REWARD_HIGH,
    WINDOW_REWARD_LOW,
    WINDOW_REWARD_OFFSET,
    WINDOW_REWARD_STRIDE,
    WINDOW_SAMPLED,
    WINDOW_SHORT,
    WINDOW_STACK,
    WINDOW_SUM_COUNT,
    WINDOW_SUMS,
    WINDOW_TABLE,
    WINDOW_UNCOUNTED,
    WINDOW_WHOLE,
    WINDOW_WORDS,
)
from conduit.kernels.spec.plan import Plan, Return
from conduit.kernels.spec.windows import Episode, Rollout, Sequence, Transition, Window, need
from conduit.native.descriptors import fill
from conduit.native.jit import address
from conduit.native.memory import call_5, peek_i64
from conduit.store.pages.deletion import may_be_taken

Array = np.ndarray[Any, Any]


def resolve_counted(window, job, slots, count, unused):
    """Any window, in a table whose rows may be delivered so often only."""
    sampled, limit = peek_i64(window + WINDOW_SAMPLED), peek_i64(window + WINDOW_MAX_SAMPLED)
    fresh = 0
    while fresh < count:
        row = peek_i64(peek_i64(job + JOB_ROWS) + 8 * peek_i64(slots + 8 * fresh))
        if not may_be_taken(peek_i64(sampled + 8 * row), limit):
            break
        fresh += 1
    return call_5(peek_i64(window + WINDOW_UNCOUNTED), window, job, slots, fresh, 0)


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
        addresses: {WINDOW_*: address} of index arrays and outputs.

    Returns:
        int64 [WINDOW_WORDS], and what its WINDOW_SUMS points to.
    """
    window = plan.window
    words = np.zeros(WINDOW_WORDS, np.int64)
    reals = words.view(np.float64)
    lone = rewards[0] if plan.lone_return is not None else None
    sums = np.zeros((0 if lone is not None else len(rewards), SUM_WORDS), np.int64)
    values = {WINDOW_TABLE: table, WINDOW_NEED: need(window)[1], WINDOW_EVERY: 1, WINDOW_STACK: 1, **addresses}
    item = 0 if lone is None else lone.plan.field.itemsize
    values[WINDOW_RESOLVE] = resolver(window, item, lone is not None and not lone.plan.transform.is_cast)
    values[WINDOW_ANCHORS] = anchors_of(window)
    if addresses.get(WINDOW_GOALS):
        goals = np.ctypeslib.as_array((ctypes.c_int64 * GOAL_WORDS).from_address(addresses[WINDOW_GOALS]))
        goals[GOAL_RESOLVE // 8], goals[GOAL_ANCHORS // 8] = values[WINDOW_RESOLVE], values[WINDOW_ANCHORS]
        values[WINDOW_RESOLVE], values[WINDOW_ANCHORS] = (
            address(resolve_goals, SIGNATURE),
            address(goal_anchors, SIGNATURE),
        )
    if sampled[0] != 0:
        values |= {WINDOW_SAMPLED: sampled[0], WINDOW_MAX_SAMPLED: sampled[1], WINDOW_UNCOUNTED: values[WINDOW_RESOLVE]}
        values[WINDOW_RESOLVE] = address(resolve_counted, SIGNATURE)
    if isinstance(window, Transition):
        values |= {
            WINDOW_N: window.n_step,
            WINDOW_BOOTSTRAP: window.newest == "bootstrap",
            WINDOW_NEED: 1 if window.newest == "bootstrap" else window.n_step,
            WINDOW_SHORT: 1,
            WINDOW_STACK: window.stack,
            WINDOW_REPEAT: window.padding == "repeat",
            WINDOW_SUMS: sums.ctypes.data,
            WINDOW_SUM_COUNT: len(sums),
        }
        reals[WINDOW_GAMMA // 8] = window.gamma
        for one, made in zip(sums, rewards, strict=False):
            transform = made.plan.transform
            one[:4] = made.source, made.stride, made.plan.elements, made.plan.field.itemsize == 8
            one[4:8] = np.array([transform.factor, transform.offset, transform.low, transform.high]).view(np.int64)
            one[8:] = made.out, transform.dtype == "float64"
        if lone is not None:
            transform = lone.plan.transform
            values |= {
                WINDOW_REWARD: lone.source,
                WINDOW_REWARD_STRIDE: lone.stride,
                WINDOW_REWARD_DOUBLE: item == 8,
                WINDOW_RETURN: lone.out,
                WINDOW_RETURN_DOUBLE: transform.dtype == "float64",
            }
            reals[WINDOW_REWARD_FACTOR // 8], reals[WINDOW_REWARD_OFFSET // 8] = transform.factor, transform.offset
            reals[WINDOW_REWARD_LOW // 8], reals[WINDOW_REWARD_HIGH // 8] = transform.low, transform.high
    elif isinstance(window, Sequence):
        values |= {
            WINDOW_LENGTH: window.length,
            WINDOW_ACROSS: window.across,
            WINDOW_WHOLE: not window.pad,
            WINDOW_BURN_IN: window.burn_in,
            WINDOW_SHORT: window.pad and not window.across,
            WINDOW_EVERY: 1 if window.overlap is None else window.length - window.overlap,
        }
    elif isinstance(window, Episode):
        values |= {WINDOW_LENGTH: window.max_length, WINDOW_WHOLE: 1, WINDOW_FROM_FIRST: 1, WINDOW_SHORT: 1}
    else:
        values |= {
            WINDOW_LENGTH: window.ticks,
            WINDOW_ENVS: window.num_envs,
            WINDOW_EVERY: window.stride or window.ticks,
        }
    values[WINDOW_REACH] = values[WINDOW_NEED] if plan.goals is None else plan.reach[1]
    fill(words, values)
    return words, sums
