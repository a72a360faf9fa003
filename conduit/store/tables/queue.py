"""A queue's pages: how consumers claim rows, acknowledge them and give them back. Recovery of dead ones: store.pages.recovery.

Who holds a page, and up to where, is one word that is only ever swapped (words.SIDE_CLAIM); it carries low bits of the page's
generation, so a swap on a page that was reused meanwhile fails or is undone. The acknowledgement is one store beside it.
docs/memory-model.md has the argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    compare_and_swap,
    data_of,
    fence_acquire,
    load_acquire,
    load_relaxed,
    peek_i64,
    poke_i64,
    store_relaxed,
    store_release,
    wake,
)
from conduit.store.format import words as w
from conduit.store.pages.holds import NO_SEAT, NO_SLOT, end_hold_at, give_slot, hazard_of, take_slot
from conduit.store.pages.protocol import block_of, end_claim, envs_of, has_rows, is_of, returned_until, side_of
from conduit.store.tables.view import TableView

(
    CLAIM_PAGE,
    CLAIM_START,
    CLAIM_STOP,
    CLAIM_ENVS,
    CLAIM_GENERATION,
    CLAIM_STREAM,
    CLAIM_TICK,
    CLAIM_WORD,
    CLAIM_BOOTSTRAP,
    CLAIM_AGAIN,
    CLAIM_TABLE,
    CLAIM_STATE,
    CLAIM_HOLD,
) = range(13)
"""Words of a claim: page, local rows from start to stop, rows per tick, the page's generation, stream, tick of the stream at
start, SIDE_CLAIM as it was swapped in, local row of the bootstrap observations or -1, 1 if the rows may have been delivered before;
table descriptor, what became of it, and the hold on its page (words.HOLD_*)."""
CLAIM_WORDS = CLAIM_HOLD + w.HOLD_WORDS

HELD, ACKNOWLEDGED, GIVEN_BACK, LOST = 1, 2, 3, 4
"""What became of a claim; 0 before it was made."""
CONSUMER_CLAIMS, CONSUMER_ROWS, CONSUMER_AGAIN, CONSUMER_ACKNOWLEDGED, CONSUMER_GIVEN_BACK = range(5)
"""Counts of a consumer, int64: claims and rows handed out, claims of rows that may have been handed out before, claims by their end."""
CONSUMER_WORDS = 5

DAMAGED = -10
"""DAMAGED - page: the result of a claim that found a page whose words cannot be."""
_NEVER = (1 << 63) - 1


@inner
def _position(word):
    return (word >> w.POSITION_SHIFT) & w.POSITION_MASK


@inner
def _is_held_up(table, block):
    """True while the page before this one in its stream has rows that nobody has claimed."""
    previous = load_relaxed(block + w.PAGE_PREVIOUS) - 1
    if not 0 <= previous < peek_i64(table + w.VIEW_COUNT):
        return False
    before = block_of(table, previous)
    state = load_acquire(before + w.PAGE_STATE)
    if not is_of(state, load_relaxed(block + w.PAGE_PREVIOUS_GENERATION)):
        return False
    position = _position(load_acquire(side_of(table, previous) + w.SIDE_CLAIM))
    return position < load_acquire(before + w.PAGE_COMMITTED)


@inner
def _offers(table, page, state, word):
    """Local row up to which a page's rows can be claimed now, 0 where none can."""
    kind = state & w.KIND_MASK
    if not has_rows(state):
        return 0
    if (word & w.CONSUMER_MASK) != 0 or (word >> w.TAG_SHIFT) != ((state >> w.GENERATION_SHIFT) & w.TAG_MASK):
        return 0
    block = block_of(table, page)
    committed = load_acquire(block + w.PAGE_COMMITTED)
    if committed <= _position(word):
        return 0
    ticks = peek_i64(table + w.VIEW_ROLLOUT)
    if ticks != 0 and kind == w.OPEN and committed < ticks * load_relaxed(block + w.PAGE_ENVS):
        return 0
    return committed


