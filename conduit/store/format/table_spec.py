"""The declaration of a table: its schema, its size, its widest window, and how rows are kept, limited and prioritized.

This module also computes what follows from the declaration alone: the number and size of pages, and the width of the halo. A
declaration that cannot work is refused here. conduit.store.format.table_fit checks writers and windows against it, and
conduit.store.format.layout places its bytes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict, Unpack

from conduit.errors import CapacityError, ConfigError
from conduit.nesting import hint
from conduit.numbers import MOST, at_least, flag, whole, within
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.format.arena_sizes import arena_items, checked_mean_lengths, row_share
from conduit.store.format.field_moments import measured
from conduit.store.format.limit_specs import Limiter, Limits, checked_limiter
from conduit.store.format.page_sizes import Demand, Geometry, plan
from conduit.store.format.sizes import MOST_BYTES, align, parse_bytes, row_stride

_MIN_TICKS = 2
"""Ticks that a page must hold beside its halo and the halo's final observations: one tick, and room for its final observations."""
_GOOD_TICKS = 4
"""Ticks that a page holds, in the same sense, if Conduit chooses its size."""


@dataclass(frozen=True, slots=True)
class Priorities:
    """How a table turns priorities into probabilities: P(i) = p_i / sum p, p_i = (|priority| + eps)^alpha.

    p is stored as an integer, so that sums are exact: as a multiple of scale * 2^-20 up to 128 * scale, and to 8 digits above that. It is
    rounded to the nearest step, so its error is up to half a step: 5e-7 of it at p = scale, half a percent at scale / 10,000, and as much as
    p itself at half a step. Choose `scale` so that all values of p that matter are above scale / 10,000. The largest p is
    scale * 2^(42 - b) for a table of up to 2^b rows: 4.2 million * scale for a table of a million. A positive p below half a step, or
    above the largest, is stored as the nearest possible value, counted, and reported by a RuntimeWarning.

    Attributes:
        alpha: Exponent, at least 0; 0 is uniform.
        eps: Added to every priority; with 0, rows of priority 0 are never drawn while others are positive.
        span: Number of updates in a span. New rows get the largest priority of the last one to two spans; before the first, p = scale.
        scale: The usual size of p in this table, from 1e-60 to 1e60; set it if p is tiny or huge.
    """

    alpha: float = 0.6
    eps: float = 1e-6
    span: int = 1 << 17
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("alpha", "eps"):
            object.__setattr__(self, name, within(name, getattr(self, name), 0, math.inf))
        object.__setattr__(self, "span", at_least("span", self.span, 1))
        object.__setattr__(self, "scale", within("scale", self.scale, 1e-60, 1e60))

    @property
    def unit(self) -> float:
        """Number of steps of a stored p that make 1."""
        return (1 << 20) / self.scale


class TableOptions(TypedDict, total=False):
    """The options of both kinds of table, for type checkers; `Table` documents them and holds their defaults."""

    num_envs: int
    statistics: tuple[str, ...]
    page_rows: int | None
    mean_lengths: Mapping[str, float] | None
    mean_episode: float | None
    writers: int | None


class ReplayOptions(TableOptions, total=False):
    """The options of `Table.replay`."""

    max_stack: int
    max_n_step: int
    max_length: int
    within_episodes: bool
    priorities: Priorities | None
    limiter: Limiter | None
    max_times_sampled: int | None


