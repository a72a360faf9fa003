"""Contract *ingestion*: when the rows that a writer commits become visible to readers.

A writer fills rows in place in shared memory, and publishes them by one store. An ingestion decides how many ticks are published
together: more of them move fewer cache lines between writer and readers, and are seen later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from conduit.errors import ConfigError
from conduit.numbers import whole


class Ingestion(ABC):
    """When committed rows become visible to readers.

    Rows become visible whole and in the order in which they were committed, whatever an ingestion answers. Rows that are committed
    and not published yet are published when the page turns, by `flush` and by `close`; they are lost when their writer dies.

    One ingestion may serve many writers. Threads of one process may ask it at the same time; it is never shared with another process.
    """

    @abstractmethod
    def publish_every(self, table: str, num_envs: int) -> int:
        """Ticks that are committed before they are published together.

        Asked once per writer, when the writer is opened, and never while rows are written. It must not block, must not change
        anything, and must give the same answer to the same question. What it raises is raised by the call that opens the writer,
        which then has written nothing.

        Args:
            table: Name of the table.
            num_envs: Rows per tick, at least 1.

        Returns:
            Ticks, a whole number of at least 1. The writer refuses anything else with ConfigError.
        """


def ticks_of(policy: Ingestion, table: str, num_envs: int) -> int:
    """Ask an ingestion and hold it to its contract.

    Raises:
        ConfigError: It answered with something that is no whole number of at least 1.
    """
    ticks = policy.publish_every(table, num_envs)
    every = whole(ticks)
    if every is None or every < 1:
        raise ConfigError(
            f"Expected {type(policy).__name__}.publish_every to return at least 1 tick for table {table!r}, got {ticks!r}"
        )
    return every
