"""Processes that share an engine: however they are made, forked, or die, each holds what is its own and nothing else."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit.errors import (
    Forked,
    ParticipantsFull,
)
from conduit.native import memory
from conduit.store.format import words as w
from conduit.store.segment import participants
from conduit.store.segment.locks import held, try_lock, unlock
from conduit.store.segment.names import shm_name
from conduit.testing import rows
from conduit.testing.invariants import check_nothing_leaked, check_proving_rows, kinds
from conduit.testing.puppets import Puppet, attach, count_torn, detach, ended, forked, write_rows
from conduit.testing.torture_roles import small_table

BIG = conduit.Table(rows.SCHEMA, capacity=4000, page_rows=100)


@pytest.fixture
def engine(engine_name):
    weights = {"policy": {"w": np.zeros(3)}}
    with conduit.Engine.create(engine_name, {"replay": BIG}, policies=weights, max_participants=8) as made:
        yield made


def fill(client: conduit.Client, count: int) -> None:
    with client.writer("replay", keep_final=False) as writer:
        for _ in range(count):
            writer.append(obs=np.zeros(rows.WORDS, np.int64), action=0, reward=0.0)


def in_fork(function, *arguments) -> None:
    """Run a function in a forked child; its AssertionErrors and others fail the test."""
    assert ended(forked(lambda: function(*arguments)), 120) == 0


def segment_path(name: str) -> Path:
    return Path("/dev/shm" + shm_name(name))


# -- start methods


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_writers_and_readers_share_an_engine_however_they_were_started(engine, method):
    with Puppet(method) as one, Puppet(method) as other, Puppet(method) as reader:
        crew = (one, other, reader)
        for puppet in crew:
            puppet.tell(attach, engine.name)
        assert len({puppet.answer() for puppet in crew}) == 3
        one.tell(write_rows, 700, 1)
        other.tell(write_rows, 500, 2)
        reader.tell(count_torn, 20)
        assert (one.answer(), other.answer(), reader.answer()) == (700, 500, 0)
        for puppet in crew:
            puppet.do(detach)
            assert puppet.end() == 0
    view = engine._views["replay"]
    check_nothing_leaked(view)
    assert view.rows_visible() == 1200
    check_proving_rows(view)


def test_four_processes_write_and_read_at_once(engine):
    with Puppet() as one, Puppet() as two, Puppet() as three, Puppet() as four:
        for puppet in (one, two, three, four):
            puppet.do(attach, engine.name)
        for environment, puppet in enumerate((one, two)):
            puppet.tell(write_rows, 3000, environment)
        for seed, puppet in enumerate((three, four)):
            puppet.tell(count_torn, 200, 64, seed)
        assert [puppet.answer() for puppet in (one, two, three, four)] == [3000, 3000, 0, 0]
    check_proving_rows(engine._views["replay"])


WIDE = conduit.Table(
    conduit.Schema([conduit.Field("obs", "int64", (512,), observation=True), conduit.Field("action", "int64")]),
    capacity=2000,
    page_rows=384,
    num_envs=64,
)
"""Ticks of 256 KiB: they are stored past the caches."""

_WRITE_WIDE = """
import itertools, sys
import numpy as np
import conduit
with conduit.attach(sys.argv[1], timeout=20) as client:
    writer = client.writer("replay", num_envs=64, autoreset="same_step")
    print("ready", flush=True)
    for tick in itertools.count():
        numbers = 64 * tick + np.arange(64)
        obs = np.repeat(numbers[:, None], 512, axis=1)
        writer.append(obs=obs, action=numbers, terminated=numbers % 97 == 0, final=-obs)
