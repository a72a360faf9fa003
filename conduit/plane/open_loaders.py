"""The client's calls that open loaders: `loader` for one table, `mixed_loader` for several, `dataset` for torch's DataLoader.

This module chooses the kind of loader, and each loader checks its own options. A named loader takes its name before it opens, and
gives the name back if it cannot open.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack, overload

from conduit.arrays import import_torch
from conduit.contracts.device import Device
from conduit.errors import ConfigError
from conduit.kernels.spec.batch_transforms import BatchTransform
from conduit.kernels.spec.ragged import Layout
from conduit.kernels.spec.transforms import Pipeline
from conduit.kernels.spec.windows import Window
from conduit.numbers import whole
from conduit.plane.deliver.batch import Format
from conduit.plane.deliver.buffers import OnBusy
from conduit.plane.deliver.epochs import EpochLoader
from conduit.plane.deliver.loader import Loader
from conduit.plane.deliver.mixed import Counts, MixedLoader
from conduit.sampling.prioritized import Prioritized
from conduit.sampling.shuffled import Shuffled
from conduit.store.segment.participants import Participants
from conduit.store.segment.segment import Segment
from conduit.store.tables.loader_cursors import NamedLoader, take_name
from conduit.store.tables.policy_weights import PolicySlot
from conduit.store.tables.view import TableView

if TYPE_CHECKING:
    from conduit.plane.deliver.dataset import Dataset


def _device_loader(device: str | Device, pool: str | int | None) -> Callable[..., Loader]:
    """The constructor of loaders on a device; torch and Triton are first imported here."""
    from conduit.plane.device.cuda import CudaDevice
    from conduit.plane.device.loader import DeviceLoader

    if not isinstance(device, str | Device):
        raise ConfigError(f"Expected device 'cpu', 'cuda' or 'cuda:0' and so on, got {device!r}")
    place = CudaDevice(device) if isinstance(device, str) else device
    return functools.partial(DeviceLoader, device=place, pool=pool)


def _opener(sampling: object, device: str | Device, pool: str | int | None) -> Callable[..., Loader]:
    """The constructor of the loader that these options need."""
    if device != "cpu":
        if isinstance(sampling, Shuffled):
            raise ConfigError(f"Expected sampling=conduit.Shuffled(...) with device='cpu', got {device!r}")
        return _device_loader(device, pool)
    if pool is not None:
        raise ConfigError(f"Expected pool only with a device such as 'cuda', got {pool!r} with device='cpu'")
    return EpochLoader if isinstance(sampling, Shuffled) else Loader


class _LoaderOptions(TypedDict, total=False):
    """The options of `Client.loader` except `sampling`, which decides the loader's type; for type checkers."""

    batch_size: Required[int]
    window: Window | None
    fields: Iterable[str] | None
    rename: Mapping[str, str] | None
    ragged: Layout | Mapping[str, Layout]
    transform: Mapping[str, Pipeline] | None
    batch_transforms: Iterable[BatchTransform]
    seed: int | None
    name: str | None
    shard: tuple[int, int] | None
    min_rows: int | None
    max_staleness: int | None
    policy: PolicySlot | None
    format: Format
    buffers: int
    on_busy: OnBusy
    timeout: float | None
    device: str | Device
    pool: str | int | None


