"""The specification of the kernels that draw, resolve and gather, for CPU and GPU, in plain numpy; slow on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit.kernels.spec.plan import Output
from conduit.kernels.spec.transforms import FLOATS, is_narrow
from conduit.store.format import words as w
from conduit.store.tables.statistics import Moments

Array = np.ndarray[Any, Any]


def from_bfloat16(bits: Array) -> Array:
    """float32 values of bfloat16 bit patterns (uint16); exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: Array) -> Array:
    """Bit patterns (uint16) of values rounded to float32, then to bfloat16 (nearest, ties to even)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = ((bits >> 16) | 64).astype(np.uint16)
    return np.where(np.isnan(np.asarray(values, np.float32)), nan, rounded)


def transform(output: Output, rows: Array, moments: Moments | None = None) -> Array:
    """Apply an output's transform to rows of its field, in the precision that `Transform` promises: equal bit for bit.

    Args:
        output: The plan's output; a random shift is not applied here (`moved`).
        rows: [n, *shape] of the field's numpy dtype (bfloat16 as uint16 bits).
        moments: The field's running statistics, if the output is normalized.

    Returns:
        [n, *shape] (one-hot: [n, *shape, classes]) of the output's numpy dtype.
    """
    wanted, source = output.transform, output.field.dtype
    if output.classes:
        values: Array = np.zeros((*rows.shape, output.classes))
        for place in np.ndindex(rows.shape):
            if 0 <= rows[place] < output.classes:
                values[(*place, int(rows[place]))] = 1.0
        values = np.clip(values * wanted.factor + wanted.offset, wanted.low, wanted.high)
    elif not output.is_augmented and wanted.is_cast and wanted.dtype == source:
        return rows.copy()
    else:
        values = from_bfloat16(rows) if source == "bfloat16" else rows
        work = np.dtype(np.float32 if is_narrow(wanted, source) else np.float64)
        if moments is not None and output.normalize is not None:
            work = np.dtype(np.float64)
            if moments.count > 0:
                values = values.astype(work) - moments.mean
                values = values * (1.0 / np.sqrt(moments.variance + output.normalize.eps))
        if wanted.is_affine:
            values = values.astype(work) * work.type(wanted.factor) + work.type(wanted.offset)
        if wanted.is_clipped:
            if source not in FLOATS and wanted.dtype not in FLOATS:
                low, high = (int(max(min(bound, 2.0**62), -(2.0**62))) for bound in (wanted.low, wanted.high))
                values = np.where(values < low, low, np.where(values > high, high, values.astype(np.int64)))
            else:
                values = values.astype(work)
                low_, high_ = work.type(wanted.low), work.type(wanted.high)
                values = np.where(values < low_, low_, np.where(values > high_, high_, values))
    if wanted.dtype == "bfloat16":
        return to_bfloat16(values)
    if wanted.dtype == "float16":
        values = values.astype(np.float32)
    return values.astype(output.numpy_dtype)


def philox(seed: int, draw: int, lane: int) -> tuple[int, int]:
    """Philox4x32-10 (Salmon et al., SC'11): two numbers of 64 bits for the counter (draw, lane) and a 64-bit seed."""
    mask = 0xFFFFFFFF
    seed, draw, lane = seed % 2**64, draw % 2**64, lane % 2**64
    k0, k1 = seed & mask, seed >> 32
    c0, c1, c2, c3 = lane & mask, lane >> 32, draw & mask, draw >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return (c1 << 32) | c0, (c3 << 32) | c2


def move(seed: int, batch: int, pick: int, slot: int, pad: int) -> tuple[int, int]:
    """Rows and columns that a sample's image moves by, each from -pad to pad (DrQ: Yarats et al., 2020)."""
    bits = philox(seed, batch, (1 << 63) | (pick << 32) | slot)
    down, right = ((bits_ * (2 * pad + 1) >> 64) - pad for bits_ in bits)
    return down, right


def moved(image: Array, axes: tuple[int, int], down: int, right: int) -> Array:
    """out[h, w] = image[h + down, w + right], with the border repeated: numpy's "edge" padding, then a crop."""
    pad = max(abs(down), abs(right))
    first, second = (axis % image.ndim for axis in axes)
    widths = [(pad, pad) if axis in (first, second) else (0, 0) for axis in range(image.ndim)]
    padded = np.pad(image, widths, mode="edge")
    padded = padded.take(range(pad + down, pad + down + image.shape[first]), first)
    return padded.take(range(pad + right, pad + right + image.shape[second]), second)


def following_row(local: int, meta: Array, committed: int, *, over: bool = False) -> int | None:
    """Where the next observation of a 1-step transition lies.

    Args:
        local: Row within its page.
        meta: META_DTYPE [page rows].
        committed: Rows committed in the page.
        over: True if no row will ever follow the committed ones.

    Returns:
        Row within the page. The row itself if it terminated and its final observation was not kept, or will never come; `terminated`
        masks its value then. None if the row is not an anchor: an observation-only row, a row whose successor is not there yet or
        belongs to another episode, or a truncated row without its final observation.
    """
    word = int(meta["link"][local])
    flags, link = word & w.FLAG_MASK, word >> w.LINK_SHIFT
    if flags & w.FINAL:
        return None
    if link == 0:
        return local if flags & w.TERMINATED else None
    if flags & w.KEPT:
        return local + link
    after = local + link
    if after >= committed and not over:
        return None
    if after >= committed or int(meta["link"][after]) & w.FLAG_MASK & w.FIRST:
        return local if flags & w.TERMINATED else None
    return after


@dataclass(frozen=True, slots=True)
class Steps:
    """The committed rows of one environment of one stream, in order: rows 0 .. T-1.

    Attributes:
        reward: float64 [T].
        terminated, truncated: bool [T].
        first: bool [T], first row of an episode.
        closing: bool [T], a row that is only the observation after an episode's last step ("next_step").
        kept: bool [T], the row ended its episode and its final observation is kept beside it ("same_step", "disabled").
        handed: True if final observations are kept beside their rows (or missing), and never are the next row.
        over: True if no row will ever follow the last one: the stream has ended.
    """

    reward: Array
    terminated: Array
    truncated: Array
    first: Array
    closing: Array
    kept: Array
    handed: bool
    over: bool = False

    def __len__(self) -> int:
        return len(self.reward)

    def ended(self, at: int) -> bool:
        """True if a row ends its episode."""
        return bool(self.terminated[at] or self.truncated[at])


@dataclass(frozen=True, slots=True)
class Reached:
    """The result of a transition of up to n steps.

    Attributes:
        reward: sum of gamma^k * reward_k over the steps used, float64.
        discount: gamma^(steps used).
        used: Steps used, 1 to n.
        last: Row of the last step used; `terminated` and `truncated` are taken from it.
        following: Row of the next observation; `last` itself if the episode terminated and its final observation was not kept, or
            will never come (`terminated` masks it then).
        kept: True if the next observation is the one kept beside row `last`.
    """

    reward: float
    discount: float
    used: int
    last: int
    following: int
    kept: bool


def n_step(steps: Steps, at: int, n: int, gamma: float, *, bootstrap: bool = False) -> Reached | None:
    """The transition of up to `n` steps from row `at`, or None when there is none.

    The transition ends with the first step that terminates or truncates, that step included. Each step needs the observation after it.
    If that observation will never come (after the last row of a stream that has ended or of a cut episode, or after a truncated step
    whose final observation was lost), the transition ends one step earlier; a terminated step does not need it. If the observation may
    still come (after the newest rows), the transition also ends one step earlier with `bootstrap`; otherwise there is none.
    """
    if steps.closing[at]:
        return None
    total, discount = 0.0, 1.0
    for k in range(n):
        row = at + k
        ended = steps.ended(row)
        if ended and steps.handed:
            if not steps.kept[row] and not steps.terminated[row]:
                return None if k == 0 else Reached(total, discount, k, row - 1, row, kept=False)
            kept = bool(steps.kept[row])
            return Reached(total + discount * steps.reward[row], discount * gamma, k + 1, row, row, kept)
        if row + 1 >= len(steps) or steps.first[row + 1]:
            may_come = row + 1 >= len(steps) and not steps.over
            if steps.terminated[row] and not may_come:
                return Reached(total + discount * steps.reward[row], discount * gamma, k + 1, row, row, kept=False)
            if k == 0 or (may_come and not bootstrap):
                return None
            return Reached(total, discount, k, row - 1, row, kept=False)
        total += discount * float(steps.reward[row])
        discount *= gamma
        if ended or k == n - 1:
            return Reached(total, discount, k + 1, row, row + 1, kept=False)
    return None


ZEROS = -1
"""A frame that is zeros."""


def frames(steps: Steps, at: int, stack: int, *, repeat: bool) -> list[int]:
    """Rows of the `stack` frames that end with row `at`, oldest first. Before the episode's start: its first row again, or ZEROS."""
    rows = [at]
    while len(rows) < stack:
        oldest = rows[0]
        if oldest == ZEROS or (steps.first[oldest] and not repeat):
            rows.insert(0, ZEROS)
        else:
            rows.insert(0, oldest if steps.first[oldest] else oldest - 1)
    return rows


def following_frames(steps: Steps, reached: Reached, stack: int, *, repeat: bool) -> list[int]:
    """Rows of the `stack` frames that end with the next observation; -2 - t stands for the observation kept beside row t."""
    if reached.kept:
        return [*frames(steps, reached.last, stack, repeat=repeat), -2 - reached.last][1:]
    return frames(steps, reached.following, stack, repeat=repeat)


def sequence(steps: Steps, at: int, length: int, *, across: bool = False, pad: bool = True) -> list[int] | None:
    """Rows of a sequence from row `at`, ZEROS after its episode's end, or None if the sequence is not complete.

    A sequence within one episode ends with the episode's last step (also of a cut episode, or of a stream that has ended); only with
    `pad` may it be shorter than `length`. A sequence across episodes takes every row, also observation-only rows.
    """
    rows: list[int] = []
    if steps.closing[at] and not across:
        return None
    for row in range(at, at + length):
        if not across and rows and steps.ended(row - 1):
            break
        if row >= len(steps):
            if across or not rows or not steps.over:
                return None
            break
        if not across and rows and steps.first[row]:
            break
        rows.append(row)
    if len(rows) < length and not pad:
        return None
    return rows + [ZEROS] * (length - len(rows))


def episode(steps: Steps, at: int, max_length: int) -> list[int] | None:
    """Rows of the whole episode that begins with row `at`, ZEROS after it; None if it has not ended, was cut, or is too long."""
    if not steps.first[at]:
        return None
    rows: list[int] = []
    for row in range(at, min(at + max_length, len(steps))):
        if rows and steps.first[row]:
            return None
        rows.append(row)
        if steps.ended(row):
            return rows + [ZEROS] * (max_length - len(rows))
    return None


def rollout(envs: list[Steps], tick: int, ticks: int, stride: int) -> list[list[int]] | None:
    """Rows [ticks][environment] of a rollout from a tick of its stream.

    None if the tick is not a multiple of the stride, or the rollout is not complete yet.
    """
    if tick % stride or any(tick + ticks > len(steps) for steps in envs):
        return None
    return [[row] * len(envs) for row in range(tick, tick + ticks)]


def following(steps: Steps, rows: list[int]) -> list[int] | None:
    """Rows of the next observation of each row of a window, as in 1-step transitions; None if a row has no next observation.

    -2 - t stands for the observation kept beside row t. ZEROS and observation-only rows have ZEROS.
    """
    found: list[int] = []
    for row in rows:
        if row == ZEROS or steps.closing[row]:
            found.append(ZEROS)
            continue
        reached = n_step(steps, row, 1, 1.0)
        if reached is None:
            return None
        found.append(-2 - row if reached.kept else reached.following)
    return found


def probabilities(priorities: Array, alpha: float, eps: float) -> Array:
    """P(i) = p_i / sum p, p_i = (|priority_i| + eps)^alpha, float64; uniform where all p are 0."""
    p = (np.abs(priorities.astype(np.float64)) + eps) ** alpha
    return np.full(len(p), 1.0 / len(p)) if p.sum() == 0 else p / p.sum()


def importance_weights(every: Array, drawn: Array, beta: float, normalize: str) -> Array:
    """(N * P(i))^-beta, divided by 1 ("none"), by the batch's largest ("batch") or by the table's largest ("buffer"), float64.

    Args:
        every: Probabilities of all N rows.
        drawn: Indices of the rows of the batch.
        beta: The exponent.
        normalize: "none", "batch" or "buffer".
    """
    positive = every[every > 0]
    weights = (len(every) * every[drawn]) ** -beta
    largest = {"none": 1.0, "batch": weights.max(), "buffer": float(((len(every) * positive) ** -beta).max())}
    return np.asarray(weights / largest[normalize])


def sequence_priority(errors: Array, mask: Array, eta: float) -> Array:
    """Eta * max |d| + (1 - eta) * mean |d| over the steps in `mask`, float64 [n]; 0 if a sequence has none."""
    out = np.zeros(len(errors))
    for i, (row, counted) in enumerate(zip(errors.astype(np.float64), mask, strict=True)):
        sizes = [abs(d) for d, c in zip(row.tolist(), counted.tolist(), strict=True) if c]
        if sizes:
            out[i] = eta * max(sizes) + (1 - eta) * sum(sizes) / len(sizes)
    return out


def padded(values: list[Array], longest: int, inner: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Values [length, *inner] as [n, longest, *inner] with zeros after each, a mask bool [n, longest], lengths int64 [n]."""
    out = np.zeros((len(values), longest, *inner), values[0].dtype)
    mask = np.zeros((len(values), longest), bool)
    for i, value in enumerate(values):
        for j in range(len(value)):
            out[i, j], mask[i, j] = value[j], True
    return out, mask, np.array([len(value) for value in values], np.int64)


def packed(values: list[Array]) -> tuple[Array, Array, Array]:
    """Values [length, *inner] one after the other; int32 [n + 1], the start of each and the end of the last; int32, positions in each."""
    starts, places = [0], list[int]()
    for value in values:
        starts.append(starts[-1] + len(value))
        places += range(len(value))
    return np.concatenate(values), np.array(starts, np.int32), np.array(places, np.int32)
