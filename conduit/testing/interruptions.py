"""Operations that are interrupted at each of their points, and what must hold afterwards, while the process lives on.

Each scenario has an engine of its own. `operate` is what is interrupted; `check` does what a program does that caught the
exception: it goes on with the same objects. Rows prove themselves: every value of row n follows from n, and so does whether it
ends its episode, with which final observation.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import conduit
from conduit.schema import Field, Schema
from conduit.store.format import words as w
from conduit.store.segment.locks import LOCK_LIMITS, LOCK_LOADERS, held
from conduit.store.segment.names import SHM_DIRECTORY, shm_name
from conduit.store.tables.view import TableView
from conduit.testing.invariants import hazards, kinds, slots_in_use

Array = np.ndarray[Any, Any]

SCHEMA = Schema([Field("obs", "float32", (3,), observation=True), Field("action", "int64"), Field("reward", "float64")])
EPISODE = 7
"""Row n ends its episode where n % EPISODE is the last."""


def values(n: int) -> dict[str, Any]:
    """Row n as `append` takes it."""
    ends = n % EPISODE == EPISODE - 1
    row = {"obs": observation(n), "action": n, "reward": float(n), "terminated": ends}
    return row | {"final": observation(n + 0.5)} if ends else row


def observation(n: float) -> Array:
    """Observation of row n."""
    return np.array([n, n + 0.125, n + 0.25], np.float32)


def check_rows(view: TableView) -> list[int]:
    """See that every committed row is one row, whole; returns their numbers, page by page."""
    found = []
    size = view.layout.page_rows
    for page, words in enumerate(view.pages().tolist()):
        if words[w.PAGE_STATE // 8] & w.KIND_MASK not in (w.OPEN, w.SEALED):
            continue
        rows = slice(page * size, page * size + words[w.PAGE_COMMITTED // 8])
        numbers = view.columns["action"][rows]
        expected = numbers[:, None] + np.array([0, 0.125, 0.25])
        assert np.array_equal(view.columns["obs"][rows], expected), f"page {page}: torn {numbers.tolist()}"
        assert np.array_equal(view.columns["reward"][rows], numbers), f"page {page}: torn rewards"
        ends = numbers % EPISODE == EPISODE - 1
        link = view.meta["link"][rows]
        assert np.array_equal(view.terminated[rows], ends), f"page {page}: flags of others {numbers.tolist()}"
        assert not (link & w.FINAL).any()
        assert np.array_equal((link & w.KEPT) != 0, ends), f"page {page}: finals {numbers.tolist()}"
        for row in np.flatnonzero(ends).tolist():
            final = view.columns["obs"][rows.start + row + (int(link[row]) >> w.LINK_SHIFT)]
            assert np.array_equal(final, observation(int(numbers[row]) + 0.5)), f"page {page}: final of {numbers[row]}"
        assert (np.diff(numbers) > 0).all(), f"page {page}: {numbers.tolist()}"
        found += numbers.tolist()
    return found


class Scenario(ABC):
    """An engine, and an operation on it."""

    options: dict[str, Any] = {"capacity": 120, "page_rows": 12}

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = conduit.Engine.create(name, {"t": conduit.Table(SCHEMA, **self.options)}, max_participants=8)
        self.view = self.engine._views["t"]
        self.n = 0
        self._own_fd = os.open(f"/proc/self/fd/{self.engine._segment.lock_fd}", os.O_RDWR | os.O_CLOEXEC)
        self.prepare()

    def prepare(self) -> None:
        """Open what the operation needs."""

    @abstractmethod
    def operate(self) -> None:
        """What is interrupted."""

    @abstractmethod
    def check(self) -> None:
        """Go on with the same objects, and see that nothing is left behind."""

    def put(self, writer: conduit.Writer, count: int = 1) -> None:
        """Append the next rows; numbers are not used again, whatever became of theirs."""
        for _ in range(count):
            n, self.n = self.n, self.n + 1
            writer.append(**values(n))

    def check_rest(self, *, open_pages: int = 0, holds: int = 0) -> None:
        """See that nothing is claimed, leased, reserved or locked but what is said."""
        found = kinds(self.view)
        assert not (found == w.INIT).any(), f"{(found == w.INIT).sum()} pages in preparation"
        assert (found == w.OPEN).sum() <= open_pages, f"{(found == w.OPEN).sum()} pages open"
        assert slots_in_use(self.view) == holds, f"{slots_in_use(self.view)} hazards in use"
        assert np.count_nonzero(hazards(self.view)) == holds, "hazards"
        for byte in (LOCK_LIMITS, LOCK_LOADERS):
            assert not held(self._own_fd, byte, 1), f"lock {byte} is kept"
        counts = self.view.counts()
        assert (counts.reserved, counts.granted) == (0, 0), f"reserved {counts.reserved}, granted {counts.granted}"

    def close(self) -> None:
        """Remove the engine."""
        os.close(self._own_fd)
        self.engine.close()


class _Writing(Scenario):
    """One writer that lives through all interrupts."""

    def prepare(self) -> None:
        self.writer = self.open()
        self.put(self.writer, 3)

    def open(self) -> conduit.Writer:
        return self.engine.writer("t")

    def check(self) -> None:
        before = self.view.counts().inserted
        self.put(self.writer)
        assert self.view.counts().inserted == before + 1
        check_rows(self.view)
        self.check_rest(open_pages=1)


class Append(_Writing):
    """The compiled call, with a page's turn."""

    def operate(self) -> None:
        self.put(self.writer, 13)


