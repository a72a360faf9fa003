"""The name of an engine whose owner is dead: who goes on with it, who begins anew, who is told what, and who wins."""

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit.errors import (
    BadSegment,
    CheckpointError,
    Closed,
    ConfigError,
    EngineExists,
    Leftover,
    NoSpace,
    SchemaMismatch,
)
from conduit.plane.observe import inspect
from conduit.store.format.layout import HEADER_VERSION
from conduit.store.segment import allocation, leftovers, memory
from conduit.store.segment.names import shm_name
from conduit.testing import rows
from conduit.testing.invariants import check_nothing_leaked
from conduit.testing.puppets import Puppet, attach, create, detach, write_rows
from conduit.testing.torture_roles import small_table

BIG = conduit.Table(rows.SCHEMA, capacity=4000, page_rows=100)
TABLES = {"replay": BIG}


def segment_path(name: str) -> Path:
    return Path("/dev/shm" + shm_name(name))


@pytest.fixture
def dead(engine_name):
    """The name of an engine of 60 rows whose owner was killed."""
    with Puppet() as owner:
        owner.do(create, engine_name, BIG)
        owner.do(write_rows, 60)
        owner.kill()
    yield engine_name
    inspect.clean(engine_name) if segment_path(engine_name).exists() else None


def test_a_program_that_is_started_again_goes_on_with_its_rows(dead):
    for before in (60, 65):
        with Puppet() as owner:
            owner.do(create_again, dead, {"exist_ok": True})
            assert owner.do(rows_there) == before
            owner.do(add_five)
            owner.kill()
    with conduit.Engine.create(dead, TABLES, exist_ok=True) as engine:
        assert engine._views["replay"].rows_visible() == 70
        check_nothing_leaked(engine._views["replay"])
    assert not segment_path(dead).exists()


def create_again(own, name, options, table=BIG):
    own.client = conduit.Engine.create(name, {"replay": table}, **options)


def rows_there(own):
    return own.client._views["replay"].rows_visible()


def add_five(own):
    with own.client.writer("replay", keep_final=False) as writer:
        for _ in range(5):
            writer.append(obs=np.zeros(rows.WORDS, np.int64), action=0, reward=0.0)


@pytest.mark.parametrize("options", [{}, {"exist_ok": True}, {"replace": True}], ids=str)
def test_a_free_name_is_made_whatever_may_be_there(engine_name, options):
    with conduit.Engine.create(engine_name, TABLES, **options) as engine:
        assert engine._views["replay"].rows_visible() == 0


@pytest.mark.parametrize("options", [{}, {"exist_ok": True}, {"replace": True}], ids=str)
def test_a_living_owners_name_is_never_taken(engine_name, options):
    with Puppet() as owner:
        owner.do(create, engine_name, BIG)
        for _ in range(2):
            with pytest.raises(EngineExists, match=rf"'{engine_name}'.*its owner is alive; attach to it") as refused:
                conduit.Engine.create(engine_name, TABLES, **options)
            assert not isinstance(refused.value, Leftover)
            owner.stop()  # it holds its lock
        owner.go_on()
        owner.do(write_rows, 10)
        owner.do(detach)


def test_an_engine_that_is_replaced_is_empty_and_its_memory_is_free(dead):
    before = segment_path(dead).stat()
    with conduit.Engine.create(dead, {"replay": small_table()}, replace=True) as engine:
        assert engine._views["replay"].rows_visible() == 0
        after = segment_path(dead).stat()
        assert (after.st_ino, after.st_size) != (before.st_ino, before.st_size)
        with conduit.attach(dead) as client:
            assert client._segment.identity == engine._segment.identity


def test_both_at_once_are_refused(engine_name):
    with pytest.raises(ConfigError, match=r"exist_ok=True, .* or replace=True"):
        conduit.Engine.create(engine_name, TABLES, exist_ok=True, replace=True)


def changed(**options):
    return {"replay": dataclasses.replace(BIG, **options)}


