"""The default delivery: when a batch is requested, the loader's maker makes it, by one compiled call.

The maker draws, gathers, transforms and validates (conduit.plane.deliver.batch_maker); the loader waits, counts, and delivers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from conduit.clock import Deadline
from conduit.contracts.delivery import Delivery
from conduit.errors import Closed, ConfigError, DeviceError, FieldError
from conduit.forking import StaysHere
from conduit.kernels.spec.batch_transforms import BatchTransform, with_batch_transforms
from conduit.kernels.spec.make_plan import make_plan
from conduit.kernels.spec.names import shown
from conduit.kernels.spec.plan import Plan
from conduit.kernels.spec.ragged import Layout
from conduit.kernels.spec.transforms import Pipeline
from conduit.kernels.spec.windows import Window, crosses
from conduit.native.descriptors import words_at
from conduit.native.jit import entry
from conduit.numbers import MOST, whole
from conduit.plane.deliver.batch import Batch, Format, torch_wrap
from conduit.plane.deliver.batch_maker import BatchMaker
from conduit.plane.deliver.buffers import Buffer, BufferRing, OnBusy, check_on_busy
from conduit.plane.deliver.lacking import too_few_rows
from conduit.plane.deliver.shared_buffers import Share
from conduit.sampling.prioritized import WEIGHTS, Prioritized, PrioritizedSampler
from conduit.sampling.shuffled import ShuffledSampler
from conduit.sampling.uniform import Uniform
from conduit.store.format import words as w
from conduit.store.format.table_fit import check_window
from conduit.store.pages import deletion
from conduit.store.pages.row_ids import as_ids
from conduit.store.tables.appearance import filling_of, never_raises, place_of, state_of
from conduit.store.tables.limit_checks import Gate
from conduit.store.tables.loader_cursors import NamedLoader
from conduit.store.tables.policy_weights import PolicySlot
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Counts of a loader since it was opened.

    Attributes:
        batches, rows: Batches and rows delivered.
        redrawn: Rows drawn again because a writer overwrote them between draw and check.
        waited_s: Seconds spent waiting for rows or for a free buffer.
        stale: Rows refused by `max_staleness`, {age in versions: count}; 63 stands for 63 and more. A uniform loader counts a row each time
            it was drawn; a prioritized one each time it was examined, since it leaves the row out before the draw.
        allocated: Batches that got memory of their own, because every buffer was in use (on_busy="allocate").
    """

    batches: int
    rows: int
    redrawn: int
    waited_s: float
    stale: dict[int, int]
    allocated: int


