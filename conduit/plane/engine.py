"""The engine owns a node's tables; clients attach to it by name. There is no server: an engine is memory with an owner.

`Engine.create` makes the segment and removes its name when it is closed, by its `with` block, or at the interpreter's
normal exit. If its process is killed, attached processes go on; the segment stays until it is adopted or cleaned.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from conduit.errors import ConfigError, EngineExists
from conduit.plane.client import Client
from conduit.store import segment as segments
from conduit.store import watching
from conduit.store.declaration import Table
from conduit.store.layout import specify
from conduit.store.locks import LOCK_CREATOR, try_lock
from conduit.store.names import Backing
from conduit.store.segment import Segment
from conduit.store.weights import describe

if TYPE_CHECKING:
    from conduit.plane.checkpointing import Restored
    from conduit.store.restoring import LimiterPolicy


class Engine(Client):
    """The owner of a node's tables; also a client of them."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self._participants.play("owner")
        self._restored: Restored | None = None
        watching.own(segment)
        # a forked child must not remove its parent's segment at exit
        self._finalizer = weakref.finalize(self, _unlink_in_owner, segment, os.getpid())

    @classmethod
    def create(
        cls,
        name: str,
        tables: Mapping[str, Table],
        *,
        policies: Mapping[str, Mapping[str, Any]] | None = None,
        backing: Backing = "shm",
        max_participants: int = 128,
    ) -> Engine:
        """Create an engine: allocate its memory in full and become its owner.

        Args:
            name: 1 to 100 letters, digits, ".", "-", "_"; unique among this user's engines.
            tables: {name: Table}.
            policies: {name: example state dict} for weights slots; the values only give dtypes and shapes.
            backing: "shm" (named, outlives a killed owner) or "memfd" (not bounded by /dev/shm; new attaches need the
                owner's process alive).
            max_participants: Processes that can be attached at a time.

        Raises:
            EngineExists: A living engine has this name. Leftover: a dead one.
            NoSpace: Memory, the limit of a control group, or /dev/shm has too little room; nothing is touched or left behind.
            ConfigError, CapacityError: Bad options.
        """
        for option, given in (("tables", tables), ("policies", policies)):
            if given is not None and not isinstance(given, Mapping):
                raise ConfigError(f"Expected {{name: ...}} as {option}, got {type(given).__name__}")
        specs = {slot: describe(example) for slot, example in (policies or {}).items()}
        segment = segments.create(name, specify(dict(tables), specs, max_participants), backing)
        try:
            return cls(segment)
        except BaseException:
            segment.unlink()
            raise

    @classmethod
    def adopt(cls, name: str) -> Engine:
        """Become the owner of an engine whose owner died; rows and weights are as they were.

        Raises:
            EngineExists: Its owner is alive.
            EngineNotFound, BadSegment, AccessDenied: As `attach`.
        """
        segment = segments.attach(name)
        if not try_lock(segment.lock_fd, LOCK_CREATOR):
            segment.release_locks()
            raise EngineExists(
                f"Expected engine {name!r} to have lost its owner, but the owner is alive: attach instead"
            )
        engine = cls(segment)
        segment.take_over()
        engine.recover()
        return engine

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        limiter: LimiterPolicy | None = None,
        backing: Backing = "shm",
        max_participants: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Create an engine from a checkpoint; `Engine.restored` says what came back.

        Rows are in the places they had, under the ids they had, and as long as nothing is written the same seed gives the same
        next batches. Streams have ended: once a writer writes, as if their writers had died at the moment of the checkpoint.
        Named loaders go on with the batch that was next.

        Args:
            path: A checkpoint, or a folder of them: then the newest one that is good is taken, with a RuntimeWarning about
                newer ones that are not.
            name: Engine name; the one it had without.
            limiter: Needed when a table has a limiter. "keep": counts as they were. "reset": inserted is the number of rows that
                are there, nothing is sampled or deleted yet. "rebase": as many samples as put the table in the middle of its
                range, so that neither side waits for the other.
            backing: As for `create`.
            max_participants: As for `create`; as it was without.
            progress: Called with bytes done and bytes in all, by this thread.

        Raises:
            CheckpointError: No checkpoint, a damaged or foreign one, or one of another version; names the file.
            EngineExists, Leftover, NoSpace: As `create`; nothing is left behind.
            ConfigError: Bad options.
        """
        # what checkpoints need is imported where it is used: most processes make and read none
        from conduit.plane.checkpointing import restore

        segment, restored = restore(
            path, name, limiter=limiter, backing=backing, max_participants=max_participants, progress=progress
        )
        try:
            engine = cls(segment)
        except BaseException:
            segment.unlink()
            raise
        engine._restored = restored
        return engine

    @property
    def restored(self) -> Restored | None:
        """What this engine was restored from, or None."""
        return self._restored

    def _before_leaving(self) -> None:
        self._segment.mark_closed()
        # the finalizer is called once, so it stays until the name is gone
        _unlink_in_owner(self._segment, os.getpid())
        self._finalizer.detach()


def _unlink_in_owner(segment: Segment, pid: int) -> None:
    if os.getpid() == pid:
        segment.mark_closed()
        try:
            segment.unlink()
        except BaseException:
            segment.unlink()  # an interrupt: a finalizer is called once
            raise
        watching.disown(segment)
