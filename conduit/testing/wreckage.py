"""Small segments that use as many parts of the protocol as possible, and every operation that a process may do in one.

`be_killed_in` makes a segment and dies in the middle of its work. `work_in` does every operation in such a segment. In between,
conduit.testing.damage damages the segment's words.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import conduit
from conduit.errors import ConduitError
from conduit.plane.client import Client
from conduit.plane.engine import Engine
from conduit.plane.ingest.writer import Writer
from conduit.plane.observe import inspect
from conduit.store.segment.names import SHM_DIRECTORY

_OBS = conduit.Field("obs", "float32", (3,), observation=True)
_ACTION, _REWARD = conduit.Field("action", "int64"), conduit.Field("reward", "float32", reward=True)
_TOKENS = conduit.Field("tokens", "int32", (6,), ragged=True)
_WEIGHTS = {"policy": {"w": np.zeros(5, np.float32)}}


def tables() -> dict[str, dict[str, conduit.Table]]:
    """Segments by name: as many parts of the protocol as a few small tables can have."""
    whole, ragged = conduit.Schema([_OBS, _ACTION, _REWARD]), conduit.Schema([_OBS, _TOKENS, _ACTION, _REWARD])
    return {
        "windows": {
            "replay": conduit.Table(
                ragged,
                120,
                page_rows=24,
                max_stack=2,
                max_n_step=3,
                max_length=4,
                mean_lengths={"tokens": 6},
                priorities=conduit.Priorities(),
                statistics=("obs",),
            )
        },
        "limits": {
            "replay": conduit.Table(
                whole, 100, page_rows=20, limiter=conduit.SampleToInsertRatio(1.0, 1, 10_000), max_times_sampled=1_000
            ),
            "other": conduit.Table(whole, 60, page_rows=20, max_n_step=2),
        },
        "vectors": {
            "replay": conduit.Table(
                whole, 240, page_rows=48, num_envs=4, max_length=4, max_n_step=2, priorities=conduit.Priorities()
            )
        },
        "rollouts": {"queue": conduit.Table.queue(whole, 120, num_envs=2, rollout_length=4)},
        "queue": {"queue": conduit.Table.queue(ragged, 120, num_envs=2, page_rows=24)},
    }


_ENVS = {"windows": None, "limits": None, "vectors": 4, "rollouts": 2, "queue": 2}


def _write(writer: Writer, ticks: int, seed: int, envs: int | None, *, last: bool = False) -> None:
    rng = np.random.default_rng(seed)
    lead = () if envs is None else (envs,)
    ragged = bool(writer._stream.schema.ragged_names)
    for tick in range(ticks):
        ended = rng.random(lead) < 0.1
        values: dict[str, Any] = {
            "obs": rng.random((*lead, 3), np.float32),
            "action": rng.integers(0, 9, lead),
            "reward": rng.random(lead, np.float32),
        }
        if ragged:
            tokens = [np.arange(rng.integers(0, 6), dtype=np.int32) for _ in range(envs or 1)]
            values["tokens"] = tokens if envs is not None else tokens[0]
        if last and tick == ticks - 1:
            values["bootstrap"] = values["obs"] + 1
        writer.append(terminated=ended, final=values["obs"] + 1, **values)


def _options(envs: int | None) -> dict[str, Any]:
    return {"on_full": "raise", "timeout": 0} | ({} if envs is None else {"num_envs": envs, "autoreset": "same_step"})


def be_killed_in(name: str, kind: str) -> None:
    """Make a segment, work in it, and die."""
    engine = Engine.create(name, tables()[kind], policies=_WEIGHTS, max_participants=4)
    envs = _ENVS[kind]
    kept: list[Any] = []
    for table in engine.tables:
        is_queue = table == "queue"
        with engine.writer(table, **_options(envs)) as writer:
            _write(writer, 30 if is_queue else 60, 1, envs)
        kept.append(engine.writer(table, **_options(envs)))
        _write(kept[-1], 5 if kind == "rollouts" else 11, 2, envs)
        if kind == "rollouts":
            kept.append(engine.writer(table, **_options(envs)))
            _write(kept[-1], 3, 3, envs, last=True)
        if is_queue:
            consumer = engine.consumer(table, format="numpy", timeout=0)
            consumer.next().ack()
            kept += [consumer.next(), consumer]
        else:
            kept.append(engine.loader(table, batch_size=8, name=f"loader of {table}", format="numpy", timeout=0))
            kept[-1].next()
            kept.append(engine._views[table].lease(0))
    if kind == "windows":
        engine.table("replay").statistics.update(obs=np.ones((4, 3), np.float32))
    engine.policy().publish({"w": np.ones(5, np.float32)})
    os.kill(os.getpid(), signal.SIGKILL if kept else signal.SIGABRT)


_STEPS = {"fields": ("obs", "action", "reward")}
_LOADERS: dict[str, dict[str, dict[str, Any]]] = {
    "windows": {
        "one step": {},
        "three steps": {"window": conduit.Transition(n_step=3)},
        "short": {"window": conduit.Transition(n_step=3, newest="bootstrap"), "ragged": "pack"},
        "stacks": {"window": conduit.Transition(stack=2), **_STEPS},
        "sequence": {"window": conduit.Sequence(3), **_STEPS},
        "across": {"window": conduit.Sequence(4, overlap=1, across=True, pad=False), **_STEPS},
        "next": {"window": conduit.Sequence(3, next_obs=True), "sampling": conduit.Prioritized(), **_STEPS},
        "episode": {"window": conduit.Episode(4), **_STEPS},
        "priorities": {"sampling": conduit.Prioritized(normalize="buffer"), "transform": {"obs": conduit.normalize()}},
        "by priority": {"sampling": conduit.Prioritized(), "window": conduit.Sequence(4, overlap=2), **_STEPS},
    },
    "limits": {"one step": {}},
    "vectors": {
        "one step": {},
        "two steps": {"window": conduit.Transition(n_step=2), "sampling": conduit.Prioritized()},
        "rollout": {"window": conduit.Rollout(4, 4, stride=1)},
        "next": {"window": conduit.Rollout(3, 4, next_obs=True), "sampling": conduit.Prioritized()},
        "sequence": {"window": conduit.Sequence(3, overlap=1)},
    },
}


def _load(client: Client, table: str, options: dict[str, Any]) -> None:
    with client.loader(table, batch_size=24, min_rows=1, format="numpy", timeout=0, **options) as loader:
        ids = np.zeros(0, np.int64)
        for seed in range(2):
            loader.sampler.batch = seed
            batch = loader.next()
            for name in batch:
                np.asarray(batch[name]).sum()
            ids = batch.ids
            loader.valid(ids)
            if "sampling" in options:
                loader.update_priorities(ids, np.arange(24.0))
    client.table(table).delete(ids[:3])


def _consume(client: Client) -> None:
    consumer = client.consumer("queue", format="numpy", timeout=0)
    for turn in range(6):
        claim = consumer.next()
        for name in claim:
            for value in claim[name] if isinstance(claim[name], list) else [claim[name]]:
                np.asarray(value).sum()
        for part in (claim.ids, claim.versions, claim.steps, claim.episodes, claim.is_first, claim.mask):
            np.asarray(part).sum()
        claim.finals  # noqa: B018 -- it is a property that reads
        for value in (claim.bootstrap or {}).values():
            np.asarray(value).sum()
        claim.batch()
        claim.ack() if turn % 2 else claim.give_back()
    consumer.close()


def _look(client: Client, table: str) -> None:
    view = client._views[table]
    view.counts()
    for page in range(view.layout.pages):
        with contextlib.suppress(ConduitError), view.lease(page) as lease:
            lease.column("obs").sum()
            for name in view.arenas:
                lease.values(name)
    if view.layout.limits is not None:
        client.table(table).limiter.explain()
    if view.layout.statistics:
        client.table(table).statistics.read("obs")
        client.table(table).statistics.update(obs=np.ones((2, 3), np.float32))


def _scan(client: Client, table: str) -> None:
    from conduit.plane.deliver.scan import Scan

    for steps in Scan(client._views[table]):
        for value in steps.columns.values():
            for one in value if isinstance(value, list) else [value]:
                one.sum()


def _save(client: Client) -> None:
    """A checkpoint of damaged words is refused, or is one that can be restored."""
    with tempfile.TemporaryDirectory(dir=SHM_DIRECTORY) as folder:
        client.checkpoint(folder, keep=1)
        limiter: Any = "keep" if any(view.layout.limits for view in client._views.values()) else None
        with Engine.restore(folder, f"{client.name}-again", limiter=limiter) as again:
            for table in again.tables:
                again._views[table].counts()
                if table != "queue":
                    with contextlib.suppress(ConduitError):
                        _load(again, table, {})


def _publish(client: Client) -> None:
    slot = client.policy()
    slot.poll()
    slot.publish({"w": np.zeros(5, np.float32)})
    slot.poll()
    slot.close()


def _add(client: Client, table: str, envs: int | None) -> None:
    with client.writer(table, **_options(envs)) as writer:
        _write(writer, 70 if table != "queue" else 20, 5, envs)


def _work(client: Client, kind: str) -> Iterator[Callable[[], object]]:
    """Everything that may be done in a client, in small parts."""
    envs = _ENVS[kind]
    yield client._participants.list
    yield lambda: _publish(client)
    for table in client.tables:
        yield lambda table=table: _look(client, table)  # type: ignore[misc]
        if table == "queue":
            yield lambda: _consume(client)
        else:
            yield lambda table=table: _scan(client, table)  # type: ignore[misc]
            for options in (
                _LOADERS[kind].values() if table == "replay" else ({"window": conduit.Transition(n_step=2)},)
            ):
                yield lambda table=table, options=options: _load(client, table, options)  # type: ignore[misc]
            named = f"loader of {table}"
            yield lambda table=table, named=named: _load(client, table, {"name": named})  # type: ignore[misc]
    yield lambda: _save(client)
    for table in client.tables:
        yield lambda table=table: _add(client, table, envs)  # type: ignore[misc]
        if table == "queue":
            yield lambda: _consume(client)
        else:
            for options in _LOADERS[kind].values() if table == "replay" else ({},):
                yield lambda table=table, options=options: _load(client, table, options)  # type: ignore[misc]
    yield client.recover


def work_in(name: str, kind: str) -> list[str]:
    """Do everything in a segment.

    Returns:
        What was raised and is no error of Conduit's: tracebacks. Empty when all is well; for -1 as a seed see `damaged`.
    """
    raised: list[str] = []

    def attempt(part: Callable[[], Any]) -> Any:
        try:
            return part()
        except ConduitError as error:
            refused.append(error)
            return None
        except Exception:
            raised.append(traceback.format_exc())
            return None

    attempt(lambda: inspect.inspect(name))
    engine = attempt(lambda: Engine.adopt(name))
    if engine is not None:
        client = attempt(lambda: conduit.attach(name, on_owner_exit="stay"))
        if client is not None:
            for part in _work(client, kind):
                attempt(part)
            attempt(client.close)
        attempt(lambda: inspect.inspect(name))
        attempt(engine.close)
    return raised


refused: list[ConduitError] = []
"""Conduit's errors since it was emptied; undamaged copies give none."""
