"""Room: the promise of a capacity, pages for many writers and for short-lived ones, free memory, and numbers that fit their bits."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np

import conduit
from conduit.errors import Busy, CapacityError, ConfigError, NoSpace
from conduit.store.format import words as w
from perf.bars import Bar

_SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "float32", (4,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32"),
    ]
)
_OBS = np.zeros(4, np.float32)
_ROW: dict[str, Any] = {"obs": _OBS, "action": 0, "reward": 0.0}


@contextlib.contextmanager
def _engine(capacity: int | str, **options: Any) -> Iterator[conduit.Engine]:
    name = f"right-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with conduit.Engine.create(name, {"t": conduit.Table(_SCHEMA, capacity, **options)}) as engine:
        yield engine


def _tick(num_envs: int) -> dict[str, Any]:
    return {
        "obs": np.zeros((num_envs, 4), np.float32),
        "action": np.zeros(num_envs, np.int64),
        "reward": np.zeros(num_envs, np.float32),
    }


def _least_held(capacity: int, num_envs: int | None, share: float) -> int:
    """The fewest rows that are there once the capacity was written; `share` of the steps end an episode."""
    lanes, rng, least = num_envs or 1, np.random.default_rng(0), 1 << 62
    row = _tick(num_envs) if num_envs else _ROW
    with (
        _engine(capacity, num_envs=lanes) as engine,
        engine.writer("t", num_envs=num_envs, autoreset="disabled") as writer,
    ):
        for number in range(3 * capacity // lanes):
            ends = rng.random(lanes) < share
            writer.append(**row, terminated=ends if num_envs else bool(ends[0]), final=row["obs"])
            if number * lanes >= capacity:
                least = min(least, engine._views["t"].rows_visible())
    return least


def capacity() -> Iterator[Bar]:
    """A9: at least that many steps of one writer."""
    for rows, num_envs in ((100, None), (2000, 16)):
        for share in (0.0, 0.05, 1.0):
            held = _least_held(rows, num_envs, share)
            name = f"A9 rows held of {rows:,} asked, {num_envs or 1} environments, {share:.0%} of steps end an episode"
            yield Bar(name, f"{held:,}", f">= {rows:,}", held >= rows)


def _writers_until_full(count: int, rows: int, **options: Any) -> int:
    """Writers of one environment that are open at once, up to `count`, each with a share of three times the capacity."""
    with _engine(10_000, **options) as engine:
        writers = []
        try:
            for _ in range(count):
                writers.append(engine.writer("t", on_full="raise"))
                writers[-1].append(**_ROW)
            for _ in range(rows // count):
                for writer in writers:
                    writer.append(**_ROW)
        except Busy:
            return len(writers) - 1
        return len(writers)


def writers() -> Iterator[Bar]:
    """A10: many writers, and writers that come and go."""
    found = _writers_until_full(64, 30_000)
    yield Bar("A10 single writers open at once on capacity=10_000", f"{found}", "64", found == 64)
    found = _writers_until_full(300, 30_000, writers=300)
    yield Bar("A10 the same with writers=300, the remedy that is named", f"{found}", "300", found == 300)
    with _engine(10_000) as engine, engine.writer("t", num_envs=64, autoreset="same_step", on_full="raise") as writer:
        for _ in range(500):
            writer.append(**_tick(64))
        held = engine._views["t"].rows_visible()
    name = "A10 rows held of 10,000 by a writer of 64 environments that num_envs did not tell of"
    yield Bar(name, f"{held:,}", ">= 10,000", held >= 10_000)
    with _engine(100_000) as engine:
        for _ in range(6000):
            with engine.writer("t") as writer:
                for step in range(20):
                    writer.append(**_ROW, terminated=step == 19, final=_OBS)
        held = engine._views["t"].rows_visible()
    yield Bar("A10 rows held of 100,000, a new writer per 20-step episode", f"{held:,}", ">= 100,000", held >= 100_000)


def memory() -> Iterator[Bar]:
    """A14: an engine larger than memory."""
    table, began = conduit.Table(_SCHEMA, "4 TiB"), time.monotonic()
    try:
        with conduit.Engine.create(f"right-{os.getpid()}-huge", {"t": table}, backing="memfd"):
            said = "created"
    except NoSpace as error:
        said = str(error)
    took = time.monotonic() - began
    good = all(word in said for word in ("bytes free in", "got", "lower the capacity")) and took < 1.0
    yield Bar("A14 memfd engine of 4 TiB", f"{said} ({took:.3f} s)", "needed, available, remedy, in < 1 s", good)


def _refusal(**options: Any) -> str:
    try:
        conduit.Table(_SCHEMA, **options)
    except (CapacityError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    except OverflowError as error:
        return f"raw {error!r}"
    return "accepted"


def overflows() -> Iterator[Bar]:
    """B8 and B11: numbers that nobody refused."""
    for what, options, word in (
        ("B8 page_rows of 2^26 + 1", {"capacity": 1000, "page_rows": (1 << 26) + 1}, "rows per page"),
        ("B11 capacity of 10^30 rows", {"capacity": 10**30}, "a capacity of at most"),
        ("B11 capacity of '1000000000 TB'", {"capacity": "1000000000 TB"}, "a size of at most"),
    ):
        said = _refusal(**options)
        yield Bar(what, said, "CapacityError by name", said.startswith("CapacityError") and word in said)
    with _engine(2000, page_rows=1000) as engine, engine.writer("t", num_envs=1, autoreset="disabled") as writer:
        writer._stream.words[w.WRITER_EPISODES // 8] = (1 << 32) - 128
        for k in range(512):
            end = np.array([k % 2 == 1])
            writer.append(**_tick(1), terminated=end, final=np.zeros((1, 4), np.float32))
        flags = engine._views["t"].meta["link"][:512] & 1
        wrong = int((flags != np.arange(512) % 2).sum())
    yield Bar("B8 wrong `terminated` of 512 rows around episode 2^32", f"{wrong}", "0", wrong == 0)
    with _engine(2000) as engine, engine.writer("t") as writer:
        writer.append(**_ROW)
        writer._stream._env_states[0, 2] = w.LAST_STEP
        for _ in range(2):
            writer.append(**_ROW)
        steps = engine._views["t"].meta["step"][1:3].tolist()
    right = [w.LAST_STEP, w.AFTER_LAST_STEP]
    yield Bar("B8 steps around 2^31 of an episode", f"{steps}", f"{right}", steps == right)
    try:
        with conduit.Engine.create(f"right-{os.getpid()}-name", {"x" * 300: conduit.Table(_SCHEMA, 100)}):
            said = "created"
    except ConfigError as error:
        said = str(error)
    yield Bar("B11 a table's name of 300 bytes", said, "refused when created", "at most 255 bytes" in said)


GROUPS = (capacity, writers, memory, overflows)
