"""What all kernels share: the suite's own checks can fail, and what is refused at a launch."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import conduit
from conduit.errors import ConfigError, FieldError
from conduit.kernels.gpu import launch as launching
from conduit.kernels.gpu import transitions
from conduit.kernels.gpu.launch import launch, recorded
from conduit.store.format import words as w
from tests.gpu.interpret import conftest

interpreted = pytest.mark.skipif(not conftest.INTERPRETED, reason="of the interpreter")


@triton.jit
def _square(numbers, out):
    n = tl.load(numbers)
    tl.store(out, n * n)


@triton.jit
def _beyond(out):
    tl.store(out + tl.arange(0, 8), 0)


@interpreted
def test_a_product_that_overflows_32_bits_is_an_error(out, device):
    launch(_square, 1, device([40_000], torch.int32), out(1, torch.int32), num_warps=1)
    with pytest.raises(Exception, match="overflow"):
        launch(_square, 1, device([50_000], torch.int32), out(1, torch.int32), num_warps=1)


def test_a_store_beside_an_output_is_seen(device):
    outputs = conftest.Outputs()
    outputs((4,), torch.int32)
    outputs.check()
    launch(_beyond, 1, outputs((4,), torch.int32), num_warps=1)
    with pytest.raises(AssertionError, match="written behind an output"):
        outputs.check()


def test_rows_whose_meta_lies_beyond_two_giga_words_are_resolved(out, device):
    """Memory that nobody has touched but for two rows."""
    last = 2**29 + 40
    try:
        meta = torch.empty((last + 2, 4), dtype=torch.int32, device=device([0]).device)
    except RuntimeError as error:
        pytest.skip(f"no 8.6 GB of address space: {error}")
    page_rows = 2**29
    meta[last] = torch.tensor([0, 3, 0, 1 << w.LINK_SHIFT])
    meta[last + 1] = torch.tensor([0, 4, 0, 1 << w.LINK_SHIFT])
    following, used, discounts = out(1, torch.int64), out(1, torch.int64), out(1, torch.float32)
    flags = [out(1, torch.uint8).view(torch.bool) for _ in range(2)]
    transitions.transitions(
        device([last]), meta, device([page_rows, 42]), device([0, 0]), device([1, 1]), following, discounts, used, *flags,
        window=conduit.Transition(), page_rows=page_rows,
    )  # fmt: skip
    assert following.tolist() == [last + 1]
    assert used.tolist() == [1]


@interpreted
def test_without_the_interpreter_cpu_tensors_are_refused(monkeypatch, device):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(FieldError, match=r"Expected tensors on a CUDA device, got cpu: .*TRITON_INTERPRET=1"):
        launch(_square, 1, device([2]), device([0]), num_warps=1)


def test_a_grid_that_is_too_large_is_refused(device):
    with pytest.raises(ConfigError, match="Expected at most 2147483647 programs, got 2147483648"):
        launch(_square, 2**31, device([2]), device([0]), num_warps=1)


def test_recording_launches_nothing_and_may_be_nested(device):
    got = device([0])
    with recorded() as outer:
        launch(_square, 1, device([3]), got, num_warps=1)
        with recorded() as inner:
            launch(_square, 1, device([4]), got, num_warps=1)
    assert (len(outer), len(inner), got.item()) == (1, 1, 0)
    launch(_square, 1, device([5]), got, num_warps=1)
    assert got.item() == 25


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (128, 128), (129, 256)])
def test_powers_of_two(n, power):
    assert launching.power_of_two(n) == power


def test_item_sizes_are_those_of_the_dtypes():
    for name in (
        "uint8",
        "int8",
        "uint16",
        "int16",
        "float16",
        "bfloat16",
        "int32",
        "uint32",
        "float32",
        "int64",
        "float64",
    ):
        assert launching.item_bytes(name) == torch.empty(0, dtype=getattr(torch, name)).element_size()
    assert launching.item_bytes("bool") == np.dtype(bool).itemsize
