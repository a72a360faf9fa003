"""A client is a process's attachment to an engine: it opens writers, loaders and consumers, and hands out tables and policies.

Closing it closes its writers and consumers and frees its seat; batches that were delivered stay valid.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Self

from conduit.contracts.ingestion import Ingestion
from conduit.contracts.placement import Placement, Pool
from conduit.errors import ConfigError, SchemaMismatch
from conduit.kernels.spec.batch_transforms import BatchTransform
from conduit.kernels.spec.transforms import Pipeline
from conduit.nesting import hint
from conduit.plane.deliver.batch import Format
from conduit.plane.deliver.consumer import Consumer, OnRefused, Partial
from conduit.plane.ingest.autoreset import Autoreset
from conduit.plane.ingest.placement import HostPlacement
from conduit.plane.ingest.policy import CommitPerStep
from conduit.plane.ingest.writer import Writer, writer_type
from conduit.plane.ingest.writer_pages import OnFull
from conduit.plane.open_loaders import OpensLoaders
from conduit.plane.table import TableHandle
from conduit.schema import Schema
from conduit.store.segment.owner_watch import OnOwnerExit, Watch
from conduit.store.segment.participants import Participants, closed_client
from conduit.store.segment.segment import Segment
from conduit.store.tables.appearance import filling_of, never_raises, state_in
from conduit.store.tables.policy_weights import PolicySlot
from conduit.store.tables.view import TableView


class Client(OpensLoaders):
    """A process's attachment to an engine. Use `conduit.attach`; it is a context manager.

    It can be pickled and sent to a spawned process, a pool's worker or a Ray actor: where it is unpickled, it attaches again by the
    engine's name, with a seat of its own.
    """

    def __init__(
        self, segment: Segment, again: Callable[[str], Client], on_owner_exit: OnOwnerExit | None = None
    ) -> None:
        self._segment = segment
        # attaches by the engine's name, as this client was attached; pickling a client sends this call instead of the client
        self._again = again
        self._views = {name: TableView(segment, layout) for name, layout in segment.layout.tables.items()}
        descriptors = [view.descriptor for view in self._views.values()]
        try:
            self._participants = Participants(segment, descriptors)
        except BaseException:
            segment.release_locks()
            raise
        for view in self._views.values():
            view.participants = self._participants
        self._slots: dict[str, PolicySlot] = {}
        self._writers: weakref.WeakSet[Writer] = weakref.WeakSet()
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()
        self._closed = self._left = False
        # an owner need not watch for an owner's death
        self._watch = None if on_owner_exit is None else Watch(segment, self._participants, on_owner_exit)

    @property
    def name(self) -> str:
        """Engine name."""
        return self._segment.name

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the engine's tables."""
        return tuple(self._views)

    def _check_open(self) -> None:
        if self._closed:
            raise closed_client(self.name)
        self._participants.check()

    def _view(self, table: str) -> TableView:
        self._check_open()
        if table not in self._views:
            raise ConfigError(f"Expected a table of engine {self.name!r}, got {table!r}{hint(table, self._views)}")
        return self._views[table]

    def table(self, name: str) -> TableHandle:
        """The handle of one table: counts, schema, limiter, statistics, episodes, scan, delete, reset, freeze.

        Raises:
            ConfigError: The engine has no such table.
            Closed, Forked: The client has closed.
        """
        return TableHandle(self._view(name))

    def writer(
        self,
        table: str,
        *,
        num_envs: int | None = None,
        autoreset: Autoreset | Enum | None = None,
        policy: PolicySlot | None = None,
        schema: Schema | None = None,
        timeout: float | None = 10.0,
        on_full: OnFull = "wait",
        keep_final: bool = True,
        statistics: bool = False,
        ingestion: Ingestion | None = None,
        placement: Placement | None = None,
    ) -> Writer:
        """Open a writer, for use by one thread.

        Args:
            table: Table name.
            num_envs: Environments per call, the leading axis of all values; None for one environment without that axis.
            autoreset: How the environments reset: "next_step", "same_step" or "disabled", or a member of
                gymnasium.vector.AutoresetMode, such as envs.metadata["autoreset_mode"]. Required with num_envs; without num_envs
                the default is "disabled".
            policy: Rows carry the version that this slot object last polled.
            schema: The schema that the caller expects; checked against the table's.
            timeout: Seconds that a write may wait for a page; None without limit.
            on_full: "wait", or "raise" Busy when every page is being written or leased.
            keep_final: With "same_step" and "disabled": require the final observation of every episode that ends. If False and it is
                missing, a terminated row is delivered with its own observation as the next one, and a truncated row is not drawn.
            statistics: Add committed rows to the table's running statistics, whenever a page is full, at `flush` and at `close`.
            ingestion: Another policy for when rows become visible.
            placement: Another policy for where pages live.

        Raises:
            ConfigError, CapacityError: Bad options, or pages too small for num_envs.
            SchemaMismatch: `schema` differs; names the first differing field.
        """
        view = self._view(table)
        if schema is not None:
            if not isinstance(schema, Schema):
                raise ConfigError(f"Expected a conduit.Schema as schema, got {type(schema).__name__}")
            difference = view.layout.schema.difference(schema)
            if difference is not None:
                raise SchemaMismatch(
                    f"Expected the schema of table {table!r} ({view.layout.schema.fingerprint}), got {schema.fingerprint}: "
                    f"{difference}"
                )
        rollouts = view.layout.table.rollout_length is not None
        writer = writer_type(view.layout.schema, rollouts=rollouts, vector=num_envs is not None)(
            view,
            num_envs=num_envs,
            autoreset=autoreset,
            policy=policy,
            timeout=timeout,
            on_full=on_full,
            keep_final=keep_final,
            statistics=statistics,
            ingestion=ingestion or CommitPerStep(),
            placement=placement or HostPlacement(),
            pools=(Pool("host", "host", "cpu", self._segment.layout.size),),
        )
        self._writers.add(writer)
        self._participants.play("writer")
        return writer

    def consumer(
        self,
        table: str,
        *,
        format: Format = "torch",  # noqa: A002 - the natural word in a call
        timeout: float | None = 30.0,
        partial: Partial = "deliver",
        transform: Mapping[str, Pipeline] | None = None,
        batch_transforms: Iterable[BatchTransform] = (),
        rename: Mapping[str, str] | None = None,
        on_refused: OnRefused = "raise",
    ) -> Consumer:
        """Open a consumer of a queue, for use by one thread. Each row goes to one consumer, and is done when it is acknowledged.

        Args:
            table: Name of a table of kind="queue".
            format: "torch" tensors or "numpy" arrays, on the CPU, without a copy.
            timeout: Seconds that `next` may wait; None without limit.
            partial: What to do with rollouts that are shorter than rollout_length: "deliver" or "drop" them.
            transform: {field: transform or tuple of them}, as for `loader`: conduit.scale, cast, clip, one_hot, normalize. The transforms of
                an observation also apply to `bootstrap` and `finals`. Transformed fields lie in the claim's own memory; others stay views.
                With normalize(update=True), a claim enters the statistics when it is acknowledged.
            batch_transforms: Applied to each claim as a batch of one rollout (`Claim.batch`): conduit.gae, vtrace,
                returns_to_go, normalize_advantages, apply. The columns that they add are in the claim, without the batch axis.
            rename: {field, or parent of fields: name in claims}, for a field with the name of a column that a batch or a batch
                transform adds, such as {"mask": "action_mask"}.
            on_refused: What to do with a claim that has a row which a transform refuses: "raise" FieldError and give the claim back, to
                be delivered again; or "drop" it: acknowledge it undelivered, warn once, and count it in `stats.refused`.

        Raises:
            ConfigError: Bad options, or the table is not a queue.
        """
        view = self._view(table)
        if view.layout.table.kind != "queue":
            raise ConfigError(
                f"Expected a table of kind='queue' for a consumer, {table!r} is one of kind={view.layout.table.kind!r}: use "
                f"client.loader({table!r}, batch_size=...)"
            )
        consumer = Consumer(
            view,
            format=format,
            timeout=timeout,
            partial=partial,
            transform=transform,
            batch_transforms=batch_transforms,
            rename=rename,
            on_refused=on_refused,
        )
        self._consumers.add(consumer)
        self._participants.play("consumer")
        return consumer

    def policy(self, name: str = "policy") -> PolicySlot:
        """The weights slot of this name; one object per client."""
        self._check_open()
        layouts = self._segment.layout.policies
        if name not in layouts:
            raise ConfigError(
                f"Expected a policy of engine {self.name!r}, declared with Engine.create(..., policies={{name: state_dict}}), got "
                f"{name!r}{hint(name, layouts)}"
            )
        if name not in self._slots:
            slot = PolicySlot(self._segment, layouts[name], list(layouts).index(name), self._participants)
            self._slots.setdefault(name, slot)  # another thread may have been first
        return self._slots[name]

    def recover(self) -> int:
        """Recover the pages and leases of dead processes now; returns the number of pages.

        Writers that look for a page, and processes that wait, do this by themselves.
        """
        self._check_open()
        return self._participants.recover_dead()

    def checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 2,
        extra: Mapping[str, bytes] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Path:
        """Write a checkpoint of the whole engine while all processes go on; none is paused.

        It holds rows, streams, priorities, limiters' counts, statistics, weights and named loaders; docs/checkpoints.md says how
        to read it.

        Args:
            path: Folder of numbered checkpoints; created if it does not exist.
            keep: Number of checkpoints to keep in it, this one included; older ones are removed once this one is safe.
            extra: The caller's own bytes, by name, such as a learner's state. They are stored with this checkpoint, completely or not at
                all; `Engine.restored.extra` returns them.
            progress: This thread calls it with the bytes done and the total bytes.

        Returns:
            The checkpoint's own folder, `path/0000000001` and so on.

        Raises:
            CheckpointError: The folder cannot be written.
            NoSpace: The disk is full; earlier checkpoints are as they were.
            Busy: Another process is making one in this folder.
            ConfigError: Bad options.
            Closed: The client or engine has closed.
        """
        from conduit.store.checkpoint.manifest import as_path
        from conduit.store.checkpoint.save import save  # most processes make no checkpoints

        self._check_open()
        return save(
            self._segment,
            self._views,
            as_path(path),
            keep,
            {} if extra is None else extra,
            sys.modules["conduit"].__version__,
            progress,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        return self._again, (self.name,)

    def close(self) -> None:
        """Close this client's writers and detach; idempotent. Batches that are held stay valid."""
        if self._left:
            return
        # an interrupt may end the calls below; then `close` is called again
        self._closed = True
        if self._watch is not None:
            self._watch.end()
        if not self._participants.forked:
            for writer in list(self._writers):
                writer.close()
            for consumer in list(self._consumers):
                consumer.close()
            for slot in self._slots.values():
                slot.close()
            self._before_leaving()
            self._participants.leave()
            self._segment.release_locks()
        for view in self._views.values():
            view.participants = None
        self._left = True

    def _before_leaving(self) -> None:
        """Hook for the owner: called while it still has its seat."""

    @never_raises
    def __repr__(self) -> str:
        state = "closed" if self._closed else state_in(self._segment, self._participants)
        parts = [f"{name} {filling_of(view)}" for name, view in self._views.items()]
        parts += [f"policy {name} version {slot.version}" for name, slot in self._slots.items()]
        return f"{type(self).__name__}({self.name!r}, {state}: {', '.join(parts)})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