OTHERS = {
    "schema": (
        {"replay": conduit.Table(conduit.Schema([conduit.Field("x", "int64")]), 4000)},
        {},
        SchemaMismatch,
        "table 'replay'.*`x`.*replace=True",
    ),
    "capacity": (changed(capacity=8000), {}, ConfigError, "tables.replay.pages"),
    "windows": (changed(max_n_step=3), {}, ConfigError, "tables.replay.max_n_step 1, .* got 3"),
    "kind": (changed(kind="queue"), {}, ConfigError, "tables.replay.kind 'replay', .* got 'queue'"),
    "limiter": (changed(limiter=conduit.MinSize(5)), {}, ConfigError, "tables.replay.limits None"),
    "a table more": (
        {"replay": BIG, "more": BIG},
        {},
        ConfigError,
        r"tables .* \['replay'\], got \['more', 'replay'\]",
    ),
    "another table": ({"other": BIG}, {}, ConfigError, r"got \['other'\]"),
    "policies": (
        TABLES,
        {"policies": {"policy": {"w": np.zeros(3)}}},
        ConfigError,
        r"policies .* \[\], got \['policy'\]",
    ),
    "seats": (TABLES, {"max_participants": 5}, ConfigError, "max_participants 128, .* got 5"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_an_engine_of_other_tables_is_left_as_it_is_and_the_difference_named(dead, what):
    tables, options, error, match = OTHERS[what]
    with pytest.raises(error, match=match):
        conduit.Engine.create(dead, tables, exist_ok=True, **options)
    with conduit.Engine.create(dead, TABLES, exist_ok=True) as engine:
        assert engine._views["replay"].rows_visible() == 60


def test_tables_in_another_order_are_the_same_tables(engine_name):
    with Puppet() as owner:
        owner.do(create_two, engine_name)
        owner.kill()
    tables = {"second": small_table(), "replay": BIG}
    with conduit.Engine.create(engine_name, tables, exist_ok=True) as engine:
        assert engine.tables == ("replay", "second")


def create_two(own, name):
    own.client = conduit.Engine.create(name, {"replay": BIG, "second": small_table()})


def test_clients_that_stayed_go_on_under_who_goes_on_and_are_told_where_somebody_begins_anew(engine_name):
    for options in ({"exist_ok": True}, {"replace": True}):
        with Puppet() as owner, Puppet() as client:
            owner.do(create, engine_name, BIG)
            client.do(attach, engine_name, "stay")
            assert client.do(write_rows, 10) == 10
            owner.kill()
            with pytest.raises(Leftover, match="its owner is dead, and other processes are attached to it"):
                conduit.Engine.create(engine_name, TABLES)
            with conduit.Engine.create(engine_name, TABLES, **options) as engine:
                if "exist_ok" in options:
                    assert client.do(write_rows, 10) == 20
                    assert engine._views["replay"].rows_visible() == 20
                else:
                    with pytest.raises(Closed):
                        client.do(write_for_ever)
                    assert engine._views["replay"].rows_visible() == 0


def write_for_ever(own):
    while True:
        write_rows(own, 1)
        time.sleep(0.005)


def test_an_owner_that_died_while_it_closed_is_followed(engine_name):
    for options in ({"exist_ok": True}, {"replace": True}):
        with Puppet() as owner:
            owner.do(create, engine_name, BIG)
            owner.do(mark_closed)
            owner.kill()
        with conduit.Engine.create(engine_name, TABLES, **options), conduit.attach(engine_name):
            pass


def mark_closed(own):
    own.client._segment.mark_closed()


def test_a_segment_of_another_version_can_be_replaced_and_a_foreign_file_cannot(dead):
    path = segment_path(dead)
    with path.open("r+b") as file:
        file.seek(HEADER_VERSION)
        file.write(b"\x63")
    with pytest.raises(BadSegment, match="layout version"):
        conduit.Engine.create(dead, TABLES, exist_ok=True)
    with conduit.Engine.create(dead, TABLES, replace=True):
        pass
    path.write_bytes(b"somebody else's" * 1000)
    path.chmod(0o600)
    try:
        with pytest.raises(BadSegment, match="another file's content: choose another name"):
            conduit.Engine.create(dead, TABLES, replace=True)
        assert path.read_bytes() == b"somebody else's" * 1000
    finally:
        path.unlink()


def test_a_new_engine_for_which_there_is_no_room_leaves_the_old_one(dead, monkeypatch):
    size = segment_path(dead).stat().st_size
    monkeypatch.setattr(allocation, "available", lambda _: memory.Bound(size // 2, "a machine", "try again"))
    with pytest.raises(NoSpace, match=f"Expected [0-9,]+ bytes free in a machine for engine '{dead}'"):
        conduit.Engine.create(dead, changed(capacity=40_000), replace=True)
    monkeypatch.undo()
    with conduit.Engine.adopt(dead) as engine:
        assert engine._views["replay"].rows_visible() == 60


def test_bad_options_leave_the_old_engine(dead):
    for tables, options in (({}, {}), (TABLES, {"max_participants": 0}), (TABLES, {"backing": "disk"})):
        with pytest.raises(ConfigError):
            conduit.Engine.create(dead, tables, replace=True, **options)
    with conduit.Engine.adopt(dead) as engine:
        assert engine._views["replay"].rows_visible() == 60


# -- what they say


def test_create_attach_status_and_clean_say_the_same_of_one_engine(engine_name):
    """A state, and what can be done about it."""

    def said():
        with pytest.raises(EngineExists) as refused:
            conduit.Engine.create(engine_name, TABLES)
        return str(refused.value), inspect.inspect(engine_name).problem or ""

    with Puppet() as owner, Puppet() as client:
        owner.do(create, engine_name, BIG)
        client.do(attach, engine_name, "stay")
        refusal, _ = said()
        assert "its owner is alive" in refusal
        assert inspect.clean(engine_name)[0] == inspect.Cleaned(engine_name, False, "its owner is alive")
        owner.kill()
        refusal, problem = said()
        assert problem.startswith("its owner is dead, and other processes are attached to it; go on with it by")
        assert problem in refusal
        assert inspect.clean(engine_name)[0] == inspect.Cleaned(engine_name, False, problem)
        with pytest.raises(conduit.errors.OwnerGone) as gone:
            conduit.attach(engine_name)
        assert problem in str(gone.value)
        client.do(detach)
    refusal, problem = said()
    assert problem.startswith("its owner is dead, and no process is attached to it; go on with it by")
    assert f"`conduit clean {engine_name}`" in problem
    assert problem in refusal
    (removed,) = inspect.clean(engine_name)
    assert removed.removed
    assert removed.why.startswith("its owner is dead, and no process is attached to it; ")


# -- who wins


@pytest.mark.parametrize("options", [{"exist_ok": True}, {"replace": True}, "either", "adopt"], ids=str)
def test_of_many_that_want_a_dead_owners_name_at_once_one_has_it_and_the_others_are_told(engine_name, options):
    crew = [Puppet() for _ in range(8)]
    try:
        for turn in range(6):
            with Puppet() as owner:
                owner.do(create, engine_name, small_table())
                owner.kill()
            for number, puppet in enumerate(crew):
                chosen = options
                if options == "either":
                    chosen = ({"exist_ok": True}, {"replace": True})[(number + turn) % 2]
                elif options == "adopt":
                    chosen = ({"exist_ok": True}, {"replace": True}, None)[(number + turn) % 3]
                puppet.tell(take, engine_name, chosen)
            won = []
            for puppet in crew:
                try:
                    puppet.answer()
                    won.append(puppet)
                except Leftover:
                    raise
                except (EngineExists, conduit.errors.EngineNotFound):
                    pass
            assert len(won) == 1
            with conduit.attach(engine_name) as client:
                client.writer("replay", keep_final=False).close()
            won[0].do(detach)
            assert not segment_path(engine_name).exists()
    finally:
        for puppet in crew:
            puppet.kill()


def take(own, name, options):
    """Adopt, or create with options; only an adopter may find that the name has gone."""
    try:
        if options is None:
            own.client = conduit.Engine.adopt(name)
        else:
            own.client = conduit.Engine.create(name, {"replay": small_table()}, **options)
    except conduit.errors.EngineNotFound:
        assert options is None
        raise


def test_one_that_is_killed_while_it_takes_a_name_leaves_it_to_the_next(engine_name):
    for delay in np.linspace(0.0, 0.02, 20):
        with Puppet() as owner, Puppet() as heir:
            owner.do(create, engine_name, small_table())
            owner.kill()
            heir.tell(take, engine_name, {"replace": True} if int(delay * 1e6) % 2 else {"exist_ok": True})
            time.sleep(delay)
            heir.kill()
        with conduit.Engine.create(engine_name, {"replay": small_table()}, exist_ok=True) as engine:
            check_nothing_leaked(engine._views["replay"])
    assert not segment_path(engine_name).exists()


def test_who_is_overtaken_between_looking_and_locking_looks_again(dead, monkeypatch):
    """Another process replaces the dead owner's segment at that moment."""
    made = []
    original = leftovers.try_lock

    def overtaken(fd, byte, length=1):
        if not made:
            made.append(None)
            made[0] = conduit.Engine.create(dead, TABLES, replace=True)
        return original(fd, byte, length)

    monkeypatch.setattr(leftovers, "try_lock", overtaken)
    with pytest.raises(EngineExists, match="its owner is alive"):
        conduit.Engine.create(dead, TABLES, replace=True)
    with made[0] as engine:
        assert engine._segment.is_current()


# restored from a checkpoint


def checkpointed(own, folder):
    own.client.checkpoint(folder)
    add_five(own)


@pytest.fixture
def left(engine_name, tmp_path):
    """Name of an engine whose owner was killed with 65 rows, and the folder of a checkpoint of 60 of them."""
    with Puppet() as owner:
        owner.do(create, engine_name, BIG)
        owner.do(write_rows, 60)
        owner.do(checkpointed, tmp_path)
        owner.kill()
    yield engine_name, tmp_path
    if segment_path(engine_name).exists():
        inspect.clean(engine_name)


def test_a_restore_takes_no_name_that_a_dead_owner_left_unless_it_is_told_to(left):
    name, folder = left
    with pytest.raises(Leftover, match="exist_ok=True"):
        conduit.Engine.restore(folder)
    with pytest.raises(ConfigError, match=r"exist_ok=True, .* or replace=True"):
        conduit.Engine.restore(folder, exist_ok=True, replace=True)
    assert segment_path(name).exists()


def test_a_restore_goes_on_with_what_a_dead_owner_left(left):
    name, folder = left
    with conduit.Engine.restore(folder, exist_ok=True) as engine:
        assert engine.restored is None
        assert engine.name == name
        assert engine.table("replay").rows == 65
        check_nothing_leaked(engine._views["replay"])
    assert not segment_path(name).exists()
    with conduit.Engine.restore(folder, exist_ok=True) as engine:  # nobody has the name
        assert engine.restored.tables["replay"].rows == engine.table("replay").rows == 60


def test_a_restore_goes_on_only_with_an_engine_of_the_checkpoint_s_kind(left):
    name, folder = left
    with pytest.raises(ConfigError, match=r"max_participants 128, as engine .* got 8"):
        conduit.Engine.restore(folder, max_participants=8, exist_ok=True)
    assert segment_path(name).exists()


def test_a_restore_replaces_what_a_dead_owner_left(left):
    name, folder = left
    before = segment_path(name).stat().st_ino
    with conduit.Engine.restore(folder, replace=True) as engine:
        assert segment_path(name).stat().st_ino != before
        assert engine.restored.tables["replay"].rows == engine.table("replay").rows == 60
        for options in ({"exist_ok": True}, {"replace": True}):
            with pytest.raises(EngineExists, match="its owner is alive") as refused:
                conduit.Engine.restore(folder, **options)
            assert not isinstance(refused.value, Leftover)


def test_what_a_dead_owner_left_stays_when_the_checkpoint_is_damaged(left):
    name, folder = left
    damaged = folder / "0000000001" / "tables" / "replay" / "columns" / "obs.npy"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError):
        conduit.Engine.restore(folder, replace=True)
    with conduit.Engine.adopt(name) as engine:
        assert engine.table("replay").rows == 65
