"""Parquet files: a scalar field is a plain column, an array field is nested fixed-size lists, a ragged field is a list.

In files that Conduit did not write, lists that all have the same length, nested or not, are arrays too.

Arrays of 1 KiB or more are raw bytes (`fixed_size_binary`, C order, this machine's byte order), since Parquet would encode
each number separately. `final.<observation>` is null in rows without a final observation. The schema's JSON is in the file's metadata
as `conduit.schema`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from conduit.errors import MissingExtra, SourceError
from conduit.field import DTYPES, Field
from conduit.offline.columns import FINAL, Chunk, Kind, Part
from conduit.plane.deliver.steps import Array, Steps
from conduit.schema import Schema

_SCHEMA = b"conduit.schema"
_RAW_BYTES = 1024
_ARROW = {name: name for name in DTYPES} | {
    "bool": "bool_",
    "float16": "float16",
    "bfloat16": "uint16",
}


def package() -> ModuleType:
    """The package, with its part for Parquet.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("Parquet needs pyarrow: pip install 'conduit-rl[offline]'") from error
    module: ModuleType = pyarrow
    return module


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Lengths of the lists at one level of a nested column.

    Attributes:
        low, high, total: The smallest, the largest, and the sum.
        row, length: Row and length of the first list that does not have the expected length; -1 if there is none.
    """

    low: int
    high: int
    total: int
    row: int
    length: int


class ParquetPart(Part):
    """One Parquet file.

    Args:
        path: The file.
        key: Not used: all columns of a file have one value per step.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._arrow = package()
        self.path = path
        try:
            self._file = self._arrow.parquet.ParquetFile(path)
            schema = self._file.schema_arrow
        except (self._arrow.ArrowException, OSError) as error:
            raise SourceError(f"Expected a Parquet file, got {type(error).__name__}: {error} - file {path}") from error
        self.rows = self._file.metadata.num_rows
        self.document = (schema.metadata or {}).get(_SCHEMA)
        self._fields = {} if self.document is None else {f.name: f for f in Schema.from_json(self.document).fields}
        self._types = {item.name: item.type for item in schema}
        self._lengths: dict[str, list[_Lengths]] = {}
        self.skipped = {}
        for name, type_ in self._types.items():
            if len(schema.get_all_field_indices(name)) > 1:
                self.skipped[name] = "two columns of this name"
            elif not self._is_raw(name) and self._parsed(name)[1] not in DTYPES:
                self.skipped[name] = str(type_)
        readable = [name for name in self._types if name not in self.skipped]
        self.names = tuple(name for name in readable if not name.startswith(FINAL))
        self.finals = tuple(name for name in readable if name.startswith(FINAL))

    def _field(self, name: str) -> Field | None:
        """The field of a column, in files that Conduit wrote; otherwise None."""
        return self._fields.get(name.removeprefix(FINAL))

    def _is_raw(self, name: str) -> bool:
        """Whether a column holds a field's raw bytes; only files that Conduit wrote say which field."""
        type_, field = self._types[name], self._field(name)
        is_bytes: bool = self._arrow.types.is_fixed_size_binary(type_)
        return is_bytes and field is not None and type_.byte_width == field.row_bytes

    def _parsed(self, name: str) -> tuple[list[int | None], str]:
        """Sizes of nested lists, None where the type has none, and the dtype of their elements."""
        types, inner, sizes = self._arrow.types, self._types[name], []
        while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
            sizes.append(inner.list_size if types.is_fixed_size_list(inner) else None)
            inner = inner.value_type
        dtypes = {"halffloat": "float16", "float": "float32", "double": "float64"}
        return sizes, dtypes.get(str(inner), str(inner))

    def kind(self, name: str, field: Field | None) -> Kind:
        """Dtype and shape of a column's values; see `Part.kind`. Lists must all have the same length, unless the field is ragged."""
        own = self._field(name)
        if self._is_raw(name) and own is not None:
            return Kind(own.dtype, own.shape)
        sizes, dtype = self._parsed(name)
        if not sizes:
            self._check_nulls(name)
        if None not in sizes:
            return Kind(dtype, tuple(size for size in sizes if size is not None))
        if field is not None and field.ragged and own is not None and own.ragged and None not in sizes[1:]:
            return Kind(dtype, own.shape, ragged=True)
        if field is not None and len(sizes) != len(field.shape):
            raise self.refuse(name, str(field), str(self._types[name]))
        wanted = None if field is None else field.shape
        found = self._measured(name, wanted)
        ragged = field.ragged if field is not None else sizes[0] is None and found[0].low != found[0].high
        for level, lengths in enumerate(found):
            if lengths.row >= 0 and not (ragged and level == 0):
                size = lengths.low if wanted is None else wanted[level]
                what = "a list" if level == 0 else f"lists, {level} deep,"
                raise self.refuse(
                    name,
                    f"{what} of {size} values in every row (or a ragged field)",
                    f"{lengths.length} in row {lengths.row}",
                )
        inner = tuple(lengths.low for lengths in found[1:])
        if ragged or found[0].high == 0:
            return Kind(dtype, (max(1, found[0].high), *inner), ragged=True, loose=True)
        return Kind(dtype, (found[0].high, *inner), loose=sizes[0] is None)

    def _check_nulls(self, name: str) -> None:
        """Refuse columns that have nulls according to the file's statistics; `read` checks the values."""
        if name.startswith(FINAL):
            return
        for group in range(self._file.metadata.num_row_groups):
            for place in range(self._file.metadata.num_columns):
                column = self._file.metadata.row_group(group).column(place)
                known = column.statistics if column.path_in_schema == name else None
                if known is not None and known.null_count:
                    raise self.refuse(name, "a value in every row", f"{known.null_count} nulls")

    def _measured(self, name: str, wanted: tuple[int, ...] | None) -> list[_Lengths]:
        """Lengths of the lists of each level; `row` is the first row that differs from `wanted`, or from the first list."""
        known = self._lengths.get(name)
        if known is not None and (wanted is None or [(k.low, k.high) for k in known] == [(w, w) for w in wanted]):
            return known
        depth = len(self._parsed(name)[0])
        firsts: dict[int, int] = {}
        low, high, total = [1 << 62] * depth, [0] * depth, [0] * depth
        row, length = [-1] * depth, [-1] * depth
        done = 0
        for batch in self._batches([name], 1 << 16):
            array = batch.column(0)
            owner = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False)) + done
            done += len(array)
            array = array.drop_null()
            for level in range(depth):
                lengths = array.value_lengths().to_numpy(zero_copy_only=False)
                if len(lengths):
                    first = firsts.setdefault(level, int(lengths[0]))
                    expected = wanted[level] if wanted is not None else first
                    other = np.flatnonzero(lengths != expected)
                    if len(other) and row[level] < 0:
                        row[level], length[level] = int(owner[other[0]]), int(lengths[other[0]])
                    low[level] = min(low[level], int(lengths.min()))
                    high[level] = max(high[level], int(lengths.max()))
                    total[level] += int(lengths.sum())
                array = array.flatten()
                owner = np.repeat(owner, lengths) if level < depth - 1 else owner
                if level < depth - 1 and array.null_count:
                    raise self.refuse(name, "a list in every place", f"{array.null_count} nulls")
        found = [_Lengths(min(low[i], high[i]), high[i], total[i], row[i], length[i]) for i in range(depth)]
        if wanted is None:
            self._lengths[name] = found
        return found

    def _batches(self, names: Sequence[str], rows: int) -> Iterator[Any]:
        try:
            yield from self._file.iter_batches(batch_size=rows, columns=list(names))
        except (self._arrow.ArrowException, OSError) as error:
            raise SourceError(
                f"Expected readable Parquet, got {type(error).__name__}: {error} - file {self.path}"
            ) from error

    def whole(self, name: str) -> Array:
        """All values of a column of scalars."""
        kind = self.kind(name, None)
        pieces, done = [np.zeros(0, DTYPES[kind.dtype])], 0
        for batch in self._batches([name], 1 << 20):
            pieces.append(self._values(name, batch.column(0), kind, done))
            done += len(pieces[-1])
        return np.concatenate(pieces)

    def mean_length(self, name: str) -> float:
        """Mean length of the values of a ragged column."""
        return self._measured(name, None)[0].total / max(1, self.rows)

    def read(self, columns: Mapping[str, Kind], finals: Mapping[str, Kind], rows: int) -> Iterator[Chunk]:
        """The columns, at most `rows` rows at a time."""
        done = 0
        # pyarrow takes a dotted name for a part of a nested column, unless it is a whole column's name
        for batch in self._batches([*columns, *finals], rows):
            values = {name: self._values(name, batch.column(name), kind, done) for name, kind in columns.items()}
            places = np.zeros(0, np.int64)
            kept: dict[str, Any] = {}
            for name, kind in finals.items():
                array = batch.column(name)
                here = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))
                if kept and not np.array_equal(here, places):
                    raise self.refuse(name, "nulls in the same rows as the other final observations", "others")
                places = here
                kept[name] = self._values(name, array.drop_null(), kind, done)
            yield Chunk(values, places, kept)
            done += len(batch)

    def _values(self, name: str, array: Any, kind: Kind, done: int) -> Any:
        """Values of rows from `done` on."""
        if array.null_count:
            row = done + int(np.flatnonzero(~array.is_valid().to_numpy(zero_copy_only=False))[0])
            raise self.refuse(name, "a value in every row", f"{array.null_count} nulls, the first in row {row}")
        if not kind.ragged:
            return self._dense(name, array, kind.dtype, kind.shape, done)
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        values = self._dense(name, array.flatten(), kind.dtype, kind.shape[1:], done)
        return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []

    def _dense(self, name: str, array: Any, dtype: str, shape: tuple[int, ...], done: int) -> Array:
        types, count = self._arrow.types, len(array)
        if types.is_fixed_size_binary(array.type):
            width = array.type.byte_width
            data = np.frombuffer(array.buffers()[1] or b"", np.uint8)[
                array.offset * width : (array.offset + count) * width
            ]
            return data.view(DTYPES[dtype]).reshape(count, *shape)
        for size in shape:
            if not types.is_fixed_size_list(array.type):
                lengths = array.value_lengths().to_numpy(zero_copy_only=False)
                other = np.flatnonzero(lengths != size)
                if len(other):
                    row = done + int(other[0]) * count // max(1, len(lengths))
                    raise self.refuse(name, f"lists of {size} values", f"{int(lengths[other[0]])} in row {row}")
            array = array.flatten()
            if array.null_count:
                raise self.refuse(name, "a number in every place", f"{array.null_count} nulls")
        values: Array = array.to_numpy(zero_copy_only=False)
        return values.reshape(count, *shape)


