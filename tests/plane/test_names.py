"""Fields of any name are written and read back bit by bit, or refused by name; what is derived replaces nothing stored."""

import numpy as np
import pytest

import conduit
from conduit.errors import ConfigError, FieldError, SchemaError
from conduit.testing import naming

NAMES = naming.names(400, 0)


@pytest.mark.parametrize("part", range(8))
def test_a_field_of_any_name_comes_back_bit_by_bit_or_is_refused_by_name(engine_name, part):
    outcomes = {name: naming.try_name(engine_name, name, (1, 16, 512)[i % 3]) for i, name in enumerate(NAMES[part::8])}
    assert set(outcomes.values()) <= {"right", "renamed", "refused"}
    assert list(outcomes.values()).count("right") > len(outcomes) // 3


@pytest.mark.parametrize("width", [1, 16, 512, 4096])
@pytest.mark.parametrize("name", ["ids", "steps", "versions", "episodes"])
def test_a_field_named_like_a_batchs_keys_has_memory_of_its_own(engine_name, name, width):
    assert naming.try_name(engine_name, name, width) == "right"


def test_a_name_that_is_too_long_for_a_files_is_refused():
    conduit.Field("x" * 200, "int8")
    with pytest.raises(SchemaError, match="at most 200 characters, got 201"):
        conduit.Field("x" * 201, "int8")


@pytest.fixture
def make(engine_name):
    engines = []

    def make(schema, rows=40, **options):
        engine = conduit.Engine.create(f"{engine_name}-{len(engines)}", {"t": conduit.Table(schema, 400, **options)})
        engines.append(engine)
        with engine.writer("t") as writer:
            for t in range(rows):
                writer.append(**{f.name: np.full(f.shape, t * 0.25).astype(f.numpy_dtype) for f in schema})
        return engine

    yield make
    for engine in engines:
        engine.close()


def schema_with(name, dtype="float32", shape=()):
    return conduit.Schema(
        [
            conduit.Field("obs", "float32", (2,), observation=True),
            conduit.Field("reward", "float32"),
            conduit.Field("value", "float32"),
            conduit.Field(name, dtype, shape),
        ]
    )


ROLLOUT = conduit.Rollout(4, 1)
GAE = {"window": ROLLOUT, "batch_transforms": (conduit.gae(),)}
DERIVED = [
    ("discount", {"window": conduit.Transition(n_step=3)}),
    ("n_steps", {"window": conduit.Transition(n_step=3)}),
    ("mask", {"window": conduit.Sequence(4)}),
    ("is_first", {"window": conduit.Sequence(4)}),
    ("loss_mask", {"window": conduit.Sequence(4)}),
    ("lengths", {"window": conduit.Sequence(4)}),
    ("lengths", {"window": conduit.Episode(4)}),
    ("mask", {"window": ROLLOUT}),
    ("weights", {"sampling": conduit.Prioritized()}),
    ("probabilities", {"sampling": conduit.Prioritized()}),
    ("advantages", GAE),
    ("returns", GAE),
    ("advantage_mask", GAE),
    ("returns_to_go", {"window": ROLLOUT, "batch_transforms": (conduit.returns_to_go(),)}),
]


@pytest.mark.parametrize(("name", "options"), DERIVED, ids=[f"{name}-{i}" for i, (name, _) in enumerate(DERIVED)])
def test_a_derived_column_replaces_no_stored_one_and_the_error_names_both_ways_out(make, name, options):
    schema = schema_with(name)
    engine = make(schema, max_n_step=3, max_length=4, priorities=conduit.Priorities())
    options = {"batch_size": 4, "format": "numpy", "min_rows": 1, **options}
    with pytest.raises(ConfigError, match=rf"(?s){name}.*rename=.*fields="):
        engine.loader("t", **options)
    if isinstance(options.get("window"), conduit.Episode):
        return  # none has ended
    with engine.loader("t", rename={name: "own"}, **options) as loader:
        batch = loader.next()
        assert batch["own"].reshape(4, -1)[:, 0].tolist() == (batch.steps * 0.25).tolist()
        assert name in batch
    rest = [
        other for other in ("obs", "reward", "value", "terminated", "truncated", "mask", "is_first") if other != name
    ]
    rest = [other for other in rest if "window" in options or other not in ("mask", "is_first")]
    rest = rest if not isinstance(options.get("window"), conduit.Transition) else rest[:5]
    if "batch_transforms" in options or name in ("weights", "probabilities"):
        with engine.loader("t", fields=rest, **options) as loader:
            assert name in loader.next()
    else:
        with engine.loader("t", fields=rest, **options) as loader:
            assert name not in loader.next()
        with engine.loader("t", fields=["obs", name], rename={name: "own"}, **options) as loader:
            assert tuple(loader.next()) == ("obs", name)


