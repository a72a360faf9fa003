"""The columns that a set of files has: what each means, whether all files agree, and where episodes begin.

A file is a `Part`: equally long columns, one row per step. Names:

    <field>                    one column per field, by its dotted name
    terminated, truncated      bool
    _episode, _step            int64: number of the episode, step in it (`episode`, `step` in files of other origin)
    final.<observation>        the observation after the last step of an episode, for the steps that have one
    next_<observation>         the observation after each step, in files of other origin
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from conduit.errors import ConduitError, SourceError
from conduit.field import DTYPES, Field
from conduit.offline.source import Description, Source
from conduit.plane.steps import Array, Steps
from conduit.schema import Schema

FINAL = "final."
NEXT = "next_"
CHUNK_BYTES = 8 << 20
_SYSTEM = {"_episode": "int64", "_step": "int64", "terminated": "bool", "truncated": "bool"}


@dataclass(frozen=True, slots=True)
class Kind:
    """Dtype and shape of a column's values; `ragged`: the first size is the largest one."""

    dtype: str
    shape: tuple[int, ...]
    ragged: bool = False

    def __str__(self) -> str:
        return f"{'ragged ' * self.ragged}{self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of a part: values by column, and the final observations of the rows at `places` (from 0)."""

    values: Mapping[str, Any]
    places: Array
    finals: Mapping[str, Any]


class Part(ABC):
    """One file, opened: what its columns are is known, their values are not read yet.

    Attributes:
        path: The file.
        rows: Steps in it.
        kinds: {column: dtype and shape}, without final observations.
        finals: The same for `final.<observation>`, by the observation's name.
        document: The schema in JSON, in a file that Conduit wrote.
    """

    path: Path
    rows: int
    kinds: dict[str, Kind]
    finals: dict[str, Kind]
    document: bytes | None

    @abstractmethod
    def whole(self, name: str) -> Array:
        """All values of a column of scalars."""

    @abstractmethod
    def mean_length(self, name: str) -> float:
        """Mean length of the values of a ragged column."""

    @abstractmethod
    def read(self, names: Sequence[str], finals: Sequence[str], rows: int) -> Iterator[Chunk]:
        """The columns `names` and the final observations `finals`, at most `rows` rows at a time."""

    def refuse(self, column: str, expected: str, got: str) -> SourceError:
        """The error for a column that is not as it must be."""
        return SourceError(f"Expected {expected}, got {got} - column {column!r} of {self.path}")