def write(path: Path, schema: Schema, steps: Steps, numbers: Mapping[str, Array]) -> None:
    """Write one file: the steps' columns, flags and final observations, and columns of numbers."""
    arrow = package()
    names, arrays, nullable = [], [], []

    def add(name: str, array: Any, missing: bool = False) -> None:
        names.append(name)
        arrays.append(array)
        nullable.append(missing)

    for name in schema.names:
        add(name, _encoded(arrow, schema[name], steps.columns[name]))
    for name, flags in (("terminated", steps.terminated), ("truncated", steps.truncated)):
        add(name, arrow.array(flags))
    for name, values in numbers.items():
        add(name, arrow.array(values))
    index = np.full(len(steps), -1, np.int64)
    index[steps.places] = np.arange(len(steps.places))
    taken = arrow.array(index, mask=index < 0)
    for name in schema.observation_names:
        add(FINAL + name, _encoded(arrow, schema[name], steps.finals[name]).take(taken), missing=True)
    fields = [
        arrow.field(name, array.type, nullable=missing)
        for name, array, missing in zip(names, arrays, nullable, strict=True)
    ]
    table = arrow.Table.from_arrays(arrays, schema=arrow.schema(fields, metadata={_SCHEMA: schema.to_json()}))
    arrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False, row_group_size=1 << 17)


