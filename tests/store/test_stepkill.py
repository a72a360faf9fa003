"""SIGKILL at every instruction boundary of the protocol's paths, then recovery: no instant exists that leaks or tears."""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import conduit
from conduit.native.jit import entry, kernel, native
from conduit.native.memory import peek_i64, poke_i64
from conduit.plane.client import Client
from conduit.plane.engine import Engine
from conduit.sampling import prioritized_update
from conduit.sampling.marks import empty_marks
from conduit.store.format import words as w
from conduit.store.format.words import HAZARDS_PER_PARTICIPANT
from conduit.store.ingest import commit, first_page, page_writer
from conduit.store.ingest import commit as committing
from conduit.store.ingest.report_episodes import WRITER_WORDS
from conduit.store.pages import protocol, ragged_values, rate_limiter, recovery
from conduit.store.segment.locks import LOCK_PUBLISHERS, try_lock
from conduit.store.tables.limit_checks import Gate, seat_line
from conduit.store.tables.view import TableView
from conduit.testing import stepping
from conduit.testing.invariants import (
    anchor_ranges,
    check_counts,
    check_each_row_is_drawn_from_one_page,
    check_every_page_can_be_claimed,
    check_nothing_leaked,
    hazard,
    hazards,
    kinds,
)
from conduit.testing.stepping import (
    begin,
    call_native_1,
    call_native_2,
    call_native_3,
    call_native_4,
    call_native_5,
    call_native_7,
    finish,
)
from tests.sampling.test_prioritized import check_sums

pytestmark = pytest.mark.skipif(bool(reason := stepping.why_not()), reason=str(reason))

WORDS = 4
PAGE_ROWS = 8
SCHEMA = conduit.Schema([conduit.Field("obs", "int64", (WORDS,), observation=True)])
LONGEST = 5
RAGGED = conduit.Schema([*SCHEMA.fields, conduit.Field("tokens", "int64", (LONGEST,), observation=True, ragged=True)])
ENGINE, CHILD, DEAD = 0, 1, 2

# -- programs: compiled code that is killed. `at` is the address of their arguments, int64 words in the order of unpacking.


@kernel("int64(int64)")
def store_observation(writer):
    """Write the observation of a writer's next row: four times its number in the table, stream * 1000 + tick."""
    row = peek_i64(writer + w.WRITER_BASE) + peek_i64(writer + w.WRITER_LOCAL)
    number = (
        peek_i64(writer + w.WRITER_STREAM) * 1000
        + peek_i64(writer + w.WRITER_FIRST_TICK)
        + peek_i64(writer + w.WRITER_TICK)
    )
    column = peek_i64(peek_i64(peek_i64(writer + w.WRITER_TABLE) + w.VIEW_COLUMNS))
    for i in range(WORDS):
        poke_i64(column + 8 * (WORDS * row + i), number)
    return row


@kernel("int64(int64)")
def write(at):
    """Claim a page, turn to it, write three rows in it, seal it."""
    claim, turn, commit, seal = (peek_i64(at), peek_i64(at + 8), peek_i64(at + 16), peek_i64(at + 24))
    table, writer, owner = peek_i64(at + 32), peek_i64(at + 40), peek_i64(at + 48)
    begin()
    page = call_native_3(claim, table, owner, 0)
    call_native_2(turn, writer, page)
    for _ in range(3):
        store_observation(writer)
        call_native_2(commit, writer, 1)
    call_native_3(seal, table, page, 1)
    finish()
    return page


@kernel("int64(int64, int64, int64)")
def store_ragged(put, writer, scratch):
    """Write a writer's next row: its observation, and as many tokens as its number says, all of them that number."""
    row = store_observation(writer)
    number = peek_i64(peek_i64(peek_i64(peek_i64(writer + w.WRITER_TABLE) + w.VIEW_COLUMNS)) + 8 * WORDS * row)
    count = number % (LONGEST + 1)
    for i in range(count):
        poke_i64(scratch + 8 * i, number)
    call_native_5(put, writer, 0, row, scratch, count)
    return row


