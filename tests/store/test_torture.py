"""What kills, stops and dead lease holders may not do to a table, on the product's own writers, loaders and leases."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import conduit
from conduit.native.jit import entry, kernel
from conduit.native.memory import load_acquire, peek_i64, poke_i64, store_relaxed
from conduit.store.format import words as w
from conduit.store.pages import protocol
from conduit.testing import rows
from conduit.testing.invariants import check_nothing_leaked, check_proving_rows, hazard, hazards, kinds
from conduit.testing.puppets import Puppet, attach, lease, write_rows
from conduit.testing.torture_roles import ROLES, small_table

SECONDS = float(os.environ.get("CONDUIT_TORTURE_SECONDS", "120"))
SEED = int(os.environ.get("CONDUIT_TORTURE_SEED", "1"))


@pytest.mark.parametrize("seconds", [12.0, pytest.param(SECONDS, marks=pytest.mark.torture, id="long")])
def test_nothing_is_torn_and_nothing_leaks_under_random_kills(engine_name, seconds):
    command = [sys.executable, "-m", "conduit.testing.torture", "--name", engine_name]
    done = subprocess.run(
        [*command, "--seconds", str(seconds), "--seed", str(SEED)],
        capture_output=True,
        text=True,
        timeout=seconds + 120,
        check=False,
    )
    print(done.stdout)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert report["torn_after"] == 0
    # the control: rows were torn in the readers' copies, and validation found every one
    assert report["torn_before"] > 0
    assert report["overwritten"] > 0
    for count in ("written", "valid", "delivered", "leases", "recovered", "rows_at_end"):
        assert report[count] > 0, count
    assert report["kills"].keys() == {role.__name__ for role in ROLES}
    assert report["pages"]["init"] == report["pages"]["open"] == 0


@pytest.fixture
def engine(engine_name):
    with conduit.Engine.create(engine_name, {"replay": small_table()}) as made:
        yield made


def owner_of(word: int) -> int:
    return word >> w.OWNER_SHIFT & w.OWNER_MASK


def test_a_stopped_writer_keeps_its_page_and_goes_on_where_it_was(engine):
    view = engine._views["replay"]
    with Puppet() as stopped, Puppet() as busy:
        number = stopped.do(attach, engine.name)
        stopped.do(write_rows, 7, 1)
        (page,) = np.flatnonzero(kinds(view) == w.OPEN)
        word = int(view.pages()[page, w.PAGE_STATE // 8])
        assert owner_of(word) == number
        stopped.stop()
        busy.do(attach, engine.name)
        # the table is overwritten many times over, and everybody looks for the dead
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            busy.do(write_rows, 2 * view.layout.rows, 2)
            assert engine.recover() == 0
        assert view.pages()[page, w.PAGE_STATE // 8] == word
        assert view.pages_recovered == 0
        stopped.go_on()
        assert stopped.do(write_rows, 5, 1) == 12
        mine = view.columns["obs"][page * 40 : page * 40 + 12, :2]
        assert mine.tolist() == [[1, number] for number in range(12)]
        check_proving_rows(view)


def test_a_writer_that_is_stopped_for_good_costs_one_page_until_it_is_killed(engine):
    view = engine._views["replay"]
    with Puppet() as stopped:
        stopped.do(attach, engine.name)
        stopped.do(write_rows, 7)
        stopped.stop()
        seat = view.check_open()
        claimed = [entry(protocol.claim)(view.address, seat.number, 0) for _ in range(view.layout.pages)]
        assert claimed[-1] == -1
        assert len(set(claimed)) == view.layout.pages
        for page in claimed[:-1]:
            entry(protocol.free)(view.address, page)
        stopped.kill()
    assert engine.recover() == 1
    check_nothing_leaked(view)
    assert view.rows_visible() == 7


def test_a_killed_writers_committed_rows_stay_and_its_stream_ends(engine):
    view = engine._views["replay"]
    with Puppet() as writer:
        writer.do(attach, engine.name)
        writer.do(write_rows, 20)
        assert view.rows_visible() == 20
        writer.kill()
    assert engine.recover() == 1
    assert kinds(view).tolist().count(w.SEALED) == 1
    assert view.rows_visible() == 20
    assert check_proving_rows(view) == 20
    with engine.loader("replay", batch_size=16, format="numpy", timeout=0) as loader:
        batch = loader.next()
        assert (batch["obs"][:, 1] < 19).all()  # the last row has no next observation


def test_a_killed_lease_holders_page_is_claimed_again(engine):
    view = engine._views["replay"]
    with Puppet() as writer:
        writer.do(attach, engine.name)
        writer.do(write_rows, 100)
        with Puppet() as holder:
            number = holder.do(attach, engine.name)
            generation = holder.do(lease, 0)
            before = view.columns["obs"][:40].copy()
            writer.do(write_rows, 3 * view.layout.rows)
            assert view.pages()[0, w.PAGE_STATE // 8] >> w.GENERATION_SHIFT == generation
            assert (view.columns["obs"][:40] == before).all()
            holder.kill()
        assert hazards(view)[number].max() == 1
        engine.recover()
        assert not hazards(view).any()
        writer.do(write_rows, 3 * view.layout.rows)
        assert view.pages()[0, w.PAGE_STATE // 8] >> w.GENERATION_SHIFT > generation


LOOKS = 10


@kernel("int64(int64, int64, int64)", nogil=True)
def claim_and_write(table, owner, tries):
    """Claim the only page there is, write one number all over its first row, seal it; returns how often."""
    got = 0
    column = peek_i64(peek_i64(table + w.VIEW_COLUMNS))
    for number in range(tries):
        page = protocol.claim(table, owner, 1)
        if page < 0:
            continue
        got += 1
        for i in range(rows.WORDS):
            poke_i64(column + 8 * i, number)
        store_relaxed(protocol.block_of(table, page) + w.PAGE_COMMITTED, 1)
        protocol.publish_open(table, page)
        protocol.seal(table, page, 1)
    return got


@kernel("int64(int64, int64, int64, int64)", nogil=True)
def lease_and_look(table, hazard, tries, leases):
    """Lease that page and see whether its row is, and stays, of one number; returns how often it was not."""
    changed = 0
    column = peek_i64(peek_i64(table + w.VIEW_COLUMNS))
    for _ in range(tries):
        generation = load_acquire(protocol.block_of(table, 0) + w.PAGE_STATE) >> w.GENERATION_SHIFT
        if protocol.lease(table, 0, generation, hazard) < 0:
            continue
        poke_i64(leases, peek_i64(leases) + 1)
        number = load_acquire(column)
        same = True
        for i in range(LOOKS * rows.WORDS):
            same &= load_acquire(column + 8 * (i % rows.WORDS)) == number
        changed += not same
        protocol.end_lease(table, hazard)
    return changed


def test_a_claim_and_a_lease_at_the_same_instant_never_both_succeed(engine_name):
    table = conduit.Table(rows.SCHEMA, capacity=1, page_rows=8)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        view = engine._views["replay"]
        seat = engine._participants
        pages = [entry(protocol.claim)(view.address, seat.number, 0) for _ in range(view.layout.pages)]
        view.columns["obs"][0] = 0
        view.segment.words[(view.layout.blocks + w.PAGE_COMMITTED) // 8] = 1
        entry(protocol.seal)(view.address, pages[0], 1)
        leases = np.zeros(1, np.int64)
        entry(claim_and_write)(view.address, seat.number, 0)
        with Puppet() as claimer:
            claimer.do(attach, engine_name)
            got = 0
            for _ in range(20):
                claimer.tell(_claim_and_write, 50_000)
                changed = entry(lease_and_look)(view.address, hazard(view), 100_000, leases.ctypes.data)
                assert changed == 0
                got += claimer.answer()
        assert leases[0] > 1000
        assert got > 1000


def _claim_and_write(own, tries):
    view = own.client._views["replay"]
    return entry(claim_and_write)(view.address, own.client._participants.number, tries)


def test_writers_wait_for_a_page_that_a_dead_holder_leased_only_until_it_is_noticed(engine_name):
    table = conduit.Table(rows.SCHEMA, capacity=24, page_rows=8)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine, Puppet() as holder:
        view = engine._views["replay"]
        writer = engine.writer("replay", keep_final=False, timeout=10.0)
        obs = np.zeros(rows.WORDS, np.int64)
        for _ in range(32):
            writer.append(obs=obs, action=0, reward=0.0)
        holder.do(attach, engine_name)
        for page in np.flatnonzero(kinds(view) == w.SEALED).tolist():
            # one lease after another; none is ended
            holder.do(_lease_more, page)
        with pytest.raises(conduit.errors.Busy):
            _fill(engine.writer("replay", keep_final=False, on_full="raise"), 1)
        holder.kill()
        begun = time.monotonic()
        _fill(writer, 40)
        assert time.monotonic() - begun < 1.0
        assert not hazards(view).any()


def _lease_more(own, page):
    own.leases = [*getattr(own, "leases", []), own.client._views["replay"].lease(page)]


def _fill(writer, count):
    for _ in range(count):
        writer.append(obs=np.zeros(rows.WORDS, np.int64), action=0, reward=0.0)


def test_each_page_names_its_owner_while_it_is_written(engine):
    view = engine._views["replay"]
    with Puppet() as one, Puppet() as other:
        numbers = {one.do(attach, engine.name), other.do(attach, engine.name)}
        one.do(write_rows, 5, 1)
        other.do(write_rows, 5, 2)
        states = view.pages()[:, w.PAGE_STATE // 8]
        assert {owner_of(int(word)) for word in states if word & w.KIND_MASK == w.OPEN} == numbers
