"""Where every byte of a segment lies; computed from the specification alone, so that all processes agree.

    header | specification (JSON) | participants | hazards | weights slots | tables: control, page blocks, columns

Alignment is decided here and nowhere else: every column begins at a multiple of 128 bytes; a field of 128 bytes or more
per row has a row stride that is a multiple of 128 (wide loads and PCIe depend on it); smaller fields are packed, since
padding them would only dilute cache lines. A ragged field's column holds spans, and each page has an arena for its values,
which begins at a multiple of 128 bytes; the values inside it lie close together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from conduit.errors import CapacityError, ConfigError
from conduit.schema import Field, Schema
from conduit.store.arenas import ArenaLayout, arena_items, check_arenas, check_mean_lengths, row_share
from conduit.store.statistics import measured, seat_bytes
from conduit.store.words import LINE, META_BYTES, OWNER_MASK, SPAN_BYTES, TABLE_CONTROL_BYTES

MAGIC = 0x3154495544_4E4F43  # "CONDUIT1"
VERSION = 1
HEADER_BYTES = 4096
HAZARDS_PER_PARTICIPANT = 16
PARTICIPANT_BYTES = LINE
WEIGHT_COPIES = 3

MIN_PAGES = 4
MAX_PAGES = 65536
_MIN_TICKS = 4

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def align(offset: int, to: int = LINE) -> int:
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
    return int(float(match[1]) * _UNITS[match[2].upper()])


def row_stride(field: Field) -> int:
    """Bytes from one row of a field to the next; a ragged field has one word per row, its values lie in an arena."""
    if field.ragged:
        return SPAN_BYTES
    return field.row_bytes if field.row_bytes < LINE else align(field.row_bytes)


@dataclass(frozen=True, slots=True)
class Priorities:
    """How a table turns priorities into probabilities: P(i) = p_i / sum p, p_i = (|priority| + eps)^alpha.

    p is stored as an integer, a multiple of 2^-20 up to 2^12 (larger ones are stored as that), so that sums are exact.

    Attributes:
        alpha: Exponent, at least 0; 0 is uniform.
        eps: Added to every priority; with 0, rows of priority 0 are never drawn while others are positive.
        span: New rows get the largest priority among the last one to two spans of so many updates.
    """

    alpha: float = 0.6
    eps: float = 1e-6
    span: int = 1 << 17

    def __post_init__(self) -> None:
        if not (0.0 <= self.alpha < float("inf") and 0.0 <= self.eps < float("inf")):
            raise ConfigError(f"Expected alpha and eps of at least 0, got {self.alpha!r} and {self.eps!r}")
        if not isinstance(self.span, int) or self.span < 1:
            raise ConfigError(f"Expected a span of at least 1 update, got {self.span!r}")


@dataclass(frozen=True, slots=True)
class Table:
    """A table to create: its schema, its size, and the widest window it must be able to serve.

    Attributes:
        schema: Fields of a row.
        capacity: Rows (int) or bytes ("2 GiB"). In rows: at least that many steps of one writer of `num_envs` environments
            stay, halos not counted; final observations that are kept beside their steps do count. In bytes: an upper bound
            for pages and their words.
        page_rows: Rows per page, or None to choose. Pages are what is evicted at once, so a table has at least 4; a
            writer of N environments fills N rows per tick, and its pages must hold a handful of ticks.
        max_stack: Longest frame stack, in ticks, that windows may ask for (inclusive).
        max_n_step: Longest n-step return, in ticks, that windows may ask for (inclusive).
        max_length: Longest sequence, episode or rollout, in ticks, that windows may ask for (inclusive); one more than that
            where they ask for `next_obs`.
        num_envs: Environments per writer that page size is chosen for; writers may have fewer or more.
        priorities: How rows are prioritised, or None for a table without priorities.
        mean_lengths: {ragged field: mean length that its arenas are made for}; half of the largest length where it is
            missing. A page closes when its rows or one of its arenas run out, so a capacity in rows is kept for values
            that are no longer than this on average.
        statistics: Fields whose running mean and variance are kept (`Client.statistics`, `conduit.normalise`); a dotted name's
            parent stands for all below it.
        kind: "replay": the oldest page is evicted when no page is free.
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
    kind: Literal["replay"] = "replay"
    mean_lengths: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.schema, Schema):
            raise ConfigError(f"Expected a conduit.Schema, got {type(self.schema).__name__}")
        if not isinstance(self.capacity, int | str) or isinstance(self.capacity, bool):
            raise CapacityError(
                f"Expected a size such as '2 GiB' or '500 MB', or an int for rows, got {self.capacity!r}"
            )
        for name in ("max_stack", "max_n_step", "max_length", "num_envs"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"Expected {name} of at least 1, got {value!r}")
        if self.kind != "replay":
            raise ConfigError(f"Expected kind 'replay', got {self.kind!r}")
        check_mean_lengths(self.schema, self.mean_lengths)
        measured(self.schema, self.statistics)
        self.geometry()

    @property
    def halo_ticks(self) -> int:
        """Ticks that a page copies from the page before it."""
        return self.max_stack - 1 + self.future_ticks

    @property
    def future_ticks(self) -> int:
        """Ticks behind its anchor that the widest window needs."""
        return max(self.max_n_step, self.max_length - 1)

    def check_window(self, history: int, future: int) -> None:
        """Refuse a window that is wider than this table was created for.

        Args:
            history: Ticks it needs before its anchor.
            future: Ticks it needs behind it.

        Raises:
            ConfigError: It is wider.
        """
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
        """{ragged field: items that the arena of a page of `page_rows` rows holds} (conduit.store.arenas)."""
        return arena_items(self.schema, self.mean_lengths, page_rows, 2 * (self.halo_ticks + 1) * self.num_envs)

    def geometry(self) -> tuple[int, int]:
        """Pages and rows per page.

        Raises:
            CapacityError: The capacity is too small or no size.
        """
        per_row = sum(row_stride(field) for field in self.schema.fields) + 2 + META_BYTES
        per_row += 4 if self.priorities is not None else 0
        fixed = per_row
        per_row += row_share(self.schema, self.mean_lengths)
        in_bytes = isinstance(self.capacity, str)
        rows = parse_bytes(self.capacity) // per_row if isinstance(self.capacity, str) else int(self.capacity)
        if rows < 1:
            raise CapacityError(f"Expected a capacity of at least one row ({per_row} bytes), got {self.capacity!r}")
        if self.page_rows is not None:
            page_rows = self.page_rows
            if not isinstance(page_rows, int) or page_rows < self.halo_ticks + _MIN_TICKS:
                raise CapacityError(
                    f"Expected page_rows of at least {self.halo_ticks + _MIN_TICKS} "
                    f"(a halo of {self.halo_ticks} and {_MIN_TICKS} more), got {page_rows!r}"
                )
        else:
            wanted = self.num_envs * max(256, 16 * self.halo_ticks)
            least = self.num_envs * (2 * self.halo_ticks + _MIN_TICKS)
            page_rows = max(rows // 256, min(wanted, rows // 16), least)
        own_rows = max(1, page_rows - self.halo_ticks * self.num_envs)
        # in bytes the page words count as well, so the bound is never passed; in rows one page more is made, since the
        # page being filled has just taken the place of the oldest
        arenas = self.arena_items(page_rows).items()
        page_bytes = page_rows * fixed + LINE + sum(align(n * self.schema[name].item_bytes) for name, n in arenas)
        pages = rows * per_row // page_bytes if in_bytes else -(-rows // own_rows) + 1
        if in_bytes and pages < MIN_PAGES:
            raise CapacityError(
                f"Expected a capacity of at least {MIN_PAGES} pages of {page_rows} rows "
                f"({MIN_PAGES * page_bytes} bytes), got {self.capacity!r}: raise it or lower page_rows"
            )
        pages = max(pages, MIN_PAGES)
        if pages > MAX_PAGES:
            raise CapacityError(
                f"Expected at most {MAX_PAGES} pages, got {pages} of {page_rows} rows: raise page_rows to at least "
                f"{-(-rows // (MAX_PAGES - 1))}"
            )
        return pages, page_rows

    def check_writer(self, num_envs: int, *, finals: bool = False) -> None:
        """Refuse a writer whose ticks do not fit this table's pages.

        Args:
            num_envs: Rows per tick.
            finals: Whether each row may have a kept final observation beside it, those of the halo included.

        Raises:
            CapacityError: A page holds fewer than a halo (twice, with finals) and four ticks of `num_envs` rows.
        """
        halo = self.halo_ticks * (2 if finals else 1)
        need = (halo + _MIN_TICKS) * num_envs
        page_rows = self.geometry()[1]
        if need > page_rows:
            what = f"{self.halo_ticks} ticks and as many final observations" if finals else f"{self.halo_ticks} ticks"
            raise CapacityError(
                f"Expected pages of at least {need} rows for {num_envs} environments (a halo of {what}, and {_MIN_TICKS} "
                f"ticks more), got {page_rows}: create the table with page_rows={16 * need} or num_envs={num_envs}"
            )


class TableSpec(msgspec.Struct, frozen=True):
    """A table as it is written into the segment."""

    schema: msgspec.Raw
    pages: int
    page_rows: int
    max_stack: int
    max_n_step: int
    max_length: int
    priorities: tuple[float, float, int] | None
    statistics: tuple[str, ...]
    kind: str
    arenas: dict[str, int]


class TensorSpec(msgspec.Struct, frozen=True):
    """One array of a weights slot: dtype by name, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SegmentSpec(msgspec.Struct, frozen=True):
    """All that a segment's layout follows from."""

    tables: dict[str, TableSpec]
    policies: dict[str, tuple[TensorSpec, ...]]
    max_participants: int


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Offsets (bytes from the segment's start) of one table; `end` is where it ends."""

    name: str
    schema: Schema
    table: Table
    pages: int
    page_rows: int
    page_base: int
    control: int
    blocks: int
    columns: dict[str, int]
    terminated: int
    truncated: int
    meta: int
    priority: int
    arenas: dict[str, ArenaLayout]
    end: int
    statistics: dict[str, int]

    @property
    def rows(self) -> int:
        """Rows of all pages together."""
        return self.pages * self.page_rows

    def check_writer(self, num_envs: int, *, finals: bool) -> None:
        """Refuse a writer whose ticks do not fit this table's pages, or whose ragged values may not fit their arenas.

        Args:
            num_envs: Rows per tick.
            finals: Whether each row may have a kept final observation beside it.

        Raises:
            CapacityError: They may not.
        """
        self.table.check_writer(num_envs, finals=finals)
        halo = self.table.halo_ticks
        check_arenas(self.schema, self.arenas, halo, num_envs, (halo + 1) * num_envs * (2 if finals else 1))


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """Offsets of one weights slot: control line, version lines of the copies, and the arrays inside a copy."""

    name: str
    tensors: tuple[TensorSpec, ...]
    control: int
    copies: tuple[int, ...]
    offsets: tuple[int, ...]
    copy_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Offsets of everything in a segment; `size` is its length in bytes, a multiple of 4096."""

    spec: SegmentSpec
    encoded: bytes
    participants: int
    hazards: int
    tables: dict[str, TableLayout]
    policies: dict[str, WeightsLayout]
    size: int

    @property
    def hazard_count(self) -> int:
        """Hazard slots of all participants together."""
        return self.spec.max_participants * HAZARDS_PER_PARTICIPANT


def specify(tables: dict[str, Table], policies: dict[str, tuple[TensorSpec, ...]], participants: int) -> SegmentSpec:
    """The specification that is stored in a new segment.

    Raises:
        ConfigError: No table, a name that is none, or a participant count out of range.
        CapacityError: A table's capacity cannot work.
    """
    if not tables and not policies:
        raise ConfigError("Expected at least one table or policy, got none")
    for kind, names in (("tables", tables), ("policies", policies)):
        for name in names:
            if not isinstance(name, str) or not name:
                raise ConfigError(f"Expected names of at least one letter for {kind}, got {name!r}")
    if not isinstance(participants, int) or not 1 <= participants <= OWNER_MASK:
        raise ConfigError(f"Expected max_participants from 1 to {OWNER_MASK}, got {participants!r}")
    specs = {}
    for name, table in tables.items():
        if not isinstance(table, Table):
            raise ConfigError(f"Expected a conduit.Table, got {type(table).__name__} - at tables[{name!r}]")
        pages, page_rows = table.geometry()
        wanted = table.priorities
        priorities = None if wanted is None else (wanted.alpha, wanted.eps, wanted.span)
        raw = msgspec.Raw(table.schema.to_json())
        windows = (table.max_stack, table.max_n_step, table.max_length)
        arenas = table.arena_items(page_rows)
        statistics = measured(table.schema, table.statistics)
        specs[name] = TableSpec(raw, pages, page_rows, *windows, priorities, statistics, table.kind, arenas)
    return SegmentSpec(specs, policies, participants)


def _lay_table(name: str, spec: TableSpec, start: int, page_base: int, seats: int) -> tuple[TableLayout, int]:
    schema = Schema.from_json(bytes(spec.schema))
    rows = spec.pages * spec.page_rows
    control = align(start)
    blocks = control + TABLE_CONTROL_BYTES
    end = align(blocks + spec.pages * LINE, 4096)
    columns = {}
    for field in schema.fields:
        columns[field.name] = end
        end = align(end + rows * row_stride(field))
    terminated = end
    truncated = align(terminated + rows)
    meta = align(truncated + rows)
    # the pages are given; the capacity is only there to be valid again
    table = Table(
        schema,
        spec.page_rows,
        page_rows=spec.page_rows,
        max_stack=spec.max_stack,
        max_n_step=spec.max_n_step,
        max_length=spec.max_length,
        priorities=None if spec.priorities is None else Priorities(*spec.priorities),
        mean_lengths={key: min(n / spec.page_rows, schema[key].max_length) for key, n in spec.arenas.items()},
        statistics=spec.statistics,
    )
    priority = align(meta + rows * META_BYTES)
    end = priority + (4 * rows if spec.priorities is not None else 0)
    arenas = {}
    for key, items in spec.arenas.items():
        page_bytes = align(items * schema[key].item_bytes)
        arenas[key] = ArenaLayout(align(end), page_bytes, items)
        end = align(end) + spec.pages * page_bytes
    end = align(end)
    statistics = {}
    for key in spec.statistics:
        statistics[key] = end
        end += seats * seat_bytes(schema[key])
    layout = TableLayout(
        name,
        schema,
        table,
        spec.pages,
        spec.page_rows,
        page_base,
        control,
        blocks,
        columns,
        terminated,
        truncated,
        meta,
        priority,
        arenas,
        end,
        statistics,
    )
    return layout, align(end, 4096)


def _lay_weights(name: str, tensors: tuple[TensorSpec, ...], start: int) -> tuple[WeightsLayout, int]:
    offsets = []
    end = LINE  # the first line of a copy holds its version
    for tensor in tensors:
        offsets.append(end)
        end = align(end + Field("weights", tensor.dtype, tensor.shape or ()).row_bytes, 64)
    copy_bytes = align(end)
    control = align(start)
    copies = tuple(control + LINE + i * copy_bytes for i in range(WEIGHT_COPIES))
    layout = WeightsLayout(name, tensors, control, copies, tuple(offsets), copy_bytes)
    return layout, copies[-1] + copy_bytes


def lay_out(spec: SegmentSpec) -> SegmentLayout:
    """Compute every offset of a segment."""
    encoded = msgspec.json.encode(spec)
    participants = align(HEADER_BYTES + len(encoded), 4096)
    hazards = participants + spec.max_participants * PARTICIPANT_BYTES
    end = align(hazards + spec.max_participants * HAZARDS_PER_PARTICIPANT * 8)
    policies = {}
    for name, tensors in spec.policies.items():
        policies[name], end = _lay_weights(name, tensors, end)
    tables = {}
    page_base = 0
    for name, table in spec.tables.items():
        tables[name], end = _lay_table(name, table, end, page_base, spec.max_participants)
        page_base += table.pages
    return SegmentLayout(spec, encoded, participants, hazards, tables, policies, align(end, 4096))
