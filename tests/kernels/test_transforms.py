"""Transforms of single fields against their references, bit for bit, with poisoned outputs."""

import ctypes
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import conduit
from conduit.errors import ConfigError, FieldError
from conduit.field import DTYPES
from conduit.kernels.cpu import augment
from conduit.kernels.cpu.gather import OP_REFUSED
from conduit.kernels.reference import gather
from conduit.kernels.spec.conversion import as_steps, fuse
from conduit.kernels.spec.make_plan import make_plan
from conduit.kernels.spec.plan import Output
from conduit.kernels.spec.transforms import Transform
from conduit.store.tables.statistics import Moments

POISON = 0xA5


def output_of(field, pipeline, lanes=()):
    done = fuse(as_steps(pipeline, field.name), field)
    return Output(field.name, field, "lanes", lanes, done.transform, done.classes, done.normalize, done.shift)


def run(output, column, index, *, draw=(0, 0), pick=0, moments=None):
    """One output made by its row operation, from rows of a contiguous column; what it leaves out stays poisoned."""
    size = len(index)
    index = np.ascontiguousarray(index, np.int64)
    shape = (*index.shape, *output.shape)
    memory = np.full(output.numpy_dtype.itemsize * math.prod(shape) + 128, POISON, np.uint8)
    start = -memory.ctypes.data % 64
    out = np.ndarray(shape, output.numpy_dtype, memory, start)
    words = np.array(draw, np.uint64).view(np.int64)
    scales = np.zeros((2, *output.field.shape))
    if moments is not None and output.normalize is not None:
        scales[0], scales[1] = moments.mean, 1.0 / np.sqrt(moments.variance + output.normalize.eps)
    operation = augment.describe(
        output,
        column.ctypes.data,
        column.strides[0],
        out.ctypes.data,
        index.ctypes.data,
        size,
        pick=pick,
        random=words.ctypes.data,
        statistics=(scales[0].ctypes.data, scales[1].ctypes.data)
        if output.field.shape
        else (scales.ctypes.data, scales.ctypes.data + 8),
    )
    slots = np.arange(size, dtype=np.int64)
    call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(int(operation[0]))
    call(operation.ctypes.data, slots.ctypes.data, size, 0)
    assert (memory[:start] == POISON).all()
    assert (memory[start + out.nbytes :] == POISON).all()
    return out, operation


def expected(output, column, index, moments=None):
    rows = gather.transform(output, column[np.maximum(index, 0)].reshape(-1, *output.field.shape), moments)
    rows = rows.reshape(*index.shape, *output.shape)
    rows[index < 0] = 0
    return rows


