"""numpy's archives: one array per column, read through without ever holding a whole file in memory.

A ragged column is two arrays: its values one behind the other, and `<column>.offsets` int64 [rows + 1]. Final observations are
`final.<observation>` [k, *shape], of the rows that `final.rows` int64 [k] lists. `_schema` holds the schema's JSON as bytes.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from conduit.errors import SchemaError, SourceError
from conduit.field import dtype_name
from conduit.offline.columns import FINAL, Chunk, Kind, Part
from conduit.plane.steps import Array, Steps
from conduit.schema import Schema

OFFSETS = ".offsets"
_ROWS = "final.rows"
_SCHEMA = "_schema"
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_DAMAGED = (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError)


class _Member:
    """One array of an archive, read from front to back: dtype, shape, and its rows when they are asked for."""

    def __init__(self, archive: zipfile.ZipFile, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        try:
            self._file: IO[bytes] = archive.open(f"{name}.npy")
            version = np.lib.format.read_magic(self._file)
            if version not in _HEADERS:
                raise SourceError(
                    f"Expected version 1 or 2 of the npy format, got {version} - column {name!r} of {path}"
                )
            self.shape, fortran, self.dtype = _HEADERS[version](self._file)
        except _DAMAGED as error:
            raise _damaged(path, name, error) from error
        if self.dtype.hasobject:
            raise SourceError(f"Expected numbers, got Python objects - column {name!r} of {path}")
        if fortran and len(self.shape) > 1:
            raise SourceError(
                f"Expected an array in C order, got one in Fortran order: np.ascontiguousarray - column {name!r} of {path}"
            )

    def read(self, count: int) -> Array:
        """The next `count` rows."""
        inner = self.shape[1:]
        size = count * int(np.prod(inner, dtype=np.int64)) * self.dtype.itemsize
        try:
            data = self._file.read(size)
        except _DAMAGED as error:
            raise _damaged(self._path, self.name, error) from error
        if len(data) < size:
            raise _damaged(self._path, self.name, EOFError("it ends too early"))
        return np.frombuffer(data, self.dtype).reshape(count, *inner)


def _damaged(path: Path, name: str, error: Exception) -> SourceError:
    return SourceError(f"Expected a readable archive, got {type(error).__name__}: {error} - column {name!r} of {path}")


class NpzPart(Part):
    """One archive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except _DAMAGED as error:
            raise SourceError(f"Expected an npz archive, got {type(error).__name__}: {error} - file {path}") from error
        names = [name.removesuffix(".npy") for name in self._archive.namelist() if name.endswith(".npy")]
        members = {name: _Member(self._archive, path, name) for name in names}
        self.document = None
        if _SCHEMA in members:
            document = members.pop(_SCHEMA)
            self.document = document.read(document.shape[0] if document.shape else 0).tobytes()
        self._offsets: dict[str, Array] = {}
        for name in [name for name in members if name.endswith(OFFSETS)]:
            self._offsets[name.removesuffix(OFFSETS)] = self._checked_offsets(members.pop(name), members)
        places = members.pop(_ROWS, None)
        finals = {name: members.pop(name) for name in list(members) if name.startswith(FINAL)}
        self._places = np.zeros(0, np.int64) if places is None else places.read(places.shape[0]).astype(np.int64)
        self.rows = self._count(members)
        self.kinds = {name: self._kind(member) for name, member in members.items()}
        self.finals = {name.removeprefix(FINAL): self._kind(member) for name, member in finals.items()}
        for name, member in finals.items():
            count = len(self._offsets[name]) - 1 if name in self._offsets else member.shape[0]
            if count != len(self._places):
                raise self.refuse(name, f"{len(self._places)} values, one for each of {_ROWS!r}", f"{count}")
        wrong = (np.diff(self._places) <= 0).any() or ((self._places < 0) | (self._places >= self.rows)).any()
        if wrong:
            raise self.refuse(_ROWS, f"ascending rows below {self.rows}", "others")

    def _count(self, members: Mapping[str, _Member]) -> int:
        counts: dict[str, int] = {}
        for name, member in members.items():
            if not member.shape and name not in self._offsets:
                raise self.refuse(name, "one value per row", f"a single {member.dtype}")
            counts[name] = len(self._offsets[name]) - 1 if name in self._offsets else member.shape[0]
        if not counts:
            raise SourceError(f"Expected columns, got none - file {self.path}")
        first = "terminated" if "terminated" in counts else next(iter(counts))
        for name, count in counts.items():
            if count != counts[first]:
                raise self.refuse(name, f"{counts[first]} rows, as column {first!r} has", f"{count}")
        return counts[first]

    def _checked_offsets(self, member: _Member, members: Mapping[str, _Member]) -> Array:
        name = member.name.removesuffix(OFFSETS)
        if name not in members:
            raise self.refuse(member.name, f"the column {name!r} beside it", "no such column")
        if len(member.shape) != 1 or member.dtype.kind not in "iu" or member.shape[0] < 1:
            raise self.refuse(member.name, "int64 [rows + 1]", f"{member.dtype} {member.shape}")
        offsets = member.read(member.shape[0]).astype(np.int64)
        total = members[name].shape[0] if members[name].shape else 0
        if offsets[0] != 0 or (np.diff(offsets) < 0).any() or offsets[-1] != total:
            raise self.refuse(member.name, f"offsets that rise from 0 to {total}", "others")
        return offsets

    def _kind(self, member: _Member) -> Kind:
        try:
            dtype = dtype_name(member.dtype)
        except SchemaError as error:
            raise SourceError(f"{error} - column {member.name!r} of {self.path}") from error
        if member.name not in self._offsets:
            return Kind(dtype, member.shape[1:])
        longest = int(np.diff(self._offsets[member.name]).max(initial=1))
        return Kind(dtype, (longest, *member.shape[1:]), ragged=True)

    def whole(self, name: str) -> Array:
        """All values of a column of scalars."""
        return _Member(self._archive, self.path, name).read(self.rows)

    def mean_length(self, name: str) -> float:
        """Mean length of the values of a ragged column."""
        return float(self._offsets[name][-1]) / max(1, self.rows)

    def read(self, names: Sequence[str], finals: Sequence[str], rows: int) -> Iterator[Chunk]:
        """The columns, at most `rows` rows at a time."""
        columns = {name: _Member(self._archive, self.path, name) for name in names}
        kept = {name: _Member(self._archive, self.path, FINAL + name) for name in finals}
        for start in range(0, self.rows, rows):
            stop = min(self.rows, start + rows)
            low, high = np.searchsorted(self._places, (start, stop)).tolist()
            yield Chunk(
                {name: self._take(member, start, stop) for name, member in columns.items()},
                self._places[low:high] - start,
                {name: self._take(member, low, high) for name, member in kept.items()},
            )

    def _take(self, member: _Member, start: int, stop: int) -> Any:
        offsets = self._offsets.get(member.name)
        if offsets is None:
            return member.read(stop - start)
        values = member.read(int(offsets[stop] - offsets[start]))
        return np.split(values, offsets[start + 1 : stop] - offsets[start]) if stop > start else []


def write(path: Path, schema: Schema, steps: Steps, numbers: Mapping[str, Array]) -> None:
    """Write one archive: the steps' columns, flags and final observations, and columns of numbers."""
    arrays: dict[str, Array] = {_SCHEMA: np.frombuffer(schema.to_json(), np.uint8)}
    for name in schema.names:
        arrays |= _stored(schema, name, name, steps.columns[name])
    arrays |= {"terminated": steps.terminated, "truncated": steps.truncated, **numbers}
    if schema.observation_names:
        arrays[_ROWS] = steps.places
        for name in schema.observation_names:
            arrays |= _stored(schema, name, FINAL + name, steps.finals[name])
    # numpy.savez takes columns as keyword arguments, and has a few names of its own
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def _stored(schema: Schema, name: str, column: str, values: Any) -> dict[str, Array]:
    field = schema[name]
    if not field.ragged:
        return {column: values}
    empty = np.empty((0, *field.shape[1:]), field.numpy_dtype)
    return {
        column: np.concatenate([empty, *values]),
        column + OFFSETS: np.cumsum([0, *map(len, values)], dtype=np.int64),
    }
