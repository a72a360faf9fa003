"""Parquet: a value of one number is a plain column, an array is nested fixed-size lists, a ragged one a list.

Arrays of 1 KiB or more are raw bytes (`fixed_size_binary`, C order, this machine's byte order), since Parquet would encode
each of their numbers for itself. `final.<observation>` is null but where a final observation is kept. The schema's JSON
is in the file's metadata as `conduit.schema`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from conduit.errors import MissingExtra, SourceError
from conduit.field import DTYPES, Field
from conduit.offline.columns import FINAL, Chunk, Kind, Part
from conduit.plane.steps import Array, Steps
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


class ParquetPart(Part):
    """One Parquet file."""

    def __init__(self, path: Path) -> None:
        self._arrow = package()
        self.path = path
        try:
            self._file = self._arrow.parquet.ParquetFile(path)
            schema = self._file.schema_arrow
        except (self._arrow.ArrowException, OSError) as error:
            raise SourceError(f"Expected a Parquet file, got {type(error).__name__}: {error} - file {path}") from error
        self.rows = self._file.metadata.num_rows
        self.document = (schema.metadata or {}).get(_SCHEMA)
        own = None if self.document is None else Schema.from_json(self.document)
        self.kinds = {}
        self.finals = {}
        for item in schema:
            if item.name.startswith(FINAL):
                base = item.name.removeprefix(FINAL)
                self.finals[base] = self._kind(item.name, item.type, own[base] if own and base in own else None)
            else:
                self.kinds[item.name] = self._kind(
                    item.name, item.type, own[item.name] if own and item.name in own else None
                )
        self._check_nulls()

    def _kind(self, name: str, type_: Any, field: Field | None) -> Kind:
        types = self._arrow.types
        ragged = types.is_list(type_) or types.is_large_list(type_)
        if types.is_fixed_size_binary(type_) and field is not None and type_.byte_width == field.row_bytes:
            return Kind(field.dtype, field.shape)
        shape: list[int] = []
        inner = type_.value_type if ragged else type_
        while types.is_fixed_size_list(inner):
            shape.append(inner.list_size)
            inner = inner.value_type
        dtypes = {"halffloat": "float16", "float": "float32", "double": "float64"}
        dtype = dtypes.get(str(inner), str(inner))
        if dtype not in DTYPES:
            raise self.refuse(
                name,
                f"numbers ({', '.join(DTYPES)}), or lists of them (raw bytes need a file that Conduit wrote)",
                str(type_),
            )
        if not ragged:
            return Kind(dtype, tuple(shape))
        longest = field.max_length if field is not None and field.ragged else self._lengths(name)[1]
        return Kind(dtype, (longest, *shape), ragged=True)

    def _check_nulls(self) -> None:
        """Refuse what the file's statistics know to be null; `read` looks at the values."""
        for group in range(self._file.metadata.num_row_groups):
            for place in range(self._file.metadata.num_columns):
                column = self._file.metadata.row_group(group).column(place)
                name = column.path_in_schema
                plain = name in self.kinds and not self.kinds[name].shape
                if plain and column.statistics is not None and column.statistics.null_count:
                    raise self.refuse(name, "a value in every row", f"{column.statistics.null_count} nulls")

    def _lengths(self, name: str) -> tuple[int, int]:
        """Sum of the lengths of a ragged column, and the largest."""
        total, longest = 0, 1
        for batch in self._batches([name], 1 << 16):
            lengths = batch.column(0).value_lengths().to_numpy(zero_copy_only=False)
            total += int(lengths.sum())
            longest = max(longest, int(lengths.max(initial=0)))
        return total, longest

    def _batches(self, names: Sequence[str], rows: int) -> Iterator[Any]:
        try:
            yield from self._file.iter_batches(batch_size=rows, columns=list(names))
        except (self._arrow.ArrowException, OSError) as error:
            raise SourceError(
                f"Expected readable Parquet, got {type(error).__name__}: {error} - file {self.path}"
            ) from error

    def whole(self, name: str) -> Array:
        """All values of a column of scalars."""
        pieces = [self._values(name, batch.column(0), self.kinds[name]) for batch in self._batches([name], 1 << 20)]
        return np.concatenate([np.zeros(0, DTYPES[self.kinds[name].dtype]), *pieces])

    def mean_length(self, name: str) -> float:
        """Mean length of the values of a ragged column."""
        return self._lengths(name)[0] / max(1, self.rows)

    def read(self, names: Sequence[str], finals: Sequence[str], rows: int) -> Iterator[Chunk]:
        """The columns, at most `rows` rows at a time."""
        # a dotted name means a part of a nested column to pyarrow, but where it is a whole column's name
        for batch in self._batches([*names, *(FINAL + name for name in finals)], rows):
            values = {name: self._values(name, batch.column(name), self.kinds[name]) for name in names}
            places = np.zeros(0, np.int64)
            kept: dict[str, Any] = {}
            for name in finals:
                array = batch.column(FINAL + name)
                here = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))
                if kept and not np.array_equal(here, places):
                    raise self.refuse(FINAL + name, "nulls in the same rows as the other final observations", "others")
                places = here
                kept[name] = self._values(FINAL + name, array.drop_null(), self.finals[name])
            yield Chunk(values, places, kept)

    def _values(self, name: str, array: Any, kind: Kind) -> Any:
        if array.null_count:
            raise self.refuse(name, "a value in every row", f"{array.null_count} nulls")
        if not kind.ragged:
            return self._dense(name, array, kind.dtype, kind.shape)
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        values = self._dense(name, array.flatten(), kind.dtype, kind.shape[1:])
        return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []

    def _dense(self, name: str, array: Any, dtype: str, shape: tuple[int, ...]) -> Array:
        count = len(array)
        if self._arrow.types.is_fixed_size_binary(array.type):
            width = array.type.byte_width
            data = np.frombuffer(array.buffers()[1] or b"", np.uint8)[
                array.offset * width : (array.offset + count) * width
            ]
            return data.view(DTYPES[dtype]).reshape(count, *shape)
        for _ in shape:
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
