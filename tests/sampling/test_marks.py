"""Sums of priorities are of exactly the rows that can be drawn, whatever the window, the writers and the readers do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit
from conduit.errors import DataTimeout
from conduit.kernels.cpu.priorities import values_of
from tests.plane.history import MODES, ROW_BITS, History, operations
from tests.sampling.marked import can_be_drawn

RULE = conduit.Priorities(alpha=1.0, eps=0.0)
OPTIONS = {"batch_size": 48, "min_rows": 1, "format": "numpy", "timeout": 0.0}

WINDOWS = [
    (conduit.Transition(), 1, True),
    (conduit.Transition(n_step=4), 4, True),
    (conduit.Transition(n_step=4, newest="bootstrap"), 1, True),
    (conduit.Sequence(5), 4, True),
    (conduit.Sequence(4, next_obs=True), 4, True),
    (conduit.Sequence(4, overlap=1), 3, True),
    (conduit.Sequence(4, pad=False), 3, False),
    (conduit.Sequence(4, pad=False, next_obs=True), 4, False),
    (conduit.Sequence(4, overlap=2, across=True), 3, False),
    (conduit.Sequence(3, across=True, next_obs=True), 3, False),
    (conduit.Episode(5), 4, True),
    (conduit.Episode(4, next_obs=True), 4, True),
    (conduit.Rollout(3, 2), 2, False),
    (conduit.Rollout(3, 1, stride=1, next_obs=True), 3, False),
    (conduit.Rollout(2, 3, next_obs=True), 2, False),
]
"""Windows, how many ticks they need behind their first, and whether they end with their episode."""


@settings(max_examples=100)
@given(
    modes=st.lists(st.sampled_from(MODES), min_size=1, max_size=3),
    pages=st.integers(5, 8),
    spare=st.integers(0, 90),
    moves=operations,
    kinds=st.lists(st.sampled_from(range(len(WINDOWS))), min_size=2, max_size=3, unique=True),
    seed=st.integers(0, 2**32),
)
def test_each_row_is_drawn_with_its_share_among_exactly_those_that_can_be(modes, pages, spare, moves, kinds, seed):
    """For loaders that have looked at every moment, and for one that has not before; with updates, deletions and ends of all kinds."""
    rng = np.random.default_rng(seed)
    with History((1, 4, 5), modes, pages, spare, RULE) as world:

        def open_loader(kind, sampling):
            return world.engine.loader("replay", window=WINDOWS[kind][0], sampling=sampling, seed=3, **OPTIONS)

        loaders = [(kind, open_loader(kind, conduit.Prioritized(normalize="none"))) for kind in kinds]
        deleted = set()
        for move in moves:
            world.do(*move)
            newcomer = (kinds[0], open_loader(kinds[0], conduit.Prioritized(normalize="none")))
            for kind, loader in (*loaders, newcomer):
                window, need, short = WINDOWS[kind]
                anchors = {
                    key: place
                    for key, place in world.places(need, short).items()
                    if place not in deleted and can_be_drawn(world, window, *place)
                }
                leaf_of = {key: int(values_of(world.view.priorities[key & (1 << ROW_BITS) - 1])) for key in anchors}
                total = sum(leaf_of.values())
                try:
                    batch = loader.next()
                except DataTimeout:
                    assert not anchors
                    continue
                assert loader.sampler.candidates == len(anchors)
                for key, probability in zip(batch.ids.tolist(), batch["probabilities"].tolist(), strict=True):
                    assert probability == (leaf_of[key] / total if total else 1 / len(anchors))
                keys = batch.ids.copy()
                loader.update_priorities(keys, rng.choice([0.0, 0.5, 1.0, 30.0], len(keys)))
                batch.release()
            newcomer[1].close()
            places = world.places(0)
            if places and rng.random() < 0.3:
                chosen = rng.choice(list(places), 3)
                world.engine.table("replay").delete(chosen)
                # an observation that is no step is not deleted
                found = (places[key] for key in chosen.tolist())
                deleted |= {(s, tick, env) for s, tick, env in found if not s.ticks[tick][env].closing}
        for _, loader in loaders:
            loader.close()


SCHEMA = conduit.Schema([conduit.Field("obs", "int64", observation=True), conduit.Field("reward", "float32")])


def shares(batch):
    """{obs: probability} of a batch."""
    return dict(
        zip(batch["obs"].reshape(len(batch.ids), -1)[:, 0].tolist(), batch["probabilities"].tolist(), strict=True)
    )


def test_what_lies_incomplete_before_the_newest_complete_row_has_no_share(engine_name):
    table = conduit.Table(SCHEMA, 1000, max_n_step=3, num_envs=4, priorities=RULE)
    window = conduit.Transition(n_step=3)
    with (
        conduit.Engine.create(engine_name, {"t": table}) as engine,
        engine.writer("t", num_envs=4, autoreset="same_step") as writer,
        engine.loader(
            "t", window=window, sampling=conduit.Prioritized(normalize="none", beta=1.0), **OPTIONS
        ) as loader,
    ):
        for t in range(10):
            obs = 10 * t + np.arange(4)
            ends = (np.arange(4) == 2) & (t == 9)
            writer.append(obs=obs, reward=np.zeros(4, np.float32), terminated=ends, final=obs)
        batch = loader.next()
        # all of ticks 0 to 6, and of the one environment whose episode ended the rest
        wanted = {10 * t + env for t in range(10) for env in range(4) if t < 7 or env == 2}
        assert shares(batch) == dict.fromkeys(wanted, 1 / 31)
        assert (batch["weights"] == 1).all()
        assert loader.sampler.candidates == 31
        assert loader.sampler.offered == 39


def test_rows_that_are_too_old_have_no_share_from_the_version_on_that_makes_them_so(engine_name):
    table = conduit.Table(SCHEMA, 2000, page_rows=150, priorities=RULE)
    with conduit.Engine.create(engine_name, {"t": table}, policies={"policy": {"w": np.zeros(1)}}) as engine:
        slot = engine.policy()
        with (
            engine.writer("t") as writer,
            engine.loader(
                "t", sampling=conduit.Prioritized(), policy=slot, max_staleness=2, **OPTIONS | {"batch_size": 600}
            ) as loader,
        ):
            for version in range(8):
                slot.publish({"w": np.zeros(1)})
                writer.version = version
                for number in range(100):
                    writer.append(obs=1000 * version + number, reward=0.0)
                batch = loader.next()
                oldest = max(0, slot.version - 2)
                wanted = {1000 * v + n for v in range(oldest, version + 1) for n in range(100)} - {1000 * version + 99}
                assert loader.sampler.candidates == len(wanted)
                assert shares(batch).keys() <= wanted
                assert (batch["probabilities"] == 1 / len(wanted)).all()
                batch.release()
            assert min(loader.stats.stale) == 3


def test_rows_that_were_delivered_as_often_as_they_may_be_have_no_share(engine_name):
    table = conduit.Table(SCHEMA, 1000, max_times_sampled=1, priorities=RULE)
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        with engine.writer("t") as writer:
            for number in range(101):
                writer.append(obs=number, reward=0.0)
        with engine.loader("t", sampling=conduit.Prioritized(), **OPTIONS | {"batch_size": 10}) as loader:
            left = set(range(100))
            while left:
                batch = loader.next()
                drawn = batch["obs"].tolist()
                assert len(set(drawn)) == 10
                assert set(drawn) <= left
                assert loader.sampler.candidates == len(left)
                assert (batch["probabilities"] == 1 / len(left)).all()
                left -= set(drawn)
                batch.release()
            with pytest.raises(DataTimeout):
                loader.next()


def test_what_a_loader_that_was_killed_had_taken_has_no_share_once_it_is_recovered(engine_name):
    table = conduit.Table(SCHEMA, 1000, max_times_sampled=1, priorities=RULE)
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        with engine.writer("t") as writer:
            for number in range(101):
                writer.append(obs=number, reward=0.0)
        dead = conduit.attach(engine.name)
        other = dead.loader("t", **OPTIONS | {"batch_size": 10})
        buffer = other._ring.buffers[0]
        assert other._maker.fill(buffer)  # drawn, and not handed out
        taken = set(buffer.arrays["obs"].tolist())
        with engine.loader("t", sampling=conduit.Prioritized(), **OPTIONS | {"batch_size": 10}) as loader:
            dead._participants.forget()
            engine.recover()
            batch = loader.next()
            assert not taken & set(batch["obs"].tolist())
            assert (batch["probabilities"] == 1 / 90).all()


def reached(achieved, goals):
    return (achieved == goals).astype(np.float32)


def test_goals_are_drawn_for_steps_of_whole_episodes_each_with_its_share(engine_name):
    schema = conduit.Schema(
        [
            conduit.Field("obs", "int64", observation=True),
            conduit.Field("achieved_goal", "int64", observation=True),
            conduit.Field("desired_goal", "int64", observation=True),
            conduit.Field("reward", "float32"),
        ]
    )
    table = conduit.Table(schema, 1000, max_length=9, priorities=RULE)
    hindsight = conduit.hindsight(reached, goal="desired_goal", achieved="achieved_goal", max_length=8)
    with (
        conduit.Engine.create(engine_name, {"t": table}) as engine,
        engine.writer("t", autoreset="same_step") as writer,
        engine.loader("t", sampling=conduit.Prioritized(), batch_transforms=(hindsight,), **OPTIONS) as loader,
    ):
        for t in range(70):
            goals = {"achieved_goal": t, "desired_goal": 0}
            writer.append(obs=t, reward=0.0, **goals, terminated=t % 7 == 6, final={"obs": t, **goals})
            if t % 3 == 2:
                whole = (t + 1) // 7 * 7
                if whole:
                    assert set(shares(loader.next()).values()) == {1 / whole}
                    assert loader.sampler.candidates == whole


def test_the_uniform_part_of_a_mixture_says_how_likely_its_rows_are_among_those_that_can_be_drawn(engine_name):
    tables = {"p": conduit.Table(SCHEMA, 500, priorities=RULE), "u": conduit.Table(SCHEMA, 500)}
    with conduit.Engine.create(engine_name, tables) as engine:
        writers = [engine.writer(name, autoreset="next_step") for name in tables]
        sampling = {"p": conduit.Prioritized(), "u": None}
        with engine.mixed_loader({"p": 0.5, "u": 0.5}, sampling=sampling, **OPTIONS) as loader:
            for t in range(61):
                for writer in writers:
                    writer.append(obs=t, reward=0.0, terminated=t % 10 == 8)
            # of each ten the ninth ends the episode and the last only closes it
            for left in (54, 53):
                batch = loader.next()
                uniform = batch["source"] == 1
                assert (batch["probabilities"][~uniform] == 1 / 54).all()
                assert (batch["probabilities"][uniform] == 1 / left).all()
                engine.table("u").delete(batch.ids[uniform][:1])
                batch.release()
        for writer in writers:
            writer.close()
