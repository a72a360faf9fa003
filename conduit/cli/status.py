"""`conduit status` and `conduit clean` as a person reads them at 80 columns: engines in brief or with all that is known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from conduit.cli.looking import Seen
from conduit.cli.output import counted, draw, duration, rate, size
from conduit.plane.observe.inspect import (
    Cleaned,
    EngineStatus,
    EpisodesStatus,
    LimiterStatus,
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


def show(seen: Sequence[Seen], *, everything: bool) -> None:
    """Print engines for people."""
    draw(drawn(seen, everything=everything))


def drawn(seen: Sequence[Seen], *, everything: bool) -> RenderableType:
    """Engines for people.

    Args:
        seen: What was looked at.
        everything: With each table's pages, memory and fields, and each participant, instead of a line for each table.
    """
    from rich.console import Group
    from rich.padding import Padding

    lines: list[RenderableType] = [] if seen else ["No engines of this user."]
    for index, one in enumerate(seen):
        lines += [""] * (index > 0) + [_head(one.engine)]
        parts: list[RenderableType] = []
        if everything:
            parts += [_table(table, one.rows_per_s.get(table.name)) for table in one.engine.tables]
        elif one.engine.tables:
            parts.append(_tables(one))
        if one.engine.policies:
            parts.append(_policies(one.engine.policies))
        if one.engine.max_participants:
            parts.append(_participants(one) if everything else _roles(one))
        for part in parts:
            lines += ["", Padding(part, (0, 0, 0, 2), expand=False)]
    return Group(*lines)


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
    remarks = [f"{engine.problem[0].upper()}{engine.problem[1:]}."] if engine.problem else []
    if engine.state == "dead" and not engine.max_participants:  # it cannot be adopted
        remarks.append(f"Remove it: conduit clean {engine.name}")
    return remarks


def _tables(seen: Seen) -> RenderableType:
    """A line for each table, and below them what keeps one from taking or giving rows."""
    from rich.console import Group
    from rich.markup import escape

    tables = seen.engine.tables
    limited = any(one.limiter is not None for one in tables)
    columns: list[tuple[str, Literal["left", "right"]]] = [
        ("table", "left"),
        ("kind", "left"),
        ("rows", "right"),
        ("capacity", "right"),
        ("rows/s", "right"),
        ("writers", "left"),
    ]
    if limited:
        columns.append(("limiter", "left"))
    grid = _columns(*columns)
    notes = []
    for one in tables:
        dead = f", [red]{one.writers_dead} dead[/]" if one.writers_dead else ""
        grid.add_row(
            escape(one.name),
            one.kind,
            f"{one.rows_visible:,}",
            f"{one.capacity:,}",
            rate(seen.rows_per_s.get(one.name)).removesuffix("/s"),
            f"{one.writers_alive} alive{dead}",
            *([_held_back(one.limiter)] if limited else []),
        )
        if one.frozen:
            notes.append(f"{one.name}: frozen, it takes no rows until it is thawed")
        if one.limiter is not None:
            notes += [f"{one.name}: {why}" for why in (one.limiter.sampling, one.limiter.inserting) if why]
        if one.queue is not None:
            notes.append(f"{one.name}: {_queue(one.queue)[0][1]}")
        if one.episodes is not None and one.episodes.ended:
            notes.append(f"{one.name}: {_episodes(one.episodes)}")
    return Group(grid, *map(escape, notes))


def _episodes(episodes: EpisodesStatus) -> str:
    """How many have ended, and how the newest did."""
    means = [] if episodes.mean_length is None else [f"length {episodes.mean_length:,.4g}"]
    names = episodes.reward_names if len(episodes.reward_names) > 1 else ("return",)
    means = [f"{name} {mean:,.4g}" for name, mean in zip(names, episodes.mean_return or (), strict=False)] + means
    told = f"; of the newest {episodes.newest}, on average: {', '.join(means)}" if means else ""
    return f"{counted(episodes.ended, 'episode')} ended{told}"


def _held_back(limiter: LimiterStatus | None) -> str:
    """What a limiter lets through, in a word or two."""
    if limiter is None:
        return "-"
    waiting = [what for what, why in (("samples", limiter.sampling), ("inserts", limiter.inserting)) if why]
    return f"[yellow]{' and '.join(waiting)} wait[/]" if waiting else "open"


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
    if table.episodes is not None and table.episodes.ended:
        grid.add_row("episodes", escape(_episodes(table.episodes)))
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


def _roles(seen: Seen) -> str:
    """How many participants there are of each kind, in a line."""
    everyone = seen.engine.participants
    writers = [one for one in everyone if one.writes]
    alive = sum(one.alive for one in writers)
    parts = []
    for role in ("owner", "loader", "consumer", "launcher"):
        of_it = [one.alive for one in everyone if role in one.roles]
        dead = len(of_it) - sum(of_it)
        if of_it:
            parts.append(f"{role} {len(of_it)}" + (f" ({dead} dead)" if dead else ""))
    others = sum(not one.roles for one in everyone)
    parts += [f"other {others}"] if others else []
    seats = f"{len(everyone)} of {counted(seen.engine.max_participants, 'seat')} taken"
    return "; ".join(
        part for part in (f"writers {alive} alive, {len(writers) - alive} dead", ", ".join(parts), seats) if part
    )


def _participants(seen: Seen) -> RenderableType:
    from rich.console import Group

    everyone = seen.engine.participants
    if not everyone:
        return _roles(seen)
    grid = _columns(
        ("pid", "right"),
        ("role", "left"),
        ("state", "left"),
        ("attached", "right"),
        ("rows", "right"),
        ("rows/s", "right"),
        ("pages", "right"),
        ("leases", "right"),
    )
    grid.columns[1].no_wrap = False
    now = time.time_ns()
    for one in everyone:
        grid.add_row(
            str(one.pid),
            ", ".join(one.roles) or "-",
            "alive" if one.alive else "[red]dead[/]",
            duration((now - one.since_ns) / 1e9),
            f"{one.rows:,}" if one.writes else "-",
            rate(seen.rate_of(one) if one.writes else None).removesuffix("/s"),
            f"{one.pages:,}" if one.writes else "-",
            f"{one.leases:,}" if one.leases else "-",
        )
    return Group(_roles(seen), grid)


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
