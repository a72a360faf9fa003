"""Row kernels against `kernels.reference.gather`, bit for bit: every pair of dtypes, odd shapes, padded strides, poisoned outputs."""

import ctypes
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit import Field, cast, scale
from conduit.errors import ConfigError
from conduit.field import DTYPES
from conduit.kernels.cpu import gather
from conduit.kernels.reference import gather as reference
from conduit.kernels.spec.plan import Output
from conduit.kernels.spec.transforms import FLOATS, Transform
from conduit.store.format.sizes import row_stride

POISON = 0xA5
GUARD = 256
_CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
SHAPES = [(), (1,), (7,), (16,), (31,), (33,), (128,), (3, 5), (2, 3, 11), (4, 3, 2, 5)]


def allowed(source, dtype):
    try:
        Transform(dtype).check_source(source, "x")
    except ConfigError:
        return False
    return True


PAIRS = [pair for pair in itertools.product(DTYPES, DTYPES) if allowed(*pair)]


def values_of(dtype, shape, count, seed=0):
    """Rows [count, *shape] of a field: random ones, and every special value."""
    rng = np.random.default_rng(seed)
    numpy_dtype = DTYPES[dtype]
    size = count * int(np.prod(shape, dtype=int))
    if dtype == "bool":
        flat = rng.random(size) < 0.5
    elif dtype in ("float16", "bfloat16"):
        flat = rng.integers(0, 2**16, size, np.uint16).view(numpy_dtype)
    elif dtype in ("float32", "float64"):
        # bit patterns, so that all exponents occur, and numbers, so that most survive a conversion
        bits = rng.integers(0, 2**63, size, np.uint64) * 2 + rng.integers(0, 2, size, np.uint64)
        flat = bits.astype(f"uint{8 * numpy_dtype.itemsize}").view(numpy_dtype)
        near = rng.standard_normal(size).astype(numpy_dtype)
        flat = np.where(rng.random(size) < 0.5, flat, near)
        info = np.finfo(numpy_dtype)
        special = [
            0.0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
            info.max,
            -info.max,
            info.tiny,
            info.smallest_subnormal,
            65519.9,
            65520,
        ]
        special += [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-23, 2**-25, 3 * 2**-26]
        with np.errstate(over="ignore"):
            flat[: len(special)] = np.array(special[: size or None])[: len(flat[: len(special)])]
    else:
        info = np.iinfo(numpy_dtype)
        flat = rng.integers(info.min, info.max, size, numpy_dtype, endpoint=True)
        small = rng.integers(0, 100, size).astype(numpy_dtype)
        flat = np.where(rng.random(size) < 0.5, flat, small)
        special = np.array([info.min, info.max, 0, 1, info.max - 1, info.max // 2 + 1], numpy_dtype)[:size]
        flat[: len(special)] = special
    return np.asarray(flat).reshape(count, *shape)


def column_of(field, values):
    """The rows in memory as a table has them: row stride of `layout.row_stride`, poison in between."""
    stride = row_stride(field)
    memory = np.full(stride * len(values), POISON, np.uint8)
    inner = np.empty(field.shape, values.dtype).strides
    column = np.ndarray(values.shape, values.dtype, memory, strides=(stride, *inner))
    column[...] = values
    return memory, column


def run(output, values, index, slots, batch):
    """The kernel's output [batch, *shape], poisoned where no listed slot is, and whether its guards are whole."""
    memory, column = column_of(output.field, values)
    size = output.row_bytes * batch
    out = np.full(size + 2 * GUARD + 64, POISON, np.uint8)
    start = GUARD + -(out.ctypes.data + GUARD) % 64
    index, slots = np.asarray(index, np.int64), np.asarray(slots, np.int64)
    descriptor = gather.describe(
        output, column.ctypes.data, column.strides[0], out.ctypes.data + start, index.ctypes.data, batch
    )
    before = memory.copy()
    function = _CALL(int(descriptor[0]))
    assert function(descriptor.ctypes.data, slots.ctypes.data, len(slots), 0) == 0
    assert (memory == before).all()
    assert (out[:start] == POISON).all()
    assert (out[start + size :] == POISON).all()
    return out[start : start + size].view(output.numpy_dtype).reshape(batch, *output.field.shape)


def check(output, values, seed=0):
    """Gather a random batch into half of its slots and compare with the reference."""
    rng = np.random.default_rng(seed)
    batch = 2 * len(values) + 3
    slots = rng.permutation(batch)[: batch // 2 + 1]
    index = rng.integers(0, len(values), batch)
    index[slots[: len(values)]] = np.arange(len(values))  # every row is drawn
    got = run(output, values, index, slots, batch)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = reference.transform(output, values[index[slots]])
    assert wanted.dtype == output.numpy_dtype
    same(got[slots], wanted, output.transform.dtype)
    untouched = np.setdiff1d(np.arange(batch), slots)
    assert (np.ascontiguousarray(got[untouched]).view(np.uint8) == POISON).all()


def same(got, wanted, dtype):
    """Equal bit for bit; of NaN only that it is one, since hardware and software keep different bits of it."""
    got, wanted = np.ascontiguousarray(got), np.ascontiguousarray(wanted)
    if dtype in FLOATS:
        nan = np.isnan(reference.from_bfloat16(wanted) if dtype == "bfloat16" else wanted)
        np.testing.assert_array_equal(np.isnan(reference.from_bfloat16(got) if dtype == "bfloat16" else got), nan)
        got, wanted = np.where(nan, 0, got), np.where(nan, 0, wanted)
    bits = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(bits), wanted.view(bits))


@pytest.mark.parametrize(("source", "dtype"), PAIRS)
def test_a_cast_equals_the_reference(source, dtype):
    for k, shape in enumerate(SHAPES):
        if (k + len(source) + len(dtype)) % 3 and shape:
            continue
        check(Output("x", Field("x", source, shape), "anchor", (), cast(dtype)), values_of(source, shape, 37, k), k)


@pytest.mark.parametrize(("source", "dtype"), list(itertools.product(DTYPES, FLOATS)))
def test_scaling_equals_the_reference(source, dtype):
    for k, (factor, offset) in enumerate([(1 / 255, 0.0), (2.0, -1.0), (1.0, 0.1), (-3e-5, 1e5)]):
        for shape in (SHAPES[k], SHAPES[-1 - k]):
            output = Output("x", Field("x", source, shape), "anchor", (), scale(factor, offset=offset, dtype=dtype))
            check(output, values_of(source, shape, 29, k), k)


@pytest.mark.parametrize(
    "row_bytes", [1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 33, 63, 64, 65, 127, 128, 129, 1000, 4097]
)
def test_rows_of_any_length_are_copied_whole(row_bytes):
    field = Field("x", "uint8", (row_bytes,))
    check(Output("x", field, "anchor", (), Transform("uint8")), values_of("uint8", (row_bytes,), 23))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_copied_bit_for_bit(dtype):
    for shape in SHAPES:
        values = values_of(dtype, shape, 19)
        output = Output("x", Field("x", dtype, shape), "anchor", (), cast(dtype))
        slots = np.arange(19)
        got = run(output, values, slots[::-1].copy(), slots, 19)
        assert got.tobytes() == values[::-1].tobytes()


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("affine", [False, True], ids=["cast", "scale"])
def test_every_one_of_the_65536_halves_is_converted_right(source, dtype, affine):
    values = np.arange(2**16, dtype=np.uint16).view(DTYPES[source]).reshape(512, 128)
    transform = scale(1 / 3, offset=0.25, dtype=dtype) if affine else cast(dtype)
    check(Output("x", Field("x", source, (128,)), "anchor", (), transform), values)


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float64", "float16"),
        ("float64", "bfloat16"),
        ("int64", "float16"),
        ("uint8", "bfloat16"),
    ],
)
def test_sixteen_bit_results_are_rounded_as_torch_rounds(source, dtype):
    values = values_of(source, (500,), 200)
    output = Output("x", Field("x", source, (500,)), "anchor", (), cast(dtype))
    index = np.arange(200)
    got = run(output, values, index, index, 200)
    wanted = torch.from_numpy(values.copy()).to(getattr(torch, dtype))
    same(got.view(np.uint16), wanted.view(torch.int16).numpy().view(np.uint16), dtype)


