"""Hindsight: goals and rewards against the reference, on whole episodes and parts of them."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit
from conduit.errors import ConfigError, FieldError
from conduit.kernels.ops import hindsight
from conduit.kernels.reference import returns as reference
from conduit.kernels.spec.batch_transforms import with_batch_transforms
from conduit.kernels.spec.make_plan import make_plan
from conduit.native.jit import entry

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs.observation", "float32", (1,), observation=True),
        conduit.Field("obs.achieved_goal", "float32", (2,), observation=True),
        conduit.Field("obs.desired_goal", "float32", (2,), observation=True),
        conduit.Field("reward", "float32", casting="same_kind"),
    ]
)


def closeness(achieved, goals):
    return -np.abs(achieved - goals).sum(-1)


def one_number(achieved, goals):
    return 0.0


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    length=st.integers(1, 12),
    strategy=st.sampled_from(hindsight.STRATEGIES),
    ratio=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    seed=st.integers(0, 2**62),
    batch=st.integers(0, 2**40),
)
def test_steps_and_goals_are_chosen_as_the_reference_does(lengths, length, strategy, ratio, seed, batch):
    lengths = np.array(lengths, np.int64)
    places = np.full((len(lengths), length), 12345, np.int64)
    number = hindsight.STRATEGIES.index(strategy)
    threshold = round(ratio * 2**62)
    count = entry(hindsight.choose)(
        seed, batch, len(lengths), length, lengths.ctypes.data, number, threshold, places.ctypes.data
    )
    wanted = reference.hindsight_places((seed, batch), lengths, length, strategy, ratio)
    np.testing.assert_array_equal(places, wanted)
    assert count == (wanted >= 0).sum()
    steps = np.minimum(lengths, length)
    for sample, t in zip(*np.nonzero(places >= 0), strict=True):
        place = places[sample, t]
        low = {"future": t, "final": steps[sample] - 1, "episode": 0}[strategy]
        assert low <= place < steps[sample]


def test_later_steps_are_equally_likely():
    lengths = np.full(4000, 6, np.int64)
    places = reference.hindsight_places((1, 2), lengths[:1], 6, "future", 1.0)
    places = np.empty((4000, 6), np.int64)
    entry(hindsight.choose)(1, 2, 4000, 6, lengths.ctypes.data, 0, 1 << 62, places.ctypes.data)
    for t in range(6):
        counts = np.bincount(places[:, t] - t, minlength=6 - t)
        expected = 4000 / (6 - t)
        assert ((counts - expected) ** 2 / expected).sum() < 25


@pytest.fixture
def engine(engine_name):
    table = conduit.Table(SCHEMA, 2000, max_length=13)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        rng = np.random.default_rng(2)
        with engine.writer("replay") as writer:
            for episode in range(40):
                goal = rng.normal(size=2).astype(np.float32)
                length = 1 + episode % 12
                for t in range(length):
                    obs = {
                        "observation": np.array([t], np.float32),
                        "achieved_goal": np.array([episode, t], np.float32),
                        "desired_goal": goal,
                    }
                    final = obs | {"achieved_goal": np.array([episode, t + 1], np.float32)}
                    writer.append(obs=obs, reward=-7.0, terminated=t == length - 1, final=final)
        yield engine


WINDOWS = [conduit.Episode(12), conduit.Sequence(5)]


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: type(window).__name__)
@pytest.mark.parametrize("outcome", ["next", "same"])
@pytest.mark.parametrize("strategy", hindsight.STRATEGIES)
def test_relabelled_steps_have_the_goal_and_the_reward_of_what_was_achieved(engine, window, outcome, strategy):
    rule = conduit.hindsight(closeness, strategy=strategy, outcome=outcome, ratio=0.7)
    options = {"batch_size": 32, "window": window, "format": "numpy", "seed": 9}
    plain = engine.loader("replay", **options).next()
    batch = engine.loader("replay", **options, batch_transforms=(rule,)).next()
    length = plain["mask"].shape[1]
    places = reference.hindsight_places((9, 0), plain["lengths"], length, strategy, 0.7)
    np.testing.assert_array_equal(batch["relabelled"], places >= 0)
    assert 0.4 < batch["relabelled"][plain["mask"]].mean() < 0.9
    assert not batch["relabelled"][~plain["mask"]].any()
    # what step t of an episode achieved is [episode, t + 1], after the last one too
    achieved = plain["obs.achieved_goal"] + np.array([0, outcome == "next"], np.float32)
    goals, rewards = plain["obs.desired_goal"].copy(), plain["reward"].copy()
    for sample, t in zip(*np.nonzero(places >= 0), strict=True):
        goals[sample, t] = achieved[sample, places[sample, t]]
        assert goals[sample, t, 0] == achieved[sample, t, 0]  # of the same episode
        rewards[sample, t] = -np.abs(achieved[sample, t] - goals[sample, t]).sum()
    np.testing.assert_array_equal(batch["obs.desired_goal"], goals)
    np.testing.assert_array_equal(batch["reward"], rewards)
    np.testing.assert_array_equal(batch["obs.achieved_goal"], plain["obs.achieved_goal"])
    assert batch.keys() == plain.keys() | {"relabelled"}


def test_tensors_are_relabelled_in_place_and_batches_can_be_made_again(engine):
    loader = engine.loader(
        "replay", batch_size=16, window=conduit.Episode(12), batch_transforms=(conduit.hindsight(closeness),)
    )
    first = {name: tensor.clone() for name, tensor in loader.next().items()}
    assert first["relabelled"].any()
    assert (first["reward"][first["relabelled"]] <= 0).all()
    assert (first["reward"][~first["relabelled"] & first["mask"]] == -7).all()
    assert not torch.equal(loader.next()["relabelled"], first["relabelled"])
    loader.sampler.batch = 0
    again = loader.next()
    for name, tensor in first.items():
        assert torch.equal(again[name], tensor)


def test_returns_can_be_made_of_relabelled_rewards(engine):
    rules = (conduit.hindsight(closeness, ratio=1.0), conduit.returns_to_go())
    batch = engine.loader(
        "replay", batch_size=16, window=conduit.Episode(12), format="numpy", batch_transforms=rules
    ).next()
    np.testing.assert_allclose(batch["returns_to_go"][:, 0], batch["reward"].sum(1), rtol=1e-6)


def test_a_reward_function_of_another_shape_is_refused_by_name(engine):
    loader = engine.loader(
        "replay", batch_size=4, window=conduit.Episode(12), batch_transforms=(conduit.hindsight(one_number, ratio=1.0),)
    )
    with pytest.raises(FieldError, match="one_number"):
        loader.next()


REFUSED = [
    ("transitions", conduit.Transition(), {}, "single steps without a stack.*max_length="),
    ("across", conduit.Sequence(5, across=True), {}, "steps of one episode"),
    ("rollouts", conduit.Rollout(5, 1), {}, "steps of one episode"),
    ("no-field", conduit.Episode(12), {"goal": "obs.goal"}, "obs.goal"),
    ("shapes", conduit.Episode(12), {"goal": "obs.observation"}, "one shape"),
    ("vector-reward", conduit.Episode(12), {"reward": "obs.observation"}, "scalars"),
]


@pytest.mark.parametrize(
    ("window", "options", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_cannot_be_relabelled_is_refused_when_the_loader_is_opened(engine, window, options, message):
    with pytest.raises(ConfigError, match=message):
        engine.loader(
            "replay", batch_size=4, window=window, batch_transforms=(conduit.hindsight(closeness, **options),)
        )


@pytest.mark.parametrize(
    "options",
    [{"strategy": "past"}, {"ratio": 1.5}, {"outcome": "last"}, {"goal": "obs.achieved_goal"}],
    ids=lambda options: next(iter(options)),
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError):
        conduit.hindsight(closeness, **options)
    with pytest.raises(ConfigError, match="def"):
        conduit.hindsight(lambda achieved, goals: goals)


def test_fingerprints_tell_reward_functions_and_strategies_apart():
    plan = make_plan(SCHEMA, 4, conduit.Episode(12))
    rules = [
        conduit.hindsight(closeness),
        conduit.hindsight(one_number),
        conduit.hindsight(closeness, strategy="final"),
        conduit.hindsight(closeness, ratio=0.5),
    ]
    plans = [with_batch_transforms(plan, (rule,)) for rule in rules]
    assert len({plan.fingerprint for plan in plans}) == len(rules)
    assert pickle.loads(pickle.dumps(plans[0])).fingerprint == plans[0].fingerprint


@pytest.mark.parametrize("next_obs", [False, True])
@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("lengths", [[3], [1, 1, 1], [2, 1, 3]], ids=str)
def test_goals_are_drawn_from_true_finals_and_every_step_can_be_relabelled(engine_name, lengths, mode, next_obs):
    """Episode s0 .. s3: with "final" and ratio 1 every goal is s3's, also of an episode of one step."""
    table = conduit.Table(SCHEMA, 2000, max_length=4)

    def observe(episode, t):
        achieved = np.array([episode, t], np.float32)
        return {"observation": np.float32([t]), "achieved_goal": achieved, "desired_goal": np.float32([-1, -1])}

    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        with engine.writer("replay", autoreset=mode) as writer:
            for episode, length in enumerate(lengths * 3):
                for t in range(length):
                    over = t == length - 1
                    final = observe(episode, length) if over and mode != "next_step" else None
                    writer.append(obs=observe(episode, t), reward=-7.0, terminated=over, final=final)
                if mode == "next_step":
                    writer.append(obs=observe(episode, length), reward=0.0)
        rule = conduit.hindsight(closeness, strategy="final", ratio=1.0)
        loader = engine.loader(
            "replay",
            batch_size=64,
            window=conduit.Episode(3, next_obs=next_obs),
            batch_transforms=(rule,),
            format="numpy",
            min_rows=1,
        )
        batch = loader.next()
        mask = batch["mask"]
        np.testing.assert_array_equal(batch["relabelled"], mask)
        for sample, steps in enumerate(batch["lengths"].tolist()):
            episode = batch["obs.achieved_goal"][sample, 0, 0]
            assert batch["obs.desired_goal"][sample, :steps].tolist() == [[episode, steps]] * steps
            assert batch["reward"][sample, :steps].tolist() == [-float(steps - t - 1) for t in range(steps)]
            if next_obs:
                assert batch["next_obs.desired_goal"][sample, :steps].tolist() == [[episode, steps]] * steps
        assert ("next_obs.achieved_goal" in batch) == next_obs


