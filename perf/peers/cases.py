"""What is asked of every library: the same rows, the same tensors, one named frozen case at a time.

A row is a transition of one environment: obs, action, reward, terminated, and the observation that follows, as an environment
hands them over. Its action is a number that no other row has, so that a delivered row says which row it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perf.workloads import Columns, Part, Workload, ticks

Kind = Literal["write", "batch", "priorities", "frames", "sequences", "rollout", "tokens", "concurrent", "visible"]
Tick = tuple[NDArray[np.generic], ...]
"""obs, action, reward, terminated and the next observation: arrays [lanes, *shape], or Python scalars for one environment."""

NAMES = ("obs", "action", "reward", "terminated", "next_obs")
ALPHA, BETA, EPS = 0.6, 0.4, 1e-6
STACK, LENGTH, ROLLOUT = 4, 80, 128
LONGEST, SHORTEST = 4000, 200
SCALE = 1 / 255


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the tables, or two where a case is measured in two parts.

    Attributes:
        name: Key in results; never reused for something else.
        title: What readers see.
        kind: What is done.
        workload: Rows: their fields, how many are held, environments per call, rows per batch.
        ends: Chance that a row ends its episode.
        writers: Writer processes, for the concurrent kind.
    """

    name: str
    title: str
    kind: Kind
    workload: Workload
    ends: float = 1 / 1000
    writers: int = 0

    @property
    def parts(self) -> tuple[str, ...]:
        """What is timed, each a figure of its own."""
        if self.kind == "priorities":
            return ("sample", "update")
        if self.kind == "concurrent":
            return ("rows in", "rows out")
        return ("write",) if self.kind == "write" else ("visible",) if self.kind == "visible" else ("sample",)

    @property
    def unit_rows(self) -> int:
        """Rows of one unit of work: a tick written, a batch delivered."""
        load = self.workload
        if self.kind == "write":
            return load.lanes
        if self.kind == "sequences":
            return load.batch * LENGTH
        return ROLLOUT * load.lanes if self.kind == "rollout" else load.batch

    @property
    def unit_bytes(self) -> int:
        """Bytes that a unit of work must move at least: what is written, or what is delivered in its final dtype."""
        load = self.workload
        obs = int(np.prod(load.parts[0].shape, dtype=np.int64))
        if self.kind == "write":
            return load.lanes * load.row_bytes
        if self.kind == "tokens":
            return load.batch * (LONGEST * 4 + 4 + 8)
        following = 0 if self.kind in ("sequences", "rollout") else obs
        stacked = STACK if self.kind == "frames" else 1
        return self.unit_rows * (4 * stacked * (obs + following) + 8 + 4 + 1)


