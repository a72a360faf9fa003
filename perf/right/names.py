"""Names and roles of fields: fields that were once overwritten, replaced or not summed up, and now are right or refused."""

from __future__ import annotations

import collections
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import conduit
from conduit.errors import ConduitError
from perf.bars import Bar

_NAMES, _AT_ONCE, _SEED = 10_000, 250, 1
_TRY = """
import collections, json, os, sys
from conduit.testing import naming
first, count, total, seed = map(int, sys.argv[1:])
found = collections.Counter()
for place, name in enumerate(naming.names(total, seed)[first : first + count], first):
    try:
        found[naming.try_name(f"bar-names-{os.getpid()}", name, (1, 3, 16, 512, 4096)[place % 5])] += 1
    except Exception as error:
        found["wrong"] += 1
        print(f"{name}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
print(json.dumps(found))
"""


def _equal(name: str, measured: object, right: object, *notes: str) -> Bar:
    return Bar(name, repr(measured), repr(right), measured == right, notes)


def _says(name: str, call: Callable[[], object], *words: str) -> Bar:
    """A row for a call that must be refused with an error that has these words."""
    try:
        measured = f"accepted: {call()!r}"
    except ConduitError as error:
        measured = str(error)
    return Bar(name, measured, f"refused: {', '.join(words)}", all(word in measured for word in words))


def _tried(first: int) -> tuple[collections.Counter[str], str]:
    """Try some of the names in a process of its own: a crash is counted as one, and ends nothing else."""
    command = [sys.executable, "-c", _TRY, *map(str, (first, _AT_ONCE, _NAMES, _SEED))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return collections.Counter({"hung": 1}), f"names {first} to {first + _AT_ONCE}: no end within 300 s"
    if done.returncode:
        return collections.Counter({"crashed": 1}), f"names {first} to {first + _AT_ONCE}: status {done.returncode}"
    return collections.Counter(json.loads(done.stdout)), done.stderr.strip()


def fuzz() -> Iterator[Bar]:
    """A1 fields of any name come back bit by bit or are refused."""
    total: collections.Counter[str] = collections.Counter()
    notes: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        for found, said in pool.map(_tried, range(0, _NAMES, _AT_ONCE)):
            total += found
            notes += said.splitlines()[:3]
    bad = total["wrong"] + total["crashed"] + total["hung"]
    tried = total["right"] + total["renamed"] + total["refused"]
    yield Bar(
        "A1 fields of 10,000 names, written and read back through every delivery",
        f"{tried:,} right or refused, {total['crashed']} crashes, {total['hung']} hangs, {total['wrong']} wrong",
        f"{_NAMES:,}, 0, 0, 0",
        bad == 0 and tried == _NAMES,
        (f"{total['right']:,} right, {total['renamed']} after rename=, {total['refused']:,} no name", *notes[:8]),
    )


def _stored(name: str, value: float = 20.5, **options: Any) -> Any:
    """An engine with 40 rows of a field of a name."""
    schema = conduit.Schema(
        [
            conduit.Field("obs", "float32", (2,), observation=True),
            conduit.Field("reward", "float32"),
            conduit.Field("value", "float32"),
            conduit.Field(name, "float32"),
        ]
    )
    options = {"max_n_step": 3, "max_length": 4, **options}
    if options.get("kind") == "queue":
        options = {"kind": "queue", "rollout_length": 4}
    else:
        options["priorities"] = conduit.Priorities()
    engine = conduit.Engine.create("bar-names", {"t": conduit.Table(schema, 200, **options)})
    with engine.writer("t") as writer:
        for _ in range(40):
            writer.append(obs=np.zeros(2, np.float32), reward=1.0, value=0.0, **{name: value})
    return engine


def keys() -> Iterator[Bar]:
    """A1 fields that are called like the keys of a batch."""
    for name in ("ids", "steps", "versions", "episodes"):
        with _stored(name) as engine, engine.loader("t", batch_size=8, format="numpy") as loader:
            batch = loader.next()
            yield _equal(f"A1 `{name}`, stored 20.5", batch[name].tolist(), [20.5] * 8)


def derived() -> Iterator[Bar]:
    """A2 derived columns replace no stored ones."""
    rollout = {"window": conduit.Rollout(4, 1)}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("discount", {"window": conduit.Transition(n_step=3, gamma=0.9)}),
        ("n_steps", {"window": conduit.Transition(n_step=3)}),
        *((name, {"window": conduit.Sequence(4)}) for name in ("mask", "is_first", "loss_mask", "lengths")),
        ("weights", {"sampling": conduit.Prioritized()}),
        ("advantages", {**rollout, "batch_transforms": (conduit.gae(),)}),
        ("returns", {**rollout, "batch_transforms": (conduit.gae(),)}),
    ]
    for name, options in cases:
        given = {"batch_size": 4, "format": "numpy", **options}
        with _stored(name, 0.25) as engine:
            yield _says(
                f"A2 stored `{name}` beside a derived one",
                functools.partial(engine.loader, "t", **given),
                name,
                "rename=",
                "fields=",
            )
            with engine.loader("t", rename={name: "env"}, **given) as loader:
                batch = loader.next()
                both = (
                    name in batch
                    and set(np.unique(batch["env"]).tolist()) <= {0.25, 0.0}
                    and batch["env"].max() == 0.25
                )
                yield _equal(f"A2 `{name}`, stored 0.25, renamed", bool(both), right=True)
    for name in ("mask", "is_first"):
        with _stored(name, 0.25, kind="queue") as engine:
            with engine.consumer("t", format="numpy") as consumer:
                claim = consumer.next()
                yield _says(f"A2 stored `{name}` in Claim.batch()", claim.batch, name, "rename=")
                claim.give_back()
                del claim
            with engine.consumer("t", format="numpy", rename={name: "env"}) as consumer, consumer.next() as claim:
                batch = claim.batch()
                yield _equal(
                    f"A2 `{name}` of a claim, stored 0.25, renamed", batch["env"][0, :, 0].tolist(), [0.25] * 4
                )
                del batch


