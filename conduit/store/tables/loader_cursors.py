"""Named loaders: the position in a sequence of batches, kept in the segment, so that the next loader of the name continues there.

A name has one of MAX_NAMED_LOADERS slots, which holds the seed and the number of the next batch. One process at a time holds a name.
When that process dies or releases the name, another process may take it, and the numbers stay. Slots are never freed.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import numpy as np

from conduit.clock import Deadline
from conduit.errors import Busy, ConfigError, WaitTimeout
from conduit.forking import renew_in_child
from conduit.native.finish import when_gone
from conduit.native.jit import entry
from conduit.store.format import words as w
from conduit.store.format.layout import LOADER_BYTES, MAX_NAMED_LOADERS
from conduit.store.format.soundness import LARGEST, damaged
from conduit.store.pages import holds
from conduit.store.segment.locks import LOCK_LOADERS, LockByte, held
from conduit.store.segment.participants import Participants
from conduit.store.segment.segment import Segment

LOADER_OWNER, LOADER_SEED, LOADER_BATCH, LOADER_TABLE, LOADER_LENGTH, LOADER_STOCK = range(6)
"""Words of a slot: participant + 1 or 0, seed, number of the next batch, number of the table, bytes of the name (0: no loader),
digest of the rows of the present epoch (0: it has none).
The name is in its second line."""
LONGEST_NAME = 100
_PATIENCE = 5.0

_between_threads = threading.Lock()
renew_in_child(__name__, "_between_threads", threading.Lock)

Words = np.ndarray[Any, np.dtype[np.int64]]


class Known(NamedTuple):
    """The contents of a slot."""

    table: str
    seed: int
    batch: int
    stock: int = 0


def _slots(segment: Segment) -> Words:
    return segment.array(segment.layout.loaders, (MAX_NAMED_LOADERS, LOADER_BYTES // 8), np.dtype(np.int64))


def _name_of(segment: Segment, slot: Words) -> str | None:
    """The name in a slot, or None.

    Raises:
        BadSegment: The slot is damaged.
    """
    length, table, batch = int(slot[LOADER_LENGTH]), int(slot[LOADER_TABLE]), int(slot[LOADER_BATCH])
    if length == 0:
        return None
    if not (0 < length <= LONGEST_NAME and 0 <= table < len(segment.layout.tables) and 0 <= batch < LARGEST):
        raise damaged("the list of named loaders", f"a name of {length} bytes, table {table}, batch {batch}")
    owner = int(slot[LOADER_OWNER])
    if not 0 <= owner <= segment.layout.spec.max_participants:
        raise damaged("the list of named loaders", f"participant {owner - 1} has one of them")
    text = slot[w.LINE // 8 :].tobytes()[:length]
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise damaged("the list of named loaders", f"the name {text!r}") from error


def known_loaders(segment: Segment) -> dict[str, Known]:
    """All named loaders, by name.

    Raises:
        BadSegment: Their list is damaged.
    """
    tables = list(segment.layout.tables)
    found = {}
    for slot in _slots(segment):
        name = _name_of(segment, slot)
        if name is not None:
            found[name] = Known(
                tables[slot[LOADER_TABLE]], int(slot[LOADER_SEED]), int(slot[LOADER_BATCH]), int(slot[LOADER_STOCK])
            )
    return found


def write_loader(segment: Segment, index: int, name: str, known: Known) -> None:
    """Fill a free slot; no other process may fill one at the same time."""
    slot = _slots(segment)[index]
    text = name.encode()
    slot[LOADER_SEED] = known.seed
    slot[LOADER_BATCH] = known.batch
    slot[LOADER_STOCK] = known.stock
    slot[LOADER_TABLE] = list(segment.layout.tables).index(known.table)
    slot[w.LINE // 8 :].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    slot[LOADER_LENGTH] = len(text)  # last: if a process dies before this store, the slot is still free


class NamedLoader:
    """A name that this process holds.

    Attributes:
        name: The name.
        seed: Its seed, 64 bits, signed.
        batch: Number of the next batch; store it after each delivery.
    """

    def __init__(self, name: str, slot: Words, participants: Participants) -> None:
        self.name = name
        self._slot = slot
        self._words = slot.data
        self._seat = participants.seat
        self._mark = np.zeros(holds.MARK_WORDS, np.int64)
        when_gone(self, entry(holds.end_mark), self._mark, self._seat)
        self.seed = int(slot[LOADER_SEED])

    @property
    def batch(self) -> int:
        """Number of the batch that is drawn next."""
        return self._words[LOADER_BATCH]

    @batch.setter
    def batch(self, number: int) -> None:
        self._words[LOADER_BATCH] = number

    @property
    def stock(self) -> int:
        """Digest of the rows of the present epoch; 0 for a loader without epochs. Store it before the batch's number."""
        return self._words[LOADER_STOCK]

    @stock.setter
    def stock(self, digest: int) -> None:
        self._words[LOADER_STOCK] = digest

    def release(self) -> None:
        """Release the name; idempotent."""
        entry(holds.end_mark)(self._mark, self._seat, None)

    def take(self) -> None:
        """Take the name; the caller makes sure that no other process has it or takes it at the same time."""
        entry(holds.set_mark)(self._slot[LOADER_OWNER:].ctypes.data, self._mark, self._seat)


