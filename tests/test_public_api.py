"""The public names, what each has, and how it is called: a change here is a change for users, and goes into CHANGELOG.md."""

import ast
import inspect
from pathlib import Path

import pytest

import conduit

ROOT = Path(__file__).resolve().parents[1]

NAMES = {
    "Batch",
    "Client",
    "CommitEvery",
    "Delivery",
    "Engine",
    "Field",
    "Ingestion",
    "Loader",
    "Placement",
    "PolicySlot",
    "Pool",
    "Schema",
    "Table",
    "Transform",
    "Weights",
    "Writer",
    "__version__",
    "attach",
    "cast",
    "errors",
    "scale",
}

MEMBERS = {
    "Batch": "episodes get ids items keys nest release steps values versions",
    "Client": "close loader name policy recover schema tables writer",
    "CommitEvery": "publish_every",
    "Delivery": "close next",
    "Engine": "adopt close create loader name policy recover schema tables writer",
    "Field": "casting dtype itemsize name numpy_dtype observation row_bytes shape",
    "Ingestion": "publish_every",
    "Loader": "close next stats valid",
    "Placement": "choose",
    "PolicySlot": "bind close poll publish version",
    "Pool": "capacity device name tier",
    "Schema": (
        "difference fields fingerprint flatten flatten_observation from_example from_json from_spaces names nest "
        "observation_names row_bytes to_json"
    ),
    "Table": "capacity check_writer geometry halo_ticks kind max_n_step max_stack num_envs page_rows schema",
    "Transform": "check_source dtype factor is_affine offset",
    "Weights": "arrays state_dict version",
    "Writer": "append bare close cut flush rollout step version",
}

CALLS = {
    "attach": "name timeout=0.0",
    "cast": "dtype",
    "scale": "factor *offset=0.0 *dtype='float32'",
    "Field": "name dtype shape=() observation=False casting='no'",
    "Schema": "fields",
    "Schema.from_spaces": "observation_space action_space reward='float32'",
    "Schema.from_example": "example observation=None",
    "Table": "schema capacity page_rows=None max_stack=1 max_n_step=1 num_envs=1 kind='replay'",
    "Engine.create": "name tables *policies=None *backing='shm' *max_participants=128",
    "Engine.adopt": "name",
    "Client.writer": (
        "table *num_envs=None *autoreset=None *policy=None *schema=None *timeout=10.0 *on_full='wait' *keep_final=True "
        "*ingestion=None *placement=None"
    ),
    "Client.loader": (
        "table *batch_size *transform=None *seed=0 *format='torch' *buffers=3 *on_busy='error' *timeout=30.0 *min_rows=None "
        "*fields=None"
    ),
    "Client.policy": "name='policy'",
    "CommitEvery": "ticks",
    "Writer.append": "*terminated=False *truncated=False *final=None **fields",
    "Writer.rollout": "ticks *max_finals=None",
    "Loader.next": "timeout=None",
    "Loader.valid": "ids",
    "PolicySlot.publish": "state_dict",
    "Ingestion.publish_every": "table num_envs",
    "Placement.choose": "request pools",
    "Delivery.next": "timeout=None",
}


def test_the_public_names_are_these():
    assert set(conduit.__all__) == NAMES
    assert {name for name in vars(conduit) if not name.startswith("_")} - NAMES <= {
        # submodules appear as attributes once they are imported; none of them is public but `errors`
        path.stem
        for path in (ROOT / "conduit").iterdir()
    }


def test_every_public_name_is_re_exported_under_its_own_name_and_listed_in_order():
    tree = ast.parse((ROOT / "conduit" / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.asname == alias.name for alias in node.names), ast.unparse(node)
    assert conduit.__all__ == sorted(conduit.__all__)
    assert set(MEMBERS) == {name for name in NAMES if inspect.isclass(getattr(conduit, name))}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_public_class_has_these_members_and_no_others(name):
    kind = getattr(conduit, name)
    members = {member for member in dir(kind) if not member.startswith("_")}
    assert sorted(members) == sorted(MEMBERS[name].split())


@pytest.mark.parametrize("path", CALLS)
def test_a_public_call_takes_these_arguments(path):
    call = conduit
    for part in path.split("."):
        call = getattr(call, part)
    found = []
    for parameter in inspect.signature(call).parameters.values():
        if parameter.name == "self":
            continue
        mark = {parameter.KEYWORD_ONLY: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        found.append(f"{mark}{parameter.name}{default}")
    assert found == CALLS[path].split()


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__", "errors"}))
def test_everything_public_is_documented(name):
    item = getattr(conduit, name)
    assert item.__doc__
    assert item.__module__.startswith("conduit.")
    for member in MEMBERS.get(name, "").split():
        value = inspect.getattr_static(item, member)
        if callable(value) or isinstance(value, property | classmethod | staticmethod):
            assert inspect.getdoc(getattr(item, member)), f"{name}.{member}"


def test_the_generated_append_has_the_schema_s_fields_as_its_arguments(engine_name):
    schema = conduit.Schema([conduit.Field("obs", "float32", (4,), True), conduit.Field("action", "int64")])
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 100)}) as engine:
        writer = engine.writer("t")
        assert isinstance(writer, conduit.Writer)
        names = [p.name for p in inspect.signature(writer.append).parameters.values() if not p.name.startswith("_")]
        assert names == ["obs", "action", "terminated", "truncated", "final"]
        assert writer.append.__doc__


def test_the_version_is_the_distribution_s():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{conduit.__version__}"' in text