def roles() -> Iterator[Bar]:
    """A3 rewards and observations are declared."""
    window = conduit.Transition(n_step=3, gamma=1.0)
    parts = {"a": 1.0, "b": 2.0}
    for reward, declared in (
        ({"rewards": 1.0}, "rewards"),
        ({"rew": 1.0}, "rew"),
        ({"cost": 1.0}, "cost"),
        ({"reward": parts}, None),
        ({"reward": np.float32([1, 2, 3])}, None),
    ):
        name = next(iter(reward))
        row = {"obs": np.zeros(2, np.float32), "action": 0, **reward}
        schema = conduit.Schema.from_example(row, reward=declared)
        options = {"batch_size": 4, "window": window, "format": "numpy"}
        tables = {"t": conduit.Table(schema, 100, max_n_step=3)}
        if declared is not None:
            tables["undeclared"] = conduit.Table(conduit.Schema.from_example(row), 100, max_n_step=3)
        with conduit.Engine.create("bar-roles", tables) as engine, engine.writer("t") as writer:
            for _ in range(40):
                writer.append(**row)
            with engine.loader("t", **options) as loader:
                batch = loader.next()
            measured = {one: batch[one][0].tolist() for one in batch.reward_names}
            right = {one: (np.float64(3) * schema.flatten(row)[one]).tolist() for one in batch.reward_names}
            yield _equal(f"A3 `{name}`, gamma 1, n 3", measured, right)
            if declared is not None:
                yield _says(
                    f"A3 `{name}` undeclared, n 3",
                    functools.partial(engine.loader, "undeclared", **options),
                    "Expected a reward to sum up over n_step=3",
                    "reward=",
                )
    schema = conduit.Schema.from_example({"state": np.zeros(2, np.float32), "reward": 0.0})
    tables = {"t": conduit.Table(schema, 100, max_n_step=3, max_stack=2, max_length=4)}
    with conduit.Engine.create("bar-roles", tables) as engine:
        for window in (
            conduit.Transition(),
            conduit.Transition(stack=2),
            conduit.Transition(newest="bootstrap"),
            conduit.Sequence(3, next_obs=True),
        ):
            yield _says(
                f"A3 `state` undeclared, {window}",
                functools.partial(engine.loader, "t", batch_size=4, window=window),
                "Expected an observation",
                "observation=",
            )
    yield _equal(
        "A3 the schema's text", str(schema).splitlines()[1], "reward: float32 (), same_kind, reward (by its name)"
    )


def spaces() -> Iterator[Bar]:
    """A16 spaces: classes that do not begin at 0, and spaces without fields."""
    try:
        from gymnasium import spaces
    except ImportError:
        return
    schema = conduit.Schema.from_spaces(spaces.Box(0, 1, (2,)), spaces.Discrete(3, start=5))
    with conduit.Engine.create("bar-spaces", {"t": conduit.Table(schema, 100)}) as engine:
        with engine.writer("t") as writer:
            for t in range(20):
                writer.append(obs=np.zeros(2, np.float32), action=np.int64(5 + t % 3), reward=0.0)
        options = {"batch_size": 8, "format": "numpy"}
        with engine.loader("t", transform={"action": conduit.one_hot(3)}, **options) as loader:
            yield _says("A16 one_hot of Discrete(3, start=5)", loader.next, "from 0 to 2", "start=")
        with engine.loader("t", transform={"action": conduit.one_hot(3, start=5)}, **options) as loader:
            batch = loader.next()
            yield _equal("A16 one_hot(3, start=5)", batch["action"].argmax(1).tolist(), (batch.steps % 3).tolist())
    box = spaces.Box(0, 1, (2,))
    for space, words in (
        (spaces.Sequence(box), ("ragged=True",)),
        (spaces.Text(5), ("ragged=True", "np.frombuffer")),
        (spaces.Graph(box, None), ("ragged=True", "obs.nodes")),
        (spaces.OneOf((box, spaces.Discrete(2))), ("spaces.Tuple",)),
    ):
        kind = type(space).__name__
        yield _says(f"A16 from_spaces({kind})", functools.partial(conduit.Schema.from_spaces, space, box), kind, *words)


GROUPS: tuple[Callable[[], Iterator[Bar]], ...] = (keys, derived, roles, spaces, fuzz)
