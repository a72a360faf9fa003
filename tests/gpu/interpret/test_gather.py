"""All fields in one launch, against the reference."""

import numpy as np
import pytest
import torch

from conduit.errors import ConfigError, FieldError
from conduit.kernels.gpu import gather as module
from conduit.kernels.gpu.gather import Gather, gather
from conduit.kernels.gpu.launch import recorded
from conduit.kernels.reference import device as reference
from conduit.kernels.spec.transforms import Transform

RNG = np.random.default_rng(1)
SCALED = 1 / 255


def numpy_of(tensor):
    """As numpy, bfloat16 as its bits."""
    tensor = tensor.cpu()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def column_of(dtype, rows, shape):
    """A column with values of a dtype, bfloat16 as its bits."""
    if dtype == "bool":
        return RNG.random((rows, *shape)) < 0.5
    if dtype == "bfloat16":
        return reference.gather.to_bfloat16(RNG.normal(size=(rows, *shape)))
    if dtype.startswith("float"):
        return RNG.normal(size=(rows, *shape)).astype(dtype)
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max, (rows, *shape), dtype, endpoint=True)


def as_column(tensor, shape):
    strides = torch.empty(shape[1:], device="meta").stride()
    return tensor.as_strided(shape, (tensor.stride(0), *strides))


def close(got, want, dtype):
    """Bit-equal, but for bfloat16, which the interpreter rounds towards zero."""
    if dtype == "bfloat16":
        distance = np.abs(got.astype(np.int32) - want.astype(np.int32))
        assert distance.max(initial=0) <= 1
    else:
        np.testing.assert_array_equal(got, want)


CASES = [
    ("uint8", (84, 84), Transform("uint8"), None),
    ("uint8", (84, 84), Transform("bfloat16", SCALED), None),
    ("uint8", (61, 3), Transform("float16", SCALED, -0.5), 256),
    ("uint8", (1025,), Transform("float32", SCALED), None),
    ("uint8", (600,), Transform("float32", SCALED, 1.0, -0.25, 1.5), 640),
    ("float32", (), Transform("float32", 2.0, 0.0, -1.0, float("inf")), None),
    ("float32", (7,), Transform("bfloat16"), 8),
    ("float32", (513,), Transform("float16"), None),
    ("float64", (3, 5), Transform("float32", 1 / 3, 0.1), 16),
    ("float64", (300,), Transform("float64", 1 / 3, 0.1, -0.1, 0.3), None),
    ("float16", (4,), Transform("float32"), None),
    ("bfloat16", (9,), Transform("bfloat16"), 16),
    ("bfloat16", (2,), Transform("float32"), None),
    ("bool", (5,), Transform("bool"), 16),
    ("bool", (), Transform("float32"), None),
    ("int64", (), Transform("int64"), None),
    ("int64", (3,), Transform("float32", 0.5), 4),
    ("int32", (17,), Transform("int64"), 20),
    ("uint16", (4,), Transform("uint16"), None),
    ("int8", (130,), Transform("float32", 3.0), 144),
]


def item_of(case, index, out, device):
    dtype, shape, transform, stride = case
    column = column_of(dtype, 9, shape)
    source = as_column(device(tensor_of_rows(column, dtype, stride)), column.shape)
    made = out((*index.shape, *shape), getattr(torch, transform.dtype))
    want = reference.gathered(column, dtype, index, transform)
    return Gather(source, device(index), made, transform, "x"), want


def tensor_of_rows(column, dtype, stride):
    flat = column.reshape(len(column), -1)
    wide = np.zeros((len(column), stride or flat.shape[1]), flat.dtype)
    wide[:, : flat.shape[1]] = flat
    tensor = torch.from_numpy(wide)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def indices(count, lanes=()):
    return RNG.integers(-1, 9, (count, *lanes)) if count != 1 else np.full((1, *lanes), 8)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{list(case[1])} to {case[2].dtype}")
