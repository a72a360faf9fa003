"""Where episodes begin and end: what a writer has to say of it, what is complete, what follows the last step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import conduit
from perf.bars import Bar

_SCHEMA = conduit.Schema([conduit.Field("obs", "float32", (1,), observation=True), conduit.Field("reward", "float32")])


def _equal(name: str, measured: object, right: object) -> Bar:
    return Bar(name, repr(measured), repr(right), measured == right)


def _refused(call: Callable[[], object], kind: type[Exception]) -> str:
    """What a call is refused with, or what it returned."""
    try:
        return f"accepted: {call()!r}"
    except kind as error:
        return str(error)


@contextlib.contextmanager
def _engine(**options: Any) -> Iterator[conduit.Engine]:
    options = {"capacity": 4000} | options
    with conduit.Engine.create("right-episodes", {"t": conduit.Table(_SCHEMA, **options)}) as engine:
        yield engine


def resets() -> Iterator[Bar]:
    """A4: how environments reset."""
    with _engine(capacity=40_000, num_envs=8) as engine:
        message = _refused(lambda: engine.writer("t", num_envs=8), conduit.errors.ConfigError)
        named = [mode for mode in ("'next_step'", "'same_step'", "'disabled'", "autoreset_mode") if mode in message]
        yield _equal(
            "A4 num_envs without a mode is refused; the error names modes and where to take it from", len(named), 4
        )
        ends, obs, reward = np.ones(8, bool), np.zeros((8, 1), np.float32), np.zeros(8, np.float32)
        with engine.writer("t", num_envs=8, autoreset="next_step") as writer:
            writer.append(obs=obs, reward=reward, terminated=ends)
            message = _refused(
                lambda: writer.append(obs=obs, reward=reward, terminated=ends), conduit.errors.FieldError
            )
            yield _equal(
                "A4 two ends in a row under 'next_step' name the mode that fits", "'same_step'" in message, True
            )
        engine.reset("t")
        with engine.writer("t", num_envs=8, autoreset="same_step") as writer:
            for group in range(1000):
                reward[:] = 8 * group + np.arange(8)
                writer.append(obs=obs, reward=reward, terminated=ends, final=obs)
        drawn: set[float] = set()
        with engine.loader("t", batch_size=4096, format="numpy") as loader:
            for _ in range(40):
                drawn |= set(loader.next()["reward"].tolist())
        yield _equal("A4 rows drawn of 8,000 of a SAME_STEP vector that all end", len(drawn), 8000)


GROUPS: tuple[Callable[[], Iterator[Bar]], ...] = (resets,)
