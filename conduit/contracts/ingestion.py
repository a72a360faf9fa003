"""Contract *ingestion*: when the rows that a writer commits become visible to readers.

A writer fills rows in place in shared memory and publishes them by one store. A tick is one row of each of its environments. An
ingestion decides how many ticks are published together: with more of them, fewer cache lines move between writer and readers, and
readers see rows later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from conduit.errors import ConfigError
from conduit.numbers import whole


class Ingestion(ABC):
    """When committed rows become visible to readers.

    Rows always become visible whole and in the order in which they were committed. Committed rows that are not published yet are
    published when the writer changes to its next page, by `flush` and by `close`; they are lost if the writer dies.

    One ingestion may serve many writers. Threads of one process may call it at the same time; it is never shared with another process.
    """

    @abstractmethod
    def publish_every(self, table: str, num_envs: int) -> int:
        """Ticks that are committed before they are published together.

        Called once per writer, when the writer is opened, and never while rows are written. It must not block, must not change
        anything, and must return the same value for the same arguments. The call that opens the writer raises its exceptions;
        nothing is written then.

        Args:
            table: Name of the table.
            num_envs: Rows per tick, at least 1.

        Returns:
            Ticks, an integer of at least 1. The writer refuses anything else with ConfigError.
        """


def ticks_of(policy: Ingestion, table: str, num_envs: int) -> int:
    """Call an ingestion and check its result.

    Raises:
        ConfigError: The result is not an integer of at least 1.
    """
    ticks = policy.publish_every(table, num_envs)
    every = whole(ticks)
    if every is None or every < 1:
        raise ConfigError(
            f"Expected {type(policy).__name__}.publish_every to return at least 1 tick for table {table!r}, got {ticks!r}"
        )
    return every
