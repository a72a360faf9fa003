"""Saving a table: into a directory of files, which appears completely or not at all, or into a Minari dataset."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from conduit.errors import ConfigError, SourceError
from conduit.offline import minari, npz, parquet
from conduit.offline.columns import joined
from conduit.offline.source import Progress
from conduit.plane.client import Client
from conduit.plane.deliver.scan import Scan
from conduit.plane.deliver.steps import Array, Steps
from conduit.schema import Schema

Format = Literal["npz", "parquet"]

_PART_BYTES = 128 << 20

_WRITERS: Mapping[str, Callable[[Path, Schema, Steps, Mapping[str, Array]], None]] = {
    "npz": npz.write,
    "parquet": parquet.write,
}


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a save.

    Attributes:
        rows, episodes: Steps and episodes written, including unfinished episodes.
        files: Number of files; 0 for a Minari dataset.
        missing: Rows that writers overwrote before they could be read.
        left_out: Last steps of unfinished episodes, which a Minari dataset cannot hold.
    """

    rows: int
    episodes: int
    files: int
    missing: int
    left_out: int = 0


def save(
    client: Client,
    table: str,
    path: str | os.PathLike[str],
    *,
    format: Format = "npz",  # noqa: A002 - the natural word in a call
    progress: Progress | None = None,
) -> Saved:
    """Write all steps that a table has now into a new directory of files.

    It is written under another name beside `path` and renamed when it is complete. Writers go on meanwhile.

    Args:
        client: Attached to the engine.
        table: Table name.
        path: The directory; it must not exist, or must be empty.
        format: "npz" or "parquet".
        progress: Called with the rows written and the total rows.

    Raises:
        SourceError: `path` exists already, or cannot be written.
        ConfigError: The format is unknown.
        MissingExtra: pyarrow is not installed.
    """
    if format not in _WRITERS:
        raise ConfigError(f"Expected format 'npz' or 'parquet', got {format!r}")
    if format == "parquet":
        parquet.package()
    target = Path(path)
    scan = client.table(table).scan()
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise SourceError(f"Expected a path that does not exist yet, or an empty directory, got {str(target)!r}")
    except OSError as error:
        raise SourceError(f"Expected to be able to write {str(target)!r}: {error}") from error
    making = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    rows = files = 0
    episode = -1
    try:
        making.mkdir(parents=True)
        for steps in _parts(scan):
            numbers = episode + np.cumsum(steps.starts, dtype=np.int64)
            assert steps.numbers is not None  # noqa: S101 - a scan knows them
            columns = {"_episode": numbers, "_step": steps.numbers}
            _WRITERS[format](making / f"part-{files:05}.{format}", scan.schema, steps, columns)
            rows, files, episode = rows + len(steps), files + 1, int(numbers[-1])
            if progress is not None:
                progress(rows, max(rows, scan.rows))
        if files == 0 and scan.missing:
            raise SourceError(
                f"Expected steps of table {table!r} that stay until they are read, writers overwrote all {scan.missing} rows "
                "first: make the table larger, or save while they are slower"
            )
        if files == 0:
            raise SourceError(f"Expected table {table!r} to have steps, it is empty")
        making.rename(target)
    except OSError as error:
        raise SourceError(f"Expected to be able to write {str(target)!r}: {error}") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return Saved(rows, episode + 1, files, scan.missing)


def save_minari(
    client: Client,
    table: str,
    dataset_id: str,
    *,
    env: Any = None,
    observation_space: Any = None,
    action_space: Any = None,
    progress: Progress | None = None,
    **metadata: Any,
) -> Saved:
    """Write all steps that a table has now into a new local Minari dataset; images are stored without loss.

    Args:
        client: Attached to the engine.
        table: Table name; its fields must be `obs`, `action` (nested or not) and `reward`.
        dataset_id: Id of the new dataset, such as "cartpole/mine-v0".
        env: The environment that the steps come from, as Minari takes it.
        observation_space: Gymnasium space of observations; without it and `env`, the widest space that fits the schema.
        action_space: The same for actions.
        progress: Called with the rows written and the total rows.
        **metadata: Passed to `minari.create_dataset_from_buffers`: author, description, ...

    Raises:
        ConfigError: The table has other fields.
        SourceError: Minari refuses the dataset.
        MissingExtra: minari or h5py is not installed.
    """
    data_collector = minari.package().data_collector
    scan = client.table(table).scan()
    minari.check_schema(scan.schema)
    if env is None:
        observation_space = observation_space or minari.spaces_of(scan.schema, "obs")
        action_space = action_space or minari.spaces_of(scan.schema, "action")
    done = [0, 0, 0]  # steps, episodes, steps left out

    def episodes() -> Iterator[Any]:
        for values, left_out in minari.episodes_of(scan):
            count = len(values["rewards"])
            done[2] += left_out
            if count == 0:
                continue
            yield data_collector.EpisodeBuffer(id=done[1], **values)
            done[0] += count
            done[1] += 1
            if progress is not None:
                progress(done[0], max(done[0], scan.rows))

    spaces = {"observation_space": observation_space, "action_space": action_space}
    minari.create(dataset_id, episodes(), env=env, **spaces, **metadata)
    return Saved(done[0], done[1], 0, scan.missing, done[2])


def _parts(scan: Scan) -> Iterator[Steps]:
    """A scan's steps in parts, each about the size of a file."""
    row_bytes = scan.schema.row_bytes
    waiting: list[Steps] = []
    for steps in scan:
        waiting.append(steps)
        if sum(map(len, waiting)) * row_bytes >= _PART_BYTES:
            yield joined(waiting)
            waiting = []
    if waiting:
        yield joined(waiting)
