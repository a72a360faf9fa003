"""A stream: one writer's ordered chain of pages, shared by its forms of writing (append, step, rollout, unchecked handle).

One form is in progress at a time. Every form commits through the stream. The stream also keeps the observations that are not rows of
their own: final observations, and the observations after a rollout.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from conduit.clock import Deadline
from conduit.errors import Closed, ConfigError, FieldError
from conduit.native.finish import when_gone
from conduit.native.jit import entry
from conduit.numbers import whole
from conduit.plane.ingest.autoreset import autoreset_of
from conduit.plane.ingest.validate import checked_observation
from conduit.plane.ingest.writer_pages import OnFull, WriterPages
from conduit.store.format import words as w
from conduit.store.ingest import commit, page_writer
from conduit.store.segment import writer_counts
from conduit.store.segment.participants import Participants
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

_NO_EPOCH = -2
"""A value that no table's TABLE_EPOCH has."""


class Form(Protocol):
    """A form of writing that can be in progress: a step, a rollout, the unchecked handle."""

    @property
    @abstractmethod
    def number(self) -> int:
        """The form's number in the stream."""


class Stream(WriterPages):
    """One writer's pages, and the forms of writing that fill them.

    Attributes:
        num_envs: Environments, or None for a single one without a leading axis.
        lead: Leading axes of a tick's values.
        autoreset: How environments reset.
    """

    def __init__(
        self,
        table: TableView,
        *,
        num_envs: int | None,
        autoreset: object,
        timeout: float | None,
        on_full: OnFull,
        keep_final: bool,
    ) -> None:
        envs = 1 if num_envs is None else whole(num_envs)
        if envs is None or envs < 1:
            raise ConfigError(
                f"Expected num_envs of at least 1, or None for one environment without an axis, got {num_envs!r}"
            )
        if on_full not in ("wait", "raise"):
            raise ConfigError(f"Expected on_full 'wait' or 'raise', got {on_full!r}")
        Deadline(timeout)
        table.check_open()
        self.num_envs = None if num_envs is None else envs
        self.autoreset = autoreset_of(autoreset, num_envs)
        self.lead = () if num_envs is None else (envs,)
        super().__init__(
            table,
            envs,
            hands_over=self.autoreset != "next_step",
            timeout=timeout,
            on_full=on_full,
            keep_final=keep_final,
            what=f"num_envs={num_envs}",
        )
        self._forms = 1
        self._form: weakref.ref[Form] | None = None
        self._form_name = ""
        seat = table.seat()
        seat.add(self)
        # the stream, not the writer, ends the page: an unchecked handle, step or rollout may outlive its writer and still write into it
        self._locked = seat.seat
        when_gone(self, entry(page_writer.end), self.array, seat.seat)
        self._note(seat, opened=True)

    def check(self) -> None:
        """Check that a form of writing may begin now.

        Raises:
            Closed: The writer, client or engine has closed, or another form of writing is in progress.
            Forked: This process inherited the writer through a fork.
        """
        self._check_open()
        busy = self.words[w.WRITER_BUSY // 8]
        if busy:
            form = None if self._form is None else self._form()
            if form is not None and form.number == busy:
                raise Closed(
                    f"Expected the {self._form_name} in progress to be finished first: leave its block, commit or abort it"
                )
            # left by a form that was dropped, or by a call that was interrupted
            self.discard(commit.ALL_ROWS)

    def begin(self, form: Form, name: str) -> int:
        """A number for a new form of writing. While WRITER_BUSY has this number and the form is alive, no other form may begin.

        Raises:
            Closed: As `check`.
        """
        self.check()
        self._forms += 1
        self._form, self._form_name = weakref.ref(form), name
        if self._seat:
            # the limiter may have granted the form rows that other writers wait for
            when_gone(form, entry(commit.drop), self.array, np.full(1, self._forms, np.int64))
        return self._forms

    def mark(self) -> None:
        """Note that a call is staging rows. If the call does not reach its end, the next call discards them."""
        self.words[w.WRITER_BUSY // 8] = 1

    def commit(self, ticks: int) -> int:
        """Commit `ticks` ticks; returns -1, or the place of a row (counted from the first) whose episode must not end there.

        Such a row lacks its final observation, or, with "next_step", it must be the final observation of the episode before.
        Nothing is committed then.

        Raises:
            Closed, Forked: The writer, client or engine has closed since the rows were begun.
            Frozen: The table was frozen since.
        """
        self._check_open()
        self.table.check_thawed()
        result = entry(commit.commit)(self.address, ticks)
        return -2 - result if result < -1 else -1

    def prioritize(self, row: int, leaves: Array) -> None:
        """Give the tick at `row`, which will be committed next, its own priorities: leaves of the sum tree, uint32 [envs]."""
        priorities = self.table.priorities
        if priorities is not None:
            priorities[row : row + self.envs] = leaves
            self.words[w.WRITER_PRIORITIES_GIVEN // 8] = 1

    def abort(self, rows: int) -> None:
        """Discard the flags, priorities and final observations that are staged for the next `rows` rows."""
        entry(commit.abort)(self.address, rows)

    def discard(self, rows: int) -> None:
        """`abort`, and mark that no form of writing is in progress."""
        entry(commit.discard)(self.address, rows)

    def refuse(self, place: int) -> None:
        """Raise the error for a row whose episode must not end there; `place` is from `commit`, which committed nothing.

        Raises:
            FieldError: Always.
        """
        self.abort(self.envs)
        if not self.hands_over:
            raise self.ended_twice(place)
        raise FieldError(
            "Expected the final observation of an episode that ends here: pass final=<observation after the last step> "
            f"(autoreset={self.autoreset!r}), or open the writer with keep_final=False - at environment {place % self.envs}",
            at=self.schema.observation_names[0],
        )

    def ended_twice(self, place: int) -> FieldError:
        """The error for row `place`, counted tick by tick, which ends an episode but must be the final observation of the one before."""
        tick, env = divmod(place, self.envs)
        where = f"environment {env}" if tick == 0 else f"environment {env}, tick {tick} of these"
        return FieldError(
            "Expected no end of an episode in the step behind an end, which with autoreset='next_step' only brings the final "
            f"observation; got two ends in a row - at {where}: these environments begin the next episode at once, so open the "
            "writer with autoreset='same_step' and hand the final observation over as `final` (or 'disabled', where you reset "
            "them yourself)",
            at="terminated",
        )

    def check_ends(self, ends: Array) -> None:
        """With "next_step", refuse an end in a row that must be the final observation of the episode before; nothing is stored yet.

        Args:
            ends: Bool [ticks, envs], True where a step to be written ends an episode.

        Raises:
            FieldError: There is such an end.
        """
        if self.hands_over or not ends.any():
            return
        open_ = np.zeros_like(ends)
        open_[1:] = ends[:-1]
        # after a reset of the table, every environment begins a new episode
        open_[0] = (self._env_states[:, 0] == w.AWAITING_FINAL) & (entry(page_writer.is_stale)(self.address) == 0)
        twice = np.flatnonzero(ends & open_)
        if len(twice):
            raise self.ended_twice(int(twice[0]))

    def take_refusal(self) -> int:
        """Place of the row for which the unchecked handle's last commit was refused, or -1. The call clears it."""
        place = self.words[w.WRITER_REFUSED // 8] - 1
        self.words[w.WRITER_REFUSED // 8] = 0
        return place

    def keep_bootstrap(self, ticks: int, arrays: Mapping[str, Any]) -> None:
        """Keep the observations after the next `ticks` ticks, which end their rollout. Call `end_rollout` once the ticks are committed.

        Args:
            ticks: Uncommitted ticks.
            arrays: From `checked_bootstrap`: [envs, *shape] each, a list for a ragged observation.

        Raises:
            FieldError: The page has no room left.
        """
        row = entry(commit.stage_bootstrap)(self.address, ticks)
        if row < 0:
            raise FieldError(
                "Expected room for the observations behind this rollout: fewer final observations must be kept in it, or "
                "the table needs more page_rows",
                at="bootstrap",
            )
        for name, array in arrays.items():
            for env in range(self.envs):
                self.put(name, row + env, array[env])

    def cut(self) -> None:
        """Make every environment begin a new episode with the next tick."""
        self._env_states[:, 0] = w.STARTING

    def check_hands_over(self) -> None:
        """Refuse a final observation if the autoreset mode makes the next row the final observation.

        Raises:
            FieldError: autoreset is "next_step".
        """
        if not self.hands_over:
            raise FieldError(
                "Expected no final observation with autoreset='next_step': the row after the end is the final observation",
                at="final",
            )

    def checked_bootstrap(self, observation: Any) -> dict[str, Any]:
        """A nested observation after a rollout as {observation name: array or list [envs, *shape]}.

        Raises:
            FieldError: The table has no rollouts or no observations, or a key or value does not fit.
        """
        if not self.rollout or not self.schema.observation_names:
            raise FieldError(
                "Expected no bootstrap: only rollouts are followed by observations, create the table with kind='queue', "
                "rollout_length=<ticks> and a schema with observation fields",
                at="bootstrap",
            )
        whole = checked_observation(self.schema, observation, self.lead, "bootstrap")
        return whole if self.lead else {name: [value] for name, value in whole.items()}

    def keep_final(self, row: int, arrays: Mapping[str, Any], behind: int) -> None:
        """Keep the final observation of an uncommitted physical row.

        Args:
            row: Physical row of the step that ends the episode.
            arrays: From `checked_observation`, for one row.
            behind: First physical row after the rows that are being written.

        Raises:
            FieldError: The page has no room left.
        """
        kept = entry(commit.stage_final)(self.address, row, behind)
        if kept < 0:
            raise FieldError(
                "Expected room for a final observation in this rollout: raise max_finals in writer.rollout", at="final"
            )
        for name, array in arrays.items():
            self.put(name, kept, array)

    def disarm(self) -> None:
        """In a forked child: drop the references to the page, which belongs to the parent."""
        self.words[w.WRITER_PAGE // 8] = -1
        self.words[w.WRITER_BUSY // 8] = 1

    def halt(self) -> None:
        """Send the next row, in any form of writing, to the exact path, which checks the engine's state."""
        self.words[w.WRITER_EPOCH // 8] = _NO_EPOCH

    def close(self) -> None:
        """Publish, seal the page and end the stream; idempotent."""
        if self._closed:
            return
        participants = self.table.participants
        if self.tally is not None and participants is not None and participants.seated:
            self.publish()
        entry(page_writer.end)(self.array, self._locked, None)
        self._closed = True
        if participants is not None and participants.seated:
            self._note(participants, opened=False)

    def _note(self, seat: Participants, *, opened: bool) -> None:
        """Tell others how many writers of the table this process has open."""
        mine = [one for one in tuple(seat.writing) if isinstance(one, Stream) and one.table is self.table]
        open_ones = sum(not one.closed for one in mine)
        writer_counts.note(self.table.segment, self.table.layout, self.table.seat().number, open_ones, opened=opened)
