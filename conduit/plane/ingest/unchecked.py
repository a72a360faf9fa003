"""The unchecked handle: a writer without checks, for loops in which the cost of each call matters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from conduit.errors import Closed, ConfigError
from conduit.native import cpython_abi
from conduit.native.jit import entry
from conduit.plane.ingest.staged import check_names, check_place, check_plain
from conduit.plane.ingest.stream import Stream
from conduit.plane.ingest.validate import checked_observation
from conduit.plane.views import Views
from conduit.store.format import words as w
from conduit.store.ingest import commit
from conduit.store.tables.appearance import never_raises, place_of


class UncheckedView(Views):
    """A writer without checks: assign to whole-table columns at `row`, then `row = commit()`.

        with writer.unchecked() as handle:
            obs, reward, row, commit = handle.obs, handle.reward, handle.row, handle.commit
            for ...:
                obs[row] = ...           # obs[row:row + num_envs] = ... for several environments
                reward[row] = ...
                row = commit()

    Columns stay valid for the writer's life. With one environment, columns of single numbers are memoryviews, which store
    a number faster than numpy does. Every field must be assigned; flags are False unless assigned. No other form of writing may begin
    until the handle is closed. Closing discards values that were assigned but not committed.

    If no page is free at once, or the table's limiter does not admit another tick, `commit` returns a row past the table's end
    (`row >= handle.rows`): storing to it fails. `row = handle.row` then waits as the writer's `on_full` and `timeout` say.

    Attributes:
        commit: Commits one tick; returns the physical row of the next one, or one that is `>= rows`.
        rows: Rows of the table.
    """

    __slots__ = ("__weakref__", "_names_", "_number", "_stream", "commit", "rows")

    def __init__(self, stream: Stream) -> None:
        check_plain(stream, "unchecked handle")
        check_names(UncheckedView, stream.schema, "unchecked handle")
        if not cpython_abi.is_supported():
            raise ConfigError(
                "Expected CPython with its interpreter lock for the unchecked handle: use writer.step() instead"
            )
        self._stream = stream
        self._names_ = (*stream.schema.names, "terminated", "truncated")
        self.rows = stream.table.layout.rows
        # called at C level: a Python function around it would double the cost of a commit
        self.commit: Callable[[], int] = functools.partial(entry(commit.commit_and_turn), stream.array)
        self._number = stream.begin(self, "unchecked handle")
        stream.words[w.WRITER_BEYOND // 8] = 1
        stream.words[w.WRITER_BUSY // 8] = self._number

    @property
    def number(self) -> int:
        """Number of this form in its stream."""
        return self._number

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
            FieldError: The last commit was refused: an episode ends without its final observation, or where the autoreset mode does
                not allow it.
            SpaceTimeout, Busy: No page could be claimed, or the limiter does not admit a tick.
            Frozen: The table is frozen.
        """
        stream = self._stream
        if stream.words[w.WRITER_BUSY // 8] != self._number:
            stream.table.check_open()
            raise Closed("Expected an open unchecked handle of an open writer, got one that was closed")
        place = stream.take_refusal()
        if place >= 0:
            stream.refuse(place)
        return stream.here()

    def set_final(self, observation: Any, env: int = 0) -> None:
        """Keep the final observation of an environment that ends with the tick being written."""
        stream = self._stream
        stream.check_hands_over()
        env = check_place(env, stream.envs, "an environment")
        # not `self.row`, which may turn the page: the values that have been assigned lie in the present one
        words = stream.words
        row = self.row if words[w.WRITER_BEYOND // 8] else words[w.WRITER_BASE // 8] + words[w.WRITER_LOCAL // 8]
        stream.keep_final(row + env, checked_observation(stream.schema, observation), row + stream.envs)

    @never_raises
    def __repr__(self) -> str:
        state = "open" if self._stream.words[w.WRITER_BUSY // 8] == self._number else "closed"
        return f"UncheckedView({place_of(self._stream.table)}, {state}: {', '.join(self._names_)})"

    def close(self) -> None:
        """End the handle, so that the writer's other forms of writing may begin; idempotent."""
        stream = self._stream
        if stream.words[w.WRITER_BUSY // 8] == self._number:
            stream.discard(stream.envs)

    def __enter__(self) -> Self:
        # returns a copy, for the reason in RolloutView.__enter__
        unchecked = object.__new__(type(self))
        for name in ("_stream", "_names_", "_number", "commit", "rows"):
            setattr(unchecked, name, getattr(self, name))
        return unchecked

    def __exit__(self, *_: object) -> None:
        self.close()
