"""The demo end to end, with real actors that are killed, and its parts one by one."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit.demo import DemoResult, Settings, crew, run
from conduit.demo.crew import ActorView, Crew
from conduit.demo.display import Display, Lines, Live, Silent, View, choose
from conduit.demo.learner import Interrupt, Learner
from conduit.demo.network import empty, q_values
from conduit.demo.plot import draw
from conduit.demo.record import History, Sample, Scored

pytest.importorskip("gymnasium")

ROOT = Path(__file__).resolve().parents[1]
RANDOM_RETURN = 25.0  # a little above what random play gets on CartPole
LIMIT = 100.0


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits for its parent to notice has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def actors_of(pid: int) -> list[int]:
    """Process ids of the actors that a process has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found = []
    for child in [int(child) for task in tasks for child in task.read_text().split()]:
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"conduit.launching.child" in command:
            found.append(child)
    return found


def until(condition, seconds=LIMIT):
    deadline = time.monotonic() + seconds
    while not (met := condition()):
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.02)
    return met


def segments(name: str) -> list[str]:
    return [entry.name for entry in Path("/dev/shm").iterdir() if entry.name.endswith(f".{name}")]


class Meddler(Display):
    """Kills an actor once training goes, and ends the run when the new one acts and an evaluation is there."""

    def __init__(self, interrupt):
        self.interrupt = interrupt
        self.killed = None
        self.pids = set()
        self.notes = []

    def show(self, view):
        self.pids |= {actor.pid for actor in view.actors}
        if self.killed is None and view.updates > 100:
            self.killed = view.actors[1].pid
            os.kill(self.killed, signal.SIGKILL)
        replaced = view.actors[1].restarts == 1 and view.actors[1].state == "acting"
        if replaced and view.evaluations and max(view.evaluations) > 2 * RANDOM_RETURN:
            os.kill(os.getpid(), signal.SIGINT)

    def note(self, text, detail=""):
        self.notes.append(text)

    def close(self):
        pass


def test_a_killed_actor_is_replaced_training_goes_on_and_ctrl_c_leaves_nothing(engine_name):
    with Interrupt() as interrupt:
        meddler = Meddler(interrupt)
        learner = Learner(engine_name, Settings(evaluate_every=500), 0, LIMIT, meddler, interrupt)
        result = learner.run()
    assert result.interrupted or result.solved
    assert result.best_evaluation > 2 * RANDOM_RETURN
    assert result.restarts == 1
    assert any(f"actor 1 (pid {meddler.killed}) was killed by SIGKILL" in note for note in meddler.notes)
    assert result.rows > 1_000
    assert result.updates > 500
    # Every version was acted upon by the live actors before the next. While one of the two is replaced, half the rows come.
    wanted = Settings().rows_per_update
    assert 0.4 * wanted < (result.rows - Settings().warmup_rows) / result.updates < 1.5 * wanted
    assert len(meddler.pids) == 3
    assert all(is_gone(pid) for pid in meddler.pids)
    assert actors_of(os.getpid()) == []
    assert segments(engine_name) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_gives_up_in_time_and_prints_json(engine_name, tmp_path, capsys):
    picture = tmp_path / "run.png"
    result = run(seed=1, minutes=0.1, plot=picture, json=True, name=engine_name)
    out, err = capsys.readouterr()
    assert json.loads(out) == result.as_dict()
    assert not result.interrupted
    assert result.verdict in err
    assert picture.exists() == (result.plot is not None)
    assert segments(engine_name) == []
    assert actors_of(os.getpid()) == []


def test_a_signal_while_it_starts_ends_it_in_order(engine_name):
    def strike():
        until(lambda: actors_of(os.getpid()))
        os.kill(os.getpid(), signal.SIGTERM)

    striker = threading.Thread(target=strike)
    striker.start()
    result = run(minutes=1, plot=None, display=False, name=engine_name)
    striker.join()
    assert result.interrupted
    assert not result.solved
    assert segments(engine_name) == []
    assert actors_of(os.getpid()) == []