class QueueOptions(TableOptions, total=False):
    """The options of `Table.queue`."""

    rollout_length: int | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table to create: its schema, its size, and the widest window it must be able to serve.

    `Table.replay` and `Table.queue` make the two kinds, each with the options that it has.

    Attributes:
        schema: Fields of a row.
        capacity: Rows (int) or bytes ("2 GiB"). In rows: the table keeps at least that many rows of one writer of `num_envs`
            environments, copies of rows not counted (see `mean_episode` and `writers`). In bytes: an upper bound for pages and their words.
        page_rows: Rows per page, or None to let Conduit choose. A table evicts whole pages, so it has at least 4. A tick (one step of all
            environments of a writer) of N environments takes N rows, and a page must hold two ticks beside its halo, the copy of the last
            ticks of the page before.
        max_stack: Longest frame stack, in ticks, that windows may use (inclusive).
        max_n_step: Longest n-step return, in ticks, that windows may use (inclusive).
        max_length: Longest sequence, episode or rollout, in ticks, that windows may use (inclusive); one tick more
            for windows with `next_obs`.
        num_envs: Environments per writer for which the page size is chosen; writers may have fewer or more.
        priorities: How rows are prioritized, or None for a table without priorities.
        mean_lengths: {ragged field: mean length for which its memory in each page is sized}; default half of the largest length. A page
            closes when its rows or this memory run out, so a capacity in rows holds for values that are no longer than this on
            average.
        statistics: Fields whose running mean and variance are kept (`TableHandle.statistics`, `conduit.normalize`); a dotted name's
            parent stands for all fields below it.
        kind: "replay": the oldest page is evicted when no page is free. "queue": every row is delivered once, to one of any
            number of consumers (`Client.consumer`), and writers wait while the queue is full.
        rollout_length: For a queue: rows are delivered as rollouts of this many ticks of all environments of their writer,
            each in one piece; None delivers them as they come, in ticks.
        limiter: Bounds for the ratio of sampled to inserted rows (conduit.SampleToInsertRatio, MinSize, Limits); None for no limit.
        max_times_sampled: A row is gone once it has been delivered this many times, at most 65,535; None for no limit. It is never
            delivered more often, even if several loaders draw it at once or one dies; a loader that is killed may use up deliveries
            of the batch that it was making.
        writers: Writers that are open at once. Each has a page of its own open, beside the pages that the capacity needs, so the
            capacity holds whatever they write. None: a table that chooses its page size has pages for 64 writers, unless these took
            more than three times the memory of the capacity and more than 64 MiB; the capacity then holds for one writer.
        mean_episode: Mean number of steps of an episode, at least 1. An episode that ends may take one more row, for its final
            observation, and a capacity in rows has room for these. None: room for episodes of any length if that takes at most
            256 pages and 64 MiB, else for episodes of 20 steps.
        within_episodes: No window will cross from one episode into the next. New writers then fill up the pages of writers that have
            closed, so a program that opens a writer for each episode does not use a page for each, whatever max_length is. With
            max_length=1 and without max_times_sampled this holds anyway.
    """

    schema: Schema
    capacity: int | str
    page_rows: int | None = None
    max_stack: int = 1
    max_n_step: int = 1
    max_length: int = 1
    num_envs: int = 1
    priorities: Priorities | None = None
    statistics: tuple[str, ...] = ()
    kind: Literal["replay", "queue"] = "replay"
    mean_lengths: Mapping[str, float] | None = None
    rollout_length: int | None = None
    limiter: Limiter | None = None
    max_times_sampled: int | None = None
    writers: int | None = None
    mean_episode: float | None = None
    within_episodes: bool = False

    @classmethod
    def replay(cls, schema: Schema, capacity: int | str, **options: Unpack[ReplayOptions]) -> Self:
        """A table that loaders draw from; it evicts the oldest page when no page is free. Options are attributes of the class.

        Raises:
            ConfigError, CapacityError: Bad options; names the offending one.
        """
        _check_options(options, ReplayOptions, "Table.replay")
        return cls(schema, capacity, kind="replay", **options)

    @classmethod
    def queue(cls, schema: Schema, capacity: int | str, **options: Unpack[QueueOptions]) -> Self:
        """A table whose rows consumers take, each row once; writers wait while it is full. Options are attributes of the class.

        Raises:
            ConfigError, CapacityError: Bad options; names the offending one.
        """
        _check_options(options, QueueOptions, "Table.queue")
        return cls(schema, capacity, kind="queue", **options)

    def __post_init__(self) -> None:
        if not isinstance(self.schema, Schema):
            raise ConfigError(f"Expected a conduit.Schema, got {type(self.schema).__name__}")
        capacity = self.capacity if isinstance(self.capacity, str) else whole(self.capacity)
        if capacity is None:
            raise CapacityError(
                f"Expected a size such as '2 GiB' or '500 MB', or an int for rows, got {self.capacity!r}"
            )
        object.__setattr__(self, "capacity", capacity)
        self._keep_whole("max_stack", "max_n_step", "max_length", "num_envs")
        self._keep_whole(
            *(n for n in ("rollout_length", "max_times_sampled", "writers") if getattr(self, n) is not None)
        )
        page_rows = whole(self.page_rows)
        if page_rows is not None:
            if page_rows > MOST:
                at_least("page_rows", page_rows, 1)
            object.__setattr__(self, "page_rows", page_rows)
        object.__setattr__(self, "within_episodes", flag("within_episodes", self.within_episodes))
        if self.priorities is not None and not isinstance(self.priorities, Priorities):
            raise ConfigError(f"Expected priorities=conduit.Priorities(...) or None, got {self.priorities!r}")
        if self.mean_episode is not None:
            object.__setattr__(self, "mean_episode", within("mean_episode", self.mean_episode, 1.0, math.inf))
        if self.max_times_sampled is not None and self.max_times_sampled > w.MOST_DELIVERIES:
            raise ConfigError(
                f"Expected max_times_sampled of at most {w.MOST_DELIVERIES}, got {self.max_times_sampled}: use None for no limit"
            )
        self._check_kind()
        limits = checked_limiter(self.limiter)
        object.__setattr__(self, "mean_lengths", checked_mean_lengths(self.schema, self.mean_lengths))
        measured(self.schema, self.statistics)
        sizes = geometry(self)
        if limits is not None:
            check_min_size(self, limits, sizes)

    def _keep_whole(self, *names: str) -> None:
        """Turn attributes into ints of at least 1."""
        for name in names:
            object.__setattr__(self, name, at_least(name, getattr(self, name), 1))

    def _check_kind(self) -> None:
        if self.kind not in ("replay", "queue"):
            raise ConfigError(f"Expected kind 'replay' or 'queue', got {self.kind!r}")
        length = self.rollout_length
        if self.kind == "replay":
            if length is not None:
                raise ConfigError(
                    f"Expected rollout_length for kind='queue' only, got {length!r}: a replay table serves rollouts as "
                    "windows, conduit.Rollout, and needs max_length"
                )
            return
        for name, least in (("max_stack", 1), ("max_n_step", 1), ("max_length", 1)):
            if getattr(self, name) != least:
                raise ConfigError(
                    f"Expected no {name} for kind='queue', got {getattr(self, name)}: a queue delivers rows, not windows"
                )
        if self.limiter is not None:
            raise ConfigError(
                "Expected no limiter for kind='queue': its writers wait while it is full, and each row is delivered once"
            )
        for name in ("priorities", "max_times_sampled"):
            if getattr(self, name) is not None:
                raise ConfigError(f"Expected no {name} for kind='queue': each row is delivered once, in order")


def _check_options(options: Mapping[str, Any], kind: Any, call: str) -> None:
    known = sorted(kind.__optional_keys__)
    for name in options:
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint(name, known)}")


def _show(call: Any, kind: Any) -> None:
    """Make `help` and `inspect.signature` list a kind's options, its own options first, with the defaults of the class."""
    *fixed, _ = inspect.signature(call.__func__).parameters.values()
    known = inspect.signature(Table).parameters.values()
    shown = [one.replace(kind=one.KEYWORD_ONLY) for one in known if one.name in kind.__optional_keys__]
    shown.sort(key=lambda one: one.name in TableOptions.__optional_keys__)
    call.__func__.__signature__ = inspect.Signature([*fixed, *shown], return_annotation="Table")


