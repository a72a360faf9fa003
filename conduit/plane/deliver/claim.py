"""Claims, the deliveries of a consumer: rows of one page, as arrays [ticks, environments, ...] in shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from conduit.errors import Closed
from conduit.forking import StaysHere
from conduit.kernels.spec.batch_transforms import Apply, Contents, check_new
from conduit.kernels.spec.plan import Computed
from conduit.kernels.spec.windows import Rollout
from conduit.native.finish import when_gone
from conduit.native.jit import entry
from conduit.plane.deliver.batch import as_bfloat16
from conduit.plane.deliver.claimed_rows import BOOTSTRAP, Columns
from conduit.plane.deliver.convert import Reading
from conduit.plane.views import Arrays
from conduit.store.format import words as w
from conduit.store.format.soundness import check_links
from conduit.store.tables import queue
from conduit.store.tables.appearance import never_raises, place_of
from conduit.store.tables.queue import (
    CLAIM_AGAIN,
    CLAIM_BOOTSTRAP,
    CLAIM_ENVS,
    CLAIM_GENERATION,
    CLAIM_PAGE,
    CLAIM_START,
    CLAIM_STATE,
    CLAIM_STOP,
    CLAIM_STREAM,
    CLAIM_TICK,
    CLAIM_WORDS,
)
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

_ENDS = {queue.ACKNOWLEDGED: "acknowledged", queue.GIVEN_BACK: "given back", queue.LOST: "lost"}


class Record:
    """The state of a claim, apart from its arrays. A claim ends once: in the first thread that ends it, or when the record is dropped.

    The record exists before the claiming call, which notes in its words what it claims. So an interrupted call leaves no claim behind.

    Args:
        table: The queue.
        seat: This process's seat among the engine's participants.
        counts: The consumer's counts.

    Attributes:
        array, words: int64 (store.tables.queue.CLAIM_*).
    """

    __slots__ = ("__weakref__", "_counts", "_seat", "_table", "array", "words")

    def __init__(self, table: TableView, seat: Array, counts: Array) -> None:
        self._table = table
        self._seat = seat
        self._counts = counts
        self.array = np.zeros(CLAIM_WORDS, np.int64)
        self.words = self.array.data
        when_gone(self, entry(queue.drop_claim), self.array, seat, counts)

    @property
    def ended(self) -> str | None:
        """How it ended, "acknowledged", "given back" or "lost", or None."""
        return _ENDS.get(self.words[CLAIM_STATE])

    def acknowledge(self) -> None:
        """Mark the rows as done.

        Raises:
            Closed: The client has closed, or the claim was given back: the rows are delivered again.
        """
        self._table.check_open()
        if entry(queue.end)(self.array, self._seat, self._counts, queue.ACKNOWLEDGED) != queue.ACKNOWLEDGED:
            raise Closed(f"Expected a claim that is held, got one that was {self.ended}: its rows are delivered again")

    def give_back(self) -> None:
        """Give the rows back: they are delivered again, to any consumer.

        Raises:
            Closed: The rows have been acknowledged.
        """
        if entry(queue.end)(self.array, self._seat, self._counts, queue.GIVEN_BACK) == queue.ACKNOWLEDGED:
            raise Closed("Expected a claim that is not acknowledged, got one that is: its rows are done")


class RolloutBatch(dict[str, Any]):
    """A claim as a batch of one rollout, for batch transforms.

    Attributes:
        reward_names: Names of the arrays that are rewards.
    """

    reward_names: tuple[str, ...]


class Claim(StaysHere, Arrays):
    """Consecutive ticks of one writer that only this consumer has: {field name, "terminated", "truncated": [ticks, num_envs, *shape]}.

    Arrays are views of shared memory: do not write into them. They stay valid as long as anything made from the claim is alive, also
    after `ack`; only then do writers get the page. A ragged field is a list with one value [length, *shape[1:]] for each row,
    tick after tick.

    `claim["obs.camera"]` is `claim.obs.camera` too, as in a `Batch`.

    As a context manager it is acknowledged on leaving, and given back on an exception. A claim that is dropped without either
    is given back.

    Attributes:
        ticks, num_envs: Size; a writer without num_envs counts as one environment.
        stream: Number of the writer's stream.
        first_tick: Number of the first tick in its stream.
        complete: False for a rollout of fewer ticks than rollout_length: its writer closed, died, gave a bootstrap early, or
            kept too many final observations.
        delivered_before: True if the rows may have been delivered before, to a consumer that died or gave them back.
    """

    _elsewhere = "claim there; {name: value.clone() for name, value in claim.items()} are copies that can be sent"

    __slots__ = (
        "__weakref__",
        "_added",
        "_columns",
        "_due",
        "_hold",
        "_lead",
        "_reading",
        "_record",
        "_row",
        "_values",
        "complete",
        "delivered_before",
        "first_tick",
        "num_envs",
        "stream",
        "ticks",
    )

    def __init__(self, columns: Columns, record: Record, hold: Any, rollout: int) -> None:
        words = record.words
        self._columns = columns
        self._record = record
        self._hold = hold
        self._row = words[CLAIM_PAGE] * columns.page_rows + words[CLAIM_START]
        self._values: dict[str, Any] = {}
        self._added: tuple[str, ...] = ()
        self._reading: Reading = {}
        self._due: list[tuple[Array, Array]] = []  # what statistics take when the claim is acknowledged
        self.num_envs: int = words[CLAIM_ENVS]
        self.ticks: int = (words[CLAIM_STOP] - words[CLAIM_START]) // self.num_envs
        self.stream: int = words[CLAIM_STREAM]
        self.first_tick: int = words[CLAIM_TICK]
        self.complete: bool = not rollout or self.ticks == rollout
        self.delivered_before: bool = words[CLAIM_AGAIN] != 0
        self._lead = (self.ticks, self.num_envs)

    def _check(self) -> None:
        if self._record.ended == "given back":
            raise Closed(
                "Expected a claim that is held or acknowledged, got one that was given back: others may work on its rows"
            )

    def __getitem__(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None:
            self._check()
            if name not in self._columns.names:
                return self._find(name)
            value = self._values[name] = self._columns.deliver(self._hold, name, self._row, self._lead)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter((*self._columns.names, *self._added))

    def __len__(self) -> int:
        return len(self._columns.names) + len(self._added)

    def _meta(self, name: str) -> Array:
        self._check()
        return self._columns.array(self._hold, f".{name}", self._row, self._lead)

    @property
    def ids(self) -> Any:
        """Row ids, int64 [ticks, num_envs]."""
        rows = np.arange(self._row, self._row + self.ticks * self.num_envs).reshape(self._lead)
        return self._columns.own(rows | (self._record.words[CLAIM_GENERATION] & w.GENERATION_MASK) << w.ROW_BITS)

    @property
    def versions(self) -> Any:
        """Versions of the policy that acted, int32 [ticks, num_envs]; a view."""
        return self._columns.make(self._meta("version"))

    @property
    def steps(self) -> Any:
        """Steps in the episode, int32 [ticks, num_envs], from 0; a view."""
        return self._columns.make(self._meta("step"))

    @property
    def episodes(self) -> Any:
        """Episode numbers, unique in the table, int64 [ticks, num_envs]."""
        return self._columns.own(self._meta("episode").astype(np.int64) | self.stream << 32)

    @property
    def is_first(self) -> Any:
        """Where an episode begins, bool [ticks, num_envs]."""
        return self._columns.own((self._meta("link") & w.FIRST) != 0)

    @property
    def mask(self) -> Any:
        """True where a row is a step, bool [ticks, num_envs]; with autoreset "next_step" the other rows are only an observation."""
        return self._columns.own((self._meta("link") & w.FINAL) == 0)

    @property
    def bootstrap(self) -> dict[str, Any] | None:
        """The observations after the last tick, {observation name: [num_envs, *shape]}, views; None if the writer gave none."""
        self._check()
        local = self._record.words[CLAIM_BOOTSTRAP]
        if local < 0:
            return None
        row, columns = self._record.words[CLAIM_PAGE] * self._columns.page_rows + local, self._columns
        lead, rows, generation = (
            (self.num_envs,),
            np.arange(row, row + self.num_envs),
            self._record.words[CLAIM_GENERATION],
        )
        return {
            name: columns.converting.make(columns.converted[name], rows, generation, lead, self._reading)
            if name in columns.converted
            else columns.deliver(self._hold, name, row, lead)
            for name in columns.schema.observation_names
        }

    @property
    def finals(self) -> tuple[Any, dict[str, Any]]:
        """Final observations that the writer was given with the steps that ended episodes ("same_step", "disabled").

        Returns:
            Their places, int64 [K, 2] (tick, environment), and {observation name: [K, *shape]}, copies; a list for a ragged
            observation.
        """
        link = self._meta("link").reshape(-1)
        places = np.flatnonzero(link & w.KEPT)
        rows = self._row + places + (link[places] >> w.LINK_SHIFT).astype(np.int64)
        columns = self._columns
        page = self._row // columns.page_rows
        check_links(columns.table.layout, page, rows - page * columns.page_rows)
        found: dict[str, Any] = {}
        for name in columns.schema.observation_names:
            if name in columns.converted:
                generation = self._record.words[CLAIM_GENERATION]
                field = columns.converted[name]
                found[name] = columns.converting.make(field, rows, generation, (len(rows),), self._reading)
            elif columns.schema[name].ragged:
                found[name] = [columns.deliver(self._hold, name, row, (1,))[0] for row in rows.tolist()]
            else:
                value = columns.own(columns.table.columns[columns.stored[name]][rows])
                found[name] = as_bfloat16(value) if columns.schema[name].dtype == "bfloat16" else value
        return columns.own(np.stack(np.divmod(places, self.num_envs), 1)), found

    def batch(self) -> RolloutBatch:
        """The claim as a batch of one rollout, {name: [1, ticks, num_envs, *shape]}, as `conduit.gae(...)(batch, ...)` takes it.

        It has "is_first" and "mask", and bootstrap_<observation> [1, num_envs, *shape] if the claim has a bootstrap. It has no ragged
        fields.

        Raises:
            ConfigError: A stored field has one of these names; `rename` of the consumer gives it another.
        """
        self._columns.check_batch()
        batch = RolloutBatch({name: value[None] for name, value in self.items() if not isinstance(value, list)})
        batch.reward_names = self._columns.schema.reward_names
        batch |= {"is_first": self.is_first[None], "mask": self.mask[None]}
        for name, value in (self.bootstrap or {}).items():
            if not isinstance(value, list):
                batch[BOOTSTRAP + name] = value[None]
        return batch

    def _convert(self) -> None:
        """Apply a consumer's transforms; called once, before the claim is delivered.

        Raises:
            FieldError: A transform refuses a row.
        """
        columns, generation = self._columns, self._record.words[CLAIM_GENERATION]
        self._reading = columns.converting.read()
        rows = np.arange(self._row, self._row + self.ticks * self.num_envs)
        is_step = ((self._meta("link") & w.FINAL) == 0).reshape(-1)
        for name, field in columns.converted.items():
            columns.converting.check(field, rows, generation, is_step)
            made = columns.converting.make(field, rows, generation, self._lead, self._reading, is_step)
            self._values[name] = made
        self._due = [(rows, is_step)]

    def _transform(self, number: int) -> None:
        """Run a consumer's steps on the claim as a batch; called once, before the claim is delivered.

        Raises:
            ConfigError: A step lacks its inputs, or adds a column that exists already.
        """
        steps = self._columns.steps
        batch = self.batch()
        given = frozenset(batch)
        arrays: dict[str, Array] = {}
        is_open = False
        for step in steps:
            known = {
                name: Computed(name, str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]))
                for name, value in batch.items()
            }
            contents = Contents(Rollout(*self._lead), known, is_open, self._columns.schema.reward_names)
            for item in step.outputs(contents):
                check_new(item.name, batch, step)
                arrays[item.name] = np.zeros((1, *item.lanes), item.dtype)
                batch[item.name] = self._columns.own(arrays[item.name])
            step.run(batch, arrays, (0, number))
            is_open = is_open or isinstance(step, Apply)
        self._added = tuple(name for name in batch if name not in given)
        self._values |= {name: batch[name][0] for name in self._added}

    def nest(self) -> dict[str, Any]:
        """The claim with nested fields as nested dicts and tuples; other columns keep their names."""
        own = {*self._columns.names}
        fields = {name: value for name, value in self.items() if name in own}
        return self._columns.schema.nest(fields) | {name: value for name, value in self.items() if name not in own}

    def ack(self) -> None:
        """Acknowledge the rows: no consumer gets them again, and transforms with update=True add them to the statistics. Idempotent.

        Raises:
            Closed: The claim was given back, or its client or engine has closed: the rows are delivered again.
        """
        self._record.acknowledge()
        if self._due:
            with contextlib.suppress(IndexError):  # another thread took the last one
                self._columns.converting.count(*self._due.pop())

    def give_back(self) -> None:
        """Give the rows back: they are delivered again, to any consumer. Idempotent.

        Raises:
            Closed: The rows have been acknowledged.
        """
        self._record.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._record.ended is None:
            if kind is None:
                self.ack()
            else:
                self.give_back()

    @never_raises
    def __repr__(self) -> str:
        return (
            f"Claim({place_of(self._columns.table)}, stream {self.stream}, ticks {self.first_tick} to {self.first_tick + self.ticks}, "
            f"{self.num_envs} environment{'' if self.num_envs == 1 else 's'}, {self._record.ended or 'held'}: "
            f"{', '.join(self)})"
        )
