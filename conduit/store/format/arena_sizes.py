"""The sizes of arenas, the memory for values of ragged fields: one arena per page and field, in items (steps along the first axis).

An arena is sized for a mean length, so a page closes when its rows or one of its arenas run out. An arena always has room for the
halo, the halo's final observations and one more tick, with all values at their longest. So a writer that has turned to a new page
always has room for its next tick.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from conduit.errors import CapacityError, ConfigError
from conduit.nesting import check_known
from conduit.numbers import real
from conduit.schema import Schema
from conduit.store.format import words as w


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The arenas of a ragged field, one per page.

    Attributes:
        offset: Offset of page 0's arena, bytes from the segment's start.
        page_bytes: Bytes from one page's arena to the next page's.
        items: Items in each arena.
    """

    offset: int
    page_bytes: int
    items: int


def mean_length(schema: Schema, name: str, given: Mapping[str, float] | None) -> float:
    """Mean length for which a ragged field's arenas are sized: the given one, or half of the largest length."""
    return (given or {}).get(name, schema[name].max_length / 2)


def checked_mean_lengths(schema: Schema, given: Mapping[str, float] | None) -> dict[str, float] | None:
    """Mean lengths as floats.

    Raises:
        ConfigError: A name is not a ragged field, or a length is not above 0 and at most the largest length.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"Expected {{ragged field: mean length}} as mean_lengths, got {given!r}")
    means = {}
    check_known(given, schema.ragged_names, "names of ragged fields", "mean_lengths")
    for name, value in given.items():
        largest = schema[name].max_length
        mean = real(value)
        if mean is None or not 0 < mean <= largest:
            raise ConfigError(
                f"Expected a mean length above 0 and up to {largest}, got {value!r} - at mean_lengths[{name!r}]"
            )
        means[name] = mean
    return means


def row_share(schema: Schema, given: Mapping[str, float] | None) -> int:
    """Bytes of a row's values at their mean lengths, summed over all ragged fields."""
    return math.ceil(sum(mean_length(schema, name, given) * schema[name].item_bytes for name in schema.ragged_names))


def arena_items(schema: Schema, given: Mapping[str, float] | None, page_rows: int, least_values: int) -> dict[str, int]:
    """{ragged field: items of each page's arena}.

    Args:
        schema: The table's schema.
        given: {ragged field: mean length}.
        page_rows: Rows of a page.
        least_values: Number of values of the largest length that an arena must hold.

    Raises:
        CapacityError: A position in the arena would not fit 32 bits.
    """
    items = {}
    for name in schema.ragged_names:
        wanted = math.ceil(page_rows * mean_length(schema, name, given))
        items[name] = max(wanted, least_values * schema[name].max_length)
        if items[name] > w.SPAN_MASK:
            raise CapacityError(
                f"Expected at most {w.SPAN_MASK} items of ragged values in a page, got {items[name]}: lower page_rows or "
                f"mean_lengths - at `{name}`"
            )
    return items


def check_arenas(
    schema: Schema, arenas: Mapping[str, ArenaLayout], halo_ticks: int, num_envs: int, values: int
) -> None:
    """Refuse a writer whose halo and next tick may not fit the arenas.

    Args:
        schema: The table's schema.
        arenas: The table's arenas.
        halo_ticks: Ticks that a page copies from the page before.
        num_envs: Rows per tick.
        values: Number of values that the halo and one more tick may have, kept final observations included.

    Raises:
        CapacityError: They may not fit.
    """
    for name, arena in arenas.items():
        need = values * schema[name].max_length
        if need > arena.items:
            raise CapacityError(
                f"Expected arenas of at least {need} items for {num_envs} environments (a halo of {halo_ticks} ticks and one "
                f"more, each value at its longest), got {arena.items}: create the table with num_envs={num_envs}, or with "
                f"larger page_rows or mean_lengths - at `{name}`"
            )
