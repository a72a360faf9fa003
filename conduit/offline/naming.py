"""Which column of a source holds which field, flag or number: by its own name, by the caller's mapping, or by the source's format."""

from __future__ import annotations

from collections.abc import Mapping

from conduit.errors import ConfigError, SourceError
from conduit.nesting import check_known, hint
from conduit.offline.columns import FINAL, FLAGS, NEXT, NUMBERS, Part
from conduit.schema import Schema

_MEANT = {
    **dict.fromkeys(
        ("terminate", "termination", "terminations", "terminal", "terminals", "done", "dones"), "terminated"
    ),
    **dict.fromkeys(("truncate", "truncation", "truncations", "timeout", "timeouts"), "truncated"),
}
"""Other libraries' names of flags. A caller who maps such a name means the flag, not a field."""


class Naming:
    """The names of columns.

    Args:
        first: The first file; all files have the same names.
        given: The caller's {field, flag or number: column}.
        schema: The requested schema, or None to take the columns as they are.

    Raises:
        ConfigError: A name is neither a field nor a flag nor a number.
        SourceError: There is no such column.
    """

    def __init__(self, first: Part, given: Mapping[str, str], schema: Schema | None) -> None:
        if not isinstance(given, Mapping):
            raise ConfigError(f"Expected {{field: column}} as columns, got {given!r}")
        self._own = first.document is not None
        there = (*first.names, *first.finals, *first.skipped)
        self.stored: dict[str, str] = {}
        for name, column in given.items():
            wanted = f"_{name}" if f"_{name}" in NUMBERS and not self._is_field(name, schema) else name
            if schema is None and wanted in _MEANT:
                raise ConfigError(
                    f"Expected a field, a flag or a number, got {name!r}: did you mean `{_MEANT[wanted]}`? - at columns"
                )
            if column not in there:
                raise SourceError(
                    f"Expected a column of {first.path}, got {column!r}{hint(column, sorted(there))} - at columns[{name!r}]"
                )
            self.stored[wanted] = column
        aliases = {wanted: column for wanted, column in first.aliases.items() if column in there}
        self.stored = {w: c for w, c in aliases.items() if w not in there} | self.stored
        self._given = tuple(given)

    def _is_field(self, name: object, schema: Schema | None) -> bool:
        return schema is not None and name in schema

    def check(self, schema: Schema) -> None:
        """Refuse names in the caller's mapping that have no meaning.

        Raises:
            ConfigError: There is such a name; the message has the nearest known one.
        """
        observations = [prefix + name for name in schema.observation_names for prefix in (NEXT, FINAL)]
        known = (*schema.names, *FLAGS, *NUMBERS, *(n.removeprefix("_") for n in NUMBERS), *observations)
        check_known(self._given, known, "fields of the schema, flags, numbers or next observations", "columns")

    def column(self, wanted: str) -> str:
        """The column that holds a field or a next observation."""
        return self.stored.get(wanted, wanted)

    def system(self, wanted: str) -> str:
        """The column that holds a flag or number. In files that Conduit did not write, names of numbers have no underscore."""
        return self.stored.get(wanted, wanted if self._own else wanted.removeprefix("_"))

    def final(self, observation: str) -> str:
        """The column that holds the final values of an observation."""
        return self.stored.get(FINAL + observation, FINAL + observation)

    def fields(self) -> dict[str, str]:
        """{column: its field} of the mapped columns."""
        system = {*FLAGS, *NUMBERS}
        return {c: w for w, c in self.stored.items() if w not in system and not w.startswith((NEXT, FINAL))}
