"""The number of a table's pages, their rows, and the number of rows that an eviction keeps.

Kept rows and allocated pages differ. The capacity promises that an eviction *keeps* at least that many rows of one writer
(conduit.store.pages.protocol.claim). Pages are *allocated* for those rows, and for the other writers that have a page open at the
same time. Numbers that do not fit the bits of a segment's words are refused here, by name.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import NamedTuple

from conduit.errors import CapacityError
from conduit.store.format import words as w

MIN_PAGES = 4
MAX_PAGES = 65536
MAX_PAGE_ROWS = 1 << (32 - w.LINK_SHIFT)
"""Most rows of a page: the number of bits of a link limits it."""
MAX_ROWS = 1 << w.ROW_BITS
"""Most rows of a table: the number of bits of a row's number in its id limits it."""
DEFAULT_WRITERS = 64
_SPARE = 8
"""Pages beside the writers' own: for page turns, during which a writer has two pages, and for leases."""
DEFAULT_EPISODE = 20
_FEW_PAGES = 256
_MOST_UNASKED = 64 << 20
"""Most bytes for writers, and for final observations of short episodes, if `writers` or `mean_episode` is not given."""


class Geometry(NamedTuple):
    """Pages, rows per page, and the rows that must remain for a page to be evicted while another is free (0: free pages go first)."""

    pages: int
    page_rows: int
    keep: int


