"""The default placement: all pages lie in this node's host memory (conduit.contracts.placement)."""

from __future__ import annotations

from collections.abc import Sequence

from conduit.contracts.placement import Placement, Pool, Request


class HostPlacement(Placement):
    """The default: this node's host pool."""

    def choose(self, request: Request, pools: Sequence[Pool]) -> Pool:
        """The first host pool."""
        return next(pool for pool in pools if pool.tier == "host")
