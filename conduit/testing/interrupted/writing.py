"""Writers, and what is done to the table that they write."""

from __future__ import annotations

from typing import Any

import numpy as np

import conduit
from conduit.store.format import words as w
from conduit.testing.interrupted.scenario import Scenario, check_rows, values


class Writing(Scenario):
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


class Append(Writing):
    """The compiled call, with a page's turn."""

    def operate(self) -> None:
        self.put(self.writer, 13)


class AppendExactly(Writing):
    """The exact path: values that must be converted, flags, finals, a page's turn."""

    def operate(self) -> None:
        for _ in range(13):
            n, self.n = self.n, self.n + 1
            row = values(n)
            self.writer.append(
                **row | {"obs": row["obs"].tolist(), "terminated": np.uint8(0) != 0 or row["terminated"]}
            )


class WriteSteps(Writing):
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


class WriteRollouts(Writing):
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


class WriteBare(Writing):
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


class Extend(Writing):
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


class HoldBack(Writing):
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


class CountStatistics(Writing):
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


class Limited(Writing):
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


class ChangeLimits(Writing):
    """The limits of a table, changed live."""

    options = {"capacity": 120, "page_rows": 12, "limiter": conduit.MinSize(1)}

    def operate(self) -> None:
        self.engine.table("t").limiter.change(conduit.MinSize(2))
        self.engine.table("t").limiter.change(conduit.MinSize(1))

    def check(self) -> None:
        self.check_rest(open_pages=1)
        self.engine.table("t").limiter.change(conduit.MinSize(1))
        super().check()


class Remove(Writing):
    """Rows deleted, tables reset, frozen and thawed."""

    def operate(self) -> None:
        self.put(self.writer, 3)
        page, local = divmod(int(self.writer._stream.words[3]) + int(self.writer._stream.words[4]) - 1, 12)
        generation = int(self.view.pages()[page, w.PAGE_STATE // 8]) >> w.GENERATION_SHIFT
        self.engine.table("t").delete(np.array([generation << w.ROW_BITS | page * 12 + local]))
        self.engine.table("t").freeze()
        self.engine.table("t").thaw()
        self.engine.table("t").reset()

    def check(self) -> None:
        self.engine.table("t").thaw()
        super().check()
