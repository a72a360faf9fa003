"""Control point *ingestion*: when the rows that a writer commits become visible.

A writer fills rows in place in shared memory. Nothing is serialised, no other process is asked, and rows become visible by
one store. The contract that can be swapped is *when*: `Ingestion.publish_every`. The default makes each commit visible at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from conduit.numbers import at_least


class Ingestion(ABC):
    """Contract of the control point *ingestion*: when committed rows become visible to readers."""

    @abstractmethod
    def publish_every(self, table: str, num_envs: int) -> int:
        """Ticks that are committed before they are published together, at least 1.

        Asked once per writer. A page's turn, `flush` and `close` publish what is pending. Rows that are not published
        when their writer dies are lost, and never half visible.
        """


class CommitPerStep(Ingestion):
    """The default: every commit is visible at once."""

    def publish_every(self, table: str, num_envs: int) -> int:
        """One tick."""
        return 1


class CommitEvery(Ingestion):
    """Publish every `ticks` ticks: fewer cache lines move between writer and readers, rows are seen later.

    Args:
        ticks: At least 1.
    """

    def __init__(self, ticks: int) -> None:
        self._ticks = at_least("ticks", ticks, 1)

    def publish_every(self, table: str, num_envs: int) -> int:
        """The number given."""
        return self._ticks
