"""Reading a table from its oldest step to its newest, environment by environment; exports use it.

A scan lists the pages once, when it is made, and reads each stream up to its end at that time. It leases one page at a time while
it copies from it, so writers go on. Rows that writers overwrite before the scan reaches them are missing, and counted. Without missing
rows, the steps of an environment are a part of its history without holes.

A page begins with a halo, copies of the last ticks of the page before. The scan reads each page from its first own tick to the
first own tick of the stream's next page (conduit.sampling.uniform draws by the same rule). So no step comes twice, and each
step's successor is in its page. Rows that were removed by a reset, by `TableHandle.delete` or by max_times_sampled are left out;
the step after such a row counts as the start of a new part (`Steps.starts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from conduit.forking import StaysHere
from conduit.plane.deliver.steps import Array, Steps
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.format.soundness import check_links, check_pages
from conduit.store.pages.image import Extent, values_of
from conduit.store.tables.appearance import never_raises, place_of, state_of
from conduit.store.tables.view import Lease, TableView


@dataclass(frozen=True, slots=True)
class _Part:
    """The ticks of a page that a scan reads, local ticks [begin, end), and the page's words when the scan was made."""

    extent: Extent
    begin: int
    end: int


class Scan(StaysHere):
    """Every step that a table had when the scan was made, once; iterating yields `Steps`.

    Attributes:
        schema: The table's schema.
        rows: Most rows to read; rows that are only a final observation count here, but are not steps.
        missing: Rows that were overwritten before the scan reached them, so far.
    """

    _elsewhere = "scan there, client.table(name).scan()"

    def __init__(self, table: TableView) -> None:
        table.check_open()
        self.schema: Schema = table.layout.schema
        self.missing = 0
        self._table = table
        self._streams = _take_stock(table)
        self.rows = sum(envs * (part.end - part.begin) for (_, envs), parts in self._streams.items() for part in parts)

    @never_raises
    def __repr__(self) -> str:
        return f"Scan({place_of(self._table)}, {self.rows:,} rows, {self.missing:,} missing, {state_of(self._table)})"

    def __iter__(self) -> Iterator[Steps]:
        for (stream, envs), parts in self._streams.items():
            for env in range(envs):
                known = (-1, -1)  # the tick that would continue the steps so far, and its episode
                for part in parts:
                    lease = self._table.hold(part.extent)
                    if lease is None:
                        self.missing += part.end - part.begin
                        continue
                    with lease:
                        steps, episodes, last = self._read(lease, part, stream, env, known)
                    if len(steps):
                        known = (last + 1, int(episodes[-1]))
                        yield steps

    def _read(
        self, lease: Lease, part: _Part, stream: int, env: int, known: tuple[int, int]
    ) -> tuple[Steps, Array, int]:
        """The steps of one environment in a page, their episodes, and the last step's tick."""
        envs = lease.envs
        every = slice(part.begin * envs + env, part.end * envs, envs)
        page = part.extent.page
        meta = self._page(self._table.meta, page)
        flags = meta["link"][every]
        here = (flags & (w.FINAL | w.DELETED)) == 0
        if self._table.sampled is not None:
            here &= (self._page(self._table.sampled, page)[every] & w.HAS_GONE) == 0
        rows = np.arange(every.start, every.stop, envs)[here]
        flags = meta["link"][rows]
        episodes = (np.int64(stream) << 32) | meta["episode"][rows].astype(np.int64)
        starts = np.ones(len(rows), bool)
        starts[1:] = (episodes[1:] != episodes[:-1]) | (rows[1:] != rows[:-1] + envs)
        if len(rows) and part.extent.tick + rows[0] // envs == known[0]:
            starts[0] = episodes[0] != known[1]
        ended = np.flatnonzero(flags & (w.TERMINATED | w.TRUNCATED))
        links = rows[ended] + (flags[ended] >> w.LINK_SHIFT)
        # a final observation is kept in the page's tail, or is the environment's next row
        inside = np.minimum(links, lease.rows - 1)
        follows = (links > rows[ended]) & (links < lease.rows) & ((meta["link"][inside] & w.FINAL) != 0)
        has = ((flags[ended] & w.KEPT) != 0) | follows
        check_links(self._table.layout, page, links[has])
        steps = Steps(
            {name: self._values(name, page, rows) for name in self.schema.names},
            (flags & w.TERMINATED) != 0,
            (flags & w.TRUNCATED) != 0,
            starts,
            ended[has],
            {name: self._values(name, page, links[has]) for name in self.schema.observation_names},
            episodes,
            meta["step"][rows].astype(np.int64),
        )
        return steps, episodes, part.extent.tick + int(rows[-1]) // envs if len(rows) else -1

    def _page(self, array: Array, page: int) -> Array:
        """All rows of a page in an array of the whole table, its tail included; a lease's own view leaves the tail out."""
        size = self._table.layout.page_rows
        view: Array = array[page * size : (page + 1) * size]
        return view

    def _values(self, name: str, page: int, rows: Array) -> Array | list[Array]:
        taken: Array = self._page(self._table.columns[name], page)[rows]
        if name not in self._table.arenas:
            return taken
        values = values_of(self._table.layout, name, page, self._table.arenas[name][page], taken)
        return [value.copy() for value in values]


def _take_stock(table: TableView) -> dict[tuple[int, int], list[_Part]]:
    """{(stream, environments): what to read of its pages, in the order of time}."""
    found = table.pages()
    # a page that has a successor in the first look is complete, although only a later look at its words may show that
    later = table.pages()
    generations = found[:, w.PAGE_STATE // 8] >> w.GENERATION_SHIFT
    same = generations == later[:, w.PAGE_STATE // 8] >> w.GENERATION_SHIFT
    present = found[:, w.PAGE_EPOCH // 8] == table.epoch if table.epoch else same
    live = np.flatnonzero(same & present & np.isin(found[:, w.PAGE_STATE // 8] & w.KIND_MASK, (w.OPEN, w.SEALED)))
    for look in (found, later):
        check_pages(table.layout, live, look[live])
    pages: dict[tuple[int, int], list[int]] = {}
    for page in live[np.argsort(found[live, w.PAGE_TICK // 8], kind="stable")].tolist():
        words = found[page]
        pages.setdefault((int(words[w.PAGE_STREAM // 8]), int(words[w.PAGE_ENVS // 8])), []).append(page)
    streams: dict[tuple[int, int], list[_Part]] = {}
    for (stream, envs), chain in sorted(pages.items()):
        for place, page in enumerate(chain):
            words = found[page]
            tick, begin = int(words[w.PAGE_TICK // 8]), int(words[w.PAGE_FIRST // 8]) // envs
            end = int(words[w.PAGE_COMMITTED // 8]) // envs
            if place + 1 < len(chain):
                behind = found[chain[place + 1]]
                limit = int(behind[w.PAGE_TICK // 8] + behind[w.PAGE_FIRST // 8] // envs) - tick
                end = min(int(later[page, w.PAGE_COMMITTED // 8]) // envs, limit)
            if end > begin:
                extent = Extent.of(page, later[page], table.layout.page_rows)
                streams.setdefault((stream, envs), []).append(_Part(extent, begin, end))
    return streams
