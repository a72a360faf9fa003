"""Sampling without replacement: every window of a table once per epoch, in an order shuffled by a seed.

When an epoch begins, the sampler lists the rows that begin a window, 8 bytes each, and orders them by random numbers of (seed, epoch,
place in the list). So the same rows in the same pages and the same seed give the same order on any machine, and one number is enough to
store a place in it. Rows that are written later come in the next epoch. Rows that are overwritten or deleted before their turn are left
out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit.errors import ConfigError
from conduit.kernels.cpu.windows import ENTRY_BYTES, ENTRY_GENERATION, ENTRY_PAGE
from conduit.kernels.spec.windows import Window
from conduit.native import philox
from conduit.native.descriptors import fill
from conduit.native.jit import entry
from conduit.numbers import flag, whole
from conduit.sampling.anchors import (
    LISTED_COUNT,
    LISTED_ENTRIES,
    LISTED_PICKED,
    LISTED_WORDS,
    draw_picked,
    list_anchors,
    pick,
)
from conduit.sampling.candidates import empty_list
from conduit.sampling.uniform import UNIFORM_CANDIDATES, UNIFORM_PAGES, UNIFORM_SEED, UNIFORM_SNAPSHOT, Uniform
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

PLACE_BITS = 40
"""A batch's number is (epoch << PLACE_BITS) | place, where place is its first window's place in the epoch's order."""
_PLACE = (1 << PLACE_BITS) - 1
_LARGEST = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Sampling of a loader in epochs: each window once an epoch, in a shuffled order.

    Attributes:
        epochs: Number of epochs after which the loader raises Exhausted; None for no end.
        drop_last: Leave out the last batch of an epoch if it is shorter than the others.
    """

    epochs: int | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        count = self.epochs if self.epochs is None else whole(self.epochs)
        if (count is None) != (self.epochs is None) or (count is not None and not 1 <= count < 1 << 20):
            raise ConfigError(f"Expected epochs from 1 to {(1 << 20) - 1}, or None for no end, got {self.epochs!r}")
        object.__setattr__(self, "epochs", count)
        object.__setattr__(self, "drop_last", flag("drop_last", self.drop_last))


class ShuffledSampler(Uniform):
    """The sampler of a loader with `Shuffled`; `batch` is epoch << 40 | place.

    Args:
        table: The table.
        window: The loader's window.
        seed: 64-bit seed.
        size: Windows per batch.
        shard: (rank, world): every world-th window of the order, from the rank-th on.

    Attributes:
        stock: A digest of the rows of the present epoch, 62 bits; 0 before it has begun.
        skipped: Windows left out of epochs so far, since they were overwritten or deleted before their turn.
    """

    def __init__(self, table: TableView, window: Window, seed: int, size: int, shard: tuple[int, int]) -> None:
        pages = table.layout.pages
        self._table, self._window, self._shard = table, window, shard
        self._snapshot = empty_list(pages)
        self._picked = np.zeros(size, np.int64)
        self._entries = np.zeros(pages, np.int64)
        self._order: Array = np.zeros(0, np.int64)
        self._state = np.zeros(LISTED_WORDS, np.int64)
        fill(
            self._state,
            {
                UNIFORM_SEED: np.uint64(seed % 2**64).astype(np.int64),
                UNIFORM_SNAPSHOT: self._snapshot.ctypes.data,
                LISTED_PICKED: self._picked.ctypes.data,
                LISTED_ENTRIES: self._entries.ctypes.data,
            },
        )
        self._words = self._state.data
        self.function = draw_picked()
        self.state: int = self._state.ctypes.data
        self.stock = self.skipped = 0

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self.batch >> PLACE_BITS

    @property
    def place(self) -> int:
        """Number of windows of the present epoch's order that were delivered or left out so far."""
        return self.batch & _PLACE

    @property
    def windows(self) -> int:
        """Windows of the present epoch; 0 before it has begun."""
        return len(self._order)

    def begin(self) -> int:
        """List and order the table's windows now; returns their number."""
        rows = list_anchors(self._table, self._window, self._state)
        listed = self._snapshot[: self._words[UNIFORM_PAGES // 8]]
        pages = listed[:, ENTRY_PAGE // 8]
        self._entries[pages] = self._snapshot.ctypes.data + ENTRY_BYTES * np.arange(len(listed))
        digest = hashlib.blake2b(rows.tobytes(), digest_size=8)
        digest.update(np.ascontiguousarray(listed[:, [ENTRY_PAGE // 8, ENTRY_GENERATION // 8]]).tobytes())
        self.stock = int.from_bytes(digest.digest(), "little") & _LARGEST or 1
        self._words[UNIFORM_CANDIDATES // 8] = len(rows)
        keys = np.zeros(len(rows), np.int64)
        entry(philox.indices)(self._words[UNIFORM_SEED // 8], self.epoch, _LARGEST, len(rows), keys.ctypes.data)
        rank, world = self._shard
        self._order = np.ascontiguousarray(rows[np.argsort(keys, kind="stable")][rank::world])
        return len(self._order)

    def take(self, place: int, wanted: int) -> int:
        """Pick up to `wanted` windows from a place of the order, without a check that they are still there; returns how many."""
        found = self._order[place : place + wanted]
        self._picked[: len(found)] = found
        return len(found)

    def pick(self, job: int, place: int, wanted: int) -> tuple[int, int]:
        """Pick up to `wanted` windows from a place of the order, only those that are still there; returns how many, and the next place."""
        behind = entry(pick)(self.state, job, self._order.ctypes.data, place, len(self._order), wanted)
        return self._words[LISTED_COUNT // 8], behind

    def __repr__(self) -> str:
        return f"Shuffled(epoch {self.epoch}, {self.place:,} of {self.windows:,} windows)"
