"""Restoring an engine, the report of a restore (`Restored`), and the list of checkpoints in a folder."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conduit.errors import CheckpointError, ConfigError, Leftover
from conduit.store.checkpoint.files import FileReader
from conduit.store.checkpoint.manifest import Manifest, as_path, candidates, is_checkpoint, numbered, read_manifest
from conduit.store.checkpoint.restore import Counts, LimiterPolicy, create_from, read_extra, spec_of
from conduit.store.format.layout import SegmentSpec
from conduit.store.format.limit_specs import Limits, rows_short, samples_short
from conduit.store.segment.names import Backing
from conduit.store.segment.segment import Segment

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""


@dataclass(frozen=True, slots=True)
class RestoredTable:
    """A restored table.

    Attributes:
        rows: Rows in the table, halo copies not counted.
        rows_left_out: Rows that writers overwrote before the checkpoint could copy them.
        inserted, sampled, deleted: The counts with which its limiter begins.
        waits: Which side waits at the limiter now, and how many rows or samples end the wait; "" when neither waits.
    """

    rows: int
    rows_left_out: int
    inserted: int
    sampled: int
    deleted: int
    waits: str


@dataclass(frozen=True, slots=True)
class Restored:
    """The report of a restore.

    Attributes:
        path: The checkpoint.
        created_ns: When it was made, nanoseconds since the epoch.
        tables: {table: report}.
        loaders: {name of a loader: number of its next batch}.
        extra: The caller's own bytes, by name (`Client.checkpoint`).
        skipped: Newer checkpoints that could not be used, and why.
    """

    path: Path
    created_ns: int
    tables: dict[str, RestoredTable]
    loaders: dict[str, int]
    extra: dict[str, bytes]
    skipped: tuple[tuple[Path, str], ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in a folder.

    Attributes:
        path: Its folder.
        problem: Why it cannot be used, or None.
        engine: Name of the engine; if it cannot be read, "", and the numbers are 0.
        created_ns: When it was made, nanoseconds since the epoch.
        bytes: Total size of its files.
        rows: {table: its rows, halo copies not counted}.
        rows_left_out: Rows that writers overwrote before they could be copied.
    """

    path: Path
    problem: str | None
    engine: str
    created_ns: int
    bytes: int
    rows: dict[str, int]
    rows_left_out: int


def waits(limits: Limits | None, inserted: int, sampled: int, deleted: int) -> str:
    """Which side waits at a limiter, by which term of its formula, and what ends the wait; "" when neither waits."""
    if limits is None:
        return ""
    spi = limits.samples_per_insert
    by_size, by_difference = rows_short(limits, inserted, sampled, deleted, 1)
    samples = samples_short(limits, inserted, sampled, deleted, 1)
    parts = []
    if by_size:
        parts.append(
            f"sampling waits for {by_size:,} more rows (size {inserted - deleted:,} < min_size {limits.min_size:,})"
        )
    elif by_difference:
        parts.append(
            f"sampling waits for {by_difference:,} more rows (inserted * {spi:g} - sampled - 1 = "
            f"{inserted * spi - sampled - 1:,.0f} < {limits.min_diff:,.0f})"
        )
    if samples:
        parts.append(
            f"inserting waits for {samples:,} more samples ((inserted + 1) * {spi:g} - sampled = "
            f"{(inserted + 1) * spi - sampled:,.0f} > {limits.max_diff:,.0f})"
        )
    return "; ".join(parts)


