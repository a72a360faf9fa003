"""Schemas: what a row holds, and how nested values map to dotted names and back."""

import copy
import pickle
import subprocess
import sys
from collections import OrderedDict
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from conduit.errors import FieldError, MissingExtra, SchemaError
from conduit.field import DTYPES, Field, dtype_name
from conduit.schema import Schema

ROOT = Path(__file__).resolve().parents[1]

CARTPOLE = Schema(
    [
        Field("obs", "float32", (4,), observation=True),
        Field("action", "int64"),
        Field("reward", "float32", casting="same_kind"),
    ]
)
NESTED = Schema(
    [
        Field("obs.camera.left", "uint8", (8, 8, 3), observation=True),
        Field("obs.pose.0", "float32", (3,), observation=True),
        Field("obs.pose.1", "float64", (), observation=True),
        Field("action.0", "int64"),
        Field("action.1.gripper", "bool"),
        Field("reward", "float32"),
    ]
)


# Fields


@pytest.mark.parametrize(
    ("dtype", "shape", "itemsize", "row_bytes"),
    [
        ("bool", (), 1, 1),
        ("int8", (3,), 1, 3),
        ("uint16", (), 2, 2),
        ("bfloat16", (7,), 2, 14),
        ("float16", (1, 1, 1), 2, 2),
        ("float64", (3, 5), 8, 120),
        ("uint8", (4, 84, 84), 1, 28224),
    ],
)
def test_a_field_knows_its_bytes(dtype, shape, itemsize, row_bytes):
    field = Field("x", dtype, shape)
    assert (field.itemsize, field.row_bytes) == (itemsize, row_bytes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_listed_dtype_makes_a_field_that_numpy_can_hold(dtype):
    field = Field("x", dtype, (2,))
    assert field.dtype == dtype
    assert np.zeros(2, field.numpy_dtype).nbytes == field.row_bytes


def test_the_listed_dtypes_are_these():
    ints = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    assert DTYPES.keys() == {"bool", "float16", "bfloat16", "float32", "float64"} | ints


def test_bfloat16_is_held_as_its_bits():
    assert Field("x", "bfloat16").numpy_dtype == np.uint16


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float32, "float32"),
        (np.dtype("f2"), "float16"),
        (np.dtype("int64"), "int64"),
        (np.longlong, "int64"),
        (np.bool_, "bool"),
        (bool, "bool"),
    ],
    ids=str,
)
def test_numpy_dtypes_are_spelled_by_their_canonical_name(dtype, name):
    assert dtype_name(dtype) == name


@pytest.mark.parametrize("name", DTYPES)
def test_torch_dtypes_are_recognised_by_name(name):
    torch = pytest.importorskip("torch")
    assert dtype_name(getattr(torch, name)) == name


def test_ml_dtypes_bfloat16_is_recognised_by_name():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert dtype_name(ml_dtypes.bfloat16) == "bfloat16"
    schema = Schema.from_example({"obs": np.zeros(3, ml_dtypes.bfloat16)})
    assert schema["obs"] == Field("obs", "bfloat16", (3,), observation=True)


@pytest.mark.parametrize(
    "dtype",
    [
        "complex64",
        "f4",
        "float",
        "Float32",
        "",
        "torch.float32",
        np.complex128,
        np.dtype("O"),
        np.dtype("U4"),
        np.longdouble,
        np.dtype("M8[s]"),
        np.dtype([("a", "i4")]),
        float,
        int,
        str,
        None,
        4,
    ],
    ids=repr,
)
def test_a_bad_dtype_is_refused_with_the_field_and_what_is_possible(dtype):
    with pytest.raises(SchemaError, match=r"float16, float32.*got `.* - at `obs\.camera`$") as raised:
        Field("obs.camera", dtype)
    assert raised.value.at == "obs.camera"


def test_a_dtype_in_foreign_byte_order_is_refused():
    foreign = np.dtype("f4").newbyteorder("S")
    with pytest.raises(SchemaError, match=r"byte order.*astype.* - at `obs`"):
        Schema.from_example({"obs": np.zeros(3, foreign)})