@pytest.mark.parametrize("source", ["uint8", "bool"])
@pytest.mark.parametrize("shape", [(16,), (48,), (3, 80), (7, 16)], ids=str)
@pytest.mark.parametrize("offset", [0.0, -0.5])
def test_a_large_scaled_image_is_written_past_the_caches_with_the_same_result(source, shape, offset):
    """Such batches take another kernel; the smaller ones above do not reach it."""
    elements = int(np.prod(shape))
    batch = gather._STREAM_BYTES // (4 * elements) + 5
    values = values_of(source, shape, 300)
    output = Output("x", Field("x", source, shape), "anchor", (), scale(1 / 255, offset=offset))
    assert gather._can_stream(output, batch)
    assert not gather._can_stream(output, batch // 2)
    rng = np.random.default_rng(1)
    slots = rng.permutation(batch)[: batch - 7]
    index = rng.integers(0, 300, batch)
    got = run(output, values, index, slots, batch)
    same(got[slots], reference.transform(output, values[index[slots]]), "float32")
    untouched = np.setdiff1d(np.arange(batch), slots)
    assert (np.ascontiguousarray(got[untouched]).view(np.uint8) == POISON).all()


def test_scaling_in_float32_costs_two_roundings_and_no_more():
    """The factor is rounded to float32, and so is the product."""
    values = np.arange(256, dtype=np.uint8).reshape(2, 128)
    output = Output("x", Field("x", "uint8", (128,)), "anchor", (), scale(1 / 255))
    got = run(output, values, [0, 1], [0, 1], 2).ravel()
    exact = np.arange(256) * (1 / 255)
    assert (np.abs(got - exact) <= exact * 2.0**-23).all()


@given(
    factor=st.floats(-1e6, 1e6, width=64),
    offset=st.floats(-1e6, 1e6, width=64),
    source=st.sampled_from(["uint8", "int16", "int32", "float32", "float64", "bfloat16"]),
    dtype=st.sampled_from(FLOATS),
)
def test_any_factor_and_offset_give_what_the_reference_gives(factor, offset, source, dtype):
    output = Output("x", Field("x", source, (5, 3)), "anchor", (), scale(factor, offset=offset, dtype=dtype))
    check(output, values_of(source, (5, 3), 11))


def test_an_empty_list_of_slots_writes_nothing():
    output = Output("x", Field("x", "float32", (3,)), "anchor", (), cast("float16"))
    got = run(output, values_of("float32", (3,), 4), np.zeros(4), np.zeros(0), 4)
    assert (got.view(np.uint8) == POISON).all()
