"""Views of rows that are written in place, before they are committed, and the checks that all such views share."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.errors import Closed, ConfigError, FieldError
from conduit.field import Field
from conduit.numbers import whole
from conduit.plane.ingest.stream import Form, Stream
from conduit.plane.ingest.validate import checked, checked_observation
from conduit.plane.views import Nested, Put, Views, spread
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.tables.appearance import never_raises, place_of

Array = np.ndarray[Any, Any]

_FLAG = Field("flag", "bool")


def check_plain(stream: Stream, what: str) -> None:
    """Refuse a schema with ragged fields: a ragged value has no place in the page before its length is known.

    Raises:
        ConfigError: The schema has ragged fields.
    """
    names = stream.schema.ragged_names
    if names:
        raise ConfigError(
            f"Expected a schema without ragged fields for the {what}, which hands out views of fixed shapes, got "
            f"{', '.join(names)}: use writer.append, or writer.step, which makes room for a value when its length is known"
        )


def check_place(value: object, count: int, what: str) -> int:
    """The number of the tick or environment that a final observation is given for.

    Raises:
        FieldError: The value is not such a number.
    """
    number = whole(value)
    if number is None or not 0 <= number < count:
        raise FieldError(f"Expected {what} from 0 to {count - 1}, got {value!r}", at="final")
    return number


def check_names(form: type, schema: Schema, what: str) -> None:
    """Refuse a field that has the name of one of the view's own attributes: attribute access could not reach it.

    Raises:
        ConfigError: There is such a field.
    """
    for name in schema.names:
        first = name.partition(".")[0]
        if hasattr(form, first):
            raise ConfigError(
                f"Expected no field with the name of an attribute of the {what}, got `{name}` beside its `{first}`: use writer.append, or "
                "rename the field"
            )


class Staged(Views):
    """Uncommitted rows of a writer, from `_row` on."""

    __slots__ = ("__weakref__", "_lead", "_names_", "_number", "_ragged", "_row", "_rows", "_stream")

    def __init__(self, stream: Stream) -> None:
        check_names(type(self), stream.schema, type(self).__name__.removesuffix("View").lower())
        self._stream = stream
        self._names_ = (*stream.schema.names, "terminated", "truncated")
        self._ragged = stream.schema.ragged_names
        self._number = -1
        self._rows = 0

    @property
    def number(self) -> int:
        """Number of this form in its stream; -1 before it begins."""
        return self._number

    def _names(self) -> tuple[str, ...]:
        return self._names_

    def _start(self, form: Form, what: str, rows: int, tail: int, lead: tuple[int, ...]) -> None:
        """Begin to write. When the object `form` goes, uncommitted rows are discarded."""
        stream = self._stream
        self._number = stream.begin(form, what)
        self._rows = rows
        self._lead = lead
        # a queue's rollout may end with these ticks
        tail += stream.envs if stream.rollout else 0
        self._row = stream.here(rows, tail, stream.largest_tick)
        stream.words[w.WRITER_BUSY // 8] = self._number

    def _is_open(self) -> bool:
        return self._stream.words[w.WRITER_BUSY // 8] == self._number

    def _check(self) -> None:
        if self._stream.words[w.WRITER_BUSY // 8] != self._number:
            self._stream.table.check_open()
            raise Closed(
                "Expected rows that are still being written, these were committed or discarded, or their writer closed"
            )

    def _column(self, name: str) -> Array:
        table = self._stream.table
        return table.columns[name] if name in table.columns else getattr(table, name)

    def _view(self, name: str) -> Any:
        self._check()
        if name in self._ragged:
            return self._values(name)
        column = self._column(name)
        return column[self._row : self._row + self._rows].reshape((*self._lead, *column.shape[1:]))

    def _putter(self) -> Put | None:
        return self._set

    def _set(self, name: str, value: Any) -> None:
        """Check and assign a whole field, or a nested value for all fields below a parent."""
        view = self[name]
        if isinstance(view, Nested):
            for below, part in spread(name, self._names_, value).items():
                self._set(below, part)
        elif name in self._ragged:
            self._store(name, value)
        elif name in self._stream.schema:
            view[...] = checked(self._stream.schema[name], value, self._lead)
        elif isinstance(value, bool | np.bool_):
            view[...] = value
        else:
            view[...] = checked(_FLAG, value, self._lead, at=name)

    def _values(self, name: str) -> Any:
        """Views of a ragged field's values."""
        raise NotImplementedError

    def _store(self, name: str, value: Any) -> None:
        """Check and store a ragged field's values."""
        raise NotImplementedError

    @never_raises
    def __repr__(self) -> str:
        state = "open" if self._is_open() else "over" if self._number >= 0 else "not begun"
        return f"{type(self).__name__}({place_of(self._stream.table)}, {state}: {', '.join(self._names_)})"

    def __setitem__(self, name: str, value: Any) -> None:
        self._set(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self._set(name, value)

    def _set_final(self, row: int, observation: Any) -> None:
        self._check()
        self._stream.check_hands_over()
        self._stream.keep_final(row, checked_observation(self._stream.schema, observation), self._row + self._rows)

    def _finish(self, ticks: int) -> int:
        """Commit; returns -1, or a row whose episode must not end there. Nothing is committed then."""
        self._check()
        return self._stream.commit(ticks)

    def _discard(self) -> None:
        if self._is_open():
            self._stream.discard(self._rows)