@pytest.mark.parametrize("name", ["obs", "a_b", "A9", "obs.camera", "obs.0", "obs.10.x", "a._b", "a.next_b", "a.meta"])
def test_a_good_name_is_kept(name):
    assert Field(name, "bool").name == name


@pytest.mark.parametrize(
    "name",
    ["", "1", "0.a", "a b", "a-b", "a..b", ".a", "a.", "a.01", "a.1x", "ä", "a\n", "a.٣", "a/b", None, 3],
    ids=repr,
)
def test_a_malformed_name_is_refused(name):
    with pytest.raises(SchemaError, match="name"):
        Field(name, "bool")


@pytest.mark.parametrize(
    "name",
    [
        "terminated",
        "truncated",
        "meta",
        "final",
        "next_obs",
        "next_",
        "_x",
        "__init__",
        "meta.x",
        "next_obs.a",
        "final.0",
    ],
)
def test_a_reserved_name_is_refused_with_the_remedy(name):
    with pytest.raises(SchemaError, match=rf"Conduit's own.*rename.* - at `{name}`"):
        Field(name, "bool")


@pytest.mark.parametrize("shape", [(0,), (4, 0), (-1,), (3, -2)])
def test_a_shape_without_elements_is_refused(shape):
    with pytest.raises(SchemaError, match=r"at least 1.* - at `obs`"):
        Field("obs", "float32", shape)


@pytest.mark.parametrize("shape", [4, "4", None, (2.0,), (True,), ("4",), {4}], ids=repr)
def test_a_shape_that_is_no_tuple_of_whole_numbers_is_refused(shape):
    with pytest.raises(SchemaError, match=r"shape.* - at `obs`"):
        Field("obs", "float32", shape)


def test_a_shape_becomes_a_tuple_of_python_ints():
    shape = Field("obs", "float32", [np.int64(3), 4]).shape
    assert shape == (3, 4)
    assert [type(size) for size in shape] == [int, int]


def test_an_unknown_casting_is_refused():
    with pytest.raises(SchemaError, match="'no' or 'same_kind', got 'unsafe' - at `obs`"):
        Field("obs", "float32", casting="unsafe")


def test_fields_and_schemas_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        CARTPOLE["obs"].dtype = "int8"
    with pytest.raises(FrozenInstanceError):
        CARTPOLE.fields = ()


# Schemas by hand


def test_a_schema_lists_its_fields_in_the_order_given():
    assert CARTPOLE.names == ("obs", "action", "reward")
    assert CARTPOLE.names == tuple(field.name for field in CARTPOLE)
    assert CARTPOLE.observation_names == ("obs",)
    assert CARTPOLE.row_bytes == 16 + 8 + 4
    assert len(CARTPOLE) == 3
    assert "obs" in CARTPOLE
    assert "next_obs" not in CARTPOLE
    assert CARTPOLE["action"] is CARTPOLE.fields[1]


def test_asking_for_an_unknown_field_names_the_nearest():
    with pytest.raises(FieldError, match="got 'rewards': did you mean `reward`"):
        CARTPOLE["rewards"]
    with pytest.raises(FieldError, match="there is only `obs`, `action`, `reward`"):
        CARTPOLE["zzz"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "at least one field"),
        ([Field("a", "bool"), Field("a", "int8")], r"two of the same name.* - at `a`"),
        ([Field("a", "bool"), Field("a.b", "int8")], r"`a` is a field and cannot also hold others.* - at `a.b`"),
        ([Field("a.b", "bool"), Field("a", "int8")], r"cannot also hold others.* - at `a`"),
        ([Field("a.b", "bool"), Field("a.b.c.d", "int8")], r"`a.b` is a field.* - at `a.b.c.d`"),
        ([Field("a.0", "bool"), Field("a.2", "int8")], r"without a gap.*got `0`, `2` - at `a`"),
        ([Field("a.1", "bool")], r"without a gap.*got `1` - at `a`"),
        ([Field("x.a.0", "bool"), Field("x.a.b", "bool")], r"without a gap.*got `0`, `b` - at `x.a`"),
        ([Field("a.0", "bool"), Field("a.1", "bool", observation=True)], r"all or none of them.* - at `a`"),
        (["obs"], "Expected a `Field`, got 'obs'"),
        ({"obs": Field("obs", "bool")}, "from_example"),
    ],
)
def test_fields_that_make_no_schema_are_refused(fields, message):
    with pytest.raises(SchemaError, match=message):
        Schema(fields)


