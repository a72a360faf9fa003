"""The layout of a segment: the offset of everything in it, computed from the specification alone, so that all processes agree.

    header | specification (JSON) | participants | hazards | weights slots | tables: control, page blocks, columns

Every column begins at a multiple of 128 bytes. A field of 128 bytes or more per row has a row stride that is a multiple of 64, which
wide loads and PCIe need; smaller fields are packed, since padding would waste cache lines (conduit.store.format.sizes.row_stride).
A ragged field's column holds spans. Each page has an arena for the field's values, which begins at a multiple of 128 bytes; the
values in it are contiguous.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from conduit.errors import ConfigError
from conduit.field import Field
from conduit.numbers import whole
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.format.arena_sizes import ArenaLayout, check_arenas
from conduit.store.format.episode_records import ring_bytes
from conduit.store.format.field_moments import measured, seat_bytes
from conduit.store.format.filenames import check_name
from conduit.store.format.limit_specs import Limits, checked_limiter
from conduit.store.format.sizes import align, row_stride
from conduit.store.format.table_fit import check_writer
from conduit.store.format.table_spec import Priorities, Table, arenas_of, geometry, halo_ticks

MAGIC = 0x3154495544_4E4F43  # "CONDUIT1"
VERSION = 5
HEADER_BYTES = 4096
HEADER_MAGIC, HEADER_VERSION, HEADER_SIZE, HEADER_SPEC, HEADER_UUID, HEADER_PID, HEADER_TIME = 0, 8, 16, 24, 32, 48, 56
HEADER_CLOSED, HEADER_DIGEST, HEADER_TERM = 64, 72, 80
"""Byte offsets of the header's words: `closed` is 1 once the engine has closed, `digest` is a hash of the specification, `term` counts
the owners that have taken the engine over.
"""
PARTICIPANT_BYTES = w.LINE
WEIGHT_COPIES = 3
MAX_NAMED_LOADERS = 64
LOADER_BYTES = 2 * w.LINE


@dataclass(frozen=True, slots=True)
class TableSpec:
    """The specification of a table, as it is stored in the segment."""

    schema: dict[str, Any]
    pages: int
    page_rows: int
    keep: int
    max_stack: int
    max_n_step: int
    max_length: int
    priorities: tuple[float, float, int, float] | None
    statistics: tuple[str, ...]
    kind: Literal["replay", "queue"]
    arenas: dict[str, int]
    rollout_length: int
    limits: tuple[float, int, float | None, float | None] | None
    max_times_sampled: int
    within_episodes: bool


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One array of a weights slot: the name of its dtype, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """The specification of a segment; its layout follows from it alone."""

    tables: dict[str, TableSpec]
    policies: dict[str, tuple[TensorSpec, ...]]
    max_participants: int


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Offsets (bytes from the segment's start) of one table; `end` is the offset after its last byte.

    `keep` is the number of rows that must remain for a page to be evicted while another page is free; 0: writers always take free
    pages first.
    """

    name: str
    schema: Schema
    table: Table
    pages: int
    page_rows: int
    keep: int
    page_base: int
    first_generation: int
    control: int
    blocks: int
    sides: int
    seats: int
    columns: dict[str, int]
    terminated: int
    truncated: int
    meta: int
    priority: int
    marks: int
    sampled: int
    limits: Limits | None
    arenas: dict[str, ArenaLayout]
    end: int
    statistics: dict[str, int]
    episodes: int

    @property
    def rows(self) -> int:
        """Rows of all pages together."""
        return self.pages * self.page_rows

    def check_writer(self, num_envs: int, *, finals: bool) -> None:
        """Refuse a writer whose ticks do not fit this table's pages, or whose ragged values may not fit their arenas.

        Args:
            num_envs: Rows per tick.
            finals: Whether each row may have a kept final observation.

        Raises:
            CapacityError: The ticks do not fit, or the ragged values may not fit.
        """
        check_writer(self.table, num_envs, finals=finals)
        halo = halo_ticks(self.table)
        check_arenas(self.schema, self.arenas, halo, num_envs, (halo + 1) * num_envs * (2 if finals else 1))


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """Offsets of one weights slot: its control line, the version lines of its copies, and the arrays in a copy."""

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
    loaders: int
    tables: dict[str, TableLayout]
    policies: dict[str, WeightsLayout]
    size: int

    @property
    def hazard_count(self) -> int:
        """Hazard slots of all participants together."""
        return self.spec.max_participants * w.HAZARDS_PER_PARTICIPANT


