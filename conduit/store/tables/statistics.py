"""Running mean and variance of a table's fields, in shared memory: any number of processes update, any number read.

Each participant adds to a seat of its own, so updates need no lock and none is lost: a seat holds (count, mean, M2) twice, and
an update fills the copy that is not current, then stores the new version (release). Killed anywhere, it leaves the last
version in place, and the seat's next owner goes on from it. A reader copies a seat, looks again whether its version is the
same, and merges all seats; what it gets is a triple that belongs together.

Merging is exact in count and as stable as Welford's method: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
Algorithm for Computing Sample Variances" (1979):

    n = n_a + n_b,  d = mean_b - mean_a,  mean = mean_a + d * n_b / n,  M2 = M2_a + M2_b + d^2 * n_a * n_b / n
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit.arrays import as_numbers, from_bfloat16
from conduit.errors import ConfigError, FieldError, WaitTimeout
from conduit.field import Field
from conduit.forking import StaysHere
from conduit.native.jit import entry, inner, kernel
from conduit.native.memory import (
    copy_bytes,
    fence_acquire,
    fence_full,
    load_acquire,
    load_relaxed,
    peek_f64,
    peek_i64,
    poke_f64,
    poke_i64,
    store_release,
    zero_bytes,
)
from conduit.nesting import hint
from conduit.store.format import words as w
from conduit.store.format.field_moments import copy_bytes_of, seat_bytes
from conduit.store.format.soundness import LARGEST, damaged
from conduit.store.tables.appearance import never_raises, place_of, state_of
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

_ATTEMPTS = 1 << 20


@inner
def _merge(into, count, other, other_count, elements):
    """Merge (mean, M2) at `other` into that at `into`; both are float64 [2, elements]."""
    share = other_count / (count + other_count)
    weight = count * share
    for j in range(elements):
        at, spread = into + 8 * j, into + 8 * (elements + j)
        delta = peek_f64(other + 8 * j) - peek_f64(at)
        poke_f64(at, peek_f64(at) + delta * share)
        poke_f64(spread, peek_f64(spread) + peek_f64(other + 8 * (elements + j)) + delta * delta * weight)


@kernel("int64(int64, int64, int64, int64)", nogil=True)
def summarise(elements, values, count, out):
    """Mean and M2 of `count` values, at least 1: float64 [count, elements] at `values`, float64 [2, elements] at `out`."""
    zero_bytes(out, 16 * elements)
    # of the distances from the first value: a sum of many large ones would lose what they differ by
    for i in range(1, count):
        for j in range(elements):
            distance = peek_f64(values + 8 * (elements * i + j)) - peek_f64(values + 8 * j)
            poke_f64(out + 8 * j, peek_f64(out + 8 * j) + distance)
    for j in range(elements):
        poke_f64(out + 8 * j, peek_f64(values + 8 * j) + peek_f64(out + 8 * j) / count)
    for i in range(count):
        for j in range(elements):
            delta = peek_f64(values + 8 * (elements * i + j)) - peek_f64(out + 8 * j)
            spread = out + 8 * (elements + j)
            poke_f64(spread, peek_f64(spread) + delta * delta)
    return count


@kernel("int64(int64, int64, int64, int64, int64, int64, int64)")
def add(seat, size, elements, count, summary, note, upto):
    """Add what `summarise` made of `count` values to a seat.

    It keeps the interpreter's lock, so the threads that share a seat take turns, and no destructor comes in between.

    Args:
        seat: Address of the seat.
        size: Bytes of a copy.
        elements: Elements of the field.
        count: At least 1.
        summary: Address of float64 [2, elements].
        note: Address of a word that says up to where a caller's values have been added, or 0.
        upto: What it says afterwards.

    Returns:
        0, or -1 when what the seat holds cannot be: nothing is added then.
    """
    # the copy that is overwritten now must not be taken for current any more
    fence_full()
    version = peek_i64(seat)
    current = seat + w.LINE + size * (version & 1)
    other = seat + w.LINE + size * (1 - (version & 1))
    before = peek_f64(current)
    if not 0.0 <= before < LARGEST:
        return -1
    copy_bytes(other, current, 8 * (1 + 2 * elements))
    _merge(other + 8, before, summary, np.float64(count), elements)
    poke_f64(other, before + count)
    store_release(seat, version + 1)
    if note != 0:
        poke_i64(note, upto)
    return 0


@kernel("int64(int64, int64, int64)")
def stamp(seats, stride, count):
    """A number that every update changes."""
    total = 0
    for i in range(count):
        total += load_relaxed(seats + stride * i)
    return total


@kernel("int64(int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def gather(seats, stride, count, size, elements, out, scratch):
    """Merge all seats into float64 [1 + 2 * elements] at `out`: count, mean, M2.

    Returns:
        0, -1 when a seat changed under every attempt to read it, or -2 when what one holds cannot be.
    """
    for j in range(1 + 2 * elements):
        poke_f64(out + 8 * j, 0.0)
    for i in range(count):
        seat = seats + stride * i
        attempt = 0
        version = load_acquire(seat)
        while version != 0:
            copy_bytes(scratch, seat + w.LINE + size * (version & 1), 8 * (1 + 2 * elements))
            fence_acquire()
            # the next but one update overwrites this copy, and begins once the next one has been stored
            again = load_relaxed(seat)
            if again == version:
                break
            version = load_acquire(seat)
            attempt += 1
            if attempt > _ATTEMPTS:
                return -1
        if version != 0:
            before = peek_f64(out)
            if not 0.0 < peek_f64(scratch) < LARGEST:
                return -2
            _merge(out + 8, before, scratch + 8, peek_f64(scratch), elements)
            poke_f64(out, before + peek_f64(scratch))
    return 0


@dataclass(frozen=True, slots=True)
class Moments:
    """One consistent reading of a field's running statistics.

    Attributes:
        count: Values added so far, by all processes.
        mean: float64 [*shape]; zeros before the first value.
        variance: float64 [*shape], of the population (M2 / count); zeros before the first value.
    """

    count: int
    mean: Array
    variance: Array


def set_totals(seat: Array, totals: Array) -> None:
    """Let a seat that nobody has used, float64 words, hold these totals (`totals_of`)."""
    size = (len(seat) - w.LINE // 8) // 2
    seat[w.LINE // 8 + size :][: len(totals)] = totals
    seat[:1].view(np.int64)[0] = 1  # the second copy is the current one


class Statistics(StaysHere):
    """Running statistics of a table's fields, from `Table(..., statistics=("obs",))`; for any thread.

    Args:
        table: The table as this process maps it.
    """

    _elsewhere = "ask there, client.table(name).statistics"

    def __init__(self, table: TableView) -> None:
        self._table = table
        self._seats = table.segment.layout.spec.max_participants

    @never_raises
    def __repr__(self) -> str:
        return f"Statistics({place_of(self._table)}, {state_of(self._table)}: {', '.join(self.fields)})"

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that have statistics."""
        return tuple(self._table.layout.statistics)

    def _field(self, name: str) -> tuple[Field, int]:
        found = self._table.layout.statistics
        if not isinstance(name, str) or name not in found:
            raise ConfigError(
                f"Expected a field with statistics, declared with Table(..., statistics=({name!r},)), in table "
                f"{self._table.layout.name!r}, got {name!r}{hint(name, found)}"
            )
        return self._table.layout.schema[name], self._table.segment.base + found[name]

    def update(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Add values of one or more fields; no process waits, and no update is lost.

        Args:
            values: {dotted name: values}, for names that are no keywords.
            **named: The same. Values are numbers [*shape] or [..., *shape] of the field's shape.

        Raises:
            ConfigError: A field has no statistics.
            FieldError: Wrong shape, no number, NaN or infinite; nothing is added.
            BadSegment: This seat's statistics are damaged.
            Closed, Forked: The client or engine has closed.
        """
        seat = self._table.check_open()
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"Expected {{field: values}}, got {type(values).__name__}")
        twice = [name for name in named if name in (values or {})]
        if twice:
            raise ConfigError(f"Expected each field once, got {twice[0]!r} both in the mapping and as a keyword")
        given = [(*self._field(name), value) for name, value in {**(values or {}), **named}.items()]
        checked = [(field, at, _as_values(field, value)) for field, at, value in given]
        for field, at, array in checked:
            _add_to(at + seat_bytes(field) * seat.number, field, array, 0, 0)

    def stamp(self, name: str) -> int:
        """A number that changes with every update of a field."""
        field, at = self._field(name)
        return entry(stamp)(at, seat_bytes(field), self._seats)

    def read(self, name: str) -> Moments:
        """The statistics of one field, all participants' together.

        Raises:
            ConfigError: It has none.
            WaitTimeout: It was updated faster than it could be read, a million times over.
            Closed, Forked: The client or engine has closed.
        """
        self._table.check_open()
        field, _ = self._field(name)
        out = totals_of(self._table, name)
        count = int(out[0])
        mean, spread = out[1:].reshape(2, *field.shape)
        return Moments(count, mean.copy(), spread / max(1, count))


def count_upto(table: TableView, name: str, values: Any, note: Array, upto: int) -> None:
    """Add values of one field, and say in int64 [1] up to where a caller's values have been added: both are done or none.

    Raises:
        FieldError, Closed: As `Statistics.update`.
    """
    seat = table.seat()
    field = table.layout.schema[name]
    place = table.segment.base + table.layout.statistics[name] + seat_bytes(field) * seat.number
    _add_to(place, field, _as_values(field, values), note.ctypes.data, upto)
    note[0] = upto  # where there was nothing to add


def _add_to(seat: int, field: Field, array: Array, note: int, upto: int) -> None:
    if not len(array):
        return
    elements = array.shape[1]
    summary = np.empty(2 * elements, np.float64)
    entry(summarise)(elements, array.ctypes.data, len(array), summary.ctypes.data)
    if entry(add)(seat, copy_bytes_of(field), elements, len(array), summary.ctypes.data, note, upto) < 0:
        raise damaged(f"this participant's statistics of {field.name!r}", "a count that cannot be")


def totals_of(table: TableView, name: str) -> Array:
    """What the statistics of a field are made of, all participants' together: float64 [1 + 2 * elements], count, mean, M2.

    Raises:
        WaitTimeout: They were updated faster than they could be read, a million times over.
        BadSegment: They cannot be.
    """
    field, at = table.layout.schema[name], table.segment.base + table.layout.statistics[name]
    elements = int(np.prod(field.shape, dtype=np.int64))
    seats = table.segment.layout.spec.max_participants
    out, scratch = np.empty((2, 1 + 2 * elements), np.float64)
    result = entry(gather)(
        at, seat_bytes(field), seats, copy_bytes_of(field), elements, out.ctypes.data, scratch.ctypes.data
    )
    if result == -1:
        raise WaitTimeout(f"Expected to read the statistics of {name!r} whole, they changed under every attempt")
    if result < 0:
        raise damaged(f"the statistics of {name!r} in table {table.layout.name!r}", "a count that cannot be")
    return out


def _as_values(field: Field, value: Any) -> Array:
    """Values as float64 [n, elements].

    Raises:
        FieldError: Shape, dtype, NaN or infinity.
    """
    array = as_numbers(value)
    if array.dtype == np.uint16 and field.dtype == "bfloat16":
        array = from_bfloat16(array)
    rank = array.ndim - len(field.shape)
    if array.dtype.kind not in "biuf" or rank < 0 or array.shape[rank:] != field.shape:
        raise FieldError(
            f"Expected numbers of shape [..., {', '.join(map(str, field.shape))}], got `{array.dtype}` of shape "
            f"{array.shape}",
            at=field.name,
        )
    values = np.ascontiguousarray(array, np.float64).reshape(-1, int(np.prod(field.shape, dtype=np.int64)))
    if not np.isfinite(values).all():
        raise FieldError(
            "Expected finite values, got NaN or infinity: nothing was added; leave such rows out", at=field.name
        )
    return values
