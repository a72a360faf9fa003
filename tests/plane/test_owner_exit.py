"""A client ends with its engine's owner: every wait and every form of writing says so, or goes on where it was told to stay."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import conduit
from conduit.errors import Closed, DataTimeout, EngineExists, Forked, OwnerGone
from conduit.store.segment import owner_watch
from conduit.testing.puppets import Puppet, attach, detach

SCHEMA = conduit.Schema(
    [conduit.Field("obs", "float32", (3,), observation=True), conduit.Field("reward", "float32", reward=True)]
)
RAGGED = conduit.Schema([conduit.Field("tokens", "int64", (8,), ragged=True)])
STEP = {"obs": np.zeros(3, np.float32), "reward": 0.0}
VECTOR = {"obs": np.zeros((2, 3), np.float32), "reward": np.zeros(2, np.float32)}
TABLES = {
    "replay": conduit.Table(SCHEMA, capacity=20_000, page_rows=2000, num_envs=2, statistics=("obs",)),
    "weighted": conduit.Table(SCHEMA, capacity=2000, priorities=conduit.Priorities()),
    "limited": conduit.Table(
        SCHEMA, capacity=20_000, page_rows=2000, limiter=conduit.SampleToInsertRatio(1.0, 10, 10.0)
    ),
    "ragged": conduit.Table(RAGGED, capacity=2000),
    "empty": conduit.Table(SCHEMA, capacity=2000),
    "rows": conduit.Table.queue(SCHEMA, capacity=200, page_rows=50),
    "rollouts": conduit.Table.queue(SCHEMA, capacity=64, rollout_length=8),
}
"""No page of the replay tables is turned by what these tests write in a second: nobody looks at the engine there."""


def make(own: SimpleNamespace, name: str) -> None:
    """Create the engine, with rows to draw in "replay" and "weighted"."""
    own.client = conduit.Engine.create(
        name, TABLES, policies={"policy": {"w": np.zeros(3)}, "other": {"w": np.zeros(3)}}
    )
    for table in ("replay", "weighted"):
        with own.client.writer(table) as writer:
            for _ in range(20):
                writer.append(**STEP)
    own.client.policy().publish({"w": np.ones(3)})


def again(call, every=0.002):
    """Repeat a call, for ever."""
    while True:
        call()
        time.sleep(every)


# -- waits: each has no deadline of its own


def wait_for_a_batch(client):
    client.loader("empty", batch_size=4, format="numpy", timeout=None).next()


def wait_for_a_mixed_batch(client):
    client.mixed_loader({"replay": 0.5, "empty": 0.5}, batch_size=4, format="numpy", timeout=None).next()


def wait_for_a_limited_batch(client):
    client.loader("limited", batch_size=4, format="numpy", timeout=None).next()


def wait_for_a_buffer(client):
    loader = client.loader("replay", batch_size=4, format="numpy", timeout=None, buffers=2, on_busy="wait")
    kept = [loader.next() for _ in range(2)]
    loader.next()
    assert kept


def wait_for_rows_of_a_queue(client):
    client.consumer("rows", format="numpy", timeout=None).next()


def wait_for_room_in_a_queue(client):
    writer = client.writer("rows", timeout=None)
    while True:
        writer.append(**STEP)


def wait_for_a_page(client):
    writers = [client.writer("weighted", timeout=None) for _ in range(200)]
    while True:
        for writer in writers:
            writer.append(**STEP)


def wait_at_the_limiter(client):
    writer = client.writer("limited", timeout=None)
    while True:
        writer.append(**STEP)


def wait_for_weights(client):
    slot = client.policy()
    while True:
        slot.wait(timeout=None)


WAITS = (
    wait_for_a_batch,
    wait_for_a_mixed_batch,
    wait_for_a_limited_batch,
    wait_for_a_buffer,
    wait_for_rows_of_a_queue,
    wait_for_room_in_a_queue,
    wait_for_a_page,
    wait_at_the_limiter,
    wait_for_weights,
)


# -- writing


def append(client):
    writer = client.writer("replay")
    again(lambda: writer.append(**STEP))


def append_a_batch(client):
    writer = client.writer("replay", num_envs=2, autoreset="next_step")
    again(lambda: writer.append(**VECTOR))


def append_what_is_converted(client):
    writer = client.writer("replay")
    again(lambda: writer.append(obs=[0.0, 1.0, 2.0], reward=np.float64(1.0)))


def append_ragged(client):
    writer = client.writer("ragged")
    again(lambda: writer.append(tokens=np.arange(5)))


def append_with_a_priority(client):
    writer = client.writer("weighted")
    again(lambda: writer.append(**STEP, priority=2.0))


def append_with_statistics(client):
    writer = client.writer("replay", statistics=True)
    try:
        again(lambda: writer.append(**STEP))
    finally:
        writer.close()


def append_and_publish_late(client):
    writer = client.writer("replay", ingestion=conduit.CommitEvery(500))
    again(lambda: writer.append(**STEP))


def step(client):
    writer = client.writer("replay")

    def one():
        with writer.step() as row:
            row.obs[:] = 1.0
            row.reward = 0.0

    again(one)


def rollout(client):
    writer = client.writer("replay")

    def one():
        with writer.rollout(4) as slab:
            slab.obs[:] = 1.0
            slab.reward[:] = 0.0

    again(one)


def extend(client):
    writer = client.writer("replay")
    again(lambda: writer.extend({"obs": np.zeros((4, 3), np.float32), "reward": np.zeros(4, np.float32)}))


def unchecked(client):
    writer = client.writer("replay")
    with writer.unchecked() as handle:
        row = handle.row
        while True:
            handle.obs[row] = 1.0
            handle.reward[row] = 0.0
            row = handle.commit()
            if row >= handle.rows:
                row = handle.row
            time.sleep(0.002)


def append_rollouts(client):
    writer = client.writer("rollouts")
    consumer = client.consumer("rollouts", format="numpy")

    def one():
        writer.append(**STEP)
        claim = consumer.poll()
        if claim is not None:
            claim.ack()

    again(one)


WRITES = (
    append,
    append_a_batch,
    append_what_is_converted,
    append_ragged,
    append_with_a_priority,
    append_with_statistics,
    append_and_publish_late,
    append_rollouts,
    step,
    rollout,
    extend,
    unchecked,
)


# -- calls that do not wait


def draw(client):
    loader = client.loader("replay", batch_size=4, format="numpy")
    again(loader.next)


def update_priorities(client):
    loader = client.loader("weighted", batch_size=4, format="numpy", sampling=conduit.Prioritized())
    ids = loader.next().ids
    again(lambda: loader.update_priorities(ids, np.ones(4)))


def claim(client):
    again(client.consumer("rows", format="numpy").poll)


def poll_weights(client):
    again(client.policy().poll)


def publish_weights(client):
    again(lambda: client.policy("other").publish({"w": np.zeros(3)}))


def scan(client):
    again(lambda: list(client.table("replay").scan()))


def update_statistics(client):
    again(lambda: client.table("replay").statistics.update(obs=np.zeros((2, 3))))


def open_writers(client):
    again(lambda: client.writer("empty").close())


def read_limits(client):
    again(lambda: client.table("limited").limiter.counts)


CALLS = (
    draw,
    update_priorities,
    claim,
    poll_weights,
    publish_weights,
    scan,
    update_statistics,
    open_writers,
    read_limits,
)


def work(own: SimpleNamespace, what) -> None:
    """Do it until it ends; the client can be closed then, and is."""
    try:
        what(own.client)
    finally:
        own.client.close()


def names(ones):
    return pytest.mark.parametrize("what", ones, ids=lambda one: one.__name__)


def killed_under(what, engine_name, **options):
    """Kill an owner a moment after another process has begun with something, and return what comes of it."""
    with Puppet() as owner, Puppet() as client:
        owner.do(make, engine_name)
        client.do(attach, engine_name, *options.values())
        client.tell(work, what)
        time.sleep(0.3)
        owner.kill()
        client.answer()


@pytest.fixture
def removed(engine_name):
    """The engine's name is free afterwards."""
    yield
    conduit.Engine.adopt(engine_name).close()


