"""`Writer.append`: what it takes, how it is stored, and what it refuses without changing anything."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import conduit
from conduit import Field, Schema
from conduit.errors import FieldError
from conduit.plane.ingest.exact import ExactAppend
from tests.plane.conftest import CARTPOLE

INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64"]
BITS_OF_ONE_AND_A_HALF = 0x3FC0


def one(name, dtype, shape=(), casting="no"):
    return Schema([Field(name, dtype, shape, observation=name == "obs", casting=casting)])


def stored(engine, field="x"):
    """The column's rows committed so far, in one page."""
    view = engine._views["replay"]
    return view.columns[field][: view.rows_visible()]


# what is taken


@pytest.mark.parametrize("dtype", INTS)
def test_every_integer_that_a_field_holds_is_taken_as_a_number_and_as_a_scalar(make, path, dtype):
    engine = make(one("x", dtype))
    writer = engine.writer("replay")
    bounds = np.iinfo(dtype)
    values = [bounds.min, bounds.max, 0, 1, bounds.max // 3, bounds.min // 3]
    for value in values:
        writer.append(x=value)
        writer.append(x=np.dtype(dtype).type(value))
        writer.append(x=np.array(value, dtype))
    assert stored(engine).tolist() == [value for value in values for _ in range(3)]


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("below", [True, False], ids=["below", "above"])
def test_an_integer_beyond_the_field_is_refused(make, path, unchanged, dtype, below):
    engine = make(one("x", dtype))
    writer = engine.writer("replay")
    writer.append(x=1)
    value = np.iinfo(dtype).min - 1 if below else np.iinfo(dtype).max + 1
    with unchanged(engine), pytest.raises(FieldError, match=rf"Expected .*`{dtype}`.* at `x`"):
        writer.append(x=int(value))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.5, -3.1415926535, float("inf"), float("-inf"), float("nan"), 7, -(2**40)]
)
def test_floats_are_rounded_as_numpy_rounds_and_nan_and_infinity_are_kept(make, path, dtype, value):
    if dtype == "float16" and value == -(2**40):
        value = -(2**10)
    engine = make(one("x", dtype))
    writer = engine.writer("replay")
    for given_ in (value, np.float64(value), np.array(value, np.float64)):
        writer.append(x=given_)
    wanted = np.array([value] * 3, dtype)
    assert stored(engine).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("dtype", "value"), [("float16", 65520.0), ("float32", 3.5e38), ("bfloat16", 3.4e38)])
def test_a_finite_float_that_would_become_infinite_is_refused(make, path, unchanged, dtype, value):
    engine = make(one("x", dtype))
    writer = engine.writer("replay")
    with unchanged(engine), pytest.raises(FieldError, match=rf"values that fit `{dtype}`.* at `x`"):
        writer.append(x=value)
    vectors = make(one("x", dtype, casting="same_kind"))
    many = vectors.writer("replay", num_envs=3, autoreset="next_step")
    with unchanged(vectors), pytest.raises(FieldError, match=rf"values that fit `{dtype}`.* at `x`"):
        many.append(x=np.array([0, value, 0], np.float64))


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_, np.array(True), torch.tensor(True)], ids=repr)
def test_a_bool_field_takes_bools(make, path, value):
    engine = make(one("x", "bool"))
    engine.writer("replay").append(x=value)
    assert stored(engine).tolist() == [bool(value)]


@pytest.mark.parametrize(
    "value",
    [
        1.5,
        np.float32(1.5),
        np.float64(1.5),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(1.5),
    ],
    ids=["float", "float32", "float64", "torch bfloat16", "torch float32"],
)
def test_a_bfloat16_field_takes_numbers_and_tensors_by_value(make, path, value):
    engine = make(one("x", "bfloat16"))
    engine.writer("replay").append(x=value)
    assert stored(engine).tolist() == [BITS_OF_ONE_AND_A_HALF]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_bfloat16_tensor_is_taken_by_value_and_never_as_its_bits(make, path, dtype):
    values = torch.tensor([1.5, -2.0, float("nan")], dtype=torch.bfloat16)
    engine = make(one("x", dtype, casting="same_kind"))
    engine.writer("replay", num_envs=3, autoreset="next_step").append(x=values)
    np.testing.assert_array_equal(stored(engine), np.array([1.5, -2.0, np.nan], dtype))
    single = make(one("x", dtype))
    single.writer("replay").append(x=values[0])
    assert stored(single).tolist() == [1.5]


