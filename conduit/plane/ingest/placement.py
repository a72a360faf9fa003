"""Control point *placement*: which pool a stream's pages live in.

The contract: `choose` is called once per writer, before its first page, with the pools the table may use. It does not
block, has no side effect, and its answer holds for the stream's life. The default keeps everything in this node's host
memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from conduit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pool:
    """Pages of one tier on one device.

    Attributes:
        name: Unique among the pools of a table.
        tier: "host" for a shared-memory segment.
        device: Device in torch's notation.
        capacity: Bytes.
    """

    name: str
    tier: Literal["host"]
    device: str
    capacity: int


@dataclass(frozen=True, slots=True)
class Request:
    """A stream to be placed.

    Attributes:
        table: Table name.
        stream: Stream number in that table.
        num_envs: Rows per tick.
        row_bytes: Bytes of one row's fields.
    """

    table: str
    stream: int
    num_envs: int
    row_bytes: int


class Placement(ABC):
    """Contract of the control point *placement*."""

    @abstractmethod
    def choose(self, request: Request, pools: Sequence[Pool]) -> Pool:
        """Pick one of `pools` (never empty) for a stream."""


class HostPlacement(Placement):
    """The default: this node's host pool."""

    def choose(self, request: Request, pools: Sequence[Pool]) -> Pool:
        """The first host pool."""
        return next(pool for pool in pools if pool.tier == "host")


def place(policy: Placement, request: Request, pools: Sequence[Pool]) -> Pool:
    """Ask a policy and hold it to its contract.

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
