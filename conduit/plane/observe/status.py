"""What a look at an engine returns (`conduit.plane.observe.inspect`): plain values, nothing that holds on to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conduit.field import Field

State = Literal["running", "orphaned", "dead", "closing", "starting", "damaged", "denied"]
"""running   its owner lives
orphaned  its owner is dead, other processes are attached to it; `Engine.adopt` takes it over
dead      its owner is dead, no process is attached to it; `clean` removes it, `Engine.adopt` goes on with it
closing   its owner has closed it and is removing it
starting  its memory is being allocated
damaged   truncated, foreign, unreadable, no file, or of another layout version
denied    it belongs to another user, or others may open it
"""


@dataclass(frozen=True, slots=True)
class ParticipantStatus:
    """A process that is attached, or was and has died and has not been noticed yet.

    Attributes:
        number: Its seat.
        pid: Process id, in the process's own pid namespace.
        name: Command name of the process when it joined, at most 15 characters.
        alive: The kernel's word: a stopped process is alive.
        since_ns: When it joined, nanoseconds since the epoch.
        roles: What it has done since: "owner", "writer", "loader", "consumer", "launcher", those that are so in this order.
        rows: Rows it has written since, in all tables.
        pages: Pages that it is filling now, in all tables.
        leases: Pages that it holds now against being overwritten.
    """

    number: int
    pid: int
    name: str
    alive: bool
    since_ns: int
    roles: tuple[str, ...]
    rows: int
    pages: int
    leases: int

    @property
    def writes(self) -> bool:
        """Whether it has opened a writer."""
        return "writer" in self.roles


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of a table by state.

    Attributes:
        free: Without rows.
        preparing: Claimed by a writer that has not opened it yet.
        open: Being filled.
        sealed: Full or finished; the oldest is overwritten when no page is free.
        leased: Of all these, held by a reader now, and so not overwritten.
    """

    free: int
    preparing: int
    open: int
    sealed: int
    leased: int


@dataclass(frozen=True, slots=True)
class LimiterStatus:
    """A table's limiter (docs/limits.md has the formula).

    Attributes:
        samples_per_insert, min_size: In force.
        min_diff, max_diff: The same; None where there is no such bound.
        inserted, sampled, deleted: I, S and D of the formula.
        reserved: Samples that loaders have reserved and not delivered.
        granted: Rows that writers have been granted and not published.
        sampling, inserting: Why not one more sample, or row, is allowed, by which term, and what frees it; None when one is.
    """

    samples_per_insert: float
    min_size: int
    min_diff: float | None
    max_diff: float | None
    inserted: int
    sampled: int
    deleted: int
    reserved: int
    granted: int
    sampling: str | None
    inserting: str | None


@dataclass(frozen=True, slots=True)
class ClaimStatus:
    """What one consumer holds of a queue.

    Attributes:
        participant: Its seat.
        pid: Its process, or 0 where the seat is empty by now.
        rows: Rows that it has claimed and not acknowledged.
    """

    participant: int
    pid: int
    rows: int


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """What has become of a queue's rows.

    Attributes:
        rollout_length: Ticks of a rollout, or None.
        waiting: Committed rows that nobody has claimed, those of unfinished rollouts left out.
        unfinished: Rows of rollouts that are being written.
        claimed: Rows claimed and not acknowledged.
        claims: By whom.
        delivered_again: Claims of dead consumers that were given back, ever.
    """

    rollout_length: int | None
    waiting: int
    unfinished: int
    claimed: int
    claims: tuple[ClaimStatus, ...]
    delivered_again: int