def _encoded(arrow: ModuleType, field: Field, values: Any) -> Any:
    """A field's values as an Arrow array."""
    if not field.ragged:
        return _fixed(arrow, field, field.shape, values)
    inner = field.shape[1:]
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    together = np.concatenate([np.empty((0, *inner), field.numpy_dtype), *values])
    items = _nested(arrow, field, inner, together)
    return arrow.ListArray.from_arrays(arrow.array(offsets), items)


def _fixed(arrow: ModuleType, field: Field, shape: tuple[int, ...], values: Array) -> Any:
    if shape and field.row_bytes >= _RAW_BYTES:
        data = np.ascontiguousarray(values)
        return arrow.Array.from_buffers(arrow.binary(field.row_bytes), len(data), [None, arrow.py_buffer(data)])
    return _nested(arrow, field, shape, values)


def _nested(arrow: ModuleType, field: Field, shape: tuple[int, ...], values: Array) -> Any:
    flat = np.ascontiguousarray(values).reshape(math.prod(np.shape(values)))
    array = arrow.array(flat, type=getattr(arrow, _ARROW[field.dtype])())
    for size in reversed(shape):
        array = arrow.FixedSizeListArray.from_arrays(
            array, type=arrow.list_(arrow.field("item", array.type, nullable=False), size)
        )
    return array
