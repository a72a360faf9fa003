"""Draws on the device are those of the CPU under the same seed."""

import numpy as np
import pytest
import torch

from conduit.errors import FieldError
from conduit.kernels.gpu import philox
from conduit.kernels.reference import gather
from conduit.native import philox as cpu
from conduit.native.jit import entry

SEEDS = [(0, 0), (2**64 - 1, 2**64 - 1), (0x243F6A8885A308D3, 2**33 + 5)]


def of_cpu(seed, draw, n, count):
    want = np.zeros(count, np.int64)
    signed = [np.uint64(word).astype(np.int64) for word in (seed, draw)]
    entry(cpu.indices)(*map(int, signed), n, count, want.ctypes.data)
    return want


@pytest.mark.parametrize(("seed", "draw"), SEEDS)
@pytest.mark.parametrize("n", [1, 3, 1000, 2**31 + 1, 5 * 10**9, 2**63 - 1])
def test_indices_equal_the_cpus(out, device, seed, draw, n):
    for count in (1, 301):
        got = out(count, torch.int64)
        state = philox.make_state(seed, draw, got.device)
        philox.indices(state, device([n]), got)
        np.testing.assert_array_equal(got.cpu(), of_cpu(seed, draw, n, count))


def test_indices_are_the_high_half_of_the_references_bits(out, device):
    got = out(6, torch.int64)
    philox.indices(philox.make_state(7, 9, got.device), device([10**12]), got)
    bits = [half for lane in range(3) for half in gather.philox(7, 9, lane)]
    assert got.tolist() == [half * 10**12 >> 64 for half in bits]


def test_an_empty_draw_launches_nothing(out, device):
    got = out(0, torch.int64)
    philox.indices(philox.make_state(1, 1, got.device), device([5]), got)


def test_the_state_advances_on_the_device(out, device):
    first, second = out(8, torch.int64), out(8, torch.int64)
    state = philox.make_state(3, 2**63 - 1, first.device)
    philox.advance(state)
    for got in (first, second):
        philox.indices(state, device([10**9]), got)
        philox.advance(state)
    np.testing.assert_array_equal(first.cpu(), of_cpu(3, 2**63, 10**9, 8))
    np.testing.assert_array_equal(second.cpu(), of_cpu(3, 2**63 + 1, 10**9, 8))


@pytest.mark.parametrize("lengths", [[5], [1, 1], [7, 0, 3, 0, 0, 11], [2**33, 5], list(range(9))])
def test_rows_of_ranges_are_found_at_the_drawn_positions(out, device, lengths):
    starts = np.concatenate([[0], np.cumsum(lengths)])
    firsts = np.arange(len(lengths)) * 1000 + 17
    got, ranges = out(77, torch.int64), out(77, torch.int64)
    philox.rows(
        philox.make_state(5, 1, got.device), device(starts), device(firsts), device([len(lengths)]), got, ranges
    )
    position = of_cpu(5, 1, int(starts[-1]), 77)
    which = np.searchsorted(starts, position, side="right") - 1
    np.testing.assert_array_equal(ranges.cpu(), which)
    np.testing.assert_array_equal(got.cpu(), firsts[which] + position - starts[which])


@pytest.mark.parametrize("listed", [0, 2])
def test_fewer_ranges_than_there_is_room_for(out, device, listed):
    starts = np.array([0, 4, 6, -5, -5]) if listed else np.zeros(5, np.int64)
    got, ranges = out(40, torch.int64), out(40, torch.int64)
    philox.rows(
        philox.make_state(5, 1, got.device), device(starts), device([10, 50, 0, 0]), device([listed]), got, ranges
    )
    allowed = {10, 11, 12, 13, 50, 51} if listed else {-1}
    assert set(got.tolist()) == allowed
    assert set(ranges.tolist()) == ({0, 1} if listed else {-1})


def test_wrong_tensors_are_refused(out, device):
    state, n, zeros = device([1, 1]), device([5]), device([0] * 8)
    for bad, text in (
        ([state.int(), n, zeros], "Expected `int64`, got `int32`"),
        ([state, 5, zeros], "Expected a torch tensor, got int"),
        ([state, n, zeros[::2]], "Expected contiguous memory"),
        ([state, n, zeros[1:]], "multiple of 16 bytes, got 8 more"),
        ([state, n, zeros.view(2, 4)], r"Expected shape \[any\], got \[2, 4\]"),
        ([state, n, zeros.to("meta")], "as the others, got one on meta"),
    ):
        with pytest.raises(FieldError, match=text):
            philox.indices(*bad)
    assert not zeros.any()
