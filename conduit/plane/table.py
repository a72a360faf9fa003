"""One table of an engine, for attached processes: its rows and bytes, limiter and statistics, and the calls that remove rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from conduit.errors import ConfigError
from conduit.forking import StaysHere
from conduit.kernels.spec.windows import Window
from conduit.native.jit import entry
from conduit.plane.deliver.episodes import Episodes, read_episodes
from conduit.plane.deliver.scan import Scan
from conduit.sampling.anchors import anchors
from conduit.schema import Schema
from conduit.store.format.table_spec import Table, geometry, halo_ticks
from conduit.store.pages import deletion
from conduit.store.pages.row_counts import Counts
from conduit.store.tables.appearance import filling_of, held_in, never_raises, place_of, state_of
from conduit.store.tables.limit_checks import RateLimiter
from conduit.store.tables.queue import QueueView
from conduit.store.tables.statistics import Statistics
from conduit.store.tables.view import TableView


class TableHandle(StaysHere):
    """One table of an engine, from `Client.table`; for any thread. `len(handle)` is its number of rows.

    Every answer holds for the moment only, since other processes write. Calls that change the table (`delete`, `reset`, `freeze`,
    `limiter.change`) change it for all processes.
    """

    _elsewhere = "ask there, client.table(name)"

    def __init__(self, table: TableView) -> None:
        self._table = table

    @property
    def name(self) -> str:
        """Table name."""
        return self._table.layout.name

    @property
    def kind(self) -> Literal["replay", "queue"]:
        """Loaders draw the rows of a "replay" table; consumers take each row of a "queue" once."""
        return self._table.layout.table.kind

    @property
    def schema(self) -> Schema:
        """Its schema."""
        return self._table.layout.schema

    @property
    def capacity(self) -> int:
        """Rows of all its pages together, including rows that are copies of others or hold final observations."""
        return self._table.layout.rows

    @property
    def rows(self) -> int:
        """Rows in the table: committed, not deleted, not overwritten; in a queue, rows that are not acknowledged.

        With autoreset "next_step" this includes the rows that only hold final observations.

        Raises:
            Closed, Forked: The client or engine has closed.
        """
        self._table.check_open()
        return held_in(self._table) if self.kind == "queue" else self._table.counts().size

    @property
    def counts(self) -> Counts:
        """Rows inserted, deleted, evicted and present, samples delivered; exact, also after processes were killed.

        Raises:
            Closed, Forked: The client or engine has closed.
        """
        self._table.check_open()
        return self._table.counts()

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that the table takes, full or empty."""
        layout = self._table.layout
        return layout.end - layout.control

    def sampleable(self, window: Window | None = None) -> int:
        """Number of rows that a loader could draw now: rows whose window is complete.

        The call examines each row, which takes some 10 ns. It ignores priorities: a row of priority 0 counts, and so does a row
        that is too old for a loader's `max_staleness`.

        Args:
            window: What a sample is built from, as for `Client.loader`; None for transitions of one step. For a queue, None: the
                result is the number of rows that a consumer could claim now.

        Raises:
            ConfigError: The table was created for narrower windows, or is a queue, which has no windows.
            Closed, Forked: The client or engine has closed.
        """
        self._table.check_open()
        if self.kind == "replay":
            return anchors(self._table, window)
        if window is not None:
            raise ConfigError(f"Expected no window for queue {self.name!r}, whose rows are claimed, got {window!r}")
        return QueueView(self._table).counts().waiting

    @property
    def limiter(self) -> RateLimiter:
        """The table's limiter, shared by all processes: its counts, what it allows or why not, and `change` for other limits.

        Raises:
            ConfigError: The table has no limiter.
        """
        return RateLimiter(self._table)

    @property
    def statistics(self) -> Statistics:
        """Running statistics of the table's fields, shared by all processes; see `Table.statistics`, `conduit.normalize`."""
        return Statistics(self._table)

    def episodes(self, *, since: Episodes | None = None, last: int | None = None) -> Episodes:
        """Returns and lengths of episodes that ended in the table, of all writers; for replay tables and queues.

        A table keeps the newest 1,024 episodes. An episode is included as soon as its last step is committed, even if that step is not
        published yet.

        Args:
            since: The result of an earlier call: return only episodes that ended after it, each once. None for all that the table has.
            last: Return at most this many, the newest.

        Raises:
            ConfigError: Bad options.
            Closed, Forked: The client or engine has closed.
        """
        self._table.check_open()
        return read_episodes(self._table, since, last)

    def scan(self) -> Scan:
        """Every step that the table has now, once each, environment by environment, in the order of time; iterating yields columns.

        Raises:
            Closed, Forked: The client or engine has closed.
        """
        return Scan(self._table)

    def delete(self, ids: Any) -> int:
        """Delete rows: from now on no window begins at them. Windows of other rows still contain them.

        A rollout begins at the row of its first environment. Rows that have been overwritten or deleted before are ignored.

        Args:
            ids: Integers of any shape, from `Batch.ids`.

        Returns:
            How many rows were deleted.

        Raises:
            ConfigError: The table is a queue.
            FieldError: The ids are not integers.
            Frozen: The table is frozen.
            BufferError: This client holds too many leases.
            Closed, Forked: The client or engine has closed.
        """
        self._check_removable()
        return self._table.delete(ids)

    def reset(self) -> None:
        """Remove all rows, at once and for all processes; counts, limits and the priorities' scale stay.

        Writers go on: each begins a new episode in every environment with its next step. A step or rollout that is being
        written at this moment is removed too. Batches that were delivered stay valid.

        Raises:
            ConfigError: The table is a queue.
            Frozen: The table is frozen.
            Closed, Forked: The client or engine has closed.
        """
        self._check_removable()
        entry(deletion.reset)(self._table.address)

    def freeze(self) -> None:
        """Make the table read-only, in all processes, until `thaw`: writing, deleting and resetting raise Frozen.

        A step that another process is committing at this very moment may still be stored.

        Raises:
            Closed, Forked: The client or engine has closed.
        """
        self._set_frozen(frozen=True)

    def thaw(self) -> None:
        """Make a frozen table take rows again; writers continue where they were.

        Raises:
            Closed, Forked: The client or engine has closed.
        """
        self._set_frozen(frozen=False)

    def _check_removable(self) -> None:
        self._table.check_open()
        self._table.check_thawed()
        if self.kind == "queue":
            raise ConfigError(
                f"Expected a replay table, {self.name!r} is a queue: its rows go when they are acknowledged"
            )

    def _set_frozen(self, *, frozen: bool) -> None:
        self._table.check_open()
        entry(deletion.set_frozen)(self._table.address, frozen)

    def __len__(self) -> int:
        return self.rows

    def __bool__(self) -> bool:
        return True  # it is there, also when it has no rows

    @never_raises
    def __repr__(self) -> str:
        return (
            f"TableHandle({place_of(self._table)}, {self.kind}, {self.nbytes / 2**20:.1f} MiB, {state_of(self._table)}: "
            f"{filling_of(self._table)})"
        )


def with_room(table: Table, steps: float) -> Table:
    """The declaration with its capacity raised until the table keeps this many steps of one writer beside the rows that pages copy.

    Args:
        table: With a capacity in rows.
        steps: Steps to keep.

    Raises:
        CapacityError: No table has room for them.
    """
    while True:
        pages, page_rows, _ = geometry(table)
        # a page begins with its halo and the halo's final observations, and may end with too few rows for another step
        own = page_rows - 2 * halo_ticks(table) - 2
        if (pages - 1) * own >= steps:
            return table
        assert isinstance(table.capacity, int)  # noqa: S101 - what is in bytes is the caller's bound
        table = replace(table, capacity=table.capacity + table.capacity // 20 + page_rows)
