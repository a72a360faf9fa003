"""Backwards over the steps of a batch: the kernels behind conduit.kernels.ops.returns, which says what they compute.

All work on [B, T, N] (N = 1 for sequences) described by a job, without the interpreter lock, in float64 inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from conduit.errors import FieldError
from conduit.kernels.spec.batch_transforms import Array, as_numpy, checked_array, is_wide
from conduit.native.jit import inner, kernel
from conduit.native.memory import peek_f32, peek_f64, peek_i64, peek_u8, poke_f32, poke_u8

(
    TRACE_BATCH,
    TRACE_TICKS,
    TRACE_ENVS,
    TRACE_REWARD,
    TRACE_VALUES,
    TRACE_TERMINATED,
    TRACE_TRUNCATED,
    TRACE_MASK,
    TRACE_FIRST,
    TRACE_LENGTHS,
) = range(0, 80, 8)
TRACE_BOOTSTRAP, TRACE_FINALS, TRACE_RATIOS, TRACE_ADVANTAGES, TRACE_RETURNS, TRACE_USED = range(80, 128, 8)
"""Words of a job: sizes, then addresses (0: not given): real [B, T, N] rewards, values, final values, log ratios; float32 advantages,
returns; bool [B, T, N] flags, mask, firsts, used steps; int64 [B] lengths; real [B, N] bootstrap.
Reals are float32, or all float64 for the kernels called wide: what is subtracted or summed up is never rounded before."""
TRACE_WORDS = 16

_ENDED, _NEXT, _KNOWN, _UNKNOWN = 0, 1, 2, 3


@inner
def _flag(job, word, at):
    return peek_u8(peek_i64(job + word) + at) != 0


@inner
def _continues(job, at, t, length, envs):
    """True when the cell behind in time is the next step of the same episode."""
    after = at + envs
    return t + 1 < length and _flag(job, TRACE_MASK, after) and not _flag(job, TRACE_FIRST, after)


@inner(forceinline=True)
def _real(base, at, wide):
    return peek_f64(base + 8 * at) if wide else np.float64(peek_f32(base + 4 * at))


@inner(forceinline=True)
def _successor(job, at, t, length, envs, column, wide):
    """How a step goes on, and the value of its successor."""
    if _flag(job, TRACE_TERMINATED, at):
        return _ENDED, 0.0
    if _flag(job, TRACE_TRUNCATED, at):
        finals = peek_i64(job + TRACE_FINALS)
        if finals != 0:
            return _KNOWN, _real(finals, at, wide)
        if t + 1 < length and not _flag(job, TRACE_MASK, at + envs):
            return _KNOWN, _real(peek_i64(job + TRACE_VALUES), at + envs, wide)
    elif _continues(job, at, t, length, envs):
        return _NEXT, _real(peek_i64(job + TRACE_VALUES), at + envs, wide)
    bootstrap = peek_i64(job + TRACE_BOOTSTRAP)
    if t == length - 1 and bootstrap != 0:
        return _KNOWN, _real(bootstrap, column, wide)
    return _UNKNOWN, 0.0


@inner
def _length(job, sample, ticks):
    lengths = peek_i64(job + TRACE_LENGTHS)
    return ticks if lengths == 0 else min(peek_i64(lengths + 8 * sample), ticks)


@inner
def _skip(job, at):
    poke_f32(peek_i64(job + TRACE_ADVANTAGES) + 4 * at, 0.0)
    poke_f32(peek_i64(job + TRACE_RETURNS) + 4 * at, 0.0)
    poke_u8(peek_i64(job + TRACE_USED) + at, 0)


@inner(forceinline=True)
def _trace(job, gamma, lam, rho_bar, c_bar, pg_rho_bar, corrected, wide):
    """GAE (corrected = 0) or V-trace (corrected = 1) of a batch."""
    ticks, envs = peek_i64(job + TRACE_TICKS), peek_i64(job + TRACE_ENVS)
    rewards, values = peek_i64(job + TRACE_REWARD), peek_i64(job + TRACE_VALUES)
    ratios = peek_i64(job + TRACE_RATIOS)
    for sample in range(peek_i64(job + TRACE_BATCH)):
        length = _length(job, sample, ticks)
        for env in range(envs):
            carried = 0.0
            for back in range(ticks):
                t = ticks - 1 - back
                at = (sample * ticks + t) * envs + env
                if t >= length or not _flag(job, TRACE_MASK, at):
                    _skip(job, at)
                    carried = 0.0
                    continue
                kind, after = _successor(job, at, t, length, envs, sample * envs + env, wide)
                value = _real(values, at, wide)
                if kind == _UNKNOWN:
                    _skip(job, at)
                    poke_f32(peek_i64(job + TRACE_RETURNS) + 4 * at, value)
                    carried = 0.0
                    continue
                if kind != _NEXT:
                    carried = 0.0
                delta = _real(rewards, at, wide) + gamma * after - value
                if corrected == 0.0:
                    carried = delta + gamma * lam * carried
                    advantage = carried
                else:
                    ratio = 1.0 if ratios == 0 else np.exp(_real(ratios, at, wide))
                    advantage = min(pg_rho_bar, ratio) * (delta + gamma * carried)
                    carried = min(rho_bar, ratio) * delta + gamma * lam * min(c_bar, ratio) * carried
                poke_f32(peek_i64(job + TRACE_ADVANTAGES) + 4 * at, advantage)
                poke_f32(peek_i64(job + TRACE_RETURNS) + 4 * at, carried + value)
                poke_u8(peek_i64(job + TRACE_USED) + at, 1)
    return 0


_TRACE = "int64(int64, float64, float64, float64, float64, float64, float64)"


@kernel(_TRACE, nogil=True)
def trace(job, gamma, lam, rho_bar, c_bar, pg_rho_bar, corrected):
    """GAE (corrected = 0) or V-trace (corrected = 1) of a batch, from float32."""
    return _trace(job, gamma, lam, rho_bar, c_bar, pg_rho_bar, corrected, False)


@kernel(_TRACE, nogil=True)
def trace_wide(job, gamma, lam, rho_bar, c_bar, pg_rho_bar, corrected):
    """`trace` from float64."""
    return _trace(job, gamma, lam, rho_bar, c_bar, pg_rho_bar, corrected, True)


@inner(forceinline=True)
def _sum_up(job, gamma, wide):
    """Returns-to-go of a batch, into TRACE_RETURNS."""
    ticks, envs = peek_i64(job + TRACE_TICKS), peek_i64(job + TRACE_ENVS)
    for sample in range(peek_i64(job + TRACE_BATCH)):
        length = _length(job, sample, ticks)
        for env in range(envs):
            carried = 0.0
            for back in range(ticks):
                t = ticks - 1 - back
                at = (sample * ticks + t) * envs + env
                if t >= length or not _flag(job, TRACE_MASK, at):
                    carried = 0.0
                else:
                    ended = _flag(job, TRACE_TERMINATED, at) or _flag(job, TRACE_TRUNCATED, at)
                    if ended or not _continues(job, at, t, length, envs):
                        carried = 0.0
                    carried = _real(peek_i64(job + TRACE_REWARD), at, wide) + gamma * carried
                poke_f32(peek_i64(job + TRACE_RETURNS) + 4 * at, carried)
    return 0


@kernel("int64(int64, float64)", nogil=True)
def sum_up(job, gamma):
    """Returns-to-go of a batch, from float32."""
    return _sum_up(job, gamma, False)


@kernel("int64(int64, float64)", nogil=True)
def sum_up_wide(job, gamma):
    """`sum_up` from float64."""
    return _sum_up(job, gamma, True)


@kernel("int64(int64, int64, int64, float64)", nogil=True)
def standardise(values, mask, count, eps):
    """(x - mean) / (deviation + eps) over the masked ones of float32 [count], in place; returns how many there are."""
    used = 0
    total = 0.0
    for i in range(count):
        if mask == 0 or peek_u8(mask + i) != 0:
            used += 1
            total += peek_f32(values + 4 * i)
    if used == 0:
        return 0
    mean = total / used
    spread = 0.0
    for i in range(count):
        if mask == 0 or peek_u8(mask + i) != 0:
            spread += (peek_f32(values + 4 * i) - mean) ** 2
    deviation = np.sqrt(spread / used)
    for i in range(count):
        if mask == 0 or peek_u8(mask + i) != 0:
            poke_f32(values + 4 * i, (peek_f32(values + 4 * i) - mean) / (deviation + eps))
    return used


def has_lengths(values: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether a batch's "lengths" are those of its windows: rollouts have none, theirs are a stored field's."""
    return "lengths" in values and (len(shape) < 3 or tuple(np.shape(values["lengths"])[:3]) != shape)


