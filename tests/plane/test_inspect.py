"""Looking at engines: what is counted, that a look disturbs nothing, and that no content of a segment makes it fail."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit.plane.attach import tell_role
from conduit.plane.observe import inspect
from conduit.testing.puppets import Puppet, attach

SHM = Path("/dev/shm")


def path_of(name):
    return SHM / f"cdt.{os.getuid()}.{name}"


def schema():
    return conduit.Schema.from_example({"obs": np.zeros(3, np.float32), "action": 0, "reward": 0.0})


def write(writer, ticks, envs):
    for k in range(ticks):
        writer.append(
            obs=np.full((envs, 3), k, np.float32),
            action=np.zeros(envs, np.int64),
            reward=np.zeros(envs, np.float32),
            terminated=np.zeros(envs, bool),
            truncated=np.zeros(envs, bool),
        )


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/self/maps").read_text().count("cdt.")


def test_a_look_takes_no_seat_no_descriptor_and_no_mapping(engine_name):
    table = conduit.Table(schema(), capacity=512)
    with conduit.Engine.create(engine_name, {"replay": table}, max_participants=1):
        before = descriptors()
        content = path_of(engine_name).read_bytes()
        status = inspect.inspect(engine_name)
        assert descriptors() == before
        assert path_of(engine_name).read_bytes() == content
        assert [one.pid for one in status.participants] == [os.getpid()]
        assert status.max_participants == 1
        with pytest.raises(conduit.errors.ParticipantsFull):
            conduit.attach(engine_name)


def test_pages_rows_and_bytes_are_counted_as_the_table_has_them(engine_name):
    envs, page_rows = 4, 64
    table = conduit.Table(schema(), capacity=400, page_rows=page_rows, max_stack=3, max_n_step=2, num_envs=envs)
    with conduit.Engine.create(engine_name, {"first": table, "second": table}) as engine:
        with engine.writer("second", num_envs=envs, autoreset="next_step") as writer:
            write(writer, 205, envs)
            one, two = inspect.inspect(engine_name).tables
            view = engine._views["second"]
            assert (one.name, two.name) == ("first", "second")
            assert (one.rows_visible, one.pages.free, one.bytes_per_transition) == (0, 11, one.bytes_per_row)
            assert two.bytes_per_row == 12 + 8 + 4 + 2 + 16
            assert two.capacity == 11 * page_rows  # 448 rows, of which a page adds 64 - 16, and one page more
            assert two.rows_visible == view.rows_visible()
            assert two.rows_written == 205 * envs
            assert two.rows_evicted == two.rows_written - two.rows_visible
            # each page but a stream's first opens with (3 - 1) + 2 ticks of the page before
            pages = two.pages
            assert (pages.free, pages.preparing, pages.open) == (0, 0, 1)
            assert pages.sealed == 10
            halo = 11 * 4 * envs
            assert two.halo_share == pytest.approx(halo / (two.rows_visible + halo))
            assert two.bytes_per_transition == pytest.approx(two.bytes_per_row / (1 - two.halo_share))
        assert inspect.inspect(engine_name).tables[1].pages.open == 0


def test_kept_final_observations_count_towards_the_bytes_of_a_transition(engine_name):
    table = conduit.Table(schema(), capacity=512, page_rows=128)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine, engine.writer("replay") as writer:
        for k in range(40):
            obs = np.full(3, k, np.float32)
            ends = k % 2 == 1
            writer.append(obs=obs, action=0, reward=0.0, terminated=ends, final=obs if ends else None)
        (status,) = inspect.inspect(engine_name).tables
        assert (status.rows_visible, status.halo_share) == (40, 0.0)
        assert status.bytes_per_transition == 1.5 * status.bytes_per_row


def test_leases_and_pages_are_counted_for_their_holder(engine_name):
    table = conduit.Table(schema(), capacity=512, page_rows=64)
    with conduit.Engine.create(engine_name, {"other": table, "replay": table}) as engine:
        with engine.writer("replay", num_envs=2, autoreset="next_step") as writer:
            write(writer, 100, 2)
            view = engine._views["replay"]
            with view.lease(0), view.lease(0), view.lease(1):
                status = inspect.inspect(engine_name)
                (me,) = status.participants
                assert (me.pages, me.leases, me.rows, me.writes, me.alive) == (1, 3, 200, True, True)
                assert [one.pages.leased for one in status.tables] == [0, 2]
        (me,) = inspect.inspect(engine_name).participants
        assert (me.pages, me.leases, me.rows) == (0, 0, 200)


def test_policies_show_their_version_and_publisher(engine_name):
    weights = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), np.int64)}
    with conduit.Engine.create(engine_name, {}, policies={"one": weights, "two": weights}) as engine:
        engine.policy("two").publish(weights)
        engine.policy("two").publish(weights)
        one, two = inspect.inspect(engine_name).policies
        assert (one.version, one.arrays, one.bytes, one.publisher_alive) == (0, 2, 32, False)
        assert (two.version, two.publisher_alive) == (2, True)


def test_an_engine_is_closing_once_its_owner_said_so(engine_name):
    with conduit.Engine.create(engine_name, {"replay": conduit.Table(schema(), capacity=64)}) as engine:
        engine._segment.mark_closed()
        assert inspect.inspect(engine_name).state == "closing"
    with pytest.raises(conduit.errors.EngineNotFound):
        inspect.inspect(engine_name)


def test_an_engine_that_is_being_made_is_starting_and_kept(engine_name):
    from conduit.store.segment.segment import LOCK_CREATOR, try_lock  # the moment between the file and its header

    path = path_of(engine_name)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for size in (0, 100, 8192):
            os.truncate(path, size)
            assert inspect.inspect(engine_name).state == "dead"
            assert try_lock(fd, LOCK_CREATOR)
            status = inspect.inspect(engine_name)
            assert (status.state, status.in_use, status.bytes) == ("starting", True, size)
            assert not inspect.clean(engine_name)[0].removed
            os.close(fd)
            fd = os.open(path, os.O_RDWR)
    finally:
        os.close(fd)
        path.unlink()


@pytest.mark.parametrize("make", ["link", "folder", "pipe", "bad name"])
def test_what_is_no_segment_is_not_listed(engine_name, make):
    path = path_of(engine_name)
    if make == "bad name":
        path = path_of(f"{engine_name} with blanks")
    {
        "link": lambda: path.symlink_to("/etc/hostname"),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "bad name": lambda: path.write_bytes(b"x"),
    }[make]()
    try:
        assert not [name for name in inspect.engines() if name.startswith(engine_name)]
        if make == "bad name":
            for call in (inspect.inspect, inspect.clean):
                with pytest.raises(conduit.errors.EngineNotFound):
                    call(engine_name)
        else:
            found = inspect.inspect(engine_name)
            assert found.state == "damaged"
            assert f"Expected a file at {path}" in found.problem
            (done,) = inspect.clean(engine_name)
            assert not done.removed
            assert "got something else: remove it" in done.why
        assert os.path.lexists(path)
    finally:
        path.rmdir() if make == "folder" else path.unlink()


def test_no_damage_makes_a_look_fail_and_none_is_taken_for_a_sound_engine_of_other_size(engine_name):
    table = conduit.Table(schema(), capacity=64, page_rows=16)
    with conduit.Engine.create(engine_name, {"replay": table}, max_participants=2) as engine:
        with engine.writer("replay") as writer:
            writer.append(obs=np.zeros(3, np.float32), action=0, reward=0.0)
        whole = path_of(engine_name).read_bytes()
    rng = random.Random(0)
    name, path = f"{engine_name}-copy", path_of(f"{engine_name}-copy")
    states = set()
    try:
        for round_ in range(600):
            damaged = bytearray(whole)
            for _ in range(rng.choice((1, 3, 40))):
                where = rng.randrange(64 if round_ % 3 == 0 else len(damaged))
                damaged[where] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
            if round_ % 5 == 0:
                del damaged[rng.randrange(len(damaged)) :]
            path.write_bytes(damaged)
            path.chmod(0o600)
            status = inspect.inspect(name)
            states.add(status.state)
            assert status.bytes == len(damaged)
            assert status.state == "dead" or status.problem
            assert all(0 <= one.rows_visible <= one.capacity for one in status.tables)
    finally:
        path.unlink()
    assert states >= {"dead", "damaged"}


def test_a_foreign_file_is_kept_and_named(engine_name):
    path = path_of(engine_name)
    path.write_bytes(b"somebody else's" * 1000)
    path.chmod(0o600)
    try:
        assert inspect.inspect(engine_name).state == "damaged"
        (done,) = inspect.clean(engine_name)
        assert not done.removed
        assert str(path) in done.why
        assert path.exists()
    finally:
        path.unlink()


def test_a_queue_shows_what_waits_what_is_claimed_by_whom_and_what_came_again(engine_name):
    schema = conduit.Schema([conduit.Field("x", "int64")])
    tables = {
        "rows": conduit.Table.queue(schema, 100),
        "rollouts": conduit.Table.queue(schema, 100, rollout_length=4),
        "replay": conduit.Table(schema, 100),
    }
    with conduit.Engine.create(engine_name, tables) as engine:
        for name in ("rows", "rollouts"):
            writer = engine.writer(name)
            for number in range(7):
                writer.append(x=number)
        held = engine.consumer("rows").next(max_ticks=5)
        rows, rollouts, replay = (one.queue for one in inspect.inspect(engine_name).tables)
        assert replay is None
        assert (rows.waiting, rows.unfinished, rows.claimed, rows.rollout_length) == (2, 0, 5, None)
        assert [(one.pid, one.rows) for one in rows.claims] == [(os.getpid(), 5)]
        assert (rollouts.waiting, rollouts.unfinished, rollouts.claimed, rollouts.claims) == (4, 3, 0, ())
        with Puppet() as consumer:
            consumer.do(attach, engine_name)
            consumer.do(_claim)
            consumer.kill()
        assert inspect.inspect(engine_name).tables[1].queue.claimed == 4
        engine.recover()
        rollouts = inspect.inspect(engine_name).tables[1].queue
        assert (rollouts.waiting, rollouts.claimed, rollouts.delivered_again) == (4, 0, 1)
        held.ack()
        assert inspect.inspect(engine_name).tables[0].queue.claims == ()


def _claim(own):
    own.claim = own.client.consumer("rollouts", format="numpy").next()


def test_a_participants_roles_are_what_it_has_opened_and_what_its_process_says(engine_name):
    schema = conduit.Schema.from_example({"obs": np.zeros(2, np.float32), "action": 0})
    tables = {"replay": conduit.Table(schema, 100), "queue": conduit.Table.queue(schema, 100)}
    with conduit.Engine.create(engine_name, tables) as engine, conduit.attach(engine_name) as client:

        def roles():
            return [one.roles for one in inspect.inspect(engine_name).participants]

        assert roles() == [("owner",), ()]
        client.writer("replay")
        client.loader("replay", batch_size=1, format="numpy")
        engine.consumer("queue", format="numpy")
        assert roles() == [("owner", "consumer"), ("writer", "loader")]
        tell_role("launcher")
        assert roles() == [("owner", "consumer", "launcher"), ("writer", "loader", "launcher")]
