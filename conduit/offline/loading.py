"""Loading a source into a table: `describe` the source, make a table that holds it, and write its steps."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import conduit
from conduit.arrays import import_torch
from conduit.errors import CapacityError, ConduitError, ConfigError, SourceError
from conduit.offline import minari
from conduit.offline.columns import Part, behind
from conduit.offline.files import Files
from conduit.offline.hdf5 import Hdf5Part
from conduit.offline.npz import NpzPart
from conduit.offline.parquet import ParquetPart
from conduit.offline.source import Description, Progress, Source
from conduit.plane.client import Client
from conduit.plane.deliver.steps import Steps
from conduit.plane.ingest.writer import Writer
from conduit.plane.observe.inspect import inspect
from conduit.plane.table import with_room
from conduit.schema import Schema

Given: TypeAlias = str | os.PathLike[str] | Any
"""A path, the id of a local Minari dataset, or a minari.MinariDataset."""

FORMATS: Mapping[str, Callable[[Path, str], Part]] = {"npz": NpzPart, "parquet": ParquetPart, "hdf5": Hdf5Part}
"""{format: function that opens a file}, called with its path and the column of the flag "terminated"."""
_ENDINGS = {".npz": "npz", ".parquet": "parquet", ".hdf5": "hdf5", ".h5": "hdf5"}
_KINDS = "numpy archives (*.npz), Parquet (*.parquet), HDF5 (*.hdf5, *.h5), or a folder of them, or a Minari dataset"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of `load`.

    Attributes:
        rows, episodes: Rows and episodes written to the table.
        seconds: How long it took.
        ignored: Columns of the source that the table has no field for.
        skipped: {ignored column that no field can hold: description of its contents}.
    """

    rows: int
    episodes: int
    seconds: float
    ignored: tuple[str, ...]
    skipped: Mapping[str, str]


def open_source(source: Given, schema: Schema | None, columns: Mapping[str, str] | None) -> Source:
    """Open a source and check all that can be checked without reading its steps.

    Args:
        source: The source.
        schema: The schema that it must fit; None takes the source's own.
        columns: {field or flag: column that holds it}, for names that differ.

    Raises:
        SourceError: The source is empty, or does not fit.
        MissingExtra: The package that reads it is not installed.
    """
    if not isinstance(source, str | os.PathLike):
        return _of_minari(source, schema, columns)
    path = Path(source)
    try:
        if not path.exists():
            if isinstance(source, str) and not path.suffix:
                return _of_minari(source, schema, columns)
            raise SourceError(f"Expected a file or directory, got {str(path)!r}, which does not exist")
        if path.is_dir() and any(
            path.joinpath(*place).exists() for place in (("metadata.json",), ("data", "metadata.json"))
        ):
            return _of_minari(path, schema, columns)
        every = sorted(path.iterdir()) if path.is_dir() else [path]
    except OSError as error:
        raise SourceError(f"Expected to be able to read {str(path)!r}: {error}") from error
    files = [file for file in every if file.suffix in _ENDINGS]
    kinds = {_ENDINGS[file.suffix] for file in files}
    if len(kinds) != 1:
        got = " and ".join(f"*{ending}" for ending in sorted({file.suffix for file in files}))
        got = got or ", ".join(file.name for file in every[:5]) or "none"
        raise SourceError(f"Expected files of one known kind at {str(path)!r}, got {got}; known are {_KINDS}")
    kind = kinds.pop()
    if columns is not None and not isinstance(columns, Mapping):
        raise ConfigError(f"Expected {{field: column}} as columns, got {columns!r}")
    key = (columns or {}).get("terminated", "terminated")
    return Files(kind, str(path), [FORMATS[kind](file, key) for file in files], schema, columns or {})


def _of_minari(source: Any, schema: Schema | None, columns: Mapping[str, str] | None) -> Source:
    return minari.MinariSource(source, schema, columns or {})


def describe(source: Given, *, columns: Mapping[str, str] | None = None) -> Description:
    """The contents of a source: schema, rows, episodes. Its steps are not read.

    Args:
        source: Directory or file of npz, Parquet or HDF5, Minari dataset, or its id.
        columns: {field, flag or number: column that holds it}, for names that differ.

    Raises:
        ConfigError: `columns` has an unknown name.
        SourceError: The source cannot be read; names file and column, and what was expected and found.
    """
    return open_source(source, None, columns).description


