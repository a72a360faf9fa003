"""Reading a checkpoint into a new segment, before any process can attach to it.

Pages get their places and generations back, so row ids and draws stay the same. Writers and consumers are treated as if they had died
at the moment of the checkpoint (conduit.store.pages.recovery.recover): committed rows stay, their streams end there, and rows that a
consumer had not acknowledged can be claimed again. A page that is not in the checkpoint becomes free, in a new generation, and its rows
count as evicted.
"""

from __future__ import annotations

import dataclasses
import threading
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from conduit.errors import CheckpointError
from conduit.native.jit import entry
from conduit.store.checkpoint.direct_io import BLOCK, HEADER, write_all
from conduit.store.checkpoint.files import DAMAGED, FileReader, Sink
from conduit.store.checkpoint.manifest import MANIFEST, Manifest, TableEntry, column_file, extra_file, policy_file
from conduit.store.checkpoint.save import (
    PLACE_ROWS,
    PLACE_START,
    PLACE_TAIL,
    PLACE_VALUES,
    Progress,
    counts,
    live_pages,
)
from conduit.store.checkpoint.snapshot import TableCut
from conduit.store.format import words as w
from conduit.store.format.columns import columns_of
from conduit.store.format.field_moments import seat_bytes
from conduit.store.format.filenames import safe
from conduit.store.format.layout import WEIGHT_COPIES, SegmentSpec, TableLayout, checked_participants
from conduit.store.format.limit_specs import Limits
from conduit.store.format.soundness import limits_of_words
from conduit.store.pages import recovery, settling
from conduit.store.pages.image import row_parts
from conduit.store.segment import segment as segments
from conduit.store.segment.allocation import allocated_behind
from conduit.store.segment.names import Backing
from conduit.store.segment.segment import Segment
from conduit.store.tables.loader_cursors import Known, write_loader
from conduit.store.tables.statistics import set_totals
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]
LimiterPolicy = Literal["keep", "reset", "rebase"]


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts with which a table's limiter begins after a restore; `limits` are the limits in force, or None."""

    limits: Limits | None
    inserted: int
    sampled: int
    deleted: int


def create_from(
    path: Path,
    manifest: Manifest,
    name: str,
    *,
    limiter: LimiterPolicy | None,
    backing: Backing,
    max_participants: int | None,
    progress: Progress | None,
    replace: bool = False,
) -> tuple[Segment, dict[str, Counts]]:
    """Create a segment with a checkpoint's contents; see `Engine.restore`."""
    spec = spec_of(manifest, max_participants)
    found: dict[str, Counts] = {}
    with segments.making(name, spec, backing, replace=replace) as segment:
        layout = segment.layout
        with FileReader(path, manifest.files, progress) as reader:
            try:
                tables = [_Table(segment, one, manifest.tables[one.name], reader) for one in layout.tables.values()]
                with allocated_behind(segment.lock_fd, layout.size, name, backing):
                    for table in tables:
                        table.read_rows()
                for table in tables:
                    found[table.layout.name] = table.finish(limiter)
                _restore_policies(segment, manifest, reader)
            except KeyError as error:
                raise CheckpointError(f"Expected {path / MANIFEST} to list {error}: {DAMAGED}") from error
        for index, (loader, one) in enumerate(manifest.loaders.items()):
            write_loader(segment, index, loader, Known(one.table, one.seed, one.batch, one.stock))

    return segment, found


def spec_of(manifest: Manifest, max_participants: int | None) -> SegmentSpec:
    """The specification of a restored segment, with the given number of participants, or the checkpoint's."""
    if max_participants is None:
        return manifest.spec
    return dataclasses.replace(manifest.spec, max_participants=checked_participants(max_participants))


