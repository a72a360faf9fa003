"""Transforms and plans: data that says what a batch is made of."""

import dataclasses
import math
import pickle

import numpy as np
import pytest

from conduit import Field, Schema, cast, scale
from conduit.errors import ConfigError
from conduit.field import DTYPES
from conduit.kernels.spec.make_plan import make_plan
from conduit.kernels.spec.transforms import FLOATS, Transform

SCHEMA = Schema(
    [
        Field("obs.camera", "uint8", (4, 84, 84), observation=True),
        Field("obs.pose.0", "float32", (3,), observation=True),
        Field("obs.pose.1", "bfloat16", (), observation=True),
        Field("action", "int64"),
        Field("done", "bool"),
    ]
)
EVERY = [
    *("obs.camera", "obs.pose.0", "obs.pose.1", "action", "done"),
    *("next_obs.camera", "next_obs.pose.0", "next_obs.pose.1", "terminated", "truncated"),
]


def test_scale_and_cast_are_data_that_can_be_compared_and_sent():
    assert scale(1 / 255) == Transform("float32", 1 / 255, 0.0)
    assert cast("float16") == Transform("float16")
    assert pickle.loads(pickle.dumps(scale(2.0, offset=1.0))) == scale(2, offset=1)
    assert scale(2.0).is_affine
    assert scale(1.0, offset=0.5).is_affine
    assert not scale(1.0).is_affine
    with pytest.raises(dataclasses.FrozenInstanceError):
        scale(2.0).factor = 3.0


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: cast("float8"), "one of bool, int8.*got 'float8'"),
        (lambda: cast(np.float32), "one of bool"),
        (lambda: scale(2.0, dtype="int32"), "a float dtype for a scaled field.*got 'int32'"),
        (lambda: scale(2.0, dtype="double"), "a float dtype.*got 'double'"),
        (lambda: Transform("uint8", 2.0), "a float dtype for a scaled field"),
        (lambda: scale(math.nan), "a number as factor, got nan"),
        (lambda: scale(1.0, offset=math.inf), "a finite factor and offset, got 1.0 and inf"),
    ],
)
def test_a_transform_that_means_nothing_is_refused(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()


def test_casts_that_would_lose_what_a_value_is_are_refused():
    refused = set()
    for source in DTYPES:
        for dtype in DTYPES:
            try:
                cast(dtype).check_source(source, "x")
            except ConfigError:
                refused.add((source, dtype))
    with pytest.raises(ConfigError, match=r"transform\['x'\]"):
        cast("int8").check_source("float32", "x")
    integers = [name for name in DTYPES if name not in FLOATS and name != "bool"]
    to_integers = {(source, dtype) for source in FLOATS for dtype in (*integers, "bool")}
    assert refused == to_integers | {(source, "bool") for source in integers}


def test_a_plan_lists_every_output_in_order():
    plan = make_plan(SCHEMA, 32)
    assert plan.names == tuple(EVERY)
    assert [output.rows for output in plan.outputs] == ["anchor"] * 5 + ["following"] * 3
    assert [item.name for item in plan.computed] == ["terminated", "truncated"]
    assert plan.outputs[2].numpy_dtype == np.uint16
    assert plan.sample_bytes == 2 * (4 * 84 * 84 + 12 + 2) + 8 + 1


def test_fields_are_chosen_in_their_order():
    plan = make_plan(SCHEMA, 1, fields=["truncated", "next_obs.pose.0", "action"])
    assert plan.names == ("truncated", "next_obs.pose.0", "action")
    assert make_plan(SCHEMA, 1, fields=iter(["done"])).names == ("done",)


def test_the_more_exactly_named_transform_wins_whatever_the_order():
    inner, outer, middle = scale(1 / 255), cast("float64"), cast("float16")
    for given in (
        {"obs": outer, "obs.pose": middle, "obs.camera": inner},
        {"obs.camera": inner, "obs.pose": middle, "obs": outer},
    ):
        plan = make_plan(SCHEMA, 1, None, given)
        chosen = {output.name.removeprefix("next_"): output.transform for output in plan.outputs}
        assert chosen["obs.camera"] == inner
        assert chosen["obs.pose.0"] == chosen["obs.pose.1"] == middle
        assert chosen["action"] == Transform("int64")
        both = [output.transform for output in plan.outputs if "camera" in output.name]
        assert both == [inner, inner]


def test_the_fingerprint_tells_plans_apart_and_equal_ones_together():
    plans = [
        make_plan(SCHEMA, 32),
        make_plan(SCHEMA, 33),
        make_plan(SCHEMA, 32, None, {"action": cast("int32")}),
        make_plan(SCHEMA, 32, None, {"obs.camera": scale(1 / 255)}),
        make_plan(SCHEMA, 32, None, {"obs.camera": scale(1 / 256)}),
        make_plan(SCHEMA, 32, fields=EVERY[:-1]),
        make_plan(SCHEMA, 32, fields=["action"]),
    ]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert make_plan(SCHEMA, 32, fields=EVERY).fingerprint == plans[0].fingerprint
    assert make_plan(SCHEMA, 32) == plans[0]
