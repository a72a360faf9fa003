"""SIGKILL at every instruction boundary of a queue's paths: no row is lost, none comes again after its acknowledgement."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

import conduit
from conduit.native.jit import entry, kernel, native
from conduit.native.memory import peek_i64
from conduit.plane.engine import Engine
from conduit.store.format import words as w
from conduit.store.format.words import HAZARDS_PER_PARTICIPANT
from conduit.store.ingest import commit as committing
from conduit.store.ingest import page_writer
from conduit.store.pages import protocol, recovery
from conduit.store.segment.locks import try_lock
from conduit.store.tables import queue
from conduit.testing import stepping
from conduit.testing.invariants import check_every_page_can_be_claimed, check_nothing_leaked, hazard, hazards, kinds
from conduit.testing.stepping import (
    begin,
    call_native_1,
    call_native_2,
    call_native_3,
    call_native_5,
    finish,
)
from tests.store.test_stepkill import CHILD, DEAD, PAGE_ROWS, SCHEMA, Scene, StoreWriter, store_observation, sweep

pytestmark = pytest.mark.skipif(bool(reason := stepping.why_not()), reason=str(reason))


@kernel("int64(int64)")
def take_and_end(at):
    """Claim rows, then acknowledge them or give them back."""
    take, end, table, owner = peek_i64(at), peek_i64(at + 8), peek_i64(at + 16), peek_i64(at + 24)
    hazard, out = peek_i64(at + 32), peek_i64(at + 40)
    begin()
    page = call_native_5(take, table, owner, 0, hazard, out)
    call_native_3(end, table, page, peek_i64(out + 8 * queue.CLAIM_WORD))
    finish()
    return page


@kernel("int64(int64)")
def recover_consumer(at):
    """Take back what a dead participant left: pages, claims, then leases."""
    recover, clear, table = peek_i64(at), peek_i64(at + 8), peek_i64(at + 16)
    dead, slots, count = peek_i64(at + 24), peek_i64(at + 32), peek_i64(at + 40)
    begin()
    pages = call_native_2(recover, table, dead)
    call_native_2(clear, slots, count)
    finish()
    return pages


@kernel("int64(int64)")
def finish_and_write(at):
    """Finish a page, claim the next one, turn to it, write two rows, finish it."""
    claim, turn, commit, finish_page = peek_i64(at), peek_i64(at + 8), peek_i64(at + 16), peek_i64(at + 24)
    table, writer, owner = peek_i64(at + 32), peek_i64(at + 40), peek_i64(at + 48)
    begin()
    call_native_1(finish_page, writer)
    page = call_native_3(claim, table, owner, 0)
    call_native_2(turn, writer, page)
    for _ in range(2):
        store_observation(writer)
        call_native_2(commit, writer, 1)
    call_native_1(finish_page, writer)
    finish()
    return page


def side(view, page, word):
    return int(view.segment.words[(view.layout.sides + w.LINE * page + word) // 8])


def drained(engine) -> list[int]:
    """Claim and acknowledge all; the ticks that came, which must be whole."""
    ticks = []
    consumer = engine.consumer("replay", format="numpy")
    while (claim := consumer.poll()) is not None:
        numbers = claim.stream * 1000 + claim.first_tick + np.arange(claim.ticks)
        assert (claim["obs"][:, 0] == numbers[:, None]).all()
        ticks += numbers.tolist()
        claim.ack()
        del claim
    return ticks


class QueueScene(Scene):
    """One stream of three full pages, 12 rows; nothing is claimed."""

    def at_death(self) -> str:
        view = self.view
        words = [side(view, page, w.SIDE_CLAIM) for page in range(view.layout.pages)]
        claimed = sum((word & w.CONSUMER_MASK) != 0 for word in words)
        acked = sum(side(view, page, w.SIDE_ACKED) for page in range(view.layout.pages))
        return f"{claimed} claimed, {acked} acknowledged" + (", leased" if hazards(view).any() else "")

    def check_rest(self) -> None:
        check_nothing_leaked(self.view)
        assert (kinds(self.view) != 1).all()
        check_every_page_can_be_claimed(self.view)


class Acknowledging(QueueScene):
    """A consumer claims the oldest rows and acknowledges them."""

    end = staticmethod(queue.acknowledge)
    # "leased" in the middle one: the acknowledgement is stored and the claim not ended yet
    must_meet = frozenset(
        {
            "0 claimed, 0 acknowledged",
            "1 claimed, 0 acknowledged",
            "1 claimed, 0 acknowledged, leased",
            "1 claimed, 4 acknowledged, leased",
            "0 claimed, 4 acknowledged, leased",
        }
    )

    def program(self) -> None:
        client, view = self.attach()
        seat = client._participants
        out = np.zeros(queue.CLAIM_WORDS, np.int64)
        functions = [native(queue.take), native(self.end)]
        self.run(take_and_end, *functions, view.address, seat.number, hazard(view), out.ctypes.data)

    def check(self) -> None:
        done = side(self.view, 0, w.SIDE_ACKED)
        assert done in {0, 4}
        claimed = side(self.view, 0, w.SIDE_CLAIM) & w.CONSUMER_MASK != 0
        again = self.view.delivered_again
        self.engine.recover()
        assert self.view.delivered_again - again == claimed
        assert drained(self.engine) == list(range(done, 12))
        self.check_rest()


class GivingBackRows(Acknowledging):
    """A consumer claims the oldest rows and gives them back."""

    end = staticmethod(queue.give_back)
    must_meet = frozenset(
        {"0 claimed, 0 acknowledged", "1 claimed, 0 acknowledged, leased", "0 claimed, 0 acknowledged, leased"}
    )


class RecoveringConsumer(QueueScene):
    """A dead consumer held three claims; one was acknowledged and not ended, another is of a page that was reused meanwhile."""

    must_meet = frozenset({"3 claimed, 4 acknowledged, leased", "0 claimed, 4 acknowledged"})

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        with conduit.attach(engine.name) as first:
            assert first._participants.number == CHILD
            pid = os.fork()
            if pid == 0:
                try:
                    self._die()
                finally:
                    os._exit(1)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0
        self.keep()

    def _die(self) -> None:
        client, view = self.attach()
        seat = client._participants
        assert seat.number == DEAD
        out = np.zeros(queue.CLAIM_WORDS, np.int64)
        for page in range(3):
            assert entry(queue.take)(view.address, DEAD, 0, hazard(view, page), out.ctypes.data) == page
        view.segment.words[(view.layout.sides + w.SIDE_ACKED) // 8] = 4
        os._exit(0)

    def program(self) -> None:
        client, view = self.attach()
        assert try_lock(client._segment.lock_fd, DEAD)
        functions = [native(one) for one in (recovery.recover, recovery.clear_hazards)]
        slots = int(view.descriptor[w.VIEW_HAZARDS // 8]) + 8 * HAZARDS_PER_PARTICIPANT * DEAD
        self.run(recover_consumer, *functions, view.address, DEAD, slots, HAZARDS_PER_PARTICIPANT)

    def check(self) -> None:
        self.engine.recover()
        assert drained(self.engine) == list(range(4, 12))
        self.check_rest()


class WritingOn(QueueScene):
    """The writer of a queue finishes its page and goes on in one that was acknowledged."""

    must_meet = frozenset({"0 claimed, 4 acknowledged", "0 claimed, 0 acknowledged"})

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        StoreWriter(self.view).turn()  # no page is free, another writer has the last
        consumer = engine.consumer("replay", format="numpy")
        consumer.next(timeout=0).ack()
        self.keep()

    def program(self) -> None:
        client, view = self.attach()
        writer = StoreWriter(view)
        # the page that holds nothing yet is the other writer's; this one's first is the one that was acknowledged
        functions = [
            native(one) for one in (protocol.claim, page_writer.turn, committing.commit, page_writer.finish_page)
        ]
        self.run(finish_and_write, *functions, view.address, writer.address, client._participants.number)

    def check(self) -> None:
        engine, view = self.engine, self.view
        engine.recover()
        ticks = drained(engine)
        # what stood there before comes first, then as much as was committed of the new stream's two rows
        assert ticks[:8] == list(range(4, 12))
        assert ticks[8:] in ([], [2000], [2000, 2001])
        other = np.flatnonzero(kinds(view) == 2)
        assert len(other) == 1, "the other writer's page"
        entry(protocol.free)(view.address, int(other[0]))
        self.check_rest()


@pytest.fixture
def engine(engine_name) -> Iterator[Engine]:
    table = conduit.Table.queue(SCHEMA, capacity=1, page_rows=PAGE_ROWS)
    with Engine.create(engine_name, {"replay": table}, max_participants=3) as made:
        assert made._views["replay"].layout.pages == 4
        for compiled in (store_observation, take_and_end, recover_consumer, finish_and_write):
            entry(compiled)
        yield made


SCENES = {
    "claim and acknowledge": (Acknowledging, 9),
    "claim and give back": (GivingBackRows, 9),
    "recovery of a consumer": (RecoveringConsumer, 9),
    "a queue's writer": (WritingOn, 23),
}
"""Each with the step between the boundaries that the normal run takes, from a random one on."""


@pytest.mark.parametrize("boundaries", ["some", pytest.param("all", marks=pytest.mark.torture)])
@pytest.mark.parametrize("name", SCENES)
def test_a_death_at_any_instruction_loses_no_row_and_repeats_none_that_is_done(engine, name, boundaries):
    kind, step = SCENES[name]
    sweep(kind(engine), name, 1 if boundaries == "all" else step)


def test_a_consumer_that_dies_holding_a_page_of_an_earlier_generation_changes_nothing_in_it(engine):
    """A claimer may be stopped between its swap and its look at the generation, while the page is reused under it."""
    view = engine._views["replay"]
    seat = view.check_open()
    writer = StoreWriter(view)
    page = writer.turn()
    writer.write(4)
    writer.seal(ended=True)
    assert drained(engine) == [0, 1, 2, 3]
    # the swap of a consumer that read the words before they were acknowledged fails; here it got in before the reuse
    word = side(view, page, w.SIDE_CLAIM)
    at = (view.layout.sides + w.LINE * page + w.SIDE_CLAIM) // 8
    view.segment.words[at] = word | (DEAD + 1)
    assert entry(recovery.recover)(view.address, DEAD) == 0
    assert side(view, page, w.SIDE_CLAIM) == word
    # and here it dies after the page has got its new owner, who resets the word: the recoverer's swap has nothing to undo
    view.segment.words[at] = word | (DEAD + 1)
    entry(protocol.free)(view.address, page)
    again = StoreWriter(view)
    assert again.turn() == page
    again.write(3)
    state = int(view.pages()[page, w.PAGE_STATE // 8])
    assert side(view, page, w.SIDE_CLAIM) >> w.TAG_SHIFT == state >> 16 & w.TAG_MASK
    entry(recovery.recover)(view.address, DEAD)
    assert int(view.pages()[page, w.PAGE_COMMITTED // 8]) == 3
    assert drained(engine) == [1000, 1001, 1002]
    assert int(again.words[w.WRITER_PAGE // 8]) == page
    assert int(again.words[w.WRITER_OWNER // 8]) == seat.number
