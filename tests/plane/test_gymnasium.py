"""Real environments: every transition that is sampled happened, and every one that happened can be sampled.

The truth comes from single environments, one for each of the vector's, with the same seeds and actions and without any
autoreset: what a vector environment does at an episode's end cannot hide a slip of the writer.
"""

import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import conduit

TICKS = 90
SEED = 11


class Corridor(gym.Env):
    """Dict and Tuple observations whose values name the step; episodes end either way after a random number of steps."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (6, 25), np.uint8),
            "pose": spaces.Tuple((spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Discrete(1000))),
        }
    )
    action_space = spaces.Tuple((spaces.Discrete(5), spaces.Box(-1, 1, (2,), np.float64)))

    def _observe(self):
        position = np.array([self.step_number, self.episode], np.float32) + self.np_random.random(2).astype(np.float32)
        camera = self.np_random.integers(0, 255, (6, 25), np.uint8)
        return {"camera": camera, "pose": (position, np.int64(self.step_number))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode = getattr(self, "episode", -1) + 1
        self.step_number = 0
        self.length = int(self.np_random.integers(1, 7))
        return self._observe(), {}

    def step(self, action):
        self.step_number += 1
        ended = self.step_number == self.length
        reward = float(action[0]) + float(action[1].sum())
        return self._observe(), reward, ended and self.length % 2 == 0, ended and self.length % 2 == 1, {}


def cartpole():
    return gym.make("CartPole-v1", max_episode_steps=12)


def lake():
    """Discrete observations: scalars."""
    return gym.make("FrozenLake-v1", max_episode_steps=6)


ENVS = {"cartpole": cartpole, "corridor": Corridor, "lake": lake}


def actions_of(make_env, num_envs):
    """The same actions for the vector and for the single environments: [tick][env], nested as the space is."""
    env = make_env()
    env.action_space.seed(3)
    actions = [[env.action_space.sample() for _ in range(num_envs)] for _ in range(TICKS)]
    env.close()
    return actions


def key_of(value):
    """Bytes of a nested observation or action, dtype and shape left out."""
    if isinstance(value, dict):
        return tuple((name, key_of(value[name])) for name in sorted(value))
    if isinstance(value, tuple):
        return tuple(key_of(part) for part in value)
    return np.asarray(value).tobytes()


def transition(obs, action, reward, terminated, truncated, following):
    return (
        key_of(obs),
        key_of(action),
        np.float32(reward).tobytes(),
        bool(terminated),
        bool(truncated),
        key_of(following),
    )


def truth(make_env, seed, actions, *, skips):
    """The transitions of one environment whose next observation came. `skips`: ticks spent on each reset (NEXT_STEP: 1)."""
    env = make_env()
    obs, _ = env.reset(seed=seed)
    happened = []
    tick = 0
    while tick < len(actions):
        following, reward, terminated, truncated, _ = env.step(actions[tick])
        happened.append(transition(obs, actions[tick], reward, terminated, truncated, following))
        tick += 1
        obs = following
        ended = terminated or truncated
        if ended:
            obs, _ = env.reset()
            tick += skips
    env.close()
    # the next observation of the very last row is known only if it was handed over, or had a row of its own
    return set(happened if ended and tick <= len(actions) else happened[:-1])


def sampled(engine, count=20000):
    """All transitions that come out of a loader, as a set."""
    with engine.loader("replay", batch_size=count, min_rows=1, format="numpy", timeout=0) as loader:
        batch = loader.next().nest()

    def at(value, i):
        if isinstance(value, dict):
            return {name: at(part, i) for name, part in value.items()}
        return tuple(at(part, i) for part in value) if isinstance(value, tuple) else value[i]

    names = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
    return {transition(*(at(batch[name], i) for name in names)) for i in range(count)}


def check(engine, happened):
    found, every = sampled(engine), set().union(*happened)
    assert not found - every, "sampled transitions that never happened"
    assert not every - found, "transitions that happened and are never sampled"


def table(env, **options):
    schema = conduit.Schema.from_spaces(env.observation_space, env.action_space)
    return {"replay": conduit.Table(schema, 2000, **{"page_rows": 60} | options)}


@pytest.mark.parametrize("name", ENVS)
def test_a_single_environment_s_transitions_are_the_ones_that_happened(engine_name, name):
    env = ENVS[name]()
    actions = [tick[0] for tick in actions_of(ENVS[name], 1)]
    with conduit.Engine.create(engine_name, table(env)) as engine:
        with engine.writer("replay") as writer:
            obs, _ = env.reset(seed=SEED)
            for action in actions:
                following, reward, terminated, truncated, _ = env.step(action)
                ended = terminated or truncated
                writer.append(
                    obs=obs,
                    action=action,
                    reward=reward,
                    terminated=terminated,
                    truncated=truncated,
                    final=following if ended else None,
                )
                obs = env.reset()[0] if ended else following
        check(engine, [truth(ENVS[name], SEED, actions, skips=0)])
    env.close()


def batched(space, parts):
    """Actions of all environments as a vector environment takes them."""
    return gym.vector.utils.concatenate(space, parts, gym.vector.utils.create_empty_array(space, len(parts)))


def run(envs, writer, mode, actions, single_action_space):
    """The actor's loop in one of the three modes."""
    obs, _ = envs.reset(seed=SEED)
    for parts in actions:
        action = batched(single_action_space, parts)
        following, reward, terminated, truncated, info = envs.step(action)
        row = {"obs": obs, "action": action, "reward": reward, "terminated": terminated, "truncated": truncated}
        ended = terminated | truncated
        if mode is AutoresetMode.NEXT_STEP:
            writer.append(**row)
        elif mode is AutoresetMode.SAME_STEP:
            writer.append(**row, final=info.get("final_obs"))
        else:
            writer.append(**row, final=following)
            if ended.any():
                following, _ = envs.reset(options={"reset_mask": ended})
        obs = following


