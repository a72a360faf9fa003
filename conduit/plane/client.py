"""A client is a process's attachment to an engine: what it opens (writers, loaders, consumers) and what it asks of tables.

Closing it closes its writers and consumers and gives its seat back; batches that were handed out stay valid.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, Self, TypedDict, Unpack, overload

from conduit.arrays import import_torch
from conduit.contracts.device import Device
from conduit.contracts.ingestion import Ingestion
from conduit.contracts.placement import Placement, Pool
from conduit.errors import Closed, ConfigError, SchemaMismatch
from conduit.kernels.spec.batch_transforms import BatchTransform
from conduit.kernels.spec.ragged import Layout
from conduit.kernels.spec.transforms import Pipeline
from conduit.kernels.spec.windows import Window
from conduit.native.jit import entry
from conduit.nesting import hint
from conduit.numbers import whole
from conduit.plane.deliver.batch import Format
from conduit.plane.deliver.busy import OnBusy
from conduit.plane.deliver.consumer import Consumer, OnRefused, Partial
from conduit.plane.deliver.episodes import Episodes, read_episodes
from conduit.plane.deliver.epochs import EpochLoader
from conduit.plane.deliver.loader import Loader
from conduit.plane.deliver.mixed import Counts, MixedLoader
from conduit.plane.deliver.scan import Scan
from conduit.plane.ingest.autoreset import Autoreset
from conduit.plane.ingest.placement import HostPlacement
from conduit.plane.ingest.policy import CommitPerStep
from conduit.plane.ingest.stream import OnFull
from conduit.plane.ingest.writer import Writer, writer_type
from conduit.plane.table import TableHandle
from conduit.sampling.prioritized import Prioritized
from conduit.sampling.shuffled import Shuffled
from conduit.schema import Schema
from conduit.store.pages import deletion
from conduit.store.segment.owner_watch import OnOwnerExit, Watch
from conduit.store.segment.participants import Participants
from conduit.store.segment.segment import Segment
from conduit.store.tables.appearance import filling_of, never_raises, state_in
from conduit.store.tables.limit_checks import RateLimiter
from conduit.store.tables.loader_cursors import NamedLoader, take_name
from conduit.store.tables.policy_weights import PolicySlot
from conduit.store.tables.statistics import Statistics
from conduit.store.tables.view import TableView

if TYPE_CHECKING:
    from conduit.plane.deliver.dataset import Dataset


def _device_loader(device: str | Device, pool: str | int | None) -> Callable[..., Loader]:
    """What opens loaders on a device; torch and Triton are first imported here."""
    from conduit.plane.device.cuda import CudaDevice
    from conduit.plane.device.loader import DeviceLoader

    if not isinstance(device, str | Device):
        raise ConfigError(f"Expected device 'cpu', 'cuda' or 'cuda:0' and so on, got {device!r}")
    place = CudaDevice(device) if isinstance(device, str) else device
    return functools.partial(DeviceLoader, device=place, pool=pool)


class _LoaderOptions(TypedDict, total=False):
    """The options of `Client.loader` but for `sampling`, on which the type of the loader depends; for type checkers."""

    batch_size: Required[int]
    window: Window | None
    transform: Mapping[str, Pipeline] | None
    batch_transforms: Iterable[BatchTransform]
    max_staleness: int | None
    policy: PolicySlot | None
    seed: int | None
    name: str | None
    format: Format
    buffers: int
    on_busy: OnBusy
    timeout: float | None
    min_rows: int | None
    fields: Iterable[str] | None
    ragged: Layout | Mapping[str, Layout]
    rename: Mapping[str, str] | None
    device: str | Device
    pool: str | int | None
    shard: tuple[int, int] | None


class Client:
    """A process's attachment to an engine. Use `conduit.attach`; it is a context manager.

    It can be pickled, to a process that is spawned, a pool's worker or an actor of Ray: where it is unpickled it attaches again by the
    engine's name, with a seat of its own.
    """

    def __init__(
        self, segment: Segment, again: Callable[[str], Client], on_owner_exit: OnOwnerExit | None = None
    ) -> None:
        self._segment = segment
        # attaches by the engine's name, as this client was attached: what is sent to other processes instead of it
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
        # an owner has nobody to look out for
        self._watch = None if on_owner_exit is None else Watch(segment, self._participants, on_owner_exit)

    @property
    def name(self) -> str:
        """Engine name."""
        return self._segment.name

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the engine's tables."""
        return tuple(self._views)

    def schema(self, table: str) -> Schema:
        """Schema of a table."""
        return self._view(table).layout.schema

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"Expected an attached client of engine {self.name!r}, this one was closed")
        self._participants.check()

    def _view(self, table: str) -> TableView:
        self._check_open()
        if table not in self._views:
            raise ConfigError(f"Expected a table of engine {self.name!r}, got {table!r}{hint(table, self._views)}")
        return self._views[table]

    def table(self, name: str) -> TableHandle:
        """One table, to be asked: how many rows it holds, how many a loader could draw now, how many bytes it takes."""
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
            num_envs: Environments per call, with a leading axis; None for one environment without it.
            autoreset: As the environments reset: "next_step", "same_step" or "disabled", or a member of
                gymnasium.vector.AutoresetMode, such as envs.metadata["autoreset_mode"]. It has to be said with num_envs; without,
                the default is "disabled".
            policy: Rows carry the version that this slot object last polled.
            schema: The schema that the caller expects; checked against the table's.
            timeout: Seconds that a write may wait for a page; None without limit.
            on_full: "wait", or "raise" Busy when every page is being written or leased.
            keep_final: With "same_step" and "disabled": insist on the final observation of ended episodes. Without one, a
                terminated row is delivered with its own observation as the next one, and a truncated row is not drawn.
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

    @overload
    def loader(self, table: str, *, sampling: Shuffled, **options: Unpack[_LoaderOptions]) -> EpochLoader: ...
    @overload
    def loader(
        self, table: str, *, sampling: Prioritized | None = None, **options: Unpack[_LoaderOptions]
    ) -> Loader: ...

    def loader(
        self,
        table: str,
        *,
        batch_size: int,
        window: Window | None = None,
        sampling: Prioritized | Shuffled | None = None,
        transform: Mapping[str, Pipeline] | None = None,
        batch_transforms: Iterable[BatchTransform] = (),
        max_staleness: int | None = None,
        policy: PolicySlot | None = None,
        seed: int | None = None,
        name: str | None = None,
        format: Format = "torch",  # noqa: A002 - the natural word in a call
        buffers: int = 3,
        on_busy: OnBusy = "allocate",
        timeout: float | None = 30.0,
        min_rows: int | None = None,
        fields: Iterable[str] | None = None,
        ragged: Layout | Mapping[str, Layout] = "pad",
        rename: Mapping[str, str] | None = None,
        device: str | Device = "cpu",
        pool: str | int | None = None,
        shard: tuple[int, int] | None = None,
    ) -> Loader:
        """Open a loader, for use by one thread: batches of windows around rows that are drawn uniformly or by priority.

        Args:
            table: Table name.
            batch_size: Samples per batch.
            window: What a sample is built from: Transition (default, 1 step), Sequence, Episode or Rollout; the table must
                have been created for windows as wide.
            sampling: conduit.Prioritized(...) to draw by priority; conduit.Shuffled(...) for epochs in which each window comes once,
                in an `EpochLoader`; None draws uniformly.
            max_staleness: Skip rows whose policy version is more than this many versions behind the slot's; needs `policy`.
            policy: The slot that versions count in.
            transform: {field: step or tuple of steps}, of conduit.scale, cast, clip, one_hot, normalize, random_shift; those
                for an observation also apply to the next one, those for a reward to every reward that a return sums up.
            batch_transforms: Steps on the whole batch, in this order: conduit.gae, vtrace, returns_to_go,
                normalize_advantages, hindsight, apply.
            seed: The same committed rows and seed give the same batches; None for 0, or for what a named loader began with.
            name: Keep under this name which batch comes next, in the engine and in its checkpoints: the next loader of the
                name, in whichever process, goes on there.
            format: "torch" tensors or "numpy" arrays, on the CPU; both speak DLPack.
            buffers: Batches whose memory is used again, at least 2; a loop that keeps none needs no more than 3.
            on_busy: With all buffers in use: "allocate" memory for this batch alone (`stats.allocated` counts them, one
                warning says who holds the others), raise the "error" BuffersBusy, or "wait" for another thread to let go. Batches
                on a device have memory of their own anyway.
            timeout: Seconds that `next` may wait; None without limit.
            min_rows: Rows that must be there before the first batch; default batch_size, or 1 in a table with a limiter,
                whose min_size it is then.
            fields: Outputs to deliver, default all: fields, next_<observation>, terminated, truncated, and what the window makes.
            ragged: How ragged fields come, for all or {field: ...}. "pad": <name> [B, max_length, ...] with zeros behind each
                value, <name>_mask bool [B, max_length], <name>_lengths int64 [B]. "pack": <name> [total, ...], one value
                behind the other, <name>_cu_seqlens int32 [B + 1], <name>_position_ids int32 [total].
            rename: {field, or parent of fields: name in the batch}, for a field whose name is also that of something that a window,
                the sampling or a step adds, such as {"discount": "env_discount"}. `fields` and batch_transforms have the new names,
                `transform` and `ragged` those of the schema.
            device: "cpu", or where batches are wanted: "cuda", "cuda:1". The rows are those that a loader on the CPU delivers
                (docs/kernels.md). Transforms work as on the CPU, but for hindsight, which is
                refused.
            pool: Device memory for a mirror of the table's newest pages, such as "8 GiB" or bytes; None for none: wide rows are
                then read from registered host memory, batches of narrow ones are made by the host and copied.
            shard: (rank, world): of the batches that one loader of this seed would deliver, this one delivers every world-th,
                from the rank-th on; None for all. Ranks of a data-parallel learner so draw by different counters of one generator.

        Raises:
            ConfigError: Bad options; names the offending one.
            MissingDevice: There is no such device.
            CapacityError: A pool smaller than a page, or larger than the device's free memory.
            Busy: A living process has a loader of this name open.
        """
        view = self._view(table)
        if view.layout.table.kind == "queue":
            raise ConfigError(
                f"Expected a replay table for a loader, {table!r} is a queue, whose rows are delivered once: use "
                f"client.consumer({table!r})"
            )
        make: Callable[..., Loader] = Loader
        if isinstance(sampling, Shuffled):
            make = EpochLoader
            if device != "cpu":
                raise ConfigError(f"Expected sampling=conduit.Shuffled(...) with device='cpu', got {device!r}")
        if device != "cpu":
            make = _device_loader(device, pool)
        elif pool is not None:
            raise ConfigError(f"Expected pool only with a device such as 'cuda', got {pool!r} with device='cpu'")
        with self._named(name, view, seed) as (place, start):
            if place is not None and place.stock and not isinstance(sampling, Shuffled):
                raise ConfigError(
                    f"Expected sampling=conduit.Shuffled(...) for loader {name!r}, which began in epochs, got {sampling!r}"
                )
            return make(
                view,
                batch_size=batch_size,
                window=window,
                sampling=sampling,
                transform=transform,
                batch_transforms=batch_transforms,
                max_staleness=max_staleness,
                policy=policy,
                seed=start,
                place=place,
                format=format,
                buffers=buffers,
                on_busy=on_busy,
                timeout=timeout,
                min_rows=min_rows,
                fields=fields,
                ragged=ragged,
                rename=rename,
                shard=shard,
            )

    def dataset(self, table: str, *, seed: int | None = None, **options: Any) -> Dataset:
        """The table as a torch.utils.data.IterableDataset of batches, for `DataLoader(dataset, batch_size=None, num_workers=2)`.

        It holds names and options, not this client: whoever iterates it, a worker of a DataLoader too, however it is started, attaches
        by the engine's name and opens a loader. Workers part the batches of one loader among them, and a DataLoader takes them in
        turn, so while the table rests they come in that loader's order, however many workers there are. Each batch is a copy; a
        loader in the learner's process spares that.

        Args:
            table: Table name.
            seed: As for `loader`: every iteration then begins with the same draws, or is the same epoch (conduit.Shuffled). None
                takes torch's (`torch.manual_seed` repeats it), another one for each iteration.
            **options: As for `loader`, but for name and device.

        Raises:
            ConfigError: Bad options; names the offending one.
            MissingExtra: torch is not installed.
        """
        import_torch("Client.dataset", "iterate a client.loader(...)")
        from conduit.plane.deliver.dataset import Dataset  # imports torch, which most processes do without

        for option, remedy in (
            ("name", "the workers' loaders cannot all have it"),
            ("device", "move its batches by batch.to(device)"),
            ("pool", "move its batches by batch.to(device)"),
        ):
            if option in options and not (option == "device" and options[option] == "cpu"):
                raise ConfigError(
                    f"Expected no {option} for a dataset, got {options[option]!r}: {remedy}, or use client.loader"
                )
        for option in ("batch_transforms", "fields"):
            if isinstance(options.get(option), Iterator):
                options[option] = tuple(options[option])
        # what is wrong with the options is said here and not in a worker
        self.loader(table, seed=seed, **options).close()
        slot, shard = options.pop("policy", None), options.pop("shard", None)
        policy = None if slot is None else slot.name
        return Dataset(self.name, self._again, table, seed=seed, shard=shard, policy=policy, options=options)

    @contextlib.contextmanager
    def _named(self, name: str | None, view: TableView, seed: int | None) -> Iterator[tuple[NamedLoader | None, int]]:
        """A loader's name, or None, and the seed that it begins with; the name is let go if the loader cannot be opened."""
        start = whole(seed)
        if start is None and seed is not None:
            raise ConfigError(f"Expected an int as seed, got {seed!r}")
        if name is None:
            yield None, start or 0
            self._participants.play("loader")
            return
        place = take_name(self._segment, view.check_open(), name, view.layout.name, start)
        try:
            yield place, place.seed
        except BaseException:
            place.release()
            raise
        self._participants.play("loader")

    def mix(
        self,
        tables: Mapping[str, float],
        *,
        batch_size: int,
        window: Window | None = None,
        sampling: Prioritized | Mapping[str, Prioritized | None] | None = None,
        transform: Mapping[str, Pipeline] | None = None,
        batch_transforms: Iterable[BatchTransform] = (),
        max_staleness: int | None = None,
        policy: PolicySlot | None = None,
        seed: int | None = None,
        name: str | None = None,
        format: Format = "torch",  # noqa: A002 - the natural word in a call
        buffers: int = 3,
        on_busy: OnBusy = "allocate",
        timeout: float | None = 30.0,
        min_rows: int | Mapping[str, int] | None = None,
        fields: Iterable[str] | None = None,
        ragged: Layout | Mapping[str, Layout] = "pad",
        rename: Mapping[str, str] | Mapping[str, Mapping[str, str]] | None = None,
        counts: Counts = "exact",
    ) -> MixedLoader:
        """Open a loader whose batches come from several tables, for use by one thread.

        Args:
            tables: {table: weight}, such as {"replay": 0.75, "demos": 0.25}; a table's rows lie side by side, in this order.
            sampling: conduit.Prioritized(...) for all tables or {table: ...}; None draws uniformly. Weights are worked out for
                each table by itself; rows of a uniformly drawn table beside a prioritized one have weight 1.
            min_rows: Rows that must be in a table before the first batch, for all or {table: ...}; default its share of a batch.
            counts: "exact": a table's share of all rows so far is exact to within a row, whatever its share of one batch.
                "random": each row's table is drawn.
            batch_size: Rows of all tables together.
            fields: Outputs to deliver, as for `loader`, and so is all that follows; they must be the same for all tables.
            window: Of every table.
            transform: Of every table; statistics are each table's own.
            batch_transforms: Steps on the whole batch.
            max_staleness: Of every table.
            policy: As for `loader`.
            seed: As for `loader`.
            name: As for `loader`; it is kept with the first of the tables.
            format: As for `loader`.
            buffers: As for `loader`.
            on_busy: As for `loader`.
            timeout: As for `loader`.
            ragged: As for `loader`.
            rename: As for `loader`, for all tables or {table: {field: name in the batch}}.

        Raises:
            ConfigError: Bad options, or outputs that differ; names the first difference.
            Busy: A living process has a loader of this name open.
        """
        if not isinstance(tables, Mapping) or not tables:
            raise ConfigError(f"Expected {{table: weight}} of at least one table, got {tables!r}")
        views = {table: self._view(table) for table in tables}
        with self._named(name, next(iter(views.values())), seed) as (place, start):
            return MixedLoader(
                views,
                tables,
                batch_size=batch_size,
                window=window,
                sampling=sampling,
                transform=transform,
                batch_transforms=tuple(batch_transforms)
                if isinstance(batch_transforms, Iterable)
                else batch_transforms,
                max_staleness=max_staleness,
                policy=policy,
                seed=start,
                place=place,
                format=format,
                buffers=buffers,
                on_busy=on_busy,
                timeout=timeout,
                min_rows=min_rows,
                fields=tuple(fields) if isinstance(fields, Iterable) and not isinstance(fields, str) else fields,
                ragged=ragged,
                rename=rename,
                counts=counts,
            )

    def scan(self, table: str) -> Scan:
        """Every step that a table has now, once, environment by environment in the order of time; iterating yields columns."""
        return Scan(self._view(table))

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
        """Open a consumer of a queue, for use by one thread: each row is delivered to one consumer, and is done when that says so.

        Args:
            table: Name of a table of kind="queue".
            format: "torch" tensors or "numpy" arrays, on the CPU, without a copy.
            timeout: Seconds that `next` may wait; None without limit.
            partial: What becomes of rollouts that are shorter than rollout_length: "deliver" them, or "drop" them.
            transform: As for `loader`, of conduit.scale, cast, clip, one_hot, normalize: {field: step or tuple of steps}. Those for an
                observation also apply to `bootstrap` and `finals`. What they make is the claim's own, other fields stay views.
                normalize(update=True) counts a claim when it is acknowledged.
            batch_transforms: Steps on each claim as a batch of one rollout (`Claim.batch`): conduit.gae, vtrace,
                returns_to_go, normalize_advantages, apply. What they add is in the claim, without the batch axis.
            rename: {field, or parent of fields: name in claims}, for a field whose name is also that of something that a batch
                or a step adds, such as {"mask": "action_mask"}.
            on_refused: What becomes of a claim with a row that a transform refuses: "raise" FieldError, and it is given back and comes
                again; or "drop" it, acknowledged unseen, with one warning and counted in `stats.refused`.

        Raises:
            ConfigError: Bad options, or the table is no queue.
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

    def episodes(self, table: str, *, since: Episodes | None = None, last: int | None = None) -> Episodes:
        """Returns and lengths of episodes that ended in a table, whoever wrote them, in replay tables and queues alike.

        A table keeps the newest 1,024; of them, those of an episode that ended before its step was published are there at once.

        Args:
            table: Table name.
            since: What an earlier call returned: only episodes that ended after it, each once. None for all that are there.
            last: At most so many, the newest.

        Raises:
            ConfigError: Bad options.
        """
        view = self._view(table)
        view.check_open()
        return read_episodes(view, since, last)

    def statistics(self, table: str) -> Statistics:
        """The running statistics of a table's fields, shared by all processes; see `Table.statistics`, `conduit.normalize`."""
        return Statistics(self._view(table))

    def limiter(self, table: str) -> RateLimiter:
        """The limiter of a table, shared by all processes: its counts, what it allows and why not, and other limits live.

        Raises:
            ConfigError: The table has none.
        """
        return RateLimiter(self._view(table))

    def delete(self, table: str, ids: Any) -> int:
        """Delete rows: from now on no window begins at them. They still are the context of other rows' windows.

        A rollout is held to begin at the row of its first environment. Rows that have been overwritten or deleted before are
        left out.

        Args:
            table: Table name.
            ids: Integers of any shape, from `Batch.ids`.

        Returns:
            How many rows were deleted.

        Raises:
            FieldError: These are no integers.
            Frozen: The table is frozen.
            BufferError: This client holds too many leases.
        """
        view = self._removable(table)
        return view.delete(ids)

    def reset(self, table: str) -> None:
        """Let all rows of a table go, at once and for everybody; its counts, limits and priorities' scale stay.

        Writers go on: each begins a new episode in every environment with its next step. A step or rollout that is being
        written at this moment goes with the rest. Batches that were handed out stay valid.

        Raises:
            Frozen: The table is frozen.
        """
        view = self._removable(table)
        entry(deletion.reset)(view.address)

    def freeze(self, table: str) -> None:
        """Make a table read-only, in all processes, until `thaw`: writing, deleting and resetting raise Frozen.

        A step that another process is committing at this very moment may still come.
        """
        self._set_frozen(table, frozen=True)

    def thaw(self, table: str) -> None:
        """Let a frozen table take rows again; writers go on where they were."""
        self._set_frozen(table, frozen=False)

    def _removable(self, table: str) -> TableView:
        view = self._view(table)
        view.check_open()
        view.check_thawed()
        if view.layout.table.kind == "queue":
            raise ConfigError(f"Expected a replay table, {table!r} is a queue: its rows go when they are acknowledged")
        return view

    def _set_frozen(self, table: str, *, frozen: bool) -> None:
        view = self._view(table)
        view.check_open()
        entry(deletion.set_frozen)(view.address, frozen)

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
        """Take back pages and leases of dead participants now; returns the number of pages.

        Writers that look for a page, and anyone who waits, do this by themselves.
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
        """Write a checkpoint of the whole engine while everybody goes on; nobody is paused.

        It holds rows, streams, priorities, limiters' counts, statistics, weights and named loaders; docs/checkpoints.md says how
        to read it.

        Args:
            path: Folder of numbered checkpoints; made if it is not there.
            keep: Checkpoints to keep in it, this one included; older ones are removed once this one is safe.
            extra: Bytes of the caller's own, by name, such as a learner's state: they belong to this checkpoint or are not there at
                all. `Engine.restored.extra` has them again.
            progress: Called with bytes done and bytes in all, by this thread.

        Returns:
            The checkpoint's own folder, `path/0000000001` and so on.

        Raises:
            CheckpointError: The folder cannot be written.
            NoSpace: The disk is full; earlier checkpoints are as they were.
            Busy: Somebody else is making one in this folder.
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
        # what comes below may be interrupted, and then be called again
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
        """What an owner does while it still has its seat."""

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
