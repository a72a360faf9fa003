"""Returns, lengths and origins of episodes that ended, read from the records that writers keep (conduit.store.ingest.report_episodes)."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.errors import ConfigError
from conduit.native.jit import entry
from conduit.numbers import at_least
from conduit.schema import Schema
from conduit.store.format import episode_records
from conduit.store.format.episode_records import RECORDS
from conduit.store.ingest import report_episodes
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]


class Episodes:
    """Episodes that ended in a table, in the order in which they ended; the arrays are copies.

    Attributes:
        lengths: Steps, int64 [n].
        terminated, truncated: How they ended, bool [n].
        streams, envs: The writer's stream and its environment, int64 [n].
        numbers: Number of the episode, unique in the table, int64 [n]; the same number as in `Batch.episodes`.
        versions: Policy version of the last step, int64 [n].
        times: When the end was committed, seconds since the epoch, float64 [n].
        total: Episodes that ever ended in the table.
        missed: Requested episodes that were overwritten before they were read.
        reward_names: The rewards, or the elements of a reward, that the columns of `returns` belong to.
    """

    def __init__(
        self, table: str, schema: Schema, words: Array, missed: int, total: int, pending: tuple[int, ...]
    ) -> None:
        self.reward_names = episode_records.elements(schema)
        self.total, self.missed, self._pending = total, missed, pending
        self._table_name = table
        names = ("_", "_time", "streams", "_env", "_episode", "lengths")
        columns = dict(zip(names, words[:, : len(names)].T.copy(), strict=True))
        self.lengths, self.streams = columns["lengths"], columns["streams"]
        self.envs = columns["_env"] >> 2
        self.terminated, self.truncated = (columns["_env"] & 1) != 0, (columns["_env"] & 2) != 0
        self.numbers = self.streams << 32 | columns["_episode"] >> 32 & 0xFFFFFFFF
        self.versions = columns["_episode"] & 0xFFFFFFFF
        self.times = columns["_time"] / 1e9
        start = episode_records.RECORD_RETURNS // 8
        self._returns = words[:, start : start + len(self.reward_names)].copy().view(np.float64)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def returns(self) -> Array:
        """Sums of the stored rewards, undiscounted, float64 [n]; [n, k] with several rewards or elements of a reward.

        Raises:
            ConfigError: The table has no reward.
        """
        if not self.reward_names:
            raise ConfigError(
                f"Expected a reward in table {self._table_name!r} to sum up, got none: declare it by reward= in conduit.Field or "
                "Schema.from_example; lengths are available"
            )
        return self._returns[:, 0] if len(self.reward_names) == 1 else self._returns

    @property
    def mean_return(self) -> Any:
        """Mean of `returns`: a float, or float64 [k]; NaN if there is no episode.

        Raises:
            ConfigError: The table has no reward.
        """
        returns = self.returns
        if not len(self):
            return np.full(returns.shape[1:], np.nan) if returns.ndim > 1 else float("nan")
        mean = returns.mean(0)
        return mean if returns.ndim > 1 else float(mean)

    @property
    def mean_length(self) -> float:
        """Mean of `lengths`; NaN if there is no episode."""
        return float(self.lengths.mean()) if len(self) else float("nan")

    def __repr__(self) -> str:
        means = ""
        if len(self) and self.reward_names:
            means = f", mean return {np.array2string(np.asarray(self.mean_return), precision=6)}"
        if len(self):
            means += f", mean length {self.mean_length:g}"
        return f"Episodes({len(self):,} of {self.total:,} of table {self._table_name!r}, {self.missed:,} missed{means})"


def read_episodes(table: TableView, since: Episodes | None, last: int | None) -> Episodes:
    """The episodes that ended after an earlier call, or all that the table has.

    Args:
        table: The table.
        since: The result of the earlier call, or None.
        last: Return at most this many, the newest; None for all.

    Raises:
        ConfigError: Bad options.
    """
    if since is not None and not isinstance(since, Episodes):
        raise ConfigError(f"Expected what an earlier call of episodes returned as since, got {type(since).__name__}")
    if since is not None and since._table_name != table.layout.name:  # noqa: SLF001
        raise ConfigError(f"Expected episodes of table {table.layout.name!r} as since, got {since!r}")
    most = None if last is None else at_least("last", last, 1)
    ring = table.segment.base + table.layout.episodes
    return read_ring(
        table.layout.name, table.layout.schema, ring, table.segment.words[table.layout.episodes // 8], since, most
    )


def read_ring(
    name: str, schema: Schema, ring: int, total: int, since: Episodes | None = None, last: int | None = None
) -> Episodes:
    """`read_episodes` from a ring of records, or from a copy of one.

    Args:
        name: Name of the table.
        schema: The table's schema.
        ring: Address of the ring.
        total: Number of episodes that had ended at the time of the call.
        since: As for `read_episodes`.
        last: As for `read_episodes`.
    """
    size = episode_records.record_bytes(schema)
    begin, waiting = (0, ()) if since is None else (since.total, since._pending)  # noqa: SLF001
    tickets = np.array([*waiting, *range(max(begin, total - RECORDS), total)], np.int64)
    words = np.zeros((len(tickets), size // 8), np.int64)
    found = np.zeros(len(tickets), bool)
    now = entry(report_episodes.read_records)(
        ring, size, tickets.ctypes.data, len(tickets), words.ctypes.data, found.ctypes.data
    )
    # a record that was not found is being written, unless its place has gone to a newer episode
    lost = ~found & (tickets < now - RECORDS)
    missed = max(0, total - RECORDS - begin) + int(lost.sum())
    pending = tuple(tickets[~found & ~lost].tolist())
    there = words[found]
    return Episodes(name, schema, there if last is None else there[-last:], missed, total, pending)