@dataclass(frozen=True, slots=True)
class Demand:
    """The requirements on a table's pages.

    Attributes:
        rows: Rows of the capacity; for a capacity in bytes, the rows that fit in it.
        in_bytes: Whether the capacity is a bound in bytes.
        page_rows: Rows per page, or None to choose.
        num_envs: N, rows per tick of the writer that the capacity is promised for.
        halo: Ticks that a page copies from the page before.
        least_ticks: Ticks that a page of chosen size holds beside its halo and the halo's final observations.
        reserve: Rows that a writer leaves free after a tick, for the tick's final observations.
        finals: Mean number of kept final observations per row; None if not given.
        rollout: Ticks of a rollout, or 0.
        writers: Writers open at once, or None if not given.
        is_queue: Whether rows wait for consumers.
    """

    rows: int
    in_bytes: bool
    page_rows: int | None
    num_envs: int
    halo: int
    least_ticks: int
    reserve: int
    finals: float | None
    rollout: int
    writers: int | None
    is_queue: bool

    def chosen_page_rows(self) -> int:
        """Rows per page: `page_rows`, or so many that a large table has a few hundred pages, and a small one fewer."""
        if self.page_rows is not None:
            return self.page_rows
        if self.rollout:
            # for each environment: a rollout, the observation after its last tick, a final observation, and further final
            # observations for a quarter of the ticks
            return (self.rollout + 2 + max(4, self.rollout // 4)) * self.num_envs
        # without extra pages for writers, the writers share these pages; a queue's page is also the unit of a claim
        few = DEFAULT_WRITERS + _SPARE if self.in_bytes else 30
        apart = 2 * (self.writers or 0)
        wanted = self.num_envs * max(320, 16 * self.halo)
        if self.is_queue and not apart:
            wanted = min(wanted, max(self.rows // (DEFAULT_WRITERS + _SPARE), min(self.rows // 16, 64)))
            few = 1
        least = self.num_envs * (2 * self.halo + self.least_ticks)
        most = min(self.rows // max(256, apart), MAX_PAGE_ROWS)
        return max(most, min(wanted, self.rows // max(few, apart)), least)

    def own_rows(self, page_rows: int, finals: float | None = None) -> int:
        """New rows that a writer of `num_envs` environments writes into a page that continues its stream.

        Args:
            page_rows: Rows of the page.
            finals: Kept final observations per row; None takes `finals` of the demand.
        """
        if self.rollout:
            return self.rollout * self.num_envs
        ticks, reserve = page_rows // self.num_envs, self.reserve // self.num_envs
        # a tick is written if it and its reserve fit after the earlier ticks and their final observations
        rows_per_step = 1.0 + (self.usual_finals if finals is None else finals)
        own = int((ticks - 1 - reserve) / rows_per_step + 1e-6) + 1 - self.halo
        return max(1, own) * self.num_envs

    @property
    def usual_finals(self) -> float:
        """Kept final observations per row for which a capacity is always sized."""
        return 1.0 / DEFAULT_EPISODE if self.finals is None else self.finals

    def keep(self) -> int:
        """Rows of the capacity, including rows that only hold a final observation."""
        return self.rows + int(self.rows * self.usual_finals)

    def pages_for_any_episodes(self, page_rows: int) -> int:
        """Pages that hold the rows even if every step ends an episode.

        0 if these are too many, for a queue, or if `page_rows` or the mean episode is given.
        """
        if self.finals is not None or self.page_rows is not None or self.is_queue:
            return 0
        pages = -(-self.rows // self.own_rows(page_rows, 1.0)) + 1
        return pages if pages <= _FEW_PAGES else 0


def plan(demand: Demand, page_bytes: int, page_rows: int, capacity: int | str, total_bytes: int) -> Geometry:
    """Pages for a demand.

    Args:
        demand: The requirements on the pages.
        page_bytes: Bytes of a page of `page_rows` rows, with its words.
        page_rows: `demand.chosen_page_rows()`.
        capacity: The caller's capacity, for the errors.
        total_bytes: Bytes of a capacity in bytes.

    Raises:
        CapacityError: No number of pages meets the demand.
    """
    writers = demand.writers or 1
    if demand.in_bytes:
        pages = total_bytes // page_bytes
        least = max(MIN_PAGES, 0 if demand.writers is None else demand.writers + 2)
        if pages < least:
            raise CapacityError(
                f"Expected a capacity of at least {least} pages of {page_rows} rows ({least * page_bytes} bytes), got "
                f"{capacity!r}: raise it or lower {'page_rows' if least == MIN_PAGES else 'writers'}"
            )
        keep = 0
    else:
        # one page more, since the page that is being filled has replaced the oldest; and one for each other writer
        pages = base = max(MIN_PAGES, -(-demand.rows // demand.own_rows(page_rows)) + 1)
        if demand.writers is not None and demand.writers > 1:
            pages = max(base + writers, 2 * writers)
        elif demand.writers is None and demand.page_rows is None and not demand.is_queue:
            room = max(_MOST_UNASKED, 3 * base * page_bytes) // page_bytes
            pages = max(base, min(DEFAULT_WRITERS + _SPARE, room))
        spare = demand.pages_for_any_episodes(page_rows)
        if spare * page_bytes <= _MOST_UNASKED:
            pages = max(pages, spare)
        # without pages beyond those of the capacity, all pages are used before one is evicted
        keep = 0 if pages == base or demand.is_queue else demand.keep()
    _check(pages, page_rows, demand)
    return Geometry(pages, page_rows, keep)


def _check(pages: int, page_rows: int, demand: Demand) -> None:
    if page_rows > MAX_PAGE_ROWS:
        raise CapacityError(
            f"Expected at most {MAX_PAGE_ROWS:,} rows per page (links between its rows have {32 - w.LINK_SHIFT} bits), got "
            f"{page_rows:,}: lower page_rows, num_envs, max_length, or the capacity"
        )
    if pages > MAX_PAGES:
        raise CapacityError(
            f"Expected at most {MAX_PAGES} pages, got {pages} of {page_rows} rows: {_fewer_pages(demand)}"
        )
    if pages * page_rows > MAX_ROWS:
        raise CapacityError(
            f"Expected at most {MAX_ROWS:,} rows in a table (row ids have {w.ROW_BITS} bits for them), got {pages * page_rows:,}: lower "
            "the capacity"
        )


def _fewer_pages(demand: Demand) -> str:
    """The remedy for a table with too many pages."""
    left = MAX_PAGES - 1 - (demand.writers or 0)
    if demand.in_bytes:
        return "raise page_rows, or lower the capacity"
    if left * demand.own_rows(MAX_PAGE_ROWS) < demand.rows:
        return "lower the capacity, or writers"
    enough = bisect.bisect_left(
        range(MAX_PAGE_ROWS), True, lo=1, key=lambda rows: left * demand.own_rows(rows) >= demand.rows
    )
    return f"raise page_rows to at least {enough}, or lower writers"
