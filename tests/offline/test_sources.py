"""Sources of other origin: only what a schema names is looked at, and what it names is found, or refused by name and row."""

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import conduit
from conduit import offline
from conduit.errors import ConfigError, MissingExtra, SourceError
from conduit.offline.columns import joined

ROWS = 12
ENDS = np.isin(np.arange(ROWS), (4, 11))
SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "float32", (3,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32"),
    ]
)


def steps_of(rows=ROWS):
    return {
        "obs": np.arange(3 * rows, dtype=np.float32).reshape(rows, 3),
        "action": np.arange(rows),
        "reward": np.linspace(0, 1, rows, dtype=np.float32),
        "terminated": np.isin(np.arange(rows), (4, rows - 1)),
    }


@pytest.fixture
def load(engine_name):
    """Loads a source into a table of SCHEMA, or of another; gives its steps and what was told."""
    made = []

    def into(source, schema=SCHEMA, **options):
        engine = conduit.Engine.create(f"{engine_name}-{len(made)}", {"t": conduit.Table(schema, capacity=300)})
        made.append(engine)
        loaded = offline.load(engine, "t", source, **options)
        return joined(list(engine.table("t").scan())), loaded

    yield into
    for engine in made:
        engine.close()


def arrow(columns):
    return {
        name: pa.FixedSizeListArray.from_arrays(pa.array(value.reshape(-1)), value.shape[1])
        if isinstance(value, np.ndarray) and value.ndim == 2
        else pa.array(value)
        for name, value in columns.items()
    }


NPZ_EXTRAS = {
    "text": np.array(["a"] * ROWS),
    "bytes": np.array([b"a"] * ROWS),
    "objects": np.array([{}] * ROWS, object),
    "times": np.zeros(ROWS, "datetime64[s]"),
    "records": np.zeros(ROWS, [("a", "i4"), ("b", "f4")]),
    "single": np.float32(3.5),
    "returns": np.zeros(2),
    "swapped": np.zeros(ROWS, ">f4"),
    "turned": np.asfortranarray(np.zeros((ROWS, 3))),
}
PARQUET_EXTRAS = {
    "text": pa.array(["a"] * ROWS),
    "large text": pa.array(["a"] * ROWS, pa.large_string()),
    "struct": pa.array([{"a": 1}] * ROWS),
    "time": pa.array([0] * ROWS, pa.timestamp("us")),
    "null": pa.nulls(ROWS),
    "image": pa.array([{"bytes": b"", "path": ""}] * ROWS),
    "bytes": pa.array([b"abc"] * ROWS, pa.binary(3)),
    "texts": pa.array([["a", "b"]] * ROWS),
    "decimal": pa.array([1] * ROWS, pa.decimal128(5)),
    "dictionary": pa.array(["a"] * ROWS).dictionary_encode(),
    "map": pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int64())),
}


@pytest.mark.parametrize("name", NPZ_EXTRAS)
def test_an_array_of_an_archive_that_is_no_column_is_listed_and_blocks_nothing(load, tmp_path, name):
    columns = steps_of()
    np.savez(tmp_path / "a.npz", **columns, **{name: NPZ_EXTRAS[name]})
    steps, loaded = load(tmp_path)
    np.testing.assert_array_equal(steps.columns["obs"], columns["obs"])
    assert loaded.ignored == tuple(loaded.skipped) == (name,)
    described = offline.describe(tmp_path)
    assert described.schema.names == ("obs", "action", "reward")
    assert described.skipped == loaded.skipped


@pytest.mark.parametrize("name", PARQUET_EXTRAS)
def test_a_column_of_parquet_that_is_no_field_is_listed_and_blocks_nothing(load, tmp_path, name):
    columns = steps_of()
    pq.write_table(pa.table({**arrow(columns), name: PARQUET_EXTRAS[name]}), tmp_path / "a.parquet")
    steps, loaded = load(tmp_path)
    np.testing.assert_array_equal(steps.columns["obs"], columns["obs"])
    assert loaded.ignored == tuple(loaded.skipped) == (name,)
    assert offline.describe(tmp_path).schema.names == ("obs", "action", "reward")


@pytest.mark.parametrize("name", ["objects", "text", "single", "returns", "swapped", "turned"])
def test_what_is_no_column_is_refused_by_name_where_the_schema_names_it(load, tmp_path, name):
    columns = steps_of() | {"action": NPZ_EXTRAS[name]}
    np.savez(tmp_path / "a.npz", **columns)
    with pytest.raises(SourceError, match=r"Expected int64 \(\), got .* - column 'action'"):
        load(tmp_path)