def test_an_array_of_uint16_is_no_bfloat16_although_it_looks_like_its_bits(make, path, unchanged):
    engine = make(one("x", "bfloat16", (2,)))
    writer = engine.writer("replay")
    with unchanged(engine), pytest.raises(FieldError, match=r"Expected `bfloat16`, got `uint16`.* at `x`"):
        writer.append(x=np.ones(2, np.uint16))
    writer.append(x=torch.ones(2, dtype=torch.bfloat16))
    assert stored(engine).tolist() == [[0x3F80, 0x3F80]]


ARRAYS = {
    "contiguous": lambda a: a,
    "strided": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: a[..., ::-1].copy()[..., ::-1],
    "Fortran order": np.asfortranarray,
    "read only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "unaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "subclass": lambda a: a.view(type("Mine", (np.ndarray,), {})),
    "tensor": torch.from_numpy,
    "tensor with gradient": lambda a: torch.from_numpy(a).requires_grad_(),
    "transposed tensor": lambda a: torch.from_numpy(a.swapaxes(0, -1).copy()).transpose(0, -1),
    "list": lambda a: a.tolist(),
    "tuple of rows": tuple,
}


@pytest.mark.parametrize("shape", [(3,), (2, 3), (5, 7), (4, 3, 6)], ids=str)
@pytest.mark.parametrize("way", ARRAYS)
def test_an_array_is_stored_alike_whatever_its_memory_looks_like(make, path, way, shape):
    schema = Schema([Field("x", "float32", shape), Field("n", "int64")])
    engine = make(schema)
    value = np.random.default_rng(0).standard_normal(shape, np.float32)
    engine.writer("replay").append(x=ARRAYS[way](value.copy()), n=7)
    np.testing.assert_array_equal(stored(engine), value[None])
    assert stored(engine, "n").tolist() == [7]


@pytest.mark.parametrize("shape", [(), (3,), (5, 7)], ids=str)
@pytest.mark.parametrize("way", ARRAYS)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_tick_of_many_environments_is_stored_alike_whatever_its_memory_looks_like(make, path, way, shape, num_envs):
    engine = make(one("x", "float32", shape))
    value = np.random.default_rng(0).standard_normal((num_envs, *shape), np.float32)
    engine.writer("replay", num_envs=num_envs, autoreset="next_step").append(x=ARRAYS[way](value.copy()))
    np.testing.assert_array_equal(stored(engine), value)


def test_fields_of_128_bytes_and_more_are_stored_at_their_padded_places(make, path):
    schema = Schema([Field("big", "uint8", (129,)), Field("wide", "float32", (32,)), Field("n", "int16")])
    engine = make(schema)
    writer = engine.writer("replay", num_envs=3, autoreset="next_step")
    rng = np.random.default_rng(1)
    ticks = [
        (rng.integers(0, 255, (3, 129), np.uint8), rng.random((3, 32), np.float32), rng.integers(0, 9, 3, np.int16))
        for _ in range(5)
    ]
    for big, wide, n in ticks:
        writer.append(big=big, wide=wide, n=n)
    assert engine._views["replay"].columns["big"].strides[0] == 192
    for k, name in enumerate(("big", "wide", "n")):
        np.testing.assert_array_equal(stored(engine, name), np.concatenate([tick[k] for tick in ticks]))


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        ("float64", "float32"),
        ("float32", "float64"),
        ("float64", "float16"),
        ("int64", "float32"),
        ("int64", "int8"),
        ("uint8", "int16"),
        ("uint8", "int8"),
        ("float64", "bfloat16"),
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (40,)], ids=str)
def test_same_kind_casting_takes_arrays_of_the_same_kind(make, path, source, dtype, shape):
    engine = make(one("x", dtype, shape, casting="same_kind"))
    value = np.arange(4 * int(np.prod(shape, dtype=int))).reshape(4, *shape).astype(source) % 50
    if source.startswith("float"):
        value = value + np.array(1 / 3, source)
    engine.writer("replay", num_envs=4, autoreset="next_step").append(x=value)
    if dtype == "bfloat16":
        wanted = torch.from_numpy(value).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    else:
        wanted = value.astype(dtype)
    np.testing.assert_array_equal(stored(engine), wanted)


