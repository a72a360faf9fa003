"""What scenarios have in common: an engine whose rows prove themselves, and what nobody may leave behind."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

import conduit
from conduit.field import Field
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.segment.locks import LOCK_LIMITS, LOCK_LOADERS, held
from conduit.store.tables.view import TableView
from conduit.testing.invariants import hazards, kinds, slots_in_use

Array = np.ndarray[Any, Any]

SCHEMA = Schema([Field("obs", "float32", (3,), observation=True), Field("action", "int64"), Field("reward", "float64")])
EPISODE = 7
"""Row n ends its episode where n % EPISODE is the last."""


def values(n: int) -> dict[str, Any]:
    """Row n as `append` takes it."""
    ends = n % EPISODE == EPISODE - 1
    row = {"obs": observation(n), "action": n, "reward": float(n), "terminated": ends}
    return row | {"final": observation(n + 0.5)} if ends else row


def observation(n: float) -> Array:
    """Observation of row n."""
    return np.array([n, n + 0.125, n + 0.25], np.float32)


def check_rows(view: TableView) -> list[int]:
    """See that every committed row is one row, whole; returns their numbers, page by page."""
    found = []
    size = view.layout.page_rows
    for page, words in enumerate(view.pages().tolist()):
        if words[w.PAGE_STATE // 8] & w.KIND_MASK not in (w.OPEN, w.SEALED):
            continue
        rows = slice(page * size, page * size + words[w.PAGE_COMMITTED // 8])
        numbers = view.columns["action"][rows]
        expected = numbers[:, None] + np.array([0, 0.125, 0.25])
        assert np.array_equal(view.columns["obs"][rows], expected), f"page {page}: torn {numbers.tolist()}"
        assert np.array_equal(view.columns["reward"][rows], numbers), f"page {page}: torn rewards"
        ends = numbers % EPISODE == EPISODE - 1
        link = view.meta["link"][rows]
        assert np.array_equal(view.terminated[rows], ends), f"page {page}: flags of others {numbers.tolist()}"
        assert not (link & w.FINAL).any()
        assert np.array_equal((link & w.KEPT) != 0, ends), f"page {page}: finals {numbers.tolist()}"
        for row in np.flatnonzero(ends).tolist():
            final = view.columns["obs"][rows.start + row + (int(link[row]) >> w.LINK_SHIFT)]
            assert np.array_equal(final, observation(int(numbers[row]) + 0.5)), f"page {page}: final of {numbers[row]}"
        assert (np.diff(numbers) > 0).all(), f"page {page}: {numbers.tolist()}"
        found += numbers.tolist()
    return found


class Scenario(ABC):
    """An engine, and an operation on it."""

    options: dict[str, Any] = {"capacity": 120, "page_rows": 12}

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = conduit.Engine.create(name, {"t": conduit.Table(SCHEMA, **self.options)}, max_participants=8)
        self.view = self.engine._views["t"]
        self.n = 0
        self._own_fd = os.open(f"/proc/self/fd/{self.engine._segment.lock_fd}", os.O_RDWR | os.O_CLOEXEC)
        self.prepare()

    def prepare(self) -> None:
        """Open what the operation needs."""

    @abstractmethod
    def operate(self) -> None:
        """What is interrupted."""

    @abstractmethod
    def check(self) -> None:
        """Go on with the same objects, and see that nothing is left behind."""

    def put(self, writer: conduit.Writer, count: int = 1) -> None:
        """Append the next rows; numbers are not used again, whatever became of theirs."""
        for _ in range(count):
            n, self.n = self.n, self.n + 1
            writer.append(**values(n))

    def check_rest(self, *, open_pages: int = 0, holds: int = 0) -> None:
        """See that nothing is claimed, leased, reserved or locked but what is said."""
        found = kinds(self.view)
        assert not (found == w.INIT).any(), f"{(found == w.INIT).sum()} pages in preparation"
        assert (found == w.OPEN).sum() <= open_pages, f"{(found == w.OPEN).sum()} pages open"
        assert slots_in_use(self.view) == holds, f"{slots_in_use(self.view)} hazards in use"
        assert np.count_nonzero(hazards(self.view)) == holds, "hazards"
        for byte in (LOCK_LIMITS, LOCK_LOADERS):
            assert not held(self._own_fd, byte, 1), f"lock {byte} is kept"
        counts = self.view.counts()
        assert (counts.reserved, counts.granted) == (0, 0), f"reserved {counts.reserved}, granted {counts.granted}"

    def close(self) -> None:
        """Remove the engine."""
        os.close(self._own_fd)
        self.engine.close()