def test_nulls_block_only_where_they_are_needed(load, tmp_path):
    columns = steps_of()
    holes = pa.array([*range(ROWS - 1), None], pa.int64())
    pq.write_table(pa.table({**arrow(columns), "spare": holes}), tmp_path / "a.parquet")
    assert load(tmp_path)[1].ignored == ("spare",)
    pq.write_table(pa.table({**arrow(columns), "action": holes}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"1 nulls.*'action'"):
        load(tmp_path)


def test_a_column_that_is_cut_short_is_refused_unless_a_schema_leaves_it_out(load, tmp_path):
    np.savez(tmp_path / "a.npz", **steps_of(), more=np.zeros(ROWS - 1))
    with pytest.raises(SourceError, match=r"12 rows.*without this one.*got 11.*'more'"):
        offline.describe(tmp_path)
    assert load(tmp_path)[1].skipped == {"more": "11 values for 12 steps"}


@pytest.mark.parametrize("form", ["list", "large_list", "fixed"])
def test_lists_of_one_length_are_arrays(load, tmp_path, form):
    columns = steps_of()
    kind = {
        "list": pa.list_(pa.float32()),
        "large_list": pa.large_list(pa.float32()),
        "fixed": pa.list_(pa.float32(), 3),
    }
    table = pa.table({**arrow(columns), "obs": pa.array(columns["obs"].tolist(), kind[form])})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    steps, _ = load(tmp_path)
    np.testing.assert_array_equal(steps.columns["obs"], columns["obs"])
    assert offline.describe(tmp_path).schema["obs"].shape == (3,)
    assert not offline.describe(tmp_path).schema.ragged_names


@pytest.mark.parametrize("form", ["lists of lists", "fixed of lists", "lists of fixed", "fixed of fixed"])
def test_nested_lists_of_one_length_are_matrices(load, tmp_path, form):
    schema = conduit.Schema([conduit.Field("m", "float32", (2, 3))])
    values = np.arange(6 * ROWS, dtype=np.float32).reshape(ROWS, 2, 3)
    outer, _, inner = form.partition(" of ")
    type_ = pa.list_(pa.float32(), 3) if inner == "fixed" else pa.list_(pa.float32())
    type_ = pa.list_(type_, 2) if outer == "fixed" else pa.list_(type_)
    table = pa.table({"m": pa.array(values.tolist(), type_), "terminated": pa.array(ENDS)})
    pq.write_table(table, tmp_path / "a.parquet")
    steps, _ = load(tmp_path, schema)
    np.testing.assert_array_equal(steps.columns["m"], values)
    assert offline.describe(tmp_path).schema["m"].shape == (2, 3)


def test_the_row_whose_list_has_another_length_is_named_before_anything_is_written(load, tmp_path, engine_name):
    columns = steps_of()
    lists = columns["obs"].tolist()
    lists[7] = [1.0, 2.0]
    pq.write_table(pa.table({**arrow(columns), "obs": pa.array(lists, pa.list_(pa.float32()))}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a list of 3 values in every row.*got 2 in row 7.*'obs'"):
        load(tmp_path)
    with conduit.Engine.create(f"{engine_name}-x", {"t": conduit.Table(SCHEMA, 100)}) as engine:
        with pytest.raises(SourceError):
            offline.load(engine, "t", tmp_path)
        assert engine.table("t").scan().rows == 0
    matrices = np.zeros((ROWS, 2, 3), np.float32).tolist()
    matrices[5][1] = [0.0]
    table = pa.table({"m": pa.array(matrices, pa.list_(pa.list_(pa.float32()))), "terminated": pa.array(ENDS)})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"of 3 values in every row.*got 1 in row 5.*'m'"):
        load(tmp_path, conduit.Schema([conduit.Field("m", "float32", (2, 3))]))
    with pytest.raises(SourceError, match=r"float32 \(4,\).*got list<.*list<.*'m'"):
        load(tmp_path, conduit.Schema([conduit.Field("m", "float32", (4,))]))


def test_lists_whose_lengths_differ_from_file_to_file_are_ragged(load, tmp_path):
    for number, length in enumerate((2, 3)):
        tokens = pa.array([[number] * length] * 4, pa.list_(pa.int32()))
        pq.write_table(
            pa.table({"tokens": tokens, "terminated": pa.array([False] * 4)}), tmp_path / f"{number}.parquet"
        )
    schema = offline.describe(tmp_path).schema
    assert (schema["tokens"].ragged, schema["tokens"].max_length) == (True, 3)
    steps, _ = load(tmp_path, schema)
    assert [len(one) for one in steps.columns["tokens"]] == [2] * 4 + [3] * 4
    with pytest.raises(SourceError, match=r"got 2 in row 0.*'tokens' of .*0\.parquet"):
        load(tmp_path, conduit.Schema([conduit.Field("tokens", "int32", (3,))]))


def lerobot(path):
    """A file as LeRobot's data sets have them."""
    columns = steps_of()
    table = {
        "observation.state": pa.array(columns["obs"].tolist(), pa.list_(pa.float32())),
        "action": pa.array(columns["obs"][:, :2].tolist(), pa.list_(pa.float32())),
        "episode_index": pa.array(np.repeat([0, 1], (5, 7))),
        "frame_index": pa.array([*range(5), *range(7)]),
        "timestamp": pa.array(np.arange(ROWS, dtype=np.float32) / 10),
        "next.done": pa.array(ENDS),
        "next.reward": pa.array(columns["reward"]),
        "task": pa.array(["pick"] * ROWS),
    }
    pq.write_table(pa.table(table), path)
    return columns


def test_a_file_of_lerobots_form_is_mapped_into_a_table(load, tmp_path):
    columns = lerobot(tmp_path / "episode_000000.parquet")
    names = {
        "obs": "observation.state",
        "reward": "next.reward",
        "terminated": "next.done",
        "episode": "episode_index",
        "step": "frame_index",
    }
    schema = conduit.Schema(
        [
            conduit.Field("obs", "float32", (3,), observation=True),
            conduit.Field("action", "float32", (2,)),
            conduit.Field("reward", "float32"),
        ]
    )
    steps, loaded = load(tmp_path, schema, columns=names)
    np.testing.assert_array_equal(steps.columns["obs"], columns["obs"])
    np.testing.assert_array_equal(np.flatnonzero(steps.starts), [0, 5])
    assert loaded.ignored == ("task", "timestamp")
    assert loaded.skipped == {"task": "string"}
    described = offline.describe(tmp_path, columns=names)
    assert described.schema.names == ("obs", "action", "timestamp", "reward")
    # numbers that are mapped are looked at
    swapped = {**names, "step": "episode_index"}
    with pytest.raises(SourceError, match="steps that count up"):
        load(tmp_path, schema, columns=swapped)


ODD = ["obs/state", "my obs", "beobachtung é", "obs.state/x", "0", "obs-1", "next_thing", "terminated?"]


@pytest.mark.parametrize("kind", ["npz", "parquet"])
@pytest.mark.parametrize("name", ODD)
def test_a_name_that_no_field_can_have_is_mapped_or_the_error_says_how(load, tmp_path, kind, name):
    columns = steps_of()
    values = columns.pop("obs")
    if kind == "npz":
        np.savez(tmp_path / "a.npz", **columns, **{name: values})
    else:
        pq.write_table(pa.table(arrow({**columns, name: values})), tmp_path / "a.parquet")
    steps, loaded = load(tmp_path, columns={"obs": name})
    np.testing.assert_array_equal(steps.columns["obs"], values)
    assert loaded.ignored == ()
    assert offline.describe(tmp_path, columns={"obs": name}).schema.names[-1] == "obs"
    with pytest.raises(SourceError, match=r"columns=\{'obs': \.\.\.\}"):
        load(tmp_path)
    if name == "next_thing":
        assert offline.describe(tmp_path).ignored == (name,)
    else:
        with pytest.raises(SourceError, match=rf"columns=\{{'<field>': {name!r}\}}".replace("?", r"\?")):
            offline.describe(tmp_path)


MISSPELT = {
    "a flag": ({"truncate": "timeouts"}, "did you mean `truncated`"),
    "a flag by another name": ({"done": "timeouts"}, None),
    "a field": ({"rewards": "reward"}, "did you mean `reward`"),
    "a next observation": ({"next_ob": "obs"}, "did you mean `next_obs`"),
    "of what is none": ({"next_action": "obs"}, "next"),
    "a final observation": ({"final.obz": "obs"}, "did you mean `final.obs`"),
    "a number": ({"_epsiode": "action"}, "did you mean `_episode`"),
}


@pytest.mark.parametrize("what", MISSPELT)
def test_a_key_that_nobody_looks_at_is_refused_and_nothing_is_written(tmp_path, engine_name, what):
    columns, near = MISSPELT[what]
    np.savez(tmp_path / "a.npz", **steps_of(), timeouts=np.isin(np.arange(ROWS), (7,)))
    with conduit.Engine.create(engine_name, {"t": conduit.Table(SCHEMA, 100)}) as engine:
        with pytest.raises(ConfigError, match=near or "Expected fields of the schema, flags"):
            offline.load(engine, "t", tmp_path, columns=columns)
        assert engine.table("t").scan().rows == 0


@pytest.mark.parametrize("key", ["truncate", "timeouts", "done", "terminals"])
def test_a_flag_by_another_name_is_no_field_that_a_mapping_makes(tmp_path, key):
    np.savez(tmp_path / "a.npz", **steps_of(), ends=np.isin(np.arange(ROWS), (7,)))
    with pytest.raises(ConfigError, match=r"did you mean `t(runca|ermina)ted`"):
        offline.describe(tmp_path, columns={key: "ends"})


def test_a_mapped_truncation_ends_episodes(load, tmp_path):
    np.savez(tmp_path / "a.npz", **steps_of(), timeouts=np.isin(np.arange(ROWS), (7,)))
    steps, _ = load(tmp_path, columns={"truncated": "timeouts"})
    np.testing.assert_array_equal(np.flatnonzero(steps.starts), [0, 5, 8])


@pytest.mark.parametrize("columns", [["obs"], "obs", {"obs": 3}, {"obs": None}], ids=str)
def test_what_is_no_mapping_of_columns_is_refused(tmp_path, columns):
    np.savez(tmp_path / "a.npz", **steps_of())
    with pytest.raises((ConfigError, SourceError), match="columns"):
        offline.describe(tmp_path, columns=columns)


def test_a_flag_of_whole_numbers_is_taken_where_each_is_0_or_1(load, tmp_path):
    columns = steps_of()
    np.savez(tmp_path / "a.npz", **columns | {"terminated": columns["terminated"].astype(np.int64)})
    np.testing.assert_array_equal(load(tmp_path)[0].terminated, columns["terminated"])
    np.savez(tmp_path / "a.npz", **columns | {"terminated": np.where(np.arange(ROWS) == 6, 2, 0)})
    with pytest.raises(SourceError, match=r"0 or 1 for a flag in row 6.*got 2.*'terminated'"):
        load(tmp_path)


def d4rl(path, **more):
    """A file as D4RL's are."""
    columns = steps_of()
    with h5py.File(path, "w") as file:
        file["observations"] = columns["obs"]
        file["actions"] = columns["action"]
        file["rewards"] = columns["reward"]
        file["terminals"] = np.isin(np.arange(ROWS), (4,))
        file["timeouts"] = np.isin(np.arange(ROWS), (11,))
        file["infos/qpos"] = np.zeros((ROWS, 2))
        file["metadata/algorithm"] = "SAC"
        file["metadata/policy/fc0/weight"] = np.zeros((3, 3))
        for name, values in more.items():
            file[name] = values
    return columns


@pytest.mark.parametrize("ending", ["hdf5", "h5"])
def test_a_file_of_d4rls_form_is_read_as_it_is(load, tmp_path, ending):
    columns = d4rl(tmp_path / f"hopper.{ending}")
    steps, loaded = load(tmp_path / f"hopper.{ending}")
    for name in SCHEMA.names:
        np.testing.assert_array_equal(steps.columns[name], columns[name])
    assert np.flatnonzero(steps.terminated).tolist() == [4]
    assert np.flatnonzero(steps.truncated).tolist() == [11]
    assert loaded.episodes == 2
    assert set(loaded.ignored) == {"infos/qpos", "metadata/algorithm", "metadata/policy/fc0/weight"}
    assert set(loaded.skipped) == {"metadata/algorithm", "metadata/policy/fc0/weight"}


def test_next_observations_of_d4rls_are_kept_where_episodes_end(load, tmp_path):
    following = np.roll(steps_of()["obs"], -1, 0)
    following[[4, 11]] = -1
    d4rl(tmp_path / "a.hdf5", next_observations=following)
    steps, _ = load(tmp_path)
    np.testing.assert_array_equal(steps.places, [4, 11])
    assert (steps.finals["obs"] == -1).all()
    schema = conduit.Schema([*SCHEMA, conduit.Field("qpos", "float64", (2,))])
    steps, _ = load(tmp_path, schema, columns={"qpos": "infos/qpos"})
    assert steps.columns["qpos"].shape == (ROWS, 2)


def test_datasets_of_hdf5_by_conduits_own_names_or_mapped_ones_are_columns(load, tmp_path):
    columns = steps_of()
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name, values in columns.items():
            file[f"run/{name}"] = values
    names = {name: f"run/{name}" for name in columns}
    steps, _ = load(tmp_path, columns=names)
    np.testing.assert_array_equal(steps.columns["obs"], columns["obs"])
    with pytest.raises(SourceError, match=r"columns=\{'<field>': 'run/action'\}"):
        offline.describe(tmp_path, columns={"terminated": "run/terminated"})


def robomimic(path, lengths=(3, 4, 2), **spoilt):
    """A file as robomimic's are; demos are stored in the order of their names, demo_10 before demo_2."""
    with h5py.File(path, "w") as file:
        for number, length in zip((1, 2, 10), lengths, strict=True):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = length
            rng = np.random.default_rng(number)
            demo["actions"] = np.full((length, 2), number, np.float32)
            demo["rewards"] = np.zeros(length)
            demo["dones"] = (np.arange(length) == length - 1).astype(np.int64)
            demo["states"] = rng.normal(size=(length, 5))
            for key, size in (("eef_pos", 3), ("object", 4)):
                values = rng.normal(size=(length + 1, size))
                demo[f"obs/{key}"] = values[:-1]
                demo[f"next_obs/{key}"] = values[1:]
            for name, values in spoilt.items():
                if number == 2:
                    del demo[name]
                    demo[name] = values
        file["mask/train"] = np.array([b"demo_1"])


def test_a_file_of_robomimics_form_is_read_as_it_is(engine_name, tmp_path):
    robomimic(tmp_path / "low_dim.hdf5")
    described = offline.describe(tmp_path)
    assert described.schema.names == ("action", "obs.eef_pos", "obs.object", "reward", "states")
    assert described.schema.observation_names == ("obs.eef_pos", "obs.object")
    assert (described.rows, described.episodes) == (9, 3)
    with conduit.Engine.create(engine_name, {"t": offline.table_for(tmp_path)}) as engine:
        offline.load(engine, "t", tmp_path)
        steps = joined(list(engine.table("t").scan()))
    assert steps.columns["action"][:, 0].tolist() == [1] * 3 + [2] * 4 + [10] * 2
    np.testing.assert_array_equal(np.flatnonzero(steps.starts), [0, 3, 7])
    np.testing.assert_array_equal(steps.places, [2, 6, 8])
    with h5py.File(tmp_path / "low_dim.hdf5") as file:
        np.testing.assert_array_equal(steps.finals["obs.object"][1], file["data/demo_2/next_obs/object"][-1])


def test_demonstrations_without_done_flags_still_are_episodes(load, tmp_path):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for number in range(2):
            file[f"data/demo_{number}/actions"] = np.arange(4)
            file[f"data/demo_{number}/rewards"] = np.zeros(4, np.float32)
            file[f"data/demo_{number}/obs/state"] = np.zeros((4, 3), np.float32)
    steps, loaded = load(tmp_path, columns={"obs": "obs/state"})
    assert loaded.episodes == 2
    np.testing.assert_array_equal(np.flatnonzero(steps.starts), [0, 4])
    assert not steps.terminated.any()


def test_a_dataset_that_differs_in_one_demonstration_is_refused_where_it_is_needed(load, tmp_path):
    robomimic(tmp_path / "a.hdf5", states=np.zeros((4, 6)))
    described = offline.describe(tmp_path)
    assert "states" not in described.schema
    assert "/data/demo_2" in described.skipped["states"]
    with pytest.raises(SourceError, match=r"float64 \(5,\).*/data/demo_2.*'states'"):
        load(tmp_path, conduit.Schema([conduit.Field("states", "float64", (5,))]))


@pytest.mark.parametrize("data", [b"", b"no HDF5", b"\x89HDF\r\n\x1a\n"], ids=["empty", "text", "cut short"])
def test_a_damaged_hdf5_file_is_named(tmp_path, data):
    (tmp_path / "a.hdf5").write_bytes(data)
    with pytest.raises(SourceError, match=r"readable HDF5.*a\.hdf5"):
        offline.describe(tmp_path)


def test_an_hdf5_file_of_another_form_is_told_which_forms_there_are(tmp_path):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["weights"] = 3.0
    with pytest.raises(SourceError, match=r"flat \(observations.*data/demo_<k>"):
        offline.describe(tmp_path)


@pytest.mark.parametrize("name", ["a.csv", "a.pkl", "a"])
def test_a_file_of_an_unknown_kind_is_told_which_kinds_are_known(tmp_path, name):
    (tmp_path / name).write_text("1,2")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(SourceError, match=r"\*\.npz.*\*\.parquet.*\*\.hdf5.*Minari") as caught:
            offline.describe(source)
        assert name in str(caught.value)


def test_hdf5_without_h5py_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.h5").touch()
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(MissingExtra, match=r"conduit-rl\[offline\]"):
        offline.describe(tmp_path)