@given(values=st.lists(st.floats(width=64, allow_nan=False), min_size=3, max_size=3))
def test_float64_rewards_are_rounded_once_or_refused_together(values):
    array = np.array(values)
    with np.errstate(over="ignore"):
        wanted = array.astype(np.float32)
    fits = (np.isfinite(wanted) | np.isinf(array)).all()
    schema = one("x", "float32", casting="same_kind")
    tables = {"replay": conduit.Table(schema, 100, num_envs=3)}
    with conduit.Engine.create(f"t{os.getpid()}-floats", tables) as engine:
        writer = engine.writer("replay", num_envs=3, autoreset="next_step")
        if fits:
            writer.append(x=array)
            np.testing.assert_array_equal(stored(engine), wanted)
        else:
            with pytest.raises(FieldError, match="values that fit `float32`"):
                writer.append(x=array)
            assert engine._views["replay"].rows_visible() == 0


# what is refused

GOOD = {"obs": np.zeros(4, np.float32), "action": 1, "reward": 0.5}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("obs", np.zeros(4), "Expected `float32`, got `float64`"),
        ("obs", np.zeros(4, np.float16), "Expected `float32`, got `float16`"),
        ("obs", np.zeros(4, np.int32), "Expected `float32`, got `int32`"),
        ("obs", np.zeros(4, ">f4"), "byte order"),
        ("obs", np.zeros(4, bool), "Expected `float32`, got `bool`"),
        ("obs", np.zeros(4, complex), "Expected `float32`"),
        ("obs", np.zeros(4, object), "Expected `float32`"),
        ("obs", torch.zeros(4, dtype=torch.float64), "Expected `float32`, got `float64`"),
        ("obs", torch.zeros(4, dtype=torch.bfloat16), "Expected `float32`, got `bfloat16`"),
        ("obs", np.zeros(3, np.float32), r"Expected shape \(4,\), got \(3,\)"),
        ("obs", np.zeros((1, 4), np.float32), r"Expected shape \(4,\), got \(1, 4\)"),
        ("obs", np.float32(0), r"Expected shape \(4,\), got \(\)"),
        ("obs", [0, 0, 0], r"Expected shape \(4,\), got \(3,\)"),
        ("obs", [0, 0, [0, 1], 0], "Expected `float32`"),
        ("obs", [True, False, True, True], "Expected `float32`, got list"),
        ("obs", "abcd", "Expected `float32`"),
        ("obs", None, "Expected `float32`"),
        ("obs", {"x": 1}, "Expected `float32`"),
        ("action", 1.0, "Expected `int64`, got float 1.0"),
        ("action", True, "Expected `int64`, got bool True"),
        ("action", np.True_, "Expected `int64`, got `bool`"),
        ("action", np.float32(1), "Expected `int64`, got `float32`"),
        ("action", np.array([1]), r"Expected shape \(\), got \(1,\)"),
        ("action", 2**63, "fit `int64`"),
        ("action", 2**80, "Expected `int64`"),
        ("action", "1", "Expected `int64`"),
        ("reward", True, "Expected `float32`, got bool True"),
        ("reward", np.array([1.0]), r"Expected shape \(\), got \(1,\)"),
        ("reward", torch.tensor([1.0]), r"Expected shape \(\), got \(1,\)"),
        ("reward", 1j, "Expected `float32`"),
        ("reward", 1e300, "fit `float32`"),
        ("terminated", 1, "Expected `bool`, got int 1"),
        ("terminated", None, "Expected `bool`"),
        ("terminated", np.array([True]), r"Expected shape \(\), got \(1,\)"),
        ("truncated", 0.0, "Expected `bool`, got float"),
        ("truncated", "no", "Expected `bool`"),
    ],
    ids=lambda value: f"{type(value).__name__} {value}"[:40] if not isinstance(value, str) else value[:40],
)
def test_a_wrong_value_is_refused_with_its_field_and_nothing_changes(make, path, unchanged, field, value, expected):
    engine = make()
    writer = engine.writer("replay")
    writer.append(**GOOD)
    with unchanged(engine), pytest.raises(FieldError, match=f"{expected}.* - at `{field}`") as caught:
        writer.append(**GOOD | {"terminated": True, "truncated": True, "final": GOOD["obs"], field: value})
    assert caught.value.at == field
    writer.append(**GOOD)
    view = engine._views["replay"]
    assert view.rows_visible() == 2
    assert not view.terminated.any()
    assert not view.truncated.any()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("obs", np.zeros(4, np.float32), r"Expected shape \(3, 4\), got \(4,\)"),
        ("obs", np.zeros((2, 4), np.float32), r"Expected shape \(3, 4\), got \(2, 4\)"),
        ("action", 1, r"Expected shape \(3,\), got \(\)"),
        ("action", np.zeros(3, np.int32), "Expected `int64`, got `int32`"),
        ("action", [1, 2], r"Expected shape \(3,\), got \(2,\)"),
        ("action", [1, 2, 3.5], "Expected `int64`"),
        ("reward", np.zeros(3, bool), "Expected `float32`, got `bool`"),
        ("terminated", True, r"Expected shape \(3,\), got \(\)"),
        ("terminated", np.zeros(3, np.uint8), "Expected `bool`, got `uint8`"),
        ("truncated", [False, False], r"Expected shape \(3,\), got \(2,\)"),
        ("truncated", [0, 0, 1], "Expected `bool`"),
    ],
    ids=lambda value: f"{type(value).__name__} {value}"[:40] if not isinstance(value, str) else value[:40],
)
def test_a_wrong_value_of_many_environments_is_refused_with_its_field(make, path, unchanged, field, value, expected):
    engine = make()
    writer = engine.writer("replay", num_envs=3, autoreset="same_step")
    good = {"obs": np.zeros((3, 4), np.float32), "action": np.zeros(3, np.int64), "reward": np.zeros(3)}
    writer.append(**good)
    ends = {"terminated": np.ones(3, bool), "truncated": np.ones(3, bool), "final": good["obs"]}
    with unchanged(engine), pytest.raises(FieldError, match=f"{expected}.* - at `{field}`"):
        writer.append(**good | ends | {field: value})
    writer.append(**good)
    assert not engine._views["replay"].terminated.any()