"""


def test_rows_that_are_stored_past_the_caches_are_whole_when_they_are_seen_also_of_writers_that_are_killed(engine_name):
    assert memory.STREAM_FROM <= 64 * 512 * 8
    with conduit.Engine.create(engine_name, {"replay": WIDE}, max_participants=8) as engine:
        batches = 0
        with engine.loader("replay", batch_size=64, format="numpy", seed=0, timeout=20.0) as loader:
            for _ in range(4):
                command = [sys.executable, "-c", _WRITE_WIDE, engine_name]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
                    assert writer.stdout.readline() == "ready\n"
                    ends = time.monotonic() + 0.4
                    while time.monotonic() < ends:
                        batch = loader.next()
                        number, batches = batch["action"], batches + 1
                        assert (batch["obs"] == number[:, None]).all()
                        following = np.where(batch["terminated"], -number, number + 64)
                        assert (batch["next_obs"] == following[:, None]).all()
                    writer.kill()
            assert loader.stats.redrawn > 0  # rows were overwritten while they were read
        assert batches > 50
        engine.recover()
        check_nothing_leaked(engine._views["replay"])


# -- forks


def test_everything_inherited_through_a_fork_refuses_and_a_fresh_attach_works(engine):
    writer = engine.writer("replay", keep_final=False)
    vector = engine.writer("replay", num_envs=2, autoreset="next_step")
    fill(engine, 150)
    writer.append(obs=np.zeros(rows.WORDS, np.int64), action=0, reward=0.0)
    loader = engine.loader("replay", batch_size=4, format="numpy")
    batch = loader.next()
    slot = engine.policy()
    slot.publish({"w": np.ones(3)})
    lease = engine._views["replay"].lease(0)
    before = engine._views["replay"].pages()

    def child() -> None:
        for call in (
            lambda: engine.writer("replay"),
            lambda: engine.loader("replay", batch_size=4),
            lambda: writer.append(obs=np.ones(rows.WORDS, np.int64), action=0, reward=0.0),
            lambda: vector.append(
                obs=np.ones((2, rows.WORDS), np.int64), action=np.ones(2, np.int64), reward=np.ones(2)
            ),
            lambda: writer.step().__enter__(),
            lambda: writer.rollout(2),
            writer.unchecked,
            writer.flush,
            loader.next,
            lambda: slot.publish({"w": np.zeros(3)}),
            slot.poll,
            engine.recover,
            lambda: lease.column("obs"),
            lambda: engine._views["replay"].lease(1),
        ):
            with pytest.raises(Forked, match=f"attach.*{engine.name}"):
                call()
        for thing in (writer, vector, lease, loader, slot, engine):
            (thing.end if thing is lease else thing.close)()
        assert batch["obs"].shape == (4, rows.WORDS)
        with conduit.attach(engine.name) as client:
            assert client._participants.number != engine._participants.number
            assert client.policy().poll().version == 1
            fill(client, 3)

    in_fork(child)
    view = engine._views["replay"]
    after = view.pages()
    mine = (before[:, w.PAGE_STATE // 8] & w.KIND_MASK) == w.OPEN
    assert mine.sum() == 1
    assert (after[mine] == before[mine]).all()
    assert view.lease(0).generation == lease.generation
    writer.append(obs=np.zeros(rows.WORDS, np.int64), action=0, reward=0.0)
    assert slot.publish({"w": np.zeros(3)}) == 2
    assert segment_path(engine.name).exists()


def test_the_exit_of_a_forked_child_leaves_its_parents_engine_alone(engine):
    fill(engine, 5)
    code = "fork the interpreter, and let the child run its normal exit"
    script = f"""
import os, sys, conduit  # {code}
from conduit.testing.torture_roles import small_table
engine = conduit.Engine.create({engine.name + "-x"!r}, {{"replay": small_table()}})
writer = engine.writer("replay")
pid = os.fork()
if pid == 0:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
with conduit.attach({engine.name + "-x"!r}) as client:
    assert not client._segment.closed
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")
    assert not segment_path(engine.name + "-x").exists()


def test_a_dead_parents_seat_is_free_at_once_although_its_child_lives(engine):
    view = engine._views["replay"]
    read_end, write_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        client = conduit.attach(engine.name)
        writer = client.writer("replay", keep_final=False)
        writer.append(obs=np.zeros(rows.WORDS, np.int64), action=0, reward=0.0)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.write(write_end, f"{client._participants.number} {child}".encode())
        time.sleep(60)
        os._exit(0)
    number, child = map(int, os.read(read_end, 100).split())
    os.close(read_end)
    os.close(write_end)
    try:
        assert held(engine._segment.lock_fd, number, 1)
        assert engine.recover() == 0
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert Path(f"/proc/{child}").exists()
        assert not held(engine._segment.lock_fd, number, 1)
        assert engine.recover() == 1
        check_nothing_leaked(view)
        assert view.rows_visible() == 1
    finally:
        os.kill(child, signal.SIGKILL)