@names(WAITS)
def test_a_wait_without_a_deadline_ends_with_the_engines_owner(engine_name, removed, what):
    with pytest.raises(
        OwnerGone, match=rf"owner of engine '{engine_name}'.*adopt\('{engine_name}'\).*on_owner_exit='stay'"
    ):
        killed_under(what, engine_name)


@names(WRITES)
def test_no_form_of_writing_outlives_the_engines_owner(engine_name, removed, what):
    with pytest.raises(OwnerGone):
        killed_under(what, engine_name)


@names(CALLS)
def test_no_other_call_goes_on_without_the_engines_owner(engine_name, removed, what):
    with pytest.raises(OwnerGone):
        killed_under(what, engine_name)


def closed_under(what, engine_name):
    with Puppet() as owner, Puppet() as client:
        owner.do(make, engine_name)
        client.do(attach, engine_name, "stay")
        client.tell(work, what)
        time.sleep(0.3)
        owner.do(detach)
        client.answer()


@names((*WAITS, *WRITES))
def test_an_engine_that_is_closed_ends_waits_and_writing_also_of_clients_that_stay(engine_name, what):
    with pytest.raises(Closed):
        closed_under(what, engine_name)


# -- those who stay


def write_some(own, count):
    if not hasattr(own, "writer"):
        own.writer = own.client.writer("replay")
    for _ in range(count):
        own.writer.append(**STEP)
    return own.client._views["replay"].rows_visible()


