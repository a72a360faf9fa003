"""Whole draws on the device: anchors of transitions (rows that a window is built around), and the keys of these rows.

If a drawn row anchors no window, the kernel draws again at once, by the same counters as the CPU (conduit.sampling.uniform). So the
same pages and seed give the same rows. All numbers that change from draw to draw lie in device memory. So each launch of a captured
graph makes a new draw from the present pages.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from conduit.errors import ConfigError
from conduit.kernels.gpu.launch import LARGEST_PART, check, launch, tiles
from conduit.kernels.gpu.philox import random_pair, scale_to
from conduit.kernels.gpu.transitions import walk_step
from conduit.kernels.spec.windows import Transition
from conduit.store.format import words

_BLOCK = 128
MOST_TRIES = 4096
"""Draws of one slot before the kernel gives up: after so many rows without an anchor, almost no row is one."""
_META = tl.constexpr(words.META_BYTES // 4)


@triton.jit
def _position(state, total, place, tries):
    """The position in [0, total) of each slot's draw number `tries`."""
    first, second = random_pair(tl.load(state), tl.load(state + 1), (place >> 1) | (tries << 44))
    return scale_to(tl.where((place & 1) != 0, second, first), total)


@triton.jit
def _begins(
    meta, row, wanted, committed, over, gone, N: tl.constexpr, BOOTSTRAP: tl.constexpr, PAGE_ROWS: tl.constexpr
):
    """Whether each wanted row anchors a transition of up to N steps now, and is not deleted."""
    page = row // PAGE_ROWS
    limit = page * PAGE_ROWS + tl.load(committed + page, mask=wanted, other=0)
    end = (page + 1) * PAGE_ROWS
    ends_here = tl.load(over + page, mask=wanted, other=0)
    local = (row - page * PAGE_ROWS).to(tl.int32)
    bits = tl.load(gone + page * ((PAGE_ROWS + 31) // 32) + (local >> 5), mask=wanted, other=0)
    ok = wanted & (((bits >> (local & 31)) & 1) == 0)
    walking = ok
    at = row
    for k in range(N):
        ahead, ended, refused, short = walk_step(meta, at, walking, limit, end, ends_here, k, BOOTSTRAP)
        ok = ok & ((walking & refused) == 0)
        walking = walking & (refused == 0) & (short == 0) & (ended == 0)
        at = tl.where(walking, ahead, at)
    return ok


@triton.jit(do_not_specialize=["count"])
def _drawable(
    leaves,
    begins,
    ends,
    meta,
    committed,
    over,
    gone,
    out,
    count,
    N: tl.constexpr,
    BOOTSTRAP: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    page = row // PAGE_ROWS
    local = row - page * PAGE_ROWS
    leaf = tl.load(leaves + row, mask=row < count, other=0)
    wanted = (row < count) & (leaf != 0)
    wanted = wanted & (local >= tl.load(begins + page, mask=wanted, other=0))
    wanted = wanted & (local < tl.load(ends + page, mask=wanted, other=0))
    ok = _begins(meta, row, wanted, committed, over, gone, N, BOOTSTRAP, PAGE_ROWS)
    tl.store(out + row, tl.where(ok, leaf, 0), mask=row < count)


@triton.jit(do_not_specialize=["count"])
def _anchors(
    state,
    starts,
    firsts,
    listed,
    meta,
    committed,
    over,
    gone,
    rows,
    given_up,
    count,
    N: tl.constexpr,
    BOOTSTRAP: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    TRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    used = tl.load(listed)
    total = tl.load(starts + used)
    chosen = place * 0 - 1
    # Triton's interpreter does not take a scalar as a mask
    open_ = place < tl.where(total > 0, count, 0)
    tries = total * 0
    while (tl.max(open_.to(tl.int32), 0) > 0) & (tries < TRIES):
        position = _position(state, total, place, tries)
        low = place * 0
        span = used
        for _ in range(STEPS):
            half = span >> 1
            low += tl.where(tl.load(starts + low + half) <= position, half, 0)
            span -= half
        row = tl.load(firsts + low) + position - tl.load(starts + low)
        ok = _begins(meta, row, open_, committed, over, gone, N, BOOTSTRAP, PAGE_ROWS)
        chosen = tl.where(ok, row, chosen)
        open_ = open_ & (ok == 0)
        tries += 1
    tl.store(rows + place, chosen, mask=place < count)
    tl.atomic_add(given_up, tl.sum(((place < count) & (chosen < 0)).to(tl.int32), 0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def _keys(
    rows, meta, names, streams, ids, versions, episodes, steps, count, PAGE_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + place, mask=place < count, other=-1)
    there = row >= 0
    page = row // PAGE_ROWS
    word = meta + row * _META
    tl.store(
        ids + place,
        tl.load(names + page, mask=there, other=-1) + tl.where(there, row % PAGE_ROWS, 0),
        mask=place < count,
    )
    tl.store(versions + place, tl.load(word, mask=there, other=0).to(tl.int64), mask=place < count)
    tl.store(steps + place, tl.load(word + 1, mask=there, other=0).to(tl.int64), mask=place < count)
    episode = tl.load(word + 2, mask=there, other=0).to(tl.int64) & 0xFFFFFFFF
    tl.store(episodes + place, (tl.load(streams + page, mask=there, other=0) << 32) | episode, mask=place < count)


def anchors(
    state: Any,
    starts: Any,
    firsts: Any,
    listed: Any,
    meta: Any,
    committed: Any,
    over: Any,
    gone: Any,
    rows: Any,
    given_up: Any,
    *,
    window: Transition,
    page_rows: int,
) -> None:
    """Draw rows that anchor a transition, each with equal probability: the same rows as conduit.sampling.uniform.

    Args:
        state: int64 [2], seed and number of the draw (conduit.kernels.gpu.philox).
        starts: int64 [ranges + 1], number of rows in all earlier ranges; the last element is the total.
        firsts: int64 [ranges], first row of each range.
        listed: int64 [1], number of ranges now, at most the length of `firsts`; not checked.
        meta: int32 [rows, 4], the column `meta`.
        committed: int64 [pages], committed rows of each page, from its first row on.
        over: int64 [pages], not 0 if no row will ever follow the last committed row.
        gone: int32 [pages, ceil(page_rows / 32)], bit i % 32 of word i // 32 is 1 if local row i was deleted since `meta` was
            copied. Rows that `meta` marks as deleted are not drawn either.
        rows: int64 [count], overwritten; -1 if the ranges are empty, or almost none of their rows is an anchor.
        given_up: int64 [1], grows by the number of -1 in `rows`.
        window: The transition.
        page_rows: Rows of a page.

    Raises:
        FieldError: Wrong tensors.
        ConfigError: `firsts` is empty, or a page has no rows.
    """
    check(state, "state", "int64", (2,))
    check(firsts, "firsts", "int64", (None,), like=state)
    check(starts, "starts", "int64", (len(firsts) + 1,), like=state)
    check(listed, "listed", "int64", (1,), like=state)
    check(meta, "meta", "int32", (None, words.META_BYTES // 4), like=state)
    check(committed, "committed", "int64", (None,), like=state)
    check(over, "over", "int64", (len(committed),), like=state)
    check(gone, "gone", "int32", (len(committed), tiles(page_rows, 32)), like=state)
    check(rows, "rows", "int64", (None,), like=state)
    check(given_up, "given_up", "int64", (1,), like=state)
    if len(firsts) == 0 or page_rows < 1 or len(rows) > LARGEST_PART:
        raise ConfigError(
            f"Expected room for at least one range, page_rows of at least 1 and at most {LARGEST_PART} samples, got "
            f"{len(firsts)}, {page_rows} and {len(rows)}"
        )
    launch(
        _anchors,
        tiles(len(rows), _BLOCK),
        state,
        starts,
        firsts,
        listed,
        meta,
        committed,
        over,
        gone,
        rows,
        given_up,
        len(rows),
        num_warps=4,
        N=window.n_step,
        BOOTSTRAP=int(window.newest == "bootstrap"),
        PAGE_ROWS=page_rows,
        STEPS=len(firsts).bit_length(),
        TRIES=MOST_TRIES,
        BLOCK=_BLOCK,
    )


def drawable(
    leaves: Any,
    begins: Any,
    ends: Any,
    meta: Any,
    committed: Any,
    over: Any,
    gone: Any,
    out: Any,
    *,
    window: Transition,
    page_rows: int,
) -> None:
    """Copy the leaves of rows that a draw may choose, with 0 for all other rows, as conduit.sampling.marks does on the CPU.

    With these leaves, a tree (conduit.kernels.gpu.priorities) gives the CPU's rows and probabilities; call `priorities.build` next.
    Policy versions are ignored. Call it again whenever `committed`, `over`, `gone` or the ranges change: they decide which rows may be
    drawn.

    Args:
        leaves: uint32 [rows], of all rows.
        begins: int64 [pages], the first local row of each page that may anchor a window.
        ends: int64 [pages], the local row after the last one that may; at most `begins` if there is none.
        meta: int32 [rows, 4], the column `meta`.
        committed: int64 [pages], committed rows of each page, from its first row on.
        over: int64 [pages], not 0 if no row will ever follow the last committed row.
        gone: int32 [pages, ceil(page_rows / 32)], deleted rows, as for `anchors`.
        out: uint32 [rows or more], the first `rows` overwritten; for example a tree's leaves.
        window: The transition.
        page_rows: Rows of a page.

    Raises:
        FieldError: Wrong tensors.
        ConfigError: A page has no rows, the rows are not whole pages, or `out` is too short.
    """
    check(leaves, "leaves", "uint32", (None,))
    check(begins, "begins", "int64", (None,), like=leaves)
    pages = len(begins)
    for name, tensor in (("ends", ends), ("committed", committed), ("over", over)):
        check(tensor, name, "int64", (pages,), like=leaves)
    if page_rows < 1 or pages * page_rows != len(leaves):
        raise ConfigError(
            f"Expected leaves of {pages} whole pages, as many as there are begins, got {len(leaves)} leaves and page_rows={page_rows}"
        )
    check(meta, "meta", "int32", (len(leaves), words.META_BYTES // 4), like=leaves)
    check(gone, "gone", "int32", (pages, tiles(page_rows, 32)), like=leaves)
    check(out, "out", "uint32", (None,), like=leaves)
    if len(out) < len(leaves):
        raise ConfigError(f"Expected out of at least {len(leaves)} leaves, got {len(out)}")
    launch(
        _drawable,
        tiles(len(leaves), _BLOCK),
        leaves,
        begins,
        ends,
        meta,
        committed,
        over,
        gone,
        out,
        len(leaves),
        num_warps=4,
        N=window.n_step,
        BOOTSTRAP=int(window.newest == "bootstrap"),
        PAGE_ROWS=page_rows,
        BLOCK=_BLOCK,
    )


def keys(
    rows: Any,
    meta: Any,
    names: Any,
    streams: Any,
    ids: Any,
    versions: Any,
    episodes: Any,
    steps: Any,
    *,
    page_rows: int,
) -> None:
    """Ids, versions, episode numbers and steps of rows.

    Args:
        rows: int64 [count], -1 for none (id -1, zeros).
        meta: int32 [rows, 4], the column `meta`.
        names: int64 [pages], the id of each page's first row.
        streams: int64 [pages], the number of each page's stream.
        ids: int64 [count], overwritten.
        versions: The same.
        episodes: The same.
        steps: The same.
        page_rows: Rows of a page.

    Raises:
        FieldError: Wrong tensors.
    """
    check(rows, "rows", "int64", (None,))
    check(meta, "meta", "int32", (None, words.META_BYTES // 4), like=rows)
    check(names, "names", "int64", (None,), like=rows)
    check(streams, "streams", "int64", (len(names),), like=rows)
    made = {"ids": ids, "versions": versions, "episodes": episodes, "steps": steps}
    for name, tensor in made.items():
        check(tensor, name, "int64", (len(rows),), like=rows)
    launch(
        _keys,
        tiles(len(rows), _BLOCK),
        rows,
        meta,
        names,
        streams,
        *made.values(),
        len(rows),
        num_warps=4,
        PAGE_ROWS=page_rows,
        BLOCK=_BLOCK,
    )
