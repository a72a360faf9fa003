"""npz archives of numpy: one array per column, read in pieces, so that a file is never in memory as a whole.

A ragged column is two arrays: its concatenated values, and `<column>.offsets` int64 [rows + 1]. Final observations are
`final.<observation>` [k, *shape]; `_final.rows` int64 [k] lists their rows. `_schema` holds the schema's JSON as bytes.
"""

from __future__ import annotations

import collections
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from conduit.errors import SchemaError, SourceError
from conduit.field import Field, dtype_name
from conduit.offline.columns import FINAL, Chunk, Kind, Part
from conduit.plane.deliver.steps import Array, Steps
from conduit.schema import Schema

OFFSETS = ".offsets"
_ROWS = "_final.rows"
_SCHEMA = "_schema"
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_DAMAGED = (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError)


class _Member:
    """One array of an archive, read from front to back: its dtype and shape, and its rows by `read`.

    Attributes:
        problem: Why a field cannot be read from it, or None.
    """

    def __init__(self, archive: zipfile.ZipFile, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        self.shape: tuple[int, ...] = ()
        self.problem: str | None = None
        try:
            self._file: IO[bytes] = archive.open(f"{name}.npy")
            version = np.lib.format.read_magic(self._file)
            if version not in _HEADERS:
                self.problem = f"version {version} of the npy format"
                return
            self.shape, fortran, self.dtype = _HEADERS[version](self._file)
        except _DAMAGED as error:
            raise _damaged(path, name, error) from error
        if self.dtype.hasobject:
            self.problem = "Python objects"
        elif fortran and len(self.shape) > 1:
            self.problem = "an array in Fortran order (np.ascontiguousarray puts it in C order)"
        else:
            try:
                dtype_name(self.dtype)
            except SchemaError as error:
                self.problem = f"`{self.dtype}` ({error})"

    def close(self) -> None:
        """Close the array's stream."""
        self._file.close()

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
    """One archive.

    Args:
        path: The file.
        key: The column of the flag "terminated"; the file has as many steps as this column has values.
    """

    def __init__(self, path: Path, key: str) -> None:
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
        self.skipped = {name: member.problem for name, member in members.items() if member.problem is not None}
        self._members = {name: member for name, member in members.items() if member.problem is None}
        self._offsets: dict[str, Array] = {}
        for name in [name for name in self._members if name.endswith(OFFSETS)]:
            self._take_offsets(self._members[name])
        finals = [name for name in self._members if name.startswith(FINAL) and name != _ROWS]
        places = self._members.get(_ROWS)
        self._places = np.zeros(0, np.int64)
        if places is not None and len(places.shape) == 1 and places.dtype.kind in "iu":
            self._places = places.read(places.shape[0]).astype(np.int64)
            del self._members[_ROWS]
        counts = {name: self._count(name) for name in self._members if name not in finals}
        if not counts and not self.skipped:
            raise SourceError(f"Expected columns, got none - file {self.path}")
        most = collections.Counter(counts.values()).most_common(1)
        self.rows = counts[key] if key in counts and counts[key] >= 0 else max(0, most[0][0]) if most else 0
        self.uneven = {name: count for name, count in counts.items() if 0 <= count != self.rows}
        for name, count in counts.items():
            if count < 0:
                self.skipped[name] = f"a single {self._members[name].dtype}, and not one value per step"
            elif count != self.rows:
                self.skipped[name] = f"{count} values for {self.rows} steps"
        self.names = tuple(name for name in counts if name not in self.skipped)
        self.finals = tuple(finals)
        for member in members.values():
            member.close()

    def _count(self, name: str) -> int:
        """Number of a column's values; -1 for a scalar."""
        shape = self._members[name].shape
        return len(self._offsets[name]) - 1 if name in self._offsets else shape[0] if shape else -1

    def _take_offsets(self, member: _Member) -> None:
        """Use an array as the offsets of a ragged column, if there is a column of that name."""
        name = member.name.removesuffix(OFFSETS)
        if name not in self._members:
            return
        del self._members[member.name]
        expected = f"values whose {member.name!r}, int64 [rows + 1], rise from 0 to their number"
        if len(member.shape) != 1 or member.dtype.kind not in "iu" or member.shape[0] < 1:
            self.skipped[name] = f"{expected}: they are {member.dtype} {member.shape}"
        else:
            offsets = member.read(member.shape[0]).astype(np.int64)
            total = self._members[name].shape[0] if self._members[name].shape else 0
            if offsets[0] == 0 and (np.diff(offsets) >= 0).all() and offsets[-1] == total:
                self._offsets[name] = offsets
                return
            self.skipped[name] = f"{expected}: they do not"
        del self._members[name]

    def kind(self, name: str, field: Field | None) -> Kind:
        """Dtype and shape of a column's values; see `Part.kind`."""
        member = self._members[name]
        if name in self.finals:
            self._check_final(name)
        dtype = dtype_name(member.dtype)
        if name not in self._offsets:
            return Kind(dtype, member.shape[1:])
        longest = int(np.diff(self._offsets[name]).max(initial=1))
        return Kind(dtype, (longest, *member.shape[1:]), ragged=True)

    def _check_final(self, name: str) -> None:
        places = self._places
        if (np.diff(places) <= 0).any() or ((places < 0) | (places >= self.rows)).any():
            raise self.refuse(_ROWS, f"ascending rows below {self.rows}", "others")
        if self._count(name) != len(places):
            raise self.refuse(name, f"{len(places)} values, one for each of {_ROWS!r}", f"{self._count(name)}")

    def whole(self, name: str) -> Array:
        """All values of a column of scalars."""
        return _Member(self._archive, self.path, name).read(self.rows)

    def mean_length(self, name: str) -> float:
        """Mean length of the values of a ragged column."""
        return float(self._offsets[name][-1]) / max(1, self.rows)

    def read(self, columns: Mapping[str, Kind], finals: Mapping[str, Kind], rows: int) -> Iterator[Chunk]:
        """The columns, at most `rows` rows at a time."""
        members = {name: _Member(self._archive, self.path, name) for name in columns}
        kept = {name: _Member(self._archive, self.path, name) for name in finals}
        for start in range(0, self.rows, rows):
            stop = min(self.rows, start + rows)
            low, high = np.searchsorted(self._places, (start, stop)).tolist() if finals else (0, 0)
            yield Chunk(
                {name: self._take(member, start, stop) for name, member in members.items()},
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
    # numpy.savez takes columns as keyword arguments, which clash with its own argument names
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