def test_a_table_that_does_not_hold_what_follows_the_last_step_is_refused(engine_name):
    with conduit.Engine.create(engine_name, {"replay": conduit.Table(SCHEMA, 2000, max_length=3)}) as engine:
        rule = conduit.hindsight(closeness)
        with pytest.raises(ConfigError, match="max_length"):
            engine.loader("replay", batch_size=4, window=conduit.Episode(3), batch_transforms=(rule,), format="numpy")
        same = conduit.hindsight(closeness, outcome="same")
        engine.loader("replay", batch_size=4, window=conduit.Episode(3), batch_transforms=(same,), format="numpy")


# -- single transitions


class World:
    """Episodes whose step t of episode e achieved [e, t + 1]; some are longer than LONGEST, the last have not ended."""

    LONGEST = 6

    def __init__(self, name, mode, envs, strategy):
        history = {"max_stack": self.LONGEST} if strategy == "episode" else {}
        table = conduit.Table(SCHEMA, 4000, max_length=self.LONGEST + 1, num_envs=envs or 1, page_rows=128, **history)
        self.engine = conduit.Engine.create(name, {"replay": table})
        self.lengths = {}
        rng = np.random.default_rng(4)
        lead = envs or 1
        episode, step, closing = np.arange(lead), np.zeros(lead, int), np.zeros(lead, bool)
        length = rng.integers(1, 9, lead)
        with self.engine.writer("replay", num_envs=envs, autoreset=mode) as writer:
            for _ in range(300):
                over = ~closing & (step == length - 1)
                obs = self.observe(episode, step)
                given = {"reward": np.full(lead, -7.0, np.float32), "terminated": over}
                if mode != "next_step":
                    given["final"] = self.observe(episode, step + 1)
                if envs is None:
                    obs, given["reward"], given["terminated"] = first_of(obs), -7.0, bool(over[0])
                    given["final"] = first_of(given["final"]) if over[0] else None
                writer.append(obs=obs, **given)
                self.lengths |= dict(zip(episode[over].tolist(), length[over].tolist(), strict=True))
                fresh = closing if mode == "next_step" else over
                closing = over if mode == "next_step" else closing
                episode = np.where(fresh, episode + lead, episode)
                length = np.where(fresh, rng.integers(1, 9, lead), length)
                step = np.where(fresh, 0, step + 1)

    @staticmethod
    def observe(episode, t):
        return {
            "observation": np.array(t, np.float32).reshape(-1, 1),
            "achieved_goal": np.stack([episode, t], 1).astype(np.float32),
            "desired_goal": np.full((len(episode), 2), -1, np.float32),
        }