def test_a_missing_field_is_named(make, path, unchanged):
    engine = make()
    writer = engine.writer("replay")
    with unchanged(engine), pytest.raises(FieldError, match=r"a value for every field.* - at `action`"):
        writer.append(obs=GOOD["obs"], reward=0.0)


def test_an_unknown_field_is_named_with_the_one_that_was_meant(make, path, unchanged):
    engine = make()
    writer = engine.writer("replay")
    with unchanged(engine), pytest.raises(FieldError, match=r"did you mean `reward`.* - at `rewards`"):
        writer.append(**GOOD, rewards=1.0)


NESTED = Schema(
    [
        Field("obs.camera", "uint8", (2, 3), observation=True),
        Field("obs.pose.0", "float32", (), observation=True),
        Field("obs.pose.1", "float64", (2,), observation=True),
        Field("action.move", "int32"),
        Field("reward", "float32"),
    ]
)


def nested(k=0):
    return {
        "obs": {"camera": np.full((2, 3), k, np.uint8), "pose": (np.float32(k), np.full(2, float(k)))},
        "action": {"move": k},
        "reward": float(k),
    }


def test_nested_fields_are_taken_nested_and_by_dotted_names(make, path):
    engine = make(NESTED)
    writer = engine.writer("replay")
    writer.append(**nested(1))
    row = nested(2)
    obs = row.pop("obs")
    dotted = {"obs.camera": obs["camera"], "obs.pose.0": obs["pose"][0], "obs.pose.1": obs["pose"][1], "action.move": 2}
    writer.append(**dotted, reward=2.0)
    for name in NESTED.names:
        column = stored(engine, name)
        assert [column[k].ravel().tolist() for k in range(2)] == [[k] * column[0].size for k in (1, 2)]