class AppendExactly(_Writing):
    """The exact path: values that must be converted, flags, finals, a page's turn."""

    def operate(self) -> None:
        for _ in range(13):
            n, self.n = self.n, self.n + 1
            row = values(n)
            self.writer.append(
                **row | {"obs": row["obs"].tolist(), "terminated": np.uint8(0) != 0 or row["terminated"]}
            )


class WriteSteps(_Writing):
    """In place, step by step."""

    def operate(self) -> None:
        for _ in range(13):
            n, self.n = self.n, self.n + 1
            row = values(n)
            with self.writer.step() as step:
                step.obs = row["obs"]
                step.action[...] = n
                step.reward[...] = n
                step.terminated = row["terminated"]
                if row["terminated"]:
                    step.set_final(0, row["final"])


class WriteRollouts(_Writing):
    """In place, some steps at once, with and without a block."""

    options = {"capacity": 240, "page_rows": 24}

    def operate(self) -> None:
        for k in range(4):
            first, self.n = self.n, self.n + 7
            if k % 2:
                with self.writer.rollout(7) as rollout:
                    self._fill(rollout, first)
            else:
                rollout = self.writer.rollout(7)
                self._fill(rollout, first)
                rollout.commit()
            del rollout

    def _fill(self, rollout: Any, first: int) -> None:
        for k in range(7):
            row = values(first + k)
            rollout.obs[k], rollout.action[k], rollout.reward[k] = row["obs"], row["action"], row["reward"]
            if row["terminated"]:
                rollout.terminated[k] = True
                rollout.set_final(k, 0, row["final"])


class WriteBare(_Writing):
    """Without checks."""

    def operate(self) -> None:
        with self.writer.unchecked() as unchecked:
            row = unchecked.row
            for _ in range(13):
                n, self.n = self.n, self.n + 1
                given = values(n)
                unchecked.obs[row], unchecked.action[row], unchecked.reward[row] = given["obs"], n, n
                if given["terminated"]:
                    unchecked.terminated[row] = True
                    unchecked.set_final(given["final"])
                row = unchecked.commit()
                if row >= unchecked.rows:
                    row = unchecked.row


class Extend(_Writing):
    """In bulk."""

    def operate(self) -> None:
        first, self.n = self.n, self.n + 30
        rows = [values(first + k) for k in range(30)]
        ends = np.array([row["terminated"] for row in rows])
        self.writer.extend(
            {name: np.array([row[name] for row in rows]) for name in ("obs", "action", "reward")},
            terminated=ends,
            places=np.flatnonzero(ends),
            finals=np.array([row["final"] for row in rows if row["terminated"]]),
        )
        self.writer.flush()