def specify(tables: dict[str, Table], policies: dict[str, tuple[TensorSpec, ...]], participants: int) -> SegmentSpec:
    """The specification that is stored in a new segment.

    Raises:
        ConfigError: There is no table, a name is not allowed, or the number of participants is out of range.
        CapacityError: A table's capacity is not possible.
    """
    if not tables and not policies:
        raise ConfigError("Expected at least one table or policy, got none")
    for kind, names in (("tables", tables), ("policies", policies)):
        for name in names:
            if not isinstance(name, str) or not name:
                raise ConfigError(f"Expected names of at least one letter for {kind}, got {name!r}")
            check_name(name, {"tables": "table", "policies": "policy"}[kind], "")
    for tensors in policies.values():
        for tensor in tensors:
            check_name(tensor.name, "policy's array")
    participants = checked_participants(participants)
    specs = {}
    for name, table in tables.items():
        if not isinstance(table, Table):
            raise ConfigError(f"Expected a conduit.Table, got {type(table).__name__} - at tables[{name!r}]")
        pages, page_rows, keep = geometry(table)
        wanted = table.priorities
        priorities = None if wanted is None else (wanted.alpha, wanted.eps, wanted.span, wanted.scale)
        windows = (table.max_stack, table.max_n_step, table.max_length)
        arenas = arenas_of(table, page_rows)
        statistics = measured(table.schema, table.statistics)
        specs[name] = TableSpec(
            table.schema.to_document(),
            pages,
            page_rows,
            keep,
            *windows,
            priorities,
            statistics,
            table.kind,
            arenas,
            table.rollout_length or 0,
            _encoded_limits(checked_limiter(table.limiter)),
            table.max_times_sampled or 0,
            table.within_episodes,
        )
    return SegmentSpec(specs, policies, participants)


def checked_participants(count: object) -> int:
    """`max_participants` as an int.

    Raises:
        ConfigError: The count is out of range.
    """
    number = whole(count)
    if number is None or not 1 <= number <= w.OWNER_MASK:
        raise ConfigError(f"Expected max_participants from 1 to {w.OWNER_MASK}, got {count!r}")
    return number


def _encoded_limits(limits: Limits | None) -> tuple[float, int, float | None, float | None] | None:
    """Limits for JSON, which has no infinity: None stands for it."""
    if limits is None:
        return None
    low = None if limits.min_diff == -math.inf else limits.min_diff
    high = None if limits.max_diff == math.inf else limits.max_diff
    return limits.samples_per_insert, limits.min_size, low, high


def _decoded_limits(encoded: tuple[float, int, float | None, float | None] | None) -> Limits | None:
    if encoded is None:
        return None
    spi, size, low, high = encoded
    return Limits(spi, size, -math.inf if low is None else low, math.inf if high is None else high)


