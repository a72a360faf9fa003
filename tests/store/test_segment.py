"""What creating, opening and removing a segment refuses, in words that name the remedy, and what is left then: nothing."""

import ctypes
import gc
import os
import pickle
import re
import signal
import stat
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit.errors import (
    BadSegment,
    CapacityError,
    ConfigError,
    EngineExists,
    EngineNotFound,
    Leftover,
    NoSpace,
    WaitTimeout,
)
from conduit.store.format import layout
from conduit.store.format.layout import HEADER_BYTES, MAGIC, lay_out, specify
from conduit.store.format.table_spec import Table
from conduit.store.segment import leftovers
from conduit.store.segment.locks import LOCK_CREATOR, held, try_lock
from conduit.store.segment.names import find, note_path, runtime_directory, shm_name
from conduit.testing import rows
from conduit.testing.puppets import ended, forked
from conduit.testing.torture_roles import small_table


def path_of(name: str) -> Path:
    return Path("/dev/shm" + shm_name(name))


@pytest.fixture
def engine(engine_name):
    with conduit.Engine.create(engine_name, {"replay": small_table()}) as made:
        yield made


@pytest.fixture
def dead_engine(engine_name):
    """The segment of an engine whose process was killed; removed afterwards."""

    def be_killed():
        engine = conduit.Engine.create(engine_name, {"replay": small_table()})
        os.kill(os.getpid(), signal.SIGKILL if engine else signal.SIGABRT)

    assert ended(forked(be_killed), 60) == -signal.SIGKILL
    yield engine_name
    path_of(engine_name).unlink(missing_ok=True)


# -- how a segment is made


def test_a_segment_is_private_whole_and_zeroed(engine):
    found = path_of(engine.name).stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_uid == os.getuid()
    assert found.st_size == engine._segment.layout.size
    assert found.st_blocks * 512 >= found.st_size
    assert not np.any(engine._views["replay"].columns["obs"])


def test_a_umask_does_not_open_or_close_it(engine_name):
    for umask in (0, 0o777):
        before = os.umask(umask)
        try:
            engine = conduit.Engine.create(engine_name, {"replay": small_table()})
        finally:
            os.umask(before)
        with engine:
            assert stat.S_IMODE(path_of(engine_name).stat().st_mode) == 0o600


def test_a_segment_is_not_known_to_the_resource_tracker(engine):
    script = f"import conduit; conduit.attach({engine.name!r}); print('attached')"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.stderr) == ("attached\n", "")
    assert path_of(engine.name).exists()


def test_closing_removes_the_name_and_keeps_what_is_still_looked_at(engine_name):
    engine = conduit.Engine.create(engine_name, {"replay": small_table()})
    obs = engine._views["replay"].columns["obs"]
    obs[0] = 7
    engine.close()
    assert not path_of(engine_name).exists()
    del engine
    assert (obs[0] == 7).all()


def test_a_name_that_others_removed_by_hand_is_not_missed_at_closing(engine_name):
    engine = conduit.Engine.create(engine_name, {"replay": small_table()})
    path_of(engine_name).unlink()
    with conduit.Engine.create(engine_name, {"replay": small_table()}) as second:
        engine.close()
        assert path_of(engine_name).exists()
        assert second._segment.is_current()


def test_an_engine_is_found_by_name_while_it_exists(engine):
    assert (engine.name, "shm") in list(find())
    engine.close()
    assert engine.name not in [name for name, _ in find()]


# -- names and options


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a" * 101, "ü", "a b", "a\n", None, 7])
def test_a_name_that_is_no_file_name_is_refused(name):
    for call in (
        conduit.attach,
        conduit.Engine.adopt,
        lambda name: conduit.Engine.create(name, {"replay": small_table()}),
    ):
        with pytest.raises(ConfigError, match=r"1 to 100 letters"):
            call(name)


