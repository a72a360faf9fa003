"""Copies of whole segments with damaged words, and everything that a process may do in them.

    python -m conduit.testing.damage --copies 10000 --seed 1

Whatever the words of a segment say, a process that works in it neither crashes nor hangs, and raises Conduit's own errors only.
Segments are made once, by a process that is killed in the middle of its work. A worker then goes through the copies; it is
forked when everything is compiled, and forked again behind a copy that it did not survive.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import conduit
from conduit.errors import ConduitError
from conduit.plane.client import Client
from conduit.plane.engine import Engine
from conduit.plane.ingest.writer import Writer
from conduit.plane.observe import inspect
from conduit.store.format import words as w
from conduit.store.format.layout import HEADER_BYTES, HEADER_DIGEST, SegmentLayout
from conduit.store.segment.names import SHM_DIRECTORY, open_segment, shm_name
from conduit.store.segment.segment import read_layout

PATIENCE = 20.0
"""Seconds that the work in one copy may take before it is a hang; undamaged, it takes hundredths."""
_MEMORY = 6 << 30

_OBS = conduit.Field("obs", "float32", (3,), observation=True)
_ACTION, _REWARD = conduit.Field("action", "int64"), conduit.Field("reward", "float32", reward=True)
_TOKENS = conduit.Field("tokens", "int32", (6,), ragged=True)
_WEIGHTS = {"policy": {"w": np.zeros(5, np.float32)}}


def _tables() -> dict[str, dict[str, conduit.Table]]:
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


def _be_killed_in(name: str, kind: str) -> None:
    """Make a segment, work in it, and die."""
    engine = Engine.create(name, _tables()[kind], policies=_WEIGHTS, max_participants=4)
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


@dataclass(frozen=True, slots=True)
class Sample:
    """A segment whose processes are dead.

    Attributes:
        kind: Which of `_tables`.
        content: Its bytes.
        regions: (weight, first byte, one behind the last) of what is damaged.
    """

    kind: str
    content: bytes
    regions: tuple[tuple[int, int, int], ...]


def _regions(layout: SegmentLayout) -> Iterator[tuple[int, int, int]]:
    yield 1, 16, HEADER_BYTES
    yield 1, HEADER_BYTES, HEADER_BYTES + len(layout.encoded)
    yield 2, layout.participants, layout.hazards
    yield 1, layout.hazards, layout.loaders
    yield 2, layout.loaders, layout.loaders + 4 * w.LINE
    for policy in layout.policies.values():
        yield 1, policy.control, policy.copies[0]
        yield 1, policy.copies[0], policy.copies[-1] + policy.copy_bytes
    for table in layout.tables.values():
        yield 10, table.blocks, table.blocks + table.pages * w.LINE
        yield 5, table.sides, table.sides + table.pages * w.LINE
        yield 4, table.control, table.control + w.TABLE_CONTROL_BYTES
        yield 1, table.seats, table.seats + 4 * w.LINE
        yield 6, table.meta, table.meta + table.rows * w.META_BYTES
        yield 1, table.priority, table.end
        for name in table.arenas:
            yield 4, table.columns[name], table.columns[name] + 8 * table.rows
        for at in table.statistics.values():
            yield 1, at, at + 4 * w.LINE


def _end_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def samples() -> list[Sample]:
    """Make the segments; nothing is left in shared memory."""
    found = []
    for kind in _tables():
        name = f"damage-{os.getpid()}-{kind}"
        path = SHM_DIRECTORY / shm_name(name)[1:]
        pid = os.fork()
        if pid == 0:
            try:
                _be_killed_in(name, kind)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        try:
            if _end_of(pid) != -signal.SIGKILL:
                raise RuntimeError(f"expected the maker of {kind} to be killed in the end")
            fd = open_segment(name)
            layout = read_layout(fd, name)
            os.close(fd)
            found.append(Sample(kind, path.read_bytes(), tuple(_regions(layout))))
        finally:
            path.unlink(missing_ok=True)
    return found


_VALUES = (
    0,
    1,
    2,
    -1,
    -2,
    63,
    1 << 20,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 48,
    1 << 62,
    -(1 << 62),
    (1 << 63) - 1,
    -(1 << 63),
)


def _other(rng: random.Random, word: int) -> int:
    """Another word: one of odd values, random bits, a bit flipped, or a neighbour of what is there."""
    how = rng.randrange(6)
    if how == 0:
        return rng.choice(_VALUES)
    if how == 1:
        return rng.getrandbits(64)
    if how == 2:
        return word ^ (1 << rng.randrange(64))
    if how == 3:
        return word + rng.choice((-2, -1, 1, 2, 1000))
    if how == 4:
        return rng.randrange(300)
    half = rng.choice((0, 32))  # one half of the word, as of a row's meta or a span
    return (word & ~(0xFFFFFFFF << half)) | (rng.choice((0, 1, 0xFFFFFFFF, 0x7FFFFFFF, rng.getrandbits(32))) << half)


def damaged(sample: Sample, seed: int) -> bytes:
    """A copy of a sample with 1 to 40 words changed; seed -1 changes none."""
    content = bytearray(sample.content)
    if seed < 0:
        return bytes(content)
    rng = random.Random(f"{sample.kind} {seed}")
    weights = [weight for weight, _, _ in sample.regions]
    for _ in range(rng.choice((1, 1, 1, 2, 4, 12, 40))):
        ((_, begin, end),) = rng.choices(sample.regions, weights)
        if begin >= end:
            continue
        at = begin // 8 * 8 + 8 * rng.randrange(max(1, (end - begin) // 8))
        if at + 8 > len(content) or at == HEADER_DIGEST:
            continue
        word = int.from_bytes(content[at : at + 8], "little")
        content[at : at + 8] = struct.pack("<Q", _other(rng, word) & (1 << 64) - 1)
    return bytes(content)


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
        for seed in range(2):
            loader.sampler.batch = seed
            batch = loader.next()
            for name in batch:
                np.asarray(batch[name]).sum()
            loader.valid(batch.ids)
            if "sampling" in options:
                loader.update_priorities(batch.ids, np.arange(24.0))
    client.table(table).delete(batch.ids[:3])


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
            _refused.append(error)
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


_refused: list[ConduitError] = []
"""Conduit's errors since it was emptied; undamaged copies give none."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A copy that did harm: `what` is "signal 11", "hang", or the traceback of an error that is none of Conduit's."""

    kind: str
    seed: int
    what: str


def _go_through(made: list[Sample], seeds: range, report: int) -> None:
    """The worker: one line of JSON before each copy, and one for what it raised."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    warnings.simplefilter("ignore")
    for seed in seeds:
        sample = made[seed % len(made)]
        name = f"damage-{os.getpid()}"
        path = SHM_DIRECTORY / shm_name(name)[1:]
        os.write(report, json.dumps([seed, path.name, ""]).encode() + b"\n")
        path.write_bytes(damaged(sample, seed))
        path.chmod(0o600)
        try:
            for text in work_in(name, sample.kind):
                os.write(report, json.dumps([seed, path.name, text[-6000:]]).encode() + b"\n")
        finally:
            path.unlink(missing_ok=True)
    os.write(report, b"end\n")


