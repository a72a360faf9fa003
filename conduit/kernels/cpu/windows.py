"""From an anchor row to the rows its window reads: what resolvers are told. Only words: no function stands here.

A resolver is a C function `resolve(window, job, slots, count, 0) -> done`, called through its address by samplers. For each
listed slot it takes the job's row and its entry, the address of the sampler's description of the page (ENTRY_*).
It writes the window's row numbers (and what follows from meta alone: returns, discounts, flags, masks), and stops at the first
row that anchors no such window: `done` slots are resolved. Rows may change under it; the page's generation is checked when
all has been copied. Numbers that could lead out of the page are refused.

Beside each resolver stands a function `anchors(window, entry, row, wanted, 0) -> bits`, made of the same steps: which of the 32 rows
from `row` on, of those in `wanted`, the resolver would resolve, as the page is described. Sums of priorities are of these.

kernels.cpu.transitions and kernels.cpu.sequences are the resolvers; kernels.cpu.window_job makes the words of a window.
"""

from __future__ import annotations

ENTRY_START, ENTRY_PAGE, ENTRY_FIRST, ENTRY_LIMIT, ENTRY_GENERATION, ENTRY_ENVS, ENTRY_OVER = range(0, 56, 8)
"""A page as samplers list it: candidates before it, page, first candidate row, row behind the last committed one, generation,
rows per tick, 1 if nothing will ever come behind the last committed row (its stream has ended)."""
ENTRY_BYTES = 56

(
    WINDOW_RESOLVE,
    WINDOW_TABLE,
    WINDOW_NEED,
    WINDOW_N,
    WINDOW_GAMMA,
    WINDOW_BOOTSTRAP,
    WINDOW_STACK,
    WINDOW_REPEAT,
    WINDOW_REWARD,
    WINDOW_REWARD_STRIDE,
    WINDOW_REWARD_DOUBLE,
    WINDOW_REWARD_FACTOR,
    WINDOW_REWARD_OFFSET,
    WINDOW_REWARD_LOW,
    WINDOW_REWARD_HIGH,
    WINDOW_LENGTH,
    WINDOW_ENVS,
    WINDOW_EVERY,
    WINDOW_ACROSS,
    WINDOW_WHOLE,
    WINDOW_FROM_FIRST,
    WINDOW_BURN_IN,
    WINDOW_CURRENT,
    WINDOW_OLDEST,
    WINDOW_AGES,
    WINDOW_FOLLOWING,
    WINDOW_STACKED,
    WINDOW_FOLLOWING_STACKED,
    WINDOW_LANES,
    WINDOW_RETURN,
    WINDOW_DISCOUNT,
    WINDOW_USED,
    WINDOW_TERMINATED,
    WINDOW_TRUNCATED,
    WINDOW_IS_FIRST,
    WINDOW_MASK,
    WINDOW_LOSS_MASK,
    WINDOW_RETURN_DOUBLE,
    WINDOW_FOLLOWING_LANES,
    WINDOW_SAMPLED,
    WINDOW_MAX_SAMPLED,
    WINDOW_UNCOUNTED,
    WINDOW_SUMS,
    WINDOW_SUM_COUNT,
    WINDOW_SHORT,
    WINDOW_GOALS,
    WINDOW_ANCHORS,
    WINDOW_REACH,
) = range(0, 384, 8)
"""Words of a window: what it asks for (first half), and addresses of index arrays and outputs (0: not wanted), how
often rows have been delivered and may be, the resolver for rows that may; rewards that are summed up one after the other (SUM_*, back
to back), and how many they are; 1 where a window ends with its episode; goals of single
transitions (kernels.cpu.hindsight), or 0; the function that tells which rows anchor the window, and how many ticks behind a row say whether it does."""
WINDOW_WORDS = 48

SUM_SOURCE, SUM_STRIDE, SUM_ELEMENTS, SUM_DOUBLE, SUM_FACTOR, SUM_OFFSET, SUM_LOW, SUM_HIGH, SUM_OUT, SUM_OUT_DOUBLE = (
    range(0, 80, 8)
)
"""A reward of several, or of several elements, that is summed up: address of row 0 and bytes from row to row, elements, whether they are
float64; the transform of each; address of the sums [batch, elements], and whether they are float64."""
SUM_WORDS = 10

AGES = 64
"""Bins of the count of rows that were too old, by age in versions; the last one takes all older ones."""

SIGNATURE = "int64(int64, int64, int64, int64, int64)"