def test_a_name_of_a_hundred_characters_works():
    name = f"t{os.getpid()}-" + "x" * (98 - len(str(os.getpid())))
    assert len(name) == 100
    with conduit.Engine.create(name, {"replay": small_table()}), conduit.attach(name):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": {}}, "at least one table"),
        ({"tables": {"replay": 5}}, r"a conduit.Table, got int - at tables\['replay'\]"),
        ({"backing": "disk"}, "'shm' or 'memfd', got 'disk'"),
        ({"max_participants": 0}, "from 1 to 4095, got 0"),
        ({"max_participants": 4096}, "from 1 to 4095, got 4096"),
    ],
    ids=["no table", "no table object", "backing", "no seats", "too many seats"],
)
def test_a_wrong_option_is_refused_and_nothing_is_made(engine_name, options, message):
    with pytest.raises(ConfigError, match=message):
        conduit.Engine.create(engine_name, **{"tables": {"replay": small_table()}, **options})
    assert not path_of(engine_name).exists()
    assert not note_path(engine_name).exists()


# -- nothing there, or something else


def test_there_is_nothing_to_attach_to(engine_name):
    for call in (conduit.attach, conduit.Engine.adopt):
        with pytest.raises(
            EngineNotFound, match=r"conduit.Engine.create.*attach\(\.\.\., timeout=seconds\)"
        ) as refused:
            call(engine_name)
        assert shm_name(engine_name) in str(refused.value)
        assert isinstance(pickle.loads(pickle.dumps(refused.value)), FileNotFoundError)


def test_an_attach_gives_up_at_its_deadline(engine_name):
    with pytest.raises(EngineNotFound):
        conduit.attach(engine_name, timeout=0.05)


def test_a_second_engine_of_the_name_is_refused_and_the_first_goes_on(engine):
    for _ in range(3):
        with pytest.raises(EngineExists, match=r"its owner is alive; attach to it.*another name") as refused:
            conduit.Engine.create(engine.name, {"replay": small_table()})
        assert not isinstance(refused.value, Leftover)
    with conduit.attach(engine.name):
        pass


def test_an_empty_file_without_an_owner_does_not_stand_in_the_way(engine_name):
    path_of(engine_name).touch(0o600)
    with pytest.raises(BadSegment, match=rf"its creator died; run `conduit clean {engine_name}`"):
        conduit.attach(engine_name)
    with conduit.Engine.create(engine_name, {"replay": small_table()}), conduit.attach(engine_name):
        pass


def test_a_segment_that_is_being_made_is_waited_for(engine_name):
    path = path_of(engine_name)
    path.touch(0o600)
    fd = os.open(path, os.O_RDWR)
    try:
        assert try_lock(fd, LOCK_CREATOR)
        for size in (0, HEADER_BYTES, 100_000):
            os.ftruncate(fd, size)
            if size:
                os.pwrite(fd, b"\1", 32)  # parts of the header come before its magic word
            with pytest.raises(EngineNotFound, match="only being created: try again"):
                conduit.attach(engine_name)
        with pytest.raises(EngineExists):
            conduit.Engine.create(engine_name, {"replay": small_table()})
        assert leftovers.remove_if_dead(engine_name) == (False, "its owner is alive")
    finally:
        os.close(fd)
    assert leftovers.remove_if_dead(engine_name)[0]


def test_an_attach_between_the_creators_first_two_steps_waits(engine_name):
    """The name is made, then locked: in between it looks like one whose creator is dead."""
    path = path_of(engine_name)
    path.touch(0o600)
    fd = os.open(path, os.O_RDWR)
    late = threading.Timer(0.02, try_lock, (fd, LOCK_CREATOR))
    late.start()
    try:
        with pytest.raises(EngineNotFound, match="only being created"):
            conduit.attach(engine_name)
        late.join()
        assert held(os.open(path, os.O_RDWR))
    finally:
        os.close(fd)
        path.unlink()


