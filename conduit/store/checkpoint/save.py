"""Writing a checkpoint while all processes go on: first a copy of all words, then the rows, oldest page first.

A page is leased while it is copied, so a writer that needs a page takes another one. Rows that were committed when the words were copied
never change, so they may be copied later. Priorities and counts of deliveries do change: a checkpoint has their values at the time
when their page is copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conduit.errors import ConfigError, WaitTimeout
from conduit.native.jit import entry
from conduit.store.checkpoint.direct_io import unwritable
from conduit.store.checkpoint.files import FileSet
from conduit.store.checkpoint.manifest import (
    LoaderEntry,
    Manifest,
    PolicyEntry,
    TableEntry,
    column_file,
    extra_file,
    new_checkpoint,
    policy_file,
    write_manifest,
)
from conduit.store.checkpoint.snapshot import TableCut, cut_table
from conduit.store.format import words as w
from conduit.store.format.columns import columns_of
from conduit.store.format.filenames import check_name, safe
from conduit.store.format.layout import WEIGHT_COPIES, WeightsLayout
from conduit.store.format.soundness import LARGEST, check_pages, damaged
from conduit.store.pages import protocol
from conduit.store.pages.image import Extent
from conduit.store.pages.row_counts import counts_over
from conduit.store.segment.segment import Segment
from conduit.store.tables.loader_cursors import known_loaders
from conduit.store.tables.statistics import totals_of
from conduit.store.tables.view import Lease, TableView

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]

_ATTEMPTS = 1000
PLACE_START, PLACE_ROWS, PLACE_TAIL, PLACE_VALUES = 0, 1, 2, 3
"""Words that say where a page lies in the column files: its first row there, or -1; rows from the page's start; rows from its end; then
for each ragged field the first item in its file, and the number of items.
"""
_LEAST_STEP = 16 << 20


class _Counter:
    """Reports progress to the caller now and then."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._told = 0

    def add(self, count: int) -> None:
        self._done = min(self._total, self._done + count)
        if self._progress is not None and self._done - self._told >= _LEAST_STEP:
            self._told = self._done
            self._progress(self._done, self._total)

    def end(self) -> None:
        if self._progress is not None:
            self._progress(self._total, self._total)


