"""Transforms of consumers: the same values as a loader's, statistics that count each row once, and rows that are refused."""

import threading

import numpy as np
import pytest
import torch

import conduit
from conduit import Field, Schema
from conduit.errors import ConfigError, FieldError

SCHEMA = Schema(
    [
        Field("obs.image", "uint8", (2, 3), observation=True),
        Field("obs.pose", "float32", (2,), observation=True),
        Field("action", "int64"),
        Field("reward", "float32", reward=True),
        Field("note", "int32", (4,), ragged=True),
    ]
)
TRANSFORM = {
    "obs.image": conduit.scale(1 / 255),
    "obs.pose": (conduit.normalize(update=True, dtype="float64"), conduit.clip(-2, 2)),
    "action": conduit.one_hot(3),
    "reward": (conduit.scale(0.1), conduit.cast("bfloat16")),
}
T, N = 8, 2


@pytest.fixture
def make(engine_name):
    engines = []

    def create(**options):
        table = conduit.Table(SCHEMA, 64 * T * N, kind="queue", num_envs=N, statistics=("obs.pose",), **options)
        engines.append(conduit.Engine.create(f"{engine_name}-{len(engines)}", {"q": table}))
        return engines[-1]

    yield create
    for engine in engines:
        engine.close()


def pose(t):
    return np.array([[t, -t], [2 * t, 7]], np.float32)


def write(engine, ticks, *, autoreset="same_step", bad=(), worst=(), ended=(), start=0):
    writer = engine.writer("q", num_envs=N, autoreset=autoreset)
    for t in range(start, start + ticks):
        image, at = np.full((N, 2, 3), t, np.uint8), pose(t)
        if t in bad:
            at[1, 0] = np.nan
        options = {}
        if t in ended:
            options["terminated"] = np.array([False, True])
            if autoreset == "same_step":
                options["final"] = {"image": image + 100, "pose": at + 100}
        if engine._views["q"].layout.table.rollout_length and writer.ticks_left == 1:
            options["bootstrap"] = {"image": image + 50, "pose": at + 50}
        writer.append(
            obs={"image": image, "pose": at},
            action=np.array([t % 3, 5 if t in worst else 1]),
            reward=np.full(N, t, np.float32),
            note=[np.zeros(0, np.int32)] * N,
            **options,
        )
    writer.close()


def expected_pose(values, moments, eps=1e-8):
    if not moments.count:
        return np.clip(values.astype(np.float64), -2, 2)
    return np.clip((values - moments.mean) / np.sqrt(moments.variance + eps), -2, 2)


def numbers(value):
    return value.double().numpy() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("rollouts", [True, False], ids=["rollouts", "rows"])
def test_a_claim_has_what_a_loader_would_make_of_its_rows(make, kind, rollouts):
    engine = make(rollout_length=T) if rollouts else make()
    engine.table("q").statistics.update({"obs.pose": np.array([[0.0, 1.0], [4.0, 3.0]])})
    moments = engine.table("q").statistics.read("obs.pose")
    write(engine, T, ended=(3,))
    consumer = engine.consumer("q", format=kind, transform=TRANSFORM)
    with consumer.next() as claim:
        raw = np.stack([pose(t) for t in range(T)])
        assert claim["obs.pose"].shape == (T, N, 2)
        np.testing.assert_allclose(numbers(claim["obs.pose"]), expected_pose(raw, moments), rtol=1e-12)
        images = np.broadcast_to(np.arange(T)[:, None, None, None], (T, N, 2, 3)) * np.float32(1 / 255)
        np.testing.assert_allclose(numbers(claim["obs.image"]), images, rtol=1e-6)
        actions = np.stack([np.arange(T) % 3, np.ones(T, int)], 1)
        np.testing.assert_array_equal(numbers(claim["action"]), np.eye(3)[actions])
        if kind == "torch":
            assert claim["reward"].dtype == torch.bfloat16
            assert torch.equal(claim["reward"][:, 0], (torch.arange(T) * 0.1).bfloat16())
        else:
            assert claim["reward"].dtype == np.uint16
        assert len(claim["note"]) == T * N
        places, finals = claim.finals
        assert numbers(places).tolist() == [[3, 1]]
        np.testing.assert_allclose(numbers(finals["obs.pose"]), expected_pose(pose(3)[1:] + 100, moments))
        np.testing.assert_allclose(numbers(finals["obs.image"]), np.full((1, 2, 3), 103 / 255), rtol=1e-6)
        if rollouts:
            behind = claim.bootstrap
            np.testing.assert_allclose(numbers(behind["obs.pose"]), expected_pose(pose(T - 1) + 50, moments))
            np.testing.assert_allclose(numbers(behind["obs.image"]), np.full((N, 2, 3), (T + 49) / 255), rtol=1e-6)
            batch = claim.batch()
            assert batch["bootstrap_obs.pose"].shape == (1, N, 2)
            np.testing.assert_array_equal(numbers(batch["obs.pose"])[0], numbers(claim["obs.pose"]))
        # one reading for all of a claim, whatever others add meanwhile
        engine.table("q").statistics.update({"obs.pose": np.full((1, 2), 1e6)})
        np.testing.assert_allclose(
            numbers(claim.finals[1]["obs.pose"]), expected_pose(pose(3)[1:] + 100, moments), rtol=1e-12
        )


