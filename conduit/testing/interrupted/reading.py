"""Loaders and scans; writers and consumers of queues."""

from __future__ import annotations

from typing import Any

import numpy as np

import conduit
from conduit.store.format import words as w
from conduit.testing.interrupted.scenario import Scenario, check_rows, observation, values
from conduit.testing.interrupted.writing import Writing

Array = np.ndarray[Any, Any]


class Load(Writing):
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


class Mix(Writing):
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


class Read(Writing):
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