@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize(("max_stack", "max_n_step"), [(1, 1), (4, 3)])
def test_a_vector_s_transitions_are_the_ones_that_happened(engine_name, name, mode, max_stack, max_n_step):
    num_envs = 3
    make_env = ENVS[name]
    actions = actions_of(make_env, num_envs)
    envs = SyncVectorEnv([make_env] * num_envs, autoreset_mode=mode)
    single = make_env()
    tables = table(single, max_stack=max_stack, max_n_step=max_n_step)
    with conduit.Engine.create(engine_name, tables) as engine:
        with engine.writer("replay", num_envs=num_envs, autoreset=envs.metadata["autoreset_mode"]) as writer:
            run(envs, writer, mode, actions, single.action_space)
        skips = int(mode is AutoresetMode.NEXT_STEP)
        streams = [[tick[env] for tick in actions] for env in range(num_envs)]
        check(engine, [truth(make_env, SEED + env, stream, skips=skips) for env, stream in enumerate(streams)])
    envs.close()
    single.close()


def test_environments_in_their_own_processes_are_written_the_same(engine_name):
    actions = actions_of(Corridor, 2)
    single = Corridor()
    with conduit.Engine.create(engine_name, table(single)) as engine:
        # forked while an engine and a writer are open: the children must not take part in them
        writer = engine.writer("replay", num_envs=2, autoreset="same_step")
        envs = AsyncVectorEnv([Corridor] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        run(envs, writer, AutoresetMode.SAME_STEP, actions, single.action_space)
        envs.close()
        writer.close()
        check(engine, [truth(Corridor, SEED + env, [tick[env] for tick in actions], skips=0) for env in range(2)])


@pytest.mark.parametrize("name", ENVS)
def test_gymnasium_hands_final_observations_over_as_an_object_array_that_is_taken_as_it_is(name):
    """What the docstring of `append` says of `final` is Gymnasium's doing; this notices when that changes."""
    envs = SyncVectorEnv([ENVS[name]] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=1)
    envs.action_space.seed(0)
    for _ in range(40):
        *_, info = envs.step(envs.action_space.sample())
        if "final_obs" in info:
            final = info["final_obs"]
            assert isinstance(final, np.ndarray)
            assert final.dtype == object
            assert final.shape == (2,)
            space = envs.single_observation_space
            assert all(part is None or space.contains(part) for part in final)
            break
    else:
        raise AssertionError("no episode ended")
    envs.close()


def test_an_end_whose_final_observation_the_environment_forgot_is_refused_at_the_call(engine_name):
    envs = SyncVectorEnv([functools.partial(cartpole)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    single = cartpole()
    with conduit.Engine.create(engine_name, table(single)) as engine:
        writer = engine.writer("replay", num_envs=2, autoreset="same_step")
        obs, _ = envs.reset(seed=0)
        envs.action_space.seed(0)
        with pytest.raises(conduit.errors.FieldError, match="final observation of an episode that ends here"):  # noqa: PT012 - some step of many
            for _ in range(20):
                action = envs.action_space.sample()
                following, reward, terminated, truncated, _ = envs.step(action)
                writer.append(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
                obs = following
    envs.close()
    single.close()