class Job:
    """The words of a job, and the arrays that they point into.

    Args:
        values: A batch with reward, terminated and truncated [B, T] or [B, T, N]; mask, is_first and lengths where they are.
        reward: Name of the reward.
        others: What else is to be put into it by `put_real`.

    Attributes:
        is_wide: The reals are float64, since some of what came is wider than float32.

    Raises:
        FieldError: Something is missing or of another shape.
    """

    def __init__(self, values: Mapping[str, Any], reward: str, others: Iterable[Any] = ()) -> None:
        self.is_wide = any(is_wide(one) for one in (values.get(reward), *others))
        self._real = np.float64 if self.is_wide else np.float32
        rewards = as_numpy(values, reward, self._real)
        if rewards.ndim not in (2, 3):
            raise FieldError(f"Expected shape [B, T] or [B, T, N], got {rewards.shape}", at=reward)
        self.shape = rewards.shape
        self.words = np.zeros(TRACE_WORDS, np.int64)
        self._kept: list[Array] = []
        batch, ticks = self.shape[:2]
        self.words[: TRACE_REWARD // 8] = batch, ticks, self.shape[2] if rewards.ndim == 3 else 1
        self.put(TRACE_REWARD, rewards)
        ended = []
        for word, name in ((TRACE_TERMINATED, "terminated"), (TRACE_TRUNCATED, "truncated")):
            ended.append(as_numpy(values, name, bool, self.shape))
            self.put(word, ended[-1])
        self.put(
            TRACE_MASK, as_numpy(values, "mask", bool, self.shape) if "mask" in values else np.ones(self.shape, bool)
        )
        if "is_first" in values:
            self.put(TRACE_FIRST, as_numpy(values, "is_first", bool, self.shape))
        else:
            first = np.zeros(self.shape, bool)
            first[:, 1:] = (ended[0] | ended[1])[:, :-1]
            self.put(TRACE_FIRST, first)
        if has_lengths(values, self.shape):
            self.put(TRACE_LENGTHS, as_numpy(values, "lengths", np.int64, (batch,)))

    def put(self, word: int, array: Array) -> Array:
        """Point a word at an array."""
        self._kept.append(array)
        self.words[word // 8] = array.ctypes.data
        return array

    def put_real(self, word: int, value: Any, name: str, shape: tuple[int, ...] | None = None) -> None:
        """Point a word at a copy or view of a tensor as the job's reals, where there is one."""
        if value is not None:
            self.put(word, checked_array(value, name, self._real, self.shape if shape is None else shape))