class HoldBack(_Writing):
    """Rows that are published some ticks later."""

    def open(self) -> conduit.Writer:
        return self.engine.writer("t", ingestion=conduit.CommitEvery(4))

    def operate(self) -> None:
        self.put(self.writer, 10)
        self.writer.flush()
        self.writer.cut()

    def check(self) -> None:
        self.writer.flush()
        before = self.view.counts().inserted
        self.put(self.writer)
        self.writer.flush()
        assert self.view.counts().inserted == before + 1
        check_rows(self.view)
        self.check_rest(open_pages=1)


class OpenWriters(Scenario):
    """Writers opened, used and closed, or dropped."""

    def operate(self) -> None:
        writer = self.engine.writer("t")
        self.put(writer)
        writer.close()
        with self.engine.writer("t") as second:
            self.put(second)
        third = self.engine.writer("t")
        self.put(third)
        del third

    def check(self) -> None:
        with self.engine.writer("t") as writer:
            self.put(writer)
        check_rows(self.view)
        self.check_rest()


class CountStatistics(_Writing):
    """A writer that adds to the table's statistics."""

    options = {"capacity": 120, "page_rows": 12, "statistics": ("obs",)}

    def open(self) -> conduit.Writer:
        return self.engine.writer("t", statistics=True)

    def operate(self) -> None:
        self.put(self.writer, 13)
        self.writer.flush()
        self.engine.table("t").statistics.read("obs")

    def check(self) -> None:
        super().check()
        self.writer.flush()
        assert self.engine.table("t").statistics.read("obs").count == self.view.counts().inserted


class Limited(_Writing):
    """Writer and loader of a table with a limiter."""

    options = {"capacity": 120, "page_rows": 12, "limiter": conduit.SampleToInsertRatio(1.0, 8, error_buffer=200.0)}

    def prepare(self) -> None:
        super().prepare()
        self.put(self.writer, 20)
        self.loader = self.engine.loader("t", batch_size=8, format="numpy", timeout=5)
        self.loader.next()

    def operate(self) -> None:
        self.put(self.writer, 13)
        for _ in range(3):
            self.loader.next()

    def check(self) -> None:
        super().check()
        while (counts := self.view.counts()).inserted - counts.sampled < 40:
            self.put(self.writer)
        before = self.view.counts().sampled
        self.loader.next()
        assert self.view.counts().sampled == before + 8
        while (counts := self.view.counts()).inserted - counts.sampled > 60:
            self.loader.next()
        self.check_rest(open_pages=1)


class ChangeLimits(_Writing):
    """The limits of a table, changed live."""

    options = {"capacity": 120, "page_rows": 12, "limiter": conduit.MinSize(1)}

    def operate(self) -> None:
        self.engine.table("t").limiter.change(conduit.MinSize(2))
        self.engine.table("t").limiter.change(conduit.MinSize(1))

    def check(self) -> None:
        self.check_rest(open_pages=1)
        self.engine.table("t").limiter.change(conduit.MinSize(1))
        super().check()


