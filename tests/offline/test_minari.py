"""Minari: datasets made by its own calls, in a folder of the test; nothing is downloaded."""

import gymnasium as gym
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer

import conduit
from conduit import offline
from conduit.offline.columns import joined

pytestmark = pytest.mark.filterwarnings("ignore:.*(is set to None|env_spec is None).*:UserWarning")

BOX = spaces.Box(-10, 10, (3,), np.float32)


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    return tmp_path / "datasets"


def episode(number, length, end, observations=None, actions=None):
    rng = np.random.default_rng(number)
    terminations, truncations = np.zeros((2, length), bool)
    if end == "terminated":
        terminations[-1] = True
    elif end == "truncated":
        truncations[-1] = True
    return EpisodeBuffer(
        id=number,
        observations=rng.normal(size=(length + 1, 3)).astype(np.float32) if observations is None else observations,
        actions=rng.integers(0, 2, length) if actions is None else actions,
        rewards=rng.normal(size=length),
        terminations=terminations,
        truncations=truncations,
    )


def create(name, episodes, observation_space=BOX, action_space=None, **options):
    return minari.create_dataset_from_buffers(
        name,
        episodes,
        observation_space=observation_space,
        action_space=action_space or spaces.Discrete(2),
        jpeg_encoding=False,
        **options,
    )


def load(engine_name, source, **options):
    engine = conduit.Engine.create(engine_name, {"t": offline.table_for(source, **options)})
    return engine, offline.load(engine, "t", source)


ENDS = ("terminated", "truncated", "", "terminated", "truncated")


@pytest.mark.parametrize("how", ["id", "dataset", "path"])
def test_a_dataset_comes_in_with_every_next_observation(engine_name, datasets, how):
    made = create("test/box-v0", [episode(n, 3 + 4 * n, end) for n, end in enumerate(ENDS)])
    source = {"id": "test/box-v0", "dataset": made, "path": datasets / "test" / "box-v0"}[how]
    seen = offline.describe(source)
    assert (seen.format, seen.rows, seen.episodes) == ("minari", 55, 5)
    assert str(seen.schema["reward"]).startswith("float64")
    engine, loaded = load(engine_name, source)
    with engine:
        assert (loaded.rows, loaded.episodes) == (55, 5)
        steps = joined(list(engine.table("t").scan()))
        starts = [*np.flatnonzero(steps.starts).tolist(), 55]
        for number, one in enumerate(made.iterate_episodes()):
            here = steps.part(starts[number], starts[number + 1])
            np.testing.assert_array_equal(here.columns["obs"], one.observations[:-1])
            np.testing.assert_array_equal(here.finals["obs"][0], one.observations[-1])
            np.testing.assert_array_equal(here.columns["action"], one.actions)
            np.testing.assert_array_equal(here.columns["reward"], one.rewards)
            np.testing.assert_array_equal(here.terminated, one.terminations)
            # data that stop without a flag are cut off, as by a time limit
            assert here.truncated[-1] == (ENDS[number] != "terminated")


