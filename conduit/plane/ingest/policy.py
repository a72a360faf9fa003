"""The ingestions that Conduit has: every tick is published at once, or several together (conduit.contracts.ingestion)."""

from __future__ import annotations

from conduit.contracts.ingestion import Ingestion
from conduit.numbers import at_least


class CommitPerStep(Ingestion):
    """The default: every commit is visible at once."""

    def publish_every(self, table: str, num_envs: int) -> int:
        """One tick."""
        return 1


class CommitEvery(Ingestion):
    """Publish every `ticks` ticks: fewer cache lines move between writer and readers, and readers see rows later.

    Args:
        ticks: At least 1.
    """

    def __init__(self, ticks: int) -> None:
        self._ticks = at_least("ticks", ticks, 1)

    def publish_every(self, table: str, num_envs: int) -> int:
        """`ticks`, for every table."""
        return self._ticks
