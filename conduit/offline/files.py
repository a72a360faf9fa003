"""A set of files as one source. Columns that a schema names are checked against it before any value is read; others are ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from conduit.errors import ConduitError, SourceError
from conduit.field import Field
from conduit.nesting import hint
from conduit.offline.columns import CHUNK_BYTES, FINAL, FLAGS, NEXT, NUMBERS, Kind, Part, fits
from conduit.offline.episodes import Walk, as_flags, check_next, ends
from conduit.offline.naming import Naming
from conduit.offline.source import Description, Source
from conduit.plane.deliver.steps import Array, Steps
from conduit.schema import Schema


class Files(Source):
    """A set of files as one source.

    Args:
        format: Format of the files.
        name: Name of the set.
        parts: The files, in order.
        schema: The schema that they must fit; None takes the schema of the files.
        columns: {field or flag: column that holds it}, for names that differ.

    Raises:
        ConfigError: `columns` has a name that is not in the schema.
        SourceError: A column is missing or does not fit, or episodes are not contiguous.
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
        first = parts[0]
        self._own = first.document is not None
        self._naming = Naming(first, columns, schema)
        self._left: dict[str, str] = dict(first.skipped)
        wanted = self._inferred() if schema is None else schema
        self._naming.check(wanted)
        self._next = [
            n for n in wanted.observation_names if self._naming.column(NEXT + n) in first.names and not self._own
        ]
        if self._next and len(self._next) < len(wanted.observation_names):
            lacking = next(n for n in wanted.observation_names if n not in self._next)
            raise first.refuse(NEXT + lacking, "the next observation of every observation or of none", "no column")
        ragged = [n for n in self._next if wanted[n].ragged]
        if ragged:
            raise first.refuse(NEXT + ragged[0], f"{FINAL}{ragged[0]} for a ragged observation", "next observations")
        self._schema = wanted
        checked = [(self._checked(part), self._checked_finals(part)) for part in parts]
        self._kinds = [kinds for kinds, _ in checked]
        self._finals = [finals for _, finals in checked]
        walk = Walk(self._naming.system)
        self._starts = [walk.begun(part) for part in parts]
        walk.check_numbers(first.path.parent)
        self._ends = ends(self._starts)
        episodes = sum(int(begun.sum()) for begun in self._starts)
        if schema is None:
            self._check_uneven(episodes)
        taken = {self._naming.column(n) for n in (*wanted.names, *(NEXT + n for n in self._next))}
        taken |= {self._naming.system(n) for n in (*FLAGS, *NUMBERS)}
        taken |= {self._naming.final(n) for n in wanted.observation_names}
        ignored = tuple(sorted({*first.names, *first.finals, *first.skipped} - taken))
        self.description = Description(
            name,
            format,
            wanted,
            sum(part.rows for part in parts),
            episodes,
            episodes if self._next else walk.flagged,
            {n: self._mean_length(n) for n in wanted.ragged_names},
            ignored,
            {column: self._left[column] for column in ignored if column in self._left},
        )

    def _mean_length(self, name: str) -> float:
        rows = sum(part.rows for part in self._parts)
        total = sum(part.mean_length(self._naming.column(name)) * part.rows for part in self._parts)
        return total / rows if rows else 0.0

    def _inferred(self) -> Schema:
        """The schema written in the files, or a schema of their columns; columns that cannot be a field are left out."""
        first = self._parts[0]
        if first.document is not None:
            try:
                return Schema.from_json(first.document)
            except ConduitError as error:
                raise SourceError(f"Expected the schema of {first.path} to be readable: {error}") from error
        system = {self._naming.system(name) for name in (*FLAGS, *NUMBERS)}
        mapped = self._naming.fields()
        following = {self._naming.column(NEXT + mapped.get(column, column)) for column in first.names}
        fields = []
        for column in first.names:
            name = mapped.get(column, column)
            if column in system or column in following or name.startswith((NEXT, "_")):
                continue
            kind = self._inferred_kind(column)
            if kind is None:
                continue
            observed = name == "obs" or name.startswith("obs.")
            observed = observed or self._naming.column(NEXT + name) in first.names
            observed = observed or self._naming.final(name) in first.finals
            try:
                fields.append(Field(name, kind.dtype, kind.shape, observation=observed, ragged=kind.ragged))
            except ConduitError as error:
                raise SourceError(
                    f"{error}: give the column a field's name by columns={{'<field>': {column!r}}} - column {column!r} of "
                    f"{first.path}"
                ) from error
        if not fields:
            found = {column: self._left.get(column, "a column") for column in (*first.names, *first.skipped)}
            raise SourceError(f"Expected columns for the fields of a row, got {found} in {first.path}")
        return Schema(fields)

    def _inferred_kind(self, column: str) -> Kind | None:
        """A column's kind in all files; None if it cannot be a field."""
        found = []
        for part in self._parts:
            if column in part.names:
                try:
                    found.append(part.kind(column, None))
                except SourceError as error:
                    self._left[column] = str(error)
                    return None
        kind = found[0]
        if all(other == kind for other in found) or not all(other.loose for other in found):
            return kind
        return replace(kind, ragged=True, shape=(max(other.shape[0] for other in found), *kind.shape[1:]))

    def _checked(self, part: Part) -> dict[str, Kind]:
        """The kind of each column that is needed."""
        if part.document != self._parts[0].document:
            raise SourceError(
                f"Expected every file to have been written with the schema of {self._parts[0].path}, {part.path} was not"
            )
        naming, schema = self._naming, self._schema
        needed = {f.name: f for f in schema.fields} | {NEXT + n: schema[n] for n in self._next}
        kinds = {}
        for wanted, field in needed.items():
            column = naming.column(wanted)
            if column not in part.names:
                raise part.refuse(column, str(field), self._missing(part, wanted, column))
            kinds[column] = part.kind(column, field)
            if not fits(kinds[column], field):
                raise part.refuse(column, str(field), str(kinds[column]))
        for name in (*FLAGS, *NUMBERS):
            column = naming.system(name)
            if column not in part.names:
                # a format that stores episodes apart does not need the flag
                if column in part.skipped or (name == "terminated" and part.begins is None):
                    raise part.refuse(
                        column, f"{'bool' if name in FLAGS else 'int64'} ()", self._missing(part, name, column)
                    )
                continue
            found = part.kind(column, None)
            number = found.dtype.startswith(("int", "uint"))
            if found.shape != () or not (number or (name in FLAGS and found.dtype == "bool")):
                raise part.refuse(column, f"{'bool' if name in FLAGS else 'int64'} ()", str(found))
            kinds[column] = found
        return kinds

    def _missing(self, part: Part, wanted: str, column: str) -> str:
        """The columns that exist instead of a missing one, as text."""
        remedy = f"name the column that has it by columns={{{wanted!r}: ...}}"
        if column in part.skipped:
            return f"{part.skipped[column]}; {remedy}"
        return f"no such column{hint(column, sorted(part.names))}; {remedy}"

    def _checked_finals(self, part: Part) -> dict[str, Kind]:
        """The kind of each column of final observations."""
        names = self._schema.observation_names
        there = [n for n in names if self._naming.final(n) in part.finals]
        if there and len(there) < len(names):
            lacking = next(n for n in names if n not in there)
            raise part.refuse(FINAL + lacking, "the final observation of every observation or of none", "no column")
        kinds = {}
        for name in there:
            column = self._naming.final(name)
            kinds[column] = part.kind(column, self._schema[name])
            if not fits(kinds[column], self._schema[name]):
                raise part.refuse(column, str(self._schema[name]), str(kinds[column]))
        return kinds

    def _check_uneven(self, episodes: int) -> None:
        """Refuse to ignore a column that has neither one value per step nor one per episode: some of its values are missing."""
        counts: dict[str, int] = {}
        for part in self._parts:
            for column, count in part.uneven.items():
                counts[column] = counts.get(column, 0) + count
        for part in self._parts:
            for column, count in part.uneven.items():
                if counts[column] != episodes and count not in (0, 1):
                    raise part.refuse(
                        column,
                        f"{part.rows} rows, as there are steps (or name the fields by schema=..., without this one)",
                        f"{count}",
                    )

    def steps(self) -> Iterator[Steps]:
        """All steps in order; see `Source.steps`."""
        schema, naming = self._schema, self._naming
        rows = max(1, min(1 << 16, CHUNK_BYTES // schema.row_bytes))
        held: dict[str, Array] = {}
        for part, kinds, finals_, starts, over in zip(
            self._parts, self._kinds, self._finals, self._starts, self._ends, strict=True
        ):
            done = 0
            numbers = {naming.system(name) for name in NUMBERS} - {naming.column(name) for name in schema.names}
            wanted = {column: kind for column, kind in kinds.items() if column not in numbers}
            for chunk in part.read(wanted, finals_, rows):
                values = chunk.values
                count = len(next(iter(values.values())))
                terminated, truncated = (
                    as_flags(part, column, values[column], done) if column in values else np.zeros(count, bool)
                    for column in map(naming.system, FLAGS)
                )
                columns = {name: values[naming.column(name)] for name in schema.names}
                here = slice(done, done + count)
                places = chunk.places
                finals = {n: chunk.finals[naming.final(n)] for n in schema.observation_names if finals_}
                if self._next:
                    after = {name: values[naming.column(NEXT + name)] for name in self._next}
                    check_next(part, done, columns, after, over[here], held)
                    places = np.flatnonzero(over[here])
                    finals = {name: array[places] for name, array in after.items()}
                    # the episode's rows end without a flag, and an observation follows: the data end here, the task does not
                    truncated = truncated | (over[here] & ~terminated)
                yield Steps(columns, terminated, truncated, starts[here], places, finals)
                done += count
            if done != part.rows:
                raise SourceError(f"Expected {part.rows} rows, got {done} - in {part.path}")
