"""Attaching to a running engine by its name, waiting for it to appear if told to."""

from __future__ import annotations

import time

from conduit.clock import Deadline
from conduit.errors import EngineNotFound
from conduit.plane.client import Client
from conduit.store import segment as segments
from conduit.store.segment import Segment

_POLL = 0.01


def _attach_open(name: str) -> Segment:
    segment = segments.attach(name)
    if segment.closed:
        segment.release_locks()
        raise EngineNotFound(f"Expected a running engine named {name!r}, but it is just closing")
    return segment


def attach(name: str, timeout: float = 0.0) -> Client:
    """Attach to a running engine of this user.

    Args:
        name: Engine name.
        timeout: Seconds to wait for it to appear.

    Raises:
        EngineNotFound: No such engine.
        AccessDenied: It belongs to another user.
        BadSegment: Truncated, foreign, or made by a version with another layout.
        ParticipantsFull: All seats are taken.
    """
    deadline = Deadline(timeout)
    while True:
        try:
            return Client(_attach_open(name))
        except EngineNotFound:
            if deadline.passed():
                raise
        time.sleep(min(_POLL, deadline.left()))
