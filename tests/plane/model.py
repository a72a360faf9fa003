"""A pure-Python model of a table: streams of ticks, and pages that hold stretches of them.

It knows nothing of links, flags or words. Which rows may be sampled follows from the stream alone: a transition is drawn
from the first page of its stream that reaches `future` ticks beyond it, or else from the last page. So a slip in the halo
arithmetic of the store shows up here as a transition that is missing, twice there, or of the wrong row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Autoreset = Literal["next_step", "same_step", "disabled"]
FREE, OPEN, SEALED = 0, 2, 3


class Full(Exception):
    """Every page is being written or leased."""


@dataclass(eq=False)
class Row:
    """One step of one environment, or the observation that closes an episode."""

    serial: int
    terminated: bool
    truncated: bool
    version: int
    step: int
    episode: int
    first: bool = False
    closing: bool = False
    """A row that only holds an episode's last observation (next_step)."""
    final: int | None = None
    """Serial of the final observation that was handed over with the row."""
    explicit: bool = False
    """Whether its writer hands final observations over."""


@dataclass(eq=False)
class Page:
    state: int = FREE
    generation: int = 0
    age: int = -1
    leases: int = 0
    stream: Stream | None = None
    start: int = 0
    """Tick at the page's first row, halo included."""
    own: int = 0
    """First tick that is no copy."""
    end: int = 0
    """Tick behind the last one published here."""
    tail: int = 0
    """Kept observations, wasted ones included, as of then."""

    def is_live(self) -> bool:
        return self.state in (OPEN, SEALED)


@dataclass(eq=False)
class Stream:
    """All that one writer ever wrote, tick by tick, and where its pages lie."""

    number: int
    envs: int
    autoreset: Autoreset
    strict: bool
    publish_every: int
    ticks: list[list[Row]] = field(default_factory=list)
    published: int = 0
    places: list[tuple[Page, int, int]] = field(default_factory=list)
    """(page, generation, tick behind the last one it ever got) of every page, in order; the last one's end moves."""
    version: int = 0
    episodes: int = 0
    open: bool = True
    phase: list[str] = field(default_factory=list)
    current: list[tuple[int, int]] = field(default_factory=list)
    """(episode, step) per environment."""
    keeps: bool = False
    """Whether room is left for final observations: they are handed over, and the schema has observations."""
    wasted: int = 0
    """Tail rows of the present page that staged finals of rows that did not end have used up."""

    def __post_init__(self) -> None:
        self.phase = ["starting"] * self.envs
        self.current = [(0, 0)] * self.envs
        self.keeps = self.autoreset != "next_step"

    def may_end(self, env: int) -> bool:
        """False where the next row only closes an episode."""
        return self.phase[env] != "awaiting final"

    @property
    def explicit(self) -> bool:
        return self.autoreset != "next_step"

    @property
    def page(self) -> Page | None:
        return self.places[-1][0] if self.places and self.open else None

    def next_of(self, tick: int, env: int) -> tuple[str, int] | None:
        """What follows a row: ("row" | "final" | "self", serial), or None when its transition is not complete."""
        row = self.ticks[tick][env]
        if row.closing:
            return None
        if row.explicit and (row.terminated or row.truncated):
            if row.final is not None:
                return "final", row.final
            return ("self", row.serial) if row.terminated else None
        if tick + 1 >= self.published and self.open:
            return None
        if tick + 1 >= self.published or self.ticks[tick + 1][env].first:
            return ("self", row.serial) if row.terminated else None
        return "row", self.ticks[tick + 1][env].serial


