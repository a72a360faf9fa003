"""Frame stacks and moved images against the reference."""

import numpy as np
import pytest
import torch

from conduit.errors import ConfigError, FieldError
from conduit.kernels.gpu import augment, philox
from conduit.kernels.gpu.launch import recorded
from conduit.kernels.reference import gather
from conduit.kernels.reference.device import gathered
from conduit.kernels.spec.transforms import RandomShift, Transform

RNG = np.random.default_rng(2)


def stacks(size, n_step, repeat, first=3, steps=9):
    """Row numbers of every anchor of an episode whose frames are rows first, first + 1, ...; and how far the stacks are apart."""
    missing = first if repeat else -1
    row = [missing] * size + list(range(first, first + steps))
    stack, following, shift = [], [], []
    for t in range(steps - n_step):
        for m in range(n_step + 1):
            stack.append(row[t + 1 : t + 1 + size])
            following.append(row[t + m + 1 : t + m + 1 + size])
            shift.append(min(m, size))
    return np.array(stack), np.array(following), np.array(shift)


@pytest.mark.parametrize("repeat", [True, False], ids=["repeat", "zero"])
@pytest.mark.parametrize(
    ("size", "n_step", "shape", "transform", "stride"),
    [
        (4, 1, (84,), Transform("uint8"), 84),
        (3, 2, (5, 7), Transform("bfloat16", 1 / 255), 48),
        (2, 5, (3,), Transform("float32", 0.5, 1.0), 16),
        (1, 1, (), Transform("float16", 0.5), 1),
        (4, 3, (1100,), Transform("float32", 1 / 255), 1104),
    ],
    ids=str,
)
def test_both_stacks_equal_the_reference(out, device, repeat, size, n_step, shape, transform, stride):
    column = RNG.integers(0, 256, (14, *shape), np.uint8)
    wide = np.zeros((14, stride), np.uint8)
    wide[:, : column[0].size] = column.reshape(14, -1)
    source = device(wide).as_strided(column.shape, (stride, *torch.empty(shape, device="meta").stride()))
    stack, following, shift = stacks(size, n_step, repeat)
    chosen = np.concatenate([np.arange(6), RNG.choice(len(stack), 4)])
    stack, following, shift = stack[chosen], following[chosen], shift[chosen]
    made = [out((*stack.shape, *shape), getattr(torch, transform.dtype)) for _ in range(2)]
    with recorded() as launches:
        augment.frame_stacks(
            source, device(stack), device(following), device(shift), *made, transform=transform, n_step=n_step
        )
    assert len(launches) == 1
    augment.frame_stacks(
        source, device(stack), device(following), device(shift, torch.int32), *made, transform=transform, n_step=n_step
    )
    for got, index in zip(made, (stack, following), strict=True):
        want = gathered(column, "uint8", index, transform)
        if transform.dtype == "bfloat16":
            # the interpreter rounds bfloat16 towards zero
            apart = got.cpu().view(torch.uint16).numpy().astype(int) - want
            assert abs(apart).max() <= 1
        else:
            np.testing.assert_array_equal(got.cpu(), want)


def test_every_frame_is_read_once(device):
    """As many programs as the two stacks have different frames, where an episode is long enough."""
    source, made = device(np.zeros((9, 8), np.uint8)), device(np.zeros((2, 4, 8), np.uint8))
    index = device(np.zeros((2, 4), np.int64))
    with recorded() as launches:
        augment.frame_stacks(
            source, index, index, device([1, 1]), made, made.clone(), transform=Transform("uint8"), n_step=1
        )
    assert launches[0].grid == 2 * (4 + 1)