def wait_shortly(own):
    own.client.loader("empty", batch_size=4, format="numpy", timeout=0.5).next()


def test_a_client_that_stays_writes_and_waits_without_an_owner_and_goes_on_under_the_next_one(engine_name):
    with Puppet() as owner, Puppet() as client:
        owner.do(make, engine_name)
        client.do(attach, engine_name, "stay")
        assert client.do(write_some, 10) == 30
        owner.kill()
        with pytest.raises(DataTimeout):
            client.do(wait_shortly)
        assert client.do(write_some, 10) == 40
        with conduit.Engine.adopt(engine_name) as engine:
            assert client.do(write_some, 10) == 50
            assert engine.loader("replay", batch_size=4, format="numpy").next()["obs"].shape == (4, 3)
            with conduit.attach(engine_name) as late:
                late.writer("replay").append(**STEP)
        with pytest.raises(Closed, match="closed by its owner"):
            client.do(work, append)


def test_a_client_ends_with_the_owner_that_it_attached_under_however_fast_another_one_adopts(engine_name):
    with Puppet() as owner, Puppet() as ending, Puppet() as staying:
        owner.do(make, engine_name)
        ending.do(attach, engine_name)
        staying.do(attach, engine_name, "stay")
        owner.kill()
        with conduit.Engine.adopt(engine_name):
            with pytest.raises(OwnerGone):
                ending.do(work, append)
            before = staying.do(write_some, 0)
            assert staying.do(write_some, 10) == before + 10
            ending.do(attach, engine_name)
            assert ending.do(write_some, 10) == before + 20


def test_an_owner_that_is_stopped_is_there(engine_name):
    with Puppet() as owner, Puppet() as client:
        owner.do(make, engine_name)
        client.do(attach, engine_name)
        owner.stop()
        with pytest.raises(DataTimeout):
            client.do(wait_shortly)
        assert client.do(write_some, 10) == 30
        owner.go_on()
        owner.do(detach)


def test_rows_that_were_committed_before_the_owner_died_stay_and_none_is_half_written(engine_name):
    with Puppet() as owner, Puppet() as client:
        owner.do(make, engine_name)
        client.do(attach, engine_name)
        client.tell(work, rollout)
        time.sleep(0.3)
        owner.kill()
        with pytest.raises(OwnerGone):
            client.answer()
        with conduit.Engine.adopt(engine_name) as engine:
            visible = engine._views["replay"].rows_visible() - 20
            assert visible > 0
            assert visible % 4 == 0
            written = [(part.columns["obs"] == 1.0).all(1).sum() for part in engine.table("replay").scan()]
            assert sum(written) == visible


def end_badly(own):
    """Write, wait until the owner is gone, and see what can still be closed."""
    writer = own.client.writer("replay", statistics=True)
    consumer = own.client.consumer("rows", format="numpy")
    queue_writer = own.client.writer("rows")
    for _ in range(5):
        writer.append(**STEP)
        queue_writer.append(**STEP)
    held = consumer.next()
    loader = own.client.loader("replay", batch_size=4, format="numpy")
    batch = loader.next()
    with pytest.raises(OwnerGone):
        again(loader.next)
    with pytest.raises(OwnerGone):
        held.ack()
    with pytest.raises(OwnerGone):
        own.client.writer("replay")
    assert held["obs"].shape == (5, 1, 3)
    assert batch["obs"].shape == (4, 3)
    for thing in (writer, queue_writer, consumer, loader, own.client):
        thing.close()
        thing.close()


def test_what_a_client_holds_can_be_read_and_closed_without_an_owner_and_is_there_for_the_next(engine_name):
    with Puppet() as owner, Puppet() as client:
        owner.do(make, engine_name)
        before = owner.do(count_values)
        client.do(attach, engine_name)
        client.tell(end_badly)
        time.sleep(0.5)
        owner.kill()
        client.answer()
        with conduit.Engine.adopt(engine_name) as engine:
            assert engine._views["replay"].rows_visible() == 25
            assert engine.table("replay").statistics.read("obs").count == before + 5
            # it was not acknowledged
            claim = engine.consumer("rows", format="numpy").next(timeout=5.0)
            assert claim.ticks == 5
            assert claim.delivered_before
            assert engine.recover() == 0


def count_values(own):
    return own.client.table("replay").statistics.read("obs").count