class Remove(_Writing):
    """Rows deleted, tables reset, frozen and thawed."""

    def operate(self) -> None:
        self.put(self.writer, 3)
        page, local = divmod(int(self.writer._stream.words[3]) + int(self.writer._stream.words[4]) - 1, 12)
        generation = int(self.view.pages()[page, w.PAGE_STATE // 8]) >> 16
        self.engine.table("t").delete(np.array([generation << 40 | page * 12 + local]))
        self.engine.table("t").freeze()
        self.engine.table("t").thaw()
        self.engine.table("t").reset()

    def check(self) -> None:
        self.engine.table("t").thaw()
        super().check()


class Load(_Writing):
    """Loaders: batches, priorities, names."""

    options = {"capacity": 120, "page_rows": 12, "priorities": conduit.Priorities()}

    def prepare(self) -> None:
        super().prepare()
        self.put(self.writer, 40)
        self.loader = self.open_loader()

    def open_loader(self) -> conduit.Loader:
        return self.engine.loader(
            "t", batch_size=8, format="numpy", sampling=conduit.Prioritized(), min_rows=1, timeout=5
        )

    def operate(self) -> None:
        batch = self.loader.next()
        self.loader.update_priorities(batch.ids, np.arange(8.0))
        self.loader.valid(batch.ids)
        del batch
        with self.engine.loader("t", batch_size=8, format="numpy", name="named", timeout=5) as loader:
            loader.next()

    def check(self) -> None:
        for _ in range(4):
            batch = self.loader.next()
            assert np.array_equal(batch["obs"][:, 0], batch["action"])
        self.engine.loader("t", batch_size=8, format="numpy", name="named", timeout=5).close()
        super().check()


class Mix(_Writing):
    """A mixed loader."""

    def prepare(self) -> None:
        super().prepare()
        self.put(self.writer, 40)
        self.loader = self.engine.mixed_loader({"t": 1.0}, batch_size=8, format="numpy", timeout=5)

    def operate(self) -> None:
        self.loader.next()

    def check(self) -> None:
        for _ in range(4):
            batch = self.loader.next()
            assert np.array_equal(batch["obs"][:, 0], batch["action"])
        super().check()


class Read(_Writing):
    """A scan."""

    def prepare(self) -> None:
        super().prepare()
        self.put(self.writer, 40)

    def operate(self) -> None:
        for steps in self.engine.table("t").scan():
            assert len(steps)

    def check(self) -> None:
        super().check()
        assert sum(len(steps) for steps in self.engine.table("t").scan()) >= 20


class _Queue(Scenario):
    """A queue whose rows are all done by the end of each check, in order, none lost and none twice but what was interrupted."""

    options: dict[str, Any] = {"capacity": 96, "page_rows": 12, "kind": "queue"}

    def prepare(self) -> None:
        self.writer = self.engine.writer("t")
        self.consumer = self.engine.consumer("t", format="numpy", timeout=5)
        self.done = -1

    def take(self, claim: conduit.typing.Claim) -> None:
        """See that a claim goes on behind what is done."""
        numbers = claim["action"].ravel().tolist()
        assert numbers[0] > self.done, f"{numbers} after {self.done}"
        assert np.array_equal(claim["obs"].reshape(-1, 3)[:, 0], numbers)
        assert numbers == sorted(numbers)
        self.done = numbers[-1]

    def check(self) -> None:
        self.put(self.writer)
        last = self.n - 1
        while (claim := self.consumer.poll()) is not None:
            self.take(claim)
            claim.ack()
        assert self.done == last, f"{self.done} of {last}"
        del claim
        check_rows(self.view)
        sides = self.consumer_words()
        assert not (sides & w.CONSUMER_MASK).any(), "rows are claimed"
        self.check_rest(open_pages=1)

    def consumer_words(self) -> Array:
        shape = (self.view.layout.pages, 16)
        return self.view.segment.array(self.view.layout.sides, shape, np.dtype(np.int64))[:, w.SIDE_CLAIM // 8]


class Produce(_Queue):
    """A queue's writer."""

    def operate(self) -> None:
        self.put(self.writer, 25)


class Consume(_Queue):
    """A queue's consumer: claims acknowledged, given back, dropped."""

    def prepare(self) -> None:
        super().prepare()
        self.put(self.writer, 30)

    def operate(self) -> None:
        with self.consumer.next(max_ticks=2) as first:
            first["obs"].sum()
        self.consumer.next(max_ticks=2).ack()
        self.consumer.next(max_ticks=2).give_back()
        self.consumer.next(max_ticks=2)
        claim = self.consumer.poll(2)
        assert claim is not None
        claim.ids.sum()

    def take(self, claim: conduit.typing.Claim) -> None:
        self.done = max(self.done, int(claim["action"].min()) - 1)
        super().take(claim)

    def check(self) -> None:
        super().check()
        self.put(self.writer, 20)


class OpenConsumers(_Queue):
    """Consumers opened, closed and dropped with claims."""

    def operate(self) -> None:
        self.put(self.writer, 3)
        with self.engine.consumer("t", format="numpy") as consumer:
            consumer.next(max_ticks=1)
        consumer = self.engine.consumer("t", format="numpy")
        claim = consumer.next(max_ticks=1)
        del consumer
        del claim


class Rollouts(_Queue):
    """A queue of rollouts that end with the observations behind them."""

    options = {"capacity": 160, "page_rows": 20, "kind": "queue", "rollout_length": 5}

    def operate(self) -> None:
        for k in range(12):
            n, self.n = self.n, self.n + 1
            behind = observation(n + 1) if self.writer.ticks_left == 1 or k % 4 == 3 else None
            self.writer.append(**values(n), bootstrap=behind)

    def check(self) -> None:
        n, self.n = self.n, self.n + 1
        self.writer.append(**values(n), bootstrap=observation(n + 1))
        self.n -= 1
        self._end()

    def _end(self) -> None:
        while (claim := self.consumer.poll()) is not None:
            self.take(claim)
            behind = claim.bootstrap
            assert behind is not None, f"no bootstrap behind {claim['action'].ravel().tolist()}"
            assert behind["obs"][0, 0] == self.done + 1, f"{behind['obs'][0, 0]} behind {self.done}"
            claim.ack()
            del claim, behind
        assert self.done == self.n, f"{self.done} of {self.n}"
        self.n += 1
        self.check_rest(open_pages=1)


class Attach(Scenario):
    """Clients that come and go, by close and by being dropped."""

    def prepare(self) -> None:
        self.files = 0

    def operate(self) -> None:
        client = conduit.attach(self.name)
        client.close()
        second = conduit.attach(self.name)
        del second

    def check(self) -> None:
        self.engine.recover()
        alive = [one.number for one in self.engine._participants.list() if one.alive]
        assert alive == [0], f"seats {alive} are taken"
        for number in range(1, 8):
            assert not held(self._own_fd, number, 1), f"seat {number} is kept"
        with conduit.attach(self.name) as client, client.writer("t") as writer:
            self.put(writer)
        del client, writer
        check_rows(self.view)
        self.check_rest()
        self.check_files()

    def check_files(self) -> None:
        """See that no descriptor is left open."""
        files = len(list(Path("/proc/self/fd").iterdir()))
        self.files, before = files, self.files or files
        assert files <= before, f"{files - before} descriptors more"


class Create(Attach):
    """Engines that come and go."""

    def operate(self) -> None:
        with self._make():
            pass

    def _make(self) -> conduit.Engine:
        return conduit.Engine.create(f"{self.name}-b", {"t": conduit.Table(SCHEMA, capacity=24)})

    def check(self) -> None:
        self._make().close()
        self.check_files()
        assert not (SHM_DIRECTORY / shm_name(f"{self.name}-b")[1:]).exists(), "the name is left"


class Checkpoint(_Writing):
    """Checkpoints, written while a writer goes on."""

    def prepare(self) -> None:
        super().prepare()
        self.put(self.writer, 20)
        self.folder = tempfile.TemporaryDirectory()

    def operate(self) -> None:
        self.engine.checkpoint(self.folder.name)

    def check(self) -> None:
        super().check()
        self.engine.checkpoint(self.folder.name)

    def close(self) -> None:
        super().close()
        self.folder.cleanup()


class Publish(Scenario):
    """Weights published and polled."""

    def prepare(self) -> None:
        self.weights = {"w": np.zeros(4, np.float32)}
        self.other = conduit.Engine.create(
            f"{self.name}-w", {"t": conduit.Table(SCHEMA, capacity=24)}, policies={"p": self.weights}
        )
        self.slot = self.other.policy("p")
        self.slot.publish(self.weights)

    def operate(self) -> None:
        self.slot.publish({"w": np.full(4, self.slot.version + 1, np.float32)})
        self.slot.poll()
        self.slot.wait(0) if self.slot.held < self.slot.version else None

    def check(self) -> None:
        version = self.slot.publish({"w": np.full(4, self.slot.version + 1, np.float32)})
        got = self.slot.poll()
        assert got is not None
        assert got.version == version
        assert (got.arrays["w"] == version).all()

    def close(self) -> None:
        self.other.close()
        super().close()


SCENARIOS: dict[str, Callable[[str], Scenario]] = {
    one.__name__: one
    for one in (
        Append,
        AppendExactly,
        WriteSteps,
        WriteRollouts,
        WriteBare,
        Extend,
        HoldBack,
        OpenWriters,
        CountStatistics,
        Limited,
        ChangeLimits,
        Remove,
        Load,
        Mix,
        Read,
        Produce,
        Consume,
        OpenConsumers,
        Rollouts,
        Attach,
        Create,
        Checkpoint,
        Publish,
    )
}
