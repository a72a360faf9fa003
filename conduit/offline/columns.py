"""The columns of a set of files: the meaning of each, and the contract `Part` of a file.

A file is a `Part`: columns of equally many values, one per step. Names:

    <field>                    one column per field, by its dotted name
    terminated, truncated      bool
    _episode, _step            int64: number of the episode, step in it (`episode`, `step` in files that Conduit did not write)
    final.<observation>        the observation after the last step of an episode, for the steps that have one
    next_<observation>         the observation after each step, in files that Conduit did not write

Other columns, of any kind, are ignored: only columns that a schema names are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from conduit.errors import SourceError
from conduit.field import DTYPES, Field
from conduit.plane.deliver.steps import Array, Steps

FINAL = "final."
NEXT = "next_"
CHUNK_BYTES = 8 << 20
FLAGS = ("terminated", "truncated")
NUMBERS = ("_episode", "_step")


@dataclass(frozen=True, slots=True)
class Kind:
    """Dtype and shape of a column's values; `ragged`: the first size is the largest one.

    Attributes:
        loose: Whether the file does not declare the first size, so that values in another file may have another length.
    """

    dtype: str
    shape: tuple[int, ...]
    ragged: bool = False
    loose: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{'ragged ' * self.ragged}{self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of a part: values by column, and the final observations of the rows at `places` (from 0), by column."""

    values: Mapping[str, Any]
    places: Array
    finals: Mapping[str, Any]


class Part(ABC):
    """One open file: its columns are known, their values are not read yet.

    Attributes:
        path: The file.
        rows: Steps in it.
        names: Columns that a field can be read from.
        finals: Columns of final observations, `final.<observation>`.
        skipped: {column that no field can be read from: description of its contents}.
        uneven: {readable column that does not have one value per step: number of its values}; these are in `skipped` too.
        document: The schema in JSON, in a file that Conduit wrote.
        begins: Bool [rows], True where an episode begins, in a format that stores each episode apart; otherwise None.
        aliases: {field or flag: its column}, in a format with fixed names.
    """

    path: Path
    rows: int
    names: tuple[str, ...]
    finals: tuple[str, ...] = ()
    skipped: dict[str, str]
    uneven: Mapping[str, int] = {}
    document: bytes | None = None
    begins: Array | None = None
    aliases: Mapping[str, str] = {}

    @abstractmethod
    def kind(self, name: str, field: Field | None) -> Kind:
        """Dtype and shape of a column's values; `name` is one of `names` or `finals`.

        Args:
            name: The column.
            field: The field that it is read for; None if not known yet.

        Raises:
            SourceError: Not all of its values can be read as a field's; names the first row that differs.
        """

    @abstractmethod
    def whole(self, name: str) -> Array:
        """All values of a column of scalars."""

    @abstractmethod
    def mean_length(self, name: str) -> float:
        """Mean length of the values of a ragged column."""

    @abstractmethod
    def read(self, columns: Mapping[str, Kind], finals: Mapping[str, Kind], rows: int) -> Iterator[Chunk]:
        """Read columns and columns of final observations, as the kinds from `kind`, at most `rows` rows at a time."""

    def refuse(self, column: str, expected: str, got: str) -> SourceError:
        """The error for a column that does not fit."""
        return SourceError(f"Expected {expected}, got {got} - column {column!r} of {self.path}")


def fits(kind: Kind, field: Field) -> bool:
    """Whether values of this kind can be written to a field: the same dtype and shape, or a cast that the field allows."""
    if kind.ragged != field.ragged:
        return False
    if kind.ragged:
        shapes = kind.shape[1:] == field.shape[1:] and kind.shape[0] <= field.shape[0]
    else:
        shapes = kind.shape == field.shape
    bits = field.numpy_dtype.name
    casts = field.casting == "same_kind" and np.can_cast(DTYPES[kind.dtype], field.numpy_dtype, "same_kind")
    return shapes and (kind.dtype in (field.dtype, bits) or casts)


def behind(first: Any, values: Array) -> Array:
    """`values` shifted by one row, with `first` in front."""
    moved: Array = np.empty_like(values)
    moved[0] = first
    moved[1:] = values[:-1]
    return moved


def joined(pieces: Sequence[Steps]) -> Steps:
    """Concatenate steps."""
    if len(pieces) == 1:
        return pieces[0]
    offsets = np.cumsum([0, *(len(piece) for piece in pieces)])

    def together(values: list[Any]) -> Any:
        return [one for part in values for one in part] if isinstance(values[0], list) else np.concatenate(values)

    def numbers(values: list[Array | None]) -> Array | None:
        return None if any(value is None for value in values) else np.concatenate([v for v in values if v is not None])

    first = pieces[0]
    return replace(
        first,
        columns={name: together([piece.columns[name] for piece in pieces]) for name in first.columns},
        terminated=np.concatenate([piece.terminated for piece in pieces]),
        truncated=np.concatenate([piece.truncated for piece in pieces]),
        starts=np.concatenate([piece.starts for piece in pieces]),
        places=np.concatenate([p.places + offset for p, offset in zip(pieces, offsets, strict=False)]),
        finals={name: together([piece.finals[name] for piece in pieces]) for name in first.finals},
        episodes=numbers([piece.episodes for piece in pieces]),
        numbers=numbers([piece.numbers for piece in pieces]),
    )