@dataclass(frozen=True, slots=True)
class EpisodesStatus:
    """Episodes that ended in a table; `TableHandle.episodes` has each of them.

    Attributes:
        ended: How many ever ended.
        newest: Of how many of the newest the means are, at most 100.
        mean_return: Mean sums of their rewards, one for each of `reward_names`; None where there is none.
        mean_length: Mean number of their steps; None where there is none.
        reward_names: Rewards, or their elements.
    """

    ended: int
    newest: int
    mean_return: tuple[float, ...] | None
    mean_length: float | None
    reward_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A table.

    Attributes:
        name: Table name.
        kind: "replay" or "queue".
        fields: The schema's fields.
        observation_names, reward_names: Those of them that have these roles, as declared or guessed (conduit.Schema).
        fingerprint: Of the schema, 16 hex digits.
        max_stack, max_n_step: Widest window that it serves, in ticks.
        pages: Pages by state.
        page_rows: Rows per page.
        capacity: Rows of all pages together, halo and kept final observations included.
        rows_visible: Committed rows that are in the table now, halo copies not counted.
        rows_written: Rows ever committed.
        rows_evicted: Rows whose page was reused.
        writers_alive, writers_dead: Participants that fill a page of it now.
        pages_recovered: Pages taken back from dead writers.
        priorities_raised, priorities_lowered: Priorities that were too small, or too large, for the table to tell them from others
            and were stored as the least or the largest there is (conduit.Priorities).
        bytes: Memory of the table.
        bytes_per_row: Bytes of one row with padding and the system columns; of ragged fields, a row's share of the arenas.
        bytes_per_transition: The same with the table's halo copies and kept final observations shared out over its
            visible rows, as it is now; of ragged fields, the values that are there. bytes_per_row while the table is empty.
        halo_share: Part of the rows in use that are halo copies, from 0 to 1.
        frozen: Whether it takes no rows.
        limiter: What limits it, or None.
        queue: Of a queue: what has become of its rows; else None.
        episodes: Returns and lengths of episodes that ended in it.
    """

    name: str
    kind: str
    fields: tuple[Field, ...]
    observation_names: tuple[str, ...]
    reward_names: tuple[str, ...]
    fingerprint: str
    max_stack: int
    max_n_step: int
    pages: PageCounts
    page_rows: int
    capacity: int
    rows_visible: int
    rows_written: int
    rows_evicted: int
    writers_alive: int
    writers_dead: int
    pages_recovered: int
    priorities_raised: int
    priorities_lowered: int
    bytes: int
    bytes_per_row: int
    bytes_per_transition: float
    halo_share: float
    frozen: bool
    limiter: LimiterStatus | None
    queue: QueueStatus | None = None
    episodes: EpisodesStatus | None = None


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """A weights slot.

    Attributes:
        name: Policy name.
        version: Latest version published, 0 before the first.
        arrays: Number of arrays in the state dict.
        bytes: Bytes of one version; the slot holds three.
        publisher_alive: Whether a live process publishes.
    """

    name: str
    version: int
    arrays: int
    bytes: int
    publisher_alive: bool


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine as it was during one look.

    Attributes:
        name: Engine name.
        state: See `State`.
        problem: What is wrong, and what helps, for the states orphaned, dead, damaged and denied; else None.
        backing: "shm" or "memfd".
        bytes: Length of the segment; 0 where it cannot be seen.
        in_use: Whether any live process holds it, as owner or participant.
        owner_alive: Whether its owner lives.
        at: When this look was taken, monotonic seconds.
        creator_pid: Process that created it; 0 where it cannot be read.
        created_ns: When, nanoseconds since the epoch; 0 where it cannot be read.
        max_participants: Seats.
        participants: Seats taken, by number.
        tables, policies: As they were declared; empty where they cannot be read.
    """

    name: str
    state: State
    problem: str | None
    backing: Literal["shm", "memfd"]
    bytes: int
    in_use: bool
    owner_alive: bool
    at: float
    creator_pid: int = 0
    created_ns: int = 0
    max_participants: int = 0
    participants: tuple[ParticipantStatus, ...] = ()
    tables: tuple[TableStatus, ...] = ()
    policies: tuple[PolicyStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What `clean` did about one engine.

    Attributes:
        name: Engine name.
        removed: Whether its segment, or the note of its memfd, was removed.
        why: Why, or why not.
    """

    name: str
    removed: bool
    why: str
