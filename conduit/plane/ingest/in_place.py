"""The in-place forms of writing: a step, a rollout, and the unchecked handle."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from conduit.errors import Closed, ConfigError, FieldError
from conduit.field import Field
from conduit.nesting import hint
from conduit.numbers import at_least, whole
from conduit.plane.ingest.stream import Form, Stream
from conduit.plane.ingest.validate import checked, checked_lengths, checked_observation, checked_values
from conduit.plane.views import Nested, Put, Views, spread
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.format.table_geometry import halo_ticks
from conduit.store.tables.appearance import never_raises, place_of

Array = np.ndarray[Any, Any]

_FLAG = Field("flag", "bool")


def check_plain(stream: Stream, what: str) -> None:
    """Refuse a schema with ragged fields, whose values have no place of their own before their lengths are known.

    Raises:
        ConfigError: It has some.
    """
    names = stream.schema.ragged_names
    if names:
        raise ConfigError(
            f"Expected a schema without ragged fields for the {what}, which hands out views of fixed shapes, got "
            f"{', '.join(names)}: use writer.append, or writer.step, which makes room for a value when its length is known"
        )


def check_place(value: object, count: int, what: str) -> int:
    """The number of a tick or an environment whose final observation is given.

    Raises:
        FieldError: It is none.
    """
    number = whole(value)
    if number is None or not 0 <= number < count:
        raise FieldError(f"Expected {what} from 0 to {count - 1}, got {value!r}", at="final")
    return number


def check_names(form: type, schema: Schema, what: str) -> None:
    """Refuse a field that attribute access could not reach, since the form has something of that name itself.

    Raises:
        ConfigError: There is one.
    """
    for name in schema.names:
        first = name.partition(".")[0]
        if hasattr(form, first):
            raise ConfigError(
                f"Expected no field with the name of an attribute of the {what}, got `{name}` beside its `{first}`: use writer.append, or "
                "rename the field"
            )


class _Staged(Views):
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
        """Begin, as `form`: with the end of that object the rows are discarded, if they are not committed."""
        stream = self._stream
        self._number = stream.begin(form, what)
        self._rows = rows
        self._lead = lead
        # a rollout of a queue may end with these ticks
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
        """Checked assignment of a whole field, or of a nested value to all below a name."""
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
        """Checked storing of a ragged field's values."""
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
        """Commit; returns -1, or the row that ends an episode and cannot (nothing is committed then)."""
        self._check()
        return self._stream.commit(ticks)

    def _discard(self) -> None:
        if self._is_open():
            self._stream.discard(self._rows)


class StepView(_Staged):
    """One step of all environments, in the block of `writer.step()`.

    `row.obs` is a view [num_envs, *shape] ([*shape] for one environment without an axis) into shared memory;
    `row.reward = x` assigns with checks. Flags not assigned are False; other fields not assigned keep what the memory held.

    A ragged field is assigned, `row.tokens = array` (a list of num_envs arrays), or filled in place after
    `row.reserve("tokens", length)`, once in a step. Reading it gives the reserved view (a list of them), which is empty before.
    If it is not assigned, its length is 0. When a step begins, the page is turned unless all ragged values of the step fit in at their
    longest. So pages close a little earlier than with `append`, which knows the lengths.
    """

    __slots__ = ("_stored",)

    def begin(self, form: Form) -> None:
        """Begin the step, as `form`."""
        stream = self._stream
        self._start(form, "step", stream.envs, stream.envs if stream.hands_over else 0, stream.lead)
        if self._ragged:
            self._stored: set[str | int] = set()
            for name in self._ragged:
                stream.table.columns[name][self._row : self._row + stream.envs] = (0, 0)

    def leave(self, *, failed: bool) -> None:
        """Commit the step, or discard it where it failed.

        Raises:
            FieldError: An episode ends without its final observation; the step is discarded.
            Closed, Frozen: The writer, client or engine has closed, or the table was frozen; the step is discarded.
        """
        try:
            if not failed:
                place = self._finish(1)
                if place >= 0:
                    self._stream.refuse(place)
        finally:
            self._discard()

    def _values(self, name: str) -> Any:
        stream = self._stream
        values = [stream.value(name, self._row + env) for env in range(stream.envs)]
        return values[0] if stream.num_envs is None else values

    def _store(self, name: str, value: Any) -> None:
        stream = self._stream
        values = checked_values(stream.schema[name], value, stream.num_envs)
        self._check_new(name, name)
        self._stored.add(name)
        for env, array in enumerate(values):
            stream.put(name, self._row + env, array)

    def _check_new(self, what: str | int, at: str) -> None:
        """Refuse a second value of a ragged field, or final observation of an environment: room was made for one."""
        if what in self._stored:
            raise FieldError("Expected a ragged value to be given once in a step, got it twice", at=at)

    def reserve(self, name: str, lengths: Any) -> Any:
        """Room for the values of a ragged field, to be filled in place.

        Args:
            name: The field, by its dotted name.
            lengths: Its length, int; with num_envs a list of one per environment.

        Returns:
            A writable view [length, *shape[1:]] into shared memory, which holds whatever the memory held; with num_envs a list of
            them.

        Raises:
            FieldError: The field is not ragged, a length is not a valid number or is too large, or the value was given before.
            Closed: The step is over.
        """
        stream = self._stream
        self._check()
        if name not in self._ragged:
            raise FieldError(
                f"Expected a ragged field (the others' views are assigned to), got {name!r}{hint(name, self._ragged)}",
                at=name,
            )
        counts = checked_lengths(stream.schema[name], lengths, stream.num_envs)
        self._check_new(name, name)
        self._stored.add(name)
        views = [stream.reserve_value(name, self._row + env, count) for env, count in enumerate(counts)]
        return views[0] if stream.num_envs is None else views

    def set_final(self, env: int, observation: Any) -> None:
        """Keep the final observation of an environment that ends with this step."""
        env = check_place(env, self._stream.envs, "an environment")
        self._check()
        if self._ragged:
            self._check_new(env, "final")
        self._set_final(self._row + env, observation)
        if self._ragged:
            self._stored.add(env)