def test_a_schema_survives_pickle_and_copy():
    for other in (pickle.loads(pickle.dumps(NESTED)), copy.deepcopy(NESTED)):
        assert other == NESTED
        assert hash(other) == hash(NESTED)
        assert other.fingerprint == NESTED.fingerprint
        assert other.flatten(nested_row()) == NESTED.flatten(nested_row())


# Spaces


@pytest.mark.parametrize(
    ("space", "dtype", "shape"),
    [
        (spaces.Box(-1, 1, (4,), np.float32), "float32", (4,)),
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), "uint8", (4, 84, 84)),
        (spaces.Box(-1, 1, (), np.float64), "float64", ()),
        (spaces.Box(-1, 1, (2,), np.float16), "float16", (2,)),
        (spaces.Discrete(5), "int64", ()),
        (spaces.Discrete(5, start=-2), "int64", ()),
        (spaces.MultiDiscrete([3, 4]), "int64", (2,)),
        (spaces.MultiDiscrete([[3, 4, 5]], dtype=np.int32), "int32", (1, 3)),
        (spaces.MultiBinary(6), "int8", (6,)),
        (spaces.MultiBinary((2, 3)), "int8", (2, 3)),
    ],
    ids=str,
)
def test_a_space_becomes_a_field_of_its_own_dtype_and_shape(space, dtype, shape):
    schema = Schema.from_spaces(space, space)
    assert schema["obs"] == Field("obs", dtype, shape, observation=True)
    assert schema["action"] == Field("action", dtype, shape)
    sample = np.asarray(space.sample())
    assert (sample.dtype, sample.shape) == (schema["obs"].numpy_dtype, schema["obs"].shape)


def test_the_reward_is_a_float32_that_takes_any_float_unless_told_otherwise():
    space = spaces.Discrete(2)
    assert Schema.from_spaces(space, space)["reward"] == Field("reward", "float32", casting="same_kind")
    assert Schema.from_spaces(space, space, reward="float64")["reward"].dtype == "float64"
    assert Schema.from_spaces(space, space, reward=None).names == ("obs", "action")


def test_nested_spaces_become_dotted_names():
    observation = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "arms": spaces.Tuple([spaces.Box(-1, 1, (7,)), spaces.Dict({"grip": spaces.MultiBinary(1)})]),
        }
    )
    action = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))])
    schema = Schema.from_spaces(observation, action)
    assert set(schema.names) == {
        *("obs.camera", "obs.arms.0", "obs.arms.1.grip"),
        *("action.0", "action.1", "reward"),
    }
    assert set(schema.observation_names) == {"obs.camera", "obs.arms.0", "obs.arms.1.grip"}


def test_a_sample_of_nested_spaces_flattens_and_nests_back():
    observation = spaces.Dict(
        {"a": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))]), "b": spaces.Discrete(9)}
    )
    schema = Schema.from_spaces(observation, spaces.Tuple([spaces.Discrete(2)]))
    row = {"obs": observation.sample(), "action": (np.int64(1),), "reward": 0.5}
    flat = schema.flatten(row)
    assert flat.keys() == set(schema.names)
    assert schema.nest(flat) == row
    assert schema.flatten_observation(row["obs"]) == {name: flat[name] for name in schema.observation_names}


