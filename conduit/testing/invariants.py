"""Invariants of a table at rest, also after processes were killed: checks that raise AssertionError and name the page.

At rest means that no process writes, and that dead participants have been recovered.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np

from conduit.native.jit import entry
from conduit.sampling.candidates import rows_to_draw
from conduit.store.format import words as w
from conduit.store.pages import protocol
from conduit.store.tables.view import TableView
from conduit.testing import rows

Array = np.ndarray[Any, Any]


def hazards(view: TableView) -> Array:
    """The segment's hazard slots, int64 [participants, slots], zero where nothing is leased."""
    layout = view.segment.layout
    shape = (layout.spec.max_participants, w.HAZARDS_PER_PARTICIPANT)
    return view.segment.array(layout.hazards, shape, np.dtype(np.int64))


def hazard(view: TableView, slot: int = 0) -> int:
    """Address of one of this process's own hazards, for kernels that are called by hand."""
    return int(hazards(view)[view.check_open().number, slot:].ctypes.data)


def slots_in_use(view: TableView) -> int:
    """Hazards of this process that a lease, a claim or a call uses."""
    return int(np.count_nonzero(view.segment.seat[w.PROCESS_SLOTS // 8 :]))


def kinds(view: TableView) -> Array:
    """Kind of each page (words.FREE, INIT, OPEN, SEALED), int64 [pages]."""
    found: Array = view.pages()[:, w.PAGE_STATE // 8] & w.KIND_MASK
    return found


def check_nothing_leaked(view: TableView) -> None:
    """Every page is free or sealed, and no lease is left."""
    found = kinds(view)
    assert np.isin(found, (w.FREE, w.SEALED)).all(), (
        f"pages {np.flatnonzero(~np.isin(found, (w.FREE, w.SEALED)))}: {found}"
    )
    left = np.argwhere(hazards(view))
    assert not len(left), f"leases left in (participant, slot) {left.tolist()}"
    seats = view.segment.array(view.layout.seats, (view.segment.layout.spec.max_participants, 16), np.dtype(np.int64))
    left = np.argwhere(seats[:, w.SEAT_WEIGHING // 8 : w.SEAT_WRITERS // 8])
    assert not len(left), f"pages are marked by (participant, mark) {left.tolist()}"


def check_every_page_can_be_claimed(view: TableView) -> None:
    """Claim all pages, see that none is missing or given twice, and free them; the rows are gone afterwards."""
    seat = view.check_open()
    claimed = [entry(protocol.claim)(view.address, seat.number, 0) for _ in range(view.layout.pages)]
    assert sorted(claimed) == list(range(view.layout.pages)), f"claimed {claimed}"
    assert entry(protocol.claim)(view.address, seat.number, 0) == -1
    for page in claimed:
        entry(protocol.free)(view.address, page)


def anchor_ranges(view: TableView) -> dict[int, list[tuple[int, int, int]]]:
    """{stream: [(first tick, end tick, page)]} of the rows that each page may be sampled for, in order."""
    found = defaultdict(list)
    future = int(view.descriptor[w.VIEW_FUTURE // 8])
    for page, words in enumerate(view.pages().tolist()):
        kind = words[w.PAGE_STATE // 8] & w.KIND_MASK
        if kind not in (w.OPEN, w.SEALED):
            continue
        envs = words[w.PAGE_ENVS // 8]
        goes_on = kind == w.OPEN or words[w.PAGE_ENDED // 8] == 0
        end = words[w.PAGE_COMMITTED // 8] // envs - (future if goes_on else 0)
        first = words[w.PAGE_FIRST // 8] // envs
        if end > first:
            tick = words[w.PAGE_TICK // 8]
            found[words[w.PAGE_STREAM // 8]].append((tick + first, tick + end, page))
    return {stream: sorted(ranges) for stream, ranges in found.items()}


def offered_ranges(view: TableView, need: int) -> dict[int, list[tuple[int, int, int]]]:
    """The same of what draws choose among at this moment, for windows of `need` ticks behind their first."""
    found = defaultdict(list)
    for page, words in enumerate(view.pages().tolist()):
        begin, end, _, _, envs, _ = rows_to_draw(view.address, page, need, 0)
        if end > begin:
            tick = words[w.PAGE_TICK // 8]
            found[words[w.PAGE_STREAM // 8]].append((tick + begin // envs, tick + end // envs, page))
    return {stream: sorted(ranges) for stream, ranges in found.items()}


def check_each_row_is_drawn_from_one_page(view: TableView, need: int | None = None) -> None:
    """No two pages may be sampled for the same tick of a stream, by the widest window or one of `need` ticks."""
    for stream, ranges in (anchor_ranges(view) if need is None else offered_ranges(view, need)).items():
        for (_, end, page), (first, _, following) in itertools.pairwise(ranges):
            assert end <= first, f"stream {stream}: pages {page} and {following} both hold ticks {first} to {end}"


def check_counts(view: TableView, inserted: int) -> None:
    """The table counts exactly `inserted` rows as ever committed, those that are there, and all others as evicted.

    For a table without resets and deletions; it need not be at rest.
    """
    pages = view.pages()
    live = pages[np.isin(pages[:, w.PAGE_STATE // 8] & w.KIND_MASK, (w.OPEN, w.SEALED))]
    there = int((live[:, w.PAGE_COMMITTED // 8] - live[:, w.PAGE_HALO // 8]).sum())
    counts = view.counts()
    found = (counts.inserted, counts.size, counts.evicted, counts.deleted)
    assert found == (inserted, there, inserted - there, inserted - there), f"{counts}, {there} rows are there"


def check_proving_rows(view: TableView) -> int:
    """Check every committed row of a table of `rows.SCHEMA`: whole, and numbered on from tick to tick.

    Returns:
        Rows checked, halo copies included.
    """
    total = 0
    for page, words in enumerate(view.pages().tolist()):
        if words[w.PAGE_STATE // 8] & w.KIND_MASK not in (w.OPEN, w.SEALED):
            continue
        count, envs, halo = (words[offset // 8] for offset in (w.PAGE_COMMITTED, w.PAGE_ENVS, w.PAGE_HALO))
        assert halo <= count <= view.layout.page_rows, f"page {page}: {count} rows committed, halo {halo}"
        start = page * view.layout.page_rows
        torn = np.zeros(count, np.uint8)
        columns = (*view.columns.values(), view.terminated, view.truncated)
        addresses = [column[start:].ctypes.data for column in columns]
        bad = entry(rows.find_torn_rows)(*addresses, count, torn.ctypes.data)
        assert bad == 0, f"page {page}: rows {np.flatnonzero(torn).tolist()} are torn"
        numbers = view.columns["obs"][start : start + count, :2].reshape(-1, envs, 2)
        assert (numbers[:, :, 0] == numbers[0, 0, 0] + np.arange(envs)).all(), f"page {page}: environments are mixed"
        assert (np.diff(numbers[:, :, 1], axis=0) == 1).all(), f"page {page}: numbers {numbers[:, 0, 1].tolist()}"
        assert (numbers[:, :, 1] == numbers[:, :1, 1]).all(), f"page {page}: environments out of step"
        total += count
    return total