def test_actors_end_when_the_learner_is_killed(engine_name):
    program = f"import conduit.demo; conduit.demo.run(minutes=1, plot=None, name={engine_name!r})"
    with subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
    ) as learner:
        actors = until(lambda: found if len(found := actors_of(learner.pid)) == 2 else None)
        learner.kill()
    until(lambda: all(is_gone(pid) for pid in actors))
    assert segments(engine_name)
    conduit.Engine.adopt(engine_name).close()
    assert segments(engine_name) == []


def test_actors_that_die_at_once_are_given_up_with_what_they_printed(engine_name, monkeypatch):
    monkeypatch.setattr(crew, "_ACTOR_PATIENCE", 0.1)
    notes = []
    settings = Settings(actors=1)
    with Crew(engine_name, settings, 0, lambda text, detail: notes.append((text, detail))) as team:
        with pytest.raises(
            conduit.errors.ActorError, match=rf"raised .*EngineNotFound.*{engine_name}.* 3 times within 60 s"
        ):
            until(lambda: team.poll(0.1))
        assert len(notes) == 4
        assert team.restarts == 3
        assert "EngineNotFound" in notes[0][1]
    assert actors_of(os.getpid()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"actors": 0}, "actors"),
        ({"envs": 0}, "envs"),
        ({"seed": -1}, "seed"),
        ({"minutes": 0}, "minutes"),
        ({"plot": "/nowhere/at/all.png"}, "plot"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_argument_is_named(arguments, named):
    with pytest.raises(conduit.errors.ConfigError, match=named):
        run(**arguments)


@pytest.mark.parametrize(("actors", "envs"), [(1, 1), (2, 8), (3, 5), (4, 64)])
def test_rows_per_update_do_not_depend_on_the_number_of_environments(actors, envs):
    settings = Settings(actors=actors, envs=envs)
    rows = settings.ticks_per_version * actors * envs
    assert rows >= settings.rows_per_version
    assert rows / settings.updates_per_version == pytest.approx(settings.rows_per_update, rel=0.05)
    floors = [floor for actor in range(actors) for floor in settings.floors(actor)]
    assert len(set(floors)) == actors * envs
    assert min(floors) == pytest.approx(settings.lowest_floor)
    assert max(floors) <= settings.highest_floor * 1.0001


def test_numpy_and_torch_networks_are_the_same():
    torch = pytest.importorskip("torch")
    from conduit.demo.agent import module

    net = module(4, 32, 2)
    weights = {name: tensor.numpy() for name, tensor in net.state_dict().items()}
    like = empty(4, 32, 2)
    assert {name: (array.shape, array.dtype) for name, array in like.items()} == {
        name: (array.shape, array.dtype) for name, array in weights.items()
    }
    obs = np.random.default_rng(0).standard_normal((7, 4), np.float32)
    with torch.no_grad():
        expected = net(torch.from_numpy(obs)).numpy()
    np.testing.assert_allclose(q_values(weights, obs), expected, atol=1e-5)


def test_only_a_terminated_row_has_no_future():
    torch = pytest.importorskip("torch")
    from conduit.demo.agent import Agent, one_thread

    def value_after(terminated):
        agent = Agent(4, 2, Settings(hidden=16, learning_rate=3e-3, target_rate=0.05, discount=0.5), seed=0)
        batch = {
            "obs": torch.ones(8, 4),
            "next_obs": torch.ones(8, 4),
            "action": torch.zeros(8, dtype=torch.int64),
            "reward": torch.ones(8),
            "terminated": torch.full((8,), terminated),
            "truncated": torch.ones(8, dtype=torch.bool),
        }
        with one_thread():
            for _ in range(400):
                agent.update(batch)
        return q_values(agent.arrays(), np.ones((1, 4), np.float32))[0, 0]

    assert value_after(terminated=True) == pytest.approx(1.0, abs=0.05)
    assert value_after(terminated=False) == pytest.approx(2.0, abs=0.1)


def test_the_demo_and_its_actors_import_without_torch():
    probe = (
        "import sys, conduit.demo, conduit.demo.actor; "
        "print(sorted({'torch', 'rich', 'gymnasium', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.fixture
def history() -> History:
    history = History(trained_from=2.0)
    for i in range(60):
        seconds = i / 4
        history.samples.append(Sample(seconds, 100 * i, 50 * i, max(0.0, (seconds - 2) / 10), seconds / 20))
        history.finish_episode(seconds, 100 * i, 5.0 * i)
    history.evaluations += [Scored(5.0, 2_000, 100.0), Scored(14.0, 5_600, 490.0)]
    history.restarts.append(7.0)
    return history


@pytest.fixture
def result() -> DemoResult:
    return DemoResult(
        solved=True,
        interrupted=False,
        seed=3,
        evaluation=490.0,
        best_evaluation=490.0,
        seconds=15.0,
        startup_seconds=2.0,
        rows=6_000,
        episodes=60,
        updates=3_000,
        versions=94,
        rows_per_s=400.0,
        batches_per_s=200.0,
        waited_share=0.1,
        batch_microseconds=41.0,
        restarts=1,
    )


def test_rates_and_shares_come_from_the_samples(history):
    rows, batches = history.rates()
    assert rows == pytest.approx(400)
    assert batches == pytest.approx(200)
    assert history.waited_share() == pytest.approx(0.1)
    assert history.recent_return == pytest.approx(np.mean([5.0 * i for i in range(20, 60)]))
    assert History().rates() == (0.0, 0.0)
    assert History().waited_share() == 0.0


def test_the_picture_is_drawn_with_and_without_evaluations(history, result, tmp_path):
    pytest.importorskip("matplotlib")
    draw(history, result, tmp_path / "all.png")
    short = History(trained_from=0.1)
    short.samples += [Sample(0.2, 10, 0, 0.0, 0.0)]
    short.finish_episode(0.2, 10, 12.0)
    draw(short, result, tmp_path / "short")
    for name in ("all.png", "short"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_verdict_says_how_it_ended(result):
    assert "solved in 15 s: mean return 490.0" in result.verdict
    assert "1 actor died and was restarted" in result.verdict
    assert json.loads(result.to_json()) == result.as_dict()


@pytest.fixture
def view() -> View:
    return View(
        engine="demo",
        seed=3,
        seconds=12.0,
        limit=180.0,
        training=True,
        rows=6_000,
        episodes=60,
        updates=3_000,
        version=94,
        rows_per_s=2_400.0,
        batches_per_s=1_200.0,
        batch_microseconds=41.0,
        waited_share=0.013,
        recent_return=123.4,
        evaluations=[20.0, 310.5],
        actors=(ActorView(0, 4711, "acting", 94, 3_000, 0), ActorView(1, 4712, "starting", 0, 3_000, 2)),
    )


def test_lines_are_printed_now_and_then_and_notes_at_once(view):
    stream = io.StringIO()
    with choose(shown=True, stream=stream) as lines:
        assert isinstance(lines, Lines)
        lines.show(view)
        lines.show(view)
        lines.note("actor 1 (pid 4712) ended with status 1", "Traceback\nValueError: no")
    first, *rest = stream.getvalue().splitlines()
    for part in ("2,400 rows/s", "1,200 batches/s", "1.3%", "123.4", "310.5"):
        assert part in first
    assert rest == ["! actor 1 (pid 4712) ended with status 1", "    Traceback", "    ValueError: no"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_live_table_shows_rates_actors_and_errors(view, encoding):
    from rich.console import Console

    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    with Live(Console(file=stream, force_terminal=True, width=110)) as live:
        live.note("actor 1 (pid 4712) ended with status 1", "Traceback\nValueError: no")
        live.show(view)
    text = stream.buffer.getvalue().decode(encoding)
    for part in ("2,400 rows/s", "1,200 batches/s", "1.3%", "123.4", "310.5", "4711", "starting", "ValueError: no"):
        assert part in text


def test_nothing_is_shown_when_nothing_is_asked_for():
    assert isinstance(choose(shown=False), Silent)


def test_the_quickstart_example_finds_the_way():
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / "quickstart.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "policy >>>>>>" in done.stdout
    looked = re.findall(
        r"^update +([\d,]+): +[\d,]+ episodes, the new ones' mean return (\d\.\d\d)$", done.stdout, re.MULTILINE
    )
    assert [update for update, _ in looked] == ["1", "501", "1,001", "1,501"]
    assert float(looked[0][1]) < 0.5
    assert float(looked[-1][1]) > 0.8
