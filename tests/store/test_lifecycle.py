"""An engine's life and death: killed owners, adopters, cleaning while others live, creators killed halfway."""

import gc
import os
import re
import signal
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit.errors import Closed, EngineExists, EngineNotFound, Leftover, Overwritten
from conduit.store.format import words as w
from conduit.store.segment import leftovers, participants, segment
from conduit.store.segment.names import note_path, shm_name
from conduit.testing import rows
from conduit.testing.invariants import check_nothing_leaked, check_proving_rows, hazards, kinds
from conduit.testing.puppets import Puppet, attach, create, detach, ended, forked, write_rows
from conduit.testing.torture_roles import small_table

BIG = conduit.Table(rows.SCHEMA, capacity=4000, page_rows=100)


@pytest.fixture
def engine(engine_name):
    with conduit.Engine.create(engine_name, {"replay": BIG}, max_participants=8) as made:
        yield made


def fill(client: conduit.Client, count: int) -> None:
    with client.writer("replay", keep_final=False) as writer:
        for _ in range(count):
            writer.append(obs=np.zeros(rows.WORDS, np.int64), action=0, reward=0.0)


def segment_path(name: str) -> Path:
    return Path("/dev/shm" + shm_name(name))


# -- the engine's death


def test_clients_that_stay_go_on_when_the_engines_process_is_killed_and_another_adopts_it(engine_name):
    with Puppet() as owner, Puppet() as writer:
        owner.do(create, engine_name, BIG)
        with pytest.raises(EngineExists, match="attach to it") as refused:
            conduit.Engine.create(engine_name, {"replay": BIG})
        assert not isinstance(refused.value, Leftover)
        with pytest.raises(EngineExists, match="its owner is alive"):
            conduit.Engine.adopt(engine_name)
        writer.do(attach, engine_name, "stay")
        writer.do(write_rows, 150)
        with conduit.attach(engine_name, on_owner_exit="stay") as reader:
            owner.kill()
            assert writer.do(write_rows, 150) == 300
            assert reader.loader("replay", batch_size=32, format="numpy").next()["obs"].shape == (32, rows.WORDS)
            with conduit.attach(engine_name, on_owner_exit="stay"):
                pass
            with pytest.raises(EngineExists):
                conduit.Engine.create(engine_name, {"replay": BIG})
            kept, why = leftovers.remove_if_dead(engine_name)
            assert not kept
            assert re.match(
                rf"its owner is dead, and other processes are attached to it; .*adopt\('{engine_name}'\)", why
            )
            with conduit.Engine.adopt(engine_name) as adopted:
                assert adopted._views["replay"].rows_visible() == 300
                writer.do(write_rows, 10)
            with pytest.raises(Closed, match="closed by its owner"):
                reader.loader("replay", batch_size=1)
        with pytest.raises(EngineNotFound):
            conduit.attach(engine_name)
    assert not segment_path(engine_name).exists()


def test_a_dead_engine_without_clients_is_a_leftover_that_can_be_adopted_or_removed(engine_name):
    for way in ("adopt", "remove"):
        with Puppet() as owner:
            owner.do(create, engine_name, BIG)
            owner.do(write_rows, 60)
            owner.kill()
        with pytest.raises(Leftover, match=rf"adopt\('{engine_name}'\).*conduit clean {engine_name}"):
            conduit.Engine.create(engine_name, {"replay": BIG})
        if way == "adopt":
            with conduit.Engine.adopt(engine_name) as engine:
                check_nothing_leaked(engine._views["replay"])
                assert engine._views["replay"].rows_visible() == 60
                assert check_proving_rows(engine._views["replay"]) == 60
                fill(engine, 5)
        else:
            removed, why = leftovers.remove_if_dead(engine_name)
            assert removed
            assert re.fullmatch(r"its owner is dead, and no process is attached to it; [\d,]+ bytes freed", why)
        assert not segment_path(engine_name).exists()
    assert leftovers.remove_if_dead(engine_name) == (False, "no such engine")


def test_an_engine_whose_owner_died_while_closing_can_be_adopted(engine_name):
    with Puppet() as owner:
        owner.do(create, engine_name, BIG)
        owner.do(write_rows, 60)
        owner.do(_mark_closed)
        owner.kill()
    with pytest.raises(EngineNotFound, match="closing"):
        conduit.attach(engine_name)
    with conduit.Engine.adopt(engine_name) as engine:
        fill(engine, 5)
        with conduit.attach(engine_name) as client:
            fill(client, 5)


def _mark_closed(own):
    own.client._segment.mark_closed()


