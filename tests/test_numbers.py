"""Numbers of every library that people hand over are taken for what they are, and what is no number is refused by name."""

import fractions
import math

import ml_dtypes
import numpy as np
import pytest
import torch

import conduit
from conduit.clock import Deadline
from conduit.numbers import at_least, real, whole, within
from conduit.store.format.limit_specs import Limits

WHOLE = {
    "int": 3,
    "np.int64": np.int64(3),
    "np.uint8": np.uint8(3),
    "np 0-d": np.array(3, np.int32),
    "torch": torch.tensor(3),
}
NOT_WHOLE = {
    "bool": True,
    "np.bool": np.True_,
    "torch bool": torch.tensor(True),
    "float": 3.0,
    "np.float64": np.float64(3),
    "str": "3",
    "one of an array": np.array([3]),
    "NaN": math.nan,
    "complex": 3 + 0j,
}
REAL = {
    "float": 0.5,
    "np.float64": np.float64(0.5),
    "np.float32": np.float32(0.5),
    "np.float16": np.float16(0.5),
    "np 0-d": np.array(0.5),
    "torch": torch.tensor(0.5),
    "ml_dtypes": ml_dtypes.bfloat16(0.5),
    "torch bfloat16": torch.tensor(0.5, dtype=torch.bfloat16),
    "fraction": fractions.Fraction(1, 2),
}
NOT_REAL = {
    "bool": True,
    "np.bool": np.True_,
    "NaN": math.nan,
    "np NaN": np.float32("nan"),
    "complex": 0.5j,
    "np complex": np.complex64(0.5),
    "str": "0.5",
    "None in a tuple": (None,),
    "array": np.array([0.5]),
}


def cases(of):
    return pytest.mark.parametrize("value", of.values(), ids=of.keys())


@cases(WHOLE)
def test_a_whole_number_of_any_library_becomes_pythons_int(value):
    assert whole(value) == 3
    assert type(whole(value)) is int
    assert type(at_least("n", value, 1)) is int


@cases(NOT_WHOLE)
def test_what_is_no_whole_number_is_refused_by_name(value):
    assert whole(value) is None
    with pytest.raises(conduit.errors.ConfigError, match="Expected ticks of at least 1, got"):
        at_least("ticks", value, 1)


@cases(REAL)
def test_a_number_of_any_library_becomes_pythons_float(value):
    assert real(value) == 0.5
    assert type(real(value)) is float
    assert type(within("gamma", value, 0, 1)) is float


@cases(NOT_REAL)
def test_what_is_no_number_is_refused_by_name_and_a_nan_is_none(value):
    assert real(value) is None
    with pytest.raises(conduit.errors.ConfigError, match="Expected gamma from 0 to 1, got"):
        within("gamma", value, 0, 1)


def test_infinity_is_a_number_but_within_no_bounds():
    assert real(math.inf) == math.inf
    with pytest.raises(conduit.errors.ConfigError, match="Expected eps of at least 0, got inf"):
        within("eps", math.inf, 0, math.inf)


SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "float32", (2,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32"),
    ]
)
RAGGED = conduit.Schema([conduit.Field("tokens", "int32", (np.int64(8),), ragged=True)])


def table(**options):
    return conduit.Table(SCHEMA, **{"capacity": 400, **options})


MAKES = {
    "capacity": lambda n: table(capacity=n * 100),
    "page_rows": lambda n: table(page_rows=n * 16),
    "max_stack": lambda n: table(max_stack=n),
    "max_n_step": lambda n: table(max_n_step=n),
    "max_length": lambda n: table(max_length=n),
    "num_envs": lambda n: table(num_envs=n),
    "rollout_length": lambda n: table(kind="queue", rollout_length=n),
    "max_times_sampled": lambda n: table(max_times_sampled=n),
    "span": lambda n: conduit.Priorities(span=n),
    "min_size": conduit.MinSize,
    "ratio's min_size": lambda n: conduit.SampleToInsertRatio(1.0, n, 4.0),
    "limits": lambda n: Limits(1.0, n, 0.0, 1.0),
    "n_step": lambda n: conduit.Transition(n_step=n),
    "stack": lambda n: conduit.Transition(stack=n),
    "length": conduit.Sequence,
    "burn_in": lambda n: conduit.Sequence(9, burn_in=n),
    "overlap": lambda n: conduit.Sequence(9, overlap=n),
    "episode": conduit.Episode,
    "ticks": lambda n: conduit.Rollout(n, 1),
    "rollout's num_envs": lambda n: conduit.Rollout(1, n),
    "stride": lambda n: conduit.Rollout(9, 1, stride=n),
    "classes": conduit.one_hot,
    "pad": conduit.random_shift,
    "axes": lambda n: conduit.random_shift(1, axes=(n, n + 1)),
    "ingestion": conduit.CommitEvery,
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())
def test_every_declared_size_takes_numpys_integers_and_refuses_floats(make):
    made = make(np.int64(3))
    if not isinstance(made, conduit.CommitEvery):
        assert made == make(3)
        assert repr(made) == repr(make(3))  # nothing of numpy is left: plans and specifications are compared as text
    with pytest.raises(conduit.errors.ConfigError):
        make(3.5)


