"""The engine owns a node's tables; clients attach to it by name. There is no server: an engine is memory with an owner.

`Engine.create` makes the segment. Its name is removed when the engine is closed, by `close`, its `with` block, or the interpreter's
normal exit. If the owner is killed, the segment stays until a process adopts it or `conduit clean` removes it; clients raise OwnerGone
unless they attached with on_owner_exit="stay".
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from conduit.errors import ConfigError, EngineExists, EngineNotFound, Leftover, Unsendable
from conduit.plane.attach import attach
from conduit.plane.client import Client
from conduit.store.format.layout import SegmentSpec, specify
from conduit.store.format.same_spec import check_same
from conduit.store.format.table_spec import Table
from conduit.store.segment import owner_watch
from conduit.store.segment import segment as segments
from conduit.store.segment.leftovers import told
from conduit.store.segment.locks import LOCK_CREATOR, try_lock
from conduit.store.segment.names import Backing
from conduit.store.segment.segment import Segment
from conduit.store.tables.policy_weights import describe

if TYPE_CHECKING:
    from conduit.plane.checkpoints import Restored
    from conduit.store.checkpoint.restore import LimiterPolicy


class Engine(Client):
    """The owner of a node's tables; also a client of them."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment, attach)
        self._participants.play("owner")
        self._restored: Restored | None = None
        owner_watch.own(segment)
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
        exist_ok: bool = False,
        replace: bool = False,
    ) -> Engine:
        """Create an engine: allocate its memory in full and become its owner.

        If an engine's owner died, its name stays taken until a process adopts the engine or removes it. With `exist_ok` or `replace`,
        the same program can be started again after a kill. If several processes try at once, one gets the name; the others
        raise EngineExists.

        Args:
            name: 1 to 100 letters, digits, ".", "-", "_"; unique among this user's engines.
            tables: {name: Table}.
            policies: {name: example state dict} for weights slots; the values only give dtypes and shapes.
            backing: "shm" (named, outlives a killed owner) or "memfd" (not limited by /dev/shm; processes can attach only while the
                owner's process is alive).
            max_participants: Processes that can be attached at a time.
            exist_ok: If an engine of this name has a dead owner, adopt it with its rows, weights and limits in force, provided that it was
                made with these tables, policies and max_participants.
            replace: If an engine of this name has a dead owner, replace it by the new one; its rows are gone, and clients that stayed
                attached to it raise Closed.

        Raises:
            EngineExists: An engine of this name has a live owner. Leftover: its owner is dead, and neither `exist_ok` nor `replace` is
                given.
            NoSpace: Memory, the limit of a control group, or /dev/shm has too little space; nothing is touched or left behind.
            SchemaMismatch, ConfigError: With `exist_ok`: the dead owner's engine has other tables; names the first difference.
            ConfigError, CapacityError: Bad options.
        """
        _check_one_way(exist_ok=exist_ok, replace=replace)
        for option, given in (("tables", tables), ("policies", policies)):
            if given is not None and not isinstance(given, Mapping):
                raise ConfigError(f"Expected {{name: ...}} as {option}, got {type(given).__name__}")
        specs = {slot: describe(example) for slot, example in (policies or {}).items()}
        spec = specify(dict(tables), specs, max_participants)
        while True:
            try:
                segment = segments.create(name, spec, backing, replace=replace)
                break
            except Leftover:
                if not exist_ok:
                    raise
            try:
                return cls._take_over(name, spec)
            except EngineNotFound:
                continue  # it was removed meanwhile
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
        return cls._take_over(name)

    @classmethod
    def _take_over(cls, name: str, spec: SegmentSpec | None = None) -> Engine:
        """`adopt`; if a specification is given, only an engine that was made with it."""
        segment = segments.attach(name)
        if not try_lock(segment.lock_fd, LOCK_CREATOR):
            segment.release_locks()
            raise EngineExists(f"Expected the owner of engine {name!r} to be dead, but {told(name, 'running')}")
        try:
            if spec is not None:
                check_same(name, segment.layout.spec, spec)
        except BaseException:
            segment.release_locks()
            raise
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
        exist_ok: bool = False,
        replace: bool = False,
    ) -> Engine:
        """Create an engine from a checkpoint; `Engine.restored` says what came back.

        Rows keep their places and ids, and until a row is written the same seed gives the same next batches. Streams have ended: once a
        writer writes, they count as streams of writers that died at the moment of the checkpoint. Named loaders continue with the
        batch that was next.

        Args:
            path: A checkpoint, or a folder of checkpoints. From a folder, the newest good one is restored, with a RuntimeWarning about
                newer ones that are not good.
            name: Engine name; default the name that the engine had.
            limiter: Required when a table has a limiter. "keep": the counts as they were. "reset": inserted is the number of rows in the
                table, sampled and deleted are 0. "rebase": sampled is set so that the table is in the middle of its
                range, and neither side waits for the other.
            backing: As for `create`.
            max_participants: As for `create`; default the number that the engine had.
            progress: This thread calls it with the bytes done and the total bytes.
            exist_ok: If an engine of this name has a dead owner, adopt it, with the rows written since the checkpoint too, provided that
                it was made with the checkpoint's tables, policies and max_participants. The checkpoint is not read into it:
                `restored` is None, and limits and counts are those in force.
            replace: If an engine of this name has a dead owner, replace it by the restored one; its rows are gone, and clients that
                stayed attached to it raise Closed. It is left alone until the checkpoint has been read once and found good.

        Raises:
            CheckpointError: There is no checkpoint, or it is damaged, foreign or of another version; names the file.
            EngineExists, Leftover, NoSpace: As `create`; nothing is left behind.
            SchemaMismatch: With `exist_ok`, as `create`.
            ConfigError: Bad options, or, with `exist_ok`, as `create`.
        """
        # imported here, since most processes neither make nor read checkpoints
        from conduit.plane.checkpoints import meant, restore

        _check_one_way(exist_ok=exist_ok, replace=replace)
        while True:
            try:
                segment, restored = restore(
                    path,
                    name,
                    limiter=limiter,
                    backing=backing,
                    max_participants=max_participants,
                    progress=progress,
                    replace=replace,
                )
                break
            except Leftover:
                if not exist_ok:
                    raise
            try:
                return cls._take_over(*meant(path, name, max_participants))
            except EngineNotFound:
                continue  # it was removed meanwhile
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

    def __reduce__(self) -> NoReturn:
        raise Unsendable(
            f"Expected a handle that can be copied or pickled, got engine {self.name!r} itself, which its process owns: send "
            f"conduit.attach({self.name!r}), a client that attaches again where it arrives, or the name"
        )

    def _before_leaving(self) -> None:
        self._segment.mark_closed()
        # a finalizer runs only once, so it is kept until the name is gone
        _unlink_in_owner(self._segment, os.getpid())
        self._finalizer.detach()


def _check_one_way(*, exist_ok: bool, replace: bool) -> None:
    if exist_ok and replace:
        raise ConfigError(
            "Expected exist_ok=True, to go on with a dead owner's engine, or replace=True, to begin anew; got both"
        )


def _unlink_in_owner(segment: Segment, pid: int) -> None:
    if os.getpid() == pid:
        segment.mark_closed()
        try:
            segment.unlink()
        except BaseException:
            segment.unlink()  # an interrupt came; the finalizer does not run again
            raise
        owner_watch.disown(segment)
