"""Of several processes that miss a kernel one compiles it; nobody waits for the dead, or for ever; one line says what goes on."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import conduit
from conduit.errors import DataTimeout
from conduit.native.compile import turns

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start(tmp_path):
    """Start a program in a process of its own; what is left of them is killed."""
    running = []

    def begin(program, *arguments, **variables):
        environment = (
            os.environ
            | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "CONDUIT_KERNELS": "compile", "CONDUIT_KERNELS_QUIET": ""}
            | variables
        )
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE}
        one = subprocess.Popen([sys.executable, "-c", program, *arguments], text=True, env=environment, **pipes)
        running.append(one)
        return one

    yield begin
    for one in running:
        one.kill()
        one.communicate()


def ended(process, timeout=100):
    out, error = process.communicate(timeout=timeout)
    assert process.returncode == 0, error
    return out, error


KERNELS = """
from conduit.native.jit import inner, kernel

@inner
def shared(n):
    total = 0
    for i in range(n):
        total += i * i
    return total

@kernel("int64(int64)")
def first(n):
    return shared(n) + 1

@kernel("int64(int64)")
def second(n):
    return shared(n) + 2
"""

COMPILES = """
import json, sys
sys.stdin.readline()
import some_kernels
from conduit.native.compile import compiler
from conduit.native.jit import entry
assert (entry(some_kernels.first)(4), entry(some_kernels.second)(4)) == (15, 16)
print(json.dumps([compiler.compiled, compiler.loaded]))
"""


def test_no_kernel_is_compiled_twice_by_processes_that_miss_it_at_once(start, tmp_path):
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    crew = [start(COMPILES, NUMBA_CACHE_DIR=str(tmp_path / "cache")) for _ in range(4)]
    for one in crew:
        one.stdin.write("go\n")
        one.stdin.flush()
    said = [json.loads(ended(one)[0]) for one in crew]
    names = ["some_kernels.first", "some_kernels.second"]
    assert sorted(name for compiled, _ in said for name in compiled) == names
    assert sorted(name for _, loaded in said for name in loaded) == sorted(names * 3)


def test_an_index_that_cannot_be_read_counts_as_none(start, tmp_path):
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    for _ in range(2):
        one = start(COMPILES, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
        one.stdin.write("go\n")
        assert json.loads(ended(one)[0])[0] == ["some_kernels.first", "some_kernels.second"]
        for index in (tmp_path / "cache").rglob("*.nbi"):
            data = index.read_bytes()
            index.write_bytes(data[: len(data) // 2])


HOLDS = """
import sys, time
from conduit.native.compile import turns
with turns.turn(sys.argv[1], "kernel"):
    print("holds", flush=True)
    time.sleep(float(sys.argv[2]))
"""

WAITS = """
import sys, time
from conduit.native.compile import turns
began = time.monotonic()
with turns.turn(sys.argv[1], "kernel", float(sys.argv[2])):
    print(time.monotonic() - began)
with turns.turn(sys.argv[1], "other"):
    pass
