"""Public faults of other replay libraries in priorities, boundaries, types and shapes: what must hold instead, by name.

Each test's docstring names the reports that its family comes from. Most have a broader sibling elsewhere (property tests
against the references); these are the plain cases that a reader can follow by hand.
"""

import itertools

import numpy as np
import pytest

import conduit
from conduit.errors import ConfigError, DataTimeout, FieldError
from conduit.kernels.cpu.priorities import ONE

GAMMA = 0.9


def schema(obs=(), obs_dtype="int64", action=(), reward="float32"):
    return conduit.Schema(
        [
            conduit.Field("obs", obs_dtype, obs, observation=True),
            conduit.Field("action", "int64", action),
            conduit.Field("reward", reward, casting="same_kind"),
        ]
    )


@pytest.fixture
def make(engine_name):
    """Call it with capacity, schema and Table options: an engine with one table."""
    made = []

    def create(capacity=1000, spec=None, **options):
        table = conduit.Table(spec or schema(), capacity, **options)
        made.append(conduit.Engine.create(f"{engine_name}-{len(made)}", {"replay": table}))
        return made[-1]

    yield create
    for engine in made:
        engine.close()


def steps(writer, numbers, *, ends=(), cuts=(), finals=False):
    """Rows whose obs, action and reward are their number; `ends` terminate, `cuts` truncate; final obs is -number."""
    for t in numbers:
        final = np.int64(-t) if finals and t in {*ends, *cuts} else None
        writer.append(obs=t, action=t, reward=float(t), terminated=t in ends, truncated=t in cuts, final=final)


def drawn(engine, batches=20, size=256, **options):
    """{number: {output: value}} of everything that comes in some batches."""
    found = {}
    options = {"format": "numpy", "min_rows": 1, "timeout": 0.0} | options
    with engine.loader("replay", batch_size=size, **options) as loader:
        for _ in range(batches):
            batch = loader.next()
            first = batch["action"].reshape(size, -1)[:, 0]
            for number, at in dict(zip(first.tolist(), range(size), strict=True)).items():
                found[number] = {name: np.array(batch[name][at]) for name in batch}
    return found


