"""The examples run as they stand: briefly here, and what they print says that they trained."""

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import conduit

pytest.importorskip("gymnasium")

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
TRAINED = ["dqn_per_nstep", "r2d2_cartpole", "ppo_cartpole", "sac_pendulum"]
QUICK = ["dqn_per_nstep", "ppo_cartpole"]
SHORT = ["atari_stacks", "hindsight", "dict_observations", "several_agents", "offline_bc", "token_rows"]
EVERY = {"ppo_cartpole": 2048, "sac_pendulum": 250}
"""Steps between evaluations where they are not 1,000."""
WARMUP = {"sac_pendulum": 500}
"""Steps before the first evaluation's."""
RANDOM = {"sac_pendulum": -1600.0}
"""Less than random play has; 25 where nothing else is said: random play has about 22, a policy of one action 9."""


def run(*command, cwd=ROOT):
    done = subprocess.run(
        [sys.executable, "-W", "error", *command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def segments():
    return {entry.name for entry in Path("/dev/shm").iterdir() if re.search(r"\.(dqn|r2d2|ppo|sac)-\d+$", entry.name)}


def evaluations(printed):
    return [float(score) for score in re.findall(r"^step .* mean return +(-?[\d.]+)$", printed, re.MULTILINE)]


def steps_for(name, count):
    """Steps for so many evaluations."""
    return WARMUP.get(name, 0) + count * EVERY.get(name, 1000)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in TRAINED]
)
def test_an_example_trains_prints_its_result_and_leaves_nothing(name):
    before = segments()
    printed = run(EXAMPLES / f"{name}.py", "--steps", str(steps_for(name, 3)), "--seed", "1")
    scores = evaluations(printed)
    assert len(scores) == 3
    assert max(scores) > RANDOM.get(name, 25.0)
    assert re.search(
        rf"^best mean return {max(scores)}, of the last evaluations -?[\d.]+, \d+ s$", printed, re.MULTILINE
    )
    assert segments() <= before


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINED)
def test_a_reference_runs_the_same_way(name):
    printed = run("-m", f"reference.{name}_numpy", "--steps", str(steps_for(name, 2)), cwd=EXAMPLES)
    assert len(evaluations(printed)) == 2
    assert "best mean return" in printed


@pytest.mark.long
def test_two_processes_with_a_queue_between_them_learn_digit_by_digit_as_one_with_arrays():
    own = run(EXAMPLES / "ppo_cartpole.py", "--steps", "6144", "--seed", "3")
    plain = run("-m", "reference.ppo_cartpole_numpy", "--steps", "6144", "--seed", "3", cwd=EXAMPLES)
    assert len(evaluations(own)) == 3
    assert evaluations(own) == evaluations(plain)


@pytest.mark.long
def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path):
    command = [sys.executable, EXAMPLES / "sac_pendulum.py", "--checkpoints", tmp_path, "--steps", "1250"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step  1,000"):
                os.killpg(process.pid, signal.SIGKILL)
    printed = run(*command[1:])
    steps = [int(step.replace(",", "")) for step in re.findall(r"^step +([\d,]+)", printed, re.MULTILINE)]
    assert steps in ([1000, 1250], [1250])
    for left in segments():
        (Path("/dev/shm") / left).unlink()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "atari_stacks",
            r"padding=repeat: 256 samples, \d\d+ of them padded, are what padding_type=reset shows\n"
            r"padding=zero: 256 samples, \d\d+ of them padded, are what padding_type=zero shows\n"
            r"stored: 7056 bytes a step instead of 56448\n",
        ),
        ("hindsight", r"goals reached: (9\d|100)% with hindsight, [1-6]\d% without\n"),
        ("dict_observations", r"obs\.camera: (.*\n)*\d+ of 256 samples end an episode; .*\n"),
        ("several_agents", r"team's reward, of 2: [01]\.\d\d in the first 200 games, 1\.[6-9]\d in the last .*\n"),
        (
            "offline_bc",
            r"saved [\d,]+ steps of 20 episodes\n(epoch \d: loss 0\.\d{3}\n){5}the clone's mean return is [3-5]\d\d of 500\n",
        ),
        ("token_rows", r"share of the wanted token: 0\.[01]\d at first, 0\.[6-9]\d at last; [1-9]\d* stale .*\n"),
    ],
)
def test_a_short_example_shows_what_it_says_and_leaves_nothing(name, said):
    printed = run(EXAMPLES / f"{name}.py")
    assert re.fullmatch(said, printed), printed
    assert name.replace("_", "-") not in {entry.name.split(".")[-1] for entry in Path("/dev/shm").iterdir()}


