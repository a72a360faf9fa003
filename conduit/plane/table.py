"""What a table can be asked by whoever is attached: its rows, those that could be drawn, its bytes."""

from __future__ import annotations

from typing import Literal

from conduit.errors import ConfigError
from conduit.forking import StaysHere
from conduit.kernels.spec.windows import Window
from conduit.sampling.anchors import anchors
from conduit.schema import Schema
from conduit.store.pages.row_counts import Counts
from conduit.store.tables.appearance import filling_of, held_in, never_raises, place_of, state_of
from conduit.store.tables.queue import QueueView
from conduit.store.tables.view import TableView


class TableHandle(StaysHere):
    """One table of an engine, from `Client.table`; for any thread. `len(handle)` is its number of rows.

    Every answer is of the moment: others write meanwhile.
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
        """What becomes of its rows."""
        return self._table.layout.table.kind

    @property
    def schema(self) -> Schema:
        """Its schema."""
        return self._table.layout.schema

    @property
    def capacity(self) -> int:
        """Rows of all its pages together, those included that repeat others or hold final observations."""
        return self._table.layout.rows

    @property
    def rows(self) -> int:
        """Rows that are there: committed, not deleted, not overwritten; of a queue, those that are not acknowledged.

        With autoreset "next_step" the rows that only hold final observations are among them.

        Raises:
            Closed, Forked: The client or engine has closed.
        """
        self._table.check_open()
        return held_in(self._table) if self.kind == "queue" else self._table.counts().size

    @property
    def counts(self) -> Counts:
        """Rows inserted, deleted, evicted and there, samples delivered; exact, whoever was killed.

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
        """Rows that a loader could draw now: those at which the window is whole.

        Each row is looked at, which takes some 10 ns. Priorities are not: a row of priority 0 counts, and so does one
        that is too old for a loader's `max_staleness`.

        Args:
            window: What a sample is built from, as for `Client.loader`; None for transitions of one step. Of a queue, None: the rows
                that a consumer could claim now are counted.

        Raises:
            ConfigError: The table was created for narrower windows, or is a queue and has none.
            Closed, Forked: The client or engine has closed.
        """
        self._table.check_open()
        if self.kind == "replay":
            return anchors(self._table, window)
        if window is not None:
            raise ConfigError(f"Expected no window for queue {self.name!r}, whose rows are claimed, got {window!r}")
        return QueueView(self._table).counts().waiting

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