@pytest.mark.parametrize(
    ("space", "path", "kind"),
    [
        (spaces.Text(5), "obs", "gymnasium.spaces.text.Text"),
        (spaces.Dict(a=spaces.Graph(spaces.Box(0, 1, (2,)), None)), "obs.a", "Graph"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2))]), "obs.1", "Sequence"),
        (spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]), "obs", "OneOf"),
        ("CartPole-v1", "obs", "builtins.str"),
        (None, "obs", "NoneType"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_another_space_is_refused_with_its_path_and_what_is_supported(space, path, kind):
    with pytest.raises(SchemaError, match=rf"Box, Discrete, MultiDiscrete.*{kind}`: .*Schema\(\[.* - at `{path}`"):
        Schema.from_spaces(space, spaces.Discrete(2))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Dict({}), "empty `Dict` - at `obs`"),
        (spaces.Tuple([]), "empty `Tuple` - at `obs`"),
        (spaces.Dict({"a-b": spaces.Discrete(2)}), "got 'a-b': rename it - at `obs`"),
        (spaces.Dict({"a.b": spaces.Discrete(2)}), "got 'a.b': rename it - at `obs`"),
        (spaces.Dict({"0": spaces.Discrete(2)}), "got '0': rename it - at `obs`"),
        (spaces.Dict({0: spaces.Discrete(2)}), "got 0: rename it - at `obs`"),
        (spaces.Dict(a=spaces.Box(0, 1, (0,))), "at least 1.* - at `obs.a`"),
    ],
)
def test_a_space_that_cannot_be_stored_is_refused(space, message):
    with pytest.raises(SchemaError, match=message):
        Schema.from_spaces(space, spaces.Discrete(2))


def test_without_gymnasium_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingExtra, match=r"pip install 'conduit-rl\[gym\]'"):
        Schema.from_spaces(spaces.Discrete(2), spaces.Discrete(2))


def test_the_schema_module_loads_neither_torch_nor_gymnasium():
    probe = (
        "import sys, numpy; from conduit.schema import Schema; Schema.from_example({'obs': numpy.zeros(3), 'action': 0});"
        "print(sorted({'torch', 'gymnasium', 'ml_dtypes'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


# Examples


def test_an_example_gives_each_value_its_own_dtype_and_shape():
    schema = Schema.from_example(
        {
            "obs": {"camera": np.zeros((8, 8), np.uint8), "pose": (np.zeros(3), np.float16(0))},
            "action": 0,
            "reward": 0.0,
            "success": False,
            "logits": np.zeros(5, np.float32),
            "scalar": np.zeros((), np.int16),
            "double": np.float64(1.0),
        }
    )
    assert schema.fields == (
        Field("obs.camera", "uint8", (8, 8), observation=True),
        Field("obs.pose.0", "float64", (3,), observation=True),
        Field("obs.pose.1", "float16", (), observation=True),
        Field("action", "int64", (), casting="same_kind"),
        Field("reward", "float32", (), casting="same_kind"),
        Field("success", "bool", (), casting="same_kind"),
        Field("logits", "float32", (5,)),
        Field("scalar", "int16", ()),
        Field("double", "float64", ()),
    )


def test_an_example_may_have_dotted_names():
    example = {"obs.camera": np.zeros(3, np.uint8), "obs.pose": 1.0, "action": 0}
    nested = {"obs": {"camera": np.zeros(3, np.uint8), "pose": 1.0}, "action": 0}
    assert Schema.from_example(example) == Schema.from_example(nested)


@pytest.mark.parametrize("name", DTYPES)
def test_an_example_takes_torch_tensors_of_every_dtype(name):
    torch = pytest.importorskip("torch")
    schema = Schema.from_example({"obs": torch.zeros((2, 3), dtype=getattr(torch, name)), "x": torch.zeros(())})
    assert schema["obs"] == Field("obs", name, (2, 3), observation=True)
    assert schema["x"] == Field("x", "float32", ())


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        (None, ("obs.a", "obs.b")),
        ((), ()),
        (("goal",), ("goal",)),
        ("goal", ("goal",)),
        (("obs.b", "goal"), ("obs.b", "goal")),
        (["obs", "goal"], ("obs.a", "obs.b", "goal")),
    ],
)
def test_the_caller_says_what_the_observations_are(observation, expected):
    schema = Schema.from_example({"obs": {"a": 0.0, "b": 0.0}, "goal": 0.0, "obstacle": 0}, observation=observation)
    assert schema.observation_names == expected


