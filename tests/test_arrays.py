"""bfloat16 of every library that has it is what its dtype says, as an array, as a scalar and in a list."""

import importlib.util

import ml_dtypes
import numpy as np
import pytest
import torch

import conduit
from conduit.arrays import as_array, as_numbers

BF16 = ml_dtypes.bfloat16


class Foreign:
    """An array of another library, as JAX's: dtype, shape, and `__array__`; not numpy's own, and no tensor."""

    def __init__(self, values):
        self._values = np.asarray(values, BF16)
        self.dtype, self.shape = self._values.dtype, self._values.shape

    def __array__(self, dtype=None, copy=None):
        return self._values if dtype is None else self._values.astype(dtype)

    def __len__(self):
        return len(self._values)


def tensor(values):
    return torch.tensor(values, dtype=torch.bfloat16)


KINDS = {"ml_dtypes": lambda values: np.asarray(values, BF16), "foreign": Foreign, "torch": tensor}
if importlib.util.find_spec("jax"):
    import jax.numpy as jnp

    KINDS["jax"] = lambda values: jnp.asarray(values, jnp.bfloat16)

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "bfloat16", (2,), observation=True),
        conduit.Field("reward", "bfloat16"),
        conduit.Field("wide", "float32", (2,), casting="same_kind"),
        conduit.Field("tokens", "bfloat16", (4,), ragged=True),
    ]
)
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


@pytest.fixture
def engine(engine_name):
    with conduit.Engine.create(engine_name, {"t": conduit.Table(SCHEMA, capacity=400)}) as made:
        yield made


def written(engine):
    with engine.loader("t", batch_size=16, format="torch") as loader:
        batch = loader.next()
    return {name: batch[name][0].float().tolist() for name in ("obs", "next_obs", "reward", "wide", "tokens")}


GIVEN = {
    "obs": [1.5, -2.5],
    "next_obs": [1.5, -2.5],
    "reward": 0.25,
    "wide": [3.0, 4.0],
    "tokens": [1.0, 2.0, 0.0, 0.0],
}


@kinds
@pytest.mark.parametrize("form", ["append", "step"])
def test_arrays_and_scalars_of_bfloat16_are_stored_as_they_are(engine, kind, form):
    row = {"obs": kind([1.5, -2.5]), "reward": kind(0.25), "wide": kind([3.0, 4.0]), "tokens": kind([1.0, 2.0])}
    with engine.writer("t") as writer:
        for _ in range(20):
            if form == "append":
                writer.append(**row)
            else:
                with writer.step() as step:
                    for name, value in row.items():
                        step[name] = value
    assert written(engine) == GIVEN


@kinds
def test_lists_of_scalars_of_bfloat16_are_stored_by_value(engine, kind):
    row = {"obs": [kind(1.5), kind(-2.5)], "reward": 0.25, "wide": [kind(3.0), 4.0], "tokens": (kind(1.0), kind(2.0))}
    with engine.writer("t") as writer:
        for _ in range(20):
            writer.append(**row)
    assert written(engine) == GIVEN


def test_ml_dtypes_own_scalars_are_numbers(engine):
    with engine.writer("t") as writer:
        for _ in range(20):
            writer.append(obs=[BF16(1.5), BF16(-2.5)], reward=BF16(0.25), wide=[BF16(3), BF16(4)], tokens=[BF16(1), 2])
    assert written(engine) == GIVEN


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (np.ones(2, np.float32), "got `float32`: convert it to bfloat16"),
        (np.ones(2, np.uint16), "got `uint16`: convert it to bfloat16"),
        (np.ones(2, ml_dtypes.float8_e4m3fn), "got `float8_e4m3fn`"),
        ([1e39, 0], "Expected values that fit `bfloat16`"),
        (Foreign([1.0, 2.0, 3.0]), r"Expected shape \(2,\), got \(3,\)"),
    ],
    ids=["float32", "bits", "float8", "too large", "shape"],
)
def test_what_is_no_bfloat16_is_refused_and_never_as_bfloat16(engine, value, got):
    with engine.writer("t") as writer:
        with pytest.raises(conduit.errors.FieldError, match=got) as caught:
            writer.append(obs=value, reward=0.0, wide=[0.0, 0.0], tokens=[])
        assert "got `bfloat16`" not in str(caught.value)


@kinds
def test_a_final_observation_a_priority_and_statistics_take_bfloat16(engine_name, kind):
    schema = conduit.Schema([conduit.Field("obs", "bfloat16", (2,), observation=True)])
    table = conduit.Table(schema, capacity=400, statistics=("obs",), priorities=conduit.Priorities(alpha=1.0, eps=0.0))
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        with engine.writer("t") as writer:
            for _ in range(20):
                writer.append(obs=kind([1.0, 2.0]), final=kind([3.0, 4.0]), terminated=True, priority=2.0)
        with engine.loader("t", batch_size=16, format="torch", sampling=conduit.Prioritized()) as loader:
            batch = loader.next()
            assert (batch["next_obs"].float() == torch.tensor([3.0, 4.0])).all()
            assert loader.update_priorities(batch.ids, kind([0.5] * 16)) == 0
        engine.table("t").statistics.update(obs=kind([[1.0, 2.0], [3.0, 6.0]]))
        assert engine.table("t").statistics.read("obs").mean.tolist() == [2.0, 4.0]


@kinds
def test_weights_of_bfloat16_are_published_from_any_library(engine_name, kind):
    weights = {"w": kind([1.5, -2.5])}
    with conduit.Engine.create(engine_name, {}, policies={"policy": weights}) as engine:
        slot = engine.policy()
        slot.publish(weights)
        assert slot.poll().state_dict()["w"].float().tolist() == [1.5, -2.5]


@kinds
def test_a_batch_transform_reads_bfloat16(kind):
    batch = {
        "reward": kind([[1.0, 1.0]]),
        **{name: np.zeros((1, 2), bool) for name in ("terminated", "truncated", "is_first")},
        "mask": np.ones((1, 2), bool),
        "lengths": np.array([2]),
    }
    made = conduit.gae(1.0, 1.0)(batch, values=kind([[0.5, 0.25]]), bootstrap=kind([1.0]))
    assert np.asarray(made["advantages"]).tolist() == [[2.5, 1.75]]


@kinds
def test_bits_and_numbers_of_bfloat16_agree(kind):
    assert as_array(kind([1.0, -2.0])).tolist() == [0x3F80, 0xC000]
    assert as_numbers(kind([1.0, -2.0])).tolist() == [1.0, -2.0]
    assert as_numbers([kind([1.0, -2.0]), kind([3.0, 4.0])]).tolist() == [[1.0, -2.0], [3.0, 4.0]]
