"""Batches from several tables: each table fills its own slots of the same arrays, so no second copy joins them.

The rows of a table lie side by side, in the order in which the tables were named; `source` has the table of each row. How many rows
each table gives is a function of the batch's number. With "exact" counts, each table has given its share of all rows, to within one
row, after any number of batches; "random" counts are drawn from the loader's seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from conduit.clock import Deadline
from conduit.contracts.delivery import Delivery
from conduit.errors import Closed, ConfigError, FieldError
from conduit.forking import StaysHere
from conduit.kernels.cpu.priorities import as_priorities
from conduit.kernels.spec.plan import Computed
from conduit.nesting import check_known
from conduit.numbers import at_least, real, whole, within
from conduit.plane.deliver.batch import Batch
from conduit.plane.deliver.loader import Array, LoaderStats
from conduit.plane.deliver.mixed_part import MixedPart
from conduit.plane.deliver.shared_buffers import Share
from conduit.sampling.prioritized import WEIGHTS, Prioritized, PrioritizedSampler
from conduit.store.tables.appearance import filling_of, never_raises, state_of
from conduit.store.tables.loader_cursors import NamedLoader
from conduit.store.tables.view import TableView

Counts = Literal["exact", "random"]

SOURCE = Computed("source", "int64", ())
_NEXT_SEED = 0x9E3779B97F4A7C15
_COUNTS_KEY = 0x636F756E7473  # "counts": apart from the keys of draws


class MixedLoader(StaysHere, Delivery[Batch]):
    """Batches with rows of several tables. Use `Client.mixed_loader`; for use by one thread.

    Beside its outputs, a batch has `source` int64 [B]: for each row the number of its table, in the order of `tables`.

    Attributes:
        tables: Names of the tables, in the order of their rows.
        samplers: {table: its sampler}.
    """

    _elsewhere = "open a loader there, client.mixed_loader(tables, ...)"

    def __init__(
        self,
        views: Mapping[str, TableView],
        weights: Mapping[str, float],
        *,
        batch_size: int,
        sampling: Prioritized | Mapping[str, Prioritized | None] | None,
        min_rows: int | Mapping[str, int] | None,
        rename: Mapping[str, str] | Mapping[str, Mapping[str, str]] | None,
        seed: int,
        place: NamedLoader | None,
        counts: Counts,
        **options: Any,
    ) -> None:
        self.tables = tuple(views)
        if counts not in ("exact", "random"):
            raise ConfigError(f"Expected counts 'exact' or 'random', got {counts!r}")
        batch_size = at_least("a batch_size", batch_size, 1)
        self._batch_size = batch_size
        self._shares = _shares(weights)
        self._counts = counts
        self._seed = seed
        least = min(self._shares) * batch_size
        if counts == "exact" and least < 1:
            table = self.tables[self._shares.index(min(self._shares))]
            raise ConfigError(
                f"Expected batches in which each table has a row, got batch_size={batch_size} of which {table!r} would give "
                f"{float(least):.3g}: use at least {-(-1 // min(self._shares))}, or counts='random'"
            )
        chosen = self._by_table(sampling, "sampling")
        for one in chosen:
            if one is not None and not isinstance(one, Prioritized):
                raise ConfigError(
                    f"Expected sampling to be conduit.Prioritized(...) or None for tables that are mixed, got {one!r}: epochs, by "
                    "conduit.Shuffled(...), are those of one table, client.loader(table, ...)"
                )
        rows = self._by_table(min_rows, "min_rows")
        # one mapping of field names for all tables, or one for each table
        each = isinstance(rename, Mapping) and any(isinstance(names, Mapping) for names in rename.values())
        shown = self._by_table(rename, "rename") if each else [rename] * len(self.tables)
        extra = (*(WEIGHTS if any(one is not None for one in chosen) else ()), SOURCE)
        share = Share(extra)
        self._parts: list[MixedPart] = []
        for i, (view, ratio) in enumerate(zip(views.values(), self._shares, strict=True)):
            self._parts.append(
                MixedPart(
                    view,
                    share=share,
                    batch_size=batch_size,
                    sampling=chosen[i],
                    rename=shown[i],
                    seed=seed + i * _NEXT_SEED,
                    min_rows=-(-ratio.numerator * batch_size // ratio.denominator) if rows[i] is None else rows[i],
                    **options,
                )
            )
        self._first = self._parts[0]
        self._first.settle()
        self.samplers = {name: part.sampler for name, part in zip(self.tables, self._parts, strict=True)}
        self._timeout: float | None = options["timeout"]
        self._views = tuple(views.values())
        self._closed = False
        self._place = place
        if place is not None:
            self.batch = place.batch

    def _by_table(self, given: Any, what: str) -> list[Any]:
        """An option per table: one for all, or a mapping; a table that is not in it has None."""
        if not isinstance(given, Mapping):
            return [given] * len(self.tables)
        check_known(given, self.tables, "tables of this loader", what)
        return [given.get(name) for name in self.tables]

    @property
    def batch(self) -> int:
        """Number of the batch that is drawn next; set it to repeat or skip draws."""
        return self._first.sampler.batch

    @batch.setter
    def batch(self, number: int) -> None:
        number = at_least("the number of a batch", number, 0)
        for part in self._parts:
            part.sampler.batch = number

    def bounds(self, number: int) -> list[int]:
        """First slot of each table's rows in batch `number`, and the batch size at the end; a pure function of the number."""
        if self._counts == "random":
            # each batch has its own generator, so that it can be repeated without the batches before it
            key = [self._seed % 2**64, _COUNTS_KEY]
            rng = np.random.Generator(np.random.Philox(key=np.array(key, np.uint64), counter=[0, 0, 0, number]))
            drawn = rng.multinomial(self._batch_size, [float(share) for share in self._shares])
            return [0, *np.cumsum(drawn).tolist()]
        ends = [0]
        whole = Fraction(0)
        for share in self._shares:
            whole += share
            ends.append(_given(whole, (number + 1) * self._batch_size) - _given(whole, number * self._batch_size))
        return ends

    def next(self, timeout: float | None = None) -> Batch:
        """The next batch.

        Args:
            timeout: Seconds to wait for rows, all tables together; None takes the loader's timeout.

        Raises:
            DataTimeout: Too few rows came into one of the tables; the message names it.
            BuffersBusy, FieldError, Closed: As `Loader.next`.
        """
        if self._closed:
            raise Closed("Expected an open loader, got one that was closed")
        for view in self._views:
            view.check_open()
        allowed = self._timeout if timeout is None else timeout
        deadline = Deadline(allowed)
        first, place = self._first.free_buffer(timeout)
        buffers = [first, *(part.beside(first, place) for part in self._parts[1:])]
        # an interrupted call may have advanced some of the parts only
        self.batch = self.batch
        batch = self.batch
        bounds = self.bounds(batch)
        source = first.arrays[SOURCE.name]
        drawn = False
        try:
            for number, part in enumerate(self._parts):
                begin, end = bounds[number], bounds[number + 1]
                if end > begin:
                    part.draw(buffers[number], begin, end, None if allowed is None else round(deadline.left(), 3))
                    source[begin:end] = number
            drawn = True
            made = self._first.batch_of(first)
            for number, part in enumerate(self._parts):
                part.advance(buffers[number], bounds[number + 1] - bounds[number])
        except BaseException as error:
            for part, buffer in zip(self._parts, buffers, strict=True):
                part.cancel(buffer)
            if isinstance(error, FieldError) or (drawn and isinstance(error, Exception)):
                # as in a loader of one table: the batch would be refused every time
                self.batch = batch + 1
                if self._place is not None:
                    self._place.batch = self.batch
            raise
        if self._place is not None:
            self._place.batch = self.batch
        return made

    @property
    def beta(self) -> dict[str, float]:
        """Exponents of importance weights, {table: beta}, of the tables that are sampled by priority.

        Set it to a number for all of them, or to {table: number}, to anneal weights from the next batch on.

        Raises:
            ConfigError: No table is sampled by priority, a value is not a number of at least 0, or a name is that of another table.
        """
        return {name: sampler.beta for name, sampler in self._prioritized().items()}

    @beta.setter
    def beta(self, value: float | Mapping[str, float]) -> None:
        found = self._prioritized()
        wanted = value if isinstance(value, Mapping) else dict.fromkeys(found, value)
        check_known(wanted, found, "tables that are sampled by priority", "beta")
        checked = {name: within("beta", number, 0, math.inf) for name, number in wanted.items()}
        for name, number in checked.items():
            found[name].beta = number

    def _prioritized(self) -> dict[str, PrioritizedSampler]:
        found = {name: one for name, one in self.samplers.items() if isinstance(one, PrioritizedSampler)}
        if not found:
            raise ConfigError(
                "Expected a loader with sampling=conduit.Prioritized(...) for a table, all draw uniformly"
            )
        return found

    def update_priorities(self, batch: Batch, priorities: Any) -> int:
        """Give a batch's rows new priorities; rows of tables that are not sampled by priority are ignored.

        Args:
            batch: A batch of this loader.
            priorities: Real [B], finite and at least 0.

        Returns:
            How many were ignored because their rows are gone; see `Loader.update_priorities`.

        Raises:
            FieldError: Wrong shape, a NaN, infinite, negative or complex priority, or rows of other tables; nothing is changed.
            ConfigError: No table is sampled by priority.
            Closed: The loader, client or engine has closed.
        """
        prioritized = [self.tables.index(name) for name in self._prioritized()]
        _check_batch(batch)
        values = as_priorities(priorities, len(batch.ids))
        ids, source = np.asarray(batch.ids), np.asarray(batch[SOURCE.name])
        if not (np.isfinite(values) & (values >= 0)).all():
            raise FieldError("Expected finite priorities of at least 0, got others", at="priorities")
        for i in prioritized:
            self._views[i].check_ids(ids[source == i])
        return sum(
            self._parts[i].update_priorities(ids[source == i], values[source == i])
            for i in prioritized
            if (source == i).any()
        )

    def valid(self, batch: Batch) -> Array:
        """Bool [B]: which rows of a batch of this loader have not been overwritten since.

        Raises:
            FieldError: It is not a batch of a mixed loader.
        """
        _check_batch(batch)
        ids, source = np.asarray(batch.ids), np.asarray(batch[SOURCE.name])
        out = np.zeros(ids.shape, bool)
        for number, part in enumerate(self._parts):
            out[source == number] = part.valid(ids[source == number])
        return out

    @property
    def stats(self) -> dict[str, LoaderStats]:
        """{table: counts since the loader was opened}."""
        return {name: part.stats for name, part in zip(self.tables, self._parts, strict=True)}

    @never_raises
    def __repr__(self) -> str:
        state = state_of(self._views[0], closed=self._closed)
        rows = ", ".join(f"{view.layout.name} {filling_of(view)}" for view in self._views)
        engine = self._views[0].segment.name
        return f"MixedLoader(engine {engine!r}, batch_size={self._batch_size}, batch {self.batch}, {state}: {rows})"

    def close(self) -> None:
        """Release the buffers and the loader's name; batches that callers hold stay valid. Idempotent."""
        if self._place is not None:
            self._place.release()
        self._closed = True
        for part in self._parts:
            part.close()


def _check_batch(batch: object) -> None:
    if not isinstance(batch, Batch) or SOURCE.name not in batch:
        raise FieldError(
            f"Expected a batch of several tables, with `ids` and `{SOURCE.name}`, got {type(batch).__name__}",
            at="batch",
        )


def _shares(weights: Mapping[str, float]) -> list[Fraction]:
    """The tables' shares; they add up to 1."""
    parts = []
    for name, weight in weights.items():
        number = whole(weight)
        share = real(weight)
        if share is None or not 0 < share < math.inf:
            raise ConfigError(f"Expected a weight above 0, got {weight!r} - at {name!r}")
        parts.append(Fraction(share if number is None else number))
    total = sum(parts, Fraction(0))
    return [part / total for part in parts]


def _given(share: Fraction, rows: int) -> int:
    """How many of the first `rows` rows a share gives, rounded to the nearest."""
    return (2 * share.numerator * rows + share.denominator) // (2 * share.denominator)
