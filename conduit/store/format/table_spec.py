"""A table as its user declares it: schema, size, the widest window, how rows are kept, limited and prioritized.

What follows from it alone, pages and rows per page, is worked out here, so that a table that cannot work is refused when it
is declared; where its bytes lie is conduit.store.format.layout's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from conduit.errors import CapacityError, ConfigError
from conduit.native.memory import CACHE_LINE
from conduit.numbers import MOST, at_least, flag, whole, within
from conduit.schema import Field, Schema
from conduit.store.format import words as w
from conduit.store.format.arena_sizes import arena_items, checked_mean_lengths, row_share
from conduit.store.format.field_moments import measured
from conduit.store.format.limit_specs import Limiter, Limits, checked_limiter
from conduit.store.format.page_sizes import Demand, Geometry, plan

_MIN_TICKS = 2
"""Ticks that a page must hold beside its halo and that one's final observations: one, and room for its own."""
_GOOD_TICKS = 4
"""The same where the pages' size is chosen."""
_MOST = 1 << 62

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def align(offset: int, to: int = w.LINE) -> int:
    """`offset` rounded up to a multiple of `to`."""
    return -(-offset // to) * to


def parse_bytes(text: str) -> int:
    """Bytes meant by a text such as "2 GiB", "512MB" or "4096 B".

    Raises:
        CapacityError: The text is no size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise CapacityError(f"Expected a size such as '2 GiB' or '500 MB', or an int for rows, got {text!r}")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size > _MOST:
        raise CapacityError(f"Expected a size of at most {_MOST:,} bytes, got {text!r}")
    return int(size)


def row_stride(field: Field) -> int:
    """Bytes from one row of a field to the next; a ragged field has one word per row, its values lie in an arena.

    A large row begins at a multiple of 64 bytes: it then spans no more pieces of 128 bytes than if it began at a multiple of 128,
    and rows that are a multiple of 64 lie close together, so that those of a tick are one copy.
    """
    if field.ragged:
        return w.SPAN_BYTES
    return field.row_bytes if field.row_bytes < w.LINE else align(field.row_bytes, CACHE_LINE)


@dataclass(frozen=True, slots=True)
class Priorities:
    """How a table turns priorities into probabilities: P(i) = p_i / sum p, p_i = (|priority| + eps)^alpha.

    p is stored as an integer, so that sums are exact: a multiple of scale * 2^-20 up to 128 * scale, and to 8 digits above. It is rounded to the
    nearest of these, so it is off by up to half a step: by 5e-7 of it at p = scale, half a percent at scale / 10,000, and as much as itself at
    half a step. Choose `scale` so that all that matters is above scale / 10,000. The
    largest is scale * 2^(42 - b) for a table of up to 2^b rows: 4.2 million * scale for one of a million. A positive p below half a step, or
    above the largest, is stored as the nearest there is, counted, and told by a RuntimeWarning.

    Attributes:
        alpha: Exponent, at least 0; 0 is uniform.
        eps: Added to every priority; with 0, rows of priority 0 are never drawn while others are positive.
        span: New rows get the largest priority among the last one to two spans of so many updates; before the first one p = scale.
        scale: The size of p that is ordinary in this table, from 1e-60 to 1e60; another than 1 where p is tiny or huge.
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
        """Steps of a stored p in 1."""
        return (1 << 20) / self.scale


@dataclass(frozen=True, slots=True)
class Table:
    """A table to create: its schema, its size, and the widest window it must be able to serve.

    Attributes:
        schema: Fields of a row.
        capacity: Rows (int) or bytes ("2 GiB"). In rows: at least that many rows of one writer of `num_envs` environments
            stay, copies of rows not counted (see `mean_episode` and `writers`). In bytes: an upper bound for pages and their words.
        page_rows: Rows per page, or None to choose. Pages are what is evicted at once, so a table has at least 4; a
            writer of N environments fills N rows per tick, and its pages must hold two ticks beside their halo.
        max_stack: Longest frame stack, in ticks, that windows may ask for (inclusive).
        max_n_step: Longest n-step return, in ticks, that windows may ask for (inclusive).
        max_length: Longest sequence, episode or rollout, in ticks, that windows may ask for (inclusive); one more than that
            where they ask for `next_obs`.
        num_envs: Environments per writer that page size is chosen for; writers may have fewer or more.
        priorities: How rows are prioritized, or None for a table without priorities.
        mean_lengths: {ragged field: mean length that its arenas are made for}; half of the largest length where it is
            missing. A page closes when its rows or one of its arenas run out, so a capacity in rows is kept for values
            that are no longer than this on average.
        statistics: Fields whose running mean and variance are kept (`Client.statistics`, `conduit.normalize`); a dotted name's
            parent stands for all below it.
        kind: "replay": the oldest page is evicted when no page is free. "queue": every row is delivered once, to one of any
            number of consumers (`Client.consumer`), and writers wait while the queue is full.
        rollout_length: For a queue: rows are delivered as rollouts of so many ticks of all environments of their writer,
            in one piece; None delivers them as they come, in ticks.
        limiter: How sampling and inserting keep step (conduit.SampleToInsertRatio, MinSize, Queue); None for no limit.
        max_times_sampled: A row is gone once it has been delivered so often, at most 65,535; None for no limit. Never more often,
            whoever draws at the same time and whoever dies; a loader that is killed may use up deliveries of the batch that it
            was making.
        writers: Writers that are open at once. Each has a page of its own open, beside the pages that the capacity needs, so that
            it is kept whatever they write. None: a table that chooses its page size has pages for 64 writers, unless these took
            more than three times the memory of the capacity and more than 64 MiB; the capacity is then kept for one of them.
        mean_episode: Steps of an episode on average, at least 1. An episode that ends may take a row more, for its final
            observation, and a capacity in rows is made for as many. None: for episodes of any length where that takes at most
            256 pages and 64 MiB, else for 20 steps.
        within_episodes: No window will cross from one episode into the next. Pages of writers that have closed are then filled up
            by new ones, so that a writer for each episode does not cost a page each, whatever max_length is. With max_length=1 and
            without max_times_sampled that is so in any case.
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
        geometry = self.geometry()
        if limits is not None:
            self.check_min_size(limits, geometry)

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

    def check_min_size(self, limits: Limits, geometry: Geometry) -> None:
        """Refuse limits under which sampling would wait for more rows than the table can hold.

        Raises:
            ConfigError: min_size is above that.
        """
        pages, page_rows, keep = geometry
        # one page at a time has just been emptied for its writer
        held = keep or (pages - 1) * max(1, page_rows - self.halo_ticks * self.num_envs)
        if limits.min_size > held:
            raise ConfigError(
                f"Expected a min_size of at most the {held:,} rows that the table is sure to hold, got {limits.min_size:,}: nothing "
                "would ever be sampled. Raise capacity or lower min_size"
            )

    @property
    def fills_pages(self) -> bool:
        """Whether a page that a stream ended in is filled up by the next writer of as many environments.

        Windows that cross episodes could then cross from one writer's rows into another's, and start where it did not begin.
        Where deliveries of a row are counted, rows that have been drawn must not move to another page.
        """
        return (
            self.kind == "replay" and self.max_times_sampled is None and (self.max_length == 1 or self.within_episodes)
        )

    @property
    def halo_ticks(self) -> int:
        """Ticks that a page copies from the page before it; a queue's rows are delivered once and never copied."""
        return self.max_stack - 1 + self.future_ticks

    @property
    def future_ticks(self) -> int:
        """Ticks behind its anchor that the widest window needs."""
        return 0 if self.kind == "queue" else max(self.max_n_step, self.max_length - 1)

    @property
    def _least_ticks(self) -> int:
        """Ticks that a page must hold beside its halo; of a rollout, the observations behind its last tick as well."""
        return _MIN_TICKS if self.rollout_length is None else self.rollout_length + 1

    def check_window(self, history: int, future: int, *, crosses: bool) -> None:
        """Refuse a window that is wider than this table was created for.

        Args:
            history: Ticks it needs before its anchor.
            future: Ticks it needs behind it.
            crosses: Whether it may go from one episode into the next.

        Raises:
            ConfigError: It is wider, or crosses episodes in a table that was created without.
        """
        if crosses and self.within_episodes:
            raise ConfigError(
                "Expected a window within an episode, got a Rollout or a Sequence with across=True: create the table with "
                "within_episodes=False"
            )
        if crosses and future > self.max_length - 1:
            raise ConfigError(
                f"Expected a window across episodes of at most {self.max_length - 1} ticks behind its first, got {future}: create the "
                f"table with max_length={future + 1} (one tick more than it is long with next_obs=True)"
            )
        if history > self.max_stack - 1:
            raise ConfigError(
                f"Expected a stack of at most {self.max_stack}, got {history + 1}: create the table with "
                f"max_stack={history + 1}"
            )
        if future > self.future_ticks:
            raise ConfigError(
                f"Expected a window of at most {self.future_ticks} ticks behind its first, got {future}: create the table "
                f"with max_n_step={future} (transitions) or max_length={future + 1} (sequences, episodes, rollouts; with "
                "next_obs=True they need one tick more than they are long)"
            )

    def arena_items(self, page_rows: int) -> dict[str, int]:
        """{ragged field: items that the arena of a page of `page_rows` rows holds} (conduit.store.format.arena_sizes)."""
        return arena_items(self.schema, self.mean_lengths, page_rows, 2 * (self.halo_ticks + 1) * self.num_envs)

    def geometry(self) -> Geometry:
        """Pages, rows per page, and rows that are kept while a page is free.

        Raises:
            CapacityError: The capacity is too small, too large or no size, or the words of a segment have too few bits for it.
        """
        per_row = sum(row_stride(field) for field in self.schema.fields) + 2 + w.META_BYTES
        per_row += (self.priorities is not None) * 4 + (self.max_times_sampled is not None) * 8
        fixed = per_row
        per_row += row_share(self.schema, self.mean_lengths)
        in_bytes = isinstance(self.capacity, str)
        rows = parse_bytes(self.capacity) // per_row if isinstance(self.capacity, str) else self.capacity
        if rows < 1:
            raise CapacityError(f"Expected a capacity of at least one row ({per_row} bytes), got {self.capacity!r}")
        if rows * per_row > _MOST:
            raise CapacityError(
                f"Expected a capacity of at most {_MOST // per_row:,} rows of {per_row} bytes, got {rows:,}"
            )
        if self.page_rows is not None:
            least = self.halo_ticks + self._least_ticks
            if whole(self.page_rows) is None or self.page_rows < least:
                raise CapacityError(
                    f"Expected page_rows of at least {least} (a halo of {self.halo_ticks} and {self._least_ticks} more), "
                    f"got {self.page_rows!r}"
                )
        keeps_finals = bool(self.schema.observation_names)
        demand = Demand(
            rows=rows,
            in_bytes=in_bytes,
            page_rows=self.page_rows,
            num_envs=self.num_envs,
            halo=self.halo_ticks,
            least_ticks=_GOOD_TICKS,
            reserve=self.num_envs if keeps_finals else 0,
            finals=(self.mean_episode and 1.0 / self.mean_episode) if keeps_finals else 0.0,
            rollout=self.rollout_length or 0,
            writers=self.writers,
            is_queue=self.kind == "queue",
        )
        page_rows = demand.chosen_page_rows()
        # in bytes the page words count as well, so the bound is never passed
        arenas = self.arena_items(page_rows).items()
        page_bytes = page_rows * fixed + 2 * w.LINE + sum(align(n * self.schema[name].item_bytes) for name, n in arenas)
        return plan(demand, page_bytes, page_rows, self.capacity, rows * per_row)

    def check_writer(self, num_envs: int, *, finals: bool = False) -> None:
        """Refuse a writer whose ticks do not fit this table's pages.

        Args:
            num_envs: Rows per tick.
            finals: Whether each row may have a kept final observation beside it, those of the halo included.

        Raises:
            CapacityError: A page holds fewer than a halo (twice, with finals) and two ticks of `num_envs` rows.
        """
        halo = self.halo_ticks * (2 if finals else 1)
        need = (halo + self._least_ticks) * num_envs
        if finals and self.rollout_length is not None:
            need += num_envs
        page_rows = self.geometry().page_rows
        if need > page_rows:
            what = f"{self.halo_ticks} ticks and as many final observations" if finals else f"{self.halo_ticks} ticks"
            raise CapacityError(
                f"Expected pages of at least {need} rows for {num_envs} environments (a halo of {what}, and {self._least_ticks} "
                f"ticks more), got {page_rows}: create the table with page_rows={16 * need} or num_envs={num_envs}"
            )