# -- attach and exit


CYCLES = """
import gc, os, sys
import numpy as np
import conduit

name, count = sys.argv[1], int(sys.argv[2])
with conduit.attach(name) as client:  # loads the kernels, once
    with client.writer("replay", keep_final=False) as writer, client._views["replay"].lease(0):
        writer.append(obs=np.zeros(64, np.int64), action=0, reward=0.0)
    client.loader("replay", batch_size=4, format="numpy").next()
gc.freeze()  # what is there before the fork makes an exit five times as slow
for cycle in range(count):
    pid = os.fork()
    if pid == 0:
        client = conduit.attach(name)
        if cycle % 4 == 1:
            writer = client.writer("replay", keep_final=False)
            writer.append(obs=np.zeros(64, np.int64), action=0, reward=0.0)
        elif cycle % 4 == 2:
            batch = client.loader("replay", batch_size=4, format="numpy").next()
            lease = client._views["replay"].lease(0)
        elif cycle % 4 == 3:
            client.close()
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_a_hundred_attach_and_exit_cycles_say_nothing_and_leave_the_segment(engine):
    fill(engine, 50)
    command = [sys.executable, "-W", "error", "-c", CYCLES, engine.name]
    done = subprocess.run([*command, "100"], capture_output=True, text=True, timeout=170, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert segment_path(engine.name).exists()
    engine.recover()
    check_nothing_leaked(engine._views["replay"])
    assert [one.number for one in engine._participants.list()] == [engine._participants.number]
    fill(engine, 50)


@pytest.mark.parametrize("ending", ["pass", "client.close()", "raise SystemExit(0)", "del client"])
def test_a_process_may_end_without_closing_anything(engine, ending):
    fill(engine, 50)
    script = f"""
