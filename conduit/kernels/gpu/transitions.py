"""From anchor rows to transitions of n steps, along the links in `meta`, as conduit.kernels.cpu.transitions does on the CPU.

One lane takes one sample, and follows the links by the same rules as the CPU. A row that anchors no such window gets -1 for every row
number, 0 steps, and flags that are False; a gather makes zeros of it. Sums are computed in float64, in the order of the steps, and
rounded once: they equal the CPU's bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from conduit.errors import ConfigError
from conduit.kernels.gpu.elements import constants_of, convert
from conduit.kernels.gpu.launch import LARGEST, LARGEST_PART, as_words, check, launch, row_stride, tiles
from conduit.kernels.spec.transforms import Transform
from conduit.kernels.spec.windows import Transition
from conduit.store.format import words

NUM_WARPS = 4
_BLOCK = 32 * NUM_WARPS
_TERMINATED, _TRUNCATED, _FIRST, _FINAL, _KEPT, _DELETED, _LINK_SHIFT = (
    tl.constexpr(word)
    for word in (
        words.TERMINATED,
        words.TRUNCATED,
        words.FIRST,
        words.FINAL,
        words.KEPT,
        words.DELETED,
        words.LINK_SHIFT,
    )
)
_META = tl.constexpr(words.META_BYTES // 4)


@triton.jit
def _frame_rows(out, place, newest, before, ticks, envs, mask, S: tl.constexpr, REPEAT: tl.constexpr):
    """A stack of frames that ends with row `newest`; the frames before it are `before`, `before` - envs, ..., `ticks` of which exist."""
    for back in tl.static_range(S):
        if back == 0:
            row = newest
        elif REPEAT:
            have = tl.minimum(ticks, back)
            row = tl.where(have > 0, before - (have - 1) * envs, newest)
        else:
            row = tl.where(ticks >= back, before - (back - 1) * envs, -1)
        tl.store(out + place * S + (S - 1 - back), tl.where(newest >= 0, row, -1), mask=mask)


@triton.jit
def walk_step(meta, at, walking, limit, end, over, k, BOOTSTRAP: tl.constexpr):
    """Step k of walks along links, which have reached rows `at`, in pages that end at `end` and are committed up to `limit`.

    `over` is not 0 if no row will ever follow the last committed row.

    Returns:
        Row of the next observation; the flags of an end; whether the row anchors no window; whether the walk ends before this
        step, since the step has no successor (yet).
    """
    word = tl.load(meta + at * _META + 3, mask=walking, other=0)
    # the link is the upper part of an unsigned word
    link = (word.to(tl.int64) & 0xFFFFFFFF) >> _LINK_SHIFT
    ahead = at + link
    inline = (word & _KEPT) == 0
    ended = word & (_TERMINATED | _TRUNCATED)
    refused = ((ahead >= end) & (inline == 0)) | ((word & _FINAL) != 0)
    # windows of other rows may still contain a deleted row
    refused = refused | (((word & _DELETED) != 0) & (k == 0))
    lacks = walking & (link == 0) & ((ended & _TERMINATED) == 0)
    looks = walking & (link != 0) & inline & (refused == 0)
    there = looks & (ahead < limit)
    successor = tl.load(meta + ahead * _META + 3, mask=there, other=_FIRST)
    alone = looks & ((successor & _FIRST) != 0)
    # if the step terminated and no observation will follow, its own observation takes the place of the next one
    stays = alone & ((ended & _TERMINATED) != 0) & (there | (over != 0))
    ahead = at + tl.where(stays, 0, link)
    short = ((alone & (stays == 0)) | lacks) & (refused == 0)
    if BOOTSTRAP:
        refused = refused | (short & (k == 0))
    else:
        # if a successor may still come, the row waits for it
        refused = refused | (short & ((looks & (there == 0) & (over == 0)) | (k == 0)))
    return ahead, ended, refused, short


@triton.jit(do_not_specialize=["count"])
def _resolve(
    rows,
    meta,
    committed,
    over,
    envs,
    reward,
    following,
    returns,
    discounts,
    used_steps,
    terminated,
    truncated,
    stack,
    following_stack,
    shift,
    count,
    WORKS: tl.constexpr,
    N: tl.constexpr,
    GAMMA: tl.constexpr,
    BOOTSTRAP: tl.constexpr,
    S: tl.constexpr,
    REPEAT: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    row = tl.load(rows + place, mask=mask, other=-1)
    ok = row >= 0
    page = row // PAGE_ROWS
    limit = page * PAGE_ROWS + tl.load(committed + page, mask=ok, other=0)
    end = (page + 1) * PAGE_ROWS
    ends_here = tl.load(over + page, mask=ok, other=0)
    walking = ok
    at, last, after = row, row, row
    total = tl.zeros((BLOCK,), tl.float64)
    discount = tl.full((BLOCK,), 1.0, tl.float64)
    used = tl.zeros((BLOCK,), tl.int32)
    flags = tl.zeros((BLOCK,), tl.int32)
    for k in range(N):
        ahead, ended, refused, short = walk_step(meta, at, walking, limit, end, ends_here, k, BOOTSTRAP)
        ok = ok & ((walking & refused) == 0)
        counts = walking & (refused == 0) & (short == 0)
        if reward is not None:
            value = convert(tl.load(reward + at, mask=counts, other=0), tl.float64, WORKS, 0)
            total = tl.where(counts, total + discount * value, total)
        after = tl.where(counts, ahead, tl.where(walking & short, at, after))
        discount = tl.where(counts, discount * GAMMA, discount)
        used += counts.to(tl.int32)
        last = tl.where(counts, at, last)
        flags = tl.where(counts, ended, flags)
        walking = counts & (ended == 0)
        at = tl.where(walking, ahead, at)
    used = tl.where(ok, used, 0)
    flags = tl.where(ok, flags, 0)
    after = tl.where(ok, after, -1)
    tl.store(following + place, after, mask=mask)
    if reward is not None:
        tl.store(returns + place, tl.where(ok, total, 0.0).to(returns.dtype.element_ty), mask=mask)
    tl.store(discounts + place, tl.where(ok, discount, 0.0).to(tl.float32), mask=mask)
    tl.store(used_steps + place, used.to(tl.int64), mask=mask)
    tl.store(terminated + place, (flags & _TERMINATED).to(tl.uint8), mask=mask)
    tl.store(truncated + place, ((flags & _TRUNCATED) >> 1).to(tl.uint8), mask=mask)
    if S > 1:
        many = tl.load(envs + page, mask=ok, other=0).to(tl.int64)
        step = tl.load(meta + row * _META + 1, mask=ok, other=0).to(tl.int64)
        _frame_rows(stack, place, tl.where(ok, row, -1), row - many, step, many, mask, S, REPEAT)
        same = after == last
        # the next observation is the last step's own, or the one after it
        ticks = tl.load(meta + last * _META + 1, mask=ok, other=0).to(tl.int64) + (same == 0).to(tl.int64)
        before = tl.where(same, after - many, last)
        _frame_rows(following_stack, place, after, before, ticks, many, mask, S, REPEAT)
        behind = tl.minimum(used - (ok & same).to(tl.int32), S)
        tl.store(shift + place, behind, mask=mask)


def transitions(
    rows: Any,
    meta: Any,
    committed: Any,
    over: Any,
    envs: Any,
    following: Any,
    discounts: Any,
    used: Any,
    terminated: Any,
    truncated: Any,
    *,
    window: Transition,
    page_rows: int,
    reward: Any = None,
    returns: Any = None,
    reward_transform: Transform | None = None,
    stack: Any = None,
    following_stack: Any = None,
    shift: Any = None,
) -> None:
    """Resolve anchor rows into transitions, in one launch.

    Links in `meta` never lead out of a row's page. Rows are not checked against the table's length.

    Args:
        rows: int64 [batch], anchors: rows of the table, -1 for none.
        meta: int32 [rows of the table, 4], the system column `meta`.
        committed: int64 [pages], committed rows of each page, from its first row on.
        over: int64 [pages], not 0 if no row will ever follow the last committed row.
        envs: int64 [pages], rows per tick of each page.
        following: int64 [batch], row of the next observation, -1 if the row anchors no such window.
        discounts: float32 [batch], gamma^used, 0 if there is no window.
        used: int64 [batch], steps used, 0 if there is no window.
        terminated: bool [batch], the flag of the last step used.
        truncated: bool [batch], the same.
        window: Steps, discount, stack, padding, and the rule for the newest rows.
        page_rows: Rows of a page.
        reward: float32 or float64 [rows of the table], or None without returns.
        returns: float32 or float64 [batch].
        reward_transform: Applied to every single reward, in float64.
        stack: int64 [batch, stack], for a window with a stack: rows of the frames, -1 for zeros.
        following_stack: int64 [batch, stack], the same for the next observation.
        shift: int32 [batch], distance of the second stack from the first (conduit.kernels.gpu.augment).

    Raises:
        FieldError: Wrong tensors.
        ConfigError: A page has no rows, or the outputs do not fit together.
    """
    check(rows, "rows", "int64", (None,))
    batch = len(rows)
    check(meta, "meta", "int32", (None, words.META_BYTES // 4), like=rows)
    check(committed, "committed", "int64", (None,), like=rows)
    check(over, "over", "int64", (len(committed),), like=rows)
    check(envs, "envs", "int64", (len(committed),), like=rows)
    for name, tensor, dtype in (
        ("following", following, "int64"),
        ("discounts", discounts, "float32"),
        ("used", used, "int64"),
        ("terminated", terminated, "bool"),
        ("truncated", truncated, "bool"),
    ):
        check(tensor, name, dtype, (batch,), like=rows)
    if (reward is None) != (returns is None):
        raise ConfigError("Expected both reward and returns, or neither")
    if reward is not None:
        check(reward, "reward", ("float32", "float64"), (len(meta),), like=rows)
        check(returns, "returns", ("float32", "float64"), (batch,), like=rows)
    stacked = (stack, following_stack, shift)
    if any((one is None) == (window.stack > 1) for one in stacked):
        raise ConfigError(
            f"Expected stack, following_stack and shift for a window that stacks, and only then, got {window}"
        )
    if window.stack > 1:
        check(stack, "stack", "int64", (batch, window.stack), like=rows)
        check(following_stack, "following_stack", "int64", (batch, window.stack), like=rows)
        check(shift, "shift", "int32", (batch,), like=rows)
    if page_rows < 1 or batch > LARGEST_PART:
        raise ConfigError(
            f"Expected page_rows of at least 1 and at most {LARGEST_PART} samples, got {page_rows} and {batch}"
        )
    launch(
        _resolve,
        tiles(batch, _BLOCK),
        rows,
        meta,
        committed,
        over,
        envs,
        reward,
        following,
        returns,
        discounts,
        used,
        as_words(terminated),
        as_words(truncated),
        *stacked,
        batch,
        num_warps=NUM_WARPS,
        WORKS=(tuple(constants_of(reward_transform or Transform("float64"), double=True)),),
        N=window.n_step,
        GAMMA=float(window.gamma),
        BOOTSTRAP=int(window.newest == "bootstrap"),
        S=window.stack,
        REPEAT=int(window.padding == "repeat"),
        PAGE_ROWS=page_rows,
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["count"])
def _sum(
    rows,
    used,
    envs,
    reward,
    returns,
    count,
    WORKS: tl.constexpr,
    N: tl.constexpr,
    GAMMA: tl.constexpr,
    ELEMENTS: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    sample = place // ELEMENTS
    row = tl.load(rows + sample, mask=mask, other=-1)
    steps = tl.load(used + sample, mask=row >= 0, other=0)
    page = row // PAGE_ROWS
    many = tl.load(envs + page, mask=row >= 0, other=0)
    end = (page + 1) * PAGE_ROWS
    total = tl.zeros((BLOCK,), tl.float64)
    discount = tl.full((BLOCK,), 1.0, tl.float64)
    for k in range(N):
        at = row + k * many
        counts = (k < steps) & (at < end)
        value = tl.load(reward + at * STRIDE + place % ELEMENTS, mask=counts, other=0)
        total = tl.where(counts, total + discount * convert(value, tl.float64, WORKS, 0), total)
        discount = discount * GAMMA
    tl.store(returns + place, total.to(returns.dtype.element_ty), mask=mask)


def sums(
    rows: Any,
    used: Any,
    envs: Any,
    reward: Any,
    returns: Any,
    *,
    window: Transition,
    page_rows: int,
    transform: Transform | None = None,
) -> None:
    """Sum up a reward of any shape over the steps that `transitions` found, each element by itself, in one launch.

    Args:
        rows: int64 [batch], anchors, -1 for none.
        used: int64 [batch], steps used, one tick apart, 0 if the row anchors no window.
        envs: int64 [pages], rows per tick of each page.
        reward: float32 or float64 [rows of the table, *shape].
        returns: float32 or float64 [batch, *shape], overwritten; zeros if no steps are used.
        window: Steps and discount.
        page_rows: Rows of a page.
        transform: Applied to every single reward, in float64.

    Raises:
        FieldError: Wrong tensors.
        ConfigError: A page has no rows, or there are too many elements.
    """
    check(rows, "rows", "int64", (None,))
    batch = len(rows)
    check(used, "used", "int64", (batch,), like=rows)
    check(envs, "envs", "int64", (None,), like=rows)
    check(reward, "reward", ("float32", "float64"), (None,) * reward.dim(), like=rows, strided=True)
    check(returns, "returns", ("float32", "float64"), (batch, *reward.shape[1:]), like=rows)
    elements = math.prod(reward.shape[1:])
    if page_rows < 1 or batch * elements > LARGEST:
        raise ConfigError(
            f"Expected page_rows of at least 1 and at most {LARGEST} returns, got {page_rows} and {batch * elements}"
        )
    launch(
        _sum,
        tiles(batch * elements, _BLOCK),
        rows,
        used,
        envs,
        reward,
        returns,
        batch * elements,
        num_warps=NUM_WARPS,
        WORKS=(tuple(constants_of(transform or Transform("float64"), double=True)),),
        N=window.n_step,
        GAMMA=float(window.gamma),
        ELEMENTS=elements,
        STRIDE=row_stride(reward),
        PAGE_ROWS=page_rows,
        BLOCK=_BLOCK,
    )
