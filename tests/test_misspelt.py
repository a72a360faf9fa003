"""A name that nobody looks at is refused, at the call that it came in and with the nearest known one, before anything changed."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import conduit
from conduit.errors import ConduitError

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs.camera", "uint8", (2,), observation=True),
        conduit.Field("obs.joints", "float32", (2,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32"),
        conduit.Field("value", "float32"),
        conduit.Field("tokens", "int32", (4,), ragged=True),
    ]
)
PLAIN = conduit.Schema([conduit.Field("obs", "float32", (2,), observation=True), conduit.Field("reward", "float32")])
ROW = {
    "obs": {"camera": np.zeros(2, np.uint8), "joints": np.zeros(2, np.float32)},
    "action": 0,
    "reward": 0.0,
    "value": 0.0,
    "tokens": np.zeros(2, np.int32),
}


@pytest.fixture(scope="module")
def engine():
    tables = {
        "replay": conduit.Table(SCHEMA, capacity=400, statistics=("reward",), max_length=4),
        "plain": conduit.Table(PLAIN, capacity=400, priorities=conduit.Priorities()),
        "more": conduit.Table(PLAIN, capacity=400),
    }
    policies = {"policy": {"weight": np.zeros(2, np.float32), "bias": np.zeros(2, np.float32)}}
    with conduit.Engine.create(f"names-{os.getpid()}", tables, policies=policies) as made:
        yield made


def replaced(row, old, new):
    return {new if key == old else key: value for key, value in row.items()}


def step(engine, name):
    with engine.writer("replay") as writer, writer.step() as row:
        row[name] = 0.0


def attribute(engine):
    with engine.writer("replay") as writer, writer.step() as row:
        row.rewerd = 0.0


def appended(engine, **row):
    with engine.writer("replay") as writer:
        writer.append(**{**ROW, **row})


def extended(engine, **columns):
    with engine.writer("plain") as writer:
        writer.extend(columns)


def reserved(engine):
    with engine.writer("replay") as writer, writer.step() as row:
        row.reserve("token", 1)


def ended(engine, final):
    with engine.writer("replay") as writer:
        writer.append(**ROW, terminated=True, final=final)


def rollout(engine, step_):
    window = conduit.Sequence(2)
    fields = ("reward", "value", "terminated", "truncated", "mask", "is_first", "lengths")
    return engine.loader("replay", batch_size=2, window=window, fields=fields, batch_transforms=step_)


def loader(engine, **options):
    return engine.loader("replay", batch_size=2, **options)


def mix(engine, tables=("plain", "more"), **options):
    return engine.mixed_loader(dict.fromkeys(tables, 1.0), batch_size=4, **options)


OBSERVATION = ROW["obs"]
CASES = {
    # what is asked, and the name that it should have been
    "writer's table": (lambda e: e.writer("replai"), "replay"),
    "loader's table": (lambda e: e.loader("Replay", batch_size=2), "replay"),
    "scan": (lambda e: e.table("plan").scan(), "plain"),
    "statistics' table": (lambda e: e.table("replays").statistics, "replay"),
    "delete": (lambda e: e.table("plein").delete([]), "plain"),
    "freeze": (lambda e: e.table("plein").freeze(), "plain"),
    "limiter": (lambda e: e.table("plein").limiter, "plain"),
    "schema": (lambda e: e.table("plein").schema, "plain"),
    "mix's tables": (lambda e: mix(e, ("plain", "moar")), "more"),
    "mix's min_rows": (lambda e: mix(e, min_rows={"plane": 4}), "plain"),
    "mix's sampling": (lambda e: mix(e, sampling={"plane": conduit.Prioritized()}), "plain"),
    "mix's transform": (lambda e: mix(e, transform={"rewards": conduit.scale(2.0)}), "reward"),
    "mix's fields": (lambda e: mix(e, fields=["obs", "rewards"]), "reward"),
    "policy": (lambda e: e.policy("polcy"), "policy"),
    "publish": (
        lambda e: e.policy().publish({"weights": np.zeros(2, np.float32), "bias": np.zeros(2, np.float32)}),
        "weight",
    ),
    "transform": (lambda e: loader(e, transform={"rewards": conduit.scale(2.0)}), "reward"),
    "transform of a parent": (lambda e: loader(e, transform={"ops": conduit.scale(2.0)}), "obs"),
    "rename": (lambda e: loader(e, rename={"rewards": "r"}), "reward"),
    "mix's rename": (lambda e: mix(e, rename={"rewards": "r"}), "reward"),
    "ragged": (lambda e: loader(e, ragged={"token": "pack"}), "tokens"),
    "fields": (lambda e: loader(e, fields=["rewards"]), "reward"),
    "next observation": (lambda e: loader(e, fields=["next_obs.camra"]), "next_obs.camera"),
    "gae's values": (lambda e: rollout(e, conduit.gae(values="values")), "value"),
    "gae's reward": (lambda e: rollout(e, conduit.gae(reward="rewards")), "reward"),
    "returns_to_go": (lambda e: rollout(e, conduit.returns_to_go(reward="rewards")), "reward"),
    "normalize_advantages": (
        lambda e: rollout(e, (conduit.gae(), conduit.normalize_advantages(name="advantage"))),
        "advantages",
    ),
    "append": (lambda e: appended(e, rewards=1.0), "reward"),
    "append, nested": (lambda e: appended(e, obs=replaced(OBSERVATION, "camera", "camra")), "camera"),
    "append, dotted": (lambda e: appended(e, **{"obs.camra": 0}), "obs.camera"),
    "final": (lambda e: ended(e, {"camra": OBSERVATION["camera"], "joints": OBSERVATION["joints"]}), "camera"),
    "step": (lambda e: step(e, "rewards"), "reward"),
    "step's attribute": (attribute, "reward"),
    "reserve": (reserved, "tokens"),
    "extend": (
        lambda e: extended(e, obs=np.zeros((2, 2), np.float32), rewards=np.zeros(2, np.float32)),
        "reward",
    ),
    "statistics' update": (lambda e: e.table("replay").statistics.update(rewards=1.0), "reward"),
    "statistics' read": (lambda e: e.table("replay").statistics.read("rewards"), "reward"),
    "table's statistics": (lambda e: conduit.Table(SCHEMA, 400, statistics=("rewards",)), "reward"),
    "mean_lengths": (lambda e: conduit.Table(SCHEMA, 400, mean_lengths={"token": 2}), "tokens"),
    "a schema's field": (lambda e: SCHEMA["rewards"], "reward"),
    "nest": (lambda e: SCHEMA.nest({"rewards": 1.0}), "reward"),
    "observation": (lambda e: conduit.Schema.from_example({"state": 0, "reward": 0.0}, observation="stat"), "state"),
    "a schema's document": (
        lambda e: conduit.Schema.from_document(
            {"format": 1, "fields": [{"name": "a", "dtype": "int8", "shape": [], "raged": True}]}
        ),
        "ragged",
    ),
}


@pytest.mark.parametrize(("ask", "right"), CASES.values(), ids=CASES.keys())
def test_a_misspelt_name_is_refused_with_the_nearest_known_one(engine, ask, right):
    rows = {name: engine.table(name).scan().rows for name in engine.tables}
    with pytest.raises(ConduitError) as caught:
        ask(engine)
    text = str(caught.value)
    assert f"did you mean `{right}`?" in text
    assert {name: engine.table(name).scan().rows for name in engine.tables} == rows


NO_MAPPINGS = {
    "tables": lambda e: conduit.Engine.create("never", ["replay"]),
    "policies": lambda e: conduit.Engine.create("never", {"t": conduit.Table(PLAIN, 400)}, policies=["policy"]),
    "a policy": lambda e: conduit.Engine.create("never", {}, policies={"policy": [1]}),
    "names of a policy": lambda e: conduit.Engine.create("never", {}, policies={"policy": {1: np.zeros(2)}}),
    "publish": lambda e: e.policy().publish([1]),
    "mix's tables": lambda e: e.mixed_loader(["plain"], batch_size=4),
    "transform": lambda e: loader(e, transform=["reward"]),
    "ragged": lambda e: loader(e, ragged=["tokens"]),
    "rename": lambda e: loader(e, rename=["reward"]),
    "fields": lambda e: loader(e, fields="reward"),
    "no fields": lambda e: loader(e, fields=3),
    "mean_lengths": lambda e: conduit.Table(SCHEMA, 400, mean_lengths=["tokens"]),
    "statistics": lambda e: conduit.Table(SCHEMA, 400, statistics="reward"),
    "update": lambda e: e.table("replay").statistics.update(["reward"]),
    "update twice": lambda e: e.table("replay").statistics.update({"reward": 1.0}, reward=1.0),
    "extend": lambda e: e.writer("plain").extend([1]),
    "extra": lambda e: e.checkpoint("/nowhere", extra=["a"]),
}


@pytest.mark.parametrize("ask", NO_MAPPINGS.values(), ids=NO_MAPPINGS.keys())
def test_what_is_no_mapping_of_names_is_one_of_conduits_errors(engine, ask):
    with pytest.raises(ConduitError):
        ask(engine)


def test_a_slot_without_a_staleness_is_an_option_that_nobody_looks_at(engine):
    with pytest.raises(ConduitError, match=r"max_staleness of at least 0 versions together with policy=.*got None and"):
        loader(engine, policy=engine.policy())


def test_an_option_of_a_command_that_does_not_exist_is_refused_with_the_nearest(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "conduit.cli", "import", "engine", "table", str(tmp_path), "--colum", "a=b"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--column" in done.stderr


def test_a_field_that_is_mapped_twice_on_the_command_line_is_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "conduit.cli", "import", "engine", "t", str(tmp_path), "--column=a=b", "--column=a=c"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "Expected each field once, got --column a=b and --column a=c" in done.stderr


def test_a_schemas_document_with_an_unknown_key_is_refused():
    document = json.loads(PLAIN.to_json())
    document["version"] = 2
    with pytest.raises(ConduitError, match="only the keys format, fields"):
        conduit.Schema.from_json(json.dumps(document))
