"""However a command ends, it is an exit code and at most one line on standard error; what it prints suits where it goes."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
import typer

import conduit
from conduit import cli
from conduit.cli.ending import ended

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = conduit.Schema.from_example({"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0})
LONG = "n" * 300


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    return kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "TERM": "xterm-256color"} | more


@pytest.fixture
def engine(engine_name):
    tables = {
        "replay": conduit.Table(SCHEMA, 1000, limiter=conduit.MinSize(10)),
        "rollouts": conduit.Table.queue(SCHEMA, 1000),
    }
    with conduit.Engine.create(engine_name, tables) as engine:
        writer = engine.writer("replay", keep_final=False)
        for number in range(50):
            writer.append(obs=np.zeros(4, np.float32), action=number, reward=0.0)
        yield engine


@pytest.fixture
def places(tmp_path):
    """Paths that make trouble."""
    (tmp_path / "file").write_text("hello")
    (tmp_path / "empty").mkdir()
    for ending in ("npz", "parquet", "h5"):
        (tmp_path / f"bad.{ending}").write_bytes(b"garbage")
    (tmp_path / "damaged" / "0000000001").mkdir(parents=True)
    (tmp_path / "damaged" / "0000000001" / "manifest.json").write_text("{")
    return tmp_path


@pytest.fixture
def command(capsys):
    """Run a command in this process: (exit code, standard output, standard error)."""

    def run(*arguments):
        code = ended(lambda: cli._run([str(one) for one in arguments]))
        out, err = capsys.readouterr()
        return code, out, err

    with warnings.catch_warnings():  # a command says warnings in its own way
        yield run


BAD_NAMES = ("", "a/b", LONG, "nobody", "\udcff", "--nope")
BAD_FOLDERS = ("", "{at}/file", "{at}/file/below", "/proc/nowhere", "/dev/null/below", "{at}/" + LONG)
BAD_SOURCES = (
    "",
    "{at}/nothing.npz",
    "{at}/file",
    "{at}/bad.npz",
    "{at}/bad.parquet",
    "{at}/bad.h5",
    "{at}/empty",
    "no/dataset-v0",
    "{at}/" + LONG + ".npz",
)
BAD_NUMBERS = ("nan", "-1", "x", "")

SWEEP = {
    "status": [
        *([name] for name in BAD_NAMES),
        *(["{name}", option, number] for option in ("--interval", "--watch") for number in BAD_NUMBERS),
        ["{name}", "more"],
    ],
    "clean": [*([name] for name in BAD_NAMES), ["{name}", "more"]],
    "checkpoint": [
        *([name, "{at}/new"] for name in BAD_NAMES),
        *(["{name}", folder] for folder in BAD_FOLDERS),
        *(["{name}", "{at}/new", "--keep", number] for number in ("0", "x")),
        [],
        ["{name}"],
    ],
    "checkpoints": [
        *([path] for path in ("", "{at}/file", "{at}/empty", "/nowhere", "{at}/" + LONG, "{at}/file/below")),
        [],
    ],
    "import": [
        *([name, "replay", "{at}/bad.npz"] for name in BAD_NAMES),
        *(["{name}", "replay", source] for source in BAD_SOURCES),
        *(["{name}", "replay", "{at}/bad.npz", "--column", pair] for pair in ("", "x", "=", "x=")),
        ["{name}", "nothing", "{at}/bad.npz"],
        ["{name}", "rollouts", "{at}/bad.npz"],
        ["{name}", "replay"],
    ],
    "export": [
        *([name, "replay", "{at}/new"] for name in BAD_NAMES),
        *(["{name}", "replay", folder] for folder in BAD_FOLDERS),
        *(["{name}", "replay", folder, "--format", "parquet"] for folder in BAD_FOLDERS),
        *(["{name}", "replay", "bad id", "--format", kind] for kind in ("minari", "", "csv")),
        ["{name}", "nothing", "{at}/new"],
        ["{name}", "rollouts", "{at}/new"],
        ["{name}", "replay"],
    ],
    "doctor": [["more"], ["--nope"]],
    "warm": [["more"], ["--nope"], ["--all", "x"]],
    "bench": [*(["--seconds", number] for number in BAD_NUMBERS), ["more"]],
    "demo": [
        *(["--minutes", number] for number in ("0", *BAD_NUMBERS)),
        *([option, number] for option in ("--actors", "--envs") for number in ("0", "1.5", "x")),
        ["--seed", "-1"],
        *(
            ["--plot", path]
            for path in ("", "/nowhere/x.png", "/proc/x.png", "{at}/empty", "{at}/x.nothing", "{at}/" + LONG)
        ),
    ],
}


def test_the_sweep_has_every_command():
    assert set(SWEEP) == set(typer.main.get_command(cli.app).commands)


@pytest.mark.parametrize("name", SWEEP)
def test_a_command_with_arguments_that_make_no_sense_ends_with_2_and_one_line(command, engine, places, name):
    before = sorted(one.name for one in places.iterdir())
    for case in SWEEP[name]:
        arguments = [part.format(at=places, name=engine.name) for part in case]
        code, out, err = command(name, *arguments)
        assert (code, out) == (2, ""), (case, out, err)
        assert re.fullmatch(r"conduit: [^\n]{10,}\n", err), (case, err)
        assert "defect" not in err, (case, err)
    assert sorted(one.name for one in places.iterdir()) == before


@pytest.mark.parametrize("arguments", [["nope"], ["--nope"], ["statsu", "x"]], ids=["command", "option", "misspelt"])
def test_an_unknown_command_is_one_line_that_says_where_help_is(command, arguments):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"conduit: .*`conduit --help`\.\n", err)


def test_a_damaged_checkpoint_is_an_answer_and_no_error(command, places):
    code, out, err = command("checkpoints", places / "damaged", "--verify")
    assert (code, err) == (1, "")
    assert "bad: " in out


def test_the_option_watch_takes_seconds_or_none():
    assert cli._spelt_out(["status", "--watch"]) == ["status", "--watch=2.0"]
    assert cli._spelt_out(["status", "--watch", "pong", "-v"]) == ["status", "--watch=2.0", "pong", "-v"]
    assert cli._spelt_out(["status", "--watch", "0.5", "pong"]) == ["status", "--watch", "0.5", "pong"]
    assert cli._spelt_out(["status", "--watch=1"]) == ["status", "--watch=1"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (conduit.errors.NoSpace("Expected room,\n  got none"), 2, "conduit: Expected room, got none\n"),
        (PermissionError(13, "Permission denied", "/a"), 2, "conduit: Permission denied - /a\n"),
        (MemoryError(), 2, "conduit: Expected more memory than this process may have\n"),
        (KeyError("x"), 2, "conduit: KeyError: 'x' (this is a defect of Conduit; CONDUIT_TRACEBACK=1 shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["ours", "system", "memory", "defect", "Ctrl-C"],
)
def test_what_a_command_raises_becomes_an_exit_code_and_a_line(capsys, error, code, said):
    def work():
        raise error

    with warnings.catch_warnings():
        assert ended(work) == code
    assert capsys.readouterr() == ("", said)


def test_a_defect_shows_where_it_is_when_it_is_asked_to(capsys, monkeypatch):
    monkeypatch.setenv("CONDUIT_TRACEBACK", "1")
    with warnings.catch_warnings():
        assert ended(lambda: int("x")) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_warning_is_one_line_and_said_once(capsys):
    def work():
        for _ in range(3):
            warnings.warn("the disk\nis slow", RuntimeWarning, stacklevel=1)
        return 0

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert ended(work) == 0
    assert capsys.readouterr().err == "conduit: warning: the disk is slow\n"


# --- where the output goes; these are real processes


def shell(script, *arguments, **more):
    return subprocess.run(
        ["bash", "-c", script, "bash", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(PY=sys.executable, **more),
    )


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ('"$PY" -m conduit.cli status "$1" --interval 0 | true; exit ${PIPESTATUS[0]}', 141, ""),
        (
            '"$PY" -m conduit.cli status "$1" --interval 0 >/dev/full',
            2,
            "conduit: No space left on device - standard output\n",
        ),
        ('"$PY" -m conduit.cli status "$1" --interval 0 >&-', 0, ""),
    ],
    ids=["broken pipe", "full", "closed"],
)
def test_output_that_cannot_be_written_is_no_traceback(engine, script, code, said):
    done = shell(script, engine.name)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_full_disk_is_one_line_and_leaves_nothing(engine, tmp_path):
    script = 'mount -t tmpfs -o size=16k tmpfs "$2" && cd "$2" && "$PY" -m conduit.cli checkpoint "$1" "$2"; echo $?; ls -A "$2"'
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    try:
        done = subprocess.run(
            ["unshare", "--mount", *user, "bash", "-c", script, "bash", engine.name, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=environment(PY=sys.executable),
        )
    except FileNotFoundError:
        pytest.skip("needs unshare of util-linux")
    if done.stdout == "":
        pytest.skip(f"needs a mount namespace: {done.stderr}")
    assert done.stdout == "2\n"
    assert re.fullmatch(r"conduit: Expected room for a checkpoint in [^\n]*\n", done.stderr)


def on_a_terminal(*arguments, until=None):
    """What a command writes to a terminal of 80 columns, interrupted once `until` has been seen; and its exit code."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    env = environment()
    del env["COLUMNS"]
    process = subprocess.Popen(
        [sys.executable, "-m", "conduit.cli", *arguments], stdin=follower, stdout=follower, stderr=follower, env=env
    )
    os.close(follower)
    seen = b""
    with contextlib.suppress(OSError):  # the terminal is gone when its last writer is
        while part := os.read(leader, 65536):
            seen += part
            if until is not None and seen.count(until.encode()) >= 3:
                process.send_signal(signal.SIGINT)
                until = None
    os.close(leader)
    return process.wait(60), seen.decode()