class TestBoundaries:
    @pytest.mark.parametrize("autoreset", ["next_step", "disabled", "same_step"])
    def test_a_truncated_step_bootstraps_from_its_own_final_observation(self, make, autoreset):
        """SB3#46 #234 #934 #1542, cleanrl#460, envpool#179: with single stored observations the reset came instead."""
        engine = make()
        envs = None if autoreset == "disabled" else 1
        with engine.writer("replay", num_envs=envs, autoreset=autoreset) as writer:
            for t in range(40):
                cut = t % 8 == 7
                if autoreset == "next_step" and t and t % 8 == 0:
                    # the row after the cut one is its final observation
                    writer.append(obs=[-(t - 1)], action=[0], reward=[0.0], terminated=[False], truncated=[False])
                values = {"obs": t, "action": t, "reward": float(t), "terminated": False, "truncated": cut}
                final = None
                if cut and autoreset != "next_step":
                    final = np.int64(-t)
                if envs:
                    values = {name: np.array([value]) for name, value in values.items()}
                    values["reward"] = values["reward"].astype(np.float32)
                    final = None if final is None else [final]
                writer.append(**values, final=final)
            found = drawn(engine)
        for t in (7, 15, 23, 31):
            assert found[t]["truncated"]
            assert not found[t]["terminated"]
            assert found[t]["next_obs"] == -t
        assert all(found[t]["next_obs"] == t + 1 for t in range(39) if t % 8 != 7)

    def test_terminated_and_truncated_stay_apart(self, make):
        """SB3#46 #934: a time limit stored as `done` teaches a value of zero."""
        engine = make()
        with engine.writer("replay") as writer:
            steps(writer, range(30), ends={9}, cuts={19}, finals=True)
            found = drawn(engine)
        assert (found[9]["terminated"], found[9]["truncated"]) == (True, False)
        assert (found[19]["terminated"], found[19]["truncated"]) == (False, True)

    @pytest.mark.parametrize("how", ["ends", "cuts"])
    def test_returns_stop_at_the_end_of_the_episode_that_step_included(self, make, how):
        """In cpprb#97 #108, tianshou#82 #811, flashbax PR#50: rewards of the next episode leaked in, or the last one was lost."""
        engine = make(max_n_step=4)
        with engine.writer("replay") as writer:
            steps(writer, range(40), finals=True, **{how: {11, 23}})
            found = drawn(engine, window=conduit.Transition(n_step=4, gamma=GAMMA))
        for t in range(12, 24):
            used = min(4, 24 - t)
            want = sum(GAMMA**k * (t + k) for k in range(used))
            np.testing.assert_allclose(found[t]["reward"], want, rtol=1e-6)
            assert found[t]["n_steps"] == used
            assert found[t]["next_obs"] == (-23 if t + used == 24 else t + used)
            assert found[t]["terminated"] == (how == "ends" and t + used == 24)
            assert found[t]["truncated"] == (how == "cuts" and t + used == 24)

    def test_the_discount_is_that_of_the_steps_used(self, make):
        """In cpprb#110, tianshou#153, FastTD3#6: a constant gamma^n behind windows that an episode's end had cut short."""
        engine = make(max_n_step=5)
        with engine.writer("replay") as writer:
            steps(writer, range(30), cuts={9}, finals=True)
            found = drawn(engine, window=conduit.Transition(n_step=5, gamma=GAMMA))
        for t in range(10):
            np.testing.assert_allclose(found[t]["discount"], GAMMA ** min(5, 10 - t), rtol=1e-6)

    def test_the_newest_rows_are_waited_for_or_bootstrapped_never_padded(self, make):
        """In cpprb#114, SB3#261: the rows at the write head came with successors of another lap."""
        engine = make(max_n_step=3, capacity=60, page_rows=16)
        with engine.writer("replay") as writer:
            for start, upto in itertools.pairwise((0, 5, 40, 100, 317)):
                steps(writer, range(start, upto))
                waiting = drawn(engine, window=conduit.Transition(n_step=3, gamma=GAMMA))
                assert max(waiting) == upto - 4
                assert all(row["n_steps"] == 3 and row["next_obs"] == t + 3 for t, row in waiting.items())
                short = drawn(engine, window=conduit.Transition(n_step=3, gamma=GAMMA, newest="bootstrap"))
                assert max(short) == upto - 2
                for t, row in short.items():
                    used = min(3, upto - 1 - t)
                    assert row["n_steps"] == used
                    assert row["next_obs"] == t + used
                    np.testing.assert_allclose(row["discount"], GAMMA**used, rtol=1e-6)

    def test_frames_stop_at_the_start_of_the_episode(self, make):
        """In tianshou#153, cpprb#114, SB3#1542: a stack that showed the end of the episode before."""
        engine = make(max_stack=4)
        with engine.writer("replay") as writer:
            steps(writer, range(1, 40), ends={10, 20}, finals=True)
            repeat = drawn(engine, window=conduit.Transition(stack=4))
            zero = drawn(engine, window=conduit.Transition(stack=4, padding="zero"))
        assert repeat[12]["obs"].tolist() == [11, 11, 11, 12]
        assert zero[12]["obs"].tolist() == [0, 0, 11, 12]
        assert zero[11]["next_obs"].tolist() == [0, 0, 11, 12]
        assert repeat[20]["next_obs"].tolist() == [18, 19, 20, -20]
        assert repeat[17]["obs"].tolist() == [14, 15, 16, 17]

    def test_windows_never_cross_what_was_evicted(self, make):
        """In flashbax PR#50 #51 #66, cpprb#108: sequences that ran from the newest rows into the oldest ones of the ring."""
        engine = make(capacity=80, page_rows=20, max_length=6, max_n_step=2)
        with engine.writer("replay") as writer:
            at = 0
            for chunk in (30, 47, 61, 83, 5, 1, 1, 200):
                steps(writer, range(at, at + chunk))
                at += chunk
                for window in (conduit.Sequence(6), conduit.Rollout(6, 1, stride=1)):
                    for row in drawn(engine, batches=4, window=window).values():
                        numbers = row["obs"].reshape(-1)
                        np.testing.assert_array_equal(numbers, numbers[0] + np.arange(6))

    def test_environments_are_not_mixed(self, make):
        """SB3#1145 (sequences over flattened environments), PufferLib#341: windows keep to their environment."""
        engine = make(capacity=600, num_envs=3, max_length=5, max_n_step=3)
        with engine.writer("replay", num_envs=3, autoreset="next_step") as writer:
            for t in range(150):
                number = np.arange(3) * 1000 + t
                writer.append(obs=number, action=number, reward=number.astype(np.float32))
            for row in drawn(engine, window=conduit.Sequence(5)).values():
                assert len({number // 1000 for number in row["obs"].tolist()}) == 1
            for t, row in drawn(engine, window=conduit.Transition(n_step=3, gamma=1.0)).items():
                assert row["reward"] == 3 * t + 3
            for row in drawn(engine, window=conduit.Rollout(5, 3)).values():
                assert (row["obs"] // 1000 == np.arange(3)).all()

    def test_a_sequence_says_where_episodes_begin(self, make):
        """PufferLib#363, tianshou#811: recurrent state carried over a reset that nothing marked."""
        engine = make(max_length=8)
        with engine.writer("replay") as writer:
            steps(writer, range(60), ends={9, 14, 33}, finals=True)
            for row in drawn(engine, window=conduit.Sequence(8, across=True)).values():
                numbers = row["obs"]
                np.testing.assert_array_equal(row["is_first"], np.isin(numbers, [0, 10, 15, 34]))
                np.testing.assert_array_equal(row["terminated"], np.isin(numbers, [9, 14, 33]))
            for row in drawn(engine, window=conduit.Sequence(8)).values():
                assert not np.isin(row["obs"][1:][row["mask"][1:]], [0, 10, 15, 34]).any()

    def test_an_unforeseen_reset_is_not_a_transition(self, make):
        """In envpool#179, cpprb#97 (`on_episode_end` forgotten): `cut` leaves no pair of two episodes behind."""
        engine = make(max_n_step=3)
        with engine.writer("replay", autoreset="next_step") as writer:
            steps(writer, range(10))
            writer.cut()
            steps(writer, range(10, 15))
            # an end whose final observation never came
            steps(writer, [15], ends={15})
            writer.cut()
            steps(writer, range(16, 30))
            one = drawn(engine)
            three = drawn(engine, window=conduit.Transition(n_step=3, gamma=GAMMA))
        assert one.keys() == set(range(29)) - {9}
        assert three.keys() == set(range(27)) - {9}
        # behind the last observation of an episode that was cut nothing comes any more: windows end with it; a step that ended its
        # episode needs nothing behind it
        assert [three[t]["n_steps"] for t in (6, 7, 8, 12, 13, 14, 15)] == [3, 2, 1, 3, 3, 2, 1]
        assert [three[t]["next_obs"] for t in (6, 7, 8, 12, 13, 14, 15)] == [9, 9, 9, 15, 15, 15, 15]
        assert [t for t, row in three.items() if row["terminated"]] == [t for t in three if t in {13, 14, 15}]
        assert (one[15]["terminated"], one[15]["next_obs"]) == (True, 15)
        assert all(row["next_obs"] == t + 1 for t, row in one.items() if t != 15)


class TestPriorities:
    def test_alpha_is_applied_once(self, make):
        """In pytorch/rl PR#3925: P(i) is p^alpha over its sum, for updates and for new rows alike."""
        rule = conduit.Priorities(alpha=0.5, eps=0.0)
        engine = make(priorities=rule)
        with engine.writer("replay") as writer:
            steps(writer, range(5))
            with engine.loader(
                "replay", batch_size=64, sampling=conduit.Prioritized(), format="numpy", min_rows=1
            ) as loader:
                batch = loader.next()
                ids = dict(zip(batch["obs"].tolist(), batch.ids.tolist(), strict=True))
                loader.update_priorities([ids[t] for t in range(4)], [1.0, 4.0, 9.0, 16.0])
                batch = loader.next()
                np.testing.assert_allclose(batch["probabilities"], (batch["obs"] + 1) / 10, rtol=1e-6)
                # a new row takes the leaf of the largest priority as it is, not its power again
                steps(writer, [5])
                assert engine._views["replay"].priorities[:6].tolist()[-1] == 4 * ONE

    def test_a_zero_priority_row_is_never_drawn_while_others_are_positive(self, make):
        """In flashbax PR#48 #51 #52: float32 sums drew rows of zero mass."""
        engine = make(capacity=5000, priorities=conduit.Priorities(alpha=1.0, eps=0.0))
        with engine.writer("replay") as writer:
            steps(writer, range(3001))
            with engine.loader(
                "replay",
                batch_size=4000,
                sampling=conduit.Prioritized(stratified=False),
                format="numpy",
                min_rows=1,
                fields=["obs"],
            ) as loader:
                ids = np.full(3000, -1)
                while (ids < 0).any():
                    batch = loader.next()
                    ids[batch["obs"]] = batch.ids
                # huge and tiny side by side, which a float32 sum rounds away
                values = np.zeros(3000)
                values[::50] = np.where(np.arange(60) % 2, 1e-6, 4000.0)
                loader.update_priorities(ids, values)
                for _ in range(250):
                    assert (loader.next()["obs"] % 50 == 0).all()

    def test_equal_rows_in_one_update_are_one_row_with_the_last_value(self, make):
        """In tianshou#91: sums that took each duplicate's change drifted for good."""
        engine = make(priorities=conduit.Priorities(alpha=1.0, eps=0.0))
        with engine.writer("replay") as writer:
            steps(writer, range(3))
            with engine.loader(
                "replay", batch_size=256, sampling=conduit.Prioritized(normalize="none"), format="numpy", min_rows=1
            ) as loader:
                batch = loader.next()
                ids = dict(zip(batch["obs"].tolist(), batch.ids.tolist(), strict=True))
                loader.update_priorities([ids[0], ids[0], ids[1], ids[0]], [9.0, 5.0, 1.0, 3.0])
                batch = loader.next()
                np.testing.assert_array_equal(batch["probabilities"], np.where(batch["obs"] == 0, 0.75, 0.25))

    def test_one_bad_priority_spoils_nothing(self, make):
        """In cpprb#96, tianshou#728: one NaN in a batch made every later sample row 0 with weight NaN."""
        engine = make(priorities=conduit.Priorities())
        with engine.writer("replay") as writer:
            steps(writer, range(100))
            with engine.loader(
                "replay", batch_size=64, sampling=conduit.Prioritized(), format="numpy", min_rows=1
            ) as loader:
                ids = loader.next().ids.copy()
                for bad in (np.nan, np.inf, -np.inf, -1.0):
                    values = np.ones(64)
                    values[63] = bad
                    with pytest.raises(FieldError, match="at index 63: nothing was changed"):
                        loader.update_priorities(ids, values)
                batch = loader.next()
                assert np.isfinite(batch["weights"]).all()
                assert (batch["probabilities"] == 1 / 99).all()

    def test_probabilities_and_not_priorities_are_delivered(self, make):
        """In flashbax PR#51: importance weights need P(i), which came as raw priorities."""
        engine = make(priorities=conduit.Priorities())
        with engine.writer("replay") as writer:
            steps(writer, range(11))
            batch = drawn(engine, sampling=conduit.Prioritized(normalize="none"))
        assert all(row["probabilities"] == 0.1 and row["weights"] == 1 for row in batch.values())

    def test_a_late_update_does_not_hit_the_row_that_took_the_place(self, make):
        """In cpprb#96, flashbax PR#58: an index alone names another row after a lap of the ring."""
        engine = make(capacity=60, page_rows=20, priorities=conduit.Priorities(alpha=1.0, eps=0.0))
        with engine.writer("replay") as writer:
            steps(writer, range(50))
            with engine.loader(
                "replay", batch_size=32, sampling=conduit.Prioritized(), format="numpy", min_rows=1
            ) as loader:
                late = loader.next().ids.copy()
                steps(writer, range(50, 400))
                assert loader.update_priorities(late, np.full(32, 100.0)) == 32
                assert loader.sampler.ignored == 32
                assert len(set(loader.next()["probabilities"].tolist())) == 1

    def test_an_empty_table_gives_no_fill_rows(self, make):
        """Reverb and cpprb: zeros with weight NaN, or a wait without an end."""
        engine = make(priorities=conduit.Priorities())
        for sampling in (None, conduit.Prioritized()):
            with (
                engine.loader("replay", batch_size=4, sampling=sampling, timeout=0.05, format="numpy") as loader,
                pytest.raises(DataTimeout, match="got 0 within"),
            ):
                loader.next()


class TestTypesAndShapes:
    @pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
    @pytest.mark.parametrize("envs", [None, 1, 3])
    def test_shapes_come_out_as_declared_without_lost_or_extra_axes(self, make, shape, envs):
        """In cpprb#112 #130, SB3#720 #1145, tf-agents#723: [B, 1] beside [B] broadcasts to [B, B] without a word."""
        engine = make(spec=schema(shape, "float32", shape), max_n_step=2, max_stack=2, max_length=3, num_envs=envs or 1)
        lead = () if envs is None else (envs,)
        with engine.writer("replay", num_envs=envs, autoreset="next_step" if envs else None) as writer:
            for _ in range(20):
                reward = 1.0 if envs is None else np.ones(envs, np.float32)
                writer.append(
                    obs=np.ones(lead + shape, np.float32), action=np.ones(lead + shape, np.int64), reward=reward
                )
            for window, axes in (
                (conduit.Transition(), ()),
                (conduit.Transition(n_step=2), ()),
                (conduit.Transition(n_step=2, stack=2), ()),
                (conduit.Sequence(3), (3,)),
                (conduit.Rollout(3, envs or 1), (3, envs or 1)),
            ):
                stack = (2,) if getattr(window, "stack", 1) == 2 else ()
                with engine.loader("replay", batch_size=5, window=window, min_rows=1, format="torch") as loader:
                    batch = loader.next()
                    assert tuple(batch["obs"].shape) == (5, *axes, *stack, *shape)
                    assert tuple(batch["action"].shape) == (5, *axes, *shape)
                    for name in ("reward", "terminated", "truncated"):
                        assert tuple(batch[name].shape) == (5, *axes)
                    for name in ("discount", "n_steps", "lengths"):
                        assert name not in batch or tuple(batch[name].shape) == (5,)

    def test_dtypes_come_out_as_declared(self, make):
        """In cpprb#128, SB3#1145: integers came as float32, float64 rewards as float32."""
        engine = make(spec=schema((), "uint8", (), "float64"), max_n_step=3, priorities=conduit.Priorities())
        with engine.writer("replay") as writer:
            for t in range(20):
                writer.append(obs=t, action=t, reward=float(t))
            for window in (None, conduit.Transition(n_step=3)):
                with engine.loader(
                    "replay", batch_size=4, window=window, sampling=conduit.Prioritized(), min_rows=1
                ) as loader:
                    batch = loader.next()
                    got = {name: str(value.dtype).removeprefix("torch.") for name, value in batch.items()}
                    want = {
                        "obs": "uint8",
                        "next_obs": "uint8",
                        "action": "int64",
                        "reward": "float64",
                        "terminated": "bool",
                        "truncated": "bool",
                        "discount": "float32",
                        "n_steps": "int64",
                        "weights": "float32",
                        "probabilities": "float64",
                    }
                    assert got == {name: want[name] for name in got}

    def test_a_reward_that_cannot_be_summed_is_refused_when_the_loader_is_opened(self, make):
        """In tf-agents#723, cpprb#130: integer rewards went through n-step sums as garbage."""
        spec = conduit.Schema([conduit.Field("obs", "int64", (), observation=True), conduit.Field("reward", "int32")])
        engine = make(spec=spec, max_n_step=3)
        with pytest.raises(ConfigError, match="`float32` or `float64` as reward of n-step returns, got int32"):
            engine.loader("replay", batch_size=4, window=conduit.Transition(n_step=3))
        engine.loader("replay", batch_size=4).close()

    def test_a_batch_may_be_larger_than_the_table(self, make):
        """SB3#720, cpprb#112: sizes that only worked while the buffer was larger."""
        engine = make(priorities=conduit.Priorities())
        with engine.writer("replay") as writer:
            steps(writer, range(4))
            for sampling in (None, conduit.Prioritized()):
                got = drawn(engine, batches=2, size=1000, sampling=sampling)
                assert got.keys() == {0, 1, 2}
