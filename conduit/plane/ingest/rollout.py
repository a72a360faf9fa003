"""A rollout of consecutive steps, written in place and made visible at once."""

from __future__ import annotations

from typing import Any, Self

from conduit.errors import ConfigError, FieldError
from conduit.numbers import at_least
from conduit.plane.ingest.staged import Staged, check_place, check_plain
from conduit.plane.ingest.stream import Stream
from conduit.store.format import words as w
from conduit.store.format.table_spec import halo_ticks


class RolloutView(Staged):
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
            FieldError: A step ends an episode without a final observation (`set_final`), or where the autoreset mode does not allow it.
                The view stays open; at the end of a `with` block its steps are discarded.
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
        """Keep the observations [num_envs, ...] after the last step. The queue's rollout then ends with this view's commit.

        If an episode ends with the last step under autoreset "same_step", the observation after it is the first one of the next
        episode; pass the final observation to `set_final`.

        Raises:
            FieldError: The table is not a queue of rollouts, a key or value does not fit, or the observations were given before.
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
        # returns a copy, so that only the `with` statement refers to this object, whose end discards uncommitted rows
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