@pytest.mark.parametrize(("name", "options"), DERIVED[:3] + DERIVED[10:11], ids=lambda value: str(value)[:8])
def test_a_derived_column_hides_nothing_that_is_nested_below_its_name(make, name, options):
    engine = make(schema_with(f"{name}.x"), max_n_step=3, max_length=4)
    options = {"batch_size": 4, "format": "numpy", "min_rows": 1, **options}
    with pytest.raises(ConfigError, match=rf"`?'?{name}.*rename=\{{'{name}': 'stored_{name}'"):
        engine.loader("t", **options)
    with engine.loader("t", rename={name: "own"}, **options) as loader:
        batch = loader.next()
        nested = batch.nest()
        assert nested["own"]["x"] is batch["own.x"]
        assert nested[name] is batch[name]


def test_what_comes_with_a_ragged_field_replaces_no_stored_one(engine_name):
    schema = conduit.Schema(
        [
            conduit.Field("obs", "int32", (3,), observation=True, ragged=True),
            conduit.Field("obs_mask", "int64", observation=True),
        ]
    )
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 100)}) as engine:
        with engine.writer("t") as writer:
            for t in range(10):
                writer.append(obs=np.arange(t % 3, dtype=np.int32), obs_mask=t)
        with pytest.raises(ConfigError, match=r"`obs_mask` and what comes with the ragged `obs`.*rename=\{'obs_mask'"):
            engine.loader("t", batch_size=4)
        with engine.loader("t", batch_size=4, rename={"obs_mask": "legal"}, format="numpy") as loader:
            batch = loader.next()
        assert batch["legal"].tolist() == batch.steps.tolist()
        assert batch["next_legal"].tolist() == (batch.steps + 1).tolist()
        assert batch["obs_mask"].shape == (4, 3)


def test_a_renamed_field_is_transformed_by_its_stored_name_and_nested_by_its_new_one(engine_name):
    schema = conduit.Schema.from_example(
        {
            "obs": {"camera": np.zeros(2, np.uint8), "pose": (np.zeros(2, np.float32), 0.0)},
            "discount": 0.0,
            "reward": 1.0,
        }
    )
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 100, max_n_step=2)}) as engine:
        writer = engine.writer("t")  # a stream that goes on: all rows have two steps
        for t in range(10):
            pose = np.full(2, t, np.float32), float(t)
            writer.append(obs={"camera": np.full(2, t, np.uint8), "pose": pose}, discount=t * 0.5, reward=1.0)
        options = {"batch_size": 4, "window": conduit.Transition(n_step=2, gamma=0.5), "format": "numpy"}
        rename = {"obs": "seen", "obs.camera": "seen.eye", "discount": "env.discount", "reward": "gain"}
        with engine.loader("t", rename=rename, transform={"obs.camera": conduit.scale(0.5)}, **options) as loader:
            batch = loader.next()
        nested = batch.nest()
        assert nested["seen"]["eye"].dtype == np.float32
        assert nested["next_seen"]["eye"].tolist() == (batch["seen.eye"] + 1).tolist()
        assert [part.shape for part in nested["seen"]["pose"]] == [(4, 2), (4,)]
        assert nested["env"]["discount"].tolist() == (batch.steps * 0.5).tolist()
        assert batch["discount"].tolist() == [0.25] * 4
        assert batch["gain"].tolist() == [1.5] * 4
        assert batch.reward_names == ("gain",)
        for wrong, message in (
            ({"nothing": "x"}, "got 'nothing'.*at rename"),
            ({"reward": "next_x"}, "Conduit's own.*at rename"),
            ({"reward": "obs"}, "at rename"),
            ({"reward": "terminated"}, "at rename"),
            ({"reward": 3}, "at rename"),
            ({"obs.pose.0": "x"}, "count from 0.*at rename"),
        ):
            with pytest.raises(ConfigError, match=message):
                engine.loader("t", rename=wrong, **options)


