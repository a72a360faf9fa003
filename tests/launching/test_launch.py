"""Actors in processes of their own: started again when they die, failed when they die too often, and gone with their owner."""

import contextlib
import json
import multiprocessing
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit.errors import ActorError, Closed, ConfigError, Forked, WaitTimeout
from conduit.launching import crew
from tests.launching import acting

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 90.0


def until(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not (met := condition()):
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.01)
    return met


def said(folder, *names):
    """What actors left, once all have."""

    def read():
        with contextlib.suppress(FileNotFoundError):
            return [json.loads((Path(folder) / name).read_text()) for name in names]
        return None

    found = until(read)
    return found[0] if len(names) == 1 else found


def is_gone(pid):
    """Whether a process has ended; one that only waits for its parent to notice has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children():
    """Process ids of what any thread of this process has started."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [pid for task in tasks for pid in task.read_text().split()]


def descriptors():
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def marked(mark):
    """Processes that carry a variable in their environment, as every descendant of the one that got it does."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"CONDUIT_TEST_MARK={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return [pid for pid in found if not is_gone(pid)]


@pytest.fixture(autouse=True)
def nothing_is_left():
    threads = threading.active_count()
    yield
    assert threading.active_count() == threads
    assert conduit.alarms._alarms == []
    tracker = multiprocessing.resource_tracker._resource_tracker._pid
    assert [pid for pid in children() if pid != str(tracker)] == []


def test_each_actor_gets_its_index_and_the_arguments_and_prints_where_it_is_told_to(tmp_path):
    before = descriptors()
    with (tmp_path / "out").open("w") as out:
        with conduit.launch(
            acting.tell, 2, args=(tmp_path, 5), kwargs={"word": "hm"}, env={"OMP_NUM_THREADS": "3"}, stdout=out
        ) as actors:
            assert len(actors) == 2
            assert {str(one.pid) for one in actors.status()} <= set(children())
            assert repr(actors) == "<Actors of tell: 2 running>"
            actors.join(PATIENCE)
            assert [(one.index, one.state, one.attempt) for one in actors.status()] == [
                (0, "returned", 0),
                (1, "returned", 0),
            ]
        first, second = said(tmp_path, "0-0", "1-0")
    assert (first["index"], second["index"]) == (0, 1)
    assert first["rest"] == [5]
    assert first["count"] == 2
    assert first["word"] == "hm"
    assert first["threads"] == "3"
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["actor 0 says hm", "actor 1 says hm"]
    assert descriptors() == before
    actors.close()
    actors.abort()
    with pytest.raises(Closed):
        actors.kill(0)


@pytest.mark.parametrize("told_by_the_kernel", [True, False])
def test_actors_that_die_are_started_again_and_each_death_says_what_it_was(tmp_path, monkeypatch, told_by_the_kernel):
    if not told_by_the_kernel:

        def refuse(_pid):
            raise PermissionError

        monkeypatch.setattr(os, "pidfd_open", refuse)
    deaths, ways = [], ["raise", "kill", "exit", "sys.exit", "live"]
    with conduit.launch(acting.die, 5, args=(tmp_path, ways, 1), on_death=deaths.append) as actors:
        found = said(tmp_path, "0-1", "1-1", "2-1", "3-1", "4-0")
        assert [one["pid"] for one in found] == [one.pid for one in actors.status()]
        actors.check()
        actors.kill(4)
        assert said(tmp_path, "4-1")["pid"] == actors.status()[4].pid
        with pytest.raises(WaitTimeout, match="5 still run"):
            actors.join(0.01)
        assert actors.running == 5
    assert [one.state for one in actors.status()] == ["returned"] * 5
    assert all(death.restarted for death in deaths)
    how = {death.index: death for death in deaths}
    assert "raised ValueError: no luck in attempt 0; started again as pid" in str(how[0])
    assert 'raise ValueError(f"no luck' in how[0].traceback
    assert "launching/child.py" not in how[0].traceback
    assert how[0].traceback in str(how[0].__cause__)
    assert "was killed by SIGKILL (exit code -9), which Conduit did not send: as the kernel does when memory" in str(
        how[1]
    )
    assert (how[1].exitcode, how[1].traceback, how[1].__cause__) == (-9, "", None)
    assert "ended with exit code 7 and no exception" in str(how[2])
    assert "raised SystemExit: enough" in str(how[3])
    assert "was killed by its owner" in str(how[4])


def test_an_actor_that_dies_too_often_has_failed_while_the_others_go_on(tmp_path, caplog):
    with pytest.raises(
        ActorError, match=r"(?s)Actor 0 .* raised ValueError: no luck in attempt 2; .* 2 times"
    ) as caught:
        with conduit.launch(acting.die, 2, args=(tmp_path, ["raise", "live"], 9), restarts=2) as actors:
            until(lambda: actors.failures)
            said(tmp_path, "1-0")
            assert [one.state for one in actors.status()] == ["failed", "running"]
            with pytest.raises(ActorError) as checked:
                actors.check()
            assert "no luck in attempt 2" in checked.value.traceback
            with pytest.raises(ActorError):
                actors.join(PATIENCE)
            assert actors.failures[0].restarted is False
        pytest.fail("the block was left without an error")
    assert "in die" in str(caught.value.__cause__)
    assert caught.value is not checked.value
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR"]
    assert "no luck in attempt 1" in caplog.records[1].getMessage()
    assert [one.state for one in actors.status()] == ["failed", "returned"]


def test_restarts_are_a_rate_and_not_a_total(tmp_path):
    with conduit.launch(acting.die, 1, args=(tmp_path, ["raise"], 3), restarts=1, per=1e-6, on_death=str) as actors:
        said(tmp_path, "0-3")
        assert not actors.failures


def test_several_failures_are_one_error_that_notes_the_others_and_one_of_the_body_is_not_replaced(tmp_path):
    with pytest.raises(KeyError) as caught:
        with conduit.launch(acting.die, 2, args=(tmp_path, ["raise", "exit"], 9), restarts=0, on_death=str) as actors:
            until(lambda: len(actors.failures) == 2)
            with pytest.raises(ActorError) as checked:
                actors.check()
            raise KeyError("mine")
    assert len(checked.value.__notes__) == 1
    assert {checked.value.index, int(re.search(r"Actor (\d)", checked.value.__notes__[0])[1])} == {0, 1}
    assert len(caught.value.__notes__) == 2
    assert any("no luck in attempt 0" in note for note in caught.value.__notes__)


def test_actors_return_when_they_are_told_to_and_what_they_started_goes_with_them(tmp_path):
    with conduit.launch(acting.linger, 2, args=(tmp_path, ["polite", "helped"]), grace=PATIENCE) as actors:
        found = said(tmp_path, "0-0", "1-0")
        assert not is_gone(found[1]["helper"])
    assert [one.state for one in actors.status()] == ["returned", "returned"]
    # it was killed with the group; only its parent could wait until the kernel has let it go
    until(lambda: is_gone(found[1]["helper"]))
    assert said(tmp_path, "0-100")["stopping"] is True


def test_actors_that_do_not_return_leave_their_blocks_and_stopped_ones_too(tmp_path, monkeypatch):
    monkeypatch.setattr(crew, "_TERM_GRACE", PATIENCE)
    with conduit.launch(acting.linger, 2, args=(tmp_path, ["busy", "stopped"]), grace=0.0) as actors:
        found = said(tmp_path, "0-0", "1-0")
        until(lambda: Path(f"/proc/{found[1]['pid']}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    assert all(is_gone(one["pid"]) for one in found)
    assert [one.state for one in actors.status()] == ["stopped", "stopped"]
    assert all(one["left"] for one in said(tmp_path, "0-100", "1-100"))


def test_an_actor_that_misses_the_first_signal_hears_the_second(tmp_path):
    with conduit.launch(acting.linger, 1, args=(tmp_path, ["once deaf"]), grace=0.0) as actors:
        pid = said(tmp_path, "0-0")["pid"]
    assert is_gone(pid)
    assert actors.status()[0].state == "stopped"
    assert said(tmp_path, "0-100")["left"]


def test_an_actor_that_does_not_hear_is_killed(tmp_path):
    with conduit.launch(acting.linger, 1, args=(tmp_path, ["deaf"]), grace=0.0) as actors:
        pid = said(tmp_path, "0-0")["pid"]
    assert is_gone(pid)
    assert actors.status()[0].state == "stopped"
    assert not (tmp_path / "0-100").exists()


def test_abort_kills_at_once_and_a_forked_child_ends_nothing(tmp_path):
    with conduit.launch(acting.linger, 1, args=(tmp_path, ["busy"]), grace=PATIENCE) as actors:
        pid = said(tmp_path, "0-0")["pid"]
        child = os.fork()
        if child == 0:
            try:
                actors.close()
                actors.abort()
                actors.join(0.0)
            except Forked:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert not is_gone(pid)
        actors.abort()
        assert is_gone(pid)
    assert actors.status()[0].state == "stopped"


def test_waits_end_when_the_actor_is_to_stop_and_an_exception_of_its_own_is_raised(tmp_path, engine_name):
    schema = conduit.Schema.from_example({"obs": np.zeros(2, np.float32), "action": 0, "reward": 0.0})
    policies = {"policy": {"w": np.zeros(1, np.float32)}}
    tables = {"replay": conduit.Table(schema, 1000)}
    arguments = (tmp_path, engine_name)
    with conduit.Engine.create(engine_name, tables, policies=policies):
        with pytest.raises(ActorError, match=r"Actor 1 .* raised OSError: the log is full; it was to return"):
            with conduit.launch(acting.wait_for_weights, 2, args=arguments, grace=PATIENCE, on_death=str) as actors:
                said(tmp_path, "0-0", "1-0")
    assert [one.state for one in actors.status()] == ["stopped", "failed"]


def test_queues_and_pipes_of_multiprocessing_reach_an_actor_that_is_started_again():
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    reader, writer = context.Pipe(duplex=False)
    with conduit.launch(acting.put, 1, args=(queue, writer), on_death=str) as actors:
        writer.close()
        actors.join(PATIENCE)
        assert queue.get() == 0
        assert reader.poll(PATIENCE)
        assert reader.recv() == 1
    reader.close()
    queue.close()


def test_rows_of_killed_actors_stay_and_a_loader_that_waits_is_told_when_the_last_has_failed(engine_name):
    schema = conduit.Schema.from_example({"obs": np.zeros(2, np.float32), "action": 0, "reward": 0.0})
    deaths = []
    with conduit.Engine.create(engine_name, {"replay": conduit.Table(schema, 1000)}) as engine:
        with pytest.raises(ActorError, match="the environment is gone"):
            with (
                conduit.launch(acting.write, 1, args=(engine_name, 20), restarts=1, on_death=deaths.append) as actors,
                engine.loader("replay", batch_size=64, min_rows=1000, format="numpy") as loader,
            ):
                with pytest.raises(ActorError, match="the environment is gone"):
                    loader.next(timeout=10 * PATIENCE)
                assert actors.running == 0
        assert [death.restarted for death in deaths] == [True, False]
        with engine.loader("replay", batch_size=512, min_rows=1, format="numpy") as loader:
            batch = loader.next()
        assert set(batch["action"].tolist()) == {0, 1}
        assert batch["obs"].min() >= 0


def test_two_launches_run_side_by_side_and_an_actor_may_launch_others(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "other").mkdir()
    with (
        conduit.launch(acting.nest, 1, args=(tmp_path,)),
        conduit.launch(acting.linger, 1, args=(tmp_path / "other", ["polite"])) as other,
    ):
        inner = said(tmp_path / "inner", "0-0")["pid"]
        said(tmp_path / "other", "0-0")
        other.close()
        assert not is_gone(inner)
    assert is_gone(inner)


PROGRAM = """
    import multiprocessing, os, sys
    from pathlib import Path
    import conduit
    from tests.launching import acting

    def main():
        folder = Path(sys.argv[1])
        queue = multiprocessing.get_context("spawn").Queue()
        with (
            conduit.launch(acting.linger, 3, args=(folder, ["polite", "deaf", "stopped"]), grace=0.5),
            conduit.launch(acting.nest, 1, args=(folder / "nest",), kwargs={}, env={"X": "1"}),
            conduit.launch(print, 1, args=(queue,)) as printing,
        ):
            printing.join(%r)
            print("ready", flush=True)
            conduit.Actor().wait(%r)

    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def program(tmp_path):
    """A program that launches seven processes, one by an actor, and waits; and where they leave what they say."""
    (tmp_path / "nest" / "inner").mkdir(parents=True)
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM % (PATIENCE, PATIENCE)))
    return path, tmp_path


