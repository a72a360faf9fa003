"""Delivery from a queue: rows are claimed, delivered as views of shared memory, and acknowledged.

Nothing is copied: a claim's arrays are views of the page that its writer filled. Writers get the page's memory back
when the rows are acknowledged *and* nothing made from the claim is alive any more.
"""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from conduit.clock import Deadline
from conduit.errors import Closed, ConfigError, DataTimeout, FieldError
from conduit.forking import StaysHere
from conduit.kernels.spec.batch_transforms import BatchTransform
from conduit.kernels.spec.transforms import Pipeline
from conduit.native.finish import when_gone
from conduit.native.jit import entry
from conduit.numbers import at_least
from conduit.plane.deliver.batch import Format, torch_wrap
from conduit.plane.deliver.claim import Claim, Record
from conduit.plane.deliver.claimed_rows import Columns
from conduit.plane.deliver.convert import Converting
from conduit.plane.deliver.lacking import who_writes
from conduit.store.format import words as w
from conduit.store.format.soundness import damaged_page
from conduit.store.tables import queue
from conduit.store.tables.appearance import filling_of, never_raises, place_of, state_of
from conduit.store.tables.queue import QueueView
from conduit.store.tables.view import TableView, too_many_holds

Array = np.ndarray[Any, Any]
Partial = Literal["deliver", "drop"]
OnRefused = Literal["raise", "drop"]


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """Counts of a consumer since it was opened.

    Attributes:
        claims, rows: Claims and rows delivered.
        acknowledged, given_back: Claims that ended in this way.
        delivered_before: Claims whose rows may have been delivered before, to a consumer that died or gave them back.
        dropped: Short rollouts that were acknowledged undelivered (partial="drop").
        waited_s: Seconds spent waiting for rows.
        refused: Claims with a row that a transform refused; with on_refused="drop" they were acknowledged undelivered.
    """

    claims: int
    rows: int
    acknowledged: int
    given_back: int
    delivered_before: int
    dropped: int
    waited_s: float
    refused: int