def test_without_obs_there_are_no_observations():
    assert Schema.from_example({"state": 0.0}).observation_names == ()


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({}, "at least one field"),
        ([1, 2], "Expected a mapping of names to values, got `list`"),
        ({"obs": [0.0, 1.0]}, "got `list`: make it an array - at `obs`"),
        ({"obs": {"a": "text"}}, "got `str`: make it an array - at `obs.a`"),
        ({"obs": (0.0, None)}, "got `NoneType`.* - at `obs.1`"),
        ({"obs": {}}, "got an empty one - at `obs`"),
        ({"obs": ()}, "got an empty one - at `obs`"),
        ({"obs": {"a b": 0}}, "got 'a b': rename it - at `obs`"),
        ({"obs": {1: 0}}, "got 1: rename it - at `obs`"),
        ({1: 0}, "Expected a field name of type `str`, got 1"),
        ({"obs": np.zeros(0)}, "at least 1.* - at `obs`"),
        ({"obs": np.zeros(2, object)}, "got `object` - at `obs`"),
        ({"obs": 1j}, "got `complex`"),
        ({"obs": 0.0, "terminated": False}, "Conduit's own.*leave it out.* - at `terminated`"),
        ({"obs.a": 0.0, "obs": {"a": 0.0}}, "two of the same name.* - at `obs.a`"),
    ],
)
def test_an_example_that_cannot_be_stored_is_refused(example, message):
    with pytest.raises(SchemaError, match=message):
        Schema.from_example(example)


def test_an_unknown_observation_is_refused():
    with pytest.raises(
        SchemaError, match="Expected names of observations, got 'goal', and there is only `obs`, `action`"
    ):
        Schema.from_example({"obs": 0.0, "action": 0}, observation=("goal",))


# Fingerprint, JSON and difference


def test_the_fingerprint_of_a_schema_never_changes():
    assert CARTPOLE.to_json() == (
        b'{"format":1,"fields":[{"name":"obs","dtype":"float32","shape":[4],"observation":true},'
        b'{"name":"action","dtype":"int64","shape":[]},'
        b'{"name":"reward","dtype":"float32","shape":[],"casting":"same_kind"}]}'
    )
    assert CARTPOLE.fingerprint == "219507544af26314"


def test_however_it_is_made_an_equal_schema_has_an_equal_fingerprint():
    by_spaces = Schema.from_spaces(spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
    by_example = Schema.from_example({"obs": np.zeros(4, np.float32), "action": np.int64(0), "reward": 0.0})
    assert CARTPOLE == by_spaces == by_example
    assert CARTPOLE.fingerprint == by_spaces.fingerprint == by_example.fingerprint
    assert CARTPOLE.difference(by_spaces) is None


OTHERS = {
    "name": [Field("goal", "float32", (4,), observation=True), *CARTPOLE.fields[1:]],
    "dtype": [replace(CARTPOLE["obs"], dtype="float64"), *CARTPOLE.fields[1:]],
    "shape": [replace(CARTPOLE["obs"], shape=(2, 2)), *CARTPOLE.fields[1:]],
    "observation": [replace(CARTPOLE["obs"], observation=False), *CARTPOLE.fields[1:]],
    "casting": [replace(CARTPOLE["obs"], casting="same_kind"), *CARTPOLE.fields[1:]],
    "order": CARTPOLE.fields[::-1],
    "fewer": CARTPOLE.fields[:2],
    "more": [*CARTPOLE.fields, Field("value", "float32")],
}


@pytest.mark.parametrize("fields", OTHERS.values(), ids=OTHERS)
def test_any_change_of_a_schema_changes_its_fingerprint(fields):
    other = Schema(fields)
    assert other != CARTPOLE
    assert other.fingerprint != CARTPOLE.fingerprint
    assert other.difference(CARTPOLE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("name", "`obs` is float32 (4,), observation in this schema and missing in the other"),
        ("dtype", "`obs` is float32 (4,), observation in this schema and float64 (4,), observation in the other"),
        ("shape", "`obs` is float32 (4,), observation in this schema and float32 (2, 2), observation in the other"),
        ("observation", "`obs` is float32 (4,), observation in this schema and float32 (4,) in the other"),
        ("order", "the order differs: field 0 is `obs` in this schema and `reward` in the other"),
        ("fewer", "`reward` is float32 (), same_kind in this schema and missing in the other"),
        ("more", "`value` is missing in this schema and float32 () in the other"),
    ],
)
def test_the_difference_names_the_first_field_and_both_sides(change, message):
    assert CARTPOLE.difference(Schema(OTHERS[change])) == message


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"", "schema in JSON"),
        (b"\xff\xfe", "schema in JSON"),
        (b"[]", "schema in JSON"),
        (b'{"fields":[]}', "format"),
        (b'{"format":2,"fields":[],"arenas":[]}', "Expected a schema of format 1, got format 2: use one version"),
        (b'{"format":1}', "fields"),
        (b'{"format":1,"fields":[]}', "at least one field"),
        (b'{"format":1,"fields":[],"more":1}', "more"),
        (b'{"format":1,"fields":[{"name":"a","dtype":"bool","shape":[],"ragged":true}]}', "ragged"),
        (b'{"format":1,"fields":[{"name":"a","dtype":"f4","shape":[]}]}', "got `f4` - at `a`"),
        (b'{"format":1,"fields":[{"name":"a","dtype":"bool","shape":[0]}]}', "at least 1.* - at `a`"),
        (b'{"format":1,"fields":[{"name":"a","dtype":"bool","shape":[1.5]}]}', "schema in JSON"),
        (b'{"format":1,"fields":[{"name":"a","dtype":"bool","shape":[],"casting":"unsafe"}]}', "unsafe"),
    ],
    ids=str,
)
def test_a_bad_document_is_refused(document, message):
    with pytest.raises(SchemaError, match=message):
        Schema.from_json(document)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda document: document.decode()])