def live_pages(blocks: Array) -> Array:
    """Numbers of the pages that hold rows, oldest first."""
    kinds = blocks[:, w.PAGE_STATE // 8] & w.KIND_MASK
    found = np.flatnonzero(np.isin(kinds, (w.OPEN, w.SEALED)) & (blocks[:, w.PAGE_COMMITTED // 8] > 0))
    order: Array = found[np.lexsort((blocks[found, w.PAGE_AGE // 8], kinds[found] == w.OPEN))]
    return order


def counts(cut: TableCut, page_rows: int) -> tuple[int, int, int, int]:
    """Rows inserted, sampled and deleted, as a limiter counts them, and the rows of all pages, halo copies not counted."""
    live = live_pages(cut.blocks)
    own = int((cut.blocks[live, w.PAGE_COMMITTED // 8] - cut.blocks[live, w.PAGE_HALO // 8]).sum())
    found = counts_over(cut.blocks, cut.sides, cut.control, np.zeros((0, w.LINE // 8), np.int64), page_rows)
    return found.inserted, found.sampled + cut.delivered, found.deleted, own


def save(
    segment: Segment,
    views: dict[str, TableView],
    folder: Path,
    keep: int,
    extra: Mapping[str, bytes],
    version: str,
    progress: Progress | None,
) -> Path:
    """Write the next checkpoint into a folder.

    Args:
        segment: The segment.
        views: The views of its tables, of an attached client.
        folder: Folder of numbered checkpoints.
        keep: Number of checkpoints to keep, this one included.
        extra: The caller's own bytes, by name.
        version: Version of Conduit.
        progress: Called with the bytes done and the total bytes.

    Returns:
        The checkpoint's own folder.

    Raises:
        ConfigError: A value of `extra` is not bytes.
        CheckpointError: The folder cannot be written.
        NoSpace: The disk is full.
        Busy: Another process or thread is making a checkpoint there.
        Closed: The engine has closed.
    """
    if not isinstance(extra, Mapping):
        raise ConfigError(f"Expected extra as {{name: bytes}}, got {type(extra).__name__}")
    for name, content in extra.items():
        if not isinstance(name, str) or not name or not isinstance(content, bytes | bytearray | memoryview):
            raise ConfigError(
                f"Expected extra as {{name: bytes}}, got {type(content).__name__} for {name!r}: for a state dict, "
                "torch.save it into an io.BytesIO and pass its getvalue()"
            )
        check_name(name, "part of `extra`")
    try:
        with new_checkpoint(folder, keep) as (making, final):
            _fill(segment, views, making, extra, version, progress)
    except OSError as error:
        if (raised := unwritable(error, folder)) is error:
            raise
        raise raised from error
    return final


def _fill(
    segment: Segment,
    views: dict[str, TableView],
    making: Path,
    extra: Mapping[str, bytes],
    version: str,
    progress: Progress | None,
) -> None:
    for view in views.values():
        view.check_open()
    tables, policies = {}, {}
    # queues first: their rows go when consumers acknowledge them
    order = sorted(views, key=lambda name: views[name].layout.table.kind != "queue")
    with FileSet(making) as files:
        # from now on, writers may overwrite pages that have not been copied yet
        targets = {name: _TableFiles(view, files) for name, view in views.items()}
        created = time.time_ns()
        cuts = {name: cut_table(view) for name, view in views.items()}
        loaders = {name: LoaderEntry(*known) for name, known in known_loaders(segment).items()}
        counter = _Counter(progress, sum(_bytes(views[name], cut) for name, cut in cuts.items()))
        for name in order:
            tables[name] = _save_table(views[name], cuts[name], targets[name], counter)
        for layout in segment.layout.policies.values():
            policies[layout.name] = _save_policy(segment, layout, files)
        for name, content in extra.items():
            files.write(extra_file(name), np.frombuffer(content, np.uint8))
        files.finish()
        in_order = {name: tables[name] for name in views}
        manifest = Manifest(
            version,
            segment.name,
            created,
            segment.layout.spec,
            in_order,
            policies,
            loaders,
            tuple(extra),
            files.entries,
        )
    write_manifest(making, manifest)
    counter.end()


def _bytes(view: TableView, cut: TableCut) -> int:
    """Bytes of rows and values that a checkpoint of this table has."""
    live = cut.blocks[live_pages(cut.blocks)]
    rows = int((live[:, w.PAGE_COMMITTED // 8] + (live[:, w.PAGE_TAIL // 8] & w.TAIL_MASK)).sum())
    return rows * sum(column.row_bytes for column in columns_of(view.layout)) + int(live[:, w.PAGE_ARENA // 8].sum())


class _TableFiles:
    """The files of a table's rows."""

    def __init__(self, view: TableView, files: FileSet) -> None:
        self.folder = folder = f"tables/{safe(view.layout.name)}"
        self._files = files
        self._view = view
        self._columns = [(one, files.create(f"{folder}/{column_file(one)}")) for one in view.images.columns]
        self._values = {name: files.create(f"{folder}/values/{safe(name)}.npy") for name in view.arenas}
        self.rows = 0
        self.items = dict.fromkeys(view.arenas, 0)

    def add(self, extent: Extent, counter: _Counter) -> list[int]:
        """Add the rows of a leased page; returns its place in the files (PLACE_*)."""
        images = self._view.images
        for column, file in self._columns:
            for rows in images.rows(column, extent):
                file.append_rows(rows)
                counter.add(rows.size)
        place = [self.rows, extent.rows, extent.tail]
        self.rows += extent.rows + extent.tail
        for name, values in images.values(extent):
            self._values[name].append(values.reshape(-1))
            counter.add(values.size)
            place += [self.items[name], len(values)]
            self.items[name] += len(values)
        return place

    def write(self, name: str, array: Array) -> None:
        """Write one more file of the table."""
        self._files.write(f"{self.folder}/{name}.npy", array)

    def describe(self) -> None:
        """Set the dtypes and shapes of the files; no rows are added afterwards."""
        for column, file in self._columns:
            file.describe(column.dtype, (self.rows, *column.shape))
        for name, file in self._values.items():
            values = self._view.arenas[name]
            file.describe(values.dtype, (self.items[name], *values.shape[2:]))


def _save_table(view: TableView, cut: TableCut, target: _TableFiles, counter: _Counter) -> TableEntry:
    layout = view.layout
    places = np.full((layout.pages, PLACE_VALUES + 2 * len(view.arenas)), -1, np.int64)
    left_out = rows_left_out = 0
    in_use = np.flatnonzero(np.isin(cut.blocks[:, w.PAGE_STATE // 8] & w.KIND_MASK, (w.OPEN, w.SEALED)))
    check_pages(layout, in_use, cut.blocks[in_use])
    lease = Lease(view)
    for page in live_pages(cut.blocks).tolist():
        words = cut.blocks[page]
        extent = Extent.of(page, words, layout.page_rows)
        if lease.take_extent(extent):
            with lease:
                places[page] = target.add(extent, counter)
            continue
        left_out += 1
        rows_left_out += extent.rows - int(words[w.PAGE_HALO // 8])
    target.describe()
    for name, array in (
        ("pages", cut.blocks),
        ("sides", cut.sides),
        ("control", cut.control),
        ("places", places),
    ):
        target.write(name, array)
    for name in layout.statistics:
        target.write(f"statistics/{safe(name)}", totals_of(view, name))
    return TableEntry(
        target.folder, target.rows, target.items, *counts(cut, view.layout.page_rows), left_out, rows_left_out
    )


def _save_policy(segment: Segment, layout: WeightsLayout, files: FileSet) -> PolicyEntry:
    folder = f"policies/{safe(layout.name)}"
    for _ in range(_ATTEMPTS):
        version = entry(protocol.load)(segment.base + layout.control)
        if version == 0:
            return PolicyEntry(folder, 0)
        if not 0 < version < LARGEST:
            raise damaged(f"policy {layout.name!r}", f"version {version}")
        copy = layout.copies[version % WEIGHT_COPIES]
        arrays = []
        for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
            name, dtype = policy_file(folder, tensor)
            arrays.append((name, segment.array(copy + offset, tensor.shape, dtype).copy()))
        if entry(protocol.load_after)(segment.base + copy) == version:
            for name, array in arrays:
                files.write(name, array)
            return PolicyEntry(folder, version)
    raise WaitTimeout(f"Expected to read policy {layout.name!r} whole, it changed under {_ATTEMPTS} attempts")