def restore(
    path: str | os.PathLike[str],
    name: str | None,
    *,
    limiter: LimiterPolicy | None,
    backing: Backing,
    max_participants: int | None,
    progress: Progress | None,
    replace: bool,
) -> tuple[Segment, Restored]:
    """Create a segment from the newest good checkpoint at `path`; see `Engine.restore`."""
    if limiter not in (None, "keep", "reset", "rebase"):
        raise ConfigError(f"Expected limiter 'keep', 'reset' or 'rebase', got {limiter!r}")
    skipped: list[tuple[Path, str]] = []
    first: CheckpointError | None = None
    for one in candidates(as_path(path)):
        try:
            manifest = read_manifest(one)
            limited = [key for key, table in manifest.spec.tables.items() if table.limits is not None]
            if limited and limiter is None:
                raise ConfigError(
                    f"Expected limiter='keep', 'reset' or 'rebase', since tables {limited} have a limiter: say whether its "
                    "counts stay as they were, begin anew, or are moved to where nobody waits"
                )
            extra = read_extra(one, manifest)
            make = functools.partial(
                create_from,
                one,
                manifest,
                manifest.engine if name is None else name,
                limiter=limiter,
                backing=backing,
                max_participants=max_participants,
                progress=progress,
            )
            try:
                segment, counts = make()
            except Leftover:
                if not replace:
                    raise
                # a dead owner's engine is removed only once the checkpoint that takes its place is known to be good
                _verify(one, manifest, None)
                segment, counts = make(replace=True)
        except CheckpointError as error:
            first = first or error
            skipped.append((one, str(error)))
            continue
        for where, why in skipped:
            warnings.warn(f"Conduit did not use the newer checkpoint {where}: {why}", RuntimeWarning, stacklevel=3)
        return segment, _report(one, manifest, counts, extra, tuple(skipped))
    assert first is not None  # noqa: S101 - candidates are at least one
    raise first


def meant(path: str | os.PathLike[str], name: str | None, max_participants: int | None) -> tuple[str, SegmentSpec]:
    """Name and specification of the engine that `restore` would create.

    Raises:
        CheckpointError: No checkpoint there can be read.
    """
    first: CheckpointError | None = None
    for one in candidates(as_path(path)):
        try:
            manifest = read_manifest(one)
        except CheckpointError as error:
            first = first or error
            continue
        return manifest.engine if name is None else name, spec_of(manifest, max_participants)
    assert first is not None  # noqa: S101 - candidates are at least one
    raise first


def _verify(path: Path, manifest: Manifest, progress: Progress | None) -> None:
    """Read every file of a checkpoint.

    Raises:
        CheckpointError: One is damaged; names it.
    """
    with FileReader(path, manifest.files, progress) as reader:
        for name in manifest.files:
            reader.verify(name)


def _report(
    path: Path,
    manifest: Manifest,
    counts: dict[str, Counts],
    extra: dict[str, bytes],
    skipped: tuple[tuple[Path, str], ...],
) -> Restored:
    tables = {}
    for name, one in manifest.tables.items():
        found = counts[name]
        numbers = found.inserted, found.sampled, found.deleted
        rows = one.visible - one.rows_left_out
        tables[name] = RestoredTable(rows, one.rows_left_out, *numbers, waits(found.limits, *numbers))
    loaders = {name: one.batch for name, one in manifest.loaders.items()}
    return Restored(path, manifest.created_ns, tables, loaders, extra, skipped)


def checkpoints(
    path: str | os.PathLike[str], *, verify: bool = False, progress: Progress | None = None
) -> list[Checkpoint]:
    """The checkpoints at a path, oldest first: the path itself, or the checkpoints in that folder.

    Args:
        path: A checkpoint, or a folder of checkpoints.
        verify: Read every file and compare its digest, instead of only the manifest.
        progress: Called with the bytes done and the total bytes of each checkpoint that is verified.

    Raises:
        CheckpointError: The path cannot be looked at.
    """
    root = as_path(path)
    found = [root] if is_checkpoint(root) else numbered(root)
    return [_look(one, verify, progress) for one in found]


def _look(path: Path, verify: bool, progress: Progress | None) -> Checkpoint:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Checkpoint(path, str(error), "", 0, 0, {}, 0)
    problem = None
    if verify:
        try:
            _verify(path, manifest, progress)
        except CheckpointError as error:
            problem = str(error)
    tables = manifest.tables
    return Checkpoint(
        path,
        problem,
        manifest.engine,
        manifest.created_ns,
        sum(one.size for one in manifest.files.values()),
        {name: one.visible - one.rows_left_out for name, one in tables.items()},
        sum(one.rows_left_out for one in tables.values()),
    )