def _fields(dtype: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    return (Part("obs", dtype, shape, observation=True), Part("action", "int64"), Part("reward", "float32"))


SMALL = Workload("CartPole-like, 97 B", _fields("float32", (21,)), rows=1 << 19, num_envs=64)
PIXELS = Workload("pixels 4x84x84 uint8", _fields("uint8", (4, 84, 84)), rows=1 << 12, num_envs=64)
FRAMES = Workload("frames 84x84 uint8", _fields("uint8", (84, 84)), rows=1 << 13, num_envs=64)
HUMANOID = Workload("Humanoid-like, 376 float64", _fields("float64", (376,)), rows=1 << 15, num_envs=64)
SEQUENCES = Workload("CartPole-like, 97 B", _fields("float32", (21,)), rows=1 << 16, num_envs=None, batch=64)
ROLLOUTS = Workload("CartPole-like, 97 B", _fields("float32", (21,)), rows=1 << 16, num_envs=64, batch=1)
TOKENS = Workload(
    "200 to 4,000 int32 tokens",
    (Part("tokens", "int32", (LONGEST,)), Part("action", "int64"), Part("reward", "float32")),
    rows=1 << 12,
    num_envs=None,
    batch=64,
)


def _single(workload: Workload, rows: int) -> Workload:
    return Workload(workload.name, workload.parts, rows=rows, num_envs=None)


_CASES = (
    Case("small-step", "one step a call, 97 B", "write", _single(SMALL, 1 << 16), ends=1 / 200),
    Case("small-vector", "64 steps a call, 97 B", "write", SMALL.sized(1 << 16), ends=1 / 200),
    Case("humanoid-step", "one step a call, 376 float64", "write", _single(HUMANOID, 1 << 14)),
    Case("humanoid-vector", "64 steps a call, 376 float64", "write", HUMANOID.sized(1 << 14)),
    Case("pixels-step", "one step a call, 4x84x84", "write", _single(PIXELS, 1 << 11)),
    Case("pixels-vector", "64 steps a call, 4x84x84", "write", PIXELS.sized(1 << 11)),
    Case("small-batch", "batch of 256, 97 B", "batch", SMALL, ends=1 / 200),
    Case("humanoid-batch", "batch of 256, 376 float64 to float32", "batch", HUMANOID),
    Case("pixels-batch", "batch of 256, 4x84x84 to float32", "batch", PIXELS),
    Case("frames-batch", "batch of 256 stacked from single 84x84 frames, to float32", "frames", FRAMES),
    Case("small-priorities", "prioritized batch of 256, 97 B", "priorities", SMALL, ends=1 / 200),
    Case("sequences-batch", "64 sequences of 80 steps, 97 B", "sequences", SEQUENCES, ends=0.0),
    Case("rollout", "a rollout of 128 x 64 steps collected and delivered, 97 B", "rollout", ROLLOUTS, ends=0.0),
    Case("tokens-batch", "batch of 64 token rows of 200 to 4,000, padded", "tokens", TOKENS, ends=0.0),
    Case(
        "two-writers",
        "2 writer processes and a learner, 97 B",
        "concurrent",
        SMALL.sized(1 << 17),
        ends=1 / 200,
        writers=2,
    ),
    Case(
        "four-writers",
        "4 writer processes and a learner, 97 B",
        "concurrent",
        SMALL.sized(1 << 17),
        ends=1 / 200,
        writers=4,
    ),
    Case(
        "visible",
        "a step of another process becomes visible, 97 B",
        "visible",
        _single(SMALL, 1 << 12),
        ends=1.0,
        writers=1,
    ),
)
CASES: Mapping[str, Case] = {case.name: case for case in _CASES}


def shrunk(case: Case, rows: int) -> Case:
    """The same case over a table of at most `rows` rows, for tests; more where rollouts or several writers need it."""
    load = case.workload
    if case.kind == "rollout":
        rows = max(rows, 4 * ROLLOUT * load.lanes)
    elif case.kind == "concurrent":
        rows = max(rows, 1 << 14)
    return Case(case.name, case.title, case.kind, load.sized(min(rows, load.rows)), case.ends, case.writers)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one run, the same in every process that has the seed.

    Attributes:
        columns: Field, `terminated` and `next_obs` to [ticks, lanes, *shape]; token cases have `tokens` (zeros after a row's
            end) and `lengths` in place of observations.
        digest: Of all their bytes.
    """

    columns: Columns
    digest: str

    @classmethod
    def of(cls, case: Case, seed: int, rows: int) -> Rows:
        """At least `rows` rows of a case, in whole ticks."""
        load = case.workload
        rng = np.random.default_rng(seed)
        count = -(-rows // load.lanes)
        if case.kind == "tokens":
            lengths = rng.integers(SHORTEST, LONGEST + 1, (count, 1))
            tokens = rng.integers(1, 1 << 17, (count, 1, LONGEST)).astype(np.int32)
            tokens[np.arange(LONGEST) >= lengths[..., None]] = 0
            columns: Columns = {
                "tokens": tokens,
                "lengths": lengths,
                "action": np.arange(count, dtype=np.int64)[:, None],
                "reward": rng.standard_normal((count, 1), np.float32),
                "terminated": np.zeros((count, 1), bool),
            }
        else:
            columns = ticks(load, count, rng, ends=case.ends)
            following = np.empty_like(columns["obs"])
            following[:-1] = columns["obs"][1:]
            following[-1] = ticks(load, 1, rng)["obs"][0]
            ended = columns["terminated"].astype(bool)
            finals = ticks(Workload("", load.parts, rows=0, num_envs=None), int(ended.sum()), rng)["obs"][:, 0]
            following[ended] = finals
            columns["next_obs"] = following
        sha = hashlib.sha256()
        for name in sorted(columns):
            sha.update(name.encode())
            sha.update(np.ascontiguousarray(columns[name]))
        return cls(columns, sha.hexdigest())

    def ticks(self, lanes: int | None, most: int | None = None) -> list[Tick]:
        """The rows as environments hand them over, the first `most` ticks."""
        named = [self.columns[n] for n in (NAMES if "obs" in self.columns else ("tokens", "lengths", *NAMES[1:4]))]
        count = len(named[0]) if most is None else min(most, len(named[0]))
        if lanes is not None:
            return [tuple(column[t] for column in named) for t in range(count)]
        columns = [list(column[:count, 0]) if column.ndim > 2 else column[:count, 0].tolist() for column in named]
        return list(zip(*columns, strict=True))

    def flat(self) -> Columns:
        """[ticks * lanes, *shape] of every column, tick by tick."""
        return {name: column.reshape(-1, *column.shape[2:]) for name, column in self.columns.items()}