def same(a, b):
    """Equal bits, any NaN equal to any other."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    if a.dtype.kind == "f":
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)]))
    else:
        np.testing.assert_array_equal(a, b)


def values_of(dtype, shape):
    if dtype == "bfloat16":
        floats = hnp.arrays(np.float32, shape, elements=st.floats(width=32, allow_nan=False))
        return floats.map(gather.to_bfloat16)
    return hnp.arrays(DTYPES[dtype], shape)


CASES = [
    ("float32", conduit.clip(-1, 1)),
    ("float32", (conduit.clip(-2, 3.5), conduit.scale(-0.3, offset=0.1))),
    ("float32", (conduit.scale(1.7), conduit.clip(-1, None), conduit.cast("float64"))),
    ("float64", (conduit.clip(None, 0.25),)),
    ("bfloat16", (conduit.scale(0.1), conduit.clip(-0.5, 0.5), conduit.cast("bfloat16"))),
    ("float16", (conduit.clip(-3, 3), conduit.cast("float16"))),
    ("uint8", (conduit.scale(1 / 255), conduit.clip(0.1, 0.9))),
    ("int64", conduit.clip(-3, 2**40)),
    ("int64", (conduit.clip(0, 255), conduit.cast("uint8"))),
    ("int32", (conduit.clip(-5, None), conduit.cast("float32"))),
    ("int16", conduit.normalize()),
    ("float32", (conduit.normalize(eps=1e-3), conduit.clip(-2, 2))),
    ("bfloat16", (conduit.normalize(dtype="float64"), conduit.scale(0.5, dtype="float64"))),
    ("uint8", conduit.one_hot(5)),
    ("int8", (conduit.one_hot(3, dtype="uint8"),)),
    ("bool", (conduit.one_hot(2), conduit.scale(2.0, offset=-1.0))),
    ("int64", (conduit.one_hot(4, dtype="bfloat16"),)),
]


@pytest.mark.parametrize(("dtype", "pipeline"), CASES, ids=[f"{dtype}-{pipeline}"[:60] for dtype, pipeline in CASES])
@settings(max_examples=40)
@given(data=st.data())
def test_a_pipeline_gives_its_references_bits(dtype, pipeline, data):
    shape = data.draw(st.sampled_from([(), (1,), (3,), (2, 2), (17,)]))
    field = conduit.Field("x", dtype, shape)
    output = output_of(field, pipeline, (2,))
    column = data.draw(values_of(dtype, (5, *shape)))
    moments = None
    if output.normalize is not None:
        number = st.floats(-1e3, 1e3)
        moments = Moments(
            3,
            data.draw(hnp.arrays(np.float64, shape, elements=number)),
            data.draw(hnp.arrays(np.float64, shape, elements=number)) ** 2,
        )
    index = np.array(data.draw(st.lists(st.lists(st.integers(-1, 4), min_size=2, max_size=2), min_size=1, max_size=4)))
    with np.errstate(all="ignore"):
        wanted = expected(output, column, index, moments)
    out, _ = run(output, column, index, moments=moments)
    same(out, wanted)


def affine_steps():
    number = st.floats(-4, 4).map(lambda x: round(x, 2))
    scales = st.builds(lambda f, o: conduit.scale(f, offset=o, dtype="float64"), number.filter(bool), number)
    clips = st.tuples(number, number).map(lambda pair: conduit.clip(min(pair), max(pair)))
    return st.lists(scales | clips, max_size=5).map(tuple)


@given(steps=affine_steps(), x=st.floats(-10, 10))
@example(steps=(conduit.clip(-1, 1), conduit.scale(-2.0, dtype="float64"), conduit.clip(0, 5)), x=3.0)
def test_a_folded_pipeline_is_its_steps_one_after_the_other(steps, x):
    done = fuse(steps, conduit.Field("x", "float64")).transform
    value = x
    for step in steps:
        value = (
            value * step.factor + step.offset if isinstance(step, Transform) else min(max(value, step.low), step.high)
        )
    folded = min(max(x * done.factor + done.offset, done.low), done.high)
    assert folded == pytest.approx(value, rel=1e-12, abs=1e-9)


def test_nan_stays_nan_and_infinities_meet_the_bounds():
    output = output_of(conduit.Field("x", "float32"), conduit.clip(-1, 1))
    column = np.array([np.nan, np.inf, -np.inf, 0.5], np.float32)
    out, _ = run(output, column, np.arange(4))
    np.testing.assert_array_equal(out, np.array([np.nan, 1, -1, 0.5], np.float32))


def test_large_integers_are_clipped_exactly():
    output = output_of(conduit.Field("x", "int64"), conduit.clip(None, 2**53))
    column = np.array([2**53 - 1, 2**53 + 1, -(2**63), 2**63 - 1])
    out, _ = run(output, column, np.arange(4))
    assert out.tolist() == [2**53 - 1, 2**53, -(2**63), 2**53]


def test_before_the_first_update_values_are_delivered_as_they_are(engine_name):
    with engine_of(engine_name, statistics=("obs",)) as engine:
        fill(engine, 40)
        loader = engine.loader("replay", batch_size=8, format="numpy", transform={"obs": conduit.normalize()})
        batch = loader.next()
        np.testing.assert_array_equal(batch["obs"], rows_of(engine, batch, "obs"))


IMAGES = [((6, 5), (-2, -1)), ((2, 4, 7), (-2, -1)), ((4, 7, 3), (0, 1)), ((1, 1), (-2, -1)), ((2, 3, 4, 2), (1, 2))]


@pytest.mark.parametrize(("shape", "axes"), IMAGES, ids=[str(shape) for shape, _ in IMAGES])
@pytest.mark.parametrize(
    "pipeline", [(), (conduit.scale(1 / 255),), (conduit.cast("float16"),), (conduit.clip(9, 200),)]
)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**64 - 1), batch=st.integers(0, 2**40), pad=st.integers(1, 9), pick=st.integers(0, 100))
def test_a_moved_image_is_the_padded_and_cropped_one(shape, axes, pipeline, seed, batch, pad, pick):
    output = output_of(conduit.Field("x", "uint8", shape), (*pipeline, conduit.random_shift(pad, axes=axes)), (2,))
    column = np.random.default_rng(0).integers(0, 256, (5, *shape), np.uint8)
    index = np.array([[0, 1], [4, 4], [-1, 2]])
    out, _ = run(output, column, index, draw=(seed, batch), pick=pick)
    wanted = expected(output, column, index)
    for slot in range(3):
        down, right = gather.move(seed, batch, pick, slot, pad)
        for lane in range(2):
            wanted[slot, lane] = gather.moved(wanted[slot, lane], axes, down, right)
    same(out, wanted)


def test_a_normalized_image_is_moved_with_its_statistics():
    shape = (3, 4)
    output = output_of(conduit.Field("x", "uint8", shape), (conduit.normalize(), conduit.random_shift(2)))
    column = np.arange(12, dtype=np.uint8).reshape(1, *shape)
    moments = Moments(9, np.arange(12.0).reshape(shape), np.ones(shape))
    out, _ = run(output, column, np.zeros(20, np.int64), moments=moments)
    assert (out == 0).all()


def test_moves_reach_both_bounds_and_are_even():
    moves = np.array([gather.move(7, batch, 0, slot, 4) for batch in range(40) for slot in range(64)])
    assert moves.min() == -4
    assert moves.max() == 4
    for axis in (0, 1):
        counts = np.bincount(moves[:, axis] + 4, minlength=9)
        assert ((counts - len(moves) / 9) ** 2 / (len(moves) / 9)).sum() < 30  # chi-square, 8 degrees: p ~ 2e-4


# -- through a loader

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "float32", (3,), observation=True),
        conduit.Field("camera", "uint8", (6, 6), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32"),
    ]
)


def engine_of(name, schema=SCHEMA, **options):
    return conduit.Engine.create(name, {"replay": conduit.Table(schema, 1000, max_n_step=4, max_stack=3, **options)})


def fill(engine, count, *, ends=False, classes=4):
    rng = np.random.default_rng(3)
    with engine.writer("replay") as writer:
        for step in range(count):
            row = {
                "obs": rng.normal(size=3).astype(np.float32),
                "camera": rng.integers(0, 256, (6, 6), np.uint8),
                "action": int(rng.integers(classes)),
                "reward": float(rng.normal(0, 2)),
            }
            end = ends and step % 7 == 6
            final = {"obs": row["obs"], "camera": row["camera"]} if end else None
            writer.append(**row, terminated=end, final=final)


def rows_of(engine, batch, name):
    return engine._views["replay"].columns[name][np.asarray(batch.ids) & (2**40 - 1)]


def test_rewards_are_clipped_one_by_one_inside_a_return(engine_name):
    with engine_of(engine_name) as engine:
        fill(engine, 200)
        pipeline = (conduit.scale(2.0, offset=0.5), conduit.clip(-1, 1))
        window = conduit.Transition(n_step=3, gamma=0.9)
        loader = engine.loader("replay", batch_size=64, window=window, format="numpy", transform={"reward": pipeline})
        batch = loader.next()
        column = engine._views["replay"].columns["reward"].astype(np.float64)
        rows = batch.ids & (2**40 - 1)
        wanted = sum(0.9**k * np.clip(2.0 * column[rows + k] + 0.5, -1, 1) for k in range(3))
        assert batch["reward"].dtype == np.float32
        np.testing.assert_array_equal(batch["reward"], wanted.astype(np.float32))
        double = engine.loader(
            "replay",
            batch_size=64,
            window=window,
            format="numpy",
            transform={"reward": (*pipeline, conduit.cast("float64"))},
        ).next()
        np.testing.assert_allclose(double["reward"], wanted, rtol=1e-15)


def test_a_one_step_reward_is_clipped(engine_name):
    with engine_of(engine_name) as engine:
        fill(engine, 100)
        batch = engine.loader("replay", batch_size=32, format="numpy", transform={"reward": conduit.clip(-1, 1)}).next()
        np.testing.assert_array_equal(batch["reward"], np.clip(rows_of(engine, batch, "reward"), -1, 1))


@pytest.mark.parametrize("same_", [False, True])
def test_observations_move_apart_or_alike_and_batches_can_be_made_again(engine_name, same_):
    with engine_of(engine_name) as engine:
        fill(engine, 100, ends=True)
        loader = engine.loader(
            "replay",
            batch_size=16,
            seed=11,
            format="numpy",
            window=conduit.Transition(n_step=1, stack=3),
            transform={"camera": (conduit.random_shift(2, same=same_), conduit.scale(1 / 255))},
        )
        first = {name: np.array(array) for name, array in loader.next().items()}
        index = loader._maker.scratch.index
        column = engine._views["replay"].columns["camera"]
        plain = {"camera": column[index["stack"]], "next_camera": column[index["following_stack"]]}
        place = SCHEMA.names.index("camera")
        for name, apart in (("camera", 0), ("next_camera", 0 if same_ else 1)):
            images = plain[name].astype(np.float32) * np.float32(1 / 255)
            for slot in range(16):
                down, right = gather.move(11, 0, 2 * place + apart, slot, 2)
                for frame in range(3):
                    wanted = gather.moved(images[slot, frame], (-2, -1), down, right)
                    np.testing.assert_array_equal(first[name][slot, frame], wanted)
        assert not np.array_equal(loader.next()["camera"], first["camera"])
        loader.sampler.batch = 0
        again = loader.next()
        for name, array in first.items():
            np.testing.assert_array_equal(again[name], array)


def test_a_class_out_of_range_is_refused_with_its_field(engine_name):
    with engine_of(engine_name) as engine:
        fill(engine, 50, classes=4)
        loader = engine.loader("replay", batch_size=32, format="numpy", transform={"action": conduit.one_hot(3)})
        for _ in range(2):  # nothing is skipped
            with pytest.raises(FieldError, match="from 0 to 2") as info:
                loader.next()
            assert info.value.at == "action"
        assert loader.stats.batches == 0
        batch = engine.loader("replay", batch_size=32, format="numpy", transform={"action": conduit.one_hot(4)}).next()
        np.testing.assert_array_equal(batch["action"].argmax(-1), rows_of(engine, batch, "action"))
        np.testing.assert_array_equal(batch["action"].sum(-1), 1)


def test_an_operation_counts_what_it_refuses():
    output = output_of(conduit.Field("x", "int8", (2,)), conduit.one_hot(3))
    _, operation = run(output, np.array([[0, -1], [3, 2]], np.int8), np.array([0, 1, -1]))
    assert operation[OP_REFUSED // 8] == 2


def test_a_parents_pipeline_holds_for_all_below_that_are_not_named(engine_name):
    schema = conduit.Schema(
        [
            conduit.Field("obs.a", "float32", (2,), observation=True),
            conduit.Field("obs.b", "float32", (2,), observation=True),
            conduit.Field("reward", "float32"),
        ]
    )
    plan = make_plan(schema, 4, transform={"obs": conduit.clip(-1, 1), "obs.b": conduit.cast("float64")})
    made = {output.name: output.transform for output in plan.outputs}
    assert made["obs.a"] == made["next_obs.a"] == Transform("float32", low=-1.0, high=1.0)
    assert made["obs.b"] == made["next_obs.b"] == Transform("float64")


def test_a_single_transform_stands_for_a_pipeline():
    plans = [make_plan(SCHEMA, 4, transform={"obs": step}) for step in (conduit.scale(2.0), (conduit.scale(2.0),))]
    assert plans[0] == plans[1]


DIFFERENT = [
    None,
    {"obs": conduit.clip(-1, 1)},
    {"obs": conduit.clip(-1, 2)},
    {"obs": conduit.normalize()},
    {"obs": conduit.normalize(eps=1e-3)},
    {"camera": conduit.random_shift(4)},
    {"camera": conduit.random_shift(4, same=True)},
    {"action": conduit.one_hot(4)},
    {"action": conduit.one_hot(5)},
    {"reward": conduit.clip(-1, 1)},
    {"reward": conduit.clip(None, 1)},
]


def test_plans_with_other_transforms_have_other_fingerprints():
    plans = [make_plan(SCHEMA, 4, conduit.Transition(3), transform) for transform in DIFFERENT]
    assert len({plan.fingerprint for plan in plans}) == len(DIFFERENT)
    for plan in plans:
        again = pickle.loads(pickle.dumps(plan))
        assert again == plan
        assert again.fingerprint == plan.fingerprint


def test_a_fingerprint_is_the_same_in_another_process():
    code = """
