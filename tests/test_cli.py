"""The command `conduit`, run as a user runs it: in its own process, on engines of other processes, some of them killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit.cli import checks
from conduit.cli.checkpoints import look
from conduit.demo import DemoResult
from conduit.errors import CheckpointError
from conduit.plane.observe import inspect, machine

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "cli.md"
SHM = Path("/dev/shm")

ACTOR = """
import sys, time
import numpy as np
import conduit

what, name, backing, rows = sys.argv[1:5]
schema = conduit.Schema.from_example({"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0})


def append(writer, k):
    writer.append(
        obs=np.full((4, 4), k, np.float32),
        action=np.zeros(4, np.int64),
        reward=np.ones(4, np.float32),
        terminated=np.zeros(4, bool),
        truncated=np.zeros(4, bool),
    )


if what == "owner":
    weights = {"w": np.zeros((4, 2), np.float32)}
    table = conduit.Table(schema, capacity=4096, num_envs=4)
    engine = conduit.Engine.create(name, {"replay": table}, policies={"policy": weights}, backing=backing)
    engine.policy("policy").publish(weights)
else:
    writer = conduit.attach(name).writer("replay", num_envs=4, autoreset="next_step")
    for k in range(int(rows) // 4):
        append(writer, k)
print("ready", flush=True)
if what == "busy":
    while True:
        append(writer, k)
        time.sleep(0.001)
sys.stdin.read()
"""


TORCH = """
from types import SimpleNamespace as S

__version__ = "9.9"
version = S(cuda="12.8")
class ones:
    def __init__(self, n, device=None): pass
    def sum(self): return 8.0
gpu = S(name="NVIDIA H200", total_memory=150 << 30, major=9, minor=0)
cuda = S(is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda i: gpu)
"""
"""A package `torch` that is imported at once and sees two GPUs."""


class Cast:
    """Processes that own and write engines, started when a test needs them and killed at its end."""

    def __init__(self, *prefix, env=None):
        self.prefix = prefix
        self.env = env
        self.processes = []

    def start(self, what, name, backing="shm", rows=0):
        """The process's number, once it has done what it came for."""
        command = [*self.prefix, sys.executable, "-c", ACTOR, what, name, backing, str(rows)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.env or environment()
        )
        self.processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    def end(self):
        for process in self.processes:
            process.kill()
            process.communicate()


def environment(**more):
    return os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"} | more


def run(*arguments, prefix=(), env=None, timeout=120):
    return subprocess.run(
        [*prefix, sys.executable, "-W", "error", "-m", "conduit.cli", *arguments],
        capture_output=True,
        text=True,
        env=env or environment(),
        timeout=timeout,
        check=False,
    )


def ok(*arguments, code=0, **more):
    """What a command printed; it ended with `code` and had nothing to complain of."""
    done = run(*arguments, **more)
    assert (done.returncode, done.stderr) == (code, ""), done.stdout + done.stderr
    # a path is never broken, so that it can be copied
    lines = [
        line for line in done.stdout.splitlines() if not any("/" in word and len(word) > 70 for word in line.split())
    ]
    assert max(map(len, lines), default=0) <= 80 or "--json" in arguments
    assert not re.search(r" $", done.stdout, re.MULTILINE)
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


def one(name, *arguments, **more):
    (engine,) = ok("status", name, "--json", *arguments, **more)["engines"]
    return engine


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(30)


@pytest.fixture
def cast(engine_name):
    cast = Cast()
    yield cast
    cast.end()
    for name in inspect.engines():
        if name.startswith(engine_name):
            assert inspect.clean(name)[0].removed


@pytest.fixture(scope="module")
def island():
    """The start of a command line that runs on a /dev/shm of its own, 64 MiB as in a container."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = "mount -t tmpfs -o size=64m tmpfs /dev/shm && echo ready && exec sleep 600"
    try:
        holder = subprocess.Popen(
            ["unshare", "--mount", *user, "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        pytest.skip("needs unshare of util-linux")
    if holder.stdout.readline() != "ready\n":
        pytest.skip(f"needs a mount namespace: {holder.communicate()[1]}")
    yield ["nsenter", "--target", str(holder.pid), "--mount", *(["--user", "--preserve-credentials"] if user else [])]
    holder.kill()
    holder.communicate()


# --- in general


def test_the_version_is_told_to_people_and_machines():
    assert ok("--version") == f"conduit {conduit.__version__}\n"
    versions = ok("--version", "--json")
    assert versions["conduit"] == conduit.__version__
    assert versions["numpy"] == np.__version__


def test_the_help_names_every_command_and_loads_nothing_heavy():
    program = "import sys, conduit.cli as c\ntry: c.app(['--help'])\nexcept SystemExit: print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=True
    )
    commands = ("demo", "status", "import", "export", "checkpoint", "checkpoints", "clean", "doctor", "bench")
    assert all(f" {command} " in done.stdout for command in commands)
    loaded = set(re.findall(r"'(\w+)'", done.stdout))
    assert "conduit" in loaded
    assert not loaded & {"torch", "triton", "gymnasium", "matplotlib", "ucxx"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "nobody"], "Expected an engine named 'nobody', found none"),
        (["clean", "nobody"], "Expected an engine named 'nobody', found none"),
        (["status", "no/body"], "Expected an engine name of 1 to 100 letters"),
        (["demo", "--plot", "/nowhere/plot.png"], "Expected plot to lie in a folder that exists"),
        (["demo", "--minutes", "0"], "Expected minutes above 0"),
    ],
    ids=["status", "clean", "bad name", "plot", "minutes"],
)
def test_an_error_is_one_line_and_exit_code_2(arguments, said):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"conduit: {said}")


def test_ctrl_c_ends_a_command_without_a_traceback(cast, engine_name):
    cast.start("owner", engine_name)
    command = [sys.executable, "-m", "conduit.cli", "status", engine_name, "--interval", "60"]
    looking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    maps = Path(f"/proc/{looking.pid}/wchan")
    end = time.monotonic() + 30
    while "nanosleep" not in maps.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    looking.send_signal(signal.SIGINT)
    out, err = looking.communicate(timeout=30)
    assert (looking.returncode, out) == (130, "")
    assert "Traceback" not in err


# --- status


def test_status_shows_tables_pages_policies_and_writers(cast, engine_name):
    owner = cast.start("owner", engine_name)
    writer = cast.start("writer", engine_name, rows=400)
    engine = one(engine_name)
    assert (engine["state"], engine["problem"], engine["backing"]) == ("running", None, "shm")
    assert (engine["owner_alive"], engine["in_use"], engine["creator_pid"]) == (True, True, owner.pid)
    assert engine["bytes"] == (SHM / f"cdt.{os.getuid()}.{engine_name}").stat().st_size
    assert (engine["writers_alive"], engine["writers_dead"]) == (1, 0)
    by_pid = {one["pid"]: one for one in engine["participants"]}
    assert (by_pid[owner.pid]["rows"], by_pid[owner.pid]["roles"]) == (0, ["owner"])
    assert by_pid[writer.pid] | {"since_ns": 0, "name": ""} == {
        "number": 1,
        "pid": writer.pid,
        "name": "",
        "alive": True,
        "since_ns": 0,
        "roles": ["writer"],
        "rows": 400,
        "pages": 1,
        "leases": 0,
        "rows_per_s": 0.0,
    }
    (table,) = engine["tables"]
    schema = conduit.Schema.from_example({"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0})
    assert table["fingerprint"] == schema.fingerprint
    assert [field["name"] for field in table["fields"]] == ["obs", "action", "reward"]
    assert table["bytes_per_row"] == 16 + 8 + 4 + 2 + 16
    assert (table["rows_visible"], table["rows_written"], table["rows_evicted"]) == (400, 400, 0)
    assert (table["writers_alive"], table["writers_dead"]) == (1, 0)
    pages = table["pages"]
    assert pages["open"] == 1
    assert (
        sum(pages[state] for state in ("free", "preparing", "open", "sealed")) * table["page_rows"] == table["capacity"]
    )
    assert engine["policies"] == [{"name": "policy", "version": 1, "arrays": 1, "bytes": 32, "publisher_alive": True}]

    text = ok("status", engine_name)
    assert re.search(rf"^{engine_name}  running$", text, re.MULTILINE)
    assert re.search(r"^  replay +replay +400 +[\d,]+ +0 +1 alive$", text, re.MULTILINE)
    assert "writers 1 alive, 0 dead; owner 1; 2 of 128 seats taken" in text
    assert "obs float32[4]" not in text
    everything = ok("status", engine_name, "--all")
    assert everything.splitlines()[0] == text.splitlines()[0]
    assert "400 of" in everything
    assert "obs float32[4], action int64, reward float32" in everything
    assert re.search(rf"^ +{owner.pid}  owner   alive", everything, re.MULTILINE)
    assert re.search(rf"^ +{writer.pid}  writer  alive .* 400 ", everything, re.MULTILINE)
    assert "obs float32[4], action int64" in ok("status", engine_name, "-v")


def test_status_shows_what_waits_in_a_queue_and_who_has_claimed_what(engine_name):
    table = conduit.Table.queue(conduit.Schema([conduit.Field("x", "int64")]), 100, rollout_length=4)
    with conduit.Engine.create(engine_name, {"q": table}) as engine:
        writer = engine.writer("q")
        for number in range(10):
            writer.append(x=number)
        claim = engine.consumer("q", format="numpy").next()
        (found,) = one(engine_name)["tables"]
        assert found["queue"] == {
            "rollout_length": 4,
            "waiting": 4,
            "unfinished": 2,
            "claimed": 4,
            "claims": [{"participant": 0, "pid": os.getpid(), "rows": 4}],
            "delivered_again": 0,
        }
        assert "q: 4 rows waiting, 2 in unfinished rollouts of 4 ticks, 4 claimed" in ok("status", engine_name)
        text = ok("status", engine_name, "--all")
        assert re.search(r"owner, writer, consumer +alive", text)
        assert re.search(r"queue +4 rows waiting, 2 in unfinished rollouts of 4 ticks, 4 claimed", text)
        assert re.search(rf"claims +4 rows by process {os.getpid()}", text)
        claim.ack()


def test_status_shows_what_a_limiter_is_against_and_a_frozen_table(engine_name):
    table = conduit.Table(conduit.Schema([conduit.Field("x", "int64")]), 100, limiter=conduit.Limits(1.0, 1, 0.0, 4))
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        writer = engine.writer("t")
        for number in range(4):
            writer.append(x=number)
        engine.table("t").freeze()
        (found,) = one(engine_name)["tables"]
        assert found["frozen"]
        assert (found["limiter"]["inserted"], found["limiter"]["max_diff"], found["limiter"]["sampling"]) == (
            4,
            4.0,
            None,
        )
        assert found["limiter"]["inserting"].endswith("1 more sample frees it")
        brief = ok("status", engine_name)
        assert "inserts wait" in brief
        assert "t: frozen, it takes no rows" in brief
        assert "t: inserting is blocked by max_diff" in brief
        text = ok("status", engine_name, "--all")
        assert re.search(r"frozen +it takes no rows", text)
        assert re.search(r"limiter +1 samples per insert from 1 row on, range 0 to 4", text)
        assert "inserting is blocked by max_diff" in text
        engine.table("t").limiter.change(conduit.MinSize(2))
        (found,) = one(engine_name)["tables"]
        assert (found["limiter"]["min_diff"], found["limiter"]["inserting"]) == (None, None)


def test_rates_are_measured_over_the_interval_and_left_out_when_it_is_0(cast, engine_name):
    cast.start("owner", engine_name)
    busy = cast.start("busy", engine_name, rows=8)
    engine = one(engine_name, "--interval", "0.3")
    assert 10 < engine["tables"][0]["rows_per_s"] < 10_000
    assert [one["rows_per_s"] > 10 for one in engine["participants"] if one["pid"] == busy.pid] == [True]
    assert re.search(r"written \([\d,]+/s\)", ok("status", engine_name, "--all"))
    engine = one(engine_name, "--interval", "0")
    assert engine["tables"][0]["rows_per_s"] is None
    assert {one["rows_per_s"] for one in engine["participants"]} == {None}
    assert "/s)" not in ok("status", engine_name, "--interval", "0", "--all")


def test_a_killed_writer_is_shown_dead_with_the_page_it_left(cast, engine_name):
    cast.start("owner", engine_name)
    writer = cast.start("writer", engine_name, rows=40)
    kill(writer)
    engine = one(engine_name)
    assert (engine["writers_alive"], engine["writers_dead"]) == (0, 1)
    (dead,) = [one for one in engine["participants"] if not one["alive"]]
    assert (dead["pid"], dead["pages"], dead["rows"]) == (writer.pid, 1, 40)
    assert (engine["tables"][0]["writers_alive"], engine["tables"][0]["writers_dead"]) == (0, 1)
    text = ok("status", engine_name)
    assert "writers 0 alive, 1 dead" in text
    assert "0 alive, 1 dead\n" in text
    with conduit.attach(engine_name) as client:
        assert client.recover() <= 1  # the seat it left may have been taken, and its page with it
    engine = one(engine_name)
    assert engine["writers_dead"] == 0
    assert engine["tables"][0]["pages_recovered"] == 1
    assert "1 page of dead writers" in ok("status", engine_name, "--all")


def test_an_engine_whose_owner_was_killed_is_orphaned_and_then_dead(cast, engine_name):
    owner = cast.start("owner", engine_name)
    writer = cast.start("writer", engine_name, rows=40)
    kill(owner)
    assert one(engine_name)["state"] == "orphaned"
    text = ok("status", engine_name)
    assert f"conduit.Engine.adopt('{engine_name}')" in " ".join(text.split())
    assert "alive" in text
    kill(writer)
    engine = one(engine_name)
    assert (engine["state"], engine["in_use"]) == ("dead", False)
    assert engine["tables"][0]["rows_visible"] == 40
    assert f"conduit clean {engine_name}" in ok("status", engine_name)


def test_a_memfd_engine_is_shown_while_it_lives_and_its_note_afterwards(cast, engine_name):
    owner = cast.start("owner", engine_name, backing="memfd")
    cast.start("writer", engine_name, rows=8)
    engine = one(engine_name)
    assert (engine["state"], engine["backing"]) == ("running", "memfd")
    assert engine["tables"][0]["rows_visible"] == 8
    assert run("clean", engine_name).returncode == 1
    for process in cast.processes:
        kill(process)
    engine = one(engine_name)
    assert (engine["state"], engine["bytes"], engine["creator_pid"]) == ("dead", 0, 0), owner.pid
    assert "only the note of it is left" in ok("status", engine_name)
    assert "removed" in ok("clean", engine_name)
    assert run("status", engine_name).returncode == 2


def test_a_truncated_segment_is_shown_as_damaged(cast, engine_name):
    kill(cast.start("owner", engine_name))
    os.truncate(SHM / f"cdt.{os.getuid()}.{engine_name}", 8192)
    engine = one(engine_name)
    assert (engine["state"], engine["in_use"], engine["bytes"]) == ("damaged", False, 8192)
    assert "it was truncated" in engine["problem"]
    assert "it was truncated" in " ".join(ok("status", engine_name).split())
    assert "removed" in ok("clean", engine_name)


def test_another_users_engine_is_shown_as_denied_and_kept(engine_name):
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a file of another user")
    bare = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    path = SHM / f"cdt.0.{engine_name}"
    path.touch(0o600)
    try:
        os.chown(path, 65534, 65534)
        assert one(engine_name, prefix=bare)["state"] == "denied"
        assert "private to the user that created" in " ".join(ok("status", engine_name, prefix=bare).split())
        assert "private to the user that created" in " ".join(ok("clean", engine_name, prefix=bare, code=1).split())
        assert path.exists()
    finally:
        path.unlink()


def test_wide_schemas_and_long_names_keep_to_80_columns(engine_name):
    example = {f"obs.camera_number_{i}": np.zeros((84, 84, 4), np.uint8) for i in range(12)}
    schema = conduit.Schema.from_example(example | {"action": 0, "reward": 0.0})
    name = f"{engine_name}-{'long' * 20}"
    table = conduit.Table(schema, capacity=64, max_stack=4, max_n_step=3)
    weights = {f"layer{i}.weight": np.zeros(1) for i in range(30)}
    with conduit.Engine.create(name, {"replay-of-everything": table}, policies={"the-policy": weights}):
        brief, text = ok("status", name), ok("status", name, "--all")
    assert "replay-of-everything" in brief
    assert "obs.camera_number_11 uint8[84, 84, 4]" in " ".join(text.split())
    assert "stacks up to 4, up to 3 steps" in " ".join(text.split())


# --- clean


def test_clean_keeps_what_a_live_process_holds_and_removes_it_once_all_are_dead(cast, engine_name):
    owner = cast.start("owner", engine_name)
    writer = cast.start("writer", engine_name, rows=40)
    kept = {"engines": [{"name": engine_name, "removed": False, "why": "its owner is alive"}]}
    assert ok("clean", engine_name, "--json", code=1) == kept
    kill(owner)
    assert "kept" in ok("clean", engine_name, code=1)
    assert one(engine_name)["tables"][0]["rows_visible"] == 40
    kill(writer)
    (done,) = ok("clean", engine_name, "--json")["engines"]
    assert done["removed"]
    assert re.fullmatch(r"its owner is dead, and no process is attached to it; [\d,]+ bytes freed", done["why"])
    assert not (SHM / f"cdt.{os.getuid()}.{engine_name}").exists()


def test_clean_without_a_name_goes_through_all_engines(island, light, tmp_path):
    env = light | {"XDG_RUNTIME_DIR": str(tmp_path)}
    cast = Cast(*island, env=env)
    try:
        assert ok("clean", prefix=island, env=env) == "No engines of this user.\n"
        assert ok("status", prefix=island, env=env) == "No engines of this user.\n"
        cast.start("owner", "alive")
        kill(cast.start("owner", "dead-1"))
        kill(cast.start("owner", "dead-2"))
        kill(cast.start("owner", "note", backing="memfd"))
        user = os.getuid() if os.geteuid() == 0 else 0
        fill = f"umask 077; head -c 4096 /dev/urandom >/dev/shm/cdt.{user}.foreign; : >/dev/shm/cdt.{user}.empty"
        subprocess.run([*island, "sh", "-c", fill], check=True)
        listed = ok("status", "--json", "--interval", "0", prefix=island, env=env)["engines"]
        states = {one["name"]: one["state"] for one in listed}
        assert states == {
            "alive": "running",
            "dead-1": "dead",
            "dead-2": "dead",
            "empty": "dead",
            "foreign": "damaged",
            "note": "dead",
        }
        assert [one["name"] for one in listed] == sorted(states)
        doctor = {one["name"]: one for one in ok("doctor", "--json", prefix=island, env=env)["checks"]}
        assert doctor["leftovers"]["details"]["engines"] == ["dead-1", "dead-2", "empty", "foreign", "note"]
        text = ok("clean", prefix=island, env=env)
        verdicts = {name: verdict for verdict, name in re.findall(r"^(removed|kept) +([\w-]+)", text, re.MULTILINE)}
        assert verdicts == {
            "alive": "kept",
            "dead-1": "removed",
            "dead-2": "removed",
            "empty": "removed",
            "foreign": "kept",
            "note": "removed",
        }
        assert "remove /dev/shm/cdt." in " ".join(text.split())
        remaining = ok("status", "--json", "--interval", "0", prefix=island, env=env)["engines"]
        assert [one["name"] for one in remaining] == ["alive", "foreign"]
    finally:
        cast.end()


# --- doctor


def checks_of(document):
    return {one["name"]: one for one in document["checks"]}


def stubbed(folder, **modules):
    """An environment in which these packages are what the test says they are."""
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)
    return environment(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")


@pytest.fixture
def light(tmp_path):
    """An environment whose packages are imported at once, for what is not about them."""
    (tmp_path / "packages").mkdir()
    return stubbed(tmp_path / "packages", torch=TORCH, triton="", gymnasium="", matplotlib="")


def test_the_doctor_finds_this_machine_well(light):
    compiling = {"CONDUIT_KERNELS": "compile"}
    document = ok("doctor", "--json", env=environment(**compiling))
    assert document["healthy"]
    checks = checks_of(document)
    assert all(one["status"] in ("ok", "warning") for one in checks.values() if one["required"])
    assert checks["shm backing"]["found"] == "created, written, read back and closed"
    assert "compare-and-swap" in checks["atomics"]["found"]
    assert checks["kernel cache"]["details"]["loaded"] + checks["kernel cache"]["details"]["compiled"] > 5
    assert not [name for name in inspect.engines() if name.startswith("doctor-")]
    text = ok("doctor", env=light | compiling)
    assert "Conduit works here" in text
    assert all(name in text for name in checks)


def test_the_doctor_names_the_64_mib_trap_of_containers(island, light):
    document = ok("doctor", "--json", prefix=island, env=light)
    shm = checks_of(document)["/dev/shm"]
    assert document["healthy"]
    assert (shm["status"], shm["details"]["bytes"]) == ("warning", 64 << 20)
    assert "--shm-size" in shm["remedy"]


def test_a_doctor_without_room_for_an_engine_ends_with_1(island, light):
    script = f"mount -t tmpfs -o size=8k tmpfs /dev/shm && exec {sys.executable} -m conduit.cli doctor --json"
    own = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run([*island, *own], capture_output=True, text=True, env=light, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    checks = checks_of(json.loads(done.stdout))
    assert checks["shm backing"]["status"] == "broken"
    assert "Expected" in checks["shm backing"]["found"]
    assert checks["memfd backing"]["status"] == "ok"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (
            "raise ImportError('libtorch_cpu.so: cannot open')",
            "its import fails: ImportError: libtorch_cpu.so: cannot open",
        ),
        ("import os\nos.kill(os.getpid(), 11)", "its import was ended by SIGSEGV"),
        ("", "its import fails: AttributeError: module 'torch' has no attribute '__version__'"),
    ],
    ids=["import error", "crash", "empty"],
)
def test_a_required_package_that_cannot_be_imported_is_reported_and_ends_with_1(tmp_path, code, found):
    env = stubbed(tmp_path, torch=code, triton="", ucxx="", gymnasium="", matplotlib="")
    document = ok("doctor", "--json", code=1, env=env)
    checks = checks_of(document)
    assert not document["healthy"]
    assert (checks["torch"]["status"], checks["torch"]["found"]) == ("broken", found)
    assert "install it anew: pip install 'conduit-rl[torch]'" in checks["torch"]["remedy"]


def test_optional_packages_that_are_broken_do_not_make_the_doctor_unhappy(tmp_path):
    ucxx = "__version__ = '0.52'\ndef get_ucx_version(): return (1, 19, 0)"
    env = stubbed(tmp_path, torch=TORCH, triton="1/0", ucxx=ucxx, gymnasium="1/0", matplotlib="1/0")
    checks = checks_of(ok("doctor", "--json", env=env))
    assert checks["cuda"]["found"] == "2 devices, the first NVIDIA H200, 150.0 GiB, compute capability 9.0"
    assert checks["ucxx"]["found"] == "0.52, UCX 1.19.0"
    assert {checks[name]["status"] for name in ("triton", "gymnasium", "matplotlib")} == {"broken"}
    assert checks["triton"]["found"] == "its import fails: ZeroDivisionError: division by zero"


def test_kernels_that_are_kept_nowhere_are_a_warning_with_the_remedy(monkeypatch):
    monkeypatch.setattr(checks, "trial", lambda _backing: machine.Outcome(True, "written"))
    monkeypatch.setattr(machine, "kernel_cache", lambda: machine.KernelCache("", (), 0, 0))
    cache = next(one for one in checks.of_engine() if one.name == "kernel cache")
    assert (cache.status, cache.required) == ("warning", False)
    assert "every process compiles its kernels anew" in cache.found
    assert "NUMBA_CACHE_DIR" in cache.remedy


def test_a_compiler_that_is_switched_off_is_what_the_doctor_reports(light):
    document = ok("doctor", "--json", code=1, env=light | {"NUMBA_DISABLE_JIT": "1", "CONDUIT_KERNELS": "compile"})
    numba = checks_of(document)["numba"]
    assert (numba["status"], numba["remedy"]) == ("broken", "unset NUMBA_DISABLE_JIT")


# --- demo


def test_the_demo_runs_through_the_command_line_and_says_in_its_exit_code_that_it_was_too_short():
    pytest.importorskip("gymnasium")
    result = ok("demo", "--minutes", "0.01", "--actors", "1", "--no-plot", "--no-display", "--json", code=1)
    assert (result["solved"], result["interrupted"], result["plot"]) == (False, False, None)


# --- bench


def test_bench_compares_then_measures_both_and_says_in_its_exit_code_whether_one_is_slow():
    done = run("bench", "--seconds", "0", "--json")
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert len(document["rows"]) == 5
    for row in document["rows"]:
        assert row["conduit_per_s"] > 0
        assert row["plain_per_s"] > 0
        assert row["low"] <= row["ratio"] <= row["high"]
    assert done.returncode == any(row["verdict"] == "slow" for row in document["rows"])


# --- the documentation


def test_every_key_and_state_is_documented(cast, engine_name, light):
    cast.start("owner", engine_name)
    documents = [ok("--version", "--json"), one(engine_name), ok("doctor", "--json", env=light)]
    bench = json.loads(run("bench", "--seconds", "0", "--json").stdout)
    documents[-1]["checks"] = [one | {"details": {}} for one in documents[-1]["checks"]]
    documents.append(bench)
    documents.append(json.loads(DemoResult(*[None] * len(fields(DemoResult))).to_json()))
    keys = {"conduit", "interval_s", "engines", "removed", "why", *inspect.State.__args__}

    def gather(value):
        if isinstance(value, dict):
            keys.update(value)
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                gather(item)

    gather(documents)
    gather(documents[2]["versions"])
    text = re.sub(r"^```.*?^```$", "", DOCS.read_text(), flags=re.MULTILINE | re.DOTALL)
    documented = set(re.findall(r"[\w-]+", " ".join(re.findall(r"`([^`]+)`", text))))
    assert keys - documented == set()


# --- checkpoint, checkpoints


def test_checkpoints_of_a_running_engine_are_made_listed_and_verified(cast, engine_name, tmp_path):
    cast.start("owner", engine_name)
    cast.start("writer", engine_name, rows=400)
    folder = tmp_path / "kept"
    assert f"{folder}/0000000001\n  " in ok("checkpoint", engine_name, str(folder))
    made = ok("checkpoint", engine_name, str(folder), "--json")
    assert made["path"] == str(folder / "0000000002")
    assert (made["rows"], made["rows_left_out"], made["problem"]) == ({"replay": 400}, 0, None)
    text = ok("checkpoints", str(folder), "--verify")
    assert re.search(rf"0000000002  {engine_name} .* 400  good\n", text)
    file = folder / "0000000001" / "tables" / "replay" / "meta.npy"
    file.write_bytes(file.read_bytes()[:-1])
    first, second = ok("checkpoints", str(folder), "--verify", "--json", code=1)["checkpoints"]
    assert first["path"] == f"{folder}/0000000001"
    assert "meta.npy" in first["problem"]
    assert second == made
    with pytest.raises(CheckpointError, match="found none"):
        look(tmp_path / "nowhere", verify=False, quiet=True)
