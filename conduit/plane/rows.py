"""The in-place forms of writing: a step, a rollout slab, and the bare handle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from conduit.errors import Closed, ConfigError, FieldError
from conduit.field import Field
from conduit.jit import entry
from conduit.plane.stream import Stream
from conduit.plane.values import checked
from conduit.store import objects, writing
from conduit.store.words import W_BASE, W_BEYOND, W_LOCAL

Array = np.ndarray[Any, Any]

_FLAG = Field("flag", "bool")


def _check_plain(stream: Stream, what: str) -> None:
    """Refuse a schema with ragged fields, whose values have no place of their own before their length is known.

    Raises:
        ConfigError: It has some.
    """
    names = stream.schema.ragged_names
    if names:
        raise ConfigError(
            f"Expected a schema without ragged fields for the {what}, which hands out views of fixed shapes, got "
            f"{', '.join(names)}: use writer.append, which writes ragged values in place once their lengths are known"
        )


class _Views:
    """Field access by attribute (`rows.obs`) or by dotted name (`rows["obs.camera"]`)."""

    __slots__ = ()

    def _view(self, name: str) -> Array:
        raise NotImplementedError

    def _names(self) -> tuple[str, ...]:
        raise NotImplementedError

    def __getitem__(self, name: str) -> Array:
        if name not in self._names():
            raise FieldError(f"Expected one of {', '.join(self._names())}, got {name!r}", at=name)
        return self._view(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._names():
            return self._view(name)
        below = {n.removeprefix(f"{name}."): self._view(n) for n in self._names() if n.startswith(f"{name}.")}
        if not below:
            raise FieldError(f"Expected one of {', '.join(self._names())}, got {name!r}", at=name)
        return below


class _Staged(_Views):
    """Uncommitted rows of a writer, from `_row` on."""

    __slots__ = ("_lead", "_names_", "_row", "_rows", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._names_ = (*stream.schema.names, "terminated", "truncated")
        self._row = -1

    def _names(self) -> tuple[str, ...]:
        return self._names_

    def _start(self, what: str, rows: int, tail: int, lead: tuple[int, ...]) -> None:
        self._stream.check()
        self._row = self._stream.here(rows + tail, ticks=rows // self._stream.envs)
        self._stream.in_progress = what
        self._rows = rows
        self._lead = lead

    def _check(self) -> None:
        if self._row < 0 or self._stream.closed:
            raise Closed(
                "Expected rows that are still being written, these were committed or discarded, or their writer closed"
            )

    def _column(self, name: str) -> Array:
        table = self._stream.table
        return table.columns[name] if name in table.columns else getattr(table, name)

    def _view(self, name: str) -> Array:
        self._check()
        column = self._column(name)
        return column[self._row : self._row + self._rows].reshape((*self._lead, *column.shape[1:]))

    def _set(self, name: str, value: Any) -> None:
        """Checked assignment of a whole field."""
        view = self[name]
        if name in self._stream.schema:
            view[...] = checked(self._stream.schema[name], value, self._lead)
        elif isinstance(value, bool | np.bool_):
            view[...] = value
        else:
            view[...] = checked(_FLAG, value, self._lead, at=name)

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
        self._stream.keep_final(row, self._stream.checked_final(observation), self._row + self._rows)

    def _finish(self, ticks: int) -> int:
        """Commit; returns -1, or the row that lacks its final observation (nothing is committed then)."""
        self._check()
        place = self._stream.commit(ticks)
        if place < 0:
            self._row = -1
            self._stream.in_progress = None
        return place

    def _discard(self) -> None:
        if self._row < 0:
            return
        self._row = -1
        self._stream.in_progress = None
        self._stream.abort(self._rows)


class Step(_Staged):
    """One step of all environments; a context manager that commits on leaving and discards on an exception.

    `row.obs` is a view [num_envs, *shape] ([*shape] for one environment without an axis) into shared memory;
    `row.reward = x` assigns with checks. Flags not assigned are False; other fields not assigned keep what the memory held.
    """

    __slots__ = ()

    def __init__(self, stream: Stream) -> None:
        _check_plain(stream, "step")
        super().__init__(stream)

    def __enter__(self) -> Self:
        stream = self._stream
        lead = stream.lead
        self._start("step", stream.envs, stream.envs if stream.hands_over else 0, lead)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or self._row < 0:
            self._discard()
            return
        place = self._finish(1)
        if place >= 0:
            self._discard()
            self._stream.refuse(place)

    def set_final(self, env: int, observation: Any) -> None:
        """Keep the final observation of an environment that ends with this step."""
        if not 0 <= env < self._stream.envs:
            raise FieldError(f"Expected an environment from 0 to {self._stream.envs - 1}, got {env!r}", at="final")
        self._set_final(self._row + env, observation)


class Slab(_Staged):
    """A rollout of consecutive steps: views [ticks, num_envs, *shape] into shared memory; nothing is visible before `commit`.

    As a context manager it commits on leaving and discards on an exception.
    """

    __slots__ = ("_ticks",)

    def __init__(self, stream: Stream, ticks: int, max_finals: int | None) -> None:
        _check_plain(stream, "rollout")
        super().__init__(stream)
        if not isinstance(ticks, int) or ticks < 1:
            raise ConfigError(f"Expected at least 1 tick, got {ticks!r}")
        rows = ticks * stream.envs
        tail = 0 if not stream.hands_over else max(stream.envs, rows // 4) if max_finals is None else max_finals
        layout = stream.table.layout
        halo = layout.table.halo_ticks * stream.envs * (2 if stream.hands_over else 1)
        if rows + tail + halo > layout.page_rows:
            raise ConfigError(
                f"Expected a rollout that fits a page of {layout.page_rows} rows, got {rows} rows, {tail} for final "
                f"observations and {halo} of halo: create the table with page_rows={rows + tail + halo} or more"
            )
        self._ticks = ticks
        stream.check_grant(ticks, f"{ticks} ticks of {stream.envs}")
        self._start("rollout", rows, tail, (ticks, *stream.lead))

    @property
    def ticks(self) -> int:
        """Steps of the rollout."""
        return self._ticks

    def set_final(self, tick: int, env: int, observation: Any) -> None:
        """Keep the final observation of an environment that ends with step `tick` of this rollout."""
        envs = self._stream.envs
        if not (0 <= tick < self.ticks and 0 <= env < envs):
            raise FieldError(
                f"Expected a tick below {self.ticks} and an environment below {envs}, got {tick}, {env}", at="final"
            )
        self._set_final(self._row + tick * envs + env, observation)

    def commit(self) -> None:
        """Make all steps visible at once.

        Raises:
            FieldError: A step ends an episode and its final observation was not kept; the slab stays open (as a context
                manager it is discarded).
        """
        place = self._finish(self.ticks)
        if place >= 0:
            tick, env = divmod(place, self._stream.envs)
            raise FieldError(
                f"Expected set_final({tick}, {env}, observation) for the episode that ends there", at="final"
            )

    def abort(self) -> None:
        """Discard all steps; idempotent."""
        self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._row >= 0:
                self.commit()
        finally:
            self.abort()


class Bare(_Views):
    """A writer without checks: assign to whole-table columns at `row`, then `row = commit()`.

        with writer.bare() as bare:
            obs, reward, row, commit = bare.obs, bare.reward, bare.row, bare.commit
            for ...:
                obs[row] = ...           # obs[row:row + num_envs] = ... for several environments
                reward[row] = ...
                row = commit()

    Columns stay valid for the writer's life. With one environment, columns of single numbers are memoryviews, which store
    a number faster than numpy does. Every field must be assigned; flags are False unless assigned. The writer's other
    forms wait until the handle is closed; what was assigned but not committed is discarded then.

    Where no page is free at once, or the table's limiter is against another tick, `commit` returns a row behind the table
    (`row >= bare.rows`): storing to it fails, and `row = bare.row` waits as the writer was told to.

    Attributes:
        commit: Commits one tick; returns the physical row of the next one, or one that is `>= rows`.
        rows: Rows of the table.
    """

    __slots__ = ("_names_", "_stream", "commit", "rows")

    def __init__(self, stream: Stream) -> None:
        stream.check()
        _check_plain(stream, "bare handle")
        if not objects.is_supported():
            raise ConfigError(
                "Expected CPython with its interpreter lock for the bare handle: use writer.step() instead"
            )
        self._stream = stream
        self._names_ = (*stream.schema.names, "terminated", "truncated")
        self.rows = stream.table.layout.rows
        # a C-level call: a Python function around it would cost as much again as the commit
        self.commit: Callable[[], int] = functools.partial(entry(writing.commit_and_turn), stream.array)
        stream.in_progress = "bare handle"
        stream.words[W_BEYOND // 8] = 1

    def _names(self) -> tuple[str, ...]:
        return self._names_

    def _view(self, name: str) -> Any:
        table = self._stream.table
        column = table.columns[name] if name in table.columns else getattr(table, name)
        plain = column.ndim == 1 and column.dtype != np.float16 and self._stream.num_envs is None
        return column.data if plain else column

    @property
    def row(self) -> int:
        """Physical row of the next tick; waits for a page if it must.

        Raises:
            FieldError: The last commit was refused: an episode ends without its final observation.
            SpaceTimeout, Busy: No page could be claimed, or the limiter does not let a tick in.
            Frozen: The table is frozen.
        """
        stream = self._stream
        place = stream.take_refusal()
        if place >= 0:
            stream.refuse(place)
        return stream.here()

    def set_final(self, observation: Any, env: int = 0) -> None:
        """Keep the final observation of an environment that ends with the tick being written."""
        stream = self._stream
        stream.check_hands_over()
        if not 0 <= env < stream.envs:
            raise FieldError(f"Expected an environment from 0 to {stream.envs - 1}, got {env!r}", at="final")
        # not `self.row`: a page is not turned under values that have been assigned
        words = stream.words
        row = self.row if words[W_BEYOND // 8] else words[W_BASE // 8] + words[W_LOCAL // 8]
        stream.keep_final(row + env, stream.checked_final(observation), row + stream.envs)

    def close(self) -> None:
        """Hand the writer back to its other forms; idempotent."""
        stream = self._stream
        if stream.in_progress == "bare handle":
            stream.in_progress = None
            stream.abort(stream.envs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