def overwrite(name: str, offset: int, content: bytes) -> None:
    with path_of(name).open("r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (layout.HEADER_MAGIC, b"\x7fELF\2\1\1\0", "another file's content.*choose another name"),
        (layout.HEADER_VERSION, struct.pack("<q", 99), r"layout version \d+ .* got 99: run the same version"),
        (layout.HEADER_SIZE, struct.pack("<q", 4096), "got 4,096: it is damaged; run `conduit clean"),
        (layout.HEADER_SPEC, struct.pack("<q", 10), "a damaged one: run `conduit clean"),
        (layout.HEADER_SPEC, struct.pack("<q", 1 << 60), "a damaged one"),
        (layout.HEADER_SPEC, struct.pack("<q", -5), "a damaged one"),
        (layout.HEADER_DIGEST, struct.pack("<q", 1), "a damaged one"),
        (HEADER_BYTES + 20, b"?", "a damaged one"),
    ],
    ids=["foreign", "other version", "wrong size", "short spec", "huge spec", "negative spec", "digest", "spec"],
)
def test_a_damaged_or_foreign_segment_is_refused_and_named(dead_engine, offset, content, message):
    overwrite(dead_engine, offset, content)
    before = path_of(dead_engine).read_bytes()
    gc.collect()  # what earlier tests left
    files = len(list(Path("/proc/self/fd").iterdir()))
    for call in (conduit.attach, conduit.Engine.adopt):
        with pytest.raises(BadSegment, match=message) as refused:
            call(dead_engine)
        assert dead_engine in str(refused.value)
    assert path_of(dead_engine).read_bytes() == before
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    with pytest.raises(Leftover):
        conduit.Engine.create(dead_engine, {"replay": small_table()})
    assert leftovers.remove_if_dead(dead_engine)[0]


@pytest.mark.parametrize("size", [1, 8, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 10, 100_000])
def test_a_truncated_segment_is_refused_and_never_mapped(dead_engine, size):
    os.truncate(path_of(dead_engine), size)
    with pytest.raises(BadSegment, match=r"truncated|damaged|run `conduit clean") as refused:
        conduit.attach(dead_engine)
    assert dead_engine in str(refused.value)
    assert leftovers.remove_if_dead(dead_engine)[0]


def test_one_byte_too_few_is_truncated_and_says_by_how_much(dead_engine):
    size = path_of(dead_engine).stat().st_size
    os.truncate(path_of(dead_engine), size - 1)
    with pytest.raises(BadSegment, match=rf"Expected {size:,} bytes .* got {size - 1:,}: it was truncated"):
        conduit.attach(dead_engine)


def test_a_folder_in_the_engines_place_is_refused(engine_name):
    path_of(engine_name).mkdir()
    try:
        for call in (conduit.attach, lambda name: conduit.Engine.create(name, {"replay": small_table()})):
            with pytest.raises(BadSegment, match=f"{shm_name(engine_name)}.*choose another name"):
                call(engine_name)
        assert engine_name not in [name for name, _ in find()]
    finally:
        path_of(engine_name).rmdir()


# -- a table that cannot be


def test_a_capacity_that_cannot_work_is_refused_with_the_numbers():
    for capacity, page_rows, message in (
        (0, None, "at least one row"),
        ("1 KiB", None, r"at least 4 pages|at least one row"),
        ("2 apples", None, r"a size such as '2 GiB'"),
        (100, 2, "page_rows of at least 3"),
        (1 << 40, 8, "raise page_rows"),
    ):
        with pytest.raises(CapacityError, match=message):
            Table(rows.SCHEMA, capacity=capacity, page_rows=page_rows)


# -- another user, another file system: in processes of their own


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter; exit status 77 skips the test with what it printed."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    return done


NAMESPACE = """
import ctypes, os, sys

libc = ctypes.CDLL(None, use_errno=True)
user, group = os.getuid(), os.getgid()
# a user that is not root needs a user namespace for it
if libc.unshare(0x00020000) != 0 and libc.unshare(0x10000000 | 0x00020000) != 0:
    print("a private mount namespace is not permitted here")
    sys.exit(77)
if os.getuid() != user:
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write(f"{user} {user} 1")
    open("/proc/self/gid_map", "w").write(f"{group} {group} 1")

def mount(kind, target, flags=0, data=None):
    if libc.mount(kind, target, kind, flags, data) != 0:
        print("mounting is not permitted here:", os.strerror(ctypes.get_errno()))
        sys.exit(77)

mount(None, b"/", 0x4000 | 0x40000)  # private, all the way down
"""


