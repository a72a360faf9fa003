"""Images: frame stacks that read each frame once, and images at random shifts.

Each step stores a single frame. A sample's stack of S frames and the stack of its next observation, m steps later, overlap: together
they have S + m frames, and the newest S - m frames of the first stack are the oldest of the second. A program reads one tile of one
frame and stores it in every place that needs it, so each frame is read once. The row numbers already have the padding before an
episode's start: the first frame again, or -1 for zeros.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from conduit.errors import ConfigError, FieldError
from conduit.kernels.gpu.elements import changes_zero, convert, tile_of, work_of
from conduit.kernels.gpu.launch import LARGEST_PART, as_words, check, dtype_of, launch, row_stride, tiles
from conduit.kernels.gpu.philox import random_pair, scale_to
from conduit.kernels.spec.transforms import RandomShift, Transform
from conduit.native.philox import PICK, PICK_SHIFT

NUM_WARPS = 4


@triton.jit
def _stacks(
    src,
    stack,
    following,
    shift,
    obs,
    nxt,
    WORKS: tl.constexpr,
    ROW: tl.constexpr,
    STRIDE: tl.constexpr,
    S: tl.constexpr,
    FRAMES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    tile = program % TILES
    frame = (program // TILES) % FRAMES
    sample = (program // (TILES * FRAMES)).to(tl.int64)
    behind = frame - tl.load(shift + sample).to(tl.int32)
    in_obs, in_next = frame < S, (behind >= 0) & (behind < S)
    if in_obs | in_next:
        place = sample * S + frame
        next_place = sample * S + behind
        # a frame of both is named by both, with the same number
        at = tl.load(tl.where(in_obs, stack + place, following + next_place)).to(tl.int64)
        c = tile * BLOCK + tl.arange(0, BLOCK)
        inside = c < tl.where(at >= 0, ROW, 0)
        y = convert(tl.load(src + at * STRIDE + c, mask=inside, other=0), obs.dtype.element_ty, WORKS, 0)
        if changes_zero(WORKS, 0):
            y = tl.where(at >= 0, y, tl.zeros_like(y))
        row = tl.where(at >= -1, ROW, 0)
        tl.store(obs + place * ROW + c, y, mask=c < tl.where(in_obs, row, 0))
        tl.store(nxt + next_place * ROW + c, y, mask=c < tl.where(in_next, row, 0))


@triton.jit
def _moved(
    src,
    index,
    state,
    dst,
    WORKS: tl.constexpr,
    PICK: tl.constexpr,
    PAD: tl.constexpr,
    ROW: tl.constexpr,
    STRIDE: tl.constexpr,
    LANES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    place = (program // TILES).to(tl.int64)
    lane = (place // LANES) | PICK
    first, second = random_pair(tl.load(state), tl.load(state + 1), lane)
    span = tl.full((), 2 * PAD + 1, tl.int64)
    down = scale_to(first, span).to(tl.int32) - PAD
    right = scale_to(second, span).to(tl.int32) - PAD
    c = (program % TILES) * BLOCK + tl.arange(0, BLOCK)
    line = c // (WIDTH * DEPTH)
    column = (c // DEPTH) % WIDTH
    height = line % HEIGHT
    from_height = tl.minimum(tl.maximum(height + down, 0), HEIGHT - 1)
    from_column = tl.minimum(tl.maximum(column + right, 0), WIDTH - 1)
    source = ((line - height + from_height) * WIDTH + from_column) * DEPTH + c % DEPTH
    at = tl.load(index + place).to(tl.int64)
    inside = c < tl.where(at >= 0, ROW, 0)
    y = convert(tl.load(src + at * STRIDE + source, mask=inside, other=0), dst.dtype.element_ty, WORKS, 0)
    if changes_zero(WORKS, 0):
        y = tl.where(at >= 0, y, tl.zeros_like(y))
    tl.store(dst + place * ROW + c, y, mask=c < tl.where(at >= -1, ROW, 0))


def frame_stacks(
    source: Any,
    stack: Any,
    following: Any,
    shift: Any,
    obs: Any,
    next_obs: Any,
    *,
    transform: Transform,
    n_step: int,
    name: str = "obs",
) -> None:
    """Make the stacks of observations and of next observations, in one launch.

    The row numbers come from conduit.kernels.cpu.windows or conduit.kernels.gpu.transitions. `shift` is the distance of the second stack
    from the first: following[b, k] == stack[b, k + shift[b]] wherever both exist. This is not checked; if it does not hold, the result is
    undefined. Rows are not checked against the column's length either.

    Args:
        source: Frames, [rows, *shape]; rows may be padded.
        stack: int64 [batch, S], oldest first; -1 gives zeros, a lower number leaves the place unchanged.
        following: int64 [batch, S], the same for the next observation.
        shift: int32 or int64 [batch], from 0 to min(n_step, S).
        obs: [batch, S, *shape] of the transform's dtype.
        next_obs: The same.
        transform: Applied to each element.
        n_step: Most steps from an observation to the next.
        name: The field's name, for errors.

    Raises:
        FieldError: Wrong tensors.
        ConfigError: A transform that has no kernel here.
    """
    check(source, f"{name}.source", (), (None,) * source.dim(), strided=True)
    check(stack, f"{name}.stack", "int64", (None, None), like=source)
    check(following, f"{name}.following", "int64", tuple(stack.shape), like=source)
    check(shift, f"{name}.shift", ("int32", "int64"), (len(stack),), like=source)
    shape = (*stack.shape, *source.shape[1:])
    check(obs, f"{name}.obs", (), shape, like=source)
    check(next_obs, f"{name}.next_obs", dtype_of(obs), shape, like=source)
    if n_step < 1 or stack.numel() > LARGEST_PART:
        raise ConfigError(
            f"Expected n_step of at least 1 and at most {LARGEST_PART} frames in a batch, got {n_step} and {stack.numel()}"
        )
    if obs.numel() == 0:
        return
    work = work_of(transform, source, obs, name)
    elements, size = math.prod(source.shape[1:]), stack.shape[1]
    block = tile_of(source, obs, elements, row_stride(source), NUM_WARPS)
    frames, per_frame = size + min(n_step, size), tiles(elements, block)
    launch(
        _stacks,
        len(stack) * frames * per_frame,
        as_words(source),
        stack,
        following,
        shift,
        as_words(obs),
        as_words(next_obs),
        num_warps=NUM_WARPS,
        WORKS=(tuple(work),),
        ROW=elements,
        STRIDE=row_stride(source),
        S=size,
        FRAMES=frames,
        TILES=per_frame,
        BLOCK=block,
    )


def moved_images(
    source: Any,
    index: Any,
    state: Any,
    out: Any,
    *,
    transform: Transform,
    shift: RandomShift,
    pick: int,
    name: str = "obs",
) -> None:
    """Copy images, each sample's images moved by whole pixels with the border repeated; the moves equal the CPU's.

    Args:
        source: Images, [rows, *shape]; rows may be padded.
        index: int64 [batch] or [batch, *lanes] row numbers; -1 gives zeros, a lower number leaves the place unchanged. All lanes of
            a sample move alike.
        state: int64 [2], seed and number of the batch (conduit.kernels.gpu.philox).
        out: [batch, *lanes, *shape] of the transform's dtype.
        transform: Applied to each element.
        shift: How far images move, and their axes.
        pick: Number of the image whose move is drawn (conduit.kernels.cpu.augment.pick_of).
        name: The field's name, for errors.

    Raises:
        FieldError: Wrong tensors.
        ConfigError: A transform or shift that has no kernel here.
    """
    check(source, f"{name}.source", (), (None,) * source.dim(), strided=True)
    check(index, f"{name}.index", "int64", (None,) * index.dim(), like=source)
    check(state, "state", "int64", (2,), like=source)
    check(out, f"{name}.out", (), (*index.shape, *source.shape[1:]), like=source)
    if index.dim() == 0 or index.numel() > LARGEST_PART:
        raise FieldError(f"Expected from 1 to {LARGEST_PART} row numbers, got {list(index.shape)}", at=name)
    if out.numel() == 0:
        return
    work = work_of(transform, source, out, name)
    _, height, width, depth = shift.extents(tuple(source.shape[1:]))
    elements = math.prod(source.shape[1:])
    block = tile_of(source, out, elements, elements, NUM_WARPS)
    per_row = tiles(elements, block)
    launch(
        _moved,
        index.numel() * per_row,
        as_words(source),
        index,
        state,
        as_words(out),
        num_warps=NUM_WARPS,
        WORKS=(tuple(work),),
        PICK=PICK | (pick << PICK_SHIFT),
        PAD=shift.pad,
        ROW=elements,
        STRIDE=row_stride(source),
        LANES=math.prod(index.shape[1:]),
        HEIGHT=height,
        WIDTH=width,
        DEPTH=depth,
        TILES=per_row,
        BLOCK=block,
    )
