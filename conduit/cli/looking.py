"""Looks at engines for `conduit status`: one look, two looks with rates between them, or repeated looks; and their JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from conduit.errors import EngineNotFound
from conduit.plane.observe import inspect
from conduit.plane.observe.inspect import EngineStatus, ParticipantStatus


@dataclass(frozen=True, slots=True)
class Seen:
    """An engine and its rates.

    Attributes:
        engine: The later look.
        rows_per_s: Rows written per second between two looks, by table name; empty where it was not measured.
        rows_per_s_by: The same by participant: (seat, pid, joined at).
    """

    engine: EngineStatus
    rows_per_s: dict[str, float] = field(default_factory=dict)
    rows_per_s_by: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def rate_of(self, participant: ParticipantStatus) -> float | None:
        """Rows that a participant wrote per second, or None where it was not measured."""
        return self.rows_per_s_by.get(_key(participant))


def look(name: str | None, interval: float) -> list[Seen]:
    """Look at one engine or at all, twice with `interval` seconds between, or once when it is 0.

    Raises:
        EngineNotFound: Nothing has this name.
    """
    before = _all(name)
    if not any(one.in_use for one in before) or interval == 0:
        return [Seen(one) for one in before]
    time.sleep(interval)
    return [_moved(one, _again(one)) for one in before]


def watch(name: str | None, every: float) -> Iterator[list[Seen]]:
    """Look again and again, with rates since the look before; ends with an empty look when the engine named is gone.

    Args:
        name: One engine, or None for all.
        every: Seconds between two looks.

    Raises:
        EngineNotFound: Nothing has this name at the first look.
    """
    found = _all(name)
    before: dict[str, EngineStatus] = {}
    while True:
        yield [_moved(before.get(one.name, one), one) for one in found]
        before = {one.name: one for one in found}
        time.sleep(every)
        try:
            found = _all(name)
        except EngineNotFound:
            yield []
            return


def _all(name: str | None) -> list[EngineStatus]:
    if name is not None:
        return [inspect.inspect(name)]
    found = []
    for one in inspect.engines():
        try:
            found.append(inspect.inspect(one))
        except EngineNotFound:
            continue
    return found


def _again(before: EngineStatus) -> EngineStatus:
    try:
        return inspect.inspect(before.name)
    except EngineNotFound:
        return before


def _moved(before: EngineStatus, after: EngineStatus) -> Seen:
    seconds = after.at - before.at
    if after.created_ns != before.created_ns or not after.in_use or seconds <= 0:
        return Seen(after)
    tables = {one.name: one.rows_written for one in before.tables}
    seats = {_key(one): one.rows for one in before.participants}
    return Seen(
        after,
        {one.name: max(0, one.rows_written - tables[one.name]) / seconds for one in after.tables if one.name in tables},
        {_key(one): (one.rows - seats[_key(one)]) / seconds for one in after.participants if _key(one) in seats},
    )


def _key(participant: ParticipantStatus) -> tuple[int, int, int]:
    return participant.number, participant.pid, participant.since_ns


def as_json(seen: Sequence[Seen], interval: float) -> dict[str, Any]:
    """The document of `conduit status --json`."""
    return {"interval_s": interval, "engines": [_engine_as_json(one) for one in seen]}


def _engine_as_json(seen: Seen) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(seen.engine)
    del document["at"]  # a moment of the monotonic clock means nothing to another process
    writers = [one for one in seen.engine.participants if one.writes]
    document["writers_alive"] = sum(one.alive for one in writers)
    document["writers_dead"] = sum(not one.alive for one in writers)
    for table in document["tables"]:
        table["rows_per_s"] = seen.rows_per_s.get(table["name"])
    for entry, participant in zip(document["participants"], seen.engine.participants, strict=True):
        entry["rows_per_s"] = seen.rate_of(participant)
    return document