ABSURD = [1 << 54, 10**30, 1 << 63, 10**400, -1, -(10**30), math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("number", ABSURD, ids=lambda n: f"{n}"[:20])
@pytest.mark.parametrize("name", sorted(MAKES.keys() - {"axes"}))
def test_absurd_sizes_are_refused_where_they_are_declared(name, number):
    with pytest.raises(conduit.errors.ConfigError):
        MAKES[name](number)


@pytest.mark.parametrize("timeout", [10**30, math.inf, np.float64(1e300), 1e15])
def test_a_timeout_beyond_a_year_means_a_year(timeout):
    deadline = Deadline(timeout)
    assert 0 < deadline.left() <= Deadline.FOREVER
    assert not deadline.passed()


@pytest.mark.parametrize("timeout", [-1, -(10**30), -math.inf, math.nan, 10**400, True, "1", 1j, (1,)])
def test_what_is_no_timeout_is_refused(timeout):
    with pytest.raises(conduit.errors.ConfigError, match="Expected a timeout of at least 0 seconds"):
        Deadline(timeout)


FLOATS = {
    "gamma": lambda x: conduit.Transition(gamma=x),
    "alpha": lambda x: conduit.Priorities(alpha=x),
    "eps": lambda x: conduit.Priorities(eps=x),
    "samples_per_insert": lambda x: conduit.SampleToInsertRatio(x, 3, 4.0),
    "error_buffer": lambda x: conduit.SampleToInsertRatio(1.0, 3, x * 8),
    "scale": conduit.scale,
    "offset": lambda x: conduit.scale(1.0, offset=x),
    "clip": lambda x: conduit.clip(x, 9),
    "transform": lambda x: conduit.typing.Transform("float32", factor=x),
    "normalize": lambda x: conduit.normalize(eps=x),
    "gae": lambda x: conduit.gae(x, x),
    "vtrace": lambda x: conduit.vtrace(x, rho_bar=x, c_bar=x),
    "returns_to_go": conduit.returns_to_go,
    "normalize_advantages": lambda x: conduit.normalize_advantages(eps=x),
    "eta": lambda x: conduit.sequence_priority(np.ones((2, 3)), eta=x),
    "mean_lengths": lambda x: conduit.Table(RAGGED, 400, mean_lengths={"tokens": x}),
}


@pytest.mark.parametrize("make", FLOATS.values(), ids=FLOATS.keys())
def test_every_declared_number_takes_numpys_floats_and_refuses_nan_and_text(make):
    assert repr(make(np.float32(0.5))) == repr(make(0.5))
    assert repr(make(np.float64(0.5))) == repr(make(0.5))
    for value in (math.nan, np.float32("nan"), "0.5"):
        with pytest.raises(conduit.errors.ConfigError):
            make(value)


def test_an_engine_is_made_filled_and_read_with_numpys_numbers_alone(engine_name, tmp_path):
    n = np.int64
    policies = {"policy": {"w": np.zeros(2, np.float32)}}
    tables = {
        "t": table(priorities=conduit.Priorities(np.float32(0.5), np.float64(0.01), n(64)), num_envs=n(2)),
        "q": table(kind="queue"),
    }
    with conduit.Engine.create(engine_name, tables, policies=policies, max_participants=n(8)) as engine:
        slot = engine.policy()
        with engine.writer("t", num_envs=n(2), autoreset="next_step", timeout=np.float32(5), policy=slot) as writer:
            writer.version = np.uint8(1)
            for tick in range(20):
                writer.append(obs=np.full((2, 2), tick, np.float32), action=[tick, tick], reward=[0.0, 1.0])
            with writer.rollout(n(2), max_finals=n(1)) as rollout:
                rollout.obs[:] = rollout.action[:] = rollout.reward[:] = 0
        options = {"batch_size": n(8), "buffers": n(2), "seed": np.uint32(5), "min_rows": n(8), "format": "numpy"}
        with engine.loader("t", **options, shard=(n(0), n(1)), max_staleness=n(3), policy=slot) as loader:
            batch = loader.next(timeout=np.float64(5))
            assert len(batch["reward"]) == 8
        with engine.loader("t", batch_size=8, buffers=2, seed=5, format="numpy") as loader:
            np.testing.assert_array_equal(loader.next()["obs"], batch["obs"])
        with engine.loader("t", **options, name="named") as loader:
            loader.next()
        with engine.mixed_loader({"t": np.float32(1)}, **options) as loader:
            loader.batch = n(1)
            loader.next()
        with engine.writer("q") as writer:
            writer.append(obs=np.zeros(2, np.float32), action=0, reward=0.0)
        with engine.consumer("q", timeout=np.float32(5)) as consumer:
            consumer.next(max_ticks=n(1)).ack()
        engine.checkpoint(tmp_path, keep=n(1))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 8.0},
        {"batch_size": True},
        {"buffers": 2.5},
        {"seed": 1.5},
        {"seed": "1"},
        {"seed": True},
        {"min_rows": 8.5},
        {"timeout": math.nan},
        {"timeout": True},
        {"shard": (0.0, 1)},
    ],
    ids=str,
)
def test_a_loaders_numbers_that_are_none_are_refused_when_it_is_opened(engine_name, options):
    with conduit.Engine.create(engine_name, {"t": table()}) as engine:
        for name in (None, "named"):
            with pytest.raises(conduit.errors.ConfigError, match=next(iter(options)).rstrip("s")):
                engine.loader("t", **{"batch_size": 8, "name": name, **options})