def test_nested_spaces_become_dotted_fields_and_come_back(engine_name):
    space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "joints": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(5)]),
        }
    )
    action = spaces.Dict({"arm": spaces.Box(-1, 1, (2,), np.float32), "grip": spaces.MultiBinary(2)})
    rng = np.random.default_rng(0)
    episodes = []
    for number, length in enumerate((4, 6)):
        observations = {
            "camera": rng.integers(0, 256, (length + 1, 8, 8, 3), np.uint8),
            "joints": (rng.normal(size=(length + 1, 2)), rng.integers(0, 5, length + 1)),
        }
        actions = {
            "arm": rng.normal(size=(length, 2)).astype(np.float32),
            "grip": rng.integers(0, 2, (length, 2), np.int8),
        }
        episodes.append(episode(number, length, "truncated", observations, actions))
    first = create("nested-v0", episodes, space, action)
    engine, _ = load(engine_name, "nested-v0")
    with engine:
        assert engine.table("t").schema.observation_names == ("obs.camera", "obs.joints.0", "obs.joints.1")
        saved = offline.save_minari(engine, "t", "again-v0", observation_space=space, action_space=action)
    assert (saved.rows, saved.episodes, saved.left_out) == (10, 2, 0)
    again = minari.load_dataset("again-v0")
    for one, other in zip(first.iterate_episodes(), again.iterate_episodes(), strict=True):
        np.testing.assert_equal(other.observations, one.observations)
        np.testing.assert_equal(other.actions, one.actions)
        np.testing.assert_array_equal(other.rewards, one.rewards)
        np.testing.assert_array_equal(other.truncations, one.truncations)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_a_table_goes_out_and_comes_back_with_the_same_transitions(engine_name, end):
    create("a-v0", [episode(n, 5 + n, end) for n in range(7)])
    engine, _ = load(engine_name, "a-v0")
    with engine:
        heard = []
        saved = offline.save_minari(engine, "t", "b-v0", progress=lambda *a: heard.append(a), author="somebody")
        assert (saved.rows, saved.episodes) == (56, 7)
        assert heard[-1] == (56, 56)
        other, _ = load(f"{engine_name}-2", "b-v0")
        with other:
            one, two = (joined(list(e.table("t").scan())) for e in (engine, other))
            for name in ("obs", "action", "reward"):
                np.testing.assert_array_equal(one.columns[name], two.columns[name])
            for what in ("terminated", "truncated", "starts", "places"):
                np.testing.assert_array_equal(getattr(one, what), getattr(two, what))
            np.testing.assert_array_equal(one.finals["obs"], two.finals["obs"])


def test_a_collected_dataset_of_a_real_environment_comes_in_whole(engine_name):
    environment = gym.make("CartPole-v1", max_episode_steps=30)
    rng = np.random.default_rng(0)
    episodes = []
    for number in range(4):
        obs, _ = environment.reset(seed=number)
        told = {"observations": [obs], "actions": [], "rewards": [], "terminations": [], "truncations": []}
        over = False
        while not over:
            action = int(rng.integers(2))
            obs, reward, terminated, truncated, _ = environment.step(action)
            told["observations"].append(obs)
            for key, value in zip(list(told)[1:], (action, reward, terminated, truncated), strict=True):
                told[key].append(value)
            over = terminated or truncated
        episodes.append(EpisodeBuffer(id=number, **told))
    dataset = minari.create_dataset_from_buffers("cartpole-v0", episodes, env=environment)
    environment.close()
    engine, loaded = load(engine_name, dataset, max_n_step=2)
    with engine, engine.loader("t", batch_size=64, min_rows=1, format="numpy") as loader:
        assert loaded.rows == dataset.total_steps
        batch = loader.next()
        assert batch["reward"].dtype == np.float64
        assert (batch["reward"] == 1).all()
        after = np.concatenate([e.observations[1:] for e in dataset.iterate_episodes()])
        assert all((after == row).all(1).any() for row in batch["next_obs"])


def test_what_an_unfinished_episode_cannot_keep_is_counted(engine_name):
    schema = conduit.Schema.from_example({"obs": np.zeros(3, np.float32), "action": 0, "reward": 0.0})
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 100)}) as engine:
        with engine.writer("t", keep_final=False) as writer:
            for n in range(10):
                writer.append(obs=np.full(3, n, np.float32), action=0, reward=1.0, terminated=n == 5)
        saved = offline.save_minari(engine, "t", "short-v0")
    assert (saved.rows, saved.episodes, saved.left_out) == (9, 2, 1)
    first, second = minari.load_dataset("short-v0").iterate_episodes()
    assert first.observations[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 5]
    assert first.terminations.tolist() == [False] * 5 + [True]
    assert second.observations[:, 0].tolist() == [6, 7, 8, 9]
    assert not second.terminations.any()


