"""Contract *placement*: which memory the pages of a stream live in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from conduit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory of one tier on one device that pages can live in.

    Attributes:
        name: Unique among the pools of a table.
        tier: "host" for a shared-memory segment.
        device: Device in torch's notation.
        capacity: Bytes in all, those in use included.
    """

    name: str
    tier: Literal["host"]
    device: str
    capacity: int


@dataclass(frozen=True, slots=True)
class Request:
    """A stream to be placed.

    Attributes:
        table: Name of the table.
        stream: Number of the stream; no other stream of that table has it.
        num_envs: Rows per tick, at least 1.
        row_bytes: Bytes of the fields of one row.
    """

    table: str
    stream: int
    num_envs: int
    row_bytes: int


class Placement(ABC):
    """Which pool the pages of a stream live in.

    One placement may serve many writers. Threads of one process may ask it at the same time; it is never shared with another process.
    """

    @abstractmethod
    def choose(self, request: Request, pools: Sequence[Pool]) -> Pool:
        """Pick a pool for a stream.

        Asked once per stream, before its first page; the answer holds for the life of the stream. It must not block, must not change
        anything (neither its arguments nor itself), and must give the same answer to the same question. What it raises is raised
        by the call that opens the writer, which then has written nothing.

        A pool that is chosen may be full by the time that a page is needed; choosing reserves nothing.

        Args:
            request: The stream.
            pools: What the table may use, at least one, in no promised order.

        Returns:
            One of `pools`. Anything else is refused with ConfigError.
        """


def place(policy: Placement, request: Request, pools: Sequence[Pool]) -> Pool:
    """Ask a placement and hold it to its contract.

    Raises:
        ConfigError: It answered with something that is not among the pools.
    """
    pool = policy.choose(request, pools)
    if pool not in pools:
        raise ConfigError(
            f"Expected {type(policy).__name__}.choose to return one of {[p.name for p in pools]} for table "
            f"{request.table!r}, got {pool!r}"
        )
    return pool