@pytest.mark.parametrize("index", [indices(5), indices(1)], ids=["five", "one"])
def test_a_field_equals_the_reference(out, device, case, index):
    item, want = item_of(case, index, out, device)
    gather([item])
    close(numpy_of(item.out), want, case[2].dtype)


def test_all_fields_are_made_in_one_launch(out, device):
    pairs = [item_of(case, indices(3), out, device) for case in CASES]
    pairs += [item_of(CASES[1], indices(2, (3,)), out, device), item_of(CASES[5], indices(140, (2, 2)), out, device)]
    items = [item for item, _ in pairs]
    with recorded() as launches:
        gather(items)
    assert len(launches) == 1
    gather(items)
    for item, want in pairs:
        close(numpy_of(item.out), want, item.transform.dtype)


def test_an_empty_batch_launches_nothing(out, device):
    item, _ = item_of(CASES[0], indices(0), out, device)
    nothing = Gather(
        device(np.zeros((4, 0), np.float32)), device([1, 2]), out((2, 0), torch.float32), Transform("float32"), "y"
    )
    with recorded() as launches:
        gather([item, nothing])
    assert launches == []
    gather([item, nothing])


def test_equal_plans_have_equal_constants(out, device):
    plans = []
    for _ in range(2):
        with recorded() as launches:
            gather([item_of(case, np.arange(4), out, device)[0] for case in CASES])
        plans.append(launches[0].meta["PLAN"])
    assert plans[0] == plans[1]


def test_rows_beyond_two_gigabytes_are_reached(out, device):
    """The column is memory that nobody has touched but for two rows."""
    row, last = 7056, 2**31 // 7056 + 3
    column = torch.empty((last + 1, row), dtype=torch.uint8, device=device([0]).device)
    column[last], column[2] = 7, 5
    made = out((2, row), torch.uint8)
    gather([Gather(column, device([last, 2]), made, Transform("uint8"), "x")])
    assert (made[0] == 7).all()
    assert (made[1] == 5).all()


def test_what_cannot_be_is_refused_before_anything_is_written(out, device):
    source, index = device(np.zeros((4, 8), np.float32)), device([0, 1])
    good = {
        "source": source,
        "index": index,
        "out": out((2, 8), torch.float32),
        "transform": Transform("float32"),
        "name": "obs",
    }
    other = {
        "Expected shape \\[2, 8\\], got \\[2, 7\\] - at `obs.out`": {"out": device(np.zeros((2, 7), np.float32))},
        "Expected an output of `float16`, got `float32` - at `obs`": {"transform": Transform("float16")},
        "Expected `int64`, got `int32` - at `obs.index`": {"index": index.int()},
        "Expected contiguous memory.*obs.out": {"out": device(np.zeros((2, 16), np.float32))[:, ::2]},
        "Expected contiguous rows.*obs.source": {"source": device(np.zeros((8, 4), np.float32)).T},
        "multiple of 16 bytes, got 4 more.*obs.source": {"source": device(np.zeros(33, np.float32))[1:].view(4, 8)},
        "Expected a tensor on .*obs.index": {"index": index.to("meta")},
        "Expected a float dtype for a field of `float32`, got `int64`": {
            "transform": Transform("int64"),
            "out": device(np.zeros((2, 8), np.int64)),
        },
        "that is clipped on a GPU": {
            "source": device(np.zeros((4, 8), np.int32)),
            "transform": Transform("int32", low=0),
            "out": device(np.zeros((2, 8), np.int32)),
        },
    }
    for text, change in other.items():
        with pytest.raises((FieldError, ConfigError), match=text):
            gather([Gather(**good), Gather(**good | change)])
    with pytest.raises(ConfigError, match="Expected from 1 to 64 arrays in one gather, got 0"):
        gather([])
    huge = torch.empty((2, 2**30 + 4), dtype=torch.uint8, device="meta")
    with pytest.raises(FieldError, match="rows of at most 1073741824 elements"):
        module.check(huge, "x", (), (None, None))