"""


def test_a_turn_ends_with_the_process_that_has_it(start, tmp_path):
    holder = start(HOLDS, str(tmp_path), "100")
    assert holder.stdout.readline() == "holds\n"
    waiter = start(WAITS, str(tmp_path), "100")
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=10)
    assert ended(waiter)[1] == ""


def test_a_wait_for_a_turn_has_a_deadline_and_one_line_says_what_is_waited_for(start, tmp_path):
    holder = start(HOLDS, str(tmp_path), "100")
    assert holder.stdout.readline() == "holds\n"
    out, error = ended(start(WAITS, str(tmp_path), "1.5"))
    assert float(out) >= 1.5
    (line,) = error.splitlines()
    assert line.startswith("conduit: another process is compiling kernels for this machine")
    assert f"kept in {tmp_path}" in line
    assert "`conduit warm`" in line


def test_a_loader_that_waits_in_vain_is_told_that_another_process_compiles(start, tmp_path, monkeypatch, engine_name):
    schema = conduit.Schema.from_example({"obs": 0.0, "reward": 0.0})
    with conduit.Engine.create(engine_name, {"replay": conduit.Table(schema, 64)}) as engine:
        loader = engine.loader("replay", batch_size=1, format="numpy")
        with pytest.raises(DataTimeout, match=r"lower min_rows$"):
            loader.next(timeout=0)  # its kernels are there from here on
        compiler = types.SimpleNamespace(folders={str(tmp_path), str(tmp_path / "none")})
        monkeypatch.setitem(sys.modules, "conduit.native.compile.compiler", compiler)
        holder = start(HOLDS, str(tmp_path), "100")
        assert holder.stdout.readline() == "holds\n"
        with pytest.raises(DataTimeout, match=r"Another process is compiling kernels.*`conduit warm`"):
            loader.next(timeout=0)
        holder.kill()
        holder.wait(timeout=10)
        with pytest.raises(DataTimeout, match=r"lower min_rows$"):
            loader.next(timeout=0)
        loader.close()


def test_turns_at_different_kernels_do_not_wait_for_each_other(tmp_path):
    began = time.monotonic()
    with turns.turn(str(tmp_path), "one", 60), turns.turn(str(tmp_path), "other", 60):
        pass
    assert time.monotonic() - began < 30


LONG = """
import sys, time
from conduit.native.compile import turns
for number in range(3):
    with turns.turn(sys.argv[1], f"kernel {number}"):
        time.sleep(1.1)
"""


def test_one_line_is_said_of_compiling_once_it_has_taken_a_second(start, tmp_path):
    (line,) = ended(start(LONG, str(tmp_path)))[1].splitlines()
    assert line.startswith("conduit: compiling kernels for this machine")
    assert f"kept in {tmp_path}" in line
    assert "`conduit warm`" in line


UNKEPT = """
import sys, warnings
sys.stdin.readline()
import some_kernels
from conduit.native.compile import compiler
from conduit.native.jit import entry
compiler._Impl._locator_classes = []
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    entry(some_kernels.first)
    entry(some_kernels.second)
(one,) = seen
print(one.message)
"""


def test_without_a_folder_for_kernels_there_is_one_warning_with_the_remedy(start, tmp_path):
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    one = start(UNKEPT)
    one.stdin.write("go\n")
    out, _ = ended(one)
    assert "found no writable folder for compiled kernels" in out
    assert "set NUMBA_CACHE_DIR" in out
    assert "`conduit warm`" in out


FULL = """
import sys, warnings
sys.stdin.readline()
import errno, os
import some_kernels
from conduit.native.compile import compiler
from conduit.native.jit import entry
def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
compiler._Index.save = full
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert entry(some_kernels.first)(4) == 15
    assert entry(some_kernels.second)(4) == 16
(one,) = seen
print(one.message)
"""


def test_a_kernel_that_cannot_be_kept_is_used_and_told_once(start, tmp_path):
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    one = start(FULL, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    one.stdin.write("go\n")
    assert "No space left on device" in ended(one)[0]


WARMS = """
import sys, json
sys.stdin.readline()
import some_kernels
from conduit.native.compile import catalogue
from conduit.cli.warm import as_json, told, warmed
catalogue.kernels = lambda: iter([some_kernels.first, some_kernels.second])
catalogue.callbacks = lambda every: iter([(some_kernels.shared.function, "int64(int64)")])
done = warmed(every=False, quiet=True)
print(json.dumps([as_json(done), told(done)]))
"""


def test_warming_compiles_what_is_not_there_and_says_where_it_is_kept(start, tmp_path):
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    counts = []
    for _ in range(2):
        one = start(WARMS, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
        one.stdin.write("go\n")
        out, error = ended(one)
        document, text = json.loads(out)
        assert not error
        counts.append((document["compiled"], document["loaded"]))
        assert document["kept"]
        assert str(tmp_path / "cache") in text
    assert counts == [(3, 0), (0, 3)]