def table_for(source: Given, *, columns: Mapping[str, str] | None = None, **options: Any) -> conduit.Table:
    """A table that holds all of a source.

    Args:
        source: As `describe`.
        columns: As `describe`.
        **options: As for `conduit.Table`, except the capacity: windows, priorities, statistics, or your own `schema`.

    Raises:
        SourceError: As `describe`.
        ConfigError, CapacityError: As `conduit.Table`.
    """
    if "capacity" in options:
        raise ConfigError("Expected no capacity: it is chosen for the source; use conduit.Table to choose it yourself")
    schema = options.pop("schema", None)
    seen = open_source(source, schema, columns).description
    need = seen.rows + seen.ends
    # long ragged values close pages early, so tables with ragged fields get some extra capacity
    lengths = {name: min(1.25 * mean + 1, seen.schema[name].max_length) for name, mean in seen.mean_lengths.items()}
    options.setdefault("mean_lengths", lengths or None)
    table = conduit.Table(seen.schema, max(need, 1), **options)
    return with_room(table, (1.5 if lengths else 1.0) * need)


def load(
    client: Client,
    table: str,
    source: Given,
    *,
    columns: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    timeout: float | None = 30.0,
    freeze: bool = False,
) -> Loaded:
    """Write all steps of a source into a table, as one writer.

    Args:
        client: Attached to the engine.
        table: Table name; the table's schema decides which columns are read.
        source: As `describe`.
        columns: As `describe`.
        progress: Called with the rows written and the total rows.
        timeout: Seconds that a write may wait for a page.
        freeze: Make the table read-only once all steps are in it; `TableHandle.thaw` undoes it.

    Raises:
        SourceError: The source does not fit the table, and nothing is written. Or a part of it is damaged: the message says how many
            steps had been written before, which stay.
        CapacityError: The table is smaller than the source.
    """
    begun = time.perf_counter()
    schema = client.table(table).schema
    opened = open_source(source, schema, columns)
    seen = opened.description
    capacity = next(item.capacity for item in inspect(client.name).tables if item.name == table)
    if seen.rows + seen.ends > capacity:
        raise CapacityError(
            f"Expected a table with room for {seen.rows} steps and {seen.ends} final observations, got {table!r} of {capacity} "
            "rows: create it with conduit.offline.table_for(source)"
        )
    done = 0
    ended = True
    with client.writer(table, autoreset="disabled", keep_final=False, timeout=timeout) as writer:
        try:
            for steps in opened.steps():
                _write(writer, schema, steps, ended)
                ended = bool(steps.terminated[-1] | steps.truncated[-1]) if len(steps) else ended
                done += len(steps)
                if progress is not None:
                    progress(done, seen.rows)
        except ConduitError as error:
            raise SourceError(
                f"{error} ({done} of {seen.rows} steps of {seen.name} had been written, and stay)"
            ) from error
    if freeze:
        client.table(table).freeze()
    return Loaded(done, seen.episodes, time.perf_counter() - begun, seen.ignored, seen.skipped)


def _write(writer: Writer, schema: Schema, steps: Steps, ended: bool) -> None:
    """Write steps; `ended` says whether the previous step ended its episode by a flag."""
    over = behind(ended, steps.terminated | steps.truncated) if len(steps) else np.zeros(0, bool)
    cuts = set(np.flatnonzero(steps.starts & ~over).tolist())
    for start, stop in itertools.pairwise(sorted({0, *cuts, len(steps)})):
        if start in cuts:
            writer.cut()
        _write_piece(writer, schema, steps.part(start, stop))


def _write_piece(writer: Writer, schema: Schema, steps: Steps) -> None:
    columns = {name: _given(schema[name].dtype, values) for name, values in steps.columns.items()}
    finals = {name: _given(schema[name].dtype, values) for name, values in steps.finals.items()}
    if not schema.ragged_names:
        writer.extend(
            columns, terminated=steps.terminated, truncated=steps.truncated, places=steps.places, finals=finals
        )
        return
    # `extend` takes no ragged values, so these steps are appended one by one
    kept = {int(place): i for i, place in enumerate(steps.places)}
    for row in range(len(steps)):
        final = {name: values[kept[row]] for name, values in finals.items()} if row in kept else None
        writer.append(
            **{name: values[row] for name, values in columns.items()},
            terminated=bool(steps.terminated[row]),
            truncated=bool(steps.truncated[row]),
            final=final,
        )


def _given(dtype: str, values: Any) -> Any:
    """Values for a writer: bfloat16 bits become tensors, since numpy has no such dtype."""
    if dtype != "bfloat16":
        return values
    torch = import_torch("loading fields of bfloat16")
    if isinstance(values, list):
        return [_given(dtype, value) for value in values]
    return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