@pytest.mark.parametrize(
    ("change", "at"),
    [
        (lambda row: row["obs"].pop("camera"), "obs.camera"),
        (lambda row: row.pop("obs"), "obs.camera"),
        (lambda row: row["obs"].update(depth=1), "obs.depth"),
        (lambda row: row["obs"].update(pose=(1.0,)), "obs.pose"),
        (lambda row: row["obs"].update(camera=np.zeros((2, 2), np.uint8)), "obs.camera"),
        (lambda row: row.update(action=3), "action"),
        (lambda row: row.update(actions=3), "actions"),
    ],
    ids=["part missing", "whole missing", "part unknown", "tuple too short", "shape", "no dict", "unknown"],
)
def test_a_wrong_part_of_a_nested_value_is_refused_with_its_path(make, path, unchanged, change, at):
    engine = make(NESTED)
    writer = engine.writer("replay")
    writer.append(**nested())
    row = nested()
    change(row)
    with unchanged(engine), pytest.raises(FieldError) as caught:
        writer.append(**row)
    assert caught.value.at == at


def test_field_names_may_be_python_keywords_or_names_that_the_method_itself_might_use(make, path):
    names = ["class", "self", "rest", "values", "missing", "lambda", "flat", "row", "t"]
    engine = make(Schema([Field(name, "int64") for name in names]))
    writer = engine.writer("replay")
    writer.append(**{name: k for k, name in enumerate(names)})
    assert [stored(engine, name).tolist() for name in names] == [[k] for k in range(len(names))]
    plain = [name for name in names if name not in ("class", "lambda")]
    second = make(Schema([Field(name, "int64") for name in plain]))
    second.writer("replay").append(**{name: k for k, name in enumerate(plain)})
    assert [stored(second, name).tolist() for name in plain] == [[k] for k in range(len(plain))]


# final observations

ENDS = {"terminated": True, "final": np.ones(4, np.float32)}


@pytest.mark.parametrize("envs", [None, 3])
def test_a_final_observation_handed_over_with_every_step_is_kept_only_where_an_episode_ended(make, path, envs):
    engine = make(CARTPOLE, num_envs=envs or 1)
    lead = () if envs is None else (envs,)
    with engine.writer("replay", num_envs=envs, autoreset="same_step") as writer:
        for step in range(12):
            last = np.arange(envs or 1) == (envs or 1) - 1  # of many environments only one ends
            ended = np.reshape(last & (step % 4 == 3), lead)
            writer.append(
                obs=np.full((*lead, 4), step, np.float32),
                action=np.full(lead, step)[()],
                reward=np.zeros(lead, np.float32)[()],
                terminated=ended[()],
                final=np.full((*lead, 4), -1 - step, np.float32),
            )
    with engine.loader("replay", batch_size=64, min_rows=1, format="numpy", seed=0) as loader:
        batch = loader.next()
    step, ended = batch["action"], batch["terminated"]
    assert (ended <= (step % 4 == 3)).all()
    assert ended.any()
    np.testing.assert_array_equal(batch["next_obs"][:, 0], np.where(ended, -1 - step, step + 1))


def objects_of(whole, ended):
    """As Gymnasium's vector environments hand them over in `infos["final_obs"]`."""
    out = np.empty(len(whole), object)
    for env in np.flatnonzero(ended):
        out[env] = whole[env]
    return out


HANDED_OVER = {
    "array": lambda whole, ended: whole,
    "list": lambda whole, ended: [one if end else None for one, end in zip(whole, ended, strict=True)],
    "tuple": lambda whole, ended: tuple(one if end else None for one, end in zip(whole, ended, strict=True)),
    "objects": objects_of,
}


