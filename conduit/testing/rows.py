"""Rows that prove themselves: every value follows from (environment, number), so a torn, mixed or stale row shows.

    obs[0] = environment    obs[1] = number    obs[i] = mix(environment, number, i)
    action = mix(environment, number, -1)      reward = mix(environment, number, -2) / 2^16, exact in float64

An environment numbers its steps from 0. Every `EPISODE`-th step ends an episode, by turns terminated and truncated. Where
the final observation is handed over, it is the observation of number -1 - n for the step n that ended.
"""

from __future__ import annotations

from conduit.field import Field
from conduit.native.jit import inner, kernel
from conduit.native.memory import peek_f64, peek_i64, peek_u8, poke_f64, poke_i64, poke_u8
from conduit.schema import Schema

WORDS = 64
"""int64 words of an observation: 512 bytes, long enough to be torn."""
EPISODE = 13
"""Steps per episode."""
SCHEMA = Schema(
    [
        Field("obs", "int64", (WORDS,), observation=True),
        Field("action", "int64"),
        Field("reward", "float64"),
    ]
)
_BYTES = 8 * WORDS


@inner
def mix(environment, number, place):
    """A word that any change of its arguments changes."""
    word = environment * 0x2545F4914F6CDD1D ^ (number * 0x3F58476D1CE4E5B9) ^ (place * 0x14D049BB133111EB)
    return word ^ (word >> 29)


@inner
def _reward(environment, number):
    return (mix(environment, number, -2) & 0xFFFFFFFF) / 65536.0


@inner
def _end(number):
    """How a step ends its episode: 0 not at all, 1 terminated, 2 truncated."""
    if number % EPISODE != EPISODE - 1:
        return 0
    return 1 + (number // EPISODE & 1)


@kernel("int64(int64, int64, int64)")
def write_observation(obs, environment, number):
    """Write the observation of one step at address `obs`; returns how the step ends: 0, 1 terminated, 2 truncated."""
    poke_i64(obs, environment)
    poke_i64(obs + 8, number)
    for i in range(2, WORDS):
        poke_i64(obs + 8 * i, mix(environment, number, i))
    return _end(number)


@kernel("int64(int64, int64)")
def action_of(environment, number):
    """The action of a step."""
    return mix(environment, number, -1)


@kernel("float64(int64, int64)")
def reward_of(environment, number):
    """The reward of a step."""
    return _reward(environment, number)


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def write_ticks(obs, action, reward, terminated, truncated, environment, envs, number, ticks):
    """Write whole ticks of `envs` environments, from number `number` on, at the addresses of their first row."""
    row = 0
    for tick in range(ticks):
        for env in range(envs):
            end = write_observation(obs + _BYTES * row, environment + env, number + tick)
            poke_i64(action + 8 * row, mix(environment + env, number + tick, -1))
            poke_f64(reward + 8 * row, _reward(environment + env, number + tick))
            poke_u8(terminated + row, end == 1)
            poke_u8(truncated + row, end == 2)
            row += 1
    return row


@inner
def _is_whole(obs):
    environment = peek_i64(obs)
    number = peek_i64(obs + 8)
    for i in range(2, WORDS):
        if peek_i64(obs + 8 * i) != mix(environment, number, i):
            return False
    return True


@inner
def _fits(obs, action, reward, terminated, truncated):
    environment = peek_i64(obs)
    number = peek_i64(obs + 8)
    end = peek_u8(terminated) + 2 * peek_u8(truncated)
    return (
        number >= 0
        and _is_whole(obs)
        and peek_i64(action) == mix(environment, number, -1)
        and peek_f64(reward) == _reward(environment, number)
        and end == _end(number)
    )


@kernel("int64(int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def find_torn_rows(obs, action, reward, terminated, truncated, count, torn):
    """Mark the rows (uint8 [count] at `torn`) that are not exactly what one step wrote; returns their number."""
    bad = 0
    for i in range(count):
        fits = _fits(obs + _BYTES * i, action + 8 * i, reward + 8 * i, terminated + i, truncated + i)
        poke_u8(torn + i, not fits)
        bad += not fits
    return bad


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def find_torn_transitions(obs, after, action, reward, terminated, truncated, count, torn):
    """Like `find_torn_rows`, and each next observation (at `after`) must be the one that follows its row.

    A terminated row whose writer died before the row that only closes the episode has its own observation there.
    """
    bad = find_torn_rows(obs, action, reward, terminated, truncated, count, torn)
    for i in range(count):
        if peek_u8(torn + i) != 0:
            continue
        following = after + _BYTES * i
        number = peek_i64(obs + _BYTES * i + 8)
        reached = peek_i64(following + 8)
        next_row = reached == number + 1
        kept_final = _end(number) != 0 and reached == -1 - number
        unclosed = _end(number) == 1 and reached == number
        if not (
            _is_whole(following)
            and peek_i64(following) == peek_i64(obs + _BYTES * i)
            and (next_row or kept_final or unclosed)
        ):
            poke_u8(torn + i, 1)
            bad += 1
    return bad