@kernel("int64(int64)")
def write_ragged(at):
    """Claim a page, turn to it with the halo's values, write three rows in it, seal it."""
    claim, turn, commit, seal = (peek_i64(at), peek_i64(at + 8), peek_i64(at + 16), peek_i64(at + 24))
    table, writer, owner, put, scratch = (
        peek_i64(at + 32),
        peek_i64(at + 40),
        peek_i64(at + 48),
        peek_i64(at + 56),
        peek_i64(at + 64),
    )
    begin()
    page = call_native_3(claim, table, owner, 0)
    call_native_2(turn, writer, page)
    for _ in range(3):
        store_ragged(put, writer, scratch)
        call_native_2(commit, writer, 1)
    call_native_3(seal, table, page, 1)
    finish()
    return page


@kernel("int64(int64)")
def go_on(at):
    """Reopen the page of a stream that ended, write three rows in it, seal it."""
    reopen, commit, seal = (peek_i64(at), peek_i64(at + 8), peek_i64(at + 16))
    table, writer, put, scratch = (peek_i64(at + 24), peek_i64(at + 32), peek_i64(at + 40), peek_i64(at + 48))
    begin()
    row = call_native_4(reopen, writer, 1, 1, 0)
    for _ in range(3):
        if put != 0:
            store_ragged(put, writer, scratch)
        else:
            store_observation(writer)
        call_native_2(commit, writer, 1)
    call_native_3(seal, table, peek_i64(writer + w.WRITER_PAGE), 1)
    finish()
    return row


@kernel("int64(int64)")
def claim_carelessly(at):
    """Claim without a look at the leases before the swap: the first page is given back; then write into what was got."""
    claim, table, owner = peek_i64(at), peek_i64(at + 8), peek_i64(at + 16)
    column = peek_i64(peek_i64(table + w.VIEW_COLUMNS))
    begin()
    page = call_native_3(claim, table, owner, 1)
    for row in range(PAGE_ROWS):
        poke_i64(column + 8 * WORDS * (PAGE_ROWS * page + row), -1)
    finish()
    return page


@kernel("int64(int64)")
def hold_and_let_go(at):
    """Lease a page, end the lease."""
    lease, end_lease, table, page = peek_i64(at), peek_i64(at + 8), peek_i64(at + 16), peek_i64(at + 24)
    generation, hazard = peek_i64(at + 32), peek_i64(at + 40)
    begin()
    rows = call_native_4(lease, table, page, generation, hazard)
    call_native_2(end_lease, table, hazard)
    finish()
    return rows


@kernel("int64(int64)")
def recover_dead(at):
    """Take back the pages of a dead participant, then its leases."""
    recover, clear, table = peek_i64(at), peek_i64(at + 8), peek_i64(at + 16)
    dead, slots, count = peek_i64(at + 24), peek_i64(at + 32), peek_i64(at + 40)
    begin()
    pages = call_native_2(recover, table, dead)
    call_native_2(clear, slots, count)
    finish()
    return pages


@kernel("int64(int64)")
def pass_the_gates(at):
    """Have a row granted, write it, reserve a sample, deliver it."""
    grant, commit, reserve, deliver = (peek_i64(at), peek_i64(at + 8), peek_i64(at + 16), peek_i64(at + 24))
    writer, gate = peek_i64(at + 32), peek_i64(at + 40)
    begin()
    passed = call_native_2(grant, writer, 1)
    store_observation(writer)
    call_native_2(commit, writer, 1)
    passed += 2 * call_native_2(reserve, gate, 1)
    call_native_3(deliver, gate, 0, 0)
    finish()
    return passed


@kernel("int64(int64)")
def update_priorities(at):
    """Give rows new priorities, as a learner that has not drawn yet."""
    store, sums, table, seat = peek_i64(at), peek_i64(at + 8), peek_i64(at + 16), peek_i64(at + 24)
    ids, count, scratch, span = peek_i64(at + 32), peek_i64(at + 40), peek_i64(at + 48), peek_i64(at + 56)
    begin()
    ignored = call_native_7(store, sums, table, seat, ids, count, scratch, span)
    finish()
    return ignored


@kernel("int64(int64)")
def publish_weights(at):
    """Write one version of the weights as PolicySlot.publish does."""
    begin_copy, finish_copy = peek_i64(at), peek_i64(at + 8)
    version, latest, value = peek_i64(at + 16), peek_i64(at + 24), peek_i64(at + 32)
    array, count = peek_i64(at + 40), peek_i64(at + 48)
    begin()
    call_native_1(begin_copy, version)
    for i in range(count):
        poke_i64(array + 8 * i, value)
    call_native_3(finish_copy, version, latest, value)
    finish()
    return value


