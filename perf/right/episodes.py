"""Where episodes begin and end: the writer's flags, complete windows, and the observation after the last step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import conduit
from conduit.store.format import words
from conduit.testing.invariants import offered_ranges
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
        engine.table("t").reset()
        with engine.writer("t", num_envs=8, autoreset="same_step") as writer:
            for group in range(1000):
                reward[:] = 8 * group + np.arange(8)
                writer.append(obs=obs, reward=reward, terminated=ends, final=obs)
        drawn: set[float] = set()
        with engine.loader("t", batch_size=4096, format="numpy") as loader:
            for _ in range(40):
                drawn |= set(loader.next()["reward"].tolist())
        yield _equal("A4 rows drawn of 8,000 of a SAME_STEP vector that all end", len(drawn), 8000)


def _drawn(engine: conduit.Engine, **options: Any) -> list[int]:
    """Every row that is drawn, by its observation."""
    found: set[int] = set()
    with engine.loader("t", batch_size=1024, min_rows=1, format="numpy", timeout=0.0, **options) as loader:
        for _ in range(20):
            found |= set(loader.next()["obs"].ravel().astype(int).tolist())
    return sorted(found)


def newest() -> Iterator[Bar]:
    """A15: which of the newest rows are complete; B11: who offers them while a page is turned."""

    def append(writer: conduit.Writer, steps: range, ends: bool) -> None:
        for t in steps:
            last = ends and t == steps.stop - 1
            writer.append(obs=[t], reward=t, terminated=last, final=[t + 0.5] if last else None)

    with _engine(capacity=40_000) as engine, engine.writer("t") as writer:
        append(writer, range(1000), ends=True)
        with engine.loader("t", batch_size=1000, format="numpy", timeout=0.0) as loader:
            count = _refused(lambda: len(loader.next()["reward"]), conduit.errors.DataTimeout)
        yield _equal("A15 batch of 1,000 out of 1,000 rows whose newest ended its episode", count, "accepted: 1000")
    with _engine(max_n_step=4) as engine:
        writer = engine.writer("t")
        append(writer, range(100), ends=False)
        window = conduit.Transition(n_step=4)
        yield _equal("A15 4-step rows drawn of 100 of a stream that goes on", len(_drawn(engine, window=window)), 96)
        writer.close()
        yield _equal("A15 the same, of a stream that has ended", len(_drawn(engine, window=window)), 99)
        with engine.loader("t", batch_size=101, min_rows=101, format="numpy", timeout=0.0) as loader:
            message = _refused(loader.next, conduit.errors.DataTimeout)
        told = all(part in message for part in ("100 rows are there", "no writer is open"))
        yield _equal("A15 a wait in vain says how many rows are there and that nobody writes", told, True)
    with _engine(capacity=400, page_rows=20, max_n_step=6) as engine:
        writer = engine.writer("t", autoreset="next_step")
        append(writer, range(20), ends=False)
        writer._stream.here()
        view = engine._views["t"]
        states = view.segment.array(view.layout.blocks, (view.layout.pages, 16), np.dtype(np.int64))[:, 0]
        sealed = int(states[0])
        # as between the two stores: the page before is open, in the same generation
        states[0] = sealed - words.SEALED + words.OPEN
        offered = sum(end - begin for parts in offered_ranges(view, 1).values() for begin, end, _ in parts)
        ids: dict[int, set[int]] = {}
        with engine.loader("t", batch_size=1024, min_rows=1, format="numpy") as loader:
            for _ in range(10):
                batch = loader.next()
                for obs, key in zip(batch["obs"].ravel().tolist(), batch.ids.tolist(), strict=True):
                    ids.setdefault(obs, set()).add(key)
        states[0] = sealed
        yield _equal("B11 rows offered between the opening of a page and the sealing of the one before", offered, 19)
        yield _equal("B11 rows under two ids then", sum(len(keys) > 1 for keys in ids.values()), 0)


def precision() -> Iterator[Bar]:
    """A7: what is subtracted or summed up is not rounded before."""
    values = 1e8 + 2.5 * np.arange(4)[None]
    flags = {name: np.zeros((1, 4), bool) for name in ("terminated", "truncated")}
    batch = {"reward": np.full((1, 4), 0.5), **flags}
    behind = np.array([1e8 + 10.0])
    made = conduit.gae(1.0, 0.0)(batch, values=values, bootstrap=behind)["advantages"]
    yield _equal("A7 gae, V = 1e8 + 2.5 t, r = 0.5, gamma 1, lambda 0", made.tolist(), [[3.0] * 4])
    made = conduit.vtrace(1.0, lam=0.0)(batch, values=values, bootstrap=behind)["advantages"]
    yield _equal(
        "A7 vtrace, the same: this difference and that of the target behind it", made.tolist(), [[6.0] * 3 + [3.0]]
    )
    errors = np.full((1, 200), 1000, np.float16)
    priority = conduit.sequence_priority(errors, eta=0.5).tolist()
    yield _equal("A7 priority of a sequence of 200 float16 errors of 1,000", priority, [1000.0])


def refusals() -> Iterator[Bar]:
    """A11: a row that a transform refuses."""
    with _engine(statistics=("obs",)) as engine:
        with engine.writer("t") as writer:
            for t in range(40):
                writer.append(obs=[np.nan if t == 7 else t], reward=t)
        transform = {"obs": conduit.normalize(update=True)}
        with engine.loader("t", batch_size=256, min_rows=1, transform=transform, format="numpy") as loader:
            try:
                loader.next()
                found: tuple[object, ...] = ()
            except conduit.errors.FieldError as error:
                found = error.at, error.row_id, str(error.value), engine.table("t").statistics.read("obs").count
                deleted = engine.table("t").delete([error.row_id])
            yield _equal(
                "A11 a NaN under normalize names field, row and value, and is in no statistics",
                found[0::2],
                ("obs", "nan"),
            )
            yield _equal(
                "A11 deleting the row that was named, and the next call", (deleted, len(loader.next().ids)), (1, 256)
            )
            yield _equal("A11 rows in the statistics then", engine.table("t").statistics.read("obs").count, 256)


def _distance(achieved: Any, goals: Any) -> Any:
    return -np.abs(achieved - goals).sum(-1)


def hindsight() -> Iterator[Bar]:
    """A5: goals of relabelled steps."""
    goal = {"achieved_goal": np.zeros(1, np.float32), "desired_goal": np.zeros(1, np.float32)}
    schema = conduit.Schema.from_example({"obs": goal, "reward": 0.0})

    def observe(t: float) -> dict[str, Any]:
        return {"achieved_goal": np.float32([t]), "desired_goal": np.float32([-1])}

    with conduit.Engine.create("right-hindsight", {"t": conduit.Table(schema, 1000, max_length=4)}) as engine:
        with engine.writer("t") as writer:
            for t in range(3):
                writer.append(obs=observe(t), reward=-7.0, terminated=t == 2, final=observe(3) if t == 2 else None)
            writer.append(obs=observe(9), reward=-7.0, terminated=True, final=observe(10))
        rule = conduit.hindsight(_distance, strategy="final", ratio=1.0)
        for next_obs in (False, True):
            window = conduit.Episode(3, next_obs=next_obs)
            with engine.loader(
                "t", batch_size=32, min_rows=1, window=window, batch_transforms=(rule,), format="numpy"
            ) as loader:
                batch = loader.next()
            goals = batch["obs.desired_goal"][batch["lengths"] == 3][0].ravel().tolist()
            yield _equal(f"A5 episode s0 .. s3, 'final', ratio 1, next_obs={next_obs}: goals", goals, [3.0, 3.0, 3.0])
            short = batch["obs.desired_goal"][batch["lengths"] == 1][0, 0].tolist()
            yield _equal(f"A5 an episode of one step, next_obs={next_obs}: its goal", short, [10.0])
        rule = conduit.hindsight(_distance, strategy="final", ratio=1.0, max_length=3)
        with engine.loader("t", batch_size=64, min_rows=1, batch_transforms=(rule,), format="numpy") as loader:
            batch = loader.next()
        steps = batch["obs.achieved_goal"].ravel().tolist()
        found = sorted(set(zip(steps, batch["obs.desired_goal"].ravel().tolist(), strict=True)))
        wanted = [(0.0, 3.0), (1.0, 3.0), (2.0, 3.0), (9.0, 10.0)]
        yield _equal("A5 single transitions: what was achieved before a step, and its goal", found, wanted)


GROUPS: tuple[Callable[[], Iterator[Bar]], ...] = (resets, hindsight, precision, refusals, newest)
