"""What is subtracted or summed up is not rounded before: large values that differ by little, against what is right."""

import numpy as np
import pytest
import torch

import conduit
from conduit.kernels.reference import gather
from conduit.kernels.spec.plan import Output
from conduit.kernels.spec.transforms import Transform
from conduit.store.tables.statistics import Moments

LARGE = 1e8
TICKS = 4
FORMATS = {"numpy": np.asarray, "torch": torch.as_tensor}


def steps(make, **named):
    """A batch of one sequence whose steps all go on."""
    flags = {name: np.zeros((1, TICKS), bool) for name in ("terminated", "truncated")}
    return {name: make(np.asarray(value)) for name, value in (flags | named).items()}


def large_values():
    return LARGE + 2.5 * np.arange(TICKS, dtype=np.float64)[None]


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64 rewards", "float32 rewards"])
@pytest.mark.parametrize("kind", [conduit.gae(1.0, 0.0), conduit.vtrace(1.0, lam=0.0)], ids=["gae", "vtrace"])
def test_advantages_of_large_float64_values_are_their_small_differences(make, dtype, kind):
    batch = steps(make, reward=np.full((1, TICKS), 0.5, dtype))
    made = kind(batch, values=make(large_values()), bootstrap=make(np.array([LARGE + 2.5 * TICKS])))
    # V-trace's advantage has the difference of the target behind it as well
    wanted = [3.0] * TICKS if "returns" in made else [6.0] * (TICKS - 1) + [3.0]
    assert np.asarray(made["advantages"]).tolist() == [wanted]
    target = np.asarray(made["returns" if "returns" in made else "targets"])
    np.testing.assert_array_equal(target, (large_values() + 3.0).astype(np.float32))
    assert all(np.asarray(made[name]).dtype == np.float32 for name in made if name != "advantage_mask")


@pytest.mark.parametrize("given", ["final_values", "bootstrap"])
def test_what_stands_behind_an_end_or_the_window_is_not_rounded_either(given):
    batch = steps(np.asarray, reward=np.full((1, TICKS), 0.5, np.float32))
    batch["truncated"][:, -1] = given == "final_values"
    behind = LARGE + 2.5 * TICKS
    options = {given: np.array([behind]) if given == "bootstrap" else np.full((1, TICKS), behind)}
    made = conduit.gae(1.0, 0.0)(batch, values=large_values(), **options)
    assert made["advantages"].tolist() == [[3.0] * TICKS]


def test_integers_that_float32_does_not_hold_are_values_like_others():
    values = np.array([[2**24 + 1, 2**24 + 2, 2**24 + 3, 2**24 + 4]])
    batch = steps(np.asarray, reward=np.zeros((1, TICKS), np.int64))
    made = conduit.gae(1.0, 0.0)(batch, values=values, bootstrap=values[:, -1] + 1)
    assert made["advantages"].tolist() == [[1.0] * TICKS]


def test_advantages_of_stored_float64_values_come_out_of_a_loader_as_they_are(engine_name):
    fields = [conduit.Field("obs", "float32", observation=True), conduit.Field("reward", "float32")]
    schema = conduit.Schema([*fields, conduit.Field("value", "float64")])
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 1000, max_length=8)}) as engine:
        with engine.writer("t") as writer:
            for t in range(50):
                writer.append(obs=t, reward=0.5, value=LARGE + 2.5 * t)
        with engine.loader(
            "t", batch_size=16, window=conduit.Sequence(8), batch_transforms=(conduit.gae(1.0, 0.0),), format="numpy"
        ) as loader:
            batch = loader.next()
        assert set(batch["advantages"][batch["advantage_mask"]].tolist()) == {3.0}


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_returns_to_go_sum_float64_rewards_as_they_are(engine_name, make):
    schema = conduit.Schema([conduit.Field("obs", "float32", observation=True), conduit.Field("reward", "float64")])
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 1000, max_length=4)}) as engine:
        with engine.writer("t") as writer:
            for t in range(40):
                writer.append(
                    obs=t,
                    reward=(LARGE + 0.5, -LARGE, 0.25, 0.125)[t % 4],
                    terminated=t % 4 == 3,
                    final=0.0 if t % 4 == 3 else None,
                )
        with engine.loader(
            "t",
            batch_size=8,
            window=conduit.Episode(4),
            batch_transforms=(conduit.returns_to_go(1.0),),
            format="numpy" if make is np.asarray else "torch",
        ) as loader:
            batch = loader.next()
        np.testing.assert_array_equal(np.asarray(batch["returns_to_go"])[:, 0], np.full(8, 0.875, np.float32))