class Consumer(StaysHere):
    """Claims rows of a queue, each for this consumer alone. For use by one thread; a claim may be ended in any thread.

    Iterating never ends by itself; it waits for rows as long as `timeout` allows.
    """

    _elsewhere = "open a consumer there, client.consumer(table, ...)"

    def __init__(
        self,
        table: TableView,
        *,
        format: Format,  # noqa: A002 - the natural word in a call
        timeout: float | None,
        partial: Partial,
        transform: Mapping[str, Pipeline] | None,
        batch_transforms: Iterable[BatchTransform],
        rename: Mapping[str, str] | None,
        on_refused: OnRefused,
    ) -> None:
        if format not in ("torch", "numpy"):
            raise ConfigError(f"Expected format 'torch' or 'numpy', got {format!r}")
        if partial not in ("deliver", "drop"):
            raise ConfigError(f"Expected partial 'deliver' or 'drop', got {partial!r}")
        if on_refused not in ("raise", "drop"):
            raise ConfigError(f"Expected on_refused 'raise' or 'drop', got {on_refused!r}")
        Deadline(timeout)
        table.check_open()
        self._rollout = table.layout.table.rollout_length or 0
        if partial == "drop" and not self._rollout:
            raise ConfigError(
                f"Expected partial='deliver' for queue {table.layout.name!r}, which has no rollouts that could be unfinished"
            )
        self._table = table
        self._timeout = timeout
        self._drops = partial == "drop"
        tensors = torch_wrap() if format == "torch" else None
        own = tensors or np.ndarray.view
        converting = Converting(table, transform, own)
        self._columns = Columns(table, tensors or _read_only, own, batch_transforms, rename, converting)
        self._converts = bool(converting.outputs)
        self._shapes = self._converts or bool(self._columns.steps)
        self._passes = on_refused == "drop"
        # each claim's arrays keep one object alive; when that object goes, no array of the claim is left
        self._hold_type = type("_Hold", (ctypes.c_char * table.segment.layout.size,), {})
        self._counts = np.zeros(queue.CONSUMER_WORDS, np.int64)
        self._open: list[Array] = []
        self._spare: tuple[Record, Any] | None = None
        self._dropped = self._refused = 0
        self._take, self._end = entry(queue.claim_rows), entry(queue.end)
        self._waited = 0.0
        self._closed = False

    def next(self, timeout: float | None = None, max_ticks: int | None = None) -> Claim:
        """Claim the oldest rows that no consumer has claimed; waits for them.

        Args:
            timeout: Seconds to wait; None takes the consumer's timeout.
            max_ticks: Most ticks to claim, for a queue without rollouts; None for all that the page has.

        Raises:
            DataTimeout: No rows came.
            BufferError: This client holds too many claims and leases.
            BadSegment: The next page is damaged.
            ConfigError: `max_ticks` is given for a queue of rollouts.
            FieldError: A transform refuses a row: `row_id`, `at` and `value` say which. The claim has been given back and is
                delivered again; with on_refused="drop" such claims are passed over instead.
            Closed: The consumer, client or engine has closed.
            OwnerGone: The engine's owner is gone.
        """
        claim = self.poll(max_ticks)
        if claim is not None:
            return claim
        begun = time.monotonic()
        allowed = self._timeout if timeout is None else timeout
        found = self._table.wait(lambda: self.poll(max_ticks), for_space=False, deadline=Deadline(allowed))
        self._waited += time.monotonic() - begun
        if found is None:
            raise DataTimeout(
                f"Expected rows to claim in queue {self._table.layout.name!r} within {allowed} s: {QueueView(self._table).explain()}; "
                f"{who_writes(self._table)} (`conduit status`)"
            )
        return found

    def poll(self, max_ticks: int | None = None) -> Claim | None:
        """As `next`, without a wait: None if no rows can be claimed now.

        Raises:
            BufferError, ConfigError, Closed, OwnerGone: As `next`.
        """
        if self._closed:
            raise Closed("Expected an open consumer, got one that was closed")
        most = 0
        if max_ticks is not None:
            most = self._checked_ticks(max_ticks)
        while True:
            claim = self._claim(most)
            if claim is None:
                return None
            if self._drops and not claim.complete:
                self._dropped += 1
                claim.ack()
            elif not self._shapes or self._shape(claim):
                return claim

    def _shape(self, claim: Claim) -> bool:
        """Run transforms and steps on a claim; False if a row was refused and the claim was passed over (on_refused="drop").

        Raises:
            FieldError: A row was refused; the claim has been given back.
        """
        try:
            if self._converts:
                claim._convert()  # noqa: SLF001 - hidden from who reads the claim
            if self._columns.steps:
                claim._transform(int(self._counts[queue.CONSUMER_CLAIMS]))  # noqa: SLF001
        except FieldError as error:
            # "drop" applies to refused rows only: after any other error it would drop every claim
            self._refused += error.row_id is not None
            if error.row_id is None or not self._passes:
                claim.give_back()
                raise
            claim.ack()
            if self._refused == 1:
                text = f"A claim was passed over, as on_refused='drop' says; the next ones are counted only. {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=4)
            return False
        return True

    def _checked_ticks(self, max_ticks: int) -> int:
        if self._rollout:
            raise ConfigError(f"Expected no max_ticks for rollouts, which come in one piece, got {max_ticks!r}")
        return at_least("max_ticks", max_ticks, 1)

    def _claim(self, most: int) -> Claim | None:
        table = self._table
        seat = table.check_open().seat
        prepared, self._spare = self._spare or self._prepare(seat), None
        record, hold = prepared
        page = self._take(table.address, most, record.array, seat, self._counts)
        if page < 0:
            self._spare = prepared
            if page <= queue.DAMAGED:
                raise damaged_page(table.layout, queue.DAMAGED - page, "rows that do not fit it")
            if page != -1:
                table.check_open()
                raise too_many_holds()
            return None
        return Claim(self._columns, record, hold, self._rollout)

    def _prepare(self, seat: Array) -> tuple[Record, Any]:
        """A claim's record, and the object that its arrays keep alive; both exist before the claim, so nothing that it takes can leak."""
        record = Record(self._table, seat, self._counts)
        hold = self._hold_type.from_address(self._table.segment.base)  # type: ignore[attr-defined]
        hold.table = self._table
        when_gone(hold, entry(queue.drop_hold), record.array, seat)
        if len(self._open) >= 2 * w.HAZARDS_PER_PARTICIPANT:
            self._open = [words for words in self._open if words[queue.CLAIM_STATE] <= queue.HELD]
        self._open.append(record.array)
        return record, hold

    @property
    def stats(self) -> ConsumerStats:
        """Counts since the consumer was opened."""
        claims, rows, again, acknowledged, given_back = self._counts.tolist()
        return ConsumerStats(claims, rows, acknowledged, given_back, again, self._dropped, self._waited, self._refused)

    def close(self) -> None:
        """Give back the claims that are not acknowledged; idempotent. Arrays of claims stay valid as long as the client lives."""
        self._closed = True
        for words in list(self._open):
            self._end(words, self._table.segment.seat, self._counts, queue.GIVEN_BACK)

    @never_raises
    def __repr__(self) -> str:
        claims, rows, *_ = self._counts.tolist()
        state = state_of(self._table, closed=self._closed)
        return (
            f"Consumer({place_of(self._table)}, {claims:,} claims of {rows:,} rows, {state}: {filling_of(self._table)})"
        )

    def __iter__(self) -> Iterator[Claim]:
        return self

    def __next__(self) -> Claim:
        return self.next()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array
