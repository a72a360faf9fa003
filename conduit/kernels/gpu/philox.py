"""Uniform draws on the device, by the generator of conduit.native.philox: the same seed draws the same positions.

The state of a draw is int64 [2] in device memory, seed and number of the draw. `advance` is part of a captured graph, so each replay
makes the next draw. Index i uses half of the 128 bits of lane i // 2. An index is the high half of a 64 x 64-bit product, without a
division and with a bias below n / 2^64.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from conduit.errors import ConfigError
from conduit.kernels.gpu.launch import check, launch, tiles

_BLOCK = 128


@triton.jit
def random_pair(seed, draw, lane):
    """Two numbers of 64 random bits (uint64) for the counter (draw, lane); the arguments are int64, `lane` a block."""
    c2 = draw + lane * 0
    w0, w1, w2, w3 = tl.philox(
        seed,
        (lane & 0xFFFFFFFF).to(tl.uint32),
        (lane >> 32).to(tl.uint32),
        (c2 & 0xFFFFFFFF).to(tl.uint32),
        (c2 >> 32).to(tl.uint32),
    )
    first = (w1.to(tl.uint64) << 32) | w0.to(tl.uint64)
    second = (w3.to(tl.uint64) << 32) | w2.to(tl.uint64)
    return first, second


@triton.jit
def scale_to(random, n):
    """floor(random * n / 2^64): an index in [0, n), int64."""
    return tl.umulhi(random, n.to(tl.uint64)).to(tl.int64)


@triton.jit
def _two_each(state, n, block: tl.constexpr):
    """This program's 2 * block indices in [0, n), and their positions in the draw."""
    start = tl.program_id(0).to(tl.int64) * block
    first, second = random_pair(tl.load(state), tl.load(state + 1), start + tl.arange(0, block))
    return tl.interleave(scale_to(first, n), scale_to(second, n)), 2 * start + tl.arange(0, 2 * block)


@triton.jit(do_not_specialize=["count"])
def _indices(state, n, out, count, BLOCK: tl.constexpr):
    index, at = _two_each(state, tl.load(n), BLOCK)
    tl.store(out + at, index, mask=at < count)


@triton.jit(do_not_specialize=["count"])
def _rows(state, starts, firsts, listed, out, ranges, count, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    used = tl.load(listed)
    total = tl.load(starts + used)
    position, at = _two_each(state, total, BLOCK)
    low = position * 0
    span = used
    for _ in range(STEPS):
        half = span >> 1
        low += tl.where(tl.load(starts + low + half) <= position, half, 0)
        span -= half
    row = tl.load(firsts + low) + position - tl.load(starts + low)
    tl.store(out + at, tl.where(total > 0, row, -1), mask=at < count)
    tl.store(ranges + at, tl.where(total > 0, low, -1), mask=at < count)


def make_state(seed: int, draw: int, device: Any) -> Any:
    """The state of draws: int64 [2] on a device, seed (its low 64 bits) and number of the next draw."""
    import torch

    words = [word - 2**64 if word >= 2**63 else word for word in (seed % 2**64, draw % 2**64)]
    return torch.tensor(words, dtype=torch.int64, device=device)


def advance(state: Any) -> None:
    """Go on to the next draw, in the order of the stream."""
    state[1:].add_(1)


def indices(state: Any, n: Any, out: Any) -> None:
    """Fill `out` with indices in [0, n), with replacement: the same as conduit.native.philox.indices.

    Args:
        state: int64 [2], see `make_state`.
        n: int64 [1], from 1 to 2^63 - 1; not checked. 0 gives zeros.
        out: int64 [count].

    Raises:
        FieldError: Wrong tensors.
    """
    check(state, "state", "int64", (2,))
    check(n, "n", "int64", (1,), like=state)
    check(out, "out", "int64", (None,), like=state)
    launch(_indices, tiles(len(out), 2 * _BLOCK), state, n, out, len(out), num_warps=4, BLOCK=_BLOCK)


def rows(state: Any, starts: Any, firsts: Any, listed: Any, out: Any, ranges: Any) -> None:
    """Draw rows of several ranges (a table's pages), each row with equal probability, as conduit.sampling.uniform does.

    Args:
        state: int64 [2], see `make_state`.
        starts: int64 [ranges + 1], number of rows in all earlier ranges; the last element is the total.
        firsts: int64 [ranges], first row of each range.
        listed: int64 [1], number of ranges now, at most the length of `firsts`; not checked.
        out: int64 [count], the drawn rows; -1 if the ranges have no row.
        ranges: int64 [count], number of the range that each row was drawn from; -1 likewise.

    Raises:
        FieldError: Wrong tensors.
        ConfigError: `firsts` is empty.
    """
    check(state, "state", "int64", (2,))
    check(firsts, "firsts", "int64", (None,), like=state)
    check(starts, "starts", "int64", (len(firsts) + 1,), like=state)
    check(listed, "listed", "int64", (1,), like=state)
    check(out, "out", "int64", (None,), like=state)
    check(ranges, "ranges", "int64", (len(out),), like=state)
    if len(firsts) == 0:
        raise ConfigError("Expected room for at least one range, got none - at firsts")
    launch(
        _rows,
        tiles(len(out), 2 * _BLOCK),
        state,
        starts,
        firsts,
        listed,
        out,
        ranges,
        len(out),
        num_warps=4,
        STEPS=len(firsts).bit_length(),
        BLOCK=_BLOCK,
    )