def test_what_does_not_fit_is_refused_before_anything_is_written(engine_name):
    create("a-v0", [episode(0, 5, "terminated")])
    schema = conduit.Schema.from_example({"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0})
    more = conduit.Schema.from_example({"obs": np.zeros(3, np.float32), "action": 0, "reward": 0.0, "value": 0.0})
    tables = {"t": conduit.Table(schema, 100), "more": conduit.Table(more, 100)}
    with conduit.Engine.create(engine_name, tables) as engine:
        with pytest.raises(conduit.errors.SourceError, match=r"float32 \(4,\).*float32 \(3,\).*'obs'.*'a-v0'"):
            offline.load(engine, "t", "a-v0")
        with pytest.raises(conduit.errors.SourceError, match=r"'value'.*'a-v0'"):
            offline.load(engine, "more", "a-v0")
        assert engine.table("t").scan().rows == engine.table("more").scan().rows == 0
        with pytest.raises(conduit.errors.ConfigError, match=r"'value'.*npz or Parquet"):
            offline.save_minari(engine, "more", "b-v0")


def test_a_dataset_that_is_not_here_is_refused_and_not_downloaded():
    with pytest.raises(conduit.errors.SourceError, match="'D4RL/door/human-v2'"):
        offline.describe("D4RL/door/human-v2")


def test_an_id_that_is_taken_is_refused(engine_name):
    create("a-v0", [episode(0, 5, "terminated")])
    engine, _ = load(engine_name, "a-v0")
    with engine, pytest.raises(conduit.errors.SourceError, match="already exists"):
        offline.save_minari(engine, "t", "a-v0")


def test_texts_block_nothing_unless_the_schema_names_them(engine_name):
    space = spaces.Dict({"mission": spaces.Text(9), "x": BOX})
    observations = {"mission": ["go"] * 4, "x": np.zeros((4, 3), np.float32)}
    create("text-v0", [episode(0, 3, "terminated", observations)], space)
    described = offline.describe("text-v0")
    assert described.schema.names == ("obs.x", "action", "reward")
    assert described.ignored == ("obs.mission",)
    assert described.skipped == {"obs.mission": "list of str"}
    engine, loaded = load(engine_name, "text-v0")
    with engine:
        assert (loaded.rows, loaded.skipped) == (3, {"obs.mission": "list of str"})
    schema = conduit.Schema([conduit.Field("obs.mission", "uint8", (9,), observation=True)])
    with pytest.raises(conduit.errors.SourceError, match=r"'obs\.mission'.*got list of str"):
        offline.table_for("text-v0", schema=schema)


def test_names_that_no_field_can_have_are_mapped_or_the_error_says_how(engine_name):
    space = spaces.Dict({"my camera": BOX, "x": BOX})
    observations = {"my camera": np.ones((4, 3), np.float32), "x": np.zeros((4, 3), np.float32)}
    create("odd-v0", [episode(0, 3, "terminated", observations)], space)
    with pytest.raises(conduit.errors.SourceError, match=r"columns=\{'<field>': 'obs.my camera'\}"):
        offline.describe("odd-v0")
    names = {"obs.camera": "obs.my camera", "rew": "reward"}
    described = offline.describe("odd-v0", columns=names)
    assert set(described.schema.names) == {"obs.x", "obs.camera", "action", "rew"}
    assert set(described.schema.observation_names) == {"obs.x", "obs.camera"}
    with conduit.Engine.create(engine_name, {"t": offline.table_for("odd-v0", columns=names)}) as engine:
        offline.load(engine, "t", "odd-v0", columns=names)
        (steps,) = engine.table("t").scan()
        assert (steps.columns["obs.camera"] == 1).all()
        assert (steps.finals["obs.camera"] == 1).all()
        with pytest.raises(conduit.errors.ConfigError, match=r"did you mean `obs\.camera`"):
            offline.load(engine, "t", "odd-v0", columns={"obs.camra": "obs.my camera"})
        with pytest.raises(conduit.errors.SourceError, match=r"did you mean `obs\.my camera`"):
            offline.load(engine, "t", "odd-v0", columns={"obs.camera": "obs.my camra"})


@pytest.mark.parametrize("package", ["pyarrow", "h5py", "minari"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, tmp_path, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    monkeypatch.setitem(__import__("sys").modules, f"{package}.parquet", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(conduit.errors.MissingExtra, match=r"conduit-rl\[offline\]"):
        offline.describe(tmp_path if package == "pyarrow" else "some-v0")