def test_frames_beyond_two_gigabytes_are_reached(out, device):
    row, last = 7056, 2**31 // 7056 + 9
    column = torch.empty((last + 1, row), dtype=torch.uint8, device=device([0]).device)
    for t in range(4):
        column[last - t] = t + 1
    obs, following = out((1, 2, row), torch.uint8), out((1, 2, row), torch.uint8)
    rows = device([[last - 2, last - 1]]), device([[last - 1, last]])
    augment.frame_stacks(column, *rows, device([1]), obs, following, transform=Transform("uint8"), n_step=1)
    assert obs[0, :, 0].tolist() == [3, 2]
    assert following[0, :, -1].tolist() == [2, 1]
    moved = out((1, row), torch.uint8)
    state = philox.make_state(1, 1, column.device)
    images = column.view(-1, 84, 84)
    augment.moved_images(
        images, device([last]), state, moved.view(1, 84, 84), transform=Transform("uint8"), shift=RandomShift(2), pick=0
    )
    assert (moved == 1).all()


@pytest.mark.parametrize(
    ("shape", "axes", "pad", "lanes", "dtype"),
    [
        ((6, 9), (-2, -1), 2, (), "uint8"),
        ((7, 5, 3), (0, 1), 4, (), "float32"),
        ((3, 8, 8), (-2, -1), 3, (2,), "uint8"),
        ((1, 1), (-2, -1), 1, (), "uint8"),
        ((2, 40, 33), (1, 2), 50, (), "float16"),
    ],
    ids=str,
)
def test_images_move_as_on_the_cpu(out, device, shape, axes, pad, lanes, dtype):
    column = RNG.integers(0, 256, (5, *shape), np.uint8)
    index = RNG.integers(-1, 5, (4, *lanes))
    transform = Transform(dtype) if dtype == "uint8" else Transform(dtype, 1 / 255, 0.25)
    seed, batch, pick = 2**63 + 11, 5, 3
    made = out((*index.shape, *shape), getattr(torch, dtype))
    augment.moved_images(
        device(column),
        device(index),
        philox.make_state(seed, batch, made.device),
        made,
        transform=transform,
        shift=RandomShift(pad, axes=axes),
        pick=pick,
    )
    want = gathered(column, "uint8", index, transform)
    for slot in range(4):
        down, right = gather.move(seed, batch, pick, slot, pad)
        for lane in np.ndindex(lanes):
            want[(slot, *lane)] = gather.moved(want[(slot, *lane)], axes, down, right)
    np.testing.assert_array_equal(made.cpu(), want)


def test_no_samples_launch_nothing(out, device):
    source = device(np.zeros((3, 4, 4), np.uint8))
    none, made = device(np.zeros((0, 2), np.int64)), out((0, 2, 4, 4), torch.uint8)
    with recorded() as launches:
        augment.frame_stacks(
            source, none, none, device(np.zeros(0, np.int64)), made, made, transform=Transform("uint8"), n_step=1
        )
        state = philox.make_state(0, 0, made.device)
        augment.moved_images(source, none, state, made, transform=Transform("uint8"), shift=RandomShift(1), pick=0)
    assert launches == []


def test_what_cannot_be_is_refused(device):
    source, rows = device(np.zeros((3, 4), np.uint8)), device(np.zeros((2, 2), np.int64))
    made = device(np.zeros((2, 2, 4), np.uint8))
    good = [source, rows, rows, device([0, 1]), made, made]
    options = {"transform": Transform("uint8"), "n_step": 1}
    for place, bad, text in (
        (1, rows[0].clone(), r"Expected shape \[any, any\], got \[2\] - at `obs.stack`"),
        (2, device(np.zeros((2, 3), np.int64)), r"Expected shape \[2, 2\], got \[2, 3\] - at `obs.following`"),
        (3, device(np.zeros(2, np.float32)), "Expected `int32` or `int64`, got `float32` - at `obs.shift`"),
        (5, made.float(), "Expected `uint8`, got `float32` - at `obs.next_obs`"),
    ):
        wrong = good.copy()
        wrong[place] = bad
        with pytest.raises(FieldError, match=text):
            augment.frame_stacks(*wrong, **options)
    with pytest.raises(ConfigError, match="Expected n_step of at least 1"):
        augment.frame_stacks(*good, **options | {"n_step": 0})