def first_of(values):
    return {name: value[0] for name, value in values.items()}


def closeness_and_end(achieved, goals):
    same = (achieved == goals).all(-1)
    return np.where(same, 0.0, -1.0), same


@pytest.mark.parametrize("strategy", hindsight.STRATEGIES)
@pytest.mark.parametrize(("mode", "envs"), [("disabled", None), ("same_step", 3), ("next_step", 2)])
def test_single_transitions_are_relabelled_as_a_plain_twin_does(engine_name, strategy, mode, envs):
    world = World(engine_name, mode, envs, strategy)
    rule = conduit.hindsight(closeness_and_end, strategy=strategy, ratio=0.7, max_length=world.LONGEST)
    whole = {episode: length for episode, length in world.lengths.items() if length <= world.LONGEST}
    assert len(whole) < len(world.lengths)
    with world.engine as engine:
        loader = engine.loader("replay", batch_size=256, batch_transforms=(rule,), format="numpy", seed=9, min_rows=1)
        seen = set()
        for number in range(16):
            batch = loader.next()
            episodes, steps = batch["obs.achieved_goal"].astype(int).T
            for slot, (episode, t) in enumerate(zip(episodes.tolist(), steps.tolist(), strict=True)):
                seen.add((episode, t))
                length, achieved = whole[episode], [episode, t + 1]
                assert batch["next_obs.achieved_goal"][slot].tolist() == achieved
                first, second = reference.philox(9, number, (1 << 63) | (1 << 62) | slot)
                relabelled = first >> 2 < round(0.7 * 2**62)
                assert batch["relabelled"][slot] == relabelled
                goal, reward, end = [-1, -1], -7.0, t == length - 1
                if relabelled:
                    low = {"future": t, "final": length - 1, "episode": 0}[strategy]
                    goal = [episode, low + (second * (length - low) >> 64) + 1]
                    end = goal == achieved
                    reward = 0.0 if end else -1.0
                assert batch["obs.desired_goal"][slot].tolist() == goal
                assert batch["next_obs.desired_goal"][slot].tolist() == goal
                assert (batch["reward"][slot], batch["terminated"][slot]) == (reward, end)
        # every step of every whole episode, the last ones and those of one step included
        assert seen == {(episode, t) for episode, length in whole.items() for t in range(length)}


