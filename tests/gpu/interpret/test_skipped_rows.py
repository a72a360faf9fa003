"""Row numbers below -1 leave their place as it is, so that two launches can make one array, each its own rows."""

import numpy as np
import pytest
import torch

from conduit.kernels.cpu.near_far import SKIP
from conduit.kernels.gpu import augment, gather
from conduit.kernels.spec.transforms import RandomShift, Transform


@pytest.mark.parametrize("shape", [(), (5,), (700,)], ids=str)
@pytest.mark.parametrize("transform", [Transform("float32"), Transform("float32", 2.0, 1.0)], ids=["cast", "affine"])
def test_two_gathers_make_one_array(out, device, shape, transform):
    rng = np.random.default_rng(0)
    columns = [device(rng.integers(0, 256, (9, *shape)), torch.uint8) for _ in range(2)]
    first = np.array([3, SKIP, -1, SKIP, 8, SKIP])
    second = np.array([SKIP, 7, SKIP, -1, SKIP, 0])
    made = out((6, *shape), torch.float32)
    for column, index in zip(columns, (first, second), strict=True):
        gather.gather([gather.Gather(column, device(index), made, transform, "x")])
    zero = torch.zeros(shape)
    rows = [columns[0][3], columns[1][7], None, None, columns[0][8], columns[1][0]]
    for have, row in zip(made, rows, strict=True):
        want = zero if row is None else row.cpu().float() * transform.factor + transform.offset
        assert torch.equal(have.cpu(), want)


def test_two_launches_make_one_pair_of_stacks_and_one_array_of_moved_images(out, device):
    rng = np.random.default_rng(1)
    source = device(rng.integers(0, 256, (20, 6, 8)), torch.uint8)
    stack = np.array([[0, 1, 2], [5, 6, 7], [9, 10, 11]])
    shift = device(np.ones(3), torch.int32)
    whole = [out((3, 3, 6, 8), torch.float32) for _ in range(2)]
    parts = [out((3, 3, 6, 8), torch.float32) for _ in range(2)]
    options = {"transform": Transform("float32", 0.5), "n_step": 1}
    augment.frame_stacks(source, device(stack), device(stack + 1), shift, *whole, **options)
    for mine in ([0, 2], [1]):
        index = np.full_like(stack, SKIP)
        index[mine] = stack[mine]
        following = np.where(index == SKIP, SKIP, index + 1)
        augment.frame_stacks(source, device(index), device(following), shift, *parts, **options)
    assert all(torch.equal(one, two) for one, two in zip(whole, parts, strict=True))
    state = device([7, 3])
    moved, pieces = out((4, 6, 8), torch.float32), out((4, 6, 8), torch.float32)
    options = {"transform": Transform("float32", 0.5, 1.0), "shift": RandomShift(2), "pick": 0}
    augment.moved_images(source, device([4, 9, -1, 2]), state, moved, **options)
    for index in ([4, SKIP, -1, SKIP], [SKIP, 9, SKIP, 2]):
        augment.moved_images(source, device(index), state, pieces, **options)
    assert torch.equal(moved, pieces)
