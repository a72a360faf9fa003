"""npz and Parquet: what comes back is what was there, and what does not fit is refused before anything is written."""

import functools
import itertools
import json
import operator
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import conduit
from conduit import offline
from conduit.offline.columns import joined

FORMATS = ("npz", "parquet")
_numbers = itertools.count()


@pytest.fixture
def make(engine_name):
    """An engine with one table `t`."""
    made = []

    def create(table):
        engine = conduit.Engine.create(f"{engine_name}-{next(_numbers)}", {"t": table})
        made.append(engine)
        return engine

    yield create
    for engine in made:
        engine.close()


def value(field, number):
    """A value that tells the field and the number of its row."""
    rng = np.random.default_rng([number, *field.name.encode()])
    shape = (int(rng.integers(field.max_length + 1)), *field.shape[1:]) if field.ragged else field.shape
    data = rng.bytes(int(np.prod(shape, dtype=int)) * field.itemsize)
    if field.dtype == "bool":
        return np.frombuffer(data, np.uint8).reshape(shape) % 2 == 0
    return np.frombuffer(data, field.numpy_dtype).reshape(shape).copy()


def history(engine, schema, ends, *, cuts=(), keep_final=True):
    """Write steps; `ends` has "", "terminated" or "truncated" for each."""
    with engine.writer("t", keep_final=keep_final) as writer:
        for number, end in enumerate(ends):
            if number in cuts:
                writer.cut()
            row = {field.name: as_given(field, value(field, number)) for field in schema.fields}
            final = {n: as_given(schema[n], value(schema[n], -1 - number & 0xFFFF)) for n in schema.observation_names}
            kept = final if end and keep_final and final else None
            writer.append(**row, terminated=end == "terminated", truncated=end == "truncated", final=kept)


def as_given(field, array):
    if field.dtype == "bfloat16":
        import ml_dtypes

        return array.view(ml_dtypes.bfloat16)
    return array


def seen(engine, table="t"):
    """Everything that a table tells of its steps, as plain bytes, in order."""
    return [one for steps in engine.table(table).scan() for one in told(steps)]


def told(steps):
    finals = {int(place): i for i, place in enumerate(steps.places)}

    def of(values, row):
        return {name: np.asarray(array[row]).tobytes() for name, array in values.items()}

    for row in range(len(steps)):
        kept = of(steps.finals, finals[row]) if row in finals else None
        flags = (bool(steps.terminated[row]), bool(steps.truncated[row]), bool(steps.starts[row]))
        yield of(steps.columns, row), flags, kept


def same_after_a_round_trip(engine, make, folder, kind):
    path = folder / f"out-{next(_numbers)}"
    saved = offline.save(engine, "t", path, format=kind)
    described = offline.describe(path)
    assert described.rows == saved.rows
    assert described.episodes == saved.episodes
    assert described.schema == engine.table("t").schema
    other = make(offline.table_for(path))
    loaded = offline.load(other, "t", path)
    assert (loaded.rows, loaded.episodes) == (saved.rows, saved.episodes)
    assert seen(other) == seen(engine)
    other.close()
    return saved


