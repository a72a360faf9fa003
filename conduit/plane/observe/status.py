"""The result of a look at an engine (`conduit.plane.observe.inspect`): plain values without a reference to the engine."""

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
    """A process that is attached, or a dead one that still has its seat.

    Attributes:
        number: Its seat.
        pid: Process id, in the process's own pid namespace.
        name: Command name of the process when it joined, at most 15 characters.
        alive: Whether the kernel says that it lives; a stopped process (SIGSTOP) is alive.
        since_ns: When it joined, nanoseconds since the epoch.
        roles: Its roles since it joined, in this order: "owner", "writer", "loader", "consumer", "launcher".
        rows: Rows that it has written since it joined, in all tables.
        pages: Pages that it is filling now, in all tables.
        leases: Pages that it leases now, so that writers do not overwrite them.
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
        free: Pages without rows.
        preparing: Pages that a writer has claimed and not opened yet.
        open: Pages that are being filled.
        sealed: Pages that are full or finished; the oldest is overwritten when no page is free.
        leased: Pages, in any state, that a reader leases now, so that they are not overwritten.
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
        samples_per_insert, min_size: The limits in force.
        min_diff, max_diff: The bounds in force; None if there is no such bound.
        inserted, sampled, deleted: I, S and D of the formula.
        reserved: Samples that loaders have reserved and not delivered.
        granted: Rows that writers have been granted and not published.
        sampling, inserting: Why one more sample, or one more row, is refused: the term of the formula, and what ends the wait. None
            if it is allowed.
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
        pid: Its process, or 0 if the seat is empty by now.
        rows: Rows that it has claimed and not acknowledged.
    """

    participant: int
    pid: int
    rows: int


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The rows of a queue by state.

    Attributes:
        rollout_length: Ticks of a rollout, or None.
        waiting: Committed rows that no consumer has claimed, without the rows of unfinished rollouts.
        unfinished: Rows of rollouts that are being written.
        claimed: Rows claimed and not acknowledged.
        claims: The consumers that hold them.
        delivered_again: Number of dead consumers' claims that were given back since the queue was created.
    """

    rollout_length: int | None
    waiting: int
    unfinished: int
    claimed: int
    claims: tuple[ClaimStatus, ...]
    delivered_again: int


@dataclass(frozen=True, slots=True)
class EpisodesStatus:
    """A summary of the episodes that ended in a table; `TableHandle.episodes` returns each of them.

    Attributes:
        ended: Number of episodes that ever ended.
        newest: Number of newest episodes that the means are taken over, at most 100.
        mean_return: Their mean returns, one for each of `reward_names`; None if there is no episode or reward.
        mean_length: Their mean number of steps; None if there is no episode.
        reward_names: The rewards, or the elements of a reward.
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
        observation_names, reward_names: The fields with these roles, as declared or guessed (conduit.Schema).
        fingerprint: The schema's fingerprint, 16 hex digits.
        max_stack, max_n_step: Widest window that the table serves, in ticks.
        pages: Pages by state.
        page_rows: Rows per page.
        capacity: Rows of all pages together, halo and kept final observations included.
        rows_visible: Committed rows that are in the table now, halo copies not counted.
        rows_written: Rows ever committed.
        rows_evicted: Rows whose page was reused.
        writers_alive, writers_dead: Numbers of living and of dead participants that fill a page of the table now.
        pages_recovered: Pages taken back from dead writers.
        priorities_raised, priorities_lowered: Priorities outside the range that the table can store, which were stored as its smallest
            or largest priority (conduit.Priorities).
        bytes: Memory of the table.
        bytes_per_row: Bytes of one row with padding and the system columns, and a row's share of the arenas of ragged fields.
        bytes_per_transition: Bytes in use now, halo copies, kept final observations and stored ragged values included, divided by the
            visible rows. bytes_per_row while the table is empty.
        halo_share: Share of the rows in use that are halo copies, from 0 to 1.
        frozen: Whether the table is frozen: it takes no rows.
        limiter: The table's limiter, or None.
        queue: The rows of a queue by state; None for a replay table.
        episodes: A summary of the episodes that ended in the table.
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
        problem: The problem and its remedy, for the states orphaned, dead, damaged and denied; otherwise None.
        backing: "shm" or "memfd".
        bytes: Size of the segment; 0 if it cannot be read.
        in_use: Whether a living process holds the segment, as owner or participant.
        owner_alive: Whether its owner lives.
        at: Time of this look, monotonic seconds.
        creator_pid: Process that created the engine; 0 if it cannot be read.
        created_ns: When it was created, nanoseconds since the epoch; 0 if it cannot be read.
        max_participants: Number of seats.
        participants: The taken seats, by number.
        tables, policies: In the order of their declaration; empty if they cannot be read.
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
    """What `clean` did with one engine.

    Attributes:
        name: Engine name.
        removed: Whether its segment, or the note of its memfd, was removed.
        why: Why it was removed, or why not.
    """

    name: str
    removed: bool
    why: str
