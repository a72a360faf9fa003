"""The exact path behind `append`: it converts values that the compiled call did not recognize, turns pages, and raises precise errors.

It checks everything before it turns the page (moves on to the stream's next page). If the tick is not committed, its stored values
are discarded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from conduit.errors import FieldError
from conduit.kernels.cpu.priorities import Leaves, as_priorities, clipping, count_clipped
from conduit.native.jit import entry
from conduit.plane.ingest.stream import Stream
from conduit.plane.ingest.validate import checked, checked_observation, checked_values, flags
from conduit.store.format import words as w
from conduit.store.ingest import append_objects

Array = np.ndarray[Any, Any]


class ExactAppend:
    """`append` of one writer, for calls that the compiled path leaves to Python.

    Args:
        stream: The writer's stream.
        store_row: Stores a tick's values if it recognizes them (append_objects.store_row).
        lists_finals: Whether a tuple of final observations has one for each environment. True if the observation is one array;
            otherwise a tuple may be the observation's own structure.
    """

    def __init__(self, stream: Stream, store_row: Callable[..., int], *, lists_finals: bool) -> None:
        self._stream = stream
        self._schema = stream.schema
        self._store_row = store_row
        self._lists_finals = lists_finals
        self._clipped = False

    def append(self, values: tuple[Any, ...], priority: Any, bootstrap: Any = None) -> None:
        """Write and commit one tick, or raise the error that explains why not; everything is checked before the page is turned."""
        stream = self._stream
        table, envs, final = stream.table, stream.envs, values[-1]
        stream.check()
        leaves = None if priority is None else self._checked_priority(priority)
        behind = None if bootstrap is None else stream.checked_bootstrap(bootstrap)
        if self._schema.ragged_names:
            self._append_ragged(values, leaves, behind)
            return
        try:
            row = self._store_row(stream.array, values)
            if row == append_objects.NEED_PAGE:
                self._checked_finals(self._ended(values), final)
                stream.here()
                row = self._store_row(stream.array, values)
            arrays: list[Array] = []
            if row >= 0:
                stream.admit(envs)
                ends = [table.terminated[row : row + envs], table.truncated[row : row + envs]]
            else:
                arrays, ends = self._checked(values)
            finals = self._checked_finals(np.flatnonzero(ends[0] | ends[1]).tolist(), final)
            if row < 0:
                row = stream.here()
                stream.mark()
                for field, array in zip(self._schema.fields, arrays, strict=True):
                    table.columns[field.name][row : row + envs] = array
                table.terminated[row : row + envs], table.truncated[row : row + envs] = ends
            self._commit(row, finals, leaves, behind)
        except BaseException:
            stream.discard(envs)
            raise

    def _commit(
        self,
        row: int,
        finals: Mapping[int, Mapping[str, Any]],
        leaves: Array | None,
        behind: Mapping[str, Any] | None,
    ) -> None:
        """Commit the stored tick at `row` with its final observations, priorities and bootstrap."""
        stream = self._stream
        for env, observation in finals.items():
            stream.keep_final(row + env, observation, row + stream.envs)
        if leaves is not None:
            stream.prioritize(row, leaves)
        if behind is not None:
            stream.keep_bootstrap(1, behind)
        place = stream.commit(1)
        if place >= 0:
            stream.refuse(place)
        if behind is not None:
            stream.end_rollout()

    def _checked_priority(self, priority: Any) -> Array:
        """A tick's priorities as leaves of the sum tree, uint32 [envs].

        Raises:
            FieldError: The table has no priorities, or one is NaN, infinite or negative.
        """
        rule = self._stream.table.layout.table.priorities
        if rule is None:
            raise FieldError(
                "Expected no priority, since the table has no priorities: create it with priorities=conduit.Priorities(...)",
                at="priority",
            )
        table, envs = self._stream.table, self._stream.envs
        leaves = Leaves(rule, envs, table.layout.rows)
        values = [priority] if self._stream.num_envs is None and np.ndim(priority) == 0 else priority
        leaves.fill(values, envs)
        if leaves.clipped.any():
            entry(count_clipped)(table.segment.base + table.layout.control, leaves.clipped.ctypes.data)
            if not self._clipped:
                self._clipped = True
                raised, lowered = leaves.clipped.tolist()
                text = clipping(
                    rule, table.layout.rows, as_priorities(values, envs), (raised, lowered), table.layout.name
                )
                warnings.warn(text, RuntimeWarning, stacklevel=4)
        return leaves.array

    def _append_ragged(self, values: tuple[Any, ...], leaves: Array | None, behind: Mapping[str, Any] | None) -> None:
        """`append` for a schema with ragged fields; the room it needs in the page depends on the lengths of values and final observations."""
        stream = self._stream
        table, envs = stream.table, stream.envs
        fields = self._schema.fields
        given: dict[str, Any] = {
            field.name: checked_values(field, value, self._stream.num_envs)
            if field.ragged
            else checked(field, value, stream.lead)
            for field, value in zip(fields, values, strict=False)
        }
        terminated, truncated = self._flags(values)
        finals = self._checked_finals(np.flatnonzero(terminated | truncated).tolist(), values[-1])
        items = [
            sum(map(len, given[name]))
            + sum(len(one[name]) for one in finals.values() if name in one)
            + sum(map(len, (behind or {}).get(name, ())))
            for name in self._schema.ragged_names
        ]
        try:
            row = stream.here(items=np.array(items, np.int64))
            stream.mark()
            for name, value in given.items():
                if name in table.arenas:
                    for env, array in enumerate(value):
                        stream.put(name, row + env, array)
                else:
                    table.columns[name][row : row + envs] = value
            table.terminated[row : row + envs], table.truncated[row : row + envs] = terminated, truncated
            self._commit(row, finals, leaves, behind)
        except BaseException:
            stream.discard(envs)
            raise

    def _checked(self, values: tuple[Any, ...]) -> tuple[list[Array], list[Array]]:
        """A tick's values as arrays [*lead, *shape], and its flags as bool [envs]."""
        stream = self._stream
        arrays = [checked(field, value, stream.lead) for field, value in zip(self._schema.fields, values, strict=False)]
        return arrays, self._flags(values)

    def _flags(self, values: tuple[Any, ...]) -> list[Array]:
        """A tick's flags, terminated and truncated, as bool [envs]."""
        return [
            flags(value, self._stream.num_envs, name)
            for name, value in zip(("terminated", "truncated"), values[-3:-1], strict=True)
        ]

    def _ended(self, values: tuple[Any, ...]) -> list[int]:
        """Environments whose flags say that their episode ends."""
        if values[-3] is False and values[-2] is False:
            return []
        ends = self._flags(values)
        return np.flatnonzero(ends[0] | ends[1]).tolist()

    def _checked_finals(self, ended: list[int], final: Any) -> dict[int, Mapping[str, Any]]:
        """The final observations of the environments that ended, by environment."""
        stream = self._stream
        if ended and not stream.hands_over:
            stream.check_ends(np.isin(np.arange(stream.envs), ended)[None])
        finals: dict[int, Mapping[str, Any]] = {}
        if final is not None:
            stream.check_hands_over()
            if self._stream.num_envs is None:
                finals = {env: checked_observation(self._schema, final) for env in ended}
            elif self._is_one_each(final):
                if len(final) != stream.envs:
                    raise FieldError(
                        f"Expected {stream.envs} entries, one per environment, got {len(final)}", at="final"
                    )
                finals = {env: checked_observation(self._schema, final[env]) for env in ended if final[env] is not None}
            else:
                whole = checked_observation(self._schema, final, stream.lead)
                finals = {env: {name: array[env] for name, array in whole.items()} for env in ended}
        if stream.words[w.WRITER_STRICT // 8]:
            for env in ended:
                if env not in finals:
                    stream.refuse(env)
        return finals

    def _is_one_each(self, final: Any) -> bool:
        """Whether `final` has one observation for each environment; a tuple may also be the observation's own structure."""
        if isinstance(final, tuple):
            return self._lists_finals
        return isinstance(final, list) or (isinstance(final, np.ndarray) and final.dtype == object)