def test_tables_of_different_names_are_mixed_by_renaming(engine_name):
    ours = conduit.Schema.from_example({"obs": np.zeros(2, np.float32), "reward": 0.0})
    theirs = conduit.Schema.from_example({"state": np.zeros(2, np.float32), "r": 0.0}, observation="state", reward="r")
    tables = {"a": conduit.Table(ours, 100, max_n_step=2), "b": conduit.Table(theirs, 100, max_n_step=2)}
    with conduit.Engine.create(engine_name, tables) as engine:
        writers = []  # streams that go on: all rows have two steps
        for name, names in (("a", ("obs", "reward")), ("b", ("state", "r"))):
            writers.append(engine.writer(name))
            for t in range(10):
                writers[-1].append(**{names[0]: np.full(2, t, np.float32), names[1]: 1.0 + (name == "b")})
        options = {"batch_size": 8, "window": conduit.Transition(n_step=2, gamma=1.0), "format": "numpy"}
        with engine.mixed_loader({"a": 1, "b": 1}, rename={"b": {"state": "obs", "r": "reward"}}, **options) as loader:
            batch = loader.next()
        assert batch["reward"].tolist() == [2.0] * 4 + [4.0] * 4
        assert (batch["next_obs"][:, 0] == batch.steps + 2).all()
        with pytest.raises(ConfigError, match=r"got 'c'.* - at rename"):
            engine.mixed_loader({"a": 1, "b": 1}, rename={"c": {"state": "obs"}}, **options)


def test_a_stored_source_is_refused_beside_a_mixtures_own_unless_it_is_renamed(make):
    engine = make(schema_with("source"))
    with pytest.raises(ConfigError, match=r"`source`.*rename="):
        engine.mixed_loader({"t": 1}, batch_size=4)
    with engine.mixed_loader({"t": 1}, batch_size=4, rename={"source": "origin"}, format="numpy") as loader:
        batch = loader.next()
        assert batch["origin"].tolist() == (batch.steps * 0.25).tolist()
        assert batch["source"].tolist() == [0] * 4


@pytest.mark.parametrize("name", ["mask", "is_first", "bootstrap_obs"])
def test_a_claim_as_a_batch_replaces_no_stored_column(engine_name, name):
    schema = schema_with(name)
    table = conduit.Table.queue(schema, 100, rollout_length=4)
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        with engine.writer("t") as writer:
            for t in range(4):
                writer.append(obs=np.zeros(2, np.float32), reward=1.0, value=0.0, **{name: 20.5 + t})
        with engine.consumer("t", format="numpy") as consumer:
            claim = consumer.next()
            assert claim[name][:, 0].tolist() == [20.5, 21.5, 22.5, 23.5]
            with pytest.raises(ConfigError, match=rf"stored field `{name}`.*rename="):
                claim.batch()
            claim.give_back()
            del claim
        with pytest.raises(ConfigError, match=rf"stored field `{name}`.*rename="):
            engine.consumer("t", batch_transforms=(conduit.gae(),))
        options = {"rename": {name: "own"}, "batch_transforms": (conduit.gae(1.0, 1.0),)}
        with engine.consumer("t", format="numpy", **options) as consumer, consumer.next() as claim:
            batch = claim.batch()
            assert batch["own"][0, :, 0].tolist() == claim["own"][:, 0].tolist() == [20.5, 21.5, 22.5, 23.5]
            assert claim.nest()["own"].shape == (4, 1)
            assert "advantages" in claim
            del batch


def test_a_step_that_makes_what_a_claim_has_is_refused_when_the_consumer_opens(engine_name):
    table = conduit.Table.queue(schema_with("advantages"), 100, rollout_length=4)
    engine = conduit.Engine.create(engine_name, {"t": table})
    with engine, pytest.raises(ConfigError, match=r"'advantages', it is there already.*rename="):
        engine.consumer("t", batch_transforms=(conduit.gae(),))


def drops_all_but_the_reward(batch):
    return {name: batch[name] for name in ("reward", "value", "terminated", "truncated", "mask", "is_first")}


def adds_advantages(batch):
    assert "returns" not in batch
    return {**batch, "advantages": batch["reward"]}