def test_closing_the_engine_ends_its_clients_and_not_what_they_hold(engine_name):
    engine = conduit.Engine.create(engine_name, {"replay": BIG})
    fill(engine, 60)
    with conduit.attach(engine_name) as client:
        batch = client.loader("replay", batch_size=8, format="numpy").next()
        lease = client._views["replay"].lease(0)
        obs = lease.column("obs")
        engine.close()
        engine.close()
        with pytest.raises(Closed):
            client.writer("replay")
        assert (obs == 0).all()
        assert (batch["obs"] == 0).all()
        lease.end()
    with pytest.raises(Closed):
        client.writer("replay")
    with pytest.raises(Closed):
        lease.column("obs")


def test_a_lease_gives_nothing_more_out_once_its_client_has_closed(engine):
    fill(engine, 60)
    client = conduit.attach(engine.name)
    lease = client._views["replay"].lease(0)
    client.close()
    with pytest.raises(Closed):
        lease.column("obs")
    with pytest.raises(Overwritten):
        engine._views["replay"].lease(0, generation=lease.generation + 1)


def test_what_dies_with_its_client_in_one_cycle_does_not_touch_pages_that_are_no_longer_its(engine):
    """Collecting a cycle may give the seat's lock back before it ends the writer and the lease in it."""
    view = engine._views["replay"]
    fill(engine, 500)
    client = conduit.attach(engine.name)
    writer = client.writer("replay", keep_final=False)
    writer.append(obs=np.zeros(rows.WORDS, np.int64), action=0, reward=0.0)
    (page,) = np.flatnonzero(kinds(view) == w.OPEN)
    cycle = [client, writer, client._views["replay"].lease(0)]
    cycle.append(cycle)
    taken = []

    def release_and_be_overtaken(locks):
        assert locks.seat[w.PROCESS_NUMBER // 8] >= 0
        assert kinds(view)[page] == w.OPEN
        locks.close()
        assert engine.recover() == 1
        taken.append(engine._views["replay"].lease(1))  # the hazard slots of another seat
        # others claim the page and take the seat, and a lease with its first slot
        engine_writer = engine.writer("replay", keep_final=False)
        while not taken[1:]:
            engine_writer.append(obs=np.zeros(rows.WORDS, np.int64), action=0, reward=0.0)
            if np.flatnonzero(kinds(view) == w.OPEN).tolist() == [page]:
                taken.append(engine_writer)
        heir = conduit.attach(engine.name)
        taken.append((heir, heir._views["replay"].lease(2)))

    # called before the older watch of the same object, and so before the writer's and the lease's
    weakref.finalize(client._participants, release_and_be_overtaken, client._segment._locks)
    number = client._participants.number
    del client, writer, cycle
    gc.collect()
    heir, lease = taken[2]
    assert heir._participants.number == number
    assert kinds(view)[page] == w.OPEN
    assert np.count_nonzero(hazards(view)[number]) == 1
    lease.end()
    heir.close()


# -- clean


def test_clean_does_not_touch_an_engine_that_lives_while_engines_come_and_go(engine_name):
    with Puppet() as sweeper, Puppet() as second:
        sweeper.tell(_sweep, engine_name, 3.0)
        second.tell(_sweep, engine_name, 3.0)
        end = time.monotonic() + 2.5
        made = 0
        while time.monotonic() < end:
            with conduit.Engine.create(engine_name, {"replay": small_table()}) as engine:
                with conduit.attach(engine_name) as client:
                    assert client._segment.identity == engine._segment.identity
                assert engine._segment.is_current()
                made += 1
        assert made > 20
        for puppet in (sweeper, second):
            assert puppet.answer() > 20


def _sweep(own, name, seconds):
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        leftovers.remove_if_dead(name)
        count += 1
    return count


def test_clean_leaves_an_engine_alone_that_took_the_name_of_the_one_it_meant(engine_name, monkeypatch):
    with Puppet() as owner:
        owner.do(create, engine_name, BIG)
        owner.kill()
    made = []
    original = leftovers.try_lock

    def replaced_meanwhile(fd, byte, length=1):
        if not made:
            made.append(None)
            assert leftovers.remove_if_dead(engine_name)[0]
            made[0] = conduit.Engine.create(engine_name, {"replay": BIG})
        return original(fd, byte, length)

    monkeypatch.setattr(leftovers, "try_lock", replaced_meanwhile)
    assert leftovers.remove_if_dead(engine_name) == (False, "it was removed meanwhile")
    monkeypatch.undo()
    with made[0] as engine:
        assert engine._segment.is_current()


# -- death while an engine is made


POINTS = {
    "before the lock": (segment, "try_lock"),
    "before the memory": (segment, "allocate"),
    "in the memory": (os, "posix_fallocate"),
    "before the header": (segment, "_write_header"),
    "in the header": (segment.time, "time_ns"),
    "before the magic word": (segment, "_digest"),
    "before the seat": (participants, "try_lock"),
    "in the seat": (participants.Participants, "_recover"),
}


@pytest.mark.parametrize("backing", ["shm", "memfd"])
@pytest.mark.parametrize("point", POINTS)
def test_a_creator_killed_halfway_does_not_stand_in_the_way(engine_name, point, backing):
    where, what = POINTS[point]

    def be_killed():
        setattr(where, what, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        conduit.Engine.create(engine_name, {"replay": small_table()}, backing=backing)

    assert ended(forked(be_killed), 60) == -signal.SIGKILL
    if backing == "shm" and "seat" in point:  # the segment was whole already
        with pytest.raises(Leftover):
            conduit.Engine.create(engine_name, {"replay": small_table()}, backing=backing)
        assert leftovers.remove_if_dead(engine_name)[0]
    with conduit.Engine.create(engine_name, {"replay": small_table()}, backing=backing):
        pass


def test_a_creator_killed_at_any_moment_does_not_stand_in_the_way(engine_name):
    for delay in np.linspace(0.0, 0.006, 25):
        pid = os.fork()
        if pid == 0:
            conduit.Engine.create(engine_name, {"replay": BIG})
            signal.pause()
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        try:
            conduit.Engine.create(engine_name, {"replay": BIG}).close()
        except Leftover:
            assert leftovers.remove_if_dead(engine_name)[0]
            conduit.Engine.create(engine_name, {"replay": BIG}).close()
        assert not segment_path(engine_name).exists()


def test_of_many_that_create_one_name_at_once_one_wins_and_the_rest_are_told(engine_name):
    for backing in ("shm", "memfd"):
        with Puppet() as one, Puppet() as two, Puppet() as three:
            crew = (one, two, three)
            for puppet in crew:
                puppet.tell(create, engine_name, small_table(), backing)
            won = []
            for puppet in crew:
                try:
                    puppet.answer()
                    won.append(puppet)
                except Leftover:
                    raise
                except EngineExists:
                    pass
            assert len(won) == 1
            with conduit.attach(engine_name):
                pass
            won[0].do(detach)


def test_an_attach_waits_for_an_engine_that_is_being_made(engine_name):
    with Puppet() as waiting, Puppet() as owner:
        waiting.tell(_attach_in_time, engine_name)
        time.sleep(0.1)
        owner.do(create, engine_name, BIG)
        assert waiting.answer() == 1
        owner.do(detach)


def _attach_in_time(own, name):
    own.client = conduit.attach(name, timeout=20.0)
    return own.client._participants.number


# -- memfd


def test_a_memfd_engine_is_attached_by_name_and_goes_with_its_owner(engine_name):
    with Puppet() as owner, Puppet() as writer:
        owner.do(create, engine_name, BIG, "memfd")
        assert not segment_path(engine_name).exists()
        assert note_path(engine_name).exists()
        with pytest.raises(EngineExists):
            conduit.Engine.create(engine_name, {"replay": BIG}, backing="memfd")
        with pytest.raises(EngineExists):
            conduit.Engine.create(engine_name, {"replay": BIG})
        assert leftovers.remove_if_dead(engine_name) == (False, "its owner is alive")
        writer.do(attach, engine_name, "stay")
        writer.do(write_rows, 100)
        with conduit.attach(engine_name, on_owner_exit="stay") as reader:
            assert reader._segment.backing == "memfd"
            check_proving_rows(reader._views["replay"])
            assert reader._views["replay"].rows_visible() == 100
            owner.kill()
            assert writer.do(write_rows, 100) == 200
            assert reader._views["replay"].rows_visible() == 200
            with pytest.raises(EngineNotFound, match="create it with conduit"):
                conduit.attach(engine_name)
            with pytest.raises(EngineNotFound):
                conduit.Engine.adopt(engine_name)
    removed, why = leftovers.remove_if_dead(engine_name)
    assert removed
    assert "its memfd went with the process" in why
    assert not note_path(engine_name).exists()


def test_a_dead_memfd_engines_note_does_not_stand_in_the_way(engine_name):
    with Puppet() as owner:
        owner.do(create, engine_name, BIG, "memfd")
        owner.kill()
    assert note_path(engine_name).exists()
    for backing in ("memfd", "shm"):
        made = conduit.Engine.create(engine_name, {"replay": BIG}, backing=backing)
        with made as engine, conduit.attach(engine_name) as client:
            assert client._segment.identity == engine._segment.identity
        assert not note_path(engine_name).exists()
