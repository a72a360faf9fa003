"""A stream: one writer's ordered chain of pages, and where in it the next tick goes.

Everything that says where a writer stands is in its words (words.WRITER_*), which the kernels change; Python keeps no copy, so the
forms of writing (append, step, rollout, unchecked handle) cannot disagree. Only turning a page can wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np

from conduit.clock import Deadline
from conduit.errors import Busy, Closed, ConfigError, FieldError, SpaceTimeout
from conduit.native.finish import when_gone
from conduit.native.jit import entry
from conduit.numbers import whole
from conduit.plane.ingest.autoreset import autoreset_of
from conduit.plane.ingest.field_statistics import Tally
from conduit.plane.ingest.validate import checked_observation
from conduit.store.format import words as w
from conduit.store.ingest import commit, final_rows, first_page, next_page, page_writer
from conduit.store.ingest.report_episodes import WRITER_REPORTS, WRITER_WORDS, Reports
from conduit.store.pages import ragged_values, rate_limiter
from conduit.store.segment import writer_counts
from conduit.store.segment.participants import Participants
from conduit.store.tables.limit_checks import check_rows, limits_of, seat_line, why_not_inserted
from conduit.store.tables.queue import QueueView
from conduit.store.tables.view import TableView

OnFull = Literal["wait", "raise"]
Array = np.ndarray[Any, Any]

_TURNS_AT_ONCE = 15
"""Pages that `append` turns in its compiled call before one is turned here, where the dead are looked after."""


_NO_EPOCH = -2
"""What no table's TABLE_EPOCH is."""


class Form(Protocol):
    """A form of writing that can be in progress: a step, a rollout, the unchecked handle."""

    @property
    def number(self) -> int:
        """Its number in the stream."""