@inner
def _is_damaged(table, page, state, start, stop):
    """True when a page that is still in this state has no such rows to claim; it is damaged then."""
    block = block_of(table, page)
    envs = load_relaxed(block + w.PAGE_ENVS)
    rows = peek_i64(table + w.VIEW_ROWS)
    good = 1 <= envs <= rows and 0 <= start < stop <= rows
    good = good and start % envs == 0 and stop % envs == 0 and 0 <= load_relaxed(block + w.PAGE_STREAM) < 1 << 31
    if good:
        return False
    # otherwise it is another generation's, whose owner is preparing it
    fence_acquire()
    return load_relaxed(block + w.PAGE_STATE) == state


@kernel("int64(int64, int64, int64, int64, int64)")
def take(table, owner, most, hazard, out):
    """Claim rows of the page that was opened first of those that offer some; its page is leased as well.

    Args:
        table: Table descriptor.
        owner: Participant number of the consumer.
        most: Ticks that are claimed at most, or 0.
        hazard: Address of a free hazard slot of this participant.
        out: Address of int64 [CLAIM_WORDS].

    Returns:
        The page; -1 when no rows can be claimed now; DAMAGED - page when the words of the page whose turn it is cannot be.
    """
    while True:
        best = -1
        best_age = _NEVER
        best_word = best_state = best_end = 0
        for page in range(peek_i64(table + w.VIEW_COUNT)):
            block = block_of(table, page)
            state = load_acquire(block + w.PAGE_STATE)
            word = load_acquire(side_of(table, page) + w.SIDE_CLAIM)
            end = _offers(table, page, state, word)
            if end == 0:
                continue
            age = load_relaxed(block + w.PAGE_AGE)
            if age < best_age and not _is_held_up(table, block):
                best, best_age, best_word, best_state, best_end = page, age, word, state, end
        if best < 0:
            return -1
        block = block_of(table, best)
        side = side_of(table, best)
        start = _position(best_word)
        if _is_damaged(table, best, best_state, start, best_end):
            return DAMAGED - best
        envs = envs_of(table, best)
        stop = min(best_end, start + most * envs) if most > 0 else best_end
        mine = ((best_word >> w.TAG_SHIFT) << w.TAG_SHIFT) | (stop << w.POSITION_SHIFT) | (owner + 1)
        if compare_and_swap(side + w.SIDE_CLAIM, best_word, mine) != best_word:
            continue
        state = load_acquire(block + w.PAGE_STATE)
        # with the claim in place and rows not acknowledged, the page stays of its generation; it may have gone just before
        if (state >> w.GENERATION_SHIFT) != (best_state >> w.GENERATION_SHIFT):
            compare_and_swap(side + w.SIDE_CLAIM, mine, best_word)
            continue
        # before the acknowledgement, without which no writer looks whether the page is leased
        store_relaxed(hazard, peek_i64(table + w.VIEW_PAGE_BASE) + best + 1)
        bootstrap = load_relaxed(side + w.SIDE_BOOTSTRAP)
        has_bootstrap = bootstrap != 0 and (bootstrap >> 32) == stop
        if has_bootstrap and not stop < (bootstrap & 0xFFFFFFFF) <= peek_i64(table + w.VIEW_ROWS) - envs + 1:
            store_release(hazard, 0)
            compare_and_swap(side + w.SIDE_CLAIM, mine, best_word)
            return DAMAGED - best
        poke_i64(out + 8 * CLAIM_PAGE, best)
        poke_i64(out + 8 * CLAIM_START, start)
        poke_i64(out + 8 * CLAIM_STOP, stop)
        poke_i64(out + 8 * CLAIM_ENVS, envs)
        poke_i64(out + 8 * CLAIM_GENERATION, state >> w.GENERATION_SHIFT)
        poke_i64(out + 8 * CLAIM_STREAM, load_relaxed(block + w.PAGE_STREAM))
        poke_i64(out + 8 * CLAIM_TICK, load_relaxed(block + w.PAGE_TICK) + start // envs)
        poke_i64(out + 8 * CLAIM_WORD, mine)
        poke_i64(out + 8 * CLAIM_BOOTSTRAP, (bootstrap & 0xFFFFFFFF) - 1 if has_bootstrap else -1)
        poke_i64(out + 8 * CLAIM_AGAIN, start < returned_until(side, mine >> w.TAG_SHIFT))
        # the next page of this stream can be claimed now
        wake(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_DATA)
        return best


@kernel("int64(int64, int64, int64)")
def acknowledge(table, page, word):
    """Acknowledge the rows of a claim and end it; `word` is its CLAIM_WORD.

    Returns:
        0, or -1 when the claim is not held any more: nothing is acknowledged then.
    """
    side = side_of(table, page)
    if load_acquire(side + w.SIDE_CLAIM) != word:
        return -1
    store_release(side + w.SIDE_ACKED, _position(word))
    compare_and_swap(side + w.SIDE_CLAIM, word, word - (word & w.CONSUMER_MASK))
    wake(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_DATA)
    wake(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_SPACE)
    return 0


@kernel("int64(int64, int64, int64)")
def give_back(table, page, word):
    """End a claim without an acknowledgement: its rows are delivered again; `word` is its CLAIM_WORD.

    Returns:
        0, or -1 when the claim is not held any more.
    """
    if load_acquire(side_of(table, page) + w.SIDE_CLAIM) != word:
        return -1
    end_claim(table, page, word)
    wake(peek_i64(table + w.VIEW_CONTROL) + w.TABLE_DATA)
    return 0


@inner
def _count(counts, which, more):
    poke_i64(counts + 8 * which, peek_i64(counts + 8 * which) + more)


@kernel("int64(int64, int64, object, object, object)")
def claim_rows(table, most, words, seat, counts):
    """`take` with a hazard of this process's seat; the claim, and the hold on its page, are noted in `words` (CLAIM_*).

    Returns:
        The page; -1 when no rows can be claimed now; NO_SLOT or NO_SEAT (conduit.store.pages.holds); DAMAGED - page.
    """
    at, mine, counted = data_of(words), data_of(seat), data_of(counts)
    owner = peek_i64(mine + w.PROCESS_NUMBER)
    if owner < 0:
        return NO_SEAT
    slot = take_slot(mine)
    if slot < 0:
        return NO_SLOT
    page = take(table, owner, most, hazard_of(mine, slot), at)
    if page < 0:
        give_slot(mine, slot)
        return page
    poke_i64(at + 8 * CLAIM_HOLD + w.HOLD_TABLE, table)
    poke_i64(at + 8 * CLAIM_HOLD + w.HOLD_SLOT, slot + 1)
    poke_i64(at + 8 * CLAIM_TABLE, table)
    poke_i64(at + 8 * CLAIM_STATE, HELD)
    _count(counted, CONSUMER_CLAIMS, 1)
    _count(counted, CONSUMER_ROWS, peek_i64(at + 8 * CLAIM_STOP) - peek_i64(at + 8 * CLAIM_START))
    _count(counted, CONSUMER_AGAIN, peek_i64(at + 8 * CLAIM_AGAIN))
    return page


@inner
def _end(words, seat, counts, how):
    """End a claim once, whoever is first; returns what became of it."""
    at, mine, counted = data_of(words), data_of(seat), data_of(counts)
    before = compare_and_swap(at + 8 * CLAIM_STATE, HELD, how)
    if before != HELD:
        return before
    table, page, word = peek_i64(at + 8 * CLAIM_TABLE), peek_i64(at + 8 * CLAIM_PAGE), peek_i64(at + 8 * CLAIM_WORD)
    # without a seat somebody else has given it back, or will
    seated = peek_i64(mine + w.PROCESS_NUMBER) >= 0
    if how == ACKNOWLEDGED:
        if not seated or acknowledge(table, page, word) < 0:
            poke_i64(at + 8 * CLAIM_STATE, LOST)
            return LOST
        _count(counted, CONSUMER_ACKNOWLEDGED, 1)
        return how
    _count(counted, CONSUMER_GIVEN_BACK, 1)
    if seated:
        give_back(table, page, word)
    return how


@kernel("int64(object, object, object, int64)")
def end(words, seat, counts, how):
    """End a claim: ACKNOWLEDGED or GIVEN_BACK. Returns what became of it, which may be another end that came before, or LOST."""
    return _end(words, seat, counts, how)


@kernel("int64(object, object, object, object)")
def drop_claim(words, seat, counts, _thing):
    """Give back a claim that nobody can end any more (conduit.native.finish)."""
    _end(words, seat, counts, GIVEN_BACK)
    return 0


@kernel("int64(object, object, object)")
def drop_hold(words, seat, _thing):
    """End the hold on a claim's page: nobody can look at it any more (conduit.native.finish)."""
    end_hold_at(data_of(words) + 8 * CLAIM_HOLD, data_of(seat))
    return 0


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """A queue's rows by what has become of them; each number is right for some moment of the look.

    Attributes:
        waiting: Committed rows that nobody has claimed, those of unfinished rollouts left out.
        unfinished: Rows of rollouts that their writers are still filling.
        claimed: {participant: rows that it has claimed and not acknowledged}.
    """

    waiting: int
    unfinished: int
    claimed: Mapping[int, int] = field(default_factory=dict)


def count_rows(pages: np.ndarray[Any, Any], sides: np.ndarray[Any, Any], rollout: int) -> QueueCounts:
    """Count a queue's rows from copies of its words.

    Args:
        pages: int64 [pages, 16], words.PAGE_* // 8.
        sides: int64 [pages, 16], words.SIDE_* // 8.
        rollout: Ticks of a rollout, or 0.
    """
    waiting = unfinished = 0
    claimed: dict[int, int] = {}
    for page, side in zip(pages.tolist(), sides.tolist(), strict=True):
        kind = page[w.PAGE_STATE // 8] & w.KIND_MASK
        word, acked = side[w.SIDE_CLAIM // 8], side[w.SIDE_ACKED // 8]
        tag = page[w.PAGE_STATE // 8] >> w.GENERATION_SHIFT & w.TAG_MASK
        if kind not in (w.OPEN, w.SEALED) or word >> w.TAG_SHIFT != tag:
            continue
        committed, position = page[w.PAGE_COMMITTED // 8], word >> w.POSITION_SHIFT & w.POSITION_MASK
        consumer = (word & w.CONSUMER_MASK) - 1
        if consumer >= 0:
            claimed[consumer] = claimed.get(consumer, 0) + max(0, position - acked)
        left = max(0, committed - position)
        if kind == w.OPEN and rollout and committed < rollout * page[w.PAGE_ENVS // 8]:
            unfinished += left
        else:
            waiting += left
    return QueueCounts(waiting, unfinished, claimed)


class QueueView:
    """What a queue's rows are up to, as one process sees it; stateless, for any number of threads.

    Args:
        table: The queue.
    """

    def __init__(self, table: TableView) -> None:
        self.table = table
        shape = (table.layout.pages, w.LINE // 8)
        self._sides = table.segment.array(table.layout.sides, shape, np.dtype(np.int64))

    def counts(self) -> QueueCounts:
        """Its rows now."""
        return count_rows(self.table.pages(), self._sides.copy(), self.table.layout.table.rollout_length or 0)

    def explain(self) -> str:
        """Its rows now, in words: how many wait, and which processes hold how many."""
        counts = self.counts()
        seat = self.table.check_open()
        names = {one.number: one for one in seat.list()}
        holders = [
            f"process {names[number].pid} ({names[number].name}) {rows}" if number in names else f"a dead one {rows}"
            for number, rows in sorted(counts.claimed.items())
        ]
        held = f"; claimed and not acknowledged by: {', '.join(holders)}" if holders else "; none is claimed"
        unfinished = f", {counts.unfinished} in unfinished rollouts" if self.table.layout.table.rollout_length else ""
        return f"{counts.waiting} rows wait to be claimed{unfinished}{held}"
