"""A queue against a model of plain lists: writers, consumers, acknowledgements, returns and deaths in any order."""

import itertools
import os
from dataclasses import dataclass, field

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import conduit
from conduit.errors import Busy
from conduit.store.tables.queue import QueueView
from conduit.testing.invariants import check_nothing_leaked

SCHEMA = conduit.Schema([conduit.Field("obs", "int64", (), observation=True), conduit.Field("env", "int32")])
PAGE_ROWS = 8


@dataclass(eq=False)
class Page:
    """A page as the model has it; all counts in ticks."""

    stream: int
    order: int
    first: int
    before: "Page | None"
    count: int = 0
    acked: int = 0
    claimed: int = 0
    returned: int = 0
    held: bool = False
    sealed: bool = False
    bootstrap: bool = False
    leases: list = field(default_factory=list)

    @property
    def position(self):
        return self.claimed if self.held else self.acked

    @property
    def in_use(self):
        return not self.sealed or self.held or self.acked < self.count or bool(self.leases)


@dataclass(eq=False)
class Writing:
    """A writer and the model of it."""

    writer: conduit.Writer
    mortal: bool
    page: Page | None = None
    last: Page | None = None
    tick: int = 0


@dataclass(eq=False)
class Holding:
    """A claim and the model of it."""

    claim: conduit.typing.Claim
    page: Page
    mortal: bool
    ended: bool = False