def test_what_is_neither_true_nor_false_is_refused_by_name():
    for value in (np.True_, True):
        assert conduit.Sequence(4, pad=value).pad is True
    for value in ("no", 1, None, np.array([True])):
        for make in (
            lambda x: conduit.Sequence(4, across=x),
            lambda x: conduit.Sequence(4, pad=x),
            lambda x: conduit.Episode(4, next_obs=x),
            lambda x: conduit.Rollout(4, 2, next_obs=x),
            lambda x: conduit.Prioritized(stratified=x),
            lambda x: conduit.Shuffled(drop_last=x),
            lambda x: conduit.Table(SCHEMA, 100, within_episodes=x),
        ):
            with pytest.raises(conduit.errors.ConfigError, match=r"Expected \w+ True or False, got"):
                make(value)


NO_ARGUMENTS = {
    "errors that are text": lambda e: conduit.sequence_priority(["0.5"]),
    "errors that are objects": lambda e: conduit.sequence_priority({}),
    "complex errors": lambda e: conduit.sequence_priority(np.ones((2, 3)) * 1j),
    "priorities of a table": lambda e: conduit.Table(SCHEMA, 100, priorities="yes"),
    "a schema of one field": lambda e: conduit.Schema(3),
    "padding": lambda e: conduit.Transition(padding=np.array([1, 2])),
    "buffers": lambda e: e.loader("t", batch_size=2, buffers=10**400),
    "ids as text": lambda e: e.loader("t", batch_size=2, format="numpy").valid("1"),
    "ids as floats": lambda e: e.loader("t", batch_size=2, format="numpy").valid([1.0]),
    "the batch of a sampler": lambda e: setattr(e.loader("t", batch_size=2, format="numpy").sampler, "batch", "1"),
    "a batch below 0": lambda e: setattr(e.loader("t", batch_size=2, format="numpy").sampler, "batch", -1),
    "a batch beyond 64 bits": lambda e: setattr(e.loader("t", batch_size=2, format="numpy").sampler, "batch", 1 << 63),
    "valid of no batch": lambda e: e.mixed_loader({"t": 1}, batch_size=2, format="numpy").valid([1]),
    "priorities of no batch": lambda e: e.mixed_loader(
        {"t": 1}, batch_size=2, format="numpy", sampling=conduit.Prioritized()
    ).update_priorities([1], [1.0]),
    "two priorities of one step": lambda e: e.writer("t").append(obs=[0, 0], action=0, reward=0.0, priority=[1.0, 2.0]),
    "columns": lambda e: e.writer("t").extend(3),
    "a field of statistics": lambda e: e.table("t").statistics.read(["obs"]),
    "where a checkpoint goes": lambda e: e.checkpoint(3),
    "where a checkpoint is": lambda e: conduit.Engine.restore(3),
    "what goes with a checkpoint": lambda e: e.checkpoint("nowhere", extra=[]),
    "keyword arguments of actors": lambda e: conduit.launch(print, 1, kwargs=3),
    "environment of actors": lambda e: conduit.launch(print, 1, env="A=1"),
    "where actors print": lambda e: conduit.launch(print, 1, stdout="file"),
    "whom a death is told": lambda e: conduit.launch(print, 1, on_death="log"),
}


@pytest.mark.parametrize("call", NO_ARGUMENTS.values(), ids=NO_ARGUMENTS.keys())
def test_what_is_no_argument_is_refused_by_the_call_that_brings_it(engine_name, call):
    tables = {"t": conduit.Table(SCHEMA, 100, priorities=conduit.Priorities(), statistics=("obs",))}
    with conduit.Engine.create(engine_name, tables) as engine:
        with pytest.raises(conduit.errors.ConduitError, match=r"^Expected"):
            call(engine)
        assert engine.table("t").rows == 0