def _lay_table(name: str, spec: TableSpec, start: int, before: tuple[int, int], seats: int) -> tuple[TableLayout, int]:
    number, page_base = before
    schema = Schema.from_document(spec.schema)
    rows = spec.pages * spec.page_rows
    control = align(start)
    blocks = control + w.TABLE_CONTROL_BYTES
    sides = blocks + spec.pages * w.LINE
    seat_lines = sides + spec.pages * w.LINE
    end = align(seat_lines + seats * w.LINE, 4096)
    columns = {}
    for field in schema.fields:
        columns[field.name] = end
        end = align(end + rows * row_stride(field))
    terminated = end
    truncated = align(terminated + rows)
    meta = align(truncated + rows)
    # the specification has the pages already; the capacity only has to pass Table's checks again
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
        kind=spec.kind,
        rollout_length=spec.rollout_length or None,
        max_times_sampled=spec.max_times_sampled or None,
        within_episodes=spec.within_episodes,
    )
    priority = align(meta + rows * w.META_BYTES)
    marks = align(priority + (4 * rows if spec.priorities is not None else 0))
    sampled = align(marks + (4 * w.UPDATING_MARKS * seats if spec.priorities is not None else 0))
    end = sampled + (8 * rows if spec.max_times_sampled else 0)
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
    episodes = align(end)
    end = episodes + ring_bytes(schema)
    layout = TableLayout(
        name,
        schema,
        table,
        spec.pages,
        spec.page_rows,
        spec.keep,
        page_base,
        first_generation(number),
        control,
        blocks,
        sides,
        seat_lines,
        columns,
        terminated,
        truncated,
        meta,
        priority,
        marks,
        sampled,
        _decoded_limits(spec.limits),
        arenas,
        end,
        statistics,
        episodes,
    )
    return layout, align(end, 4096)


def _lay_weights(name: str, tensors: tuple[TensorSpec, ...], start: int) -> tuple[WeightsLayout, int]:
    offsets = []
    end = w.LINE  # the first line of a copy holds its version
    for tensor in tensors:
        offsets.append(end)
        end = align(end + Field("weights", tensor.dtype, tensor.shape or ()).row_bytes, 64)
    copy_bytes = align(end)
    control = align(start)
    copies = tuple(control + w.LINE + i * copy_bytes for i in range(WEIGHT_COPIES))
    layout = WeightsLayout(name, tensors, control, copies, tuple(offsets), copy_bytes)
    return layout, copies[-1] + copy_bytes


def read_spec(encoded: bytes) -> SegmentSpec:
    """Decode the specification that `lay_out` encoded.

    Raises:
        ValueError, TypeError, KeyError: The bytes are not such a specification.
    """
    document: dict[str, Any] = json.loads(encoded)
    tables = {}
    for name, table in document["tables"].items():
        words: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
        }
        tables[name] = TableSpec(**words)
    policies = {
        name: tuple(TensorSpec(one["name"], one["dtype"], tuple(one["shape"])) for one in tensors)
        for name, tensors in document["policies"].items()
    }
    return SegmentSpec(tables, policies, document["max_participants"])


def lay_out(spec: SegmentSpec) -> SegmentLayout:
    """Compute every offset of a segment."""
    encoded = json.dumps(dataclasses.asdict(spec), separators=(",", ":")).encode()
    participants = align(HEADER_BYTES + len(encoded), 4096)
    hazards = participants + spec.max_participants * PARTICIPANT_BYTES
    loaders = align(hazards + spec.max_participants * w.HAZARDS_PER_PARTICIPANT * 8)
    end = loaders + MAX_NAMED_LOADERS * LOADER_BYTES
    policies = {}
    for name, tensors in spec.policies.items():
        policies[name], end = _lay_weights(name, tensors, end)
    tables: dict[str, TableLayout] = {}
    page_base = 0
    for name, table in spec.tables.items():
        tables[name], end = _lay_table(name, table, end, (len(tables), page_base), spec.max_participants)
        page_base += table.pages
    return SegmentLayout(spec, encoded, participants, hazards, loaders, tables, policies, align(end, 4096))


def first_generation(number: int) -> int:
    """The first generation of the pages of an engine's table number `number`: the number's bits in reverse order."""
    bits = w.GENERATION_MASK.bit_length()
    return int(f"{number & w.GENERATION_MASK:0{bits}b}"[::-1], 2)