class QueueMachine(RuleBasedStateMachine):
    numbers = itertools.count()

    @initialize(rollout=st.sampled_from([None, 1, 3]), envs=st.sampled_from([1, 2]))
    def create(self, rollout, envs):
        self.rollout, self.envs = rollout, envs
        table = conduit.Table.queue(SCHEMA, capacity=24, page_rows=PAGE_ROWS, rollout_length=rollout, num_envs=envs)
        name = f"qm{os.getpid()}-{next(self.numbers)}"
        self.engine = conduit.Engine.create(name, {"q": table})
        self.view = self.engine._views["q"]
        self.queue = QueueView(self.view)
        self.capacity = rollout or PAGE_ROWS // envs
        self.pages, self.writers, self.holdings = [], [], []
        self.orders = itertools.count()
        self.again = 0
        self.mortal = conduit.attach(name)
        self.consumers = {
            mortal: [client.consumer("q", format="numpy") for _ in range(2)]
            for mortal, client in ((False, self.engine), (True, self.mortal))
        }
        for mortal in (False, True):
            self.open(mortal)

    def open(self, mortal):
        client = self.mortal if mortal else self.engine
        writer = client.writer("q", num_envs=self.envs, autoreset="next_step", on_full="raise")
        self.writers.append(Writing(writer, mortal))

    # -- writing

    @rule(which=st.integers(0, 5), count=st.integers(1, 9), bootstrap=st.booleans())
    def append(self, which, count, bootstrap):
        own = self.writers[which % len(self.writers)]
        for i in range(count):
            ends = bootstrap and self.rollout is not None and i == count - 1
            self.append_one(own, ends)

    @rule(which=st.integers(0, 5))
    def fill(self, which):
        own = self.writers[which % len(self.writers)]
        while self.append_one(own, False):
            pass

    def append_one(self, own, ends):
        """Append a tick; returns False where the queue is full."""
        turns = own.page is None
        has_room = sum(page.in_use for page in self.pages) < self.view.layout.pages
        obs = np.full(self.envs, own.tick)
        more = {"bootstrap": obs + 1} if ends else {}
        try:
            own.writer.append(obs=obs, env=np.arange(self.envs, dtype=np.int32), **more)
        except Busy:
            assert turns
            assert not has_room
            return False
        assert has_room or not turns
        if turns:
            own.page = Page(own.writer.stream, next(self.orders), own.tick, own.last)
            self.pages.append(own.page)
        own.page.count += 1
        own.tick += 1
        own.page.bootstrap = ends
        if ends or own.page.count == self.capacity:
            self.finish(own)
        return True

    def finish(self, own):
        own.page.sealed = True
        own.last, own.page = own.page, None

    @rule(which=st.integers(0, 5))
    def close_writer(self, which):
        own = self.writers.pop(which % len(self.writers))
        own.writer.close()
        if own.page is not None:
            self.finish(own)
        self.open(own.mortal)

    # -- consuming

    def offered(self):
        def claimable(page):
            if page.held or page.acked == page.count:
                return False
            if self.rollout and not page.sealed and page.count < self.rollout:
                return False
            return page.before is None or page.before.position >= page.before.count

        return min((page for page in self.pages if claimable(page)), key=lambda page: page.order, default=None)

    @rule(mortal=st.booleans(), which=st.integers(0, 1), most=st.sampled_from([None, 1, 2, 100]))
    def claim(self, mortal, which, most):
        if sum(one.mortal == mortal for one in self.holdings) > 12:
            return
        most = None if self.rollout else most
        page = self.offered()
        claim = self.consumers[mortal][which].poll(max_ticks=most)
        if page is None:
            assert claim is None
            return
        start = page.acked
        stop = page.count if most is None else min(page.count, start + most)
        assert (claim.stream, claim.first_tick, claim.ticks) == (page.stream, page.first + start, stop - start)
        assert claim.delivered_before == (start < page.returned)
        assert claim.complete == (self.rollout is None or stop == self.rollout)
        numbers = np.arange(page.first + start, page.first + stop)
        assert claim["obs"].tolist() == [[n] * self.envs for n in numbers]
        assert claim["env"].tolist() == [list(range(self.envs))] * len(numbers)
        if page.bootstrap:
            assert claim.bootstrap["obs"].tolist() == [page.first + stop] * self.envs
        else:
            assert claim.bootstrap is None
        page.held, page.claimed = True, stop
        holding = Holding(claim, page, mortal)
        page.leases.append(holding)
        self.holdings.append(holding)

    def any_holding(self, which, ended):
        among = [one for one in self.holdings if one.ended == ended]
        return among[which % len(among)] if among else None

    @rule(which=st.integers(0, 20))
    def acknowledge(self, which):
        holding = self.any_holding(which, ended=False)
        if holding is not None:
            holding.claim.ack()
            holding.ended = True
            holding.page.acked, holding.page.held = holding.page.claimed, False

    def came_back(self, holding):
        holding.ended = True
        holding.page.held = False
        holding.page.returned = max(holding.page.returned, holding.page.claimed)

    @rule(which=st.integers(0, 20), explicit=st.booleans())
    def give_back(self, which, explicit):
        holding = self.any_holding(which, ended=False)
        if holding is not None:
            if explicit:
                holding.claim.give_back()
            self.came_back(holding)
            self.drop(holding)

    @rule(which=st.integers(0, 20))
    def forget(self, which):
        holding = self.any_holding(which, ended=True)
        if holding is not None:
            self.drop(holding)

    def drop(self, holding):
        self.holdings.remove(holding)
        holding.page.leases.remove(holding)
        holding.claim = None

    @rule()
    def die(self):
        self.mortal._segment.release_locks()  # as the kernel does when a process is gone
        self.engine.recover()
        for holding in [one for one in self.holdings if one.mortal]:
            if not holding.ended:
                self.again += 1
                self.came_back(holding)
            self.drop(holding)
        for own in [one for one in self.writers if one.mortal]:
            self.writers.remove(own)
            if own.page is not None:
                self.finish(own)
        self.mortal = conduit.attach(self.engine.name)
        self.consumers[True] = [self.mortal.consumer("q", format="numpy") for _ in range(2)]
        self.open(True)

    # -- what holds at all times

    @invariant()
    def the_counts_are_the_model_s(self):
        if not hasattr(self, "queue"):
            return
        counts = self.queue.counts()
        left = [(page, page.count - page.position) for page in self.pages]
        unfinished = sum(rows for page, rows in left if self.rollout and not page.sealed and page.count < self.rollout)
        assert counts.unfinished == unfinished * self.envs
        assert counts.waiting == (sum(rows for _, rows in left) - unfinished) * self.envs
        claimed = sum(page.claimed - page.acked for page in self.pages if page.held)
        assert sum(counts.claimed.values()) == claimed * self.envs
        assert self.view.delivered_again == self.again

    def teardown(self):
        if not hasattr(self, "queue"):
            return
        for own in self.writers:
            own.writer.close()
            if own.page is not None:
                self.finish(own)
        while self.holdings:
            holding = self.holdings[0]
            if not holding.ended:
                holding.claim.give_back()
                self.came_back(holding)
            self.drop(holding)
        while self.offered() is not None:
            self.claim(False, 0, None)
            self.acknowledge(0)
            self.forget(0)
        assert all(page.acked == page.count for page in self.pages)
        check_nothing_leaked(self.view)
        self.mortal.close()
        self.engine.close()


class TestQueue(QueueMachine.TestCase):
    settings = settings(
        max_examples=int(os.environ.get("CONDUIT_QUEUE_EXAMPLES", "25")),
        stateful_step_count=50,
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
