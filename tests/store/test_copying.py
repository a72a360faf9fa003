"""Copying a tick's rows: every byte arrives, none lands elsewhere, whatever the size and wherever the pieces lie."""

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conduit.native.memory import STREAM_FROM, copy_rows


@numba.njit("void(int64, int64, int64, int64, int64)")
def copy(target, stride, source, size, count):
    copy_rows(target, stride, source, size, count)


GUARD = 8192


def check(size, count, gap, from_, to):
    rng = np.random.default_rng(size + count)
    source = rng.integers(0, 256, from_ + size * count, np.uint8)
    stride = size + gap
    target = np.full(GUARD + 64 + stride * count + GUARD, 0xA5, np.uint8)
    start = GUARD + to
    copy(target.ctypes.data + start, stride, source.ctypes.data + from_, size, count)
    rows = target[start : start + stride * count].reshape(count, stride)
    np.testing.assert_array_equal(rows[:, :size].reshape(-1), source[from_:])
    assert (rows[:, size:] == 0xA5).all()
    assert (target[:start] == 0xA5).all()
    assert (target[start + stride * count :] == 0xA5).all()


@given(
    size=st.integers(1, 5000),
    count=st.integers(1, 70),
    gap=st.integers(0, 70),
    from_=st.integers(0, 70),
    to=st.integers(0, 63),
)
@example(size=STREAM_FROM, count=1, gap=0, from_=0, to=0)
@example(size=STREAM_FROM - 1, count=1, gap=0, from_=0, to=0)
@example(size=STREAM_FROM + 1, count=1, gap=64, from_=7, to=33)
@example(size=1, count=STREAM_FROM, gap=0, from_=1, to=63)
@example(size=1, count=STREAM_FROM, gap=1, from_=0, to=1)
@example(size=3008, count=64, gap=0, from_=16, to=0)
@example(size=7056, count=64, gap=48, from_=16, to=0)
@settings(max_examples=150, deadline=None)
def test_rows_arrive_whole_and_nothing_else_is_touched(size, count, gap, from_, to):
    check(size, count, gap, from_, to)


@pytest.mark.parametrize("size", range(0, 700, 9))
def test_a_large_copy_ends_where_it_should_for_every_remainder(size):
    check(STREAM_FROM + size, 1, 0, size % 61, size % 64)
