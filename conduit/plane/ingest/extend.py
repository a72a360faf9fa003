"""`Writer.extend`: many steps in one call, copied page by page as whole columns together with their final observations.

Everything is checked before anything is written. Each page is filled to its last row; the call waits only for a next page.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from conduit.errors import ConfigError, FieldError
from conduit.field import Field
from conduit.native.jit import entry
from conduit.plane.habits import explained
from conduit.plane.ingest.stream import Stream
from conduit.plane.ingest.validate import checked, checked_observation
from conduit.store.format import words as w
from conduit.store.ingest import commit, page_writer

Array = np.ndarray[Any, Any]

_FLAG = Field("flag", "bool")
_PLACE = Field("places", "int64")


class Bulk:
    """Checked columns of many ticks of one writer.

    Args:
        stream: The writer's stream.
        columns: {field: [ticks, *lead, *shape]}, all fields of the schema.
        terminated, truncated: Bool [ticks, *lead], or None for all False.
        places: int64 [k], ascending: tick * num_envs + environment of the steps that have a final observation.
        finals: Nested like the observation: arrays [k, *shape].

    Raises:
        FieldError: A key, dtype or shape does not fit, a place is not a step that ends an episode, a final observation is missing, or
            the autoreset mode does not allow an episode to end there.
        ConfigError: The schema has ragged fields.
    """

    def __init__(
        self, stream: Stream, columns: Mapping[str, Any], terminated: Any, truncated: Any, places: Any, finals: Any
    ) -> None:
        schema = stream.schema
        if schema.ragged_names:
            raise ConfigError(
                f"Expected a schema without ragged fields, got {', '.join(schema.ragged_names)}: use writer.append"
            )
        if not isinstance(columns, Mapping):
            raise FieldError(
                f"Expected columns as {{field: array [ticks, ...]}}, got {type(columns).__name__}", at="columns"
            )
        try:
            flat = schema.flatten(columns)
        except FieldError as error:
            raise explained(error, (name for name in columns if name not in schema)) from None
        first = flat[schema.names[0]]
        if not getattr(first, "shape", ()):
            raise FieldError(f"Expected columns as arrays [ticks, ...], got {first!r}", at=schema.names[0])
        self.ticks = int(first.shape[0])
        lead = (self.ticks, *stream.lead)
        rows = self.ticks * stream.envs
        self._stream = stream
        self._columns = {
            field.name: checked(field, flat[field.name], lead).reshape(rows, *field.shape) for field in schema.fields
        }
        self._flags = {
            name: np.zeros(rows, bool) if value is None else checked(_FLAG, value, lead, at=name).reshape(rows)
            for name, value in (("terminated", terminated), ("truncated", truncated))
        }
        given = np.zeros(0, np.int64) if len(places) == 0 else checked(_PLACE, places, np.shape(places)[:1])
        self._places = np.ascontiguousarray(given)
        self._finals: dict[str, Array] = {}
        ended = np.flatnonzero(self._flags["terminated"] | self._flags["truncated"])
        stream.check_ends((self._flags["terminated"] | self._flags["truncated"]).reshape(self.ticks, stream.envs))
        if len(self._places):
            stream.check_hands_over()
            if not np.isin(self._places, ended).all() or (np.diff(self._places) <= 0).any():
                raise FieldError("Expected ascending places of steps that end an episode", at="places")
            self._finals = checked_observation(stream.schema, finals, (len(self._places),))
        if stream.words[w.WRITER_STRICT // 8] and len(self._places) < len(ended):
            lacking = int(ended[~np.isin(ended, self._places)][0])
            raise FieldError(
                "Expected the final observation of every episode that ends: list it in `places` and `finals`, or open the "
                f"writer with keep_final=False - missing at place {lacking}",
                at=schema.observation_names[0],
            )

    def write(self) -> None:
        """Write and commit all steps, each page's at once.

        Raises:
            SpaceTimeout, Busy: No page could be claimed; the steps that filled earlier pages are committed.
        """
        stream, envs = self._stream, self._stream.envs
        done = 0
        while done < self.ticks:
            row = stream.here(*self._need(done, 1))
            count = (
                bisect.bisect_left(range(self.ticks - done + 1), True, lo=1, key=functools.partial(self._exceeds, done))
                - 1
            )
            try:
                stream.mark()
                self._store(row, done * envs, (done + count) * envs)
                stream.commit(count)
            except BaseException:
                stream.discard(count * envs)
                raise
            done += count

    def _between(self, start: int, stop: int) -> tuple[int, int]:
        low, high = np.searchsorted(self._places, (start, stop)).tolist()
        return low, high

    def _need(self, done: int, count: int) -> tuple[int, int]:
        """Rows that `count` ticks after the first `done` ticks need, and the number of their final observations."""
        envs = self._stream.envs
        low, high = self._between(done * envs, (done + count) * envs)
        return count * envs, high - low

    def _exceeds(self, done: int, count: int) -> bool:
        """Whether these ticks and their final observations are too many for the page."""
        return not entry(page_writer.fits)(self._stream.address, *self._need(done, count))

    def _store(self, row: int, start: int, stop: int) -> None:
        stream, table = self._stream, self._stream.table
        count = stop - start
        for name, values in self._columns.items():
            table.columns[name][row : row + count] = values[start:stop]
        table.terminated[row : row + count] = self._flags["terminated"][start:stop]
        table.truncated[row : row + count] = self._flags["truncated"][start:stop]
        low, high = self._between(start, stop)
        if low == high:
            return
        places = self._places[low:high] - start
        kept = entry(commit.stage_finals)(stream.address, row, places.ctypes.data, high - low, row + count)
        for name, values in self._finals.items():
            table.columns[name][kept : kept + high - low] = values[low:high][::-1]