def test_a_document_may_be_any_kind_of_bytes_or_text(kind):
    assert Schema.from_json(kind(NESTED.to_json())) == NESTED


# Flat and nested


def nested_row():
    return {
        "obs": {"camera": {"left": "L"}, "pose": ("P0", "P1")},
        "action": ("A0", {"gripper": "G"}),
        "reward": "R",
    }


def flat_row():
    return {
        "obs.camera.left": "L",
        "obs.pose.0": "P0",
        "obs.pose.1": "P1",
        "action.0": "A0",
        "action.1.gripper": "G",
        "reward": "R",
    }


def test_nested_values_flatten_to_dotted_names_and_nest_back():
    assert NESTED.flatten(nested_row()) == flat_row()
    assert NESTED.nest(flat_row()) == nested_row()


def test_a_dict_that_is_flat_already_is_returned_itself():
    row = dict(reversed(flat_row().items()))
    assert NESTED.flatten(row) is row


def test_values_pass_through_as_they_are():
    values = {"obs": np.zeros(4), "action": [1, 2], "reward": {"not": "looked into"}}
    flat = CARTPOLE.flatten(MappingProxyType(values))
    assert all(flat[name] is values[name] for name in values)


@pytest.mark.parametrize(
    "row",
    [
        {**nested_row(), "obs": {"camera": {"left": "L"}, "pose": ["P0", "P1"]}},
        {**nested_row(), "obs": OrderedDict(pose=("P0", "P1"), camera=MappingProxyType({"left": "L"}))},
        {
            "obs.camera": {"left": "L"},
            "obs.pose": ("P0", "P1"),
            "action.0": "A0",
            "action.1": {"gripper": "G"},
            "reward": "R",
        },
        {
            "obs": {"camera": {"left": "L"}, "pose": ("P0", "P1")},
            "action.0": "A0",
            "action.1.gripper": "G",
            "reward": "R",
        },
        MappingProxyType(flat_row()),
    ],
    ids=["list-for-tuple", "other-mappings", "half-dotted", "mixed", "flat-proxy"],
)
def test_keys_may_be_nested_dotted_or_both(row):
    assert NESTED.flatten(row) == flat_row()