def take_name(segment: Segment, participants: Participants, name: str, table: str, seed: int | None) -> NamedLoader:
    """Take a loader's name, new or known.

    Args:
        segment: The segment.
        participants: This process's seat.
        name: 1 to 100 bytes of UTF-8.
        table: The loader's table.
        seed: The loader's seed; None for the seed of a known name, or 0 for a new name.

    Raises:
        ConfigError: The name is not allowed, it is known with another table or seed, or there are too many names.
        Busy: A living process holds the name.
    """
    if not isinstance(name, str) or not 1 <= len(name.encode()) <= LONGEST_NAME:
        raise ConfigError(f"Expected a loader's name of 1 to {LONGEST_NAME} bytes, got {name!r}")
    deadline = Deadline(_PATIENCE)
    with _between_threads:
        # a kernel lock: if this process dies here, the kernel releases it
        lock = LockByte(segment.seat)
        try:
            while not lock.take(LOCK_LOADERS):
                if deadline.passed():
                    raise WaitTimeout(
                        f"Expected to register loader {name!r} within {_PATIENCE} s, other processes did so all the time: try again"
                    )
                time.sleep(0.001)
            return _take(segment, participants, name, table, seed)
        finally:
            lock.give()


def _take(segment: Segment, participants: Participants, name: str, table: str, seed: int | None) -> NamedLoader:
    slots = _slots(segment)
    wanted = None if seed is None else int(np.uint64(seed % 2**64).astype(np.int64))
    names = [_name_of(segment, slot) for slot in slots]
    if name not in names:
        if None not in names:
            raise ConfigError(
                f"Expected at most {MAX_NAMED_LOADERS} named loaders, got one more: use their names again"
            )
        index = names.index(None)
        write_loader(segment, index, name, Known(table, wanted or 0, 0))
    else:
        index = names.index(name)
        slot = slots[index]
        owner = int(slot[LOADER_OWNER]) - 1
        if owner >= 0 and (owner == participants.number or held(segment.lock_fd, owner, 1)):
            raise Busy(
                f"Expected loader {name!r} to be free, but participant {owner} has it open: close that one, or take "
                "another name"
            )
        has = list(segment.layout.tables)[slot[LOADER_TABLE]]
        if has != table:
            raise ConfigError(
                f"Expected loader {name!r} on table {has!r}, where it is, got {table!r}: take another name"
            )
        if wanted is not None and wanted != slot[LOADER_SEED]:
            raise ConfigError(
                f"Expected seed {int(slot[LOADER_SEED])} for loader {name!r}, which it began with, got {seed}: leave seed "
                "out to go on with it, or take another name"
            )
    place = NamedLoader(name, slots[index], participants)
    place.take()
    return place