class StepBlock:
    """The block of a step: commits it on leaving, and discards it on an exception.

    Only the `with` statement holds it, so a step is over when its block is left, in any way.
    """

    __slots__ = ("__weakref__", "_step")

    def __init__(self, stream: Stream) -> None:
        self._step = StepView(stream)

    @property
    def number(self) -> int:
        """Number of the step in its stream."""
        return self._step.number

    @never_raises
    def __repr__(self) -> str:
        return f"StepBlock({self._step!r})"

    def __enter__(self) -> StepView:
        try:
            self._step.begin(self)
        except BaseException:
            self._step.leave(failed=True)
            raise
        return self._step

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._step.leave(failed=kind is not None)


class RolloutView(_Staged):
    """A rollout of consecutive steps: views [ticks, num_envs, *shape] into shared memory; nothing is visible before `commit`.

    As a context manager it commits on leaving and discards on an exception.
    """

    __slots__ = ("_ends", "_ticks")

    def __init__(self, stream: Stream, ticks: int, max_finals: int | None) -> None:
        check_plain(stream, "rollout")
        super().__init__(stream)
        self._ends: list[str] = []
        ticks = at_least("ticks", ticks, 1)
        max_finals = None if max_finals is None else at_least("max_finals", max_finals, 0)
        if stream.rollout and ticks > stream.rollout:
            raise ConfigError(f"Expected at most the {stream.rollout} ticks of the queue's rollouts, got {ticks}")
        rows = ticks * stream.envs
        tail = 0 if not stream.hands_over else max(stream.envs, rows // 4) if max_finals is None else max_finals
        layout = stream.table.layout
        halo = halo_ticks(layout.table) * stream.envs * (2 if stream.hands_over else 1)
        behind = stream.envs if stream.rollout else 0
        if rows + tail + halo + behind > layout.page_rows:
            raise ConfigError(
                f"Expected a rollout that fits a page of {layout.page_rows} rows, got {rows} rows, {tail} for final "
                f"observations and {halo} of halo{f', {behind} for a bootstrap' if behind else ''}: create the table with "
                f"page_rows={rows + tail + halo + behind} or more"
            )
        self._ticks = ticks
        stream.check_grant(ticks, f"{ticks} ticks of {stream.envs}")
        try:
            self._start(self, "rollout", rows, tail, (ticks, *stream.lead))
        except BaseException:
            self._discard()
            raise

    @property
    def ticks(self) -> int:
        """Steps of the rollout."""
        return self._ticks

    def set_final(self, tick: int, env: int, observation: Any) -> None:
        """Keep the final observation of an environment that ends with step `tick` of this rollout."""
        envs = self._stream.envs
        tick, env = check_place(tick, self.ticks, "a tick"), check_place(env, envs, "an environment")
        self._set_final(self._row + tick * envs + env, observation)

    def commit(self) -> None:
        """Make all steps visible at once.

        Raises:
            FieldError: A step ends an episode and its final observation was not kept, or the autoreset mode does not allow the
                end; the view stays open (as a context manager it is discarded).
        """
        ends = self._stream.words[w.WRITER_ENDS // 8]
        place = self._finish(self.ticks)
        if place >= 0:
            if not self._stream.hands_over:
                raise self._stream.ended_twice(place)
            tick, env = divmod(place, self._stream.envs)
            raise FieldError(
                f"Expected set_final({tick}, {env}, observation) for the episode that ends there", at="final"
            )
        self._ends.append("committed")
        if ends:
            self._stream.end_rollout()

    def bootstrap(self, observation: Any) -> None:
        """Keep the observations [num_envs, ...] behind the last step: the queue's rollout ends with this view's commit.

        After an environment's end with autoreset "same_step" it is the first of the new episode; the final one goes by
        `set_final`.

        Raises:
            FieldError: The table is no queue of rollouts, a key or value does not fit, or they are kept already.
        """
        self._check()
        if self._stream.words[w.WRITER_ENDS // 8]:
            raise FieldError("Expected the observations behind a rollout once", at="bootstrap")
        self._stream.keep_bootstrap(self.ticks, self._stream.checked_bootstrap(observation))

    def abort(self) -> None:
        """Discard all steps; idempotent."""
        self._ends.append("aborted")
        self._discard()

    def __enter__(self) -> Self:
        # another object: with the end of the block nothing holds this one, unless the caller has named it before
        view = object.__new__(type(self))
        for name in ("_stream", "_names_", "_ragged", "_number", "_row", "_rows", "_lead", "_ticks", "_ends"):
            object.__setattr__(view, name, getattr(self, name))
        return view

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._ends:
                self.commit()
        finally:
            self.abort()
