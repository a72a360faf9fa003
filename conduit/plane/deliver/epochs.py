"""A loader that delivers every window of a table once per epoch (`sampling.shuffled`), and can continue an epoch later.

Its position is one word, the number of the next batch: the epoch, and the number of windows already delivered in it. A named loader
stores the word after each delivery, with a digest of the rows that the epoch's order was made from. An epoch continues only over the
same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from conduit.clock import Deadline
from conduit.errors import Closed, ConfigError, DataTimeout, Exhausted, FieldError
from conduit.kernels.spec.windows import Transition, Window
from conduit.numbers import at_least
from conduit.plane.deliver.batch import Batch
from conduit.plane.deliver.batch_maker import BatchMaker
from conduit.plane.deliver.buffers import Buffer
from conduit.plane.deliver.lacking import what_is_there
from conduit.plane.deliver.loader import Loader, LoaderStats, checked_shard
from conduit.sampling.shuffled import PLACE_BITS, Shuffled, ShuffledSampler
from conduit.store.tables.loader_cursors import NamedLoader
from conduit.store.tables.view import TableView


class EpochLoader(Loader):
    """A loader opened with `sampling=conduit.Shuffled(...)`; a `for` loop over it is one epoch, or the rest of one.

    `next` continues with the next epoch by itself. The last batch of an epoch may be shorter than the others. Rows written during an epoch
    come in the next one; rows overwritten or deleted before their turn are left out, and counted in `sampler.skipped`.
    """

    def __init__(
        self,
        table: TableView,
        *,
        batch_size: int,
        window: Window | None,
        sampling: Shuffled,
        seed: int,
        place: NamedLoader | None,
        min_rows: int | None,
        shard: tuple[int, int] | None,
        max_staleness: int | None,
        **options: Any,
    ) -> None:
        declared = table.layout.table
        for given, what in (
            (max_staleness, "max_staleness, which changes what can be drawn from batch to batch"),
            (declared.max_times_sampled, f"table {table.layout.name!r} with max_times_sampled, whose rows go"),
            (
                table.layout.limits,
                f"table {table.layout.name!r} with a limiter, which waits for rows that no epoch has",
            ),
        ):
            if given is not None:
                raise ConfigError(f"Expected sampling=conduit.Shuffled(...) without {what}")
        size = at_least("batch_size", batch_size, 1)
        self._shuffled = ShuffledSampler(
            table, window or Transition(), seed, size, (0, 1) if shard is None else checked_shard(shard)
        )
        least = min_rows if min_rows is not None else size if sampling.drop_last else 1
        self._rule, self._seed, self._stock = sampling, seed, 0 if place is None else place.stock
        self._begun = False
        self._rows = 0
        for option in (
            "batch_transforms",
            "fields",
        ):  # the plan of the shorter last batch of an epoch is made from them later
            if isinstance(options.get(option), Iterator):
                options[option] = tuple(options[option])
        super().__init__(
            table,
            batch_size=size,
            window=window,
            sampling=self._shuffled,
            seed=seed,
            place=place,
            min_rows=least,
            max_staleness=None,
            **options,
        )

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._shuffled.epoch

    @property
    def sampler(self) -> ShuffledSampler:
        """The sampler, with `epoch`, `place` (windows delivered or skipped in this epoch), `windows` (in this epoch) and `skipped`."""
        return self._shuffled

    def next(self, timeout: float | None = None) -> Batch:
        """The next batch; it belongs to the next epoch if this one is over.

        Args:
            timeout: As of `Loader.next`.

        Raises:
            Exhausted: Every requested epoch has been delivered.
            ConfigError: This loader should continue an epoch, and the table has changed since that epoch began.
            DataTimeout, BuffersBusy, FieldError, Closed, OwnerGone: As of `Loader.next`.
        """
        deadline = Deadline(self._timeout if timeout is None else timeout)
        while not self._over:
            batch = self._deliver(deadline)
            if batch is not None:
                return batch
            self._end_epoch()
        raise Exhausted(
            f"Expected a batch of one of {self._rule.epochs} epochs, every one has been delivered: ask for more of them"
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = None if self._over else self._deliver(Deadline(self._timeout))
        if batch is None:
            if not self._over:
                self._end_epoch()
            raise StopIteration
        return batch

    def __len__(self) -> int:
        """Batches of an epoch of the rows that there are; of the present one, once it has begun."""
        if not self._begun and not self._over:
            self._begin(None)
        count, size = self._shuffled.windows, self.plan.batch_size
        return count // size if self._rule.drop_last else -(-count // size)

    def __bool__(self) -> bool:
        return True  # a loader is true even if an epoch has no batch

    def state_dict(self) -> dict[str, int]:
        """The loader's position, for `load_state_dict` in this or another process, over the same rows."""
        stock = self._shuffled.stock if self._begun else self._stock
        return {"seed": self._seed, "epoch": self.epoch, "place": self._shuffled.place, "stock": stock}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the position of another loader of the same seed.

        Raises:
            ConfigError: The state has another seed, or is not the state of a loader.
        """
        if set(state) != {"seed", "epoch", "place", "stock"} or state["seed"] != self._seed:
            raise ConfigError(f"Expected the state of a loader with seed {self._seed}, got {state!r}")
        self._go_to(at_least("epoch", state["epoch"], 0), at_least("place", state["place"], 0))
        self._stock, self._begun = state["stock"], False

    @property
    def stats(self) -> LoaderStats:
        """Counts since the loader was opened."""
        return replace(super().stats, rows=self._rows)

    @property
    def _over(self) -> bool:
        return self._rule.epochs is not None and self.epoch >= self._rule.epochs

    def _go_to(self, epoch: int, place: int) -> None:
        self._shuffled.batch = epoch << PLACE_BITS | place
        if self._place is not None:
            self._place.batch = self._shuffled.batch

    def _end_epoch(self) -> None:
        self._go_to(self.epoch + 1, 0)
        self._begun = False

    def _begin(self, deadline: Deadline | None) -> None:
        """List the epoch's windows; with a deadline, wait until there are enough of them."""
        self._table.check_open()
        self._shuffled.begin()
        if self._shuffled.place:
            if self._shuffled.stock != self._stock:
                raise ConfigError(
                    f"Expected table {self._table.layout.name!r} to hold the rows that it held when epoch {self.epoch} of this loader "
                    "began, but it has been written, deleted from or reset since: an epoch continues only over the same rows. Use another "
                    "name, or no state, to begin anew"
                )
        elif deadline is not None and self._shuffled.candidates < self._least:
            enough = self._table.wait(
                self._has_enough,
                for_space=False,
                deadline=deadline,
            )
            if enough is None:
                found = self._shuffled.candidates
                raise DataTimeout(
                    f"Expected at least {self._least} rows that begin a {type(self.plan.window).__name__} in table "
                    f"{self._table.layout.name!r}, got {found} within {deadline.timeout:g} s: "
                    f"{what_is_there(self._table, self.plan.window)}"
                )
        self._begun, self._stock = True, self._shuffled.stock
        if self._place is not None:
            self._place.stock = self._stock

    def _has_enough(self) -> bool | None:
        self._shuffled.begin()
        return True if self._shuffled.candidates >= self._least else None

    def _deliver(self, deadline: Deadline) -> Batch | None:
        """The present epoch's next batch; None when the epoch is over."""
        if self._closed:
            raise Closed("Expected an open loader, got one that was closed")
        self._table.check_open()
        if not self._begun:
            self._begin(deadline)
        sampler, size, place, number = self._shuffled, self.plan.batch_size, self._shuffled.place, self._shuffled.batch
        if place >= sampler.windows:
            return None
        spare = self._ring.take(deadline.left())
        found = sampler.take(place, size)
        behind = place + found
        while True:
            if found == 0 or (found < size and self._rule.drop_last):
                sampler.skipped += sampler.windows - place - found
                self._go_to(self.epoch, sampler.windows)
                return None
            maker, buffer = self._maker, spare
            if found < size:
                maker = self._maker_of(self._plan_of(found))
                buffer = maker.open_buffer()
            batch = self._made(maker, buffer, number, behind)
            if batch is not None:
                break
            # writers overwrote some of the windows since they were picked
            if deadline.passed():
                raise DataTimeout(
                    f"Expected a batch within {deadline.timeout:g} s, writers overwrote its rows each time"
                )
            found, behind = sampler.pick(spare.job_address, place, size)
        sampler.skipped += behind - place - found
        self._batches += 1
        self._rows += found
        self._go_to(self.epoch, behind)
        return batch

    def _made(self, maker: BatchMaker, buffer: Buffer, number: int, behind: int) -> Batch | None:
        """The batch of the picked windows, or None if one of them is gone."""
        drawn = False
        try:
            if maker.prepares:
                maker.prepare(number)
            if not maker.fill(buffer):
                return None
            drawn = True
            batch = maker.batch(buffer, number)
            if maker.settles:
                maker.hand_out(buffer)
        except BaseException as error:
            maker.give_back(buffer)
            if isinstance(error, FieldError) or (drawn and isinstance(error, Exception)):
                # go on after the batch: it would be refused every time
                self._go_to(self.epoch, behind)
            raise
        return batch
