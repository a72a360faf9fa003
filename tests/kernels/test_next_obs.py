"""Windows of many steps with the true observation after each of them."""

import numpy as np
import pytest

import conduit
from conduit.errors import DataTimeout
from tests.plane.history import History

MODES = [
    (None, "disabled"),
    (None, "next_step"),
    (1, "same_step"),
    (3, "same_step"),
    (3, "next_step"),
    (2, "disabled"),
]


def windows(envs):
    return [
        conduit.Sequence(6, next_obs=True),
        conduit.Sequence(5, across=True, next_obs=True),
        conduit.Episode(6, next_obs=True),
        conduit.Rollout(6, envs or 1, stride=1, next_obs=True),
    ]


@pytest.mark.parametrize(("envs", "autoreset"), MODES)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_step_is_followed_by_what_follows_it_as_a_transition(envs, autoreset, seed):
    """Serials name rows, so the two loaders can be compared row by row: over page turns, evictions, every end."""
    rng = np.random.default_rng(seed)
    with History((1, 1, 7), [(envs, autoreset, True)] * 2, 5, 7 * seed) as world:
        for number in range(60):
            ends = int(sum(int(b) << 3 * k for k, b in enumerate(rng.choice([0, 0, 0, 4, 1, 2, 3], 18))))
            world.do(number, "write", int(rng.integers(1, 16)), ends)
        assert world.model.evicted > 0
        options = {"batch_size": 512, "min_rows": 1, "format": "numpy"}
        follows = {}
        with world.engine.loader("replay", **options) as loader:
            for _ in range(30):
                batch = loader.next()
                pairs = zip(batch["obs"].tolist(), batch["next_obs"].tolist(), batch["next_pixels"], strict=True)
                follows |= {serial: (after, pixels.copy()) for serial, after, pixels in pairs}
        for window in windows(envs):
            ended = 0
            with world.engine.loader("replay", window=window, **options) as loader:
                for _ in range(4):
                    batch = loader.next()
                    assert batch["next_obs"].shape == batch["obs"].shape
                    mask, serials = batch["mask"], batch["obs"]
                    np.testing.assert_array_equal(
                        batch["next_obs"][mask], [follows[serial][0] for serial in serials[mask].tolist()]
                    )
                    np.testing.assert_array_equal(
                        batch["next_pixels"][mask], [follows[serial][1] for serial in serials[mask].tolist()]
                    )
                    assert not batch["next_obs"][~mask].any()
                    assert not batch["next_pixels"][~mask].any()
                    ended += int((batch["truncated"] & mask).sum())
            assert ended > 50


SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "float32", (2,), observation=True),
        conduit.Field("reward", "float32", casting="same_kind"),
        conduit.Field("tick", "int64"),
    ]
)
TICKS, ENVS = 16, 3


def critic(obs):
    return obs.sum(-1) * 0.5 + obs[..., 0] ** 2


def add_values(batch):
    batch["value"] = critic(batch["obs"])
    batch["final_values"] = critic(batch["next_obs"])
    batch["bootstrap"] = batch["final_values"][:, -1]
    return batch


def record(writer, autoreset, ticks, seed):
    """Write random episodes; returns what happened, float64 [ticks, envs], "after" being the true next observations."""
    rng = np.random.default_rng(seed)
    kept = {name: [] for name in ("obs", "after", "reward", "terminated", "truncated", "closing")}
    obs = rng.normal(size=(ENVS, 2)).astype(np.float32)
    closing = np.zeros(ENVS, bool)
    for tick in range(ticks):
        reward = rng.normal(size=ENVS).astype(np.float32)
        ends = rng.random((2, ENVS)) < 0.12
        ends &= ~closing
        ended = ends.any(0)
        after, start = rng.normal(size=(2, ENVS, 2)).astype(np.float32)
        options = {} if autoreset == "next_step" else {"final": after}
        writer.append(
            obs=obs, reward=reward, tick=np.full(ENVS, tick), terminated=ends[0], truncated=ends[1], **options
        )
        for name, value in zip(kept, (obs, after, reward, *ends, closing), strict=True):
            kept[name].append(np.array(value, bool if value.dtype == bool else np.float64))
        fresh = closing if autoreset == "next_step" else ended
        closing = ended if autoreset == "next_step" else closing
        obs = np.where(fresh[:, None], start, after)
    return {name: np.array(value) for name, value in kept.items()}


def advantages(history, begin, gamma, lam):
    """GAE by its definition, backwards over the ticks [begin, begin + TICKS) of what happened; float64 [TICKS, ENVS]."""
    out = np.zeros((TICKS, ENVS))
    for env in range(ENVS):
        carried = 0.0
        for t in reversed(range(TICKS)):
            at = (begin + t, env)
            if history["closing"][at]:
                carried = 0.0
                continue
            over = history["terminated"][at] or history["truncated"][at]
            after = 0.0 if history["terminated"][at] else critic(history["after"][at])
            delta = history["reward"][at] + gamma * after - critic(history["obs"][at])
            carried = delta + (0.0 if over else gamma * lam * carried)
            out[t, env] = carried
    return out