def test_a_terminal_gets_colours_and_80_columns_and_a_pipe_neither(engine):
    code, seen = on_a_terminal("status", engine.name, "--interval", "0", "--all")
    assert code == 0
    assert "\x1b[" in seen
    bare = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert max(map(len, bare.splitlines())) <= 80
    done = shell('"$PY" -m conduit.cli status "$1" --interval 0 --all', engine.name)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    without_ages = [re.sub(r" {2,}\d+ s|\d+ s ago", "", text).split() for text in (bare, done.stdout)]
    assert without_ages[0] == without_ages[1]


def test_watch_on_a_terminal_shows_rates_in_place_until_ctrl_c(engine):
    code, seen = on_a_terminal("status", engine.name, "--watch", "0.1", until="rows/s")
    assert code == 130
    assert "Traceback" not in seen
    assert "\x1b[1A" in seen  # up a line: the next look takes the place of the one before


def watching(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "conduit.cli", "status", "--watch", "0.1", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def test_watch_without_a_terminal_prints_a_block_for_each_look_until_ctrl_c(engine):
    process = watching(engine.name)
    heads = 0
    while heads < 3:
        heads += process.stdout.readline().startswith(engine.name)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "\x1b" not in out


def test_watch_as_json_is_a_document_a_line_with_rates_and_ends_with_the_engine(engine):
    process = watching(engine.name, "--json")
    writer = engine.writer("replay", keep_final=False)
    looks = [json.loads(process.stdout.readline())]
    writer.append(obs=np.zeros(4, np.float32), action=0, reward=0.0)
    while not any(look["engines"][0]["tables"][0]["rows_per_s"] for look in looks):
        looks.append(json.loads(process.stdout.readline()))
    assert looks[0]["engines"][0]["tables"][0]["rows_per_s"] is None
    assert looks[0]["interval_s"] == 0.1
    engine.close()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["engines"] == []


SCRIPT = "import os; os.write(1, b'begun'); from conduit_command import main; main()"


@pytest.mark.parametrize("delay", [0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.9])
def test_an_interrupt_while_a_command_is_being_imported_ends_it_with_130_and_no_traceback(engine, delay):
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "status", engine.name, "--interval", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    ) as process:
        assert process.stdout.read(5) == b"begun"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_command_that_is_started_with_interrupts_ignored_goes_on_when_one_comes(engine):
    """As in a script's background, where Ctrl-C is for what runs in the foreground."""
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + SCRIPT
    with subprocess.Popen(
        [sys.executable, "-c", ignoring, "status", engine.name, "--interval", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    ) as process:
        assert process.stdout.read(5) == b"begun"
        for _ in range(10):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert json.loads(out)["engines"][0]["name"] == engine.name


def test_the_script_conduit_calls_what_runs_before_the_package_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"conduit": "conduit_command:main"}
    program = "import sys, conduit_command; print([one for one in sys.modules if one.partition('.')[0] in ('conduit', 'numpy')])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert "conduit_command.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