_show(Table.replay, ReplayOptions)
_show(Table.queue, QueueOptions)


def fills_pages(table: Table) -> bool:
    """Whether a new writer with the same number of environments continues a page in which another writer's stream ended.

    Not if windows may cross episodes: a window could then cross from one writer's rows into another's. Not with max_times_sampled
    either: rows that have been drawn must not move to another page.
    """
    return (
        table.kind == "replay" and table.max_times_sampled is None and (table.max_length == 1 or table.within_episodes)
    )


def halo_ticks(table: Table) -> int:
    """Ticks that a page copies from the page before it; a queue's rows are delivered once and never copied."""
    return table.max_stack - 1 + future_ticks(table)


def future_ticks(table: Table) -> int:
    """Ticks after its anchor that the widest window needs."""
    return 0 if table.kind == "queue" else max(table.max_n_step, table.max_length - 1)


def least_ticks(table: Table) -> int:
    """Ticks that a page must hold beside its halo; for a rollout, including the observations after its last tick."""
    return _MIN_TICKS if table.rollout_length is None else table.rollout_length + 1


def geometry(table: Table) -> Geometry:
    """Pages, rows per page, and rows that are kept while a page is free.

    Raises:
        CapacityError: The capacity is too small, too large or not a size, or a number does not fit the bits of a segment's words.
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
        least = halo_ticks(table) + least_ticks(table)
        if whole(table.page_rows) is None or table.page_rows < least:
            raise CapacityError(
                f"Expected page_rows of at least {least} (a halo of {halo_ticks(table)} and {least_ticks(table)} more), "
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
    # a bound in bytes includes the pages' words, so that it is never exceeded
    arenas = arenas_of(table, page_rows).items()
    page_bytes = page_rows * fixed + 2 * w.LINE + sum(align(n * table.schema[name].item_bytes) for name, n in arenas)
    return plan(demand, page_bytes, page_rows, table.capacity, rows * per_row)


def arenas_of(table: Table, page_rows: int) -> dict[str, int]:
    """{ragged field: items that the arena of a page of `page_rows` rows holds} (conduit.store.format.arena_sizes)."""
    return arena_items(table.schema, table.mean_lengths, page_rows, 2 * (halo_ticks(table) + 1) * table.num_envs)


def check_min_size(table: Table, limits: Limits, geometry: Geometry) -> None:
    """Refuse limits under which sampling would wait for more rows than the table can hold.

    Raises:
        ConfigError: min_size is larger than the number of rows that the table can hold.
    """
    pages, page_rows, keep = geometry
    # at any time, one page may just have been emptied for its writer
    held = keep or (pages - 1) * max(1, page_rows - halo_ticks(table) * table.num_envs)
    if limits.min_size > held:
        raise ConfigError(
            f"Expected a min_size of at most the {held:,} rows that the table is sure to hold, got {limits.min_size:,}: nothing "
            "would ever be sampled. Raise capacity or lower min_size"
        )