def _lines(fd: int, patience: float) -> Iterator[bytes]:
    """Lines of a pipe; ends where none comes for a while or the writer is gone."""
    rest = b""
    while True:
        if not select.select([fd], [], [], patience)[0]:
            return
        more = os.read(fd, 1 << 16)
        if not more:
            return
        *lines, rest = (rest + more).split(b"\n")
        yield from lines


def _watch(made: list[Sample], seeds: range, found: list[Failure], patience: float) -> int:
    """Let a worker go through copies; returns the first seed that it did not come to."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            _go_through(made, seeds, writing)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    seed, path, is_whole = seeds.start, "", False
    for line in _lines(reading, patience):
        if line == b"end":
            is_whole = True
            break
        seed, path, text = json.loads(line)
        if text:
            found.append(Failure(made[seed % len(made)].kind, seed, text))
    os.close(reading)
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended and not is_whole:
        time.sleep(0.2)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        if not is_whole:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if is_whole:
        return seeds.stop
    for left in SHM_DIRECTORY.glob(f"{path}*") if path else ():
        left.unlink(missing_ok=True)
    code = os.waitstatus_to_exitcode(status)
    what = "hang" if code == -signal.SIGKILL else f"signal {-code}" if code < 0 else f"exit {code}"
    found.append(Failure(made[seed % len(made)].kind, seed, what))
    return seed + 1


def check_undamaged(sample: Sample) -> None:
    """Do everything in a whole copy, which compiles everything that workers then have.

    Raises:
        RuntimeError: Something was raised.
    """
    name = f"damage-{os.getpid()}"
    path = SHM_DIRECTORY / shm_name(name)[1:]
    path.write_bytes(sample.content)
    path.chmod(0o600)
    _refused.clear()
    try:
        raised = work_in(name, sample.kind)
    finally:
        path.unlink(missing_ok=True)
    if raised or _refused:
        raise RuntimeError(
            "\n".join([f"expected to work in whole segment {sample.kind!r}", *raised, *map(repr, _refused)])
        )


def run(
    copies: int, seed: int = 0, *, patience: float = PATIENCE, progress: Callable[[int], None] | None = None
) -> list[Failure]:
    """Go through damaged copies; returns those that did harm.

    Args:
        copies: How many.
        seed: The first one's; each has the next.
        patience: Seconds before a copy counts as a hang.
        progress: Called with the copies done.

    Raises:
        RuntimeError: An undamaged copy is refused.
    """
    made = samples()
    found: list[Failure] = []
    for sample in made:
        check_undamaged(sample)
    at = seed
    while at < seed + copies:
        at = _watch(made, range(at, min(at + 200, seed + copies)), found, patience)
        if progress is not None:
            progress(at - seed)
    return found


def main() -> int:
    """Go through copies and print what did harm."""
    parser = argparse.ArgumentParser(prog="python -m conduit.testing.damage")
    parser.add_argument("--copies", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=PATIENCE)
    asked = parser.parse_args()
    begun = time.monotonic()
    found = run(
        asked.copies,
        asked.seed,
        patience=asked.patience,
        progress=lambda done: print(f"{done} copies, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True),
    )
    for failure in found:
        print(f"{failure.kind} {failure.seed}: {failure.what}")
    print(f"{len(found)} failures")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