def all_there(folder):
    said(folder, "0-0", "1-0", "2-0")
    said(folder / "nest", "0-0")
    said(folder / "nest" / "inner", "0-0")


def test_a_killed_owners_actors_are_gone_and_theirs_and_the_tracker(program):
    path, folder = program
    mark = f"killed-{os.getpid()}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CONDUIT_TEST_MARK": mark}
    with subprocess.Popen([sys.executable, path, folder], env=environment, stdout=subprocess.PIPE) as owner:
        all_there(folder)
        assert len(marked(mark)) >= 6
        owner.kill()
    until(lambda: not marked(mark), 10.0)


def test_ctrl_c_in_a_terminal_is_one_interrupt_in_the_owner_and_quiet_in_the_actors(program):
    path, folder = program
    mark = f"interrupted-{os.getpid()}"
    pid, terminal = pty.fork()
    if pid == 0:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "CONDUIT_TEST_MARK": mark}
        os.execve(sys.executable, [sys.executable, str(path), str(folder)], environment)
    try:
        all_there(folder)
        shown = b""
        while b"ready" not in shown:
            shown += os.read(terminal, 1 << 16)
        os.write(terminal, b"\x03")
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while more := os.read(terminal, 1 << 16):
                shown += more
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
        for left in marked(mark):
            os.kill(left, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(status) in (-signal.SIGINT, 130)
    assert shown.count(b"Traceback") == 1, shown.decode()
    assert shown.count(b"KeyboardInterrupt") == 1, shown.decode()
    assert not marked(mark)


def run_program(text, *, arguments=(), folder):
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, *(arguments or (path,))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=folder,
    )