# -- attaching


def test_nobody_attaches_under_a_dead_owner_unless_it_stays(engine_name):
    with Puppet() as owner:
        owner.do(make, engine_name)
        owner.kill()
    for timeout in (0.0, 0.2):
        with pytest.raises(OwnerGone, match=rf"its owner is dead.*adopt\('{engine_name}'\)"):
            conduit.attach(engine_name, timeout)
    with conduit.attach(engine_name, on_owner_exit="stay") as client:
        client.writer("replay").append(**STEP)
    conduit.Engine.adopt(engine_name).close()


def test_an_attach_waits_for_an_owner_that_lives(engine_name):
    with Puppet() as owner, Puppet() as client:
        owner.do(make, engine_name)
        owner.kill()
        client.tell(attach_in_time, engine_name)
        time.sleep(0.2)
        with conduit.Engine.adopt(engine_name):
            client.answer()
            assert client.do(write_some, 5) == 25


def attach_in_time(own, name):
    own.client = conduit.attach(name, timeout=30.0)


@pytest.mark.parametrize("given", ["Raise", None, True, "go on"])
def test_another_word_than_raise_or_stay_is_refused(engine_name, given):
    with pytest.raises(conduit.errors.ConfigError, match=r"on_owner_exit 'raise' or 'stay'"):
        conduit.attach(engine_name, on_owner_exit=given)


# -- the thread that looks


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


def count_threads(own, name):
    found = [threads()]
    with conduit.attach(name), conduit.attach(name, on_owner_exit="stay"):
        found.append(threads())
        pid = os.fork()
        if pid == 0:
            code = threads()
            with conduit.attach(name):
                code += 10 * threads()
            os._exit(code)
        found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        found.append(threads())
    end = time.monotonic() + 30
    while threads() != found[0] and time.monotonic() < end:
        time.sleep(0.01)
    found.append(threads())
    return found


def test_one_thread_looks_for_all_clients_of_a_process_none_is_forked_and_none_is_left(engine_name):
    with Puppet() as owner, Puppet() as client:
        owner.do(make, engine_name)
        before, attached, child, behind, after = client.do(count_threads, engine_name)
        assert (attached, behind, after) == (before + 1, before + 1, before)
        assert child == 21
        owner.do(detach)


def test_a_process_that_owns_its_engine_starts_no_thread_for_its_own_clients(engine_name):
    with conduit.Engine.create(engine_name, TABLES) as engine:
        before = threads()
        client = conduit.attach(engine_name)
        assert threads() == before
        writer = client.writer("replay")
        writer.append(**STEP)
        engine.close()
        with pytest.raises(Closed, match="closed by its owner"):
            writer.append(**STEP)
        client.close()
    assert not owner_watch._running


def fork_and_die(own, name):
    """An owner forks, and its child, which has inherited everything, goes on."""
    make(own, name)
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return pid


def test_an_owners_child_does_not_keep_it_alive_and_a_child_of_a_client_attaches_anew(engine_name):
    with Puppet() as owner, Puppet() as client:
        child = owner.do(fork_and_die, engine_name)
        try:
            client.do(attach, engine_name)
            client.tell(write_in_a_child, engine_name)
            time.sleep(0.3)
            owner.kill()
            assert client.answer() == "Forked OwnerGone"
        finally:
            os.kill(child, signal.SIGKILL)
        with conduit.Engine.adopt(engine_name):
            pass


def write_in_a_child(own, name):
    reading, writing = os.pipe()
    writer = own.client.writer("replay")
    pid = os.fork()
    if pid == 0:
        said = []
        try:
            writer.append(**STEP)
        except Forked:
            said.append("Forked")
        try:
            append(conduit.attach(name))
        except OwnerGone:
            said.append("OwnerGone")
        os.write(writing, " ".join(said).encode())
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 100).decode()
    os.close(reading)
    os.waitpid(pid, 0)
    with pytest.raises(OwnerGone):
        again(lambda: writer.append(**STEP))
    return said


def test_the_owner_is_refused_by_name_while_it_lives(engine_name):
    with Puppet() as owner:
        owner.do(make, engine_name)
        with pytest.raises(EngineExists, match=engine_name):
            conduit.Engine.adopt(engine_name)
        owner.do(detach)


def test_a_look_that_finds_nobody_while_it_is_being_ended_just_ends(monkeypatch):
    """Who ends it has taken it out of those that run; it must neither fail nor come back."""
    monkeypatch.setattr(owner_watch, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(owner_watch, "_look", lambda: False)
    looking = owner_watch._Looking()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(looking._run).result(10)
    assert looking not in owner_watch._running
    looking.end()