class Loader(StaysHere, Delivery[Batch]):
    """Batches of windows from one table, made on the CPU when they are requested; see `Client.loader`.

    Iterating never ends by itself; it waits for rows as long as `timeout` allows.

    Attributes:
        plan: What a batch is made of.
    """

    _elsewhere = "open a loader there, client.loader(table, ...); shard=(rank, world) parts its batches"

    def __init__(
        self,
        table: TableView,
        *,
        batch_size: int,
        window: Window | None,
        sampling: Prioritized | ShuffledSampler | None,
        transform: Mapping[str, Pipeline] | None,
        batch_transforms: Iterable[BatchTransform],
        max_staleness: int | None,
        policy: PolicySlot | None,
        seed: int,
        place: NamedLoader | None = None,
        format: Format,  # noqa: A002 - the natural word in a call
        buffers: int,
        on_busy: OnBusy,
        timeout: float | None,
        min_rows: int | None,
        fields: Iterable[str] | None,
        ragged: Layout | Mapping[str, Layout],
        rename: Mapping[str, str] | None,
        shard: tuple[int, int] | None = None,
        share: Share | None = None,
        maker: Callable[..., BatchMaker] = BatchMaker,
    ) -> None:
        if format not in ("torch", "numpy"):
            raise ConfigError(f"Expected format 'torch' or 'numpy', got {format!r}")
        check_on_busy(on_busy)
        count = whole(buffers)
        if count is None or not 2 <= count <= MOST:
            raise ConfigError(f"Expected at least 2 buffers (the loop variable holds one), got {buffers!r}")
        rank, world = (0, 1) if shard is None else checked_shard(shard)
        stalest = whole(max_staleness)
        bounded = max_staleness is not None
        if bounded != (policy is not None) or (bounded and (stalest is None or stalest < 0)):
            raise ConfigError(
                f"Expected max_staleness of at least 0 versions together with policy=<the slot they count in>, "
                f"got {max_staleness!r} and {policy!r}"
            )
        self._max_staleness = stalest or 0
        self._policy = policy
        Deadline(timeout)
        self._participants = table.check_open()
        added = WEIGHTS if isinstance(sampling, Prioritized) else ()
        extra = added if share is None else share.extra
        schema = table.layout.schema

        def plan_of(size: int) -> Plan:
            plan = make_plan(schema, size, window, transform, fields, extra, ragged, rename)
            return with_batch_transforms(plan, batch_transforms)

        self.plan = plan_of(batch_size)
        batch_size = self.plan.batch_size
        check_window(table.layout.table, *self.plan.reach, crosses=crosses(self.plan.window))
        limited = table.layout.limits is not None
        self._gate = Gate(table, batch_size, self.plan.reach[1]) if limited else None
        self._is_plain = self._gate is None and self._policy is None
        # with a limiter, its min_size says how many rows there must be
        least = (1 if limited else batch_size) if min_rows is None else whole(min_rows)
        if least is None or not 1 <= least <= table.layout.rows:
            given = least if min_rows is None else min_rows
            raise ConfigError(f"Expected min_rows from 1 to the table's {table.layout.rows} rows, got {given!r}")
        self._sampler = _sampler_of(table, sampling, batch_size, seed, least)
        self._place = place
        self._sampler.batch = rank if place is None else place.batch or rank
        # the sampler's `batch`, which this loader advances
        self._number = words_at(self._sampler.batch_at, 1)
        self._world = world
        self._table = table
        self._timeout = timeout
        self._on_busy = on_busy
        self._least = least
        sampler, names, wrap = (
            self._sampler,
            shown(schema, rename),
            torch_wrap() if format == "torch" else np.ndarray.view,
        )

        def maker_of(plan: Plan) -> BatchMaker:
            return maker(table, plan, sampler, seed, schema=names, wrap=wrap)

        self._plan_of, self._maker_of = plan_of, maker_of
        beside: list[Buffer | None] = [None] * count
        if share is not None:
            beside = share.admit(table.layout.name, self.plan, count)
        self._maker = maker_of(self.plan)
        try:
            self._ring = BufferRing(self._maker.open_buffer, table, beside, on_busy)
        except BaseException:
            self._maker.close()
            raise
        self._wanted = batch_size
        self._batches = 0
        self._waited = 0.0
        self._closed = False

    def next(self, timeout: float | None = None) -> Batch:
        """The next batch.

        Args:
            timeout: Seconds to wait for rows, and with on_busy="wait" for a buffer; None takes the loader's.

        Raises:
            DataTimeout: Too few rows came, or the table's limiter did not let a batch out.
            BuffersBusy: Every buffer is still referred to, and on_busy is "error" or "wait".
            FieldError: A transform cannot take a stored value; `row_id`, `at` and `value` say which. Nothing is delivered
                or added to statistics, and the next call draws the following batch.
            Closed: The loader, client or engine has closed.
            OwnerGone: The engine's owner is gone.
        """
        if self._closed:
            raise Closed("Expected an open loader, got one that was closed")
        self._participants.check_open()
        maker = self._maker
        buffer = self._ring.take(self._timeout if timeout is None else timeout)
        number = self._number[0]
        if maker.prepares:
            maker.prepare(number)
        drawn = False
        try:
            # without a limiter or max_staleness the kernel is called directly, which saves two calls
            if not (maker.fill(buffer) if self._is_plain else self._attempt(buffer)):
                self._wait_for_rows(buffer, self._timeout if timeout is None else timeout)
            drawn = True
            batch = maker.batch(buffer, number)
            if maker.settles:
                maker.hand_out(buffer)
            if self._gate is not None:
                self._gate.deliver(self._sampler.batch_at, number + self._world)
        except BaseException as error:
            maker.give_back(buffer)
            if self._gate is not None:
                self._gate.cancel()
            own = drawn and isinstance(error, Exception) and not isinstance(error, DeviceError)
            if own or isinstance(error, FieldError):
                # go on after the batch: it would be refused every time
                self._go_on(number)
            raise
        self._batches += 1
        self._go_on(number)
        return batch

    def _go_on(self, number: int) -> None:
        """Set the number of the next batch, after batch `number`."""
        self._number[0] = following = number + self._world
        if self._place is not None:
            self._place.batch = following

    def _attempt(self, buffer: Buffer) -> bool:
        """Reserve a batch in the table's limiter and draw it; False if the limiter refuses or there is nothing to draw."""
        gate = self._gate
        if gate is None:
            return self._fill(buffer)
        gate.cancel()  # an interrupted call may have left a reservation
        if not gate.reserve(self._wanted):
            return False
        filled = self._fill(buffer)
        if not filled:
            gate.cancel()
        return filled

    def _fill(self, buffer: Buffer) -> bool:
        """Draw a batch; each attempt counts staleness from the policy version that is published then."""
        if self._policy is not None:
            current = min(self._policy.version, w.LAST_VERSION)
            self._maker.bound(buffer, current, current - self._max_staleness)
        return self._maker.fill(buffer)

    def _wait_for_rows(self, buffer: Buffer, timeout: float | None) -> None:
        begun = time.monotonic()
        filled = self._table.wait(lambda: self._attempt(buffer) or None, for_space=False, deadline=Deadline(timeout))
        self._waited += time.monotonic() - begun
        if filled is None:
            blocked = None if self._gate is None else self._gate.explain(self._wanted)
            stale = None if self._policy is None else (self._max_staleness, self.stats.stale)
            found = self._sampler.offered
            raise too_few_rows(
                self._table, self.plan.window, (found, self._least), self._wanted, timeout, blocked, stale
            )

    @property
    def sampler(self) -> Uniform | PrioritizedSampler:
        """The sampler that draws the rows; `sampler.batch` is the number of the next batch, and setting it repeats or skips batches."""
        return self._sampler

    @property
    def beta(self) -> float:
        """Exponent of the importance weights, at least 0; set it to anneal them, from the next batch on.

        Raises:
            ConfigError: The loader does not sample by priority, or the value is not a number of at least 0.
        """
        return self._prioritized().beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._prioritized().beta = value

    def _prioritized(self) -> PrioritizedSampler:
        if not isinstance(self._sampler, PrioritizedSampler):
            raise ConfigError(
                "Expected a loader opened with sampling=conduit.Prioritized(...), got one that draws uniformly"
            )
        return self._sampler

    def update_priorities(self, ids: Any, priorities: Any) -> int:
        """Give rows new priorities, such as the absolute TD errors of a batch.

        Args:
            ids: int64 [n], from `Batch.ids` of this table; if an id occurs twice, its last priority counts. -1 stands for no row.
            priorities: Real [n], finite and at least 0.

        Returns:
            How many were ignored, because their rows have been overwritten, or taken over by their stream's next page,
            or never were rows to draw (`sampler.ignored` adds them up).

        Raises:
            FieldError: Wrong shape, a NaN, infinite, negative or complex priority, or an id that no row of this table ever had;
                nothing is changed.
            ConfigError: The loader does not sample by priority.
            Closed: The loader, client or engine has closed.
        """
        sampler = self._prioritized()
        if self._closed:
            raise Closed("Expected an open loader, got one that was closed")
        self._table.check_open()
        return sampler.update(ids, priorities)

    def valid(self, ids: Any) -> Array:
        """Which row ids still name the rows they were given for.

        Args:
            ids: int64, any shape, from `Batch.ids`.

        Returns:
            bool of that shape; False where the row has been overwritten since, or the id is not of this table.

        Raises:
            FieldError: The ids are not integers.
        """
        keys = as_ids(ids)
        out = np.zeros(keys.shape, bool)
        entry(deletion.still_valid)(self._table.address, keys.ctypes.data, keys.size, out.ctypes.data)
        return out

    @property
    def stats(self) -> LoaderStats:
        """Counts since the loader was opened."""
        ages = self._maker.scratch.ages
        stale = {age: int(ages[age]) for age in np.flatnonzero(ages).tolist()}
        rows, ring = self._batches * self.plan.batch_size, self._ring
        return LoaderStats(self._batches, rows, ring.redrawn, self._waited + ring.waited_s, stale, ring.allocated)

    def close(self) -> None:
        """Release the buffers and the loader's name; batches that are still held stay valid."""
        if self._place is not None:
            self._place.release()
        participants = self._table.participants
        if participants is not None and participants.seated:
            for buffer in self._ring.buffers:
                self._maker.give_back(buffer)
        if self._gate is not None:
            self._gate.cancel()
        self._closed = True
        try:
            self._ring.close()
        finally:
            self._maker.close()

    @never_raises
    def __repr__(self) -> str:
        name = "" if self._place is None else f"name={self._place.name!r}, "
        return (
            f"{type(self).__name__}({place_of(self._table)}, {name}batch_size={self.plan.batch_size}, {self.plan.window!r}, "
            f"{self._batches:,} batches, {state_of(self._table, closed=self._closed)}: {filling_of(self._table)})"
        )

    def __enter__(self) -> Self:
        return self