def read_extra(path: Path, manifest: Manifest) -> dict[str, bytes]:
    """The caller's own bytes in a checkpoint.

    Raises:
        CheckpointError: One of their files is missing or damaged.
    """
    found = {}
    with FileReader(path, manifest.files, None) as reader:
        for name in manifest.extra:
            file = extra_file(name)
            size = manifest.files[file].size - HEADER if file in manifest.files else -1
            if size < 0:
                raise CheckpointError(f"Expected {path / MANIFEST} to list {file}: {DAMAGED}")
            found[name] = reader.read(file, np.dtype(np.uint8), (size,)).tobytes()
    return found


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of bytes that is contiguous both in a file and in memory: offset in the file, count, offset in the segment."""

    start: int
    count: int
    target: int


def _sink(fd: int, pieces: list[_Piece], row_bytes: int, stride: int) -> Sink:
    """A sink that writes a file's bytes to their places; rows are `stride` bytes apart in memory, and contiguous in the file.

    It writes through a descriptor, which takes a third of the time of touching fresh memory page by page.
    """
    starts = [piece.start for piece in pieces]
    scratch = threading.local()
    one_at_a_time = threading.Lock()  # the kernel serializes writes too, but threads that wait for its lock spin

    def write(data: Array, at: int) -> None:
        with one_at_a_time:
            write_all(fd, data, at)

    def apart(rows: Array) -> Array:
        """Rows, uint8 [n, row_bytes], padded with zeros to the stride."""
        if not hasattr(scratch, "rows"):
            scratch.rows = np.zeros((BLOCK // row_bytes + 1, stride), np.uint8)
        target: Array = scratch.rows[: len(rows)]
        target[:, :row_bytes] = rows
        return target

    def store(target: int, offset: int, data: Array) -> None:
        if row_bytes == stride:
            write(data, target + offset)
            return
        row, skip = divmod(offset, row_bytes)
        at = target + row * stride
        if skip:
            count = min(len(data), row_bytes - skip)
            write(data[:count], at + skip)
            data, at = data[count:], at + stride
        whole = len(data) // row_bytes
        if whole:
            rows = apart(data[: whole * row_bytes].reshape(whole, row_bytes))
            write(rows.reshape(-1), at)
        write(data[whole * row_bytes :], at + whole * stride)

    def put(place: int, data: Array) -> None:
        at = 0
        number = bisect_right(starts, place) - 1
        while at < len(data):
            piece = pieces[number]
            offset = place + at - piece.start
            count = min(len(data) - at, piece.count - offset)
            store(piece.target, offset, data[at : at + count])
            at += count
            number += 1

    return put


def _checked_places(layout: TableLayout, entry_: TableEntry, blocks: Array, places: Array, where: Path) -> list[int]:
    """The pages in the files, in the files' order.

    Raises:
        CheckpointError: A place lies outside the files or the pages.
    """
    pages = np.flatnonzero(places[:, PLACE_START] >= 0)
    pages = pages[np.argsort(places[pages, PLACE_START])]
    taken = places[pages]
    ends = taken[:, PLACE_START] + taken[:, PLACE_ROWS] + taken[:, PLACE_TAIL]
    good = (
        bool(np.isin(pages, live_pages(blocks)).all())
        and (taken[:, PLACE_ROWS] == blocks[pages, w.PAGE_COMMITTED // 8]).all()
        and (taken[:, PLACE_TAIL] == blocks[pages, w.PAGE_TAIL // 8] & w.TAIL_MASK).all()
        and (taken[:, PLACE_ROWS : PLACE_TAIL + 1] >= 0).all()
        and (taken[:, PLACE_ROWS] + taken[:, PLACE_TAIL] <= layout.page_rows).all()
        and [0, *ends.tolist()] == [*taken[:, PLACE_START].tolist(), entry_.rows]
    )
    for number, name in enumerate(layout.arenas):
        first, items = taken[:, PLACE_VALUES + 2 * number], taken[:, PLACE_VALUES + 2 * number + 1]
        good = good and bool((items >= 0).all() and (items <= layout.arenas[name].items).all())
        good = good and [0, *(first + items).tolist()] == [*first.tolist(), entry_.items[name]]
    if not good:
        raise CheckpointError(f"Expected the places in {where} to be those of pages and files: {DAMAGED}")
    return pages.tolist()


class _Table:
    """A table that is being restored: first its rows, through the segment's descriptor, then its words, in memory."""

    def __init__(self, segment: Segment, layout: TableLayout, entry_: TableEntry, reader: FileReader) -> None:
        self.layout = layout
        self._segment = segment
        self._entry = entry_
        self._reader = reader
        words = np.dtype(np.int64)
        folder = entry_.folder
        self._blocks = reader.read(f"{folder}/pages.npy", words, (layout.pages, w.LINE // 8))
        self._sides = reader.read(f"{folder}/sides.npy", words, (layout.pages, w.LINE // 8))
        self._control = reader.read(f"{folder}/control.npy", words, (w.TABLE_CONTROL_BYTES // 8,))
        file = f"{folder}/places.npy"
        self._places = reader.read(file, words, (layout.pages, PLACE_VALUES + 2 * len(layout.arenas)))
        self._pages = _checked_places(layout, entry_, self._blocks, self._places, reader.root / file)

    def read_rows(self) -> None:
        """Read columns and ragged values into their places."""
        layout, places, fd = self.layout, self._places, self._segment.lock_fd
        for column in columns_of(layout):
            pieces = []
            for page in self._pages:
                start, rows, tail = places[page, :PLACE_VALUES].tolist()
                for part in row_parts(layout.page_rows, rows, tail):
                    count = part.stop - part.start
                    target = column.offset + (page * layout.page_rows + part.start) * column.stride
                    pieces.append(_Piece(start * column.row_bytes, count * column.row_bytes, target))
                    start += count
            shape = (self._entry.rows, *column.shape)
            sink = _sink(fd, pieces, column.row_bytes, column.stride)
            self._reader.stream(f"{self._entry.folder}/{column_file(column)}", column.dtype, shape, sink)
        for number, (name, arena) in enumerate(layout.arenas.items()):
            field = layout.schema[name]
            pieces = []
            for page in self._pages:
                first, items = places[page, PLACE_VALUES + 2 * number : PLACE_VALUES + 2 * number + 2].tolist()
                if items:
                    target = arena.offset + page * arena.page_bytes
                    pieces.append(_Piece(first * field.item_bytes, items * field.item_bytes, target))
            shape = (self._entry.items[name], *field.shape[1:])
            file = f"{self._entry.folder}/values/{safe(name)}.npy"
            self._reader.stream(file, np.dtype(field.numpy_dtype), shape, _sink(fd, pieces, 1, 1))

    def finish(self, limiter: LimiterPolicy | None) -> Counts:
        """Restore statistics, words and counts; returns the counts of the limiter."""
        view = TableView(self._segment, self.layout)
        for name, at in self.layout.statistics.items():
            field = self.layout.schema[name]
            shape = (1 + 2 * int(np.prod(field.shape, dtype=np.int64)),)
            file = f"{self._entry.folder}/statistics/{safe(name)}.npy"
            totals = self._reader.read(file, np.dtype(np.float64), shape)
            if totals[0] > 0:
                set_totals(self._segment.array(at, (seat_bytes(field) // 8,), np.dtype(np.float64)), totals)
        _restore_words(view, self._blocks, self._sides, self._control, self._pages)
        return _restore_counts(view, self._entry.sampled, limiter)


def _restore_words(view: TableView, blocks: Array, sides: Array, control: Array, pages: list[int]) -> None:
    """Restore the pages' words: pages in the checkpoint as they were, the others free; then recover pages that were being written."""
    segment, layout = view.segment, view.layout
    left_out = np.setdiff1d(live_pages(blocks), pages)
    own = blocks[left_out, w.PAGE_COMMITTED // 8] - blocks[left_out, w.PAGE_HALO // 8]
    generation = (blocks[left_out, w.PAGE_STATE // 8] >> w.GENERATION_SHIFT) + 1
    past = (blocks[left_out, w.PAGE_PAST // 8] >> w.PAST_SHIFT) + own
    blocks[left_out, w.PAGE_STATE // 8] = (generation << w.GENERATION_SHIFT) | w.FREE
    blocks[left_out, w.PAGE_PAST // 8] = (past << w.PAST_SHIFT) | (generation & w.PAST_MASK)
    blocks[left_out, w.PAGE_COMMITTED // 8] = 0
    blocks[left_out, w.PAGE_HALO // 8] = 0
    sides[left_out] = 0
    control[w.TABLE_LOST // 8] = 0
    for event in (w.TABLE_DATA, w.TABLE_SPACE):
        control[event // 8 : (event + w.LINE) // 8] = 0
    shape = (layout.pages, w.LINE // 8)
    segment.array(layout.blocks, shape, blocks.dtype)[...] = blocks
    segment.array(layout.sides, shape, sides.dtype)[...] = sides
    segment.array(layout.control, control.shape, control.dtype)[...] = control
    states = blocks[:, w.PAGE_STATE // 8].copy()
    used = np.flatnonzero((states & w.KIND_MASK) != w.FREE)
    segment.words[(layout.control + w.TABLE_USED) // 8] = used[-1] + 1 if len(used) else 0
    owned = states[np.isin(states & w.KIND_MASK, (w.INIT, w.OPEN))]
    consumers = sides[:, w.SIDE_CLAIM // 8] & w.CONSUMER_MASK
    owners = np.concatenate([(owned >> w.OWNER_SHIFT) & w.OWNER_MASK, consumers[consumers > 0] - 1])
    for owner in np.unique(owners).tolist():
        entry(recovery.recover)(view.address, owner)
    # rows were copied after the words: rows that were deleted, or delivered for the last time, in between are gone
    entry(settling.settle_restored)(view.address)
    settling.settle_table(view.descriptor)
    segment.words[(layout.control + w.TABLE_RECOVERED) // 8] = int(control[w.TABLE_RECOVERED // 8])
    if layout.table.kind != "queue":
        _cut_streams(view, np.flatnonzero((states & w.KIND_MASK) == w.OPEN))


def _cut_streams(view: TableView, written: Array) -> None:
    """Mark pages that were being written, so that draws choose among the same rows as at the checkpoint (words.PAGE_ENDED)."""
    layout = view.layout
    live = view.segment.array(layout.blocks, (layout.pages, w.LINE // 8), np.dtype(np.int64))
    cut = written[(live[written, w.PAGE_STATE // 8] & w.KIND_MASK) == w.SEALED]
    live[cut, w.PAGE_ENDED // 8] = w.CUT
    if len(cut):
        view.segment.words[(layout.control + w.TABLE_CUT) // 8] = 1


def limits_in_force(layout: TableLayout, control: Array) -> Limits | None:
    """The limits as last changed, or the limits that the table was created with."""
    copy = w.TABLE_LIMITS + 8 + 32 * int(control[w.TABLE_LIMITS // 8] & 1)
    numbers = control[copy // 8 : copy // 8 + 4].view(np.float64)
    return layout.limits if layout.limits is None or not numbers.any() else limits_of_words(layout, numbers)


def _restore_counts(view: TableView, sampled: int, limiter: LimiterPolicy | None) -> Counts:
    """Set the initial counts; no rows have been sampled in this segment yet."""
    layout, words = view.layout, view.segment.words
    control = view.segment.array(layout.control, (w.TABLE_CONTROL_BYTES // 8,), np.dtype(np.int64))
    sides = view.segment.array(layout.sides, (layout.pages, w.LINE // 8), np.dtype(np.int64))
    limits = limits_in_force(layout, control)
    inserted, _, deleted, _ = counts(TableCut(view.pages(), sides, control, 0), layout.page_rows)
    if limits is not None and limiter == "reset":
        size = inserted - deleted
        words[(layout.control + w.TABLE_BASE_INSERTED) // 8] -= inserted - size
        words[(layout.control + w.TABLE_BASE_DELETED) // 8] -= view.rows_evicted
        inserted, sampled, deleted = size, 0, 0
    elif limits is not None and limiter == "rebase":
        sampled = rebased(limits, inserted, sampled)
    words[(layout.control + w.TABLE_BASE_SAMPLED) // 8] = sampled
    return Counts(limits, inserted, sampled, deleted)


def rebased(limits: Limits, inserted: int, sampled: int) -> int:
    """The count of samples that puts inserted * spi - samples into the middle of its range, or near its only bound."""
    low, high, spi = limits.min_diff, limits.max_diff, limits.samples_per_insert
    if np.isinf(low) and np.isinf(high):
        return sampled
    room = _ROOM * max(1.0, spi)
    middle = high - room if np.isinf(low) else low + room if np.isinf(high) else (low + high) / 2
    return max(0, round(inserted * spi - middle))


_ROOM = 1024


def _restore_policies(segment: Segment, manifest: Manifest, reader: FileReader) -> None:
    for layout in segment.layout.policies.values():
        one = manifest.policies[layout.name]
        if one.version == 0:
            continue
        copy = layout.copies[one.version % WEIGHT_COPIES]
        for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
            file, dtype = policy_file(one.folder, tensor)
            segment.array(copy + offset, tensor.shape, dtype)[...] = reader.read(file, dtype, tensor.shape)
        segment.words[copy // 8] = one.version
        segment.words[layout.control // 8] = one.version


__all__ = ["Counts", "LimiterPolicy", "create_from", "rebased"]