@pytest.mark.parametrize("autoreset", ["same_step", "disabled", "next_step"])
@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_gae_from_next_observations_leaves_no_step_out(engine_name, autoreset, form):
    table = conduit.Table(SCHEMA, 1500, max_length=TICKS + 1, num_envs=ENVS, page_rows=170)
    rules = (conduit.apply(add_values), conduit.gae(0.97, 0.9, final_values="final_values", bootstrap="bootstrap"))
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        with engine.writer("replay", num_envs=ENVS, autoreset=autoreset) as writer:
            history = record(writer, autoreset, 600, seed=3)
        window = conduit.Rollout(TICKS, ENVS, stride=1, next_obs=True)
        loader = engine.loader("replay", batch_size=64, window=window, format=form, batch_transforms=rules)
        batch = {name: np.asarray(value) for name, value in loader.next().items()}
    truncated = batch["truncated"] & ~batch["terminated"]
    assert truncated[:, :-1].sum() > 50
    assert truncated[:, -1].sum() > 2
    np.testing.assert_array_equal(batch["advantage_mask"], batch["mask"])
    assert batch["mask"].all() == (autoreset != "next_step")
    for i, begin in enumerate(batch["tick"][:, 0, 0].tolist()):
        wanted = advantages(history, begin, 0.97, 0.9)
        np.testing.assert_allclose(batch["advantages"][i], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [conduit.Rollout(4, 1, stride=1, next_obs=True), conduit.Sequence(4, next_obs=True)])
def test_a_window_with_a_step_that_nothing_follows_is_not_drawn(engine_name, window):
    """A cut, and the end of a closed stream: without `next_obs` they are drawn, with it not."""
    table = conduit.Table(SCHEMA, 400, max_length=5)
    rows = {"obs": np.zeros(2, np.float32), "reward": 1.0}
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        with engine.writer("replay") as writer:
            for tick in range(20):
                if tick == 10:
                    writer.cut()
                writer.append(**rows, tick=tick)
        options = {"batch_size": 256, "min_rows": 1, "format": "numpy", "timeout": 0.0}
        with engine.loader("replay", window=window, **options) as loader:
            starts = set(loader.next()["tick"].reshape(256, 4)[:, 0].tolist())
        assert starts == set(range(6)) | set(range(10, 16))
        last = engine.loader("replay", window=conduit.Rollout(4, 1, stride=16), **options)
        assert set(last.next()["tick"][:, 0, 0].tolist()) == {0, 16}
        cut = conduit.Rollout(4, 1, stride=7, next_obs=True)
        assert set(engine.loader("replay", window=cut, **options).next()["tick"][:, 0, 0].tolist()) == {0, 14}
        with pytest.raises(DataTimeout, match="begin a Rollout"):
            engine.loader("replay", window=conduit.Rollout(4, 2, next_obs=True), **options).next()


def reached(achieved, goal):
    return (achieved == goal).all(-1).astype(np.float32)


def test_hindsight_gives_the_next_observation_the_goal_of_its_step(engine_name):
    schema = conduit.Schema(
        [
            conduit.Field("obs.achieved_goal", "float32", (2,), observation=True),
            conduit.Field("obs.desired_goal", "float32", (2,), observation=True),
            conduit.Field("reward", "float32", casting="same_kind"),
        ]
    )
    with conduit.Engine.create(engine_name, {"replay": conduit.Table(schema, 400, max_length=9)}) as engine:
        rng = np.random.default_rng(0)
        with engine.writer("replay") as writer:
            for tick in range(200):
                goals = {"achieved_goal": rng.normal(size=2).astype(np.float32), "desired_goal": np.float32([7, tick])}
                writer.append(obs=goals, reward=0.0, truncated=tick % 8 == 7, final=goals if tick % 8 == 7 else None)
        rules = (conduit.hindsight(reached, ratio=0.5),)
        window = conduit.Episode(8, next_obs=True)
        loader = engine.loader("replay", batch_size=32, window=window, batch_transforms=rules, format="numpy")
        batch = loader.next()
    changed = batch["relabelled"]
    assert 50 < changed.sum() < changed.size
    np.testing.assert_array_equal(
        batch["next_obs.desired_goal"][changed], batch["obs.desired_goal"][changed], "the goal of the step"
    )
    assert (batch["obs.desired_goal"][changed][:, 0] != 7).all()
    assert (batch["next_obs.desired_goal"][~changed][:, 0] == 7).all()
