"""What follows from a table's declaration alone: how many pages of how many rows, how wide its halo is, what fits into it.

A table that cannot work is refused here when it is declared, a writer or a window that does not fit it when it is opened. Where
its bytes lie is conduit.store.format.layout's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from conduit.errors import CapacityError, ConfigError
from conduit.numbers import whole
from conduit.store.format import words as w
from conduit.store.format.arena_sizes import arena_items, row_share
from conduit.store.format.limit_specs import Limits
from conduit.store.format.page_sizes import Demand, Geometry, plan
from conduit.store.format.sizes import MOST_BYTES, align, parse_bytes, row_stride

if TYPE_CHECKING:
    from conduit.store.format.table_spec import Table

_MIN_TICKS = 2
"""Ticks that a page must hold beside its halo and that one's final observations: one, and room for its own."""
_GOOD_TICKS = 4
"""The same where the pages' size is chosen."""


def fills_pages(table: Table) -> bool:
    """Whether a page that a stream ended in is filled up by the next writer of as many environments.

    Windows that cross episodes could then cross from one writer's rows into another's, and start where it did not begin.
    Where deliveries of a row are counted, rows that have been drawn must not move to another page.
    """
    return (
        table.kind == "replay" and table.max_times_sampled is None and (table.max_length == 1 or table.within_episodes)
    )


def halo_ticks(table: Table) -> int:
    """Ticks that a page copies from the page before it; a queue's rows are delivered once and never copied."""
    return table.max_stack - 1 + future_ticks(table)


def future_ticks(table: Table) -> int:
    """Ticks behind its anchor that the widest window needs."""
    return 0 if table.kind == "queue" else max(table.max_n_step, table.max_length - 1)


def _least_ticks(table: Table) -> int:
    """Ticks that a page must hold beside its halo; of a rollout, the observations behind its last tick as well."""
    return _MIN_TICKS if table.rollout_length is None else table.rollout_length + 1


def geometry(table: Table) -> Geometry:
    """Pages, rows per page, and rows that are kept while a page is free.

    Raises:
        CapacityError: The capacity is too small, too large or no size, or the words of a segment have too few bits for it.
    """
    per_row = sum(row_stride(field) for field in table.schema.fields) + 2 + w.META_BYTES
    per_row += (table.priorities is not None) * 4 + (table.max_times_sampled is not None) * 8
    fixed = per_row
    per_row += row_share(table.schema, table.mean_lengths)
    in_bytes = isinstance(table.capacity, str)
    rows = parse_bytes(table.capacity) // per_row if isinstance(table.capacity, str) else table.capacity
    if rows < 1:
        raise CapacityError(f"Expected a capacity of at least one row ({per_row} bytes), got {table.capacity!r}")
    if rows * per_row > MOST_BYTES:
        raise CapacityError(
            f"Expected a capacity of at most {MOST_BYTES // per_row:,} rows of {per_row} bytes, got {rows:,}"
        )
    if table.page_rows is not None:
        least = halo_ticks(table) + _least_ticks(table)
        if whole(table.page_rows) is None or table.page_rows < least:
            raise CapacityError(
                f"Expected page_rows of at least {least} (a halo of {halo_ticks(table)} and {_least_ticks(table)} more), "
                f"got {table.page_rows!r}"
            )
    keeps_finals = bool(table.schema.observation_names)
    demand = Demand(
        rows=rows,
        in_bytes=in_bytes,
        page_rows=table.page_rows,
        num_envs=table.num_envs,
        halo=halo_ticks(table),
        least_ticks=_GOOD_TICKS,
        reserve=table.num_envs if keeps_finals else 0,
        finals=(table.mean_episode and 1.0 / table.mean_episode) if keeps_finals else 0.0,
        rollout=table.rollout_length or 0,
        writers=table.writers,
        is_queue=table.kind == "queue",
    )
    page_rows = demand.chosen_page_rows()
    # in bytes the page words count as well, so the bound is never passed
    arenas = arenas_of(table, page_rows).items()
    page_bytes = page_rows * fixed + 2 * w.LINE + sum(align(n * table.schema[name].item_bytes) for name, n in arenas)
    return plan(demand, page_bytes, page_rows, table.capacity, rows * per_row)


def arenas_of(table: Table, page_rows: int) -> dict[str, int]:
    """{ragged field: items that the arena of a page of `page_rows` rows holds} (conduit.store.format.arena_sizes)."""
    return arena_items(table.schema, table.mean_lengths, page_rows, 2 * (halo_ticks(table) + 1) * table.num_envs)


def check_min_size(table: Table, limits: Limits, geometry: Geometry) -> None:
    """Refuse limits under which sampling would wait for more rows than the table can hold.

    Raises:
        ConfigError: min_size is above that.
    """
    pages, page_rows, keep = geometry
    # one page at a time has just been emptied for its writer
    held = keep or (pages - 1) * max(1, page_rows - halo_ticks(table) * table.num_envs)
    if limits.min_size > held:
        raise ConfigError(
            f"Expected a min_size of at most the {held:,} rows that the table is sure to hold, got {limits.min_size:,}: nothing "
            "would ever be sampled. Raise capacity or lower min_size"
        )


def check_window(table: Table, history: int, future: int, *, crosses: bool) -> None:
    """Refuse a window that is wider than this table was created for.

    Args:
        table: The declaration.
        history: Ticks it needs before its anchor.
        future: Ticks it needs behind it.
        crosses: Whether it may go from one episode into the next.

    Raises:
        ConfigError: It is wider, or crosses episodes in a table that was created without.
    """
    if crosses and table.within_episodes:
        raise ConfigError(
            "Expected a window within an episode, got a Rollout or a Sequence with across=True: create the table with "
            "within_episodes=False"
        )
    if crosses and future > table.max_length - 1:
        raise ConfigError(
            f"Expected a window across episodes of at most {table.max_length - 1} ticks behind its first, got {future}: create the "
            f"table with max_length={future + 1} (one tick more than it is long with next_obs=True)"
        )
    if history > table.max_stack - 1:
        raise ConfigError(
            f"Expected a stack of at most {table.max_stack}, got {history + 1}: create the table with "
            f"max_stack={history + 1}"
        )
    if future > future_ticks(table):
        raise ConfigError(
            f"Expected a window of at most {future_ticks(table)} ticks behind its first, got {future}: create the table "
            f"with max_n_step={future} (transitions) or max_length={future + 1} (sequences, episodes, rollouts; with "
            "next_obs=True they need one tick more than they are long)"
        )


def check_writer(table: Table, num_envs: int, *, finals: bool = False) -> None:
    """Refuse a writer whose ticks do not fit this table's pages.

    Args:
        table: The declaration.
        num_envs: Rows per tick.
        finals: Whether each row may have a kept final observation beside it, those of the halo included.

    Raises:
        CapacityError: A page holds fewer than a halo (twice, with finals) and two ticks of `num_envs` rows.
    """
    halo = halo_ticks(table) * (2 if finals else 1)
    need = (halo + _least_ticks(table)) * num_envs
    if finals and table.rollout_length is not None:
        need += num_envs
    page_rows = geometry(table).page_rows
    if need > page_rows:
        what = f"{halo_ticks(table)} ticks and as many final observations" if finals else f"{halo_ticks(table)} ticks"
        raise CapacityError(
            f"Expected pages of at least {need} rows for {num_envs} environments (a halo of {what}, and {_least_ticks(table)} "
            f"ticks more), got {page_rows}: create the table with page_rows={16 * need} or num_envs={num_envs}"
        )