def test_a_users_function_neither_loses_nor_hides_what_a_later_step_makes(make):
    engine = make(schema_with("extra"), max_length=4)
    options = {"batch_size": 2, "window": ROLLOUT, "format": "numpy"}
    steps = (conduit.apply(drops_all_but_the_reward), conduit.gae(1.0, 1.0))
    with engine.loader("t", batch_transforms=steps, **options) as loader:
        batch = loader.next()
        assert batch["advantages"].shape == batch["returns"].shape == (2, 4, 1)
        assert "obs" not in batch
    steps = (conduit.apply(adds_advantages), conduit.gae())
    loader = engine.loader("t", batch_transforms=steps, **options)
    with loader, pytest.raises(FieldError, match="Expected one step to make it, got two"):
        loader.next()


def test_a_rollouts_stored_lengths_are_not_taken_for_those_of_its_windows(make):
    engine = make(schema_with("lengths", "int64"), max_length=4)
    with engine.loader(
        "t", batch_size=2, window=ROLLOUT, batch_transforms=(conduit.returns_to_go(),), format="numpy"
    ) as loader:
        batch = loader.next()
        wanted = np.cumsum(batch["reward"][:, ::-1], 1)[:, ::-1]
        np.testing.assert_allclose(batch["returns_to_go"], wanted)


@pytest.mark.parametrize("name", ["reserve", "set_final"])
def test_a_step_refuses_a_field_named_like_what_it_has_itself(make, name):
    engine = make(schema_with(name), rows=1)
    with (
        engine.writer("t") as writer,
        pytest.raises(ConfigError, match=f"an attribute of the step, got `{name}`.*writer.append"),
    ):
        writer.step()


@pytest.mark.parametrize("name", ["commit", "abort", "ticks", "bootstrap", "set_final"])
def test_a_rollout_refuses_a_field_named_like_what_it_has_itself(make, name):
    engine = make(schema_with(name), rows=1)
    with engine.writer("t") as writer, pytest.raises(ConfigError, match=f"an attribute of the rollout, got `{name}`"):
        writer.rollout(2)


@pytest.mark.parametrize("name", ["commit", "row", "rows", "close", "set_final"])
def test_an_unchecked_handle_refuses_a_field_named_like_what_it_has_itself(make, name):
    engine = make(schema_with(name), rows=1)
    with (
        engine.writer("t") as writer,
        pytest.raises(ConfigError, match=f"an attribute of the unchecked handle, got `{name}`"),
    ):
        writer.unchecked()


def test_a_stored_count_of_deliveries_is_not_taken_for_the_tables(make):
    engine = make(schema_with("sampled", "int64"), max_times_sampled=2)
    read = np.concatenate([steps.columns["sampled"] for steps in engine.table("t").scan()])
    assert len(read) == 40


@pytest.mark.parametrize("kind", ["npz", "parquet"])
@pytest.mark.parametrize("name", ["rows", "offsets", "x.offsets", "rows.offsets", "episode", "step", "schema", "file"])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_field_of_any_name_comes_back_from_a_file_bit_by_bit(engine_name, tmp_path, kind, name, ragged):
    offline = pytest.importorskip("conduit.offline")
    schema = conduit.Schema(
        [
            conduit.Field(name, "float32", (3,), observation=True, ragged=ragged),
            conduit.Field("seen", "int64", observation=True),
        ]
    )
    values = [np.full(t % 4 if ragged else 3, t, np.float32) for t in range(20)]
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 100)}) as engine:
        with engine.writer("t") as writer:
            for t, value in enumerate(values):
                final = {name: value + 50, "seen": 100 + t} if t % 7 == 6 else None
                writer.append(**{name: value, "seen": t}, terminated=final is not None, final=final)
        offline.save(engine, "t", tmp_path / "out", format=kind)
        engine.checkpoint(tmp_path / "checkpoints")
    with conduit.Engine.create(f"{engine_name}-b", {"t": offline.table_for(tmp_path / "out")}) as engine:
        offline.load(engine, "t", tmp_path / "out")
        assert_came_back(engine, name, values)
    with conduit.Engine.restore(tmp_path / "checkpoints", f"{engine_name}-c") as engine:
        assert_came_back(engine, name, values)


def assert_came_back(engine, name, values):
    read = list(engine.table("t").scan())
    got = [np.asarray(value).tolist() for steps in read for value in steps.columns[name]]
    assert got == [value.tolist() for value in values]
    finals = [np.asarray(value).tolist() for steps in read for value in steps.finals[name]]
    assert finals == [(values[t] + 50).tolist() for t in (6, 13)]