# -- scenarios: what stands in the table, what is killed, what must hold


class StoreWriter:
    """A writer of one environment, made of the store's words and kernels alone."""

    def __init__(self, view: TableView) -> None:
        seat = view.check_open()
        self.view = view
        self.stream = view.new_stream()
        self.states = np.array([[w.STARTING, 0, 0]], np.int64)
        self.words = np.zeros(WRITER_WORDS, np.int64)
        self.address = self.words.ctypes.data
        values = view.arenas.get("tokens")
        self.arenas = ragged_values.arena_words(
            []
            if values is None
            else [(view.columns["tokens"].ctypes.data, values.ctypes.data, *values.strides[:2], values.shape[1])]
        )
        for offset, value in (
            (w.WRITER_TABLE, view.address),
            (w.WRITER_PAGE, -1),
            (w.WRITER_ENVS, 1),
            (w.WRITER_RESERVE, 1),
            (w.WRITER_ENV_STATE, self.states.ctypes.data),
            (w.WRITER_STREAM, self.stream),
            (w.WRITER_OWNER, seat.number),
            (w.WRITER_COUNTER, seat.counter),
            (w.WRITER_PUBLISH_EVERY, 1),
            (w.WRITER_ARENAS, self.arenas.ctypes.data),
            (w.WRITER_ARENA_COUNT, len(self.arenas)),
        ):
            self.words[offset // 8] = value

    def put(self, row: int, number: int) -> None:
        """Give a row its tokens, in a ragged table."""
        if len(self.arenas):
            tokens = np.full(abs(number) % (LONGEST + 1), number)
            assert entry(ragged_values.put_value)(self.address, 0, row, tokens.ctypes.data, len(tokens)) == 0

    def turn(self) -> int:
        page = entry(protocol.claim)(self.view.address, int(self.words[w.WRITER_OWNER // 8]), 0)
        entry(page_writer.turn)(self.address, page)
        return page

    def write(self, count: int, *, ends: bool = False) -> None:
        """Write rows; `ends` lets the last one end an episode and keeps its final observation."""
        for left in range(count, 0, -1):
            row = entry(store_observation)(self.address)
            number = int(self.view.columns["obs"][row, 0])
            self.put(row, number)
            if ends and left == 1:
                self.view.terminated[row] = True
                kept = entry(commit.stage_final)(self.address, row, row + 1)
                self.view.columns["obs"][kept] = -number
                self.put(kept, -number)
            entry(committing.commit)(self.address, 1)

    def seal(self, *, ended: bool) -> None:
        entry(protocol.seal)(self.view.address, int(self.words[w.WRITER_PAGE // 8]), ended)


def check_rows(view: TableView) -> None:
    """Every committed row is whole and stands where its stream's tick says, with the final observation it links to."""
    obs = view.columns["obs"]
    for page, words in enumerate(view.pages().tolist()):
        if words[w.PAGE_STATE // 8] & w.KIND_MASK not in (w.OPEN, w.SEALED):
            continue
        start, count = page * PAGE_ROWS, words[w.PAGE_COMMITTED // 8]
        assert 0 < count <= PAGE_ROWS
        numbers = words[w.PAGE_STREAM // 8] * 1000 + words[w.PAGE_TICK // 8] + np.arange(count)
        assert (obs[start : start + count] == numbers[:, None]).all(), f"page {page}: {obs[start : start + count]}"
        links = view.meta["link"][start : start + count]
        assert (links != 0).all(), f"page {page}: rows without their meta"
        check_tokens(view, page, range(start, start + count), numbers)
        for row in np.flatnonzero(links & w.KEPT) + start:
            kept = row + (int(view.meta["link"][row]) >> w.LINK_SHIFT)
            assert (obs[kept] == -obs[row]).all(), f"final of row {row}"
            check_tokens(view, page, [kept], -obs[row, :1])


def check_tokens(view: TableView, page: int, rows: Iterable[int], numbers: np.ndarray) -> None:
    """Every row's tokens are the whole value it was written with, and lie in its page's arena beside those of others."""
    taken = []
    for row, number in zip(rows, numbers.tolist(), strict=True) if view.arenas else ():
        start, length = map(int, view.columns["tokens"][row])
        values = view.arenas["tokens"][page, start : start + length]
        assert values.tolist() == [number] * (abs(number) % (LONGEST + 1)), f"row {row} of number {number}: {values}"
        taken += range(start, start + length)
    assert len(set(taken)) == len(taken), f"page {page}: values that lie in one another"


class Scene:
    """An engine whose segment is put back to the same bytes before each kill."""

    table = "replay"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.view: TableView = engine._views[self.table]
        segment = engine._segment
        self._bytes = segment.root[segment.layout.participants :]
        # as if somebody waited for rows and for space, so that the system call to wake them is on the path
        for event in (w.TABLE_DATA, w.TABLE_SPACE):
            segment.words[(self.view.layout.control + event + 8) // 8] = 1
        writer = StoreWriter(self.view)
        for _ in range(3):
            writer.turn()
            writer.write(4)
        writer.seal(ended=True)
        self.keep()

    def keep(self) -> None:
        """Take the present bytes as those to go back to."""
        self._pristine = self._bytes.copy()
        self.inserted = self.view.counts().inserted
        check_counts(self.view, self.inserted)

    def restore(self) -> None:
        self._bytes[:] = self._pristine

    def attach(self) -> tuple[Client, TableView]:
        client = conduit.attach(self.engine.name)
        return client, client._views[self.table]

    def run(self, compiled: Callable[..., int], *arguments: int) -> None:
        words = np.array(arguments, np.int64)
        entry(compiled)(words.ctypes.data)

    def at_death(self) -> str:
        """What a death left, in words; the scene's `must_meet` are those that the kills have to come across."""
        found = kinds(self.view)
        leased = " leased" if np.count_nonzero(hazards(self.view)) else ""
        return (
            "+".join(name for kind, name in ((w.INIT, "init"), (w.OPEN, "open")) for _ in range((found == kind).sum()))
            + leased
        )

    must_meet: frozenset[str] = frozenset()

    def program(self) -> None:
        """What the process does that is killed."""
        raise NotImplementedError

    def check(self) -> None:
        """What holds after its death."""
        raise NotImplementedError


class Writing(Scene):
    """A writer in the middle of a stream takes its next page: the oldest, since none is free."""

    written = 0
    # "open+open": the new page is open and the old one not yet sealed; only a few instructions long
    must_meet = frozenset({"open", "init+open", "open+open", ""})

    def program(self) -> None:
        client, view = self.attach()
        writer = StoreWriter(view)
        assert writer.turn() == 3
        writer.write(4, ends=True)
        functions = [native(one) for one in (protocol.claim, page_writer.turn, committing.commit, protocol.seal)]
        self.run(write, *functions, view.address, writer.address, client._participants.number)

    def check(self) -> None:
        view = self.view
        for need in (0, 1):  # between the opening of a page and the sealing of the one before too
            check_each_row_is_drawn_from_one_page(view, need)
        inserted = view.counts().inserted
        check_counts(view, inserted)
        self.engine.recover()
        assert self.engine.recover() == 0
        check_nothing_leaked(view)
        check_rows(view)
        check_counts(view, inserted)
        check_each_row_is_drawn_from_one_page(view)
        pages = view.pages()
        mine = pages[(pages[:, w.PAGE_STREAM // 8] == 1) & (kinds(view) == w.SEALED)]
        written = int((mine[:, w.PAGE_TICK // 8] + mine[:, w.PAGE_COMMITTED // 8]).max())
        # all that was committed is drawn, each row from one page, up to the last row since the stream has ended
        ranges = anchor_ranges(view)[1]
        assert [tick for first, end, _ in ranges for tick in range(first, end)] == list(range(written))
        assert self.written <= written <= 7
        assert inserted == self.inserted + written
        self.written = written
        check_every_page_can_be_claimed(view)
        check_counts(view, inserted)


class WritingRagged(Writing):
    """The same in a table with a ragged field: the turn takes the values of the halo and of its kept final along."""

    table = "ragged"

    def program(self) -> None:
        client, view = self.attach()
        writer = StoreWriter(view)
        assert writer.turn() == 3
        writer.write(4, ends=True)
        functions = [native(one) for one in (protocol.claim, page_writer.turn, committing.commit, protocol.seal)]
        scratch = np.zeros(LONGEST, np.int64)
        put = native(ragged_values.put_value)
        owner = client._participants.number
        self.run(write_ragged, *functions, view.address, writer.address, owner, put, scratch.ctypes.data)


class Reopening(Scene):
    """A writer goes on in a page in which another's stream ended; that one died in the middle of a row that ends its episode."""

    must_meet = frozenset({"", "open"})
    written = 0

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        other = StoreWriter(self.view)
        assert other.turn() == 3
        other.write(2, ends=True)
        other.seal(ended=True)
        row = 3 * PAGE_ROWS + 2
        self.view.terminated[row] = self.view.truncated[row] = True
        self.view.meta["link"][row] = 3 << w.LINK_SHIFT
        self.keep()
        self.generation = int(self.view.pages()[3, w.PAGE_STATE // 8]) >> w.GENERATION_SHIFT

    def program(self) -> None:
        client, view = self.attach()
        writer = StoreWriter(view)
        functions = [native(one) for one in (first_page.reopen, committing.commit, protocol.seal)]
        put = native(ragged_values.put_value) if view.arenas else 0
        scratch = np.zeros(LONGEST, np.int64)
        assert client._participants.number == CHILD
        self.run(go_on, *functions, view.address, writer.address, put, scratch.ctypes.data)

    def check(self) -> None:
        view = self.view
        inserted = view.counts().inserted
        check_counts(view, inserted)
        self.engine.recover()
        assert self.engine.recover() == 0
        check_nothing_leaked(view)
        check_rows(view)
        check_counts(view, inserted)
        check_each_row_is_drawn_from_one_page(view)
        written = inserted - self.inserted
        assert self.written <= written <= 3
        self.written = written
        # the page is of its generation still, has the rows of both in one run, and ends its stream
        words = view.pages()[3]
        assert words[w.PAGE_STATE // 8] >> w.GENERATION_SHIFT == self.generation
        assert anchor_ranges(view)[1] == [(0, 2 + written, 3)]
        rows = slice(3 * PAGE_ROWS, 3 * PAGE_ROWS + 2 + written)
        assert view.meta["episode"][rows].tolist() == [0, 0, 1, 1, 1][: 2 + written]
        assert view.meta["step"][rows].tolist() == [0, 1, 0, 1, 2][: 2 + written]
        assert view.terminated[rows].tolist() == [False, True, False, False, False][: 2 + written]
        # and the next writer goes on in it as well, if there is room
        following = StoreWriter(view)
        at = entry(first_page.reopen)(following.address, 1, 1, 0)
        assert at == (3 * PAGE_ROWS + 2 + written if written <= 1 else -1)
        if at >= 0:
            following.write(1)
            following.seal(ended=True)
            check_rows(view)
        check_every_page_can_be_claimed(view)


class ReopeningRagged(Reopening):
    """The same in a table with a ragged field."""

    table = "ragged"


class GivingBack(Scene):
    """A writer claims the oldest page, finds that it is leased, gives it back, and takes the next."""

    # the page that is open is another writer's
    must_meet = frozenset({"open leased", "init+open leased"})

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        StoreWriter(self.view).turn()  # no page is free
        self._lease = self.view.lease(0)
        self._held = self.view.columns["obs"][:PAGE_ROWS].copy()
        self.keep()

    def restore(self) -> None:
        super().restore()
        self.view.columns["obs"][:PAGE_ROWS] = self._held

    def program(self) -> None:
        client, view = self.attach()
        self.run(claim_carelessly, native(protocol.claim), view.address, client._participants.number)

    def check(self) -> None:
        view, seat = self.view, self.engine._participants
        check_counts(view, self.inserted)
        self.engine.recover()
        check_counts(view, self.inserted)
        found = kinds(view)
        assert found[3] == w.OPEN
        assert np.isin(found[:3], (w.FREE, w.SEALED)).all()
        assert np.count_nonzero(hazards(view)) == 1
        assert hazards(view)[ENGINE].max() == 1
        claimed = [entry(protocol.claim)(view.address, seat.number, 0) for _ in range(3)]
        assert sorted(claimed) == [-1, 1, 2], f"the leased page was handed out: {claimed}"
        assert (view.columns["obs"][:PAGE_ROWS] == self._held).all()
        hazards(view)[:] = 0
        assert entry(protocol.claim)(view.address, seat.number, 0) == 0
        check_counts(view, self.inserted)


class Leasing(Scene):
    """A reader takes a lease and ends it."""

    must_meet = frozenset({"", " leased"})

    def program(self) -> None:
        _, view = self.attach()
        functions = [native(one) for one in (protocol.lease, protocol.end_lease)]
        generation = int(view.pages()[1, w.PAGE_STATE // 8]) >> w.GENERATION_SHIFT
        self.run(hold_and_let_go, *functions, view.address, 1, generation, hazard(view))

    def check(self) -> None:
        view = self.view
        at_death = hazards(view)[CHILD]
        assert np.count_nonzero(at_death) <= 1
        assert at_death.max() in {0, 2}  # page 1
        self.engine.recover()
        check_nothing_leaked(view)
        check_rows(view)
        check_every_page_can_be_claimed(view)


class Recovering(Scene):
    """Somebody takes back what a dead participant left: a stream between two pages, a claimed page, leases."""

    must_meet = frozenset({"init+open+open leased", "init+open leased", "open leased", " leased", ""})

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        with conduit.attach(engine.name) as first:
            assert first._participants.number == CHILD
            pid = os.fork()
            if pid == 0:
                try:
                    self._die(1)
                finally:
                    os._exit(1)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0
        assert (kinds(self.view) == [w.OPEN, w.INIT, w.SEALED, w.OPEN]).all()
        assert np.count_nonzero(hazards(self.view)[DEAD]) == 2
        self.keep()
        self.outcome: list[int] | None = None

    def _die(self, stream: int) -> None:
        client, view = self.attach()
        seat = client._participants
        assert seat.number == DEAD
        writer = StoreWriter(view)
        assert writer.stream == stream
        assert writer.turn() == 3
        writer.write(4)
        block = view.layout.blocks + 3 * w.LINE
        before = client._segment.words[block // 8]
        writer.turn()
        # the old page as it was before its seal: what a death between the two leaves
        client._segment.words[block // 8] = before
        client._segment.words[(block + w.PAGE_ENDED) // 8] = 0
        assert entry(protocol.claim)(view.address, seat.number, 0) == 1
        for page in (2, 3):
            generation = int(view.pages()[page, w.PAGE_STATE // 8]) >> w.GENERATION_SHIFT
            entry(protocol.lease)(view.address, page, generation, hazard(view, page))
        os._exit(0)

    def program(self) -> None:
        client, view = self.attach()
        assert client._participants.number == CHILD
        assert try_lock(client._segment.lock_fd, DEAD)
        functions = [native(one) for one in (recovery.recover, recovery.clear_hazards)]
        slots = int(view.descriptor[w.VIEW_HAZARDS // 8]) + 8 * HAZARDS_PER_PARTICIPANT * DEAD
        self.run(recover_dead, *functions, view.address, DEAD, slots, HAZARDS_PER_PARTICIPANT)

    def check(self) -> None:
        view = self.view
        check_counts(view, self.inserted)
        self.engine.recover()
        check_counts(view, self.inserted)
        check_nothing_leaked(view)
        check_rows(view)
        assert (kinds(view) == [w.FREE, w.FREE, w.SEALED, w.SEALED]).all()
        # as if nobody had died over it: the stream ends in its old page, and its four rows are drawn from there
        assert anchor_ranges(view)[1] == [(0, 4, 3)]
        check_every_page_can_be_claimed(view)


class PassingTheGates(Scene):
    """A participant has a row granted, writes and commits it, reserves a sample and delivers it."""

    table = "limited"
    must_meet = frozenset(
        {"open", "open granted", "open granted written", "open written", "open reserved", "open sampled"}
    )

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        # loaded once, and not again in every process that is killed
        Gate(self.view, 1, 1)
        for compiled in (
            rate_limiter.grant,
            committing.commit,
            rate_limiter.reserve,
            rate_limiter.deliver,
            protocol.claim,
            page_writer.turn,
        ):
            native(compiled)
        self.keep()

    def program(self) -> None:
        _, view = self.attach()
        writer = StoreWriter(view)
        writer.turn()
        writer.words[w.WRITER_SEAT // 8] = seat_line(view)
        gate = Gate(view, 1, 1)
        functions = [
            native(one) for one in (rate_limiter.grant, committing.commit, rate_limiter.reserve, rate_limiter.deliver)
        ]
        self.run(pass_the_gates, *functions, writer.address, gate._address)

    def at_death(self) -> str:
        counts = self.view.counts()
        # what is granted and written counts twice until the writer says so
        names = (("granted", counts.granted), ("written", counts.inserted - self.inserted))
        names += (("reserved", counts.reserved), ("sampled", counts.sampled))
        return "".join(
            [
                "open",
                *(
                    f" {name}"
                    for name, there in names
                    if there and not (name == "written" and counts.sampled + counts.reserved)
                ),
            ]
        )

    def check(self) -> None:
        before = self.view.counts()
        self.engine.recover()
        after = self.view.counts()
        assert (after.granted, after.reserved) == (0, 0)
        assert after.sampled == before.sampled <= 1
        assert after.inserted == before.inserted <= self.inserted + 1
        check_counts(self.view, before.inserted)
        check_nothing_leaked(self.view)


class Publishing(Scene):
    """A learner publishes the third version of the weights."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._slot = engine.policy("policy")
        for version in (1, 2):
            assert self._slot.publish({"w": np.full(8, version)}) == version
        self._slot.close()
        self.keep()

    def program(self) -> None:
        client, _ = self.attach()
        segment = client._segment
        layout = segment.layout.policies["policy"]
        assert try_lock(segment.lock_fd, LOCK_PUBLISHERS)
        functions = [native(one) for one in (protocol.begin_copy, protocol.finish_copy)]
        copy = segment.base + layout.copies[3 % 3]
        arguments = (copy, segment.base + layout.control, 3, copy + layout.offsets[0], 8)
        self.run(publish_weights, *functions, *arguments)

    def check(self) -> None:
        with conduit.attach(self.engine.name) as reader:
            slot = reader.policy("policy")
            weights = slot.poll()
            assert weights is not None
            assert weights.version in {2, 3}
            assert (weights.arrays["w"] == weights.version).all()
            following = slot.publish({"w": np.full(8, 77)})
            assert following == weights.version + 1
            with conduit.attach(self.engine.name) as other:
                again = other.policy("policy").poll()
                assert again is not None
                assert again.version == following
                assert (again.arrays["w"] == 77).all()


class Updating(Scene):
    """A learner updates priorities; another one has summed them before."""

    table = "prioritized"
    must_meet = frozenset({"", "some leaves, no count", "all leaves, no count", "some counts", "all counts"})

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        options = {"batch_size": 8, "min_rows": 1, "format": "numpy", "timeout": 0.0}
        self.loader = engine.loader("prioritized", sampling=conduit.Prioritized(), **options)
        # anchors of two pages
        self.ids = np.unique(np.concatenate([self.loader.next().ids.copy() for _ in range(20)]))
        assert len(self.ids) > 5
        self._sums = self.loader.sampler._tree.copy()
        self._leaves = self.view.priorities[self.ids & (1 << 40) - 1].copy()
        self.new = np.arange(1, len(self.ids) + 1).astype(np.uint32)

    def restore(self) -> None:
        super().restore()
        self.loader.sampler._tree[:] = self._sums

    def program(self) -> None:
        _, view = self.attach()
        sums = empty_marks(view.layout.pages, view.layout.page_rows)
        scratch = np.zeros(3 * len(self.ids), np.int64)
        scratch[2 * len(self.ids) :].view(np.uint32)[: len(self.ids)] = self.new
        words = (view.address, view.seat_line(), self.ids.ctypes.data, len(self.ids), scratch.ctypes.data, 1000)
        self.run(update_priorities, native(prioritized_update.store_leaves), sums.ctypes.data, *words)

    def at_death(self) -> str:
        stored = self.view.priorities[self.ids & (1 << 40) - 1] != self._leaves
        counted = int(self.view.pages()[:, w.PAGE_UPDATES // 8].sum())
        if counted:
            return "all counts" if counted == len(self.ids) else "some counts"
        return f"{'all' if stored.all() else 'some'} leaves, no count" if stored.any() else ""

    def check(self) -> None:
        self.engine.recover()
        self.loader.next().release()
        check_sums(self.loader.sampler, self.view)
        check_nothing_leaked(self.view)


@pytest.fixture
def engine(engine_name) -> Iterator[Engine]:
    table = conduit.Table(SCHEMA, capacity=1, page_rows=PAGE_ROWS, max_stack=2)
    weights = {"policy": {"w": np.zeros(8, np.int64)}}
    limited = replace(table, max_stack=1, limiter=conduit.SampleToInsertRatio(1.0, 1, (0.0, 16.0)))
    tables = {"replay": table, "ragged": replace(table, schema=RAGGED), "limited": limited}
    tables["prioritized"] = replace(table, priorities=conduit.Priorities())
    with Engine.create(engine_name, tables, policies=weights, max_participants=3) as made:
        assert [view.layout.pages for view in made._views.values()] == [4, 4, 4, 4]
        programs = (write, write_ragged, claim_carelessly, hold_and_let_go, recover_dead, publish_weights)
        for compiled in (store_observation, store_ragged, update_priorities, pass_the_gates, go_on, *programs):
            entry(compiled)
        yield made


SCENES = {
    "claim, turn, commit, seal": (Writing, 13),
    "the same with ragged values": (WritingRagged, 31),
    "reopen, commit, seal": (Reopening, 17),
    "the same where values are ragged": (ReopeningRagged, 29),
    "give back": (GivingBack, 7),
    "lease and its end": (Leasing, 2),
    "recovery": (Recovering, 5),
    "weights": (Publishing, 2),
    "the limiter's gates": (PassingTheGates, 61),
    "update of priorities": (Updating, 11),
}
"""Each with the step between the boundaries that the normal run takes, from a random one on."""


def sweep(scene, name, step):
    """Kill a scene's program at every `step`-th boundary and check what is left; returns how often it was killed."""
    boundary = random.randrange(step)
    killed = 0
    met = Counter[str]()
    complete = False
    while not complete:
        scene.restore()
        taken = stepping.Traced(scene.program).kill_after(boundary)
        complete = taken < boundary
        killed += not complete
        met[scene.at_death()] += 1
        try:
            scene.check()
        except AssertionError as error:
            error.add_note(f"killed after {taken} instructions")
            raise
        boundary += step
    print(f"{name}: killed at {killed} boundaries, of {taken}; met at death: {dict(met)}")
    if step == 1:
        assert met.keys() >= scene.must_meet
    return killed


@pytest.mark.parametrize("boundaries", ["some", pytest.param("all", marks=pytest.mark.torture)])
@pytest.mark.parametrize("name", SCENES)
def test_a_death_at_any_instruction_leaks_nothing_and_tears_nothing(engine, name, boundaries, record_property):
    kind, step = SCENES[name]
    record_property("boundaries", sweep(kind(engine), name, 1 if boundaries == "all" else step))


def test_an_update_that_is_stopped_at_any_instruction_touches_no_row_that_took_the_place(engine):
    """Whatever pages others reuse meanwhile, the rows in them keep the leaves that they were written with."""
    scene = Updating(engine)
    view = scene.view
    boundary, reused, kept = random.randrange(3), 0, 0
    complete = False
    while not complete:
        scene.restore()
        learner = stepping.Traced(scene.program)
        complete = learner.step(boundary) < boundary
        writer = StoreWriter(view)
        expected = {}
        for _ in range(view.layout.pages):
            page = entry(protocol.claim)(view.address, engine._participants.number, 0)
            if page < 0:
                kept += 1
                break
            entry(page_writer.turn)(writer.address, page)
            writer.write(4)
            start = page * PAGE_ROWS
            expected[page] = view.priorities[start : start + PAGE_ROWS].copy()
            reused += 1
        if not complete:
            learner.kill_after(1 << 20)
        for page, leaves in expected.items():
            start = page * PAGE_ROWS
            np.testing.assert_array_equal(view.priorities[start : start + PAGE_ROWS], leaves, err_msg=f"at {boundary}")
        boundary += 5
    assert reused > 0
    # a page that is just being updated is left alone
    assert kept > 0
