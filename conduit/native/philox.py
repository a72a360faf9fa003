"""Philox4x32-10, the counter-based random generator of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11).

The n-th number is a function of (seed, n), so a draw can be repeated, split over threads or done on a GPU with the same
result. Indices come from the high half of a 64 x 64-bit product: no division, and a bias below n / 2^64.

Who uses which counters, under a loader's seed; the draw is the number of its batch:

    what                          draw    lane, from its high bits                                            by
    rows of samples               batch   0, try in 19, attempt of the delivery in 12, pair of slots in 32    draw_lane
    moves of images               batch   1, number of the image below PICK_GOALS in 31, slot in 32           pick_lane
    goals of hindsight            batch   1, PICK_GOALS in 31, slot or step of the batch in 32                pick_lane
    order of an epoch             epoch   pair of rows: a loader in epochs draws no rows otherwise            indices
    rows, indices of kernels.gpu  draw    pair of slots, and the try, as samples have it                      draw_lane

No two overlap in one loader, and all of it may be made again in any order. How many rows of a batch come from each table of a mixture
is drawn by another generator under another key (plane.deliver.mixed).
"""

from __future__ import annotations

import numpy as np

from conduit.native.jit import inner, kernel
from conduit.native.memory import poke_i64

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@inner(forceinline=True)
def random_pair(seed, draw, lane):
    """Two times 64 random bits for the counter (draw, lane) under a 64-bit seed; all three are taken as uint64."""
    k0 = np.uint64(seed) & _LOW
    k1 = np.uint64(seed) >> _32
    c0 = np.uint64(lane) & _LOW
    c1 = np.uint64(lane) >> _32
    c2 = np.uint64(draw) & _LOW
    c3 = np.uint64(draw) >> _32
    for _ in range(10):
        p0 = _M0 * c0
        p1 = _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + _W0) & _LOW
        k1 = (k1 + _W1) & _LOW
    return (c1 << _32) | c0, (c3 << _32) | c2


PICK, PICK_SHIFT = -(1 << 63), 32
"""Of a lane that no sampler uses: its mark, and where the number of what is drawn begins."""
PICK_GOALS = 1 << 30
"""The number of goals, behind those of a schema's images."""


@inner
def draw_lane(slot, attempt, tries):
    """Lane of one try to draw the row of a slot: pair of slots in 32 bits, the delivery's attempt in 12, the try in 19."""
    return (slot >> 1) | ((attempt & 4095) << 32) | (tries << 44)


@inner
def pick_lane(pick, slot):
    """Lane of what is drawn for a slot beside its row: the number of an image, or PICK_GOALS."""
    return PICK | (pick << PICK_SHIFT) | slot


@inner
def scale_to(random, n):
    """floor(random * n / 2^64) for n below 2^63: an index in [0, n)."""
    n = np.uint64(n)
    low = (random & _LOW) * (n & _LOW)
    middle = (random >> _32) * (n & _LOW) + (low >> _32)
    other = (random & _LOW) * (n >> _32) + (middle & _LOW)
    return np.int64((random >> _32) * (n >> _32) + (middle >> _32) + (other >> _32))


@kernel("int64(int64, int64, int64, int64, int64)")
def indices(seed, draw, n, count, out):
    """Fill int64 [count] at `out` with indices in [0, n): two for each of the lanes 0, 1, 2, ... of one draw."""
    for i in range(count):
        first, second = random_pair(seed, draw, i >> 1)
        poke_i64(out + 8 * i, scale_to(second if i & 1 else first, n))
    return count
