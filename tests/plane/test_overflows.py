"""Numbers that grow past their bits follow a rule, and never end in others' bits; names that no file can have are refused."""

import numpy as np
import pytest

import conduit
from conduit.errors import ConfigError
from conduit.store.format import words as w
from tests.plane.conftest import CARTPOLE

OBS = np.zeros(4, np.float32)


@pytest.mark.parametrize("autoreset", ["disabled", "same_step", "next_step"])
def test_episodes_are_counted_modulo_2_to_the_32_and_leave_all_else_alone(make, autoreset):
    engine = make(capacity=1000, page_rows=300)
    writer = engine.writer("replay", num_envs=2, autoreset=autoreset)
    writer._stream.words[w.WRITER_EPISODES // 8] = 2**32 - 3
    ticks = 5 if autoreset == "next_step" else 4  # of an episode, the one that closes it included
    for tick in range(40):
        obs = np.full((2, 4), tick, np.float32)
        ends = np.full(2, tick % ticks == 3)
        writer.append(
            obs=obs,
            action=np.full(2, tick),
            reward=np.ones(2, np.float32),
            terminated=ends & [True, False],
            truncated=ends & [False, True],
            final=None if autoreset == "next_step" else obs + 1,
        )
    meta = engine._views["replay"].meta[:80]
    first = (meta["link"] & w.FIRST) != 0
    assert meta["episode"][first].tolist() == [(2**32 - 3 + k) % 2**32 for k in range(first.sum())]
    assert first.sum() > 10
    with engine.loader("replay", batch_size=2000, min_rows=1, format="numpy") as loader:
        batch = loader.next()
        tick = batch["action"]
        assert {2**32 - 1, 0} < set((batch.episodes & 0xFFFFFFFF).tolist())
        assert (batch.episodes >> 32 == writer.stream).all()
        np.testing.assert_array_equal(batch["terminated"] | batch["truncated"], tick % ticks == 3)
        assert not (batch["terminated"] & batch["truncated"]).any()
        np.testing.assert_array_equal(batch.steps, tick % ticks)
        np.testing.assert_array_equal(batch["next_obs"][:, 0], tick + 1)


def test_steps_of_an_endless_episode_stay_positive_and_leave_the_version_alone(make):
    engine = make(capacity=1000, max_stack=4)
    writer = engine.writer("replay")
    writer.version = 2**31 - 1
    writer.append(obs=OBS, action=0, reward=0.0)
    writer._stream._env_states[0, 2] = w.LAST_STEP - 5
    for k in range(1, 20):
        writer.append(obs=OBS + k, action=k, reward=0.0, terminated=k == 19, final=OBS + 20)
    meta = engine._views["replay"].meta
    assert meta["step"][1:20].tolist() == [
        *range(w.LAST_STEP - 5, w.LAST_STEP + 1),
        *range(w.AFTER_LAST_STEP, w.AFTER_LAST_STEP + 13),
    ]
    assert (meta["version"][:20] == 2**31 - 1).all()
    assert (meta["episode"][:20] == 0).all()
    window = conduit.Transition(stack=4)
    with engine.loader("replay", batch_size=500, window=window, min_rows=1, format="numpy") as loader:
        batch = loader.next()
        k = batch["action"]
        for back in range(4):
            np.testing.assert_array_equal(batch["obs"][:, 3 - back, 0], np.maximum(k - back, 0))
        np.testing.assert_array_equal(batch["terminated"], k == 19)


def test_a_policy_version_beyond_31_bits_is_stamped_as_the_largest_there_is(engine_name):
    policies = {"policy": {"w": np.zeros(1)}}
    with conduit.Engine.create(engine_name, {"t": conduit.Table(CARTPOLE, 100)}, policies=policies) as engine:
        slot = engine.policy("policy")
        slot.publish({"w": np.ones(1)})
        engine._segment.words[slot._layout.control // 8] = 2**31 + 5
        slot.publish({"w": np.ones(1)})
        actor = engine.policy("policy")
        writer = engine.writer("t", policy=actor)
        assert actor.poll().version == 2**31 + 6
        assert writer._stream.words[w.WRITER_VERSION // 8] == w.LAST_VERSION
        for k in range(5):
            writer.append(obs=OBS, action=k, reward=0.0)
        assert engine._views["t"].meta["step"][:5].tolist() == [0, 1, 2, 3, 4]
        with engine.loader("t", batch_size=4, min_rows=1, policy=slot, max_staleness=3, format="numpy") as loader:
            assert (loader.next().versions == w.LAST_VERSION).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x" * 256, "at most 255 bytes for a table.*got 256"),
        ("ü" * 43, "at most 255 bytes for a table.*got 258"),
        ("\ud800", "text that can be written as UTF-8"),
    ],
    ids=["long", "accents", "half a surrogate pair"],
)
def test_a_table_whose_name_no_file_can_have_is_refused_when_it_is_created(engine_name, name, expected):
    with pytest.raises(ConfigError, match=expected):
        conduit.Engine.create(engine_name, {name: conduit.Table(CARTPOLE, 100)})


def test_the_longest_names_can_be_saved(engine_name, tmp_path):
    schema = conduit.Schema([conduit.Field("f" * 200, "float32")])
    policies = {"p" * 255: {"w" * 251: np.zeros(1)}}
    with conduit.Engine.create(engine_name, {"t" * 255: conduit.Table(schema, 100)}, policies=policies) as engine:
        with engine.writer("t" * 255) as writer:
            writer.append(**{"f" * 200: np.float32(1)})
        engine.checkpoint(tmp_path, extra={"e" * 251: b"1"})
        with pytest.raises(ConfigError, match=r"at most 251 bytes for a part of `extra`.*got 252"):
            engine.checkpoint(tmp_path, extra={"e" * 252: b"1"})
    with conduit.Engine.restore(tmp_path, f"{engine_name}-again") as engine:
        assert engine._views["t" * 255].rows_visible() == 1


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        ({"p" * 256: {"w": np.zeros(1)}}, "at most 255 bytes for a policy.*got 256"),
        ({"p": {"w" * 252: np.zeros(1)}}, "at most 251 bytes for a policy's array.*got 252"),
    ],
    ids=["policy", "array"],
)
def test_other_names_that_no_file_can_have_are_refused_when_the_engine_is_created(engine_name, policies, expected):
    with pytest.raises(ConfigError, match=expected):
        conduit.Engine.create(engine_name, {"t": conduit.Table(CARTPOLE, 100)}, policies=policies)
