"""`conduit status` and `conduit clean`: engines as a person reads them at 80 columns, and as a machine does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from conduit.cli.output import counted, draw, duration, rate, size
from conduit.errors import EngineNotFound
from conduit.plane import inspect
from conduit.plane.inspect import (
    Cleaned,
    EngineStatus,
    LimiterStatus,
    ParticipantStatus,
    PolicyStatus,
    QueueStatus,
    TableStatus,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_STYLES = {
    "running": "green",
    "starting": "green",
    "closing": "yellow",
    "orphaned": "yellow",
    "dead": "red",
    "damaged": "red",
    "denied": "red",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """An engine and what moved in it.

    Attributes:
        engine: The later look.
        rows_per_s: Rows written per second between two looks, by table name; empty where it was not measured.
        rows_per_s_by: The same by participant: (seat, pid, joined at).
    """

    engine: EngineStatus
    rows_per_s: dict[str, float]
    rows_per_s_by: dict[tuple[int, int, int], float]


def look(name: str | None, interval: float) -> list[Seen]:
    """Look at one engine or at all, twice with `interval` seconds between, or once when it is 0.

    Raises:
        EngineNotFound: Nothing has this name.
    """
    before = [inspect.inspect(name)] if name is not None else _all()
    if not any(one.in_use for one in before) or interval == 0:
        return [Seen(one, {}, {}) for one in before]
    time.sleep(interval)
    return [_seen(one) for one in before]


def _all() -> list[EngineStatus]:
    found = []
    for name in inspect.engines():
        try:
            found.append(inspect.inspect(name))
        except EngineNotFound:
            continue
    return found


def _seen(before: EngineStatus) -> Seen:
    try:
        after = inspect.inspect(before.name)
    except EngineNotFound:
        return Seen(before, {}, {})
    if after.created_ns != before.created_ns or not after.in_use:
        return Seen(after, {}, {})
    seconds = after.at - before.at
    tables = {one.name: one.rows_written for one in before.tables}
    seats = {_key(one): one.rows for one in before.participants}
    return Seen(
        after,
        {one.name: max(0, one.rows_written - tables[one.name]) / seconds for one in after.tables},
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
        entry["rows_per_s"] = seen.rows_per_s_by.get(_key(participant))
    return document


def show(seen: Sequence[Seen]) -> None:
    """Print engines for people."""
    from rich.padding import Padding

    lines: list[RenderableType] = [] if seen else ["No engines of this user."]
    for index, one in enumerate(seen):
        lines += [""] * (index > 0) + [_head(one.engine)]
        parts = [_table(table, one.rows_per_s.get(table.name)) for table in one.engine.tables]
        if one.engine.policies:
            parts.append(_policies(one.engine.policies))
        if one.engine.max_participants:
            parts.append(_participants(one))
        for part in parts:
            lines += ["", Padding(part, (0, 0, 0, 2), expand=False)]
    draw(*lines)


def _head(engine: EngineStatus) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.padding import Padding

    facts: list[str] = [engine.backing]
    if engine.bytes:
        facts.append(size(engine.bytes))
    if engine.created_ns:
        age = duration((time.time_ns() - engine.created_ns) / 1e9)
        facts.append(f"made {age} ago by process {engine.creator_pid}")
    lines = [", ".join(facts), *(escape(line) for line in _remarks(engine))]
    head = f"[bold]{escape(engine.name)}[/]  [{_STYLES[engine.state]}]{engine.state}[/]"
    return Group(head, Padding("\n".join(lines), (0, 0, 0, 2), expand=False))


def _remarks(engine: EngineStatus) -> list[str]:
    name = engine.name
    remarks = [f"{engine.problem[0].upper()}{engine.problem[1:]}."] if engine.problem else []
    if engine.state == "orphaned":
        remarks.append(f'The owner has died. Take it over with conduit.Engine.adopt("{name}").')
    elif engine.state == "dead" and engine.tables:
        remarks.append(f'No live process holds it. Go on with it: conduit.Engine.adopt("{name}").')
        remarks.append(f"Or remove it: conduit clean {name}")
    elif engine.state == "dead":
        remarks.append(f"Remove it: conduit clean {name}")
    return remarks


def _table(table: TableStatus, rows_per_s: float | None) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    pages = table.pages
    total = pages.free + pages.preparing + pages.open + pages.sealed
    windows = f", stacks up to {table.max_stack}" if table.max_stack > 1 else ""
    windows += f", up to {table.max_n_step} steps" if table.max_n_step > 1 else ""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    states = [f"{pages.free:,} free", f"{pages.open:,} open", f"{pages.sealed:,} sealed"]
    states += [
        f"{count:,} {what}" for count, what in ((pages.preparing, "preparing"), (pages.leased, "leased")) if count
    ]
    grid.add_row("pages", f"{', '.join(states)}; {total:,} of {table.page_rows:,} rows")
    speed = "" if rows_per_s is None else f" ({rate(rows_per_s)})"
    grid.add_row(
        "rows",
        f"{table.rows_visible:,} of {table.capacity:,} here, {table.rows_written:,} written{speed}, "
        f"{table.rows_evicted:,} evicted",
    )
    if table.frozen:
        grid.add_row("frozen", "it takes no rows until it is thawed")
    if table.limiter is not None:
        grid.add_row("limiter", _limiter(table.limiter))
    if table.queue is not None:
        for what, text in _queue(table.queue):
            grid.add_row(what, text)
    if table.pages_recovered:
        grid.add_row("recovered", f"{counted(table.pages_recovered, 'page')} of dead writers")
    if table.priorities_raised or table.priorities_lowered:
        told = f"{table.priorities_raised:,} too small and {table.priorities_lowered:,} too large for the table's scale"
        grid.add_row("priorities", told)
    grid.add_row(
        "memory",
        f"{size(table.bytes)}; {table.bytes_per_row:,} B per row, {table.bytes_per_transition:,.1f} B per transition, "
        f"halo {table.halo_share:.1%}",
    )
    fields = ", ".join(
        f"{one.name} {one.dtype}{_shape(one.shape)}{' ragged' if one.ragged else ''}" for one in table.fields
    )
    grid.add_row("fields", escape(fields))
    roles = (("observations", table.observation_names), ("rewards", table.reward_names))
    grid.add_row("roles", escape("; ".join(f"{role}: {', '.join(names) or 'none'}" for role, names in roles)))
    return Group(f"[bold]{escape(table.name)}[/]  {table.kind} table, schema {table.fingerprint}{windows}", grid)


def _limiter(limiter: LimiterStatus) -> str:
    low = "any" if limiter.min_diff is None else f"{limiter.min_diff:,g}"
    high = "any" if limiter.max_diff is None else f"{limiter.max_diff:,g}"
    lines = [
        f"{limiter.samples_per_insert:g} samples per insert from {counted(limiter.min_size, 'row')} on, range {low} to {high}",
        f"{limiter.inserted:,} inserted, {limiter.sampled:,} sampled, {limiter.deleted:,} deleted",
    ]
    lines += [f"[yellow]{why}[/]" for why in (limiter.sampling, limiter.inserting) if why]
    return "\n".join(lines)


def _queue(queue: QueueStatus) -> list[tuple[str, str]]:
    parts = [f"{counted(queue.waiting, 'row')} waiting"]
    if queue.rollout_length is not None:
        parts.append(f"{queue.unfinished:,} in unfinished rollouts of {queue.rollout_length:,} ticks")
    lines = [("queue", ", ".join([*parts, f"{queue.claimed:,} claimed"]))]
    if queue.claims:
        holders = (
            f"{counted(one.rows, 'row')} by {f'process {one.pid}' if one.pid else 'a dead one'}" for one in queue.claims
        )
        lines.append(("claims", ", ".join(holders)))
    if queue.delivered_again:
        lines.append(("again", f"{counted(queue.delivered_again, 'claim')} of dead consumers"))
    return lines


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]" if shape else ""


def _policies(policies: Sequence[PolicyStatus]) -> RenderableType:
    grid = _columns(
        ("policy", "left"), ("version", "right"), ("arrays", "right"), ("size", "right"), ("publisher", "left")
    )
    for one in policies:
        grid.add_row(
            one.name,
            f"{one.version:,}" if one.version else "none",
            f"{one.arrays:,}",
            size(one.bytes),
            "alive" if one.publisher_alive else "none",
        )
    return grid


def _participants(seen: Seen) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape

    engine = seen.engine
    everyone = engine.participants
    writers = [one for one in everyone if one.writes]
    alive = sum(one.alive for one in writers)
    others = len(everyone) - len(writers)
    summary = (
        f"writers {alive} alive, {len(writers) - alive} dead; others {others}; "
        f"{len(everyone)} of {counted(engine.max_participants, 'seat')} taken"
    )
    if not everyone:
        return summary
    grid = _columns(
        ("pid", "right"),
        ("process", "left"),
        ("state", "left"),
        ("attached", "right"),
        ("rows", "right"),
        ("rows/s", "right"),
        ("pages", "right"),
        ("leases", "right"),
    )
    now = time.time_ns()
    for one in everyone:
        speed = seen.rows_per_s_by.get(_key(one)) if one.writes else None
        grid.add_row(
            str(one.pid),
            escape(one.name),
            "alive" if one.alive else "[red]dead[/]",
            duration((now - one.since_ns) / 1e9),
            f"{one.rows:,}" if one.writes else "-",
            rate(speed).removesuffix("/s"),
            f"{one.pages:,}" if one.writes else "-",
            f"{one.leases:,}" if one.leases else "-",
        )
    return Group(summary, grid)


def _columns(*columns: tuple[str, Literal["left", "right"]]) -> Table:
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in columns:
        grid.add_column(name, justify=justify, no_wrap=True)
    return grid


def show_cleaned(done: Sequence[Cleaned]) -> None:
    """Print what `clean` did."""
    from rich.markup import escape
    from rich.table import Table

    if not done:
        draw("No engines of this user.")
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for one in done:
        grid.add_row("[green]removed[/]" if one.removed else "kept", f"[bold]{escape(one.name)}[/]", escape(one.why))
    draw(grid)