class Files(Source):
    """A set of files as one source.

    Args:
        format: What the files are.
        name: What the set is called.
        parts: The files, in order.
        schema: What they must have; None takes what they have.
        columns: {field or flag: column that holds it}, where the names differ.

    Raises:
        SourceError: A column is missing or is not as it must be, or episodes are not contiguous.
    """

    def __init__(
        self,
        format: str,  # noqa: A002 - the natural word
        name: str,
        parts: Sequence[Part],
        schema: Schema | None,
        columns: Mapping[str, str],
    ) -> None:
        self._parts = parts
        self._stored = dict(columns)
        self._own = parts[0].document is not None
        for wanted, column in columns.items():
            if column not in parts[0].kinds:
                raise SourceError(
                    f"Expected one of the columns {sorted(parts[0].kinds)} of {parts[0].path}, got {column!r} - at "
                    f"columns[{wanted!r}]"
                )
        wanted_schema = self._inferred() if schema is None else schema
        self._next = [
            n for n in wanted_schema.observation_names if self._name(NEXT + n) in parts[0].kinds and not self._own
        ]
        if self._next and len(self._next) < len(wanted_schema.observation_names):
            lacking = next(n for n in wanted_schema.observation_names if n not in self._next)
            raise parts[0].refuse(NEXT + lacking, "the next observation of every observation or of none", "no column")
        ragged = [n for n in self._next if wanted_schema[n].ragged]
        if ragged:
            raise parts[0].refuse(NEXT + ragged[0], f"{FINAL}{ragged[0]} for a ragged observation", "next observations")
        for part in parts:
            self._check(part, wanted_schema)
        self._schema = wanted_schema
        walk = _Walk(self._system)
        self._starts = [walk.begun(part) for part in parts]
        walk.check_numbers(parts[0].path.parent)
        self._ends = _ends(self._starts)
        episodes = sum(int(begun.sum()) for begun in self._starts)
        taken = {self._name(n) for n in (*wanted_schema.names, *_SYSTEM, *(NEXT + n for n in self._next))}
        taken |= {self._system(n) for n in ("_episode", "_step")}
        self.description = Description(
            name,
            format,
            wanted_schema,
            sum(part.rows for part in parts),
            episodes,
            episodes if self._next else walk.flagged,
            {n: self._mean_length(n) for n in wanted_schema.ragged_names},
            tuple(sorted(parts[0].kinds.keys() - taken)),
        )

    def _name(self, wanted: str) -> str:
        """The column that holds a field, flag, or next observation."""
        return self._stored.get(wanted, wanted)

    def _system(self, wanted: str) -> str:
        """The same for a flag or number; those of other origin have no underscore."""
        return self._stored.get(wanted, wanted if self._own else wanted.removeprefix("_"))

    def _mean_length(self, name: str) -> float:
        rows = sum(part.rows for part in self._parts)
        total = sum(part.mean_length(self._name(name)) * part.rows for part in self._parts)
        return total / rows if rows else 0.0

    def _inferred(self) -> Schema:
        """The schema written in the files, or what the first one's columns and the others' lengths tell."""
        first = self._parts[0]
        if first.document is not None:
            try:
                return Schema.from_json(first.document)
            except ConduitError as error:
                raise SourceError(f"Expected the schema of {first.path} to be readable: {error}") from error
        system = {self._system(name) for name in _SYSTEM}
        wanted = {column: name for name, column in self._stored.items()}
        fields = []
        for column, kind in first.kinds.items():
            name = wanted.get(column, column)
            if column in system or name.startswith((NEXT, "_")):
                continue
            longest = max((part.kinds[column].shape[:1] for part in self._parts if column in part.kinds), default=())
            shape = (*longest, *kind.shape[1:]) if kind.ragged else kind.shape
            observed = name == "obs" or name.startswith("obs.")
            observed = observed or self._name(NEXT + name) in first.kinds or name in first.finals
            try:
                fields.append(Field(name, kind.dtype, shape, observation=observed, ragged=kind.ragged))
            except ConduitError as error:
                raise SourceError(f"{error} (rename it by columns=) - column {column!r} of {first.path}") from error
        if not fields:
            raise SourceError(f"Expected columns for the fields of a row, got {sorted(first.kinds)} in {first.path}")
        return Schema(fields)

    def _check(self, part: Part, schema: Schema) -> None:
        if part.document != self._parts[0].document:
            raise SourceError(
                f"Expected every file to have been written with the schema of {self._parts[0].path}, {part.path} was not"
            )
        needed = {self._name(f.name): f for f in schema.fields}
        needed |= {self._name(NEXT + n): schema[n] for n in self._next}
        for column, field in needed.items():
            if column not in part.kinds:
                raise part.refuse(column, str(field), f"no such column (there are {sorted(part.kinds)})")
            if not fits(part.kinds[column], field):
                raise part.refuse(column, str(field), str(part.kinds[column]))
        for name, kind in part.finals.items():
            if name not in schema.observation_names:
                raise part.refuse(FINAL + name, f"an observation among {list(schema.observation_names)}", name)
            if not fits(kind, schema[name]):
                raise part.refuse(FINAL + name, str(schema[name]), str(kind))
        if part.finals and len(part.finals) < len(schema.observation_names):
            lacking = next(n for n in schema.observation_names if n not in part.finals)
            raise part.refuse(FINAL + lacking, "the final observation of every observation or of none", "no column")
        for name, dtype in _SYSTEM.items():
            column = self._system(name)
            found = part.kinds.get(column)
            if found is None and name == "terminated":
                raise part.refuse(column, "bool ()", f"no such column (there are {sorted(part.kinds)})")
            number = found is not None and dtype == "int64" and found.dtype.startswith(("int", "uint"))
            if found is not None and (found.shape != () or not (number or found.dtype == dtype)):
                raise part.refuse(column, f"{dtype} ()", str(found))

    def steps(self) -> Iterator[Steps]:
        """All steps in order; see `Source.steps`."""
        schema = self._schema
        rows = max(1, min(1 << 16, CHUNK_BYTES // schema.row_bytes))
        flags = [self._system(name) for name in ("terminated", "truncated")]
        names = [self._name(name) for name in schema.names]
        follow = [self._name(NEXT + name) for name in self._next]
        held: dict[str, Array] = {}
        for part, starts, ends in zip(self._parts, self._starts, self._ends, strict=True):
            extra = [flag for flag in flags if flag in part.kinds]
            done = 0
            for chunk in part.read([*names, *follow, *extra], sorted(part.finals), rows):
                values = chunk.values
                terminated = values[flags[0]]
                truncated = values[flags[1]] if flags[1] in values else np.zeros(len(terminated), bool)
                columns = {name: values[self._name(name)] for name in schema.names}
                here = slice(done, done + len(terminated))
                places, finals = chunk.places, chunk.finals
                if self._next:
                    after = {name: values[self._name(NEXT + name)] for name in self._next}
                    _check_next(part, done, columns, after, ends[here], held)
                    places = np.flatnonzero(ends[here])
                    finals = {name: array[places] for name, array in after.items()}
                    # an end that no flag tells of, with an observation behind it: the data stop there, the task does not
                    truncated = truncated | (ends[here] & ~terminated)
                yield Steps(columns, terminated, truncated, starts[here], places, finals)
                done += len(terminated)
            if done != part.rows:
                raise SourceError(f"Expected {part.rows} rows, got {done} - in {part.path}")


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


def _check_next(
    part: Part, done: int, columns: Mapping[str, Array], after: Mapping[str, Array], ends: Array, held: dict[str, Array]
) -> None:
    """Hold next observations to the observations that follow; `held` carries the last one over to the next chunk."""
    for name, follow in after.items():
        seen = _bytes(columns[name])
        told = _bytes(follow)
        wrong = np.flatnonzero((told[:-1] != seen[1:]).any(1) & ~ends[:-1])
        if name in held and len(seen) and not np.array_equal(held[name], seen[0]):
            wrong = np.array([-1])
        if len(wrong):
            raise SourceError(
                f"Expected {NEXT}{name} of row {done + int(wrong[0])} to be {name} of the row behind it, since no episode "
                f"ends there, got another: mark the ends by flags or an episode column - in {part.path}"
            )
        held.pop(name, None)
        if len(ends) and not ends[-1]:
            held[name] = told[-1].copy()


def _bytes(values: Array) -> Array:
    flat = np.ascontiguousarray(values)
    together: Array = flat.reshape(len(flat), -1).view(np.uint8)
    return together


class _Walk:
    """Finds where episodes begin, file by file: behind a flag, where the number changes, without numbers at a file's begin.

    Attributes:
        flagged: Rows so far that end an episode by a flag.
        numbers: Episode numbers in the order of their begin, one array per file.
    """

    def __init__(self, system: Callable[[str], str]) -> None:
        self.flagged = 0
        self.numbers: list[Array] = []
        self._system = system
        self._ended = True
        self._number: int | None = None
        self._step = -1

    def begun(self, part: Part) -> Array:
        """Bool [rows] of the next file: an episode begins here.

        Raises:
            SourceError: An episode goes on behind its end, or its steps do not count up.
        """
        if part.rows == 0:
            return np.zeros(0, bool)
        ended = part.whole(self._system("terminated"))
        if self._system("truncated") in part.kinds:
            ended = ended | part.whole(self._system("truncated"))
        begun = behind(self._ended, ended)
        begun = self._by_number(part, begun)
        column = self._system("_step")
        if column in part.kinds:
            steps = part.whole(column).astype(np.int64)
            wrong = np.flatnonzero((steps != behind(self._step, steps) + 1) & ~begun)
            if len(wrong):
                row = int(wrong[0])
                raise part.refuse(column, f"steps that count up in an episode, at row {row}", f"{int(steps[row])}")
            self._step = int(steps[-1])
        self._ended = bool(ended[-1])
        self.flagged += int(ended.sum())
        return begun

    def _by_number(self, part: Part, begun: Array) -> Array:
        column = self._system("_episode")
        if column not in part.kinds:
            begun[0] = True
            return begun
        numbers = part.whole(column).astype(np.int64)
        before = int(numbers[0]) - 1 if self._number is None else self._number
        changed: Array = numbers != behind(before, numbers)
        wrong = np.flatnonzero(begun & ~changed)
        if len(wrong):
            row = int(wrong[0])
            what = f"another number in row {row}, since the row before it ends its episode"
            raise part.refuse(column, what, f"{int(numbers[row])} again")
        self.numbers.append(numbers[changed])
        self._number = int(numbers[-1])
        return changed

    def check_numbers(self, where: Path) -> None:
        """Refuse an episode whose rows lie in several places.

        Raises:
            SourceError: There is one.
        """
        seen, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *self.numbers]), return_counts=True)
        if (counts > 1).any():
            raise SourceError(
                f"Expected the rows of an episode side by side, got those of episode {int(seen[counts > 1][0])} in several "
                f"places: sort them by episode and step - column {self._system('_episode')!r} in {where}"
            )


def behind(first: Any, values: Array) -> Array:
    """`values` moved on by one row, `first` in front."""
    moved: Array = np.empty_like(values)
    moved[0] = first
    moved[1:] = values[:-1]
    return moved


def _ends(starts: Sequence[Array]) -> list[Array]:
    """Bool [rows] of each file: the row is the last one of its episode."""
    ends = []
    following = True
    for begun in reversed(starts):
        over = np.ones(len(begun), bool)
        over[:-1] = begun[1:]
        if len(begun):
            over[-1] = following
            following = bool(begun[0])
        ends.append(over)
    return ends[::-1]


def joined(pieces: Sequence[Steps]) -> Steps:
    """Steps one behind the other as one."""
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
