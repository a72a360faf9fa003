"""Which rows of a page can be drawn, and the list of pages that a draw chooses from."""

from __future__ import annotations

from conduit.jit import inner
from conduit.kernels.resolve import E_ENVS, E_FIRST, E_GENERATION, E_LIMIT, E_PAGE, E_START
from conduit.store.atomics import load_acquire, load_relaxed, peek_i64, peek_u32, poke_i64
from conduit.store.protocol import block_of
from conduit.store.removal import is_present
from conduit.store.words import (
    CUT,
    DELETED,
    FINAL,
    GENERATION_SHIFT,
    KIND_MASK,
    META_BYTES,
    OPEN,
    PAGE_COMMITTED,
    PAGE_ENDED,
    PAGE_ENVS,
    PAGE_FIRST,
    PAGE_STATE,
    SEALED,
    T_FUTURE,
    T_MAX_SAMPLED,
    T_META,
    T_ROWS,
    T_SAMPLED,
)


@inner
def rows_to_draw(table, page, need):  # type: ignore[no-untyped-def]
    """Local rows [begin, end) of a page that may anchor windows which need `need` ticks of future.

    A page that is being written is sampled up to its newest complete window. When it is sealed and its stream goes on, its
    last ticks (as many as the widest window of the table needs) belong to the next page, which has them as its halo. One that
    was being written when a checkpoint was made is sampled as it was then, until something is written into the restored table.

    Returns:
        Begin, end (not above begin: none), local row behind the last committed one, generation, rows per tick.
    """
    block = block_of(table, page)
    word = load_acquire(block + PAGE_STATE)
    kind = word & KIND_MASK
    if (kind != OPEN and kind != SEALED) or not is_present(table, page):
        return 0, 0, 0, 0, 0
    committed = min(load_acquire(block + PAGE_COMMITTED), peek_i64(table + T_ROWS))
    envs = load_relaxed(block + PAGE_ENVS)
    end = committed
    ended = load_relaxed(block + PAGE_ENDED)
    if kind == OPEN or ended == CUT:
        # where deliveries of a row are counted, no row is drawn from the page that it is about to leave: its count moves with it
        end -= (peek_i64(table + T_FUTURE) if peek_i64(table + T_SAMPLED) != 0 else need) * envs
    elif ended == 0:
        end -= peek_i64(table + T_FUTURE) * envs
    return max(0, load_relaxed(block + PAGE_FIRST)), end, committed, word >> GENERATION_SHIFT, envs


@inner
def has_fresh(table, page, begin, end):  # type: ignore[no-untyped-def]
    """True when one of the local rows [begin, end) may be delivered once more; most pages of a drained table have none."""
    limit = peek_i64(table + T_MAX_SAMPLED)
    start = page * peek_i64(table + T_ROWS)
    for row in range(start + begin, start + end):
        if peek_u32(peek_i64(table + T_SAMPLED) + 4 * row) < limit:
            word = peek_u32(peek_i64(table + T_META) + META_BYTES * row + 12)
            if word & (FINAL | DELETED) == 0:
                return True
    return False


@inner
def list_page(entry, start, page, rows, begin, committed, generation, envs):  # type: ignore[no-untyped-def]
    """Describe a page of `rows` rows to draws (kernels.resolve.E_*); `start` is what lies before it."""
    poke_i64(entry + E_START, start)
    poke_i64(entry + E_PAGE, page)
    poke_i64(entry + E_FIRST, page * rows + begin)
    poke_i64(entry + E_LIMIT, page * rows + committed)
    poke_i64(entry + E_GENERATION, generation)
    poke_i64(entry + E_ENVS, envs)