def test_single_transitions_need_their_longest_episode_and_a_table_that_holds_it(engine_name):
    with conduit.Engine.create(engine_name, {"replay": conduit.Table(SCHEMA, 2000, max_length=6)}) as engine:

        def open_loader(window=None, **options):
            rule = conduit.hindsight(closeness, **options)
            return engine.loader("replay", batch_size=4, window=window, batch_transforms=(rule,), format="numpy")

        open_loader(max_length=5)
        with pytest.raises(ConfigError, match="max_length=7"):
            open_loader(max_length=6)
        with pytest.raises(ConfigError, match="max_stack=5"):
            open_loader(max_length=5, strategy="episode")
        for window in (conduit.Transition(n_step=2), conduit.Transition(stack=2)):
            with pytest.raises(ConfigError, match="single steps without a stack"):
                open_loader(window, max_length=5)
        with pytest.raises(ConfigError, match=r"max_length with window=conduit\.Transition"):
            open_loader(conduit.Episode(5), max_length=5)


@pytest.mark.parametrize("kind", ["prioritized", "counted"])
def test_single_transitions_are_relabelled_by_any_sampler(engine_name, kind):
    options = {"max_times_sampled": 2} if kind == "counted" else {"priorities": conduit.Priorities()}
    with conduit.Engine.create(engine_name, {"replay": conduit.Table(SCHEMA, 2000, max_length=7, **options)}) as engine:
        with engine.writer("replay") as writer:
            for episode in range(60):
                length = 1 + episode % 6
                for t in range(length):
                    obs = first_of(World.observe(np.array([episode]), np.array([t])))
                    final = first_of(World.observe(np.array([episode]), np.array([t + 1])))
                    writer.append(obs=obs, reward=-7.0, terminated=t == length - 1, final=final)
        rule = conduit.hindsight(closeness, strategy="final", ratio=1.0, max_length=6)
        sampling = conduit.Prioritized() if kind == "prioritized" else None
        loader = engine.loader(
            "replay",
            batch_size=64,
            batch_transforms=(rule,),
            sampling=sampling,
            format="numpy",
            min_rows=1,
            timeout=0.0,
        )
        for _ in range(5):
            batch = loader.next()
            lengths = 1 + batch["obs.achieved_goal"][:, 0] % 6
            np.testing.assert_array_equal(
                batch["obs.desired_goal"], np.stack([batch["obs.achieved_goal"][:, 0], lengths], 1)
            )
            np.testing.assert_array_equal(batch["reward"], -(lengths - batch["obs.achieved_goal"][:, 1] - 1))