def test_n_step_returns_sum_float64_rewards_as_they_are(engine_name):
    schema = conduit.Schema([conduit.Field("obs", "float32", observation=True), conduit.Field("reward", "float64")])
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 1000, max_n_step=3)}) as engine:
        with engine.writer("t") as writer:
            for t in range(40):
                writer.append(obs=t, reward=(LARGE + 0.5, -LARGE, 0.25)[t % 3])
        window = conduit.Transition(n_step=3, gamma=1.0)
        with engine.loader(
            "t", batch_size=32, window=window, transform={"reward": conduit.cast("float32")}, format="numpy"
        ) as loader:
            batch = loader.next()
        whole = batch["n_steps"] == 3
        assert set(batch["reward"][whole].tolist()) == {0.75}


@pytest.mark.parametrize(
    ("x", "factor", "offset", "right"),
    [
        (1e8 + 8, 0.1, -1e7, 0.8),
        (1e8 + 8, 1.0, -100000000.25, 7.75),
        (33554436.0, 0.5, -16777217.0, 1.0),
    ],
)
def test_an_offset_takes_away_what_was_not_rounded_before(engine_name, x, factor, offset, right):
    schema = conduit.Schema([conduit.Field("x", "float32", (3,)), conduit.Field("obs", "float32", observation=True)])
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 100)}) as engine:
        with engine.writer("t") as writer:
            for _ in range(4):
                writer.append(x=np.full(3, x, np.float32), obs=0.0)
        for bound in ((), (conduit.clip(-1e9, 1e9),)):
            transform = {"x": (conduit.scale(factor, offset=offset), *bound)}
            with engine.loader("t", batch_size=2, min_rows=1, transform=transform, format="numpy") as loader:
                delivered = loader.next()["x"]
            wanted = np.float32(np.float64(np.float32(x)) * factor + offset)
            np.testing.assert_array_equal(delivered, np.full((2, 3), wanted))
            assert abs(float(wanted) - right) < 1e-6


def test_a_normalized_value_is_its_distance_from_the_mean_in_float64():
    """Stored float32 values around a mean that float32 does not hold."""
    output = Output(
        "x", conduit.Field("x", "float32"), "anchor", (), Transform("float32"), normalize=conduit.normalize(eps=0.0)
    )
    moments = Moments(3, np.array(LARGE + 0.3), np.array(1.0))
    made = gather.transform(output, np.array([LARGE, LARGE + 8], np.float32), moments)
    np.testing.assert_allclose(made, [-0.3, 7.7], rtol=1e-6)


def test_statistics_of_large_values_have_the_variance_of_their_differences(engine_name):
    schema = conduit.Schema([conduit.Field("obs", "float64", observation=True)])
    table = conduit.Table(schema, 100, statistics=("obs",))
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        statistics = engine.table("t").statistics
        rng = np.random.default_rng(0)
        parts = [1e9 + rng.normal(size=size) for size in (1, 7, 1000, 3)]
        for part in parts:
            statistics.update(obs=part)
        read = statistics.read("obs")
        whole = np.concatenate(parts)
        np.testing.assert_allclose(read.variance, (whole - 1e9).var(), rtol=1e-6)
        np.testing.assert_allclose(read.mean - 1e9, (whole - 1e9).mean(), atol=1e-6)


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_normalized_advantages_keep_small_differences_of_large_ones(make):
    advantages = make(np.array([[LARGE, LARGE + 8, LARGE + 16]], np.float32))
    step = conduit.normalize_advantages(eps=0.0)
    step.run({"advantages": advantages}, {}, (0, 0))
    np.testing.assert_allclose(np.asarray(advantages), [[-(1.5**0.5), 0.0, 1.5**0.5]], rtol=1e-6)


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_a_sequence_s_priority_of_many_float16_errors_is_no_infinity(make):
    errors = make(np.full((2, 200), 1000, np.float16))
    made = conduit.sequence_priority(errors, eta=0.5)
    assert made.tolist() == [1000.0, 1000.0]
    assert str(made.dtype).endswith("float16")