def test_statistics_count_a_row_when_it_is_acknowledged_and_once(make):
    engine = make(rollout_length=T)
    write(engine, 2 * T)
    consumer = engine.consumer("q", transform=TRANSFORM)
    statistics = engine.table("q").statistics
    first = consumer.next()
    second = consumer.next()
    assert (numbers(second["obs.pose"]) == np.clip(np.stack([pose(t) for t in range(T, 2 * T)]), -2, 2)).all()
    assert statistics.read("obs.pose").count == 0
    first.give_back()
    again = consumer.next()
    assert again.delivered_before
    threads = [threading.Thread(target=again.ack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again.ack()
    assert statistics.read("obs.pose").count == T * N
    with second:
        pass
    moments = statistics.read("obs.pose")
    every = np.concatenate([pose(t) for t in range(2 * T)]).astype(np.float64)
    assert moments.count == 2 * T * N
    np.testing.assert_allclose(moments.mean, every.mean(0))
    np.testing.assert_allclose(moments.variance, every.var(0))
    write(engine, T)
    later = consumer.next()
    np.testing.assert_allclose(
        numbers(later["obs.pose"]), expected_pose(np.stack([pose(t) for t in range(T)]), moments), rtol=1e-12
    )


def test_the_last_observation_of_an_episode_is_counted_and_its_row_is_no_step(make):
    engine = make()
    write(engine, 4, autoreset="next_step", ended=(1,))
    with engine.consumer("q", transform=TRANSFORM).next() as claim:
        assert not claim.mask[2, 1]
    assert engine.table("q").statistics.read("obs.pose").count == 4 * N


@pytest.mark.parametrize(
    ("broken", "field", "text"),
    [({"bad": (T + 2,)}, "obs.pose", "finite values"), ({"worst": (T + 2,)}, "action", "classes from 0 to 2, got 5")],
    ids=["not finite", "no class"],
)
def test_a_row_that_is_refused_is_named_and_its_claim_is_not_lost(make, broken, field, text):
    engine = make(rollout_length=T)
    write(engine, 3 * T, **broken)
    consumer = engine.consumer("q", transform=TRANSFORM)
    consumer.next().ack()
    for tried in range(2):
        with pytest.raises(FieldError, match=text) as told:
            consumer.next(timeout=0)
        assert told.value.at == field
        assert "on_refused='drop'" in str(told.value)
        assert consumer.stats.refused == tried + 1
    plain = engine.consumer("q")
    claim = plain.next(timeout=0)
    while claim.first_tick != T:
        claim = plain.next(timeout=0)
    assert claim.delivered_before
    assert int(claim.ids[2, 1]) == told.value.row_id
    assert engine.table("q").statistics.read("obs.pose").count == T * N


def test_a_claim_with_a_refused_row_is_passed_over_where_that_was_asked_for(make):
    engine = make(rollout_length=T)
    write(engine, 4 * T, bad=(T + 2,), worst=(2 * T + 1,))
    consumer = engine.consumer("q", transform=TRANSFORM, on_refused="drop")
    with consumer.next() as claim:
        assert claim.first_tick == 0
    with pytest.warns(RuntimeWarning, match="passed over.*obs.pose"), consumer.next() as claim:
        assert claim.first_tick == 3 * T
    assert consumer.poll() is None
    assert consumer.stats.refused == 2
    assert consumer.stats.acknowledged == 4
    assert engine.table("q").statistics.read("obs.pose").count == 2 * T * N


def broken_step(batch):
    raise FieldError("Expected another batch")


def test_a_step_s_own_error_passes_nothing_over(make):
    engine = make(rollout_length=T)
    write(engine, T)
    consumer = engine.consumer("q", batch_transforms=conduit.apply(broken_step), on_refused="drop")
    for _ in range(2):
        with pytest.raises(FieldError, match="another batch"):
            consumer.next(timeout=0)
    assert consumer.stats.refused == 0
    assert engine.consumer("q").next(timeout=0).delivered_before


def value_of(batch):
    assert batch["obs.pose"].dtype == torch.float64
    assert batch["action"].shape[-1] == 3
    return {**batch, "value": batch["obs.pose"].sum(-1).float()}


def test_steps_on_the_whole_claim_see_what_transforms_made(make):
    engine = make(rollout_length=T)
    write(engine, T)
    steps = (conduit.apply(value_of), conduit.gae(0.9, 0.8))
    transform = {**TRANSFORM, "reward": conduit.scale(0.5)}
    with engine.consumer("q", transform=transform, batch_transforms=steps).next() as claim:
        made = claim["value"]
        assert torch.equal(made, claim["obs.pose"].sum(-1).float())
        alone = conduit.gae(0.9, 0.8)(claim.batch(), values=made[None])
        torch.testing.assert_close(claim["advantages"], alone["advantages"][0])


def test_what_a_consumer_cannot_do_is_refused_when_it_is_opened(make):
    engine = make(rollout_length=T)
    for transform, text in (
        ({"note": conduit.cast("float32")}, "ragged field"),
        ({"obs.image": conduit.random_shift(1)}, "random_shift"),
        ({"reward": conduit.normalize()}, "keep statistics of the field"),
        ({"nothing": conduit.scale(2)}, "fields of the schema"),
        (conduit.scale(2), "mapping of fields"),
        ({"obs.pose": conduit.one_hot(3)}, "one_hot as the first step of an integer field"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine.consumer("q", transform=transform)
    with pytest.raises(ConfigError, match="on_refused 'raise' or 'drop'"):
        engine.consumer("q", on_refused="skip")


def test_a_renamed_field_is_transformed_by_its_name_in_the_schema(make):
    engine = make(rollout_length=T)
    write(engine, T)
    with engine.consumer("q", transform={"obs.image": conduit.scale(2.0)}, rename={"obs": "seen"}).next() as claim:
        assert (claim["seen.image"][3] == 6).all()
        assert (claim.bootstrap["seen.image"] == 2 * (T + 49)).all()
