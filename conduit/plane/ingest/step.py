"""One step of all environments, written in place."""

from __future__ import annotations

from typing import Any

from conduit.errors import FieldError
from conduit.nesting import hint
from conduit.plane.ingest.staged import Staged, check_place
from conduit.plane.ingest.stream import Form, Stream
from conduit.plane.ingest.validate import checked_lengths, checked_values
from conduit.store.tables.appearance import never_raises


class StepView(Staged):
    """One step of all environments, in the block of `writer.step()`.

    `row.obs` is a view [num_envs, *shape] ([*shape] for one environment without an axis) into shared memory;
    `row.reward = x` checks and assigns. A flag that is not assigned is False. A field that is not assigned keeps the previous
    contents of the memory.

    A ragged field takes one value in a step: assign it, `row.tokens = array` (a list of num_envs arrays), or fill the memory from
    `row.reserve("tokens", length)`. Reading the field returns the reserved view (a list of views); before, it is empty. If it is not
    assigned, its length is 0. When a step begins, its page must have room for the longest possible ragged values; otherwise the writer
    goes on to the next page. So pages close a little earlier than with `append`, which knows the lengths.
    """

    __slots__ = ("_stored",)

    def begin(self, form: Form) -> None:
        """Begin the step. When the object `form` goes, the uncommitted step is discarded."""
        stream = self._stream
        self._start(form, "step", stream.envs, stream.envs if stream.hands_over else 0, stream.lead)
        if self._ragged:
            self._stored: set[str | int] = set()
            for name in self._ragged:
                stream.table.columns[name][self._row : self._row + stream.envs] = (0, 0)

    def leave(self, *, failed: bool) -> None:
        """Commit the step, or discard it if it failed.

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
        """Refuse a second value of a ragged field, or a second final observation of an environment: there is room for one."""
        if what in self._stored:
            raise FieldError("Expected a ragged value to be given once in a step, got it twice", at=at)

    def reserve(self, name: str, lengths: Any) -> Any:
        """Reserve memory for the values of a ragged field, to be filled in place.

        Args:
            name: The field, by its dotted name.
            lengths: The length, int; with num_envs a list of one length per environment.

        Returns:
            A writable view [length, *shape[1:]] into shared memory, with the previous contents of the memory; with num_envs a list
            of views.

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

    Only the `with` statement refers to it. So a step is over when the program leaves its block, in any way.
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
