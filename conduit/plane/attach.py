"""`attach`: a client of a running engine by the engine's name; it can wait until the engine exists."""

from __future__ import annotations

import functools
import time

from conduit.clock import Deadline
from conduit.errors import ConfigError, EngineNotFound, OwnerGone
from conduit.plane.client import Client
from conduit.store.segment import segment as segments
from conduit.store.segment.leftovers import fate_of, told
from conduit.store.segment.owner_watch import OnOwnerExit
from conduit.store.segment.participants import play_everywhere
from conduit.store.segment.segment import Segment

_POLL = 0.01


def _attach_open(name: str, on_owner_exit: OnOwnerExit) -> Segment:
    segment = segments.attach(name)
    if segment.closed:
        segment.release_locks()
        raise EngineNotFound(f"Expected a running engine named {name!r}, but it is just closing")
    fate = fate_of(segment.lock_fd)
    if on_owner_exit == "raise" and fate != "running":
        segment.release_locks()
        raise OwnerGone(
            f"Expected a running engine named {name!r}, but {told(name, fate)}, or attach with on_owner_exit='stay' to work "
            "without an owner"
        )
    return segment


def attach(name: str, timeout: float = 0.0, *, on_owner_exit: OnOwnerExit = "raise") -> Client:
    """Attach to a running engine of this user.

    A client ends with the process that owns its engine. When that process is gone, for whatever reason, all waits and calls of the
    client raise OwnerGone within a second, and so does the next row that it writes. A thread of this process watches for that, unless
    the process owns the engine itself.

    Args:
        name: Engine name.
        timeout: Seconds to wait until the engine exists and has a live owner.
        on_owner_exit: What the client does when the owner is gone: "raise" OwnerGone, or "stay" and work without an owner until another
            process adopts the engine.

    Raises:
        EngineNotFound: No such engine.
        OwnerGone: Its owner is dead.
        AccessDenied: It belongs to another user.
        BadSegment: Truncated, foreign, or made by a version with another layout.
        ParticipantsFull: All seats were taken for a second.
    """
    if on_owner_exit not in ("raise", "stay"):
        raise ConfigError(f"Expected on_owner_exit 'raise' or 'stay', got {on_owner_exit!r}")
    deadline = Deadline(timeout)
    while True:
        try:
            again = functools.partial(attach, on_owner_exit=on_owner_exit)
            return Client(_attach_open(name, on_owner_exit), again, on_owner_exit)
        except (EngineNotFound, OwnerGone):
            if deadline.passed():
                raise
        time.sleep(min(_POLL, deadline.left()))


def tell_role(role: str) -> None:
    """Make `conduit status` show this role, such as "launcher", for all clients that are open in this process."""
    play_everywhere(role)
