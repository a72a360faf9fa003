"""Kernels run by Triton's interpreter on CPU tensors, or on a GPU where there is one.

Run as `TRITON_INTERPRET=1 python -m pytest tests/gpu/interpret`; without the variable, the same tests run compiled on the CUDA
device.

* Integers of 32 bits that overflow are an error in the interpreter (its check is off by default), so an address that is
  computed in 32 bits is found without allocating what it points to.
* Outputs come from `out`: filled with a value that no test expects, between bands that nobody may touch.
"""

import dataclasses
import os

import pytest
import torch
import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
_BAND = 64
_POISON = 0xA5


@pytest.fixture(scope="session", autouse=True)
def overflow_is_an_error():
    assert triton.knobs.runtime.interpret == INTERPRETED
    if not INTERPRETED:
        yield
        return
    from triton.runtime.interpreter import interpreter_builder

    before = interpreter_builder.options
    interpreter_builder.options = dataclasses.replace(before, debug=True)
    yield
    interpreter_builder.options = before


class Outputs:
    """Makes guarded outputs, and knows whether anything was written beside them."""

    def __init__(self):
        self._whole = []

    def __call__(self, shape, dtype):
        """A poisoned tensor of a shape and torch dtype between two bands."""
        size = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
        padded = -(-size // 16) * 16
        whole = torch.full((2 * _BAND + padded,), _POISON, dtype=torch.uint8, device=DEVICE)
        self._whole.append((whole, size))
        return whole[_BAND : _BAND + size].view(dtype).view(shape)

    def check(self):
        for whole, size in self._whole:
            assert (whole[:_BAND] == _POISON).all(), "written before an output"
            assert (whole[_BAND + size :] == _POISON).all(), "written behind an output"


@pytest.fixture
def out():
    outputs = Outputs()
    yield outputs
    outputs.check()


def on_device(value, dtype=None):
    """A tensor of its own on the tests' device, of a numpy array or a list."""
    tensor = torch.as_tensor(value, dtype=dtype)
    return tensor.clone().to(DEVICE)


@pytest.fixture
def device():
    return on_device


@pytest.fixture(params=["in order", "backwards", "shuffled"])
def program_order(request, monkeypatch):
    """Programs of a launch run one after the other in the interpreter; this runs them in another order."""
    if not INTERPRETED:
        if request.param != "in order":
            pytest.skip("a GPU has an order of its own")
        return
    from triton.runtime.interpreter import interpreter_builder

    place = interpreter_builder.set_grid_idx

    def permuted(x, y, z):
        count = interpreter_builder.grid_dim[0]
        orders = {
            "in order": torch.arange(count),
            "backwards": torch.arange(count).flip(0),
            "shuffled": torch.randperm(count, generator=torch.Generator().manual_seed(count)),
        }
        place(int(orders[request.param][x]), y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", permuted)
