"""A read-only look at an engine from outside: its tables, policies and participants.

A look takes no seat, no lock and no mapping. It reads words through a read-only descriptor, so it cannot disturb the engine, and a
segment that is truncated meanwhile gives a short read instead of a bus error. The kernel says which processes live. The trade-off: a
look at a running engine is not a consistent snapshot. Each number is right for some moment during the call, and sums may differ by
the rows that were written meanwhile.

An engine that is dead, damaged or another user's is a state of the result, not an error; only an unknown name is an error.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import numpy as np

from conduit.errors import AccessDenied, BadSegment, EngineNotFound
from conduit.field import Field
from conduit.plane.deliver.episodes import read_ring
from conduit.plane.observe.engines import backing_of, clean, engines, is_there, not_found
from conduit.plane.observe.status import (
    ClaimStatus,
    Cleaned,
    EngineStatus,
    EpisodesStatus,
    LimiterStatus,
    PageCounts,
    ParticipantStatus,
    PolicyStatus,
    QueueStatus,
    State,
    TableStatus,
)
from conduit.store.format import words as w
from conduit.store.format.episode_records import ring_bytes
from conduit.store.format.layout import (
    HEADER_CLOSED,
    HEADER_PID,
    HEADER_TIME,
    SegmentLayout,
    TableLayout,
    WeightsLayout,
)
from conduit.store.format.sizes import row_stride
from conduit.store.format.soundness import limits_of_words
from conduit.store.pages.row_counts import Counts, counts_over
from conduit.store.segment.leftovers import fate_of, told
from conduit.store.segment.locks import LOCK_CREATOR, LOCK_PUBLISHERS, held
from conduit.store.segment.names import SHM_DIRECTORY, Backing, open_segment
from conduit.store.segment.participants import LINE_NAME, LINE_PID, LINE_ROLES, LINE_ROWS, LINE_SINCE, ROLES
from conduit.store.segment.segment import read_layout
from conduit.store.tables.limit_checks import why_not_inserted, why_not_sampled
from conduit.store.tables.queue import count_rows

Words = np.ndarray[Any, np.dtype[np.int64]]


def inspect(name: str) -> EngineStatus:
    """Look at an engine without attaching to it; does not block and changes nothing.

    Raises:
        ConfigError: The name cannot be an engine's.
        EngineNotFound: There is no engine of this name.
    """
    backing = backing_of(name)

    def unread(state: State, problem: str | None, size: int = 0, in_use: bool = False) -> EngineStatus:
        return EngineStatus(name, state, problem, backing, size, in_use, state == "starting", time.monotonic())

    try:
        fd = open_segment(name, os.O_RDONLY)
    except AccessDenied as error:
        return unread("denied", str(error))
    except BadSegment as error:
        return unread("damaged", str(error))
    except EngineNotFound:
        if not is_there(name):
            raise not_found(name) from None
        return unread("dead", "the process that made its memfd is gone; only the note of it is left")
    try:
        size, in_use = os.fstat(fd).st_size, held(fd)
        if not any(os.pread(fd, 8, 0)):  # the magic word is written last
            if held(fd, LOCK_CREATOR, 1):
                return unread("starting", None, size, in_use)
            return unread("dead", "its creator died before it was finished", size, in_use)
        try:
            return _look(name, fd, backing, read_layout(fd, name))
        except BadSegment as error:
            return unread("damaged", str(error), size, in_use)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            return unread("damaged", f"its header cannot be read: {error}", size, in_use)
    finally:
        os.close(fd)


def _read(fd: int, offset: int, count: int) -> Words:
    """`count` words, beginning at byte `offset`."""
    data = os.pread(fd, 8 * count, offset)
    if len(data) < 8 * count:
        raise BadSegment(f"Expected {8 * count} bytes at {offset}, got {len(data)}: it has just been truncated")
    return np.frombuffer(data, "<i8")


def _look(name: str, fd: int, backing: Backing, layout: SegmentLayout) -> EngineStatus:
    at = time.monotonic()
    header = _read(fd, 0, HEADER_CLOSED // 8 + 1)
    fate = fate_of(fd)
    hazards = _read(fd, layout.hazards, layout.hazard_count).reshape(-1, w.HAZARDS_PER_PARTICIPANT)
    blocks = {
        one.name: _read(fd, one.blocks, one.pages * w.LINE // 8).reshape(-1, w.LINE // 8)
        for one in layout.tables.values()
    }
    participants = _participants(fd, layout, hazards, list(blocks.values()))
    state: State = fate
    if header[HEADER_CLOSED // 8] and fate != "dead":
        state = "closing"
    return EngineStatus(
        name,
        state,
        told(name, fate) if state in ("orphaned", "dead") else None,
        backing,
        layout.size,
        fate != "dead",
        fate == "running",
        at,
        int(header[HEADER_PID // 8]),
        int(header[HEADER_TIME // 8]),
        layout.spec.max_participants,
        participants,
        tuple(
            _table(fd, one, blocks[one.name], hazards, layout.spec.max_participants, participants)
            for one in layout.tables.values()
        ),
        tuple(_policy(fd, one, index) for index, one in enumerate(layout.policies.values())),
    )


def _participants(fd: int, layout: SegmentLayout, hazards: Words, blocks: list[Words]) -> tuple[ParticipantStatus, ...]:
    count = layout.spec.max_participants
    lines = _read(fd, layout.participants, count * w.LINE // 8).reshape(count, -1)
    filling = sum((_filling(pages) for pages in blocks), np.zeros(w.OWNER_MASK + 1, np.int64))
    found = []
    for number in np.flatnonzero(lines[:, LINE_PID]).tolist():
        line = lines[number]
        found.append(
            ParticipantStatus(
                number,
                int(line[LINE_PID]),
                line[LINE_NAME:].tobytes().split(b"\0")[0].decode("utf-8", "replace"),
                held(fd, number, 1),
                int(line[LINE_SINCE]),
                tuple(role for bit, role in enumerate(ROLES) if line[LINE_ROLES] >> bit & 1),
                int(line[LINE_ROWS]),
                int(filling[number]),
                int(np.count_nonzero(hazards[number])),
            )
        )
    return tuple(found)


def _filling(pages: Words) -> Words:
    """Number of these pages that each participant fills, indexed by its seat."""
    states = pages[:, w.PAGE_STATE // 8]
    owned = states[np.isin(states & w.KIND_MASK, (w.INIT, w.OPEN))]
    return np.bincount((owned >> w.OWNER_SHIFT) & w.OWNER_MASK, minlength=w.OWNER_MASK + 1)


def _counts(fd: int, layout: TableLayout, control: Words, pages: Words, seats: int) -> Counts:
    """The counts that a client computes (`TableHandle.counts`), computed here from copies."""
    sides = _read(fd, layout.sides, layout.pages * w.LINE // 8).reshape(-1, w.LINE // 8)
    taken = _read(fd, layout.seats, seats * w.LINE // 8).reshape(-1, w.LINE // 8)
    return counts_over(pages, sides, control, taken, layout.page_rows)


def _limiter(layout: TableLayout, control: Words, counts: Counts) -> LimiterStatus | None:
    limits = layout.limits
    if limits is None:
        return None
    changes = int(control[w.TABLE_LIMITS // 8])
    if changes:
        start = (w.TABLE_LIMITS + 8 + w.LIMITS_BYTES * (changes & 1)) // 8
        limits = limits_of_words(layout, control[start : start + 4].view(np.float64))
    return LimiterStatus(
        limits.samples_per_insert,
        limits.min_size,
        limits.min_diff if math.isfinite(limits.min_diff) else None,
        limits.max_diff if math.isfinite(limits.max_diff) else None,
        counts.inserted,
        counts.sampled,
        counts.deleted,
        counts.reserved,
        counts.granted,
        why_not_sampled(limits, counts, 1),
        why_not_inserted(limits, counts, 1),
    )


def _queue(
    fd: int, layout: TableLayout, pages: Words, control: Words, participants: tuple[ParticipantStatus, ...]
) -> QueueStatus | None:
    if layout.table.kind != "queue":
        return None
    sides = _read(fd, layout.sides, layout.pages * w.LINE // 8).reshape(-1, w.LINE // 8)
    counts = count_rows(pages, sides, layout.table.rollout_length or 0)
    pids = {one.number: one.pid for one in participants}
    claims = tuple(ClaimStatus(number, pids.get(number, 0), rows) for number, rows in sorted(counts.claimed.items()))
    return QueueStatus(
        layout.table.rollout_length,
        counts.waiting,
        counts.unfinished,
        sum(counts.claimed.values()),
        claims,
        int(control[w.TABLE_DELIVERED_AGAIN // 8]),
    )


def _episodes(fd: int, layout: TableLayout) -> EpisodesStatus:
    ring = _read(fd, layout.episodes, ring_bytes(layout.schema) // 8)
    found = read_ring(layout.name, layout.schema, ring.ctypes.data, int(ring[0]), last=100)
    means = None
    if len(found) and found.reward_names:
        means = tuple(np.atleast_1d(found.mean_return).tolist())
    return EpisodesStatus(found.total, len(found), means, found.mean_length if len(found) else None, found.reward_names)


def _table(
    fd: int,
    layout: TableLayout,
    pages: Words,
    hazards: Words,
    seats: int,
    participants: tuple[ParticipantStatus, ...],
) -> TableStatus:
    control = _read(fd, layout.control, w.TABLE_CONTROL_BYTES // 8)
    counts = _counts(fd, layout, control, pages, seats)
    kinds = pages[:, w.PAGE_STATE // 8] & w.KIND_MASK
    by_kind = np.bincount(kinds, minlength=w.SEALED + 1)
    live = pages[np.isin(kinds, (w.OPEN, w.SEALED))]
    # a page that is claimed during the look can show words of two generations
    committed, halo = (live[:, offset // 8].clip(0, layout.page_rows) for offset in (w.PAGE_COMMITTED, w.PAGE_HALO))
    tail = (live[:, w.PAGE_TAIL // 8] & w.TAIL_MASK).clip(0, layout.page_rows)
    own = (committed - halo).clip(0)
    visible = int(own.sum())
    in_use = int((own + halo + tail).sum())
    row_bytes = sum(row_stride(field) for field in layout.schema.fields) + 2 + w.META_BYTES
    row_bytes += 4 if layout.table.priorities is not None else 0
    row_bytes += 8 if layout.table.max_times_sampled is not None else 0
    page_arenas = sum(arena.page_bytes for arena in layout.arenas.values())
    values = int(live[:, w.PAGE_ARENA // 8].clip(0, page_arenas).sum())
    filling = _filling(pages)
    alive = [one.alive for one in participants if filling[one.number]]
    leased = np.unique(hazards[(hazards > layout.page_base) & (hazards <= layout.page_base + layout.pages)])
    return TableStatus(
        name=layout.name,
        kind=layout.table.kind,
        fields=layout.schema.fields,
        observation_names=layout.schema.observation_names,
        reward_names=layout.schema.reward_names,
        fingerprint=layout.schema.fingerprint,
        max_stack=layout.table.max_stack,
        max_n_step=layout.table.max_n_step,
        pages=PageCounts(
            free=int(by_kind[w.FREE]),
            preparing=int(by_kind[w.INIT]),
            open=int(by_kind[w.OPEN]),
            sealed=int(by_kind[w.SEALED]),
            leased=len(leased),
        ),
        page_rows=layout.page_rows,
        capacity=layout.rows,
        rows_visible=counts.size,
        rows_written=counts.inserted,
        rows_evicted=counts.evicted,
        writers_alive=sum(alive),
        writers_dead=len(alive) - sum(alive),
        pages_recovered=int(control[w.TABLE_RECOVERED // 8]),
        priorities_raised=int(control[w.TABLE_CLIPPED // 8]),
        priorities_lowered=int(control[w.TABLE_CLIPPED // 8 + 1]),
        bytes=layout.end - layout.control,
        bytes_per_row=row_bytes + page_arenas // layout.page_rows,
        bytes_per_transition=(
            (row_bytes * in_use + values) / visible if visible else row_bytes + page_arenas / layout.page_rows
        ),
        halo_share=int(halo.sum()) / in_use if in_use else 0.0,
        frozen=bool(control[w.TABLE_EPOCH // 8] & 1),
        limiter=_limiter(layout, control, counts),
        queue=_queue(fd, layout, pages, control, participants),
        episodes=_episodes(fd, layout),
    )


def _policy(fd: int, layout: WeightsLayout, index: int) -> PolicyStatus:
    arrays = sum(Field("weights", one.dtype, one.shape or ()).row_bytes for one in layout.tensors)
    return PolicyStatus(
        layout.name,
        int(_read(fd, layout.control, 1)[0]),
        len(layout.tensors),
        arrays,
        held(fd, LOCK_PUBLISHERS + index, 1),
    )


__all__ = [
    "SHM_DIRECTORY",
    "ClaimStatus",
    "Cleaned",
    "EngineStatus",
    "EpisodesStatus",
    "LimiterStatus",
    "PageCounts",
    "ParticipantStatus",
    "PolicyStatus",
    "QueueStatus",
    "State",
    "TableStatus",
    "clean",
    "engines",
    "inspect",
]