@pytest.mark.parametrize("name", [*TRAINED, *SHORT])
def test_an_example_stays_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 150


def test_curves_measure_judge_and_draw(tmp_path):
    pytest.importorskip("matplotlib")
    printed = run(EXAMPLES / "curves.py", "dqn_per_nstep", "--seeds", "2", "--steps", "1000", "--out", tmp_path)
    result = json.loads((tmp_path / "dqn_per_nstep.json").read_text())
    assert [(one["seed"], one["buffer"]) for one in result["runs"]] == [
        (0, "conduit"), (0, "numpy"), (1, "conduit"), (1, "numpy"),
    ]  # fmt: skip
    assert re.search(r'"p": [\d.]+', printed)
    assert '"same": ' in printed
    assert (tmp_path / "dqn_per_nstep.png").stat().st_size > 10_000


@pytest.fixture(scope="module")
def curves():
    pytest.importorskip("matplotlib")
    specification = importlib.util.spec_from_file_location("curves", EXAMPLES / "curves.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_permutation_test_counts_every_split(curves):
    # of the 6 ways to part four values into pairs two are as far apart as these
    assert curves.permutation(np.array([1.0, 2.0]), np.array([3.0, 4.0])) == pytest.approx(2 / 6, abs=1e-3)
    assert curves.permutation(np.array([1.0, 4.0]), np.array([2.0, 3.0])) == pytest.approx(1.0)


@pytest.mark.parametrize("name", TRAINED)
def test_the_recorded_curves_hold_what_the_page_says(curves, name):
    result = json.loads((ROOT / "docs" / "learning" / f"{name}.json").read_text())
    page = (ROOT / "docs" / "learning.md").read_text()
    verdicts = [("conduit", curves.judge(result))]
    if curves.EXAMPLES[name].resumed:
        verdicts.append(("resumed", curves.judge(result, "resumed")))
    for buffer, verdict in verdicts:
        assert verdict["same"]
        for what in ("all evaluations", "last 5"):
            one = verdict[what]
            for mean, deviation in (one[buffer], one["numpy"]):
                assert f"{mean} ± {deviation}" in page
            assert f"p = {one['p']}" in page


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


class Play:
    """Random play on CartPole, by ticks of a few environments; `final` marks those that only show an episode's end."""

    def __init__(self, envs, ticks):
        self.envs, self.ticks = envs, ticks

    def __iter__(self):
        rng = np.random.default_rng(0)
        obs, _ = self.envs.reset(seed=0)
        final = np.zeros(self.envs.num_envs, bool)
        for _ in range(self.ticks):
            action = rng.integers(0, 2, self.envs.num_envs)
            after, reward, terminated, truncated, _ = self.envs.step(action)
            yield obs, action, reward, terminated, truncated, after, final
            obs, final = after, terminated | truncated


def test_both_buffers_of_the_dqn_hold_the_same_transitions(load, engine_name):
    example, reference = load("dqn_per_nstep"), load("reference.dqn_per_nstep_numpy")
    settings = example.Settings(capacity=4_000)
    envs = load("training").make_envs(settings.envs)
    replay = reference.Replay(0, settings)
    schema = conduit.Schema.from_spaces(envs.single_observation_space, envs.single_action_space)
    table = conduit.Table(
        schema, 4_000, max_n_step=3, num_envs=settings.envs, priorities=conduit.Priorities(alpha=settings.alpha)
    )
    window = conduit.Transition(n_step=settings.n_step, gamma=settings.gamma)
    with (
        conduit.Engine.create(engine_name, tables={"replay": table}) as engine,
        engine.writer("replay", num_envs=settings.envs, autoreset="next_step") as writer,
        engine.loader(
            "replay", batch_size=128, window=window, sampling=conduit.Prioritized(), format="numpy"
        ) as loader,
    ):
        for obs, action, reward, terminated, truncated, after, _ in Play(envs, 400):
            writer.append(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
            replay.append(obs, action, reward, after, terminated, truncated)
        rows = {row.tobytes(): i for i, row in enumerate(replay.columns["obs"][: replay.written])}
        drawn = set()
        for _ in range(200):
            batch = loader.next()
            at = [rows[row.tobytes()] for row in batch["obs"]]
            drawn.update(at)
            for name in ("action", "terminated"):
                assert np.array_equal(batch[name], replay.columns[name][at])
            for name in ("reward", "discount"):
                np.testing.assert_allclose(batch[name], replay.columns[name][at], rtol=1e-6)
            assert np.array_equal(batch["next_obs"], replay.columns["next_obs"][at])
    assert len(drawn) > 0.99 * replay.written


def test_both_buffers_of_the_recurrent_agent_hold_the_same_sequences_and_probabilities(load, engine_name):
    example, reference = load("r2d2_cartpole"), load("reference.r2d2_cartpole_numpy")
    settings = example.Settings(capacity=4_000, length=12, burn_in=3)
    envs = load("training").make_envs(settings.envs)
    replay = reference.Replay(0, settings)
    schema = conduit.Schema.from_example({"obs": np.zeros(2, np.float32), "action": 0, "reward": np.float32(0)})
    table = conduit.Table(
        schema,
        4_000,
        max_length=settings.length,
        num_envs=settings.envs,
        priorities=conduit.Priorities(alpha=settings.alpha),
    )
    window = conduit.Sequence(settings.length, burn_in=settings.burn_in, overlap=settings.burn_in + 1)
    transform = {"reward": conduit.scale(settings.reward_scale)}
    with (
        conduit.Engine.create(engine_name, tables={"replay": table}) as engine,
        engine.writer("replay", num_envs=settings.envs, autoreset="next_step") as writer,
        engine.loader(
            "replay",
            batch_size=128,
            window=window,
            sampling=conduit.Prioritized(),
            transform=transform,
            format="numpy",
        ) as loader,
    ):
        for obs, action, reward, terminated, truncated, _, final in Play(envs, 400):
            seen = example.seen(obs)
            writer.append(obs=seen, action=action, reward=reward, terminated=terminated, truncated=truncated)
            replay.append(seen, action, reward, terminated, truncated, final)
        # a sequence among the newest steps runs into what is not written yet, unless its episode has ended before
        for back in range(settings.length - 1):
            steps = (replay.written - 1 - np.arange(back + 1)) % replay.ticks
            ended = replay.terminated[steps].any(0) | replay.truncated[steps[1:]].any(0)
            replay.mass[steps[-1], ~ended] = 0.0
        starts = np.flatnonzero(replay.mass)
        rows = {replay.obs.reshape(-1, 2)[start].tobytes(): start for start in starts}
        rng = np.random.default_rng(0)
        drawn = set()
        for _ in range(60):
            batch = loader.next()
            at = [rows[row.tobytes()] for row in batch["obs"][:, 0]]
            drawn.update(int(start) for start in at)
            for name, wanted in replay.gather(np.array(at)).items():
                assert np.array_equal(batch[name], wanted), name
            mass = replay.mass.ravel()
            np.testing.assert_allclose(batch["probabilities"], mass[at] / mass.sum(), rtol=1e-4)
            priorities = np.exp(rng.normal(size=len(at)))
            loader.update_priorities(batch.ids, priorities)
            mass[at] = (priorities + 1e-6) ** settings.alpha
    assert drawn == set(starts.tolist())