class Stream:
    """The pages of one writer.

    Attributes:
        table: The table's view in this process.
        schema: Its schema.
        num_envs: Environments, or None for a single one without a leading axis.
        envs: Rows per tick.
        lead: Leading axes of a tick's values.
        autoreset: How environments reset.
        hands_over: True where final observations are handed over, instead of being the next row.
        is_queue: True where rows wait for consumers instead of being overwritten.
        rollout: Ticks after which a page is complete, or 0.
        tally: What adds its rows to the table's statistics, or None.
        largest_tick: Items that a tick's ragged values take at their longest, final observations included, int64 [ragged fields];
            None without such fields. A page that was just turned always has as many (conduit.store.format.arena_sizes).
        words: int64 words (words.WRITER_*) as a memoryview; `array` is the same as an array, `address` its address.
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
        seat = table.check_open()
        self.num_envs = None if num_envs is None else envs
        self.envs = envs
        self.table = table
        self.schema = table.layout.schema
        self.autoreset = autoreset_of(autoreset, num_envs)
        self.hands_over = self.autoreset != "next_step"
        keeps = self.hands_over and bool(self.schema.observation_names)
        table.layout.check_writer(self.envs, finals=keeps)
        self._seat = seat_line(table)
        self.check_grant(1, f"num_envs={num_envs}")
        self.lead = () if num_envs is None else (envs,)
        self.is_queue = table.layout.table.kind == "queue"
        self.rollout = table.layout.table.rollout_length or 0
        self.largest_tick = self._largest_tick()
        self._timeout = timeout
        self._on_full = on_full
        self._forms = 1
        self._form: weakref.ref[Form] | None = None
        self._form_name = ""
        self._closed = False
        self.tally: Tally | None = None
        self._env_states = np.zeros((self.envs, 3), np.int64)
        self._env_states[:, 0] = w.STARTING
        self._arenas = ragged_values.arena_words(
            [
                (
                    table.columns[name].ctypes.data,
                    values.ctypes.data,
                    values.strides[0],
                    values.strides[1],
                    values.shape[1],
                )
                for name, values in table.arenas.items()
            ]
        )
        self._reports = Reports(table.segment.base + table.layout.episodes, self.schema, table.columns, self.envs)
        self.array = np.zeros(WRITER_WORDS, np.int64)
        self.words = self.array.data
        self.address: int = self.array.ctypes.data
        for offset, value in (
            (w.WRITER_TABLE, table.address),
            (w.WRITER_PAGE, -1),
            (w.WRITER_ENVS, self.envs),
            (w.WRITER_RESERVE, self.envs * (keeps + (self.rollout > 0))),
            (w.WRITER_NEXT_STEP, not self.hands_over),
            (w.WRITER_ENV_STATE, self._env_states.ctypes.data),
            (w.WRITER_STREAM, table.new_stream()),
            (w.WRITER_OWNER, seat.number),
            (w.WRITER_COUNTER, seat.counter),
            (w.WRITER_PUBLISH_EVERY, 1),
            (w.WRITER_CLOSED, table.segment.closed_address),
            (w.WRITER_FINISHES, self.is_queue),
            (w.WRITER_STRICT, keeps and keep_final),
            (w.WRITER_ARENAS, self._arenas.ctypes.data),
            (w.WRITER_ARENA_COUNT, len(self._arenas)),
            (w.WRITER_SEAT, self._seat),
            (WRITER_REPORTS, self._reports.address),
        ):
            self.words[offset // 8] = value
        seat.add(self)
        # not the writer's end: an unchecked handle, step or rollout that outlives its writer still writes into the page
        self._locked = seat.seat
        when_gone(self, entry(page_writer.end), self.array, seat.seat)
        self._note(seat, opened=True)

    def check(self) -> None:
        """Refuse to write now.

        Raises:
            Closed: Writer, client or engine has closed, or a form of writing is in progress.
            Forked: The writer came through a fork.
        """
        self._check_open()
        busy = self.words[w.WRITER_BUSY // 8]
        if busy:
            form = None if self._form is None else self._form()
            if form is not None and form.number == busy:
                raise Closed(
                    f"Expected the {self._form_name} in progress to be finished first: leave its block, commit or abort it"
                )
            # of a form that was dropped, or of a call that was interrupted
            self.discard(final_rows.ALL_ROWS)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("Expected an open writer, this one was closed")
        self.table.check_open()

    @property
    def number(self) -> int:
        """Number of the stream in the table; with its first row a writer may go on in a page, and stream, that ended."""
        return self.words[w.WRITER_STREAM // 8]

    @property
    def ticks(self) -> int:
        """Ticks that this writer has committed."""
        return self.words[w.WRITER_TICK // 8] - self.words[w.WRITER_FIRST_TICK // 8]

    @property
    def closed(self) -> bool:
        """True once the writer has closed."""
        return self._closed

    def begin(self, form: Form, name: str) -> int:
        """Get a number for a form of writing, which keeps others out from when WRITER_BUSY is it, as long as the form is alive.

        Raises:
            Closed: As `check`.
        """
        self.check()
        self._forms += 1
        self._form, self._form_name = weakref.ref(form), name
        if self._seat:
            # others may wait for what the limiter has granted to it
            when_gone(form, entry(final_rows.drop), self.array, np.full(1, self._forms, np.int64))
        return self._forms

    def mark(self) -> None:
        """Say that rows are being staged by a call, so that the next one discards them if this one does not come to its end."""
        self.words[w.WRITER_BUSY // 8] = 1

    def here(self, rows: int = 0, tail: int = 0, items: Array | None = None) -> int:
        """Physical row of the next tick, after turning the page if it has too little room left, or the table was reset.

        Args:
            rows: Rows that are needed; 0 stands for one tick's, with all that it may need in the tail.
            tail: Kept observations that they need.
            items: Items of ragged values that are needed, int64 [ragged fields]; at most a tick's and its final observations'.

        Raises:
            SpaceTimeout, Busy: No page could be claimed, or the table's limiter does not grant the rows.
            Frozen: The table is frozen.
        """
        if rows == 0:
            rows, tail = self.envs, self.words[w.WRITER_RESERVE // 8]
        try:
            self.admit(rows)
            fits = entry(page_writer.fits)(self.address, rows, tail) and not entry(page_writer.is_stale)(self.address)
            if not fits or (items is not None and not entry(ragged_values.values_fit)(self.address, items.ctypes.data)):
                needed = 0 if items is None else items.ctypes.data
                at = (
                    -1
                    if self.words[w.WRITER_PAGE // 8] >= 0
                    else entry(first_page.reopen)(self.address, rows, tail, needed)
                )
                if at < 0:
                    self._turn()
        except BaseException:
            self._give_back()
            raise
        self.words[w.WRITER_BEYOND // 8] = 0
        return self.words[w.WRITER_BASE // 8] + self.words[w.WRITER_LOCAL // 8]

    def check_grant(self, ticks: int, what: str) -> None:
        """Refuse ticks that the table's limiter can never grant at once.

        Raises:
            ConfigError: It cannot.
        """
        if self._seat:
            check_rows(limits_of(self.table), ticks * self.envs, self.table.layout.name, what)

    def admit(self, rows: int) -> None:
        """Have the table's limiter grant the next rows; nothing is moved.

        Raises:
            SpaceTimeout, Busy: It does not.
            Frozen: The table is frozen.
        """
        self.table.check_thawed()
        if not self._seat or entry(rate_limiter.grant)(self.address, rows):
            return
        # what is held back may be what the loaders wait for
        self.publish()

        def ask() -> bool | None:
            self.table.check_thawed()
            return True if entry(rate_limiter.grant)(self.address, rows) else None

        if self._on_full == "wait" and self.table.wait(ask, for_space=True, deadline=Deadline(self._timeout)):
            return
        why = why_not_inserted(limits_of(self.table), self.table.counts(), rows) or "it was blocked until just now"
        message = f"Expected the limiter of table {self.table.layout.name!r} to let {rows} rows in, but {why}"
        if self._on_full == "raise":
            raise Busy(message)
        raise SpaceTimeout(f"{message} (waited {self._timeout} s)")

    def _give_back(self) -> None:
        if self._seat:
            entry(rate_limiter.give_back)(self.address)

    def _turn(self) -> None:
        self._check_open()
        if self.tally is not None:
            self.tally.take(self.words, self.envs)
        if self.is_queue:
            entry(page_writer.finish_page)(self.address)
        turned = self._turn_at_once()
        if not turned and self._on_full == "wait":
            turned = self.table.wait(self._turn_at_once, for_space=True, deadline=Deadline(self._timeout))
        if not turned:
            self._explain_full()
        self.table.check_open().look_after_dead()
        if self.tally is None and not self.is_queue and len(self._arenas) == 0:
            self.words[w.WRITER_TURNS // 8] = _TURNS_AT_ONCE

    def _turn_at_once(self) -> bool | None:
        """Turn to another page; None when all are open or leased."""
        seat = self.table.check_open()
        turn = entry(next_page.turn_to_next)
        if turn(self.address) < 0 and (seat.recover_dead() == 0 or turn(self.address) < 0):
            return None
        return True

    def _explain_full(self) -> None:
        layout = self.table.layout
        states = self.table.pages()[:, w.PAGE_STATE // 8]
        kinds = states & w.KIND_MASK
        held = np.isin(kinds, (w.INIT, w.OPEN))
        page_writer, leased = int(held.sum()), int((kinds == w.SEALED).sum())
        processes = len(np.unique((states[held] >> w.OWNER_SHIFT) & w.OWNER_MASK))
        message = (
            f"Expected a free page in table {layout.name!r}, but of its {layout.pages} pages of {layout.page_rows} rows {page_writer} "
            f"are being written, by {page_writer} writers in {processes} process{'es' if processes != 1 else ''}, and {leased} are leased by readers: end leases, "
            f"close writers that are done, or create the table with writers=<as many as are open at once>, at least {page_writer + 1}"
        )
        if self.is_queue:
            message = (
                f"Expected room in queue {layout.name!r}, but its {layout.pages} pages of {layout.page_rows} rows are full: "
                f"{QueueView(self.table).explain()}. Start a consumer, let consumers acknowledge sooner and drop the "
                "arrays of what they have acknowledged, or raise the capacity"
            )
        if self._on_full == "raise":
            raise Busy(message)
        raise SpaceTimeout(f"{message} (waited {self._timeout} s)")

    def commit(self, ticks: int) -> int:
        """Commit `ticks` ticks; returns -1, or the row (counted from the first) that ends an episode and cannot.

        It lacks its final observation, or the end before it is not closed yet ("next_step"). Nothing is committed then.

        Raises:
            Closed, Forked: Writer, client or engine has closed since the rows were begun.
            Frozen: The table was frozen since.
        """
        self._check_open()
        self.table.check_thawed()
        result = entry(commit.commit)(self.address, ticks)
        return -2 - result if result < -1 else -1

    def prioritize(self, row: int, leaves: Array) -> None:
        """Give the tick at `row`, which is about to be committed, priorities of its own: leaves, uint32 [envs]."""
        priorities = self.table.priorities
        if priorities is not None:
            priorities[row : row + self.envs] = leaves
            self.words[w.WRITER_PRIORITIES_GIVEN // 8] = 1

    def abort(self, rows: int) -> None:
        """Forget flags, priorities and final observations staged for the next `rows` rows."""
        entry(final_rows.abort)(self.address, rows)

    def discard(self, rows: int) -> None:
        """`abort`, after which nothing is in progress."""
        entry(final_rows.discard)(self.address, rows)

    def refuse(self, place: int) -> None:
        """Report that the tick's row `place` ends an episode as it cannot (`commit`); nothing was committed.

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
        """What says that row `place`, tick by tick, ends an episode where the end before it is still to be closed."""
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
        """Refuse ends of an episode behind one that is not closed yet ("next_step"), before anything is stored.

        Args:
            ends: Bool [ticks, envs], steps to come that end an episode.

        Raises:
            FieldError: There is one.
        """
        if self.hands_over or not ends.any():
            return
        open_ = np.zeros_like(ends)
        open_[1:] = ends[:-1]
        # a table that was reset begins anew in every environment
        open_[0] = (self._env_states[:, 0] == w.AWAITING_FINAL) & (entry(page_writer.is_stale)(self.address) == 0)
        twice = np.flatnonzero(ends & open_)
        if len(twice):
            raise self.ended_twice(int(twice[0]))

    def take_refusal(self) -> int:
        """Place of the row for which the unchecked handle's last commit was refused, or -1; asked once."""
        place = self.words[w.WRITER_REFUSED // 8] - 1
        self.words[w.WRITER_REFUSED // 8] = 0
        return place

    @property
    def ticks_left(self) -> int:
        """Ticks that the present rollout still takes; 1 where its page may have no room for more, all of them between two."""
        words = self.words
        local, reserve = words[w.WRITER_LOCAL // 8], words[w.WRITER_RESERVE // 8]
        if not entry(page_writer.fits)(self.address, self.envs, reserve):
            return self.rollout
        # each tick may keep a final observation of every environment; behind the last one come the next observations
        free = words[w.WRITER_ROWS // 8] - words[w.WRITER_TAIL // 8] - local - self.envs
        return 1 if free < 2 * reserve else self.rollout - local // self.envs

    def keep_bootstrap(self, ticks: int, arrays: Mapping[str, Any]) -> None:
        """Keep the observations behind the next `ticks` ticks, with which their rollout ends; `end_rollout` once they are committed.

        Args:
            ticks: Uncommitted ticks.
            arrays: From `checked_bootstrap`, [envs, *shape] each; a ragged one as a list.

        Raises:
            FieldError: The page has no room left.
        """
        row = entry(final_rows.stage_bootstrap)(self.address, ticks)
        if row < 0:
            raise FieldError(
                "Expected room for the observations behind this rollout: fewer final observations must be kept in it, or "
                "the table needs more page_rows",
                at="bootstrap",
            )
        for name, array in arrays.items():
            for env in range(self.envs):
                self.put(name, row + env, array[env])

    def end_rollout(self) -> None:
        """Close the page behind what was committed: consumers get it as it is."""
        if self.tally is not None:
            self.tally.take(self.words, self.envs)
        entry(page_writer.finish_page)(self.address)

    def publish(self) -> None:
        """Make committed rows visible that an ingestion policy still holds back."""
        entry(page_writer.publish)(self.address)
        if self.tally is not None:
            self.tally.take(self.words, self.envs)

    def cut(self) -> None:
        """Let every environment begin a new episode with the next tick."""
        self._env_states[:, 0] = w.STARTING

    def check_hands_over(self) -> None:
        """Refuse a final observation where the next row is it.

        Raises:
            FieldError: autoreset is "next_step".
        """
        if not self.hands_over:
            raise FieldError(
                "Expected no final observation with autoreset='next_step': the row after the end is the final observation",
                at="final",
            )

    def checked_bootstrap(self, observation: Any) -> dict[str, Any]:
        """A nested observation behind a rollout as {observation name: array or list [envs, *shape]}.

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
            row: Physical row whose episode ends with it.
            arrays: From `checked_observation`, for one row.
            behind: Physical row behind those that are being written.

        Raises:
            FieldError: The page has no room left.
        """
        kept = entry(final_rows.stage_final)(self.address, row, behind)
        if kept < 0:
            raise FieldError(
                "Expected room for a final observation in this rollout: raise max_finals in writer.rollout", at="final"
            )
        for name, array in arrays.items():
            self.put(name, kept, array)

    def put(self, name: str, row: int, array: Array) -> None:
        """Store a checked value of one uncommitted physical row; a ragged one goes behind those that are in the page's arena.

        Raises:
            FieldError: The arena has no room for it.
        """
        if name not in self.table.arenas:
            self.table.columns[name][row] = array
            return
        number = self.schema.ragged_names.index(name)
        if entry(ragged_values.put_value)(self.address, number, row, array.ctypes.data, len(array)) < 0:
            self._refuse_length(name, len(array))

    def reserve_value(self, name: str, row: int, length: int) -> Array:
        """Room for a ragged value of one uncommitted physical row, a view [length, *shape[1:]] of whatever the memory held.

        Raises:
            FieldError: The arena has no room for it.
        """
        number = self.schema.ragged_names.index(name)
        if entry(ragged_values.reserve_value)(self.address, number, row, length) < 0:
            self._refuse_length(name, length)
        return self.value(name, row)

    def _refuse_length(self, name: str, length: int) -> None:
        raise FieldError(f"Expected room for {length} items in the page's arena: write it with append", at=name)

    def value(self, name: str, row: int) -> Array:
        """The ragged value staged for an uncommitted physical row: a writable view [length, *shape[1:]] of the page's arena."""
        start, length = map(int, self.table.columns[name][row])
        view: Array = self.table.arenas[name][self.words[w.WRITER_PAGE // 8], start : start + length]
        return view

    def _largest_tick(self) -> Array | None:
        fields = [self.schema[name] for name in self.schema.ragged_names]
        if not fields:
            return None
        values = [self.envs * (2 if self.hands_over and field.observation else 1) for field in fields]
        return np.array([n * field.max_length for n, field in zip(values, fields, strict=True)], np.int64)

    def disarm(self) -> None:
        """In a forked child: the page is the parent's; leave no way to it."""
        self.words[w.WRITER_PAGE // 8] = -1
        self.words[w.WRITER_BUSY // 8] = 1

    def halt(self) -> None:
        """Have the next row, in whatever form, go to the path that asks what became of the engine."""
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