def test_a_program_that_does_not_end_its_actors_ends_them_as_it_ends(tmp_path):
    text = """
        import sys, conduit
        from tests.launching import acting
        if __name__ == "__main__":
            actors = conduit.launch(acting.linger, 1, args=(".", ["polite"]))
            while not __import__("os").path.exists("0-0"):
                conduit.Actor().wait(0.01)
            print(actors.status()[0].pid)
    """
    done = run_program(text, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert is_gone(int(done.stdout))
    assert said(tmp_path, "0-100")["stopping"] is True


def test_a_program_without_a_guarded_main_is_told_so(tmp_path):
    text = """
        import conduit
        def act(actor):
            pass
        with conduit.launch(act, 1) as actors:
            actors.join(60)
    """
    done = run_program(text, folder=tmp_path)
    assert done.returncode == 1
    assert "ActorError: Actor 0" in done.stderr
    assert "under `if __name__ == '__main__':`" in done.stderr


def test_a_function_of_an_interactive_session_is_refused_with_what_to_do(tmp_path):
    text = "import conduit\ndef act(actor): pass\nconduit.launch(act, 1)"
    done = run_program("", arguments=("-c", text), folder=tmp_path)
    assert done.returncode == 1
    assert "ConfigError: Expected a function that a new process can import, got act" in done.stderr
    assert "%%writefile actors.py" in done.stderr


@pytest.mark.parametrize(
    ("function", "options", "what"),
    [
        (lambda _actor: None, {}, "the function .*lambda"),
        (acting.die, {"args": (1, threading.Lock())}, r"args\[1\], a lock,"),
        (acting.die, {"kwargs": {"times": lambda: 0}}, r"kwargs\['times'\], a function,"),
        (acting.die, {"args": "engine"}, "args as a tuple"),
        ("acting.die", {}, "a function"),
        (acting.die, {"restarts": -1}, "restarts"),
        (acting.die, {"per": -1.0}, "per"),
        (acting.die, {"grace": float("nan")}, "grace"),
    ],
)
def test_what_cannot_be_launched_is_refused_at_the_call(function, options, what):
    with pytest.raises(ConfigError, match=what):
        conduit.launch(function, 1, **options)


@pytest.mark.parametrize("count", [0, 1.5, True])
def test_a_count_that_is_none_is_refused(count):
    with pytest.raises(ConfigError, match="count"):
        conduit.launch(acting.die, count)


def test_a_process_that_cannot_be_started_is_an_error_of_the_call(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        conduit.launch(acting.die, 2)


def test_an_actor_s_seed_is_a_function_of_the_jobs_seed_its_index_and_its_attempt():
    assert conduit.Actor(1, 4, 2).seed(7) == 1734722684
    assert len({conduit.Actor(i, 4, a).seed(s) for i in range(4) for a in range(4) for s in range(4)}) == 64
    with pytest.raises(ConfigError, match="base"):
        conduit.Actor().seed(-1)


def test_an_actor_made_by_hand_is_never_told_to_stop():
    actor = conduit.Actor()
    assert not actor.stopping
    assert actor.wait(0.0) is False
    assert repr(conduit.Actor(2, 3, 1)) == "<Actor 2 of 3, attempt 1>"