import conduit, numpy as np
client = conduit.attach({engine.name!r})
writer = client.writer("replay", num_envs=2, autoreset="next_step")
writer.append(obs=np.zeros((2, 64), np.int64), action=np.zeros(2, np.int64), reward=np.zeros(2))
loader = client.loader("replay", batch_size=4, format="numpy")
batch = next(loader)
lease = client._views["replay"].lease(0)
slot = client.policy()
slot.publish({{"w": np.zeros(3)}})
{ending}
"""
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    engine.recover()
    check_nothing_leaked(engine._views["replay"])


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(shm_name(name)[1:])


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_descriptors_and_mappings_do_not_grow_with_rows_pages_or_use(engine_name, backing):
    counts = []
    for capacity, page_rows in ((32, 8), (20_000, 8), (20_000, 1000)):
        gc.collect()
        before = open_files()
        table = conduit.Table(rows.SCHEMA, capacity=capacity, page_rows=page_rows)
        with conduit.Engine.create(engine_name, {"replay": table}, backing=backing) as engine:
            created = open_files() - before
            with conduit.attach(engine_name) as client:
                fill(client, 3 * page_rows)
                loader = client.loader("replay", batch_size=4, format="numpy", buffers=8)
                batches = [loader.next() for _ in range(5)]
                leases = [client._views["replay"].lease(page) for page in (0, 1)]
                counts.append((created, open_files() - before, mappings(engine_name)))
                for one in leases:
                    one.end()
            del batches, loader, client, leases
        del engine, one
        gc.collect()
        assert open_files() == before
        assert mappings(engine_name) == 0
    assert len(set(counts)) == 1
    assert counts[0][2] == 2


# -- threads


def test_two_writers_in_two_threads_of_one_process_keep_their_rows_apart(engine):
    failures = []

    def work(environment: int) -> None:
        try:
            own = type("Own", (), {"client": engine})()
            write_rows(own, 4000, environment)
            own.writer.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(environment,)) for environment in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    view = engine._views["replay"]
    check_nothing_leaked(view)
    check_proving_rows(view)
    assert view.rows_written() == 8000


def test_threads_that_recover_at_once_do_not_let_go_of_each_others_dead(engine, monkeypatch):
    """The lock descriptor is the process's: a second thread would be granted the dead one's lock, and then release it."""
    with Puppet() as writer:
        number = writer.do(attach, engine.name)
        writer.do(write_rows, 5)
        writer.kill()
    seat = engine._participants
    inside, go_on = threading.Event(), threading.Event()
    original = participants.Participants._recover

    def slow(self, which):
        inside.set()
        assert go_on.wait(10)
        return original(self, which)

    monkeypatch.setattr(participants.Participants, "_recover", slow)
    first = threading.Thread(target=seat.recover_dead)
    first.start()
    assert inside.wait(10)
    second = threading.Thread(target=seat.recover_dead)
    second.start()
    assert [one.alive for one in seat.list()] == [True, False]
    second.join(0.2)
    fd = os.open(f"/proc/self/fd/{engine._segment.lock_fd}", os.O_RDWR)
    try:
        assert held(fd, number, 1)
    finally:
        os.close(fd)
    go_on.set()
    first.join()
    second.join()
    monkeypatch.undo()
    check_nothing_leaked(engine._views["replay"])


# -- seats


def test_a_client_more_than_there_are_seats_is_refused_until_one_leaves_or_dies(engine_name):
    with conduit.Engine.create(engine_name, {"replay": small_table()}, max_participants=2) as engine:
        with conduit.attach(engine_name):
            with pytest.raises(ParticipantsFull, match=r"all 2 are taken.*max_participants"):
                conduit.attach(engine_name)
            files = open_files()
            with pytest.raises(ParticipantsFull):
                conduit.attach(engine_name)
            assert open_files() == files
        with Puppet() as puppet:
            assert puppet.do(attach, engine_name) == 1
            with pytest.raises(ParticipantsFull):
                conduit.attach(engine_name)
            puppet.kill()
            with conduit.attach(engine_name) as client:
                assert client._participants.number == 1
        assert engine._participants.list()[0].alive


def test_a_client_gets_the_seat_of_a_dead_one_that_somebody_is_recovering(engine_name):
    with conduit.Engine.create(engine_name, {"replay": small_table()}, max_participants=2) as engine:
        with Puppet() as puppet:
            number = puppet.do(attach, engine_name)
            puppet.kill()
        other = os.open(f"/proc/self/fd/{engine._segment.lock_fd}", os.O_RDWR)
        try:
            assert try_lock(other, number)
            stopped = threading.Timer(0.3, unlock, (other, number))
            stopped.start()
            with conduit.attach(engine_name) as client:
                assert client._participants.number == number
            stopped.join()
        finally:
            os.close(other)


def test_an_adopter_without_a_seat_leaves_the_engine_as_it_was(engine_name):
    with Puppet() as owner:
        owner.do(_create_with_seats, engine_name, 2)
        with conduit.attach(engine_name):
            with Puppet() as other:
                owner.kill()
                other.do(attach, engine_name, "stay")
                with pytest.raises(ParticipantsFull):
                    conduit.Engine.adopt(engine_name)
                assert segment_path(engine_name).exists()
            with conduit.Engine.adopt(engine_name):
                pass
    assert not segment_path(engine_name).exists()


def _create_with_seats(own, name, seats):
    own.client = conduit.Engine.create(name, {"replay": small_table()}, max_participants=seats)


# -- who is there


def test_participants_are_listed_with_the_kernels_word_on_who_is_alive(engine):
    with Puppet() as writer:
        number = writer.do(attach, engine.name)
        writer.do(write_rows, 30)
        alive = {one.number: one for one in engine._participants.list()}
        assert (alive[number].alive, alive[number].pid, alive[number].rows_written) == (True, writer.pid, 30)
        writer.kill()
        dead = {one.number: one for one in engine._participants.list()}
        assert not dead[number].alive
        states = engine._views["replay"].pages()[:, w.PAGE_STATE // 8]
        assert [int(word) >> w.OWNER_SHIFT & w.OWNER_MASK for word in states if word & w.KIND_MASK == w.OPEN] == [
            number
        ]
    assert engine.recover() == 1
    assert [one.number for one in engine._participants.list()] == [engine._participants.number]
    assert (kinds(engine._views["replay"]) != w.OPEN).all()