@pytest.mark.parametrize(
    ("change", "message", "path"),
    [
        ({"reward": None}, "Expected all of .*got only", "reward"),
        ({"rewards": 1}, "got 'rewards': did you mean `reward`", "rewards"),
        ({"obs.camera.left": 1}, "both nested and by its dotted name", "obs.camera.left"),
        ({"obs.camera.up": 1}, "got 'obs.camera.up'", "obs.camera.up"),
        ({"reward.x": 1}, "got 'reward.x'", "reward.x"),
        ({7: 1}, "got 7", "7"),
        ({"obs": {"camera": {"left": 1}}}, "Expected `camera`, `pose`, got `camera`", "obs.pose"),
        ({"obs": {"camera": {"left": 1}, "pose": (1, 2), "depth": 1}}, "Expected `camera`, `pose`, got", "obs.depth"),
        ({"obs": {"camera": {}, "pose": (1, 2)}}, "Expected `left`, got nothing", "obs.camera.left"),
        ({"obs": np.zeros(3)}, "Expected a dict of `camera`, `pose`, got `ndarray`", "obs"),
        ({"obs": {"camera": {"left": 1}, "pose": (1,)}}, "Expected a tuple of 2, got a `tuple` of 1", "obs.pose"),
        ({"obs": {"camera": {"left": 1}, "pose": np.zeros(2)}}, "Expected a tuple of 2, got a `ndarray`", "obs.pose"),
        ({"action": (1, 2)}, "Expected a dict of `gripper`, got `int`", "action.1"),
    ],
)
def test_a_row_with_wrong_keys_is_refused_at_its_path(change, message, path):
    row = {key: value for key, value in (nested_row() | change).items() if value is not None}
    with pytest.raises(FieldError, match=message) as raised:
        NESTED.flatten(row)
    assert raised.value.at == path


@pytest.mark.parametrize("row", [None, 3, [("obs", 1)], np.zeros(3)], ids=repr)
def test_a_row_that_is_no_mapping_is_refused(row):
    with pytest.raises(FieldError, match="Expected a mapping of `obs`, `action`, `reward`, got"):
        CARTPOLE.flatten(row)


def test_next_observations_and_ends_nest_beside_the_fields():
    flat = flat_row() | {f"next_{name}": name for name in NESTED.observation_names} | {"terminated": 0, "truncated": 1}
    assert NESTED.nest(flat) == nested_row() | {
        "next_obs": {"camera": {"left": "obs.camera.left"}, "pose": ("obs.pose.0", "obs.pose.1")},
        "terminated": 0,
        "truncated": 1,
    }


def test_a_part_of_the_fields_nests_too():
    assert NESTED.nest({}) == {}
    assert NESTED.nest({"obs.camera.left": 1, "reward": 2}) == {"obs": {"camera": {"left": 1}}, "reward": 2}


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"obs.pose.1": 1}, r"every part of a tuple, got only `1`.*dotted names - at `obs.pose.0`"),
        ({"next_obs.pose.0": 1}, r"got only `0`.* - at `next_obs.pose.1`"),
        ({"next_reward": 1}, "got 'next_reward'"),
        ({"obs": 1}, "got 'obs'"),
        ({"obs.pose": (1, 2)}, "got 'obs.pose'"),
        ({"meta": 1}, "got 'meta'"),
        ({3: 1}, "got 3"),
    ],
)
def test_names_that_do_not_nest_are_refused(flat, message):
    with pytest.raises(FieldError, match=message):
        NESTED.nest(flat)


def test_a_lone_observation_flattens_by_what_stands_under_its_name():
    assert CARTPOLE.flatten_observation("O") == {"obs": "O"}
    assert CARTPOLE.flatten_observation({"obs": "O"}) == {"obs": "O"}
    expected = {name: flat_row()[name] for name in NESTED.observation_names}
    assert NESTED.flatten_observation(nested_row()["obs"]) == expected
    assert NESTED.flatten_observation(expected) is expected


def test_observations_under_several_names_flatten_from_a_mapping_of_them():
    schema = Schema.from_example({"obs": {"a": 0.0, "b": 0}, "goal": 0.0}, observation=("obs.a", "goal"))
    assert schema.flatten_observation({"obs": {"a": 1}, "goal": 2}) == {"obs.a": 1, "goal": 2}
    with pytest.raises(FieldError, match="- at `goal`"):
        schema.flatten_observation({"obs": {"a": 1}})
    with pytest.raises(FieldError, match=r"- at `obs.b`"):
        schema.flatten_observation({"obs": {"a": 1, "b": 2}, "goal": 2})