import conduit, json
from conduit.kernels.spec.make_plan import make_plan
schema = conduit.Schema([conduit.Field("obs", "float32", (3,), observation=True), conduit.Field("reward", "float32")])
plan = make_plan(schema, 4, transform={"obs": (conduit.scale(0.1), conduit.clip(None, 1))})
print(json.dumps(plan.fingerprint))
"""
    root = Path(__file__).parents[2]
    prints = {
        json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=root).stdout)
        for _ in range(2)
    }
    assert len(prints) == 1


REFUSED = [
    ("clip-order", lambda: conduit.clip(2, 1), "low of at most high"),
    ("clip-nan", lambda: conduit.clip(math.nan, 1), "a number as low, got nan"),
    ("classes", lambda: conduit.one_hot(0), "a number of classes of at least 1"),
    ("pad", lambda: conduit.random_shift(0), "pad of 1"),
    ("axes", lambda: conduit.random_shift(2, axes=(0, 2)), "neighbouring axes"),
    ("eps", lambda: conduit.normalize(eps=-1.0), "eps of at least 0"),
    ("normalize-dtype", lambda: conduit.normalize(dtype="int8"), "float dtype"),
    ("no-step", lambda: make_plan(SCHEMA, 4, transform={"obs": lambda x: x}), r"transform\['obs'\]"),
    ("no-field", lambda: make_plan(SCHEMA, 4, transform={"ob": conduit.clip(0, 1)}), "'ob'"),
    ("float-classes", lambda: make_plan(SCHEMA, 4, transform={"obs": conduit.one_hot(2)}), r"transform\['obs'\]"),
    (
        "late-classes",
        lambda: make_plan(SCHEMA, 4, transform={"action": (conduit.clip(0, 1), conduit.one_hot(2))}),
        "first step",
    ),
    (
        "late-normalize",
        lambda: make_plan(SCHEMA, 4, transform={"obs": (conduit.clip(0, 1), conduit.normalize())}),
        "first step",
    ),
    ("no-image", lambda: make_plan(SCHEMA, 4, transform={"obs": conduit.random_shift(2)}), "Expected an image"),
    (
        "two-moves",
        lambda: make_plan(SCHEMA, 4, transform={"camera": (conduit.random_shift(2),) * 2}),
        "one random_shift",
    ),
    (
        "early-cast",
        lambda: make_plan(SCHEMA, 4, transform={"action": (conduit.cast("int8"), conduit.clip(0, 1))}),
        "last step",
    ),
    ("half-bound", lambda: make_plan(SCHEMA, 4, transform={"action": conduit.clip(0.5, 2)}), "whole numbers"),
    (
        "classes-in-returns",
        lambda: make_plan(SCHEMA, 4, conduit.Transition(3), transform={"reward": conduit.normalize()}),
        "n-step returns",
    ),
]


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_work_is_refused_when_it_is_declared(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_normalizing_without_statistics_is_refused_with_the_remedy(engine_name):
    with engine_of(engine_name) as engine, pytest.raises(ConfigError, match=r"statistics=\('obs',\)"):
        engine.loader("replay", batch_size=4, transform={"obs": conduit.normalize()})