CARTPOLE = conduit.Schema(
    [
        conduit.Field("obs", "float32", (4,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32", casting="same_kind"),
    ]
)
NESTED = conduit.Schema(
    [
        conduit.Field("obs.camera", "uint8", (36, 36, 1), observation=True),
        conduit.Field("obs.joints.0", "float64", (3, 2), observation=True),
        conduit.Field("obs.joints.1", "bfloat16", (2,), observation=True),
        conduit.Field("action.arm", "float16", (2, 1, 2)),
        conduit.Field("action.grip", "bool"),
        conduit.Field("file", "uint64"),
        conduit.Field("step", "int8"),
        conduit.Field("episode", "bool", (3,)),
    ]
)
RAGGED = conduit.Schema(
    [
        conduit.Field("tokens", "int32", (9,), observation=True, ragged=True),
        conduit.Field("points", "float32", (4, 3), ragged=True),
        conduit.Field("reward", "float32"),
    ]
)
BLIND = conduit.Schema([conduit.Field("action", "int64"), conduit.Field("reward", "float64")])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("schema", [CARTPOLE, NESTED, RAGGED, BLIND], ids=["cartpole", "nested", "ragged", "blind"])
def test_steps_come_back_as_they_were(make, tmp_path, kind, schema):
    engine = make(conduit.Table(schema, capacity=300, page_rows=40, max_n_step=2))
    ends = ["truncated" if n % 17 == 16 else "terminated" if n % 7 == 6 else "" for n in range(120)]
    history(engine, schema, ends, cuts={40, 90})
    saved = same_after_a_round_trip(engine, make, tmp_path, kind)
    assert saved.rows == 120
    assert saved.missing == 0


@pytest.mark.parametrize("kind", FORMATS)
@given(
    ends=st.lists(st.sampled_from(["", "", "terminated", "truncated"]), min_size=1, max_size=40),
    cuts=st.sets(st.integers(1, 39), max_size=4),
    keep=st.booleans(),
    page_rows=st.integers(8, 30),
)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_of_ends_and_cuts_comes_back(make, tmp_path, kind, ends, cuts, keep, page_rows):
    schema = conduit.Schema(
        [conduit.Field("obs", "float32", (2,), observation=True), conduit.Field("bits", "uint16", (), False)]
    )
    engine = make(conduit.Table(schema, capacity=200, page_rows=page_rows))
    history(engine, schema, ends, cuts=cuts, keep_final=keep)
    same_after_a_round_trip(engine, make, tmp_path, kind)
    engine.close()


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_each_autoreset_mode_gives_the_same_files(make, tmp_path, mode):
    """Three environments whose episodes end at different times, told in each of Gymnasium's three ways."""
    lengths = {0: 3, 1: 4, 2: 5}
    rows = [[] for _ in lengths]
    engine = make(conduit.Table(CARTPOLE, capacity=900, page_rows=48, num_envs=3))
    clocks = dict.fromkeys(lengths, 0)
    with engine.writer("t", num_envs=3, autoreset=mode) as writer:
        for _ in range(60):
            obs, final = np.zeros((2, 3, 4), np.float32)
            ended, waits = np.zeros((2, 3), bool)
            for env, length in lengths.items():
                clock = clocks[env]
                obs[env] = (env, clock % (length + 1) if mode == "next_step" else clock % length, clock, 0)
                if mode == "next_step":
                    ended[env], waits[env] = clock % (length + 1) == length - 1, clock % (length + 1) == length
                else:
                    ended[env] = clock % length == length - 1
                final[env] = (env, length, -1, 0)
                if mode == "next_step" and waits[env]:
                    obs[env] = final[env]
                else:
                    rows[env].append((obs[env, :2].tolist(), bool(ended[env])))
                clocks[env] = clock + 1
            writer.append(
                obs=obs,
                action=np.zeros(3, np.int64),
                reward=np.ones(3),
                terminated=ended,
                final=None if mode == "next_step" else final,
            )
        path = tmp_path / "out"
        offline.save(engine, "t", path)
    with np.load(path / "part-00000.npz") as file:
        told = [(o[:2].tolist(), t) for o, t in zip(file["obs"], file["terminated"].tolist(), strict=True)]
        assert told == functools.reduce(operator.iadd, rows, [])
        assert file["_final.rows"].tolist() == np.flatnonzero(file["terminated"]).tolist()
        assert file["final.obs"][:, 1].tolist() == [lengths[int(env)] for env in file["final.obs"][:, 0]]
    other = make(offline.table_for(path))
    offline.load(other, "t", path)
    with other.loader("t", batch_size=256, format="numpy", min_rows=1) as loader:
        batch = loader.next()
        np.testing.assert_array_equal(batch["next_obs"][:, 1], batch["obs"][:, 1] + 1)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_export_of_several_files_comes_back_with_its_episodes_whole(make, tmp_path, kind, monkeypatch):
    monkeypatch.setattr("conduit.offline.saving._PART_BYTES", 400)
    engine = make(conduit.Table(CARTPOLE, capacity=300, page_rows=20))
    history(engine, CARTPOLE, ["terminated" if n % 33 == 32 else "" for n in range(150)])
    saved = same_after_a_round_trip(engine, make, tmp_path, kind)
    assert saved.files > 3
    assert saved.episodes == 5


def test_an_export_while_writers_write_is_a_run_of_each_history(make, tmp_path):
    import threading
    import time

    engine = make(conduit.Table(CARTPOLE, capacity=2000, page_rows=50, num_envs=2))
    stop = threading.Event()

    def write():
        with engine.writer("t", num_envs=2, autoreset="next_step") as writer:
            for n in itertools.count():
                if stop.is_set():
                    return
                obs = np.full((2, 4), n, np.float32)
                writer.append(obs=obs, action=np.full(2, n), reward=np.zeros(2), terminated=np.full(2, n % 10 == 9))
                time.sleep(pause)

    pause = 0.0001  # flat out it would overwrite the whole table between two looks of this thread
    thread = threading.Thread(target=write)
    thread.start()
    try:
        for n in range(5):
            path = tmp_path / str(n)
            while engine.table("t").scan().rows < 100:
                pass
            offline.save(engine, "t", path)
            with np.load(path / "part-00000.npz") as file:
                inside = np.diff(file["_episode"]) == 0
                assert (np.diff(file["action"])[inside] == 1).all()
                assert (np.diff(file["_step"])[inside] == 1).all()
                assert (file["obs"][:, 0] == file["action"]).all()
    finally:
        stop.set()
        thread.join(10)


def foreign(path, **columns):
    """Files of other origin: no schema in them."""
    if path.suffix == ".npz":
        np.savez(path, **columns)
        return
    arrays = {}
    for name, array in columns.items():
        flat = pa.array(np.asarray(array).reshape(-1))
        for size in reversed(np.shape(array)[1:]):
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        arrays[name] = flat
    pq.write_table(pa.table(arrays), path)


def transitions(rows=12, ends=(4, 11)):
    obs = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
    following = np.roll(obs, -1, 0)
    terminated = np.zeros(rows, bool)
    terminated[list(ends)] = True
    following[list(ends)] = -obs[list(ends)]
    return {
        "obs": obs,
        "next_obs": following,
        "action": np.arange(rows),
        "reward": np.ones(rows, np.float64),
        "terminated": terminated,
    }


@pytest.mark.parametrize("kind", FORMATS)
def test_files_of_other_origin_with_next_observations_are_understood(make, tmp_path, kind):
    columns = transitions()
    foreign(tmp_path / f"a.{kind}", **columns)
    described = offline.describe(tmp_path)
    assert described.schema.observation_names == ("obs",)
    assert (described.rows, described.episodes) == (12, 2)
    engine = make(offline.table_for(tmp_path))
    offline.load(engine, "t", tmp_path)
    steps = joined(list(engine.table("t").scan()))
    np.testing.assert_array_equal(steps.places, [4, 11])
    np.testing.assert_array_equal(steps.finals["obs"], columns["next_obs"][[4, 11]])


@pytest.mark.parametrize("kind", FORMATS)
def test_columns_of_other_names_are_taken_by_the_names_given(make, tmp_path, kind):
    columns = transitions()
    file = tmp_path / f"a.{kind}"
    foreign(
        file,
        observations=columns["obs"],
        next_observations=columns["next_obs"],
        actions=columns["action"],
        rewards=columns["reward"],
        terminals=columns["terminated"],
        note=np.zeros(12),
    )
    names = {
        "obs": "observations",
        "next_obs": "next_observations",
        "action": "actions",
        "reward": "rewards",
        "terminated": "terminals",
    }
    engine = make(conduit.Table(CARTPOLE, capacity=100))
    loaded = offline.load(engine, "t", file, columns=names)
    assert loaded.rows == 12
    assert loaded.ignored == ("note",)
    steps = joined(list(engine.table("t").scan()))
    np.testing.assert_array_equal(steps.columns["reward"], columns["reward"].astype(np.float32))
    np.testing.assert_array_equal(steps.finals["obs"], columns["next_obs"][[4, 11]])


def test_data_that_stop_without_a_flag_end_truncated_where_the_next_observation_is_known(make, tmp_path):
    columns = transitions(ends=(4,))
    foreign(tmp_path / "a.npz", **columns, episode=np.repeat([7, 9, 8], [5, 3, 4]))
    columns = columns | {"next_obs": columns["next_obs"].copy()}
    columns["next_obs"][7] = columns["next_obs"][11] = 77
    foreign(tmp_path / "a.npz", **columns, episode=np.repeat([7, 9, 8], [5, 3, 4]))
    engine = make(offline.table_for(tmp_path))
    offline.load(engine, "t", tmp_path)
    steps = joined(list(engine.table("t").scan()))
    np.testing.assert_array_equal(np.flatnonzero(steps.truncated), [7, 11])
    np.testing.assert_array_equal(steps.finals["obs"][1:], np.full((2, 4), 77))


def test_without_next_observations_an_end_without_a_flag_is_a_cut(make, tmp_path):
    columns = transitions(ends=())
    del columns["next_obs"]
    foreign(tmp_path / "a.npz", **columns, episode=np.repeat([0, 1], [5, 7]))
    engine = make(offline.table_for(tmp_path))
    offline.load(engine, "t", tmp_path)
    steps = joined(list(engine.table("t").scan()))
    np.testing.assert_array_equal(np.flatnonzero(steps.starts), [0, 5])
    with engine.loader("t", batch_size=64, min_rows=1, format="numpy") as loader:
        assert not np.isin(loader.next()["action"], [4, 11]).any()


BAD = {
    "a missing column": (lambda c: c.pop("action"), "no such column.*'action'"),
    "a missing flag": (lambda c: c.pop("terminated"), "no such column.*'terminated' of"),
    "another dtype": (lambda c: c.update(action=np.zeros(12, np.float32)), r"int64 \(\).*float32 \(\).*'action'"),
    "another shape": (lambda c: c.update(obs=np.zeros((12, 5), np.float32)), r"\(4,\).*\(5,\).*'obs'"),
    "a flag of numbers": (lambda c: c.update(terminated=np.zeros(12)), r"bool \(\).*float64.*'terminated'"),
    "an episode in two places": (
        lambda c: c.update(episode=np.repeat([0, 1, 0], [5, 3, 4])),
        "episode 0 in several places",
    ),
    "an episode behind its end": (lambda c: c.update(episode=np.zeros(12, int)), "row 5"),
    "steps with a hole": (lambda c: c.update(step=np.r_[0:5, 0:3, 4:8]), "row 8"),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(make, tmp_path, kind, what):
    spoil, message = BAD[what]
    columns = transitions()
    spoil(columns)
    file = tmp_path / f"a.{kind}"
    foreign(file, **columns)
    engine = make(conduit.Table(CARTPOLE, capacity=100))
    with pytest.raises(conduit.errors.SourceError, match=f"(?s){message}") as caught:
        offline.load(engine, "t", tmp_path)
    assert tmp_path.name in str(caught.value)
    assert engine.table("t").scan().rows == 0


def test_columns_of_different_length_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", **(transitions() | {"action": np.arange(11)}))
    with pytest.raises(conduit.errors.SourceError, match=r"12 rows.*got 11.*'action'.*a\.npz"):
        offline.describe(tmp_path)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_truncated_file_is_refused_before_anything_is_written(make, tmp_path, kind):
    engine = make(conduit.Table(CARTPOLE, capacity=300))
    history(engine, CARTPOLE, [""] * 50)
    offline.save(engine, "t", tmp_path / "good", format=kind)
    whole = (tmp_path / "good" / f"part-00000.{kind}").read_bytes()
    target = make(conduit.Table(CARTPOLE, capacity=300))
    for length in {0, 1, len(whole) // 2, len(whole) - 1}:
        bad = tmp_path / f"bad-{length}.{kind}"
        bad.write_bytes(whole[:length])
        with pytest.raises(conduit.errors.SourceError, match=bad.name):
            offline.load(target, "t", bad)
    assert target.table("t").scan().rows == 0


def test_a_flipped_bit_of_an_archive_is_noticed_and_told_with_what_was_written(make, tmp_path):
    rows = 150_000
    columns = transitions(rows, (rows - 1,))
    foreign(tmp_path / "a.npz", **columns)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[data.index(b"action.npy") + 8 * rows - 100] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    target = make(conduit.Table(CARTPOLE, capacity=200_000))
    with pytest.raises(conduit.errors.SourceError, match=rf"(?s)CRC.*'action' of .*a\.npz.*131072 of {rows} steps"):
        offline.load(target, "t", tmp_path)
    assert sum(map(len, target.table("t").scan())) == 131072


def test_empty_and_mixed_directories_and_missing_paths_are_refused(tmp_path):
    with pytest.raises(conduit.errors.SourceError, match="got none"):
        offline.describe(tmp_path)
    (tmp_path / "a.npz").touch()
    (tmp_path / "a.parquet").touch()
    with pytest.raises(conduit.errors.SourceError, match=r"\*\.npz and \*\.parquet"):
        offline.describe(tmp_path)
    with pytest.raises(conduit.errors.SourceError, match="does not exist"):
        offline.describe(tmp_path / "b.npz")


def test_nulls_in_parquet_are_refused(make, tmp_path):
    columns = transitions()
    foreign(tmp_path / "a.parquet", **columns)
    table = pq.read_table(tmp_path / "a.parquet")
    holes = pa.array([None, *range(11)], pa.int64())
    pq.write_table(table.set_column(table.column_names.index("action"), "action", holes), tmp_path / "a.parquet")
    with pytest.raises(conduit.errors.SourceError, match=r"1 nulls.*'action'"):
        offline.load(make(conduit.Table(CARTPOLE, capacity=100)), "t", tmp_path)


def test_python_objects_in_an_archive_are_refused_and_not_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", terminated=np.zeros(2, bool), obs=np.array([{}, {}], object))
    with pytest.raises(conduit.errors.SourceError, match=r"'obs': 'Python objects'"):
        offline.describe(tmp_path)


def test_a_next_observation_that_does_not_follow_is_refused(make, tmp_path):
    columns = transitions()
    columns["next_obs"][2] += 1
    foreign(tmp_path / "a.npz", **columns)
    with pytest.raises(conduit.errors.SourceError, match="next_obs of row 2"):
        offline.load(make(conduit.Table(CARTPOLE, capacity=100)), "t", tmp_path)


def test_a_table_that_is_too_small_is_refused_with_the_numbers(make, tmp_path):
    foreign(tmp_path / "a.npz", **transitions(600, (599,)))
    with pytest.raises(conduit.errors.CapacityError, match="600 steps and 1 final"):
        offline.load(make(conduit.Table(CARTPOLE, capacity=100, page_rows=20)), "t", tmp_path)


@pytest.mark.parametrize(("rows", "every"), [(1, 1), (5, 2), (1000, 1), (1000, 7), (5000, 50)])
@pytest.mark.parametrize("options", [{}, {"max_n_step": 5, "max_stack": 4}, {"page_rows": 64}], ids=str)
def test_a_table_for_a_source_holds_all_of_it(make, tmp_path, rows, every, options):
    foreign(tmp_path / "a.npz", **transitions(rows, tuple(range(every - 1, rows, every))))
    engine = make(offline.table_for(tmp_path, **options))
    offline.load(engine, "t", tmp_path)
    assert sum(map(len, engine.table("t").scan())) == rows


def test_progress_is_told_up_to_the_end(make, tmp_path):
    engine = make(conduit.Table(CARTPOLE, capacity=300))
    history(engine, CARTPOLE, [""] * 50)
    heard = []
    offline.save(engine, "t", tmp_path / "x", progress=lambda *a: heard.append(a))
    assert heard[-1] == (50, 50)
    other = make(offline.table_for(tmp_path / "x"))
    heard.clear()
    offline.load(other, "t", tmp_path / "x", progress=lambda *a: heard.append(a))
    assert heard[-1] == (50, 50)


def test_a_failed_export_leaves_nothing_and_an_existing_one_stays(make, tmp_path):
    engine = make(conduit.Table(CARTPOLE, capacity=300))
    with pytest.raises(conduit.errors.SourceError, match="empty"):
        offline.save(engine, "t", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
    history(engine, CARTPOLE, [""] * 5)
    offline.save(engine, "t", tmp_path / "x")
    with pytest.raises(conduit.errors.SourceError, match="does not exist yet"):
        offline.save(engine, "t", tmp_path / "x")
    assert offline.describe(tmp_path / "x").rows == 5


def test_exports_are_readable_with_numpy_and_pyarrow_alone(make, tmp_path):
    engine = make(conduit.Table(CARTPOLE, capacity=300))
    history(engine, CARTPOLE, ["", "terminated", ""])
    offline.save(engine, "t", tmp_path / "n")
    offline.save(engine, "t", tmp_path / "p", format="parquet")
    with np.load(tmp_path / "n" / "part-00000.npz") as file:
        assert json.loads(file["_schema"].tobytes())["fields"][0]["name"] == "obs"
        obs = file["obs"]
    table = pq.read_table(tmp_path / "p")
    assert np.array_equal(np.array(table["obs"].to_pylist(), np.float32), obs, equal_nan=True)
    assert [x is not None for x in table["final.obs"].to_pylist()] == [False, True, False]
    shutil.rmtree(tmp_path / "n")


def test_a_table_of_demonstrations_can_be_frozen_as_it_is_loaded(make, tmp_path):
    schema = conduit.Schema([conduit.Field("obs", "int64", observation=True)])
    source = make(conduit.Table(schema, 100))
    history(source, schema, [""] * 20)
    offline.save(source, "t", tmp_path / "out", format="npz")
    engine = make(offline.table_for(tmp_path / "out"))
    offline.load(engine, "t", tmp_path / "out", freeze=True)
    with pytest.raises(conduit.errors.Frozen, match="thaw it"):
        engine.writer("t").append(obs=1)
    with engine.loader("t", batch_size=4, format="numpy") as loader:
        assert set(loader.next()["obs"].tolist()) <= {value(schema["obs"], n)[()] for n in range(20)}
    engine.table("t").thaw()
    with engine.writer("t") as writer:
        writer.append(obs=1)
