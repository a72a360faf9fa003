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
        capacity: Bytes in all, used and free.
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

    One placement may serve many writers. Threads of one process may call it at the same time; it is never shared with another process.
    """

    @abstractmethod
    def choose(self, request: Request, pools: Sequence[Pool]) -> Pool:
        """Pick a pool for a stream.

        Called once per stream, before its first page; the choice holds for the life of the stream. It must not block, must not change
        anything (neither its arguments nor itself), and must return the same pool for the same arguments. The call that opens the
        writer raises its exceptions; nothing is written then.

        Choosing reserves nothing: the pool may be full by the time that a page is needed.

        Args:
            request: The stream.
            pools: The pools that the table may use, at least one, in no particular order.

        Returns:
            One of `pools`. Anything else is refused with ConfigError.
        """


def place(policy: Placement, request: Request, pools: Sequence[Pool]) -> Pool:
    """Call a placement and check its result.

    Raises:
        ConfigError: The result is not one of the pools.
    """
    pool = policy.choose(request, pools)
    if pool not in pools:
        raise ConfigError(
            f"Expected {type(policy).__name__}.choose to return one of {[p.name for p in pools]} for table "
            f"{request.table!r}, got {pool!r}"
        )
    return pool