def checked_shard(shard: object) -> tuple[int, int]:
    """Rank and world of (rank, world).

    Raises:
        ConfigError: The value is not a pair of integers with 0 <= rank < world.
    """
    pair = shard if isinstance(shard, tuple | list) and len(shard) == 2 else (None, None)
    rank, world = map(whole, pair)
    if rank is None or world is None or not 0 <= rank < world:
        raise ConfigError(f"Expected shard=(rank, world) with 0 <= rank < world, got {shard!r}")
    return rank, world


def _sampler_of(
    table: TableView, sampling: Prioritized | ShuffledSampler | None, size: int, seed: int, least: int
) -> Uniform | PrioritizedSampler:
    if isinstance(sampling, ShuffledSampler):
        return sampling
    if sampling is None:
        return Uniform(seed, table.layout.pages, least)
    rule = table.layout.table.priorities
    if not isinstance(sampling, Prioritized):
        raise ConfigError(
            f"Expected sampling to be conduit.Prioritized(...), conduit.Shuffled(...) or None, got {sampling!r}"
        )
    if rule is None:
        raise ConfigError(
            f"Expected table {table.layout.name!r} to have priorities: create it with priorities=conduit.Priorities(...)"
        )
    geometry = (table.layout.pages, table.layout.page_rows)
    return PrioritizedSampler(
        sampling, rule, table.layout.name, table.address, table.seat_line(), geometry, size, seed, least
    )