class OpensLoaders(ABC):
    """The part of a client that opens loaders."""

    _segment: Segment
    _participants: Participants
    _again: Callable[[str], OpensLoaders]

    @property
    @abstractmethod
    def name(self) -> str:
        """Engine name."""

    @abstractmethod
    def _view(self, table: str) -> TableView:
        """A table as this process maps it; refuses an unknown name, and a client that has closed."""

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
        fields: Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        ragged: Layout | Mapping[str, Layout] = "pad",
        transform: Mapping[str, Pipeline] | None = None,
        batch_transforms: Iterable[BatchTransform] = (),
        sampling: Prioritized | Shuffled | None = None,
        seed: int | None = None,
        name: str | None = None,
        shard: tuple[int, int] | None = None,
        min_rows: int | None = None,
        max_staleness: int | None = None,
        policy: PolicySlot | None = None,
        format: Format = "torch",  # noqa: A002 - the natural word in a call
        buffers: int = 3,
        on_busy: OnBusy = "allocate",
        timeout: float | None = 30.0,
        device: str | Device = "cpu",
        pool: str | int | None = None,
    ) -> Loader:
        """Open a loader, for use by one thread. It delivers batches of windows around rows that it draws uniformly or by priority.

        Args:
            table: Table name.

            What a batch holds.

            batch_size: Samples per batch.
            window: What a sample is built from: Transition (default, 1 step), Sequence, Episode or Rollout; the table must
                have been created for windows as wide as this one.
            fields: Outputs to deliver, default all: fields, next_<observation>, terminated, truncated, and the window's own columns.
            rename: {field, or parent of fields: name in the batch}, for a field with the name of a column that a window,
                the sampling or a batch transform adds, such as {"discount": "env_discount"}. `fields` and batch_transforms use the
                new names, `transform` and `ragged` those of the schema.
            ragged: The layout of ragged fields, for all or {field: ...}. "pad": <name> [B, max_length, ...] with zeros behind each
                value, <name>_mask bool [B, max_length], <name>_lengths int64 [B]. "pack": <name> [total, ...], one value
                behind the other, <name>_cu_seqlens int32 [B + 1], <name>_position_ids int32 [total].
            transform: {field: transform or tuple of them}: conduit.scale, cast, clip, one_hot, normalize, random_shift. Those
                of an observation also apply to the next observation, those of a reward to every reward that a return sums up.
            batch_transforms: Applied to the whole batch, in this order: any of conduit.gae, vtrace, returns_to_go,
                normalize_advantages, hindsight, apply.

            Which rows are drawn, and when.

            sampling: conduit.Prioritized(...) draws by priority; conduit.Shuffled(...) gives an `EpochLoader`, which delivers each
                window once per epoch; None draws uniformly.
            seed: The same committed rows and seed give the same batches. None: 0, or the seed that a named loader began with.
            name: The engine and its checkpoints keep the number of the next batch under this name: the next loader of the
                name, in any process, continues there.
            shard: (rank, world): of the batches that one loader of this seed would deliver, this one delivers every world-th,
                from the rank-th on; None for all. So the ranks of a data-parallel learner draw by different counters of one generator.
            min_rows: Rows that the table must have before the first batch; default batch_size, or 1 in a table with a limiter,
                where min_size takes its place.
            max_staleness: Skip rows whose policy version is more than this many versions behind the slot's; needs `policy`.
            policy: The slot whose versions count.

            How batches are delivered.

            format: "torch" tensors or "numpy" arrays, on the CPU; both speak DLPack.
            buffers: Number of batches whose memory is reused, at least 2; a loop that keeps no batch needs no more than 3.
            on_busy: What to do when all buffers are in use: "allocate" memory for this batch alone (`stats.allocated` counts such
                batches, and one warning says what holds the buffers), raise the "error" BuffersBusy, or "wait" for another thread to
                let go. Batches on a device have memory of their own anyway.
            timeout: Seconds that `next` may wait; None without limit.

            Where they are made.

            device: Where batches are made: "cpu", "cuda", "cuda:1". The rows are those that a loader on the CPU delivers
                (docs/kernels.md). Transforms work as on the CPU, except hindsight, which is refused.
            pool: Device memory for a mirror of the table's newest pages, such as "8 GiB" or bytes; None for no mirror: wide rows are
                then read from registered host memory, and the host makes batches of narrow rows, which are copied.

        Raises:
            ConfigError: Bad options; names the offending one.
            MissingDevice: There is no such device.
            CapacityError: The pool is smaller than a page, or larger than the device's free memory.
            Busy: A living process has a loader of this name open.
        """
        view = self._view(table)
        if view.layout.table.kind == "queue":
            raise ConfigError(
                f"Expected a replay table for a loader, {table!r} is a queue, whose rows are delivered once: use "
                f"client.consumer({table!r})"
            )
        make = _opener(sampling, device, pool)
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

    def mixed_loader(
        self,
        tables: Mapping[str, float],
        *,
        batch_size: int,
        counts: Counts = "exact",
        window: Window | None = None,
        fields: Iterable[str] | None = None,
        rename: Mapping[str, str] | Mapping[str, Mapping[str, str]] | None = None,
        ragged: Layout | Mapping[str, Layout] = "pad",
        transform: Mapping[str, Pipeline] | None = None,
        batch_transforms: Iterable[BatchTransform] = (),
        sampling: Prioritized | Mapping[str, Prioritized | None] | None = None,
        seed: int | None = None,
        name: str | None = None,
        min_rows: int | Mapping[str, int] | None = None,
        max_staleness: int | None = None,
        policy: PolicySlot | None = None,
        format: Format = "torch",  # noqa: A002 - the natural word in a call
        buffers: int = 3,
        on_busy: OnBusy = "allocate",
        timeout: float | None = 30.0,
    ) -> MixedLoader:
        """Open a loader whose batches come from several tables, for use by one thread.

        Args:
            tables: {table: weight}, such as {"replay": 0.75, "demos": 0.25}; the rows of one table lie side by side, in this order.
            batch_size: Rows of all tables together.
            counts: "exact": a table's share of all rows so far is exact to within a row, also if it does not divide the batch.
                "random": each row's table is drawn.

            What a batch holds, the same for every table.

            window: As for `loader`.
            fields: As for `loader`; all tables must have these outputs.
            rename: As for `loader`, for all tables or {table: {field: name in the batch}}.
            ragged: As for `loader`.
            transform: As for `loader`; each table has its own statistics.
            batch_transforms: Applied to the whole batch, as for `loader`.

            Which rows are drawn, and when.

            sampling: conduit.Prioritized(...) for all tables or {table: ...}; None draws uniformly. Weights are computed for
                each table by itself; rows of a uniformly drawn table beside a prioritized one have weight 1.
            seed: As for `loader`.
            name: As for `loader`; it is kept with the first of the tables.
            min_rows: Rows that a table must have before the first batch, for all or {table: ...}; default its share of a batch.
            max_staleness: As for `loader`, for every table.
            policy: As for `loader`.

            How batches are delivered.

            format: As for `loader`.
            buffers: As for `loader`.
            on_busy: As for `loader`.
            timeout: As for `loader`.

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

    def dataset(self, table: str, *, seed: int | None = None, **options: Any) -> Dataset:
        """The table as a torch.utils.data.IterableDataset of batches, for `DataLoader(dataset, batch_size=None, num_workers=2)`.

        It holds names and options, not this client: a process that iterates it, such as a worker of a DataLoader, attaches by the
        engine's name and opens a loader. The workers divide the batches of one loader among them, and a DataLoader takes from them in
        turn. So while nobody writes, the batches come in that loader's order, for any number of workers. Each batch is a copy; a
        loader in the learner's process saves that.

        Args:
            table: Table name.
            seed: As for `loader`: every iteration then begins with the same draws, or is the same epoch (conduit.Shuffled). None
                takes a new seed from torch for each iteration (`torch.manual_seed` repeats it).
            **options: As for `loader`, except name and device.

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
        # bad options are refused here and not in a worker
        self.loader(table, seed=seed, **options).close()
        slot, shard = options.pop("policy", None), options.pop("shard", None)
        policy = None if slot is None else slot.name
        return Dataset(self.name, self._again, table, seed=seed, shard=shard, policy=policy, options=options)

    @contextlib.contextmanager
    def _named(self, name: str | None, view: TableView, seed: int | None) -> Generator[tuple[NamedLoader | None, int]]:
        """Take a loader's name, if it has one; yields the name and the seed. If the loader cannot be opened, the name is given back."""
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