def test_an_observation_for_a_schema_without_one_is_refused():
    with pytest.raises(FieldError, match="observation=True"):
        Schema.from_example({"state": 0.0}).flatten_observation(0.0)


# Any schema


@dataclass(frozen=True)
class Leaf:
    dtype: str
    shape: tuple[int, ...]
    casting: str


KEYS = st.from_regex(r"[a-z][a-z0-9_]{0,3}", fullmatch=True)
TOP_KEYS = KEYS.filter(lambda key: key != "meta")
LEAVES = st.builds(
    Leaf,
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(1, 5), max_size=3).map(tuple),
    st.sampled_from(["no", "same_kind"]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(KEYS, inner, min_size=1, max_size=3) | st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=8,
)
ROWS = st.dictionaries(TOP_KEYS, TREES, min_size=1, max_size=4)


def leaves_of(node, path):
    """The naive twin of flatten: dotted name and leaf, in order."""
    if isinstance(node, Leaf):
        return [(path, node)]
    parts = node.items() if isinstance(node, dict) else enumerate(node)
    return [found for key, part in parts for found in leaves_of(part, f"{path}.{key}" if path else key)]


@st.composite
def rows_with_schema(draw):
    row = draw(ROWS)
    observed = draw(st.sets(st.sampled_from(sorted(row))))
    fields = [
        Field(name, leaf.dtype, leaf.shape, name.split(".")[0] in observed, leaf.casting)
        for name, leaf in leaves_of(row, "")
    ]
    return row, Schema(draw(st.permutations(fields)))


@given(rows_with_schema())
def test_any_row_flattens_as_the_naive_twin_does_and_nests_back(drawn):
    row, schema = drawn
    flat = schema.flatten(row)
    assert flat == dict(leaves_of(row, ""))
    assert schema.flatten(flat) == flat
    assert schema.nest(flat) == row


@given(rows_with_schema())
def test_any_observation_flattens_alone_and_nests_as_the_next_one(drawn):
    row, schema = drawn
    roots = {name.split(".")[0] for name in schema.observation_names}
    if not roots:
        return
    observation = {key: row[key] for key in roots}
    flat = schema.flatten_observation(observation if len(roots) > 1 else observation[min(roots)])
    assert flat.keys() == set(schema.observation_names)
    following = schema.nest({f"next_{name}": value for name, value in flat.items()})
    assert following == {f"next_{key}": value for key, value in observation.items()}


@given(rows_with_schema())
def test_any_schema_survives_json_with_its_fingerprint(drawn):
    _, schema = drawn
    read = Schema.from_json(schema.to_json())
    assert read == schema
    assert (read.fingerprint, read.to_json()) == (schema.fingerprint, schema.to_json())
    assert schema.difference(read) is None
    assert len(schema.fingerprint) == 16
    assert int(schema.fingerprint, 16) >= 0
    assert schema.row_bytes == sum(np.zeros(f.shape, f.numpy_dtype).nbytes for f in schema)


@given(rows_with_schema(), st.randoms(use_true_random=False))
def test_two_schemas_differ_in_fingerprint_just_when_they_differ(drawn, random):
    _, schema = drawn
    fields = list(schema.fields)
    random.shuffle(fields)
    other = Schema(fields)
    assert (schema == other) == (schema.fingerprint == other.fingerprint) == (schema.difference(other) is None)


@given(rows_with_schema(), st.data())
def test_any_row_that_lacks_a_leaf_or_has_one_more_is_refused(drawn, data):
    row, schema = drawn
    flat = dict(leaves_of(row, ""))
    name = data.draw(st.sampled_from(sorted(flat)))
    with pytest.raises(FieldError):
        schema.flatten(flat | {f"{name}.more": 1})
    del flat[name]
    with pytest.raises(FieldError) as raised:
        schema.flatten(flat)
    assert raised.value.at == name