def test_a_full_memory_file_system_is_an_error_at_creation_that_leaves_nothing():
    done = run(
        NAMESPACE
        + """
mount(b"tmpfs", b"/dev/shm", 0, b"size=2m")
import conduit
from conduit.errors import NoSpace
from conduit.testing import rows

big = conduit.Table(rows.SCHEMA, capacity="8 MiB")
before = os.statvfs("/dev/shm").f_bavail
files = len(os.listdir("/proc/self/fd"))
try:
    conduit.Engine.create("full", {"replay": big})
except NoSpace as error:
    print(error)
    print(error.errno, isinstance(error, OSError))
print(os.listdir("/dev/shm"), os.statvfs("/dev/shm").f_bavail == before, len(os.listdir("/proc/self/fd")) == files)
small = conduit.Table(rows.SCHEMA, capacity="1 MiB")
with conduit.Engine.create("full", {"replay": small}) as engine:
    engine._segment.root[:] = 1  # every byte is there: no SIGBUS
    print("small works")
with conduit.Engine.create("full", {"replay": big}, backing="memfd") as engine, conduit.attach("full"):
    engine._segment.root[-1] = 1
    print("memfd works")
"""
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    layout = lay_out(specify({"replay": Table(rows.SCHEMA, capacity="8 MiB")}, {}, 128))
    assert f"Expected {layout.size:,} bytes free in /dev/shm for engine 'full', got 2,097,152" in lines[0]
    for remedy in ("lower the capacity", "conduit clean", "--shm-size", "remount,size=", 'backing="memfd"'):
        assert remedy in lines[0]
    assert lines[1:] == ["28 True", "[] True True", "small works", "memfd works"]


def test_a_machine_without_a_memory_file_system_is_told_so():
    done = run(
        NAMESPACE
        + """
import conduit  # opens /dev/urandom and the like before /dev is gone
from conduit.errors import NoSpace
from conduit.testing.torture_roles import small_table

mount(b"tmpfs", b"/dev")
try:
    conduit.Engine.create("none", {"replay": small_table()})
except NoSpace as error:
    print(error)
"""
    )
    assert done.stderr == ""
    assert "Expected a memory file system at /dev/shm, found none" in done.stdout
    assert 'backing="memfd"' in done.stdout


def test_a_read_only_memory_file_system_is_an_error_and_not_a_hang():
    done = run(
        NAMESPACE
        + """
mount(b"tmpfs", b"/dev/shm", 1)
import conduit
from conduit.testing.torture_roles import small_table

try:
    conduit.Engine.create("readonly", {"replay": small_table()})
except OSError as error:
    print(type(error).__name__, error)
"""
    )
    assert done.stderr == ""
    assert "AccessDenied Expected to be allowed to create /dev/shm/cdt." in done.stdout


NOBODY = """
import os, sys

if os.getuid() != 0:
    print("only root can become another user")
    sys.exit(77)
import conduit
from conduit import errors
from conduit.store.segment import leftovers, names
from conduit.testing.torture_roles import small_table

name = sys.argv[1]
uid = os.getuid()
conduit.attach(name).close()
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.environ["XDG_RUNTIME_DIR"] = "/nonexistent"
"""


def test_another_user_has_names_of_its_own(engine):
    done = run(
        NOBODY
        + """
try:
    conduit.attach(name)
except errors.EngineNotFound as error:
    print(error)
print(list(names.find()))
with conduit.Engine.create(name, {"replay": small_table()}) as own:
    with conduit.attach(name) as client:
        print(client._segment.identity == own._segment.identity, list(names.find()) == [(name, "shm")])
print(list(names.find()), leftovers.remove_if_dead(name))
""",
        engine.name,
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert f"/dev/shm/cdt.65534.{engine.name}" in lines[0]
    assert "found none for this user" in lines[0]
    assert lines[1:] == ["[]", "True True", "[] (False, 'no such engine')"]
    assert engine._segment.is_current()


def test_a_user_who_may_not_open_the_segment_is_told_that_it_is_private(engine):
    done = run(
        NOBODY
        + """
os.getuid = lambda: uid  # looks under the other user's name
for call in (conduit.attach, conduit.Engine.adopt, leftovers.remove_if_dead):
    try:
        call(name)
    except errors.AccessDenied as error:
        print(error, "|", isinstance(error, PermissionError), error.errno)
try:
    conduit.Engine.create(name, {"replay": small_table()})
except errors.AccessDenied as error:
    print(error)
""",
        engine.name,
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert f"Expected read and write access to engine '{engine.name}'" in line
        assert "private to the user that created them" in line
    assert lines[0].endswith("| True 13")
    assert engine._segment.is_current()


OPENERS = """
from conduit.plane.observe import inspect
def look(name):
    found = inspect.inspect(name)
    if found.state in ("denied", "damaged"):
        raise errors.AccessDenied(found.problem) if found.state == "denied" else errors.BadSegment(found.problem)
def clean(name):
    (done,) = inspect.clean(name)
    print("kept" if not done.removed else "removed")
def create(name):
    conduit.Engine.create(name, {"replay": small_table()})
for call in (conduit.attach, conduit.Engine.adopt, create, look, clean):
    try:
        call(name)
    except errors.ConduitError as error:
        print(type(error).__name__, error)
"""
OTHER = """
import os, sys
if os.getuid() != 0:
    print("only root can make files that belong to another user")
    sys.exit(77)
import conduit
from conduit import errors
from conduit.store.segment.names import note_path, shm_name
from conduit.testing.torture_roles import small_table
name = sys.argv[1]
"""


def test_a_segment_that_others_may_read_is_refused_to_everybody_and_kept(engine):
    """Whoever may write into it may have written anything."""
    path_of(engine.name).chmod(0o644)
    done = run(OTHER + OPENERS, engine.name)
    assert done.stderr == ""
    *refused, kept = done.stdout.splitlines()
    assert [line.split()[0] for line in refused] == ["AccessDenied"] * 4
    for line in refused:
        assert f"Expected /dev/shm{shm_name(engine.name)} of engine" in line
        assert "closed to other users (mode 0600), got 0644" in line
        assert f"chmod 600 /dev/shm{shm_name(engine.name)}" in line
    assert kept == "kept"
    assert path_of(engine.name).exists()
    path_of(engine.name).chmod(0o600)
    conduit.attach(engine.name).close()


SQUATTERS = {
    "a whole segment of another user": (
        """
with conduit.Engine.create(name + "-x", {"replay": small_table()}):
    os.link("/dev/shm" + shm_name(name + "-x"), path)
os.chown(path, 65534, 65534)
""",
        "AccessDenied",
        "to belong to user 0, got user 65534's.*have it removed, or choose another name",
    ),
    "an empty file of another user": (
        "os.mknod(path, 0o600); os.chown(path, 65534, 65534)",
        "AccessDenied",
        "to belong to user 0, got user 65534's",
    ),
    "a pipe": ("os.mkfifo(path, 0o600)", "BadSegment", "remove it, or choose another name"),
    "a link to a segment": (
        """
os.mknod("/dev/shm/cdt.0.elsewhere", 0o600)
os.symlink("/dev/shm/cdt.0.elsewhere", path)
import atexit
atexit.register(os.unlink, "/dev/shm/cdt.0.elsewhere")
""",
        "BadSegment",
        "got something else: remove it",
    ),
    "a socket": (
        "import socket\nwith socket.socket(socket.AF_UNIX) as one:\n    one.bind(path)\n",
        "BadSegment",
        "got something else: remove it",
    ),
}


@pytest.mark.parametrize(("make", "kind", "message"), SQUATTERS.values(), ids=SQUATTERS)
def test_what_another_user_or_nobody_left_under_a_name_is_refused_before_it_is_mapped(engine_name, make, kind, message):
    path = path_of(engine_name)
    try:
        done = run(OTHER + f'path = "{path}"\n' + make + OPENERS, engine_name)
        assert os.path.lexists(path)
    finally:
        path.unlink(missing_ok=True)
    assert done.stderr == ""
    *refused, kept = done.stdout.splitlines()
    assert [line.split()[0] for line in refused] == [kind] * 4
    for line in refused:
        assert re.search(message, line), line
        assert str(path) in line
    assert kept == "kept"


NOTES = {
    "a note of another user": ('note.write_text("/proc/1/fd/3"); os.chown(note, 65534, 65534)', "AccessDenied"),
    "a note that others may write": ('note.write_text("/proc/1/fd/3"); os.chmod(note, 0o666)', "AccessDenied"),
    "a pipe": ("os.mkfifo(note, 0o600)", "BadSegment"),
    "a link": ('os.symlink("/etc/hostname", note)', "BadSegment"),
    "a note in a folder of another user": (
        'note.write_text("/proc/1/fd/3"); os.chmod(note, 0o600); os.chown(folder, 65534, 65534)',
        "AccessDenied",
    ),
    "a memfd of another user": (
        """
fd = os.memfd_create(shm_name(name)[1:])
os.fchmod(fd, 0o600)
os.fchown(fd, 65534, 65534)
note.write_text(f"/proc/{os.getpid()}/fd/{fd}")
os.chmod(note, 0o600)
""",
        "AccessDenied",
    ),
}


@pytest.mark.parametrize(("make", "kind"), NOTES.values(), ids=NOTES)
def test_a_note_that_is_not_this_users_alone_is_refused_before_it_is_followed(
    engine_name, tmp_path, monkeypatch, make, kind
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    prepare = """
note = note_path(name)
folder = note.parent
folder.mkdir(mode=0o700)
"""
    done = run(OTHER + prepare + make + OPENERS.replace("adopt, create, look", "adopt, look"), engine_name)
    assert done.stderr == ""
    *refused, kept = done.stdout.splitlines()
    assert [line.split()[0] for line in refused] == [kind] * 3
    assert kept == "kept"


def test_a_folder_of_another_user_in_the_notes_place_is_refused():
    done = run(
        """
        import os, sys, tempfile
        if os.getuid() != 0:
            print("only root can make a folder that belongs to another user")
            sys.exit(77)
        import conduit
        from conduit.testing.torture_roles import small_table
        with tempfile.TemporaryDirectory() as place:
            os.environ["XDG_RUNTIME_DIR"] = place
            os.mkdir(f"{place}/conduit-0")
            os.chown(f"{place}/conduit-0", 65534, 65534)
            files = len(os.listdir("/proc/self/fd"))
            try:
                conduit.Engine.create("notes", {"replay": small_table()}, backing="memfd")
            except conduit.errors.AccessDenied as error:
                print(error)
            print(len(os.listdir("/proc/self/fd")) == files)
        """
    )
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert "to belong to this user; remove it or set XDG_RUNTIME_DIR" in first
    assert second == "True"


# -- memfd


def test_a_note_that_leads_to_something_else_is_not_believed(engine_name, tmp_path):
    runtime_directory().mkdir(mode=0o700, exist_ok=True)
    fd = os.memfd_create("something else")
    try:
        for target in (f"/proc/{os.getpid()}/fd/{fd}", str(tmp_path / "file"), "", "/proc/1/fd/0"):
            note_path(engine_name).write_text(target)
            with pytest.raises(EngineNotFound):
                conduit.attach(engine_name)
            assert leftovers.remove_if_dead(engine_name)[0]
            assert not note_path(engine_name).exists()
    finally:
        os.close(fd)


def test_a_memfd_engine_that_cannot_be_made_leaves_no_file_and_no_note(engine_name, monkeypatch):
    gc.collect()  # what earlier tests dropped
    files = len(list(Path("/proc/self/fd").iterdir()))

    def refuse(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for backing in ("memfd", "shm"):
        with pytest.raises(NoSpace, match=r"bytes free in (memory|/dev/shm)"):
            conduit.Engine.create(engine_name, {"replay": small_table()}, backing=backing)
        assert not note_path(engine_name).exists()
        assert not path_of(engine_name).exists()
        assert len(list(Path("/proc/self/fd").iterdir())) == files


# -- the map itself


def test_magic_is_the_products_name():
    assert MAGIC.to_bytes(8, "little") == b"CONDUIT1"


def test_the_mapping_is_shared_between_attachments(engine):
    with conduit.attach(engine.name) as client:
        ours, theirs = engine._segment, client._segment
        assert ours.base != theirs.base
        engine._views["replay"].columns["obs"][3] = 11
        assert (client._views["replay"].columns["obs"][3] == 11).all()
        libc = ctypes.CDLL(None)
        page = ctypes.c_void_p(theirs.base)
        assert libc.msync(page, ctypes.c_size_t(theirs.layout.size), 4) == 0  # all of it is mapped


def test_waits_are_bounded(engine):
    with pytest.raises(WaitTimeout):
        engine.loader("replay", batch_size=4, format="numpy", timeout=0.05).next()
