"""The reference itself, against numpy and torch, so that kernels are held to something that is right."""

import numpy as np
import pytest
import torch

from conduit import Field, cast, scale
from conduit.kernels.reference import gather
from conduit.kernels.spec.plan import Output
from conduit.store.format import words as w
from conduit.store.format.columns import META_DTYPE


def transformed(values, source, transform):
    return gather.transform(Output("x", Field("x", source, values.shape[1:]), "anchor", (), transform), values)


def test_bfloat16_goes_to_float32_and_back_as_torch_has_it():
    bits = np.arange(2**16, dtype=np.uint16)
    wanted = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(gather.from_bfloat16(bits), wanted)
    back = gather.to_bfloat16(gather.from_bfloat16(bits))
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert np.isnan(gather.from_bfloat16(back[nan])).all()


def test_rounding_to_bfloat16_is_torch_s():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    ties = ((np.arange(2**16, dtype=np.uint32) << 16) | 0x8000).view(np.float32)
    for case in (values, ties):
        wanted = torch.from_numpy(case).to(torch.bfloat16)
        got = gather.from_bfloat16(gather.to_bfloat16(case))
        np.testing.assert_array_equal(got, wanted.float().numpy())


def test_integers_are_cast_as_numpy_casts_them():
    values = np.array([[-1, 0, 255, 2**40 + 3, -(2**63)]])
    for dtype in ("int8", "uint16", "int32", "uint64", "float32", "float64"):
        np.testing.assert_array_equal(transformed(values, "int64", cast(dtype)), values.astype(dtype))


def test_narrow_fields_are_scaled_in_float32_and_wide_ones_in_float64():
    small = np.arange(256, dtype=np.uint8).reshape(1, -1)
    narrow = transformed(small, "uint8", scale(1 / 255, offset=0.1))
    np.testing.assert_array_equal(narrow, small.astype(np.float32) * np.float32(1 / 255) + np.float32(0.1))
    wide = transformed(small, "uint8", scale(1 / 255, offset=0.1, dtype="float64"))
    np.testing.assert_array_equal(wide, small * (1 / 255) + 0.1)
    big = np.array([[2**31 - 1, 12345678]], np.int32)
    np.testing.assert_array_equal(
        transformed(big, "int32", scale(1 / 3)), (big.astype(np.float64) * (1 / 3)).astype(np.float32)
    )


def test_a_copy_is_a_copy():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    got = transformed(values, "float32", cast("float32"))
    assert not np.shares_memory(got, values)
    np.testing.assert_array_equal(got, values)


@pytest.mark.parametrize(
    ("rows", "committed", "wanted"),
    [
        ([(2, w.FIRST), (2, 0), (2, 0), (2, 0)], 4, [2, 3, None, None]),
        ([(2, w.FIRST), (2, 0), (2, 0), (2, 0)], 3, [2, None, None, None]),
        ([(1, w.FIRST), (1, w.FIRST), (1, 0)], 3, [None, 2, None]),
        ([(0, w.FIRST | w.TERMINATED), (1, w.FIRST)], 2, [0, None]),
        ([(0, w.TRUNCATED), (1, w.FIRST)], 2, [None, None]),
        ([(3, w.TRUNCATED | w.KEPT), (1, w.FIRST), (1, 0), (0, w.FINAL)], 2, [3, None, None, None]),
        ([(1, w.TERMINATED), (0, w.FINAL), (1, w.FIRST)], 3, [1, None, None]),
        ([(1, w.TERMINATED), (0, w.FINAL)], 1, [None, None]),
        ([(1, w.TERMINATED), (1, w.FIRST), (1, w.TRUNCATED), (1, w.FIRST)], 4, [0, 2, None, None]),
    ],
    ids=[
        "ticks of 2",
        "not committed",
        "cut",
        "terminated alone",
        "truncated alone",
        "kept",
        "final row",
        "final to come",
        "cut before the final",
    ],
)
def test_the_following_row(rows, committed, wanted):
    meta = np.zeros(len(rows), META_DTYPE)
    meta["link"] = [link << w.LINK_SHIFT | flags for link, flags in rows]
    assert [gather.following_row(local, meta, committed) for local in range(len(rows))] == wanted


def test_behind_a_stream_that_has_ended_a_terminated_row_follows_itself():
    meta = np.zeros(3, META_DTYPE)
    for flags, wanted in ((w.TERMINATED, 2), (w.TRUNCATED, None), (w.TERMINATED | w.TRUNCATED, 2), (0, None)):
        meta["link"] = [1 << w.LINK_SHIFT, 1 << w.LINK_SHIFT, 1 << w.LINK_SHIFT | flags]
        assert gather.following_row(2, meta, 3, over=True) == wanted
        assert gather.following_row(2, meta, 3) is None