class Model:
    """A table of `pages` pages of `rows` rows, for windows of `history` ticks before and `future` ticks after."""

    def __init__(self, pages: int, rows: int, history: int, future: int) -> None:
        self.pages = [Page() for _ in range(pages)]
        self.reopens = False
        """Whether new writers go on in pages of streams that ended."""
        self.rows, self.history, self.future = rows, history, future
        self.streams: list[Stream] = []
        self.tickets = 0
        self.evicted = 0
        self.recovered = 0

    def open(self, number: int, envs: int, autoreset: Autoreset, strict: bool, publish_every: int) -> Stream:
        stream = Stream(number, envs, autoreset, strict and autoreset != "next_step", publish_every)
        self.streams.append(stream)
        return stream

    # -- pages

    def claim(self) -> Page:
        free = [page for page in self.pages if page.state == FREE and page.leases == 0]
        sealed = [page for page in self.pages if page.state == SEALED and page.leases == 0]
        if not free and not sealed:
            raise Full
        page = free[0] if free else min(sealed, key=lambda page: page.age)
        if page.state == SEALED:
            self.evicted += self.own_rows(page)
        page.generation += 1
        return page

    def own_rows(self, page: Page) -> int:
        assert page.stream is not None
        return (page.end - page.own) * page.stream.envs

    def seal(self, page: Page) -> None:
        page.state = SEALED
        page.age = self.tickets
        self.tickets += 1

    def kept(self, stream: Stream, start: int) -> int:
        rows = (row for tick in stream.ticks[start:] for row in tick)
        return sum(row.final is not None for row in rows)

    def room(self, stream: Stream) -> int:
        page = stream.page
        if page is None:
            return -1
        used = (len(stream.ticks) - page.start) * stream.envs
        return self.rows - used - self.kept(stream, page.start) - stream.wasted

    def turn(self, stream: Stream) -> None:
        page = self.claim()
        old = stream.page
        self.publish(stream)
        now = len(stream.ticks)
        page.stream, page.state = stream, OPEN
        page.start = page.own = page.end = now
        page.tail = 0
        if old is not None:
            page.start = max(old.start, now - self.history - self.future)
            page.tail = self.kept(stream, page.start)
            self.seal(old)
            stream.places[-1] = (old, old.generation, now)
        stream.places.append((page, page.generation, now))
        stream.wasted = 0

    def reserve(self, stream: Stream, rows: int, tail: int) -> None:
        """What a writer does before it writes: turn the page unless it has room."""
        if self.room(stream) < rows + tail and not self.reopen(stream, rows + tail):
            self.turn(stream)

    def reopen(self, stream: Stream, need: int) -> bool:
        """Go on in the page of an ended stream that has the least room that is enough: its history is the writer's from now on."""
        if not self.reopens or stream.places:
            return False
        worth = (self.history + self.future + 1) * stream.envs + (stream.envs if stream.keeps else 0)
        best: tuple[int, Page] | None = None
        for page in self.pages:
            old = page.stream
            if page.state != SEALED or old is None or old.open or old.envs != stream.envs:
                continue
            if old.places[-1][0] is not page or old.places[-1][1] != page.generation:
                continue
            room = self.rows - page.tail - (page.end - page.start) * old.envs
            if room >= max(need, worth) and (best is None or room < best[0]):
                best = room, page
        if best is None:
            return False
        page, old = best[1], best[1].stream
        assert old is not None
        self.streams.remove(old)
        stream.number, stream.ticks, stream.published, stream.places = old.number, old.ticks, old.published, old.places
        stream.episodes = max(row.episode for row in old.ticks[-1]) + 1
        stream.wasted = page.tail - self.kept(stream, page.start)
        for one in self.pages:
            if one.stream is old:
                one.stream = stream
        page.state = OPEN
        return True

    # -- rows

    def commit(self, stream: Stream, tick: list[tuple[int, bool, bool, int | None]]) -> None:
        """Commit one tick: (serial, terminated, truncated, serial of the final observation or None) per environment."""
        rows = []
        for env, (serial, terminated, truncated, final) in enumerate(tick):
            episode, step = stream.current[env]
            if stream.phase[env] == "awaiting final":
                rows.append(Row(serial, False, False, stream.version, step, episode, closing=True))
                stream.phase[env] = "starting"
                continue
            first = stream.phase[env] == "starting"
            if first:
                episode, step = stream.episodes, 0
                stream.episodes += 1
            ended = terminated or truncated
            kept = final if ended and stream.explicit else None
            rows.append(
                Row(serial, terminated, truncated, stream.version, step, episode, first, False, kept, stream.explicit)
            )
            stream.current[env] = (episode, step + 1)
            stream.phase[env] = "running"
            if ended:
                stream.phase[env] = "starting" if stream.explicit else "awaiting final"
        stream.ticks.append(rows)

    def after_commit(self, stream: Stream, ticks: int, reserve: int) -> None:
        """Publish when the page is full or enough ticks are pending."""
        full = self.room(stream) < stream.envs + reserve
        if full or len(stream.ticks) - stream.published >= stream.publish_every:
            self.publish(stream)

    def publish(self, stream: Stream) -> None:
        stream.published = len(stream.ticks)
        if stream.page is not None:
            stream.page.end = stream.published
            stream.page.tail = self.kept(stream, stream.page.start) + stream.wasted

    def cut(self, stream: Stream) -> None:
        stream.phase = ["starting"] * stream.envs

    def close(self, stream: Stream) -> None:
        page = stream.page
        if page is not None:
            self.publish(stream)
            if stream.published == page.start:
                page.state = FREE
            else:
                self.seal(page)
            stream.places[-1] = (page, page.generation, stream.published)
        stream.open = False

    def kill(self, streams: list[Stream]) -> None:
        """The process of these writers dies and is recovered: what was not published is lost."""
        for page in self.pages:
            if page.state == OPEN and page.stream in streams:
                stream = page.stream
                assert stream is not None
                del stream.ticks[stream.published :]
                if page.end == page.start:
                    page.state = FREE
                else:
                    self.seal(page)
                stream.places[-1] = (page, page.generation, stream.published)
                self.recovered += 1
        for stream in streams:
            stream.open = False

    # -- what readers must see

    def rows_visible(self) -> int:
        return sum(self.own_rows(page) for page in self.pages if page.is_live())

    def transitions(self, need: int | None = None) -> Iterator[tuple[Page, Stream, int, int, tuple[str, int]]]:
        """Every transition that may be sampled, once: the page it is drawn from, stream, tick, environment, what follows.

        Args:
            need: Ticks behind it that the window needs; None: as many as the widest one.
        """
        for stream in self.streams:
            reach = stream.published - ((self.future if need is None else need) if stream.open else 0)
            for tick in range(reach):
                last = len(stream.places) - 1
                # the last page's end moves with the stream, and everything behind the others is its own
                places = enumerate(stream.places)
                page, generation = next((p, g) for k, (p, g, end) in places if k == last or tick < end - self.future)
                if not page.is_live() or page.generation != generation:
                    continue
                for env in range(stream.envs):
                    following = stream.next_of(tick, env)
                    if following is not None:
                        yield page, stream, tick, env, following