@pytest.mark.parametrize("width", [5, 9001], ids=["small", "large"])
@pytest.mark.parametrize("keep_final", [True, False])
@pytest.mark.parametrize("way", HANDED_OVER)
def test_final_observations_may_come_in_any_of_these_ways_and_are_the_ends_own(make, path, way, keep_final, width):
    envs = 6
    schema = Schema([Field("obs", "uint8", (width,), observation=True), Field("action", "int64")])
    engine = make(schema, num_envs=envs)
    rng = np.random.default_rng(3)
    behind, rows = {}, []
    with engine.writer("replay", num_envs=envs, autoreset="same_step", keep_final=keep_final) as writer:
        for step in range(14):
            obs, whole = (rng.integers(0, 256, (envs, width), np.uint8) for _ in range(2))
            ended = rng.random(envs) < 0.3
            action = np.arange(envs) + envs * step
            writer.append(obs=obs, action=action, truncated=ended, final=HANDED_OVER[way](whole, ended))
            behind |= {int(action[env]): whole[env] for env in np.flatnonzero(ended)}
            rows.append(obs)
    with engine.loader("replay", batch_size=256, min_rows=1, format="numpy", seed=0) as loader:
        batch = loader.next()
    flat = np.concatenate(rows)
    for place, action in enumerate(batch["action"].tolist()):
        assert bool(batch["truncated"][place]) == (action in behind)
        np.testing.assert_array_equal(batch["obs"][place], flat[action])
        np.testing.assert_array_equal(batch["next_obs"][place], behind.get(action, flat[(action + envs) % len(flat)]))
    assert batch["truncated"].any()


@pytest.mark.parametrize("way", HANDED_OVER)
def test_a_step_that_ends_an_episode_is_one_compiled_call_like_any_other(make, monkeypatch, way):
    engine = make(CARTPOLE, num_envs=3)
    rows = {"obs": np.zeros((3, 4), np.float32), "action": np.zeros(3, np.int64), "reward": np.zeros(3, np.float32)}
    with engine.writer("replay", num_envs=3, autoreset="same_step") as writer:
        writer.append(**rows)  # claims the first page
        monkeypatch.delattr(ExactAppend, "append")
        ended = np.array([True, False, True])
        writer.append(**rows, terminated=ended, final=HANDED_OVER[way](rows["obs"], ended))
        with pytest.raises(AttributeError):  # and this is how one would see that it was not
            writer.append(**rows, terminated=ended)


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_an_end_without_its_final_observation_is_refused_and_says_how_to_give_it(make, path, unchanged, flag):
    engine = make()
    writer = engine.writer("replay")
    writer.append(**GOOD)
    with (
        unchanged(engine),
        pytest.raises(FieldError, match=r"pass final=.*keep_final=False.* environment 0 - at `obs`"),
    ):
        writer.append(**GOOD, **{flag: True})
    many = engine.writer("replay", num_envs=2, autoreset="same_step")
    good = {"obs": np.zeros((2, 4), np.float32), "action": np.zeros(2, np.int64), "reward": np.zeros(2)}
    many.append(**good)
    with unchanged(engine), pytest.raises(FieldError, match="environment 1"):
        many.append(**good, **{flag: np.array([False, True])})
    with unchanged(engine), pytest.raises(FieldError, match="environment 1"):
        many.append(**good, **{flag: np.array([True, True])}, final=[good["obs"][0], None])


@pytest.mark.parametrize(
    ("final", "expected"),
    [
        (np.zeros(4), "Expected `float32`, got `float64`.* - at `final.obs`"),
        (np.zeros(3, np.float32), r"Expected shape \(4,\), got \(3,\) - at `final.obs`"),
        ({"obs": np.zeros(4, np.float32), "x": 1}, "Expected `float32`.* - at `final.obs`"),
        ("reset", "Expected `float32`.* - at `final.obs`"),
    ],
    ids=["dtype", "shape", "key", "string"],
)
def test_a_wrong_final_observation_is_refused_and_leaves_no_flag_behind(make, path, unchanged, final, expected):
    engine = make()
    writer = engine.writer("replay")
    writer.append(**GOOD)
    with unchanged(engine), pytest.raises(FieldError, match=expected):
        writer.append(**GOOD, terminated=True, final=final)
    writer.append(**GOOD)
    assert not engine._views["replay"].terminated.any()


@pytest.mark.parametrize(
    ("final", "expected"),
    [
        ([None], "Expected 3 entries.* got 1 - at `final`"),
        (np.full(4, None), "Expected 3 entries.* got 4 - at `final`"),
        (np.zeros((2, 4), np.float32), r"Expected shape \(3, 4\), got \(2, 4\) - at `final.obs`"),
        (
            [None, np.zeros(4, np.float32), np.zeros(5, np.float32)],
            r"Expected shape \(4,\), got \(5,\) - at `final.obs`",
        ),
    ],
    ids=["list too short", "object array too long", "array too short", "wrong entry"],
)
def test_wrong_final_observations_of_many_environments_are_refused(make, path, unchanged, final, expected):
    engine = make()
    writer = engine.writer("replay", num_envs=3, autoreset="same_step")
    good = {"obs": np.zeros((3, 4), np.float32), "action": np.zeros(3, np.int64), "reward": np.zeros(3)}
    writer.append(**good)
    with unchanged(engine), pytest.raises(FieldError, match=expected):
        writer.append(**good, truncated=np.array([False, True, True]), final=final)


def test_final_is_refused_where_the_next_row_is_the_final_observation(make, path, unchanged):
    engine = make()
    writer = engine.writer("replay", num_envs=1, autoreset="next_step")
    good = {"obs": np.zeros((1, 4), np.float32), "action": np.zeros(1, np.int64), "reward": np.zeros(1)}
    writer.append(**good)
    with (
        unchanged(engine),
        pytest.raises(FieldError, match=r"no final observation with autoreset='next_step'.* at `final`"),
    ):
        writer.append(**good, terminated=np.array([True]), final=good["obs"])


def test_a_refused_call_does_not_even_turn_a_full_page(make, path, unchanged):
    engine = make(capacity=24, page_rows=8)
    writer = engine.writer("replay")
    for _ in range(40):
        for wrong in (
            {"obs": np.zeros(4)},
            {"action": 0.5},
            {"terminated": True},
            {"terminated": True, "final": np.zeros(4)},
            {"truncated": 1},
        ):
            with unchanged(engine), pytest.raises(FieldError):
                writer.append(**GOOD | wrong)
        writer.append(**GOOD)
    assert engine._views["replay"].rows_evicted > 0


def test_the_values_of_a_call_may_be_reused_and_changed_afterwards(make, path):
    engine = make()
    writer = engine.writer("replay")
    obs = np.zeros(4, np.float32)
    for k in range(5):
        obs[:] = k
        writer.append(obs=obs, action=k, reward=float(k))
    obs[:] = -1
    assert stored(engine, "obs").tolist() == [[k] * 4 for k in range(5)]


def test_both_paths_store_the_same_bytes(make, monkeypatch):
    from conduit.native import cpython_abi

    schema = Schema(
        [*CARTPOLE.fields, Field("pixels", "uint8", (5, 30)), Field("done", "bool"), Field("half", "float16")]
    )
    rng = np.random.default_rng(3)
    engines = []
    for supported in (True, False):
        monkeypatch.setattr(cpython_abi, "is_supported", lambda supported=supported: supported)
        engines.append(make(schema))
        single, many = engines[-1].writer("replay"), engines[-1].writer("replay", num_envs=3, autoreset="next_step")
        rng = np.random.default_rng(3)
        for _ in range(30):
            for writer, lead in ((single, ()), (many, (3,))):
                writer.append(
                    obs=rng.random((*lead, 4), np.float32),
                    action=np.asarray(rng.integers(0, 9, lead))[()],
                    reward=rng.standard_normal(lead)[()] if lead else float(rng.standard_normal()),
                    pixels=rng.integers(0, 255, (*lead, 5, 30), np.uint8),
                    done=np.asarray(rng.random(lead) < 0.5)[()],
                    half=np.asarray(rng.random(lead), np.float16)[()],
                    terminated=np.zeros(lead, bool)[()],
                )
    first, second = (engine._views["replay"] for engine in engines)
    for name, column in first.columns.items():
        assert column.tobytes() == second.columns[name].tobytes(), name
    assert first.meta.tobytes() == second.meta.tobytes()
