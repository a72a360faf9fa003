"""The words of a segment that several processes read and write, by byte offset. Kernels and Python both take them from here.

All words are little-endian int64, 8-byte aligned. Words that one process writes often have a 128-byte line (two cache
lines, since the adjacent-line prefetcher pairs them) of their own.

State of a page, one word:  generation << 16 | owner << 4 | kind
    kind        FREE (no rows), INIT (claimed, being prepared), OPEN (its writer fills it), SEALED (full or finished)
    owner       participant number in INIT and OPEN; in SEALED, low bits of how often the page was reopened (SIDE_REOPENED)
    generation  raised by every claim; a row id carries it, so an overwritten row is told from a living one
"""

from __future__ import annotations

LINE = 128

FREE, INIT, OPEN, SEALED = 0, 1, 2, 3
KIND_MASK = 15
OWNER_SHIFT, OWNER_MASK = 4, 4095
GENERATION_SHIFT = 16

# --- page block: one line per page
PAGE_STATE = 0
PAGE_COMMITTED = 8
"""Rows visible, halo included; only the owner stores it, with release."""
PAGE_AGE = 16
"""Ticket drawn when the page was sealed: the oldest page is evicted first. A hint; the truth is the swap on the state."""
PAGE_ENVS = 24
"""N: rows per tick."""
PAGE_FIRST = 32
"""Local row of the first anchor, that is the first row this page may be sampled for."""
PAGE_ENDED = 40
"""ENDED when no later page continues this stream: its last rows are then anchors too. CUT: the same, of a stream that was being
written when a checkpoint was made, until a writer opens a page in the restored table: up to then draws choose among this page's
rows as if it were OPEN, so that they are those of the engine that went on."""
ENDED, CUT = 1, 2
PAGE_STREAM = 48
PAGE_TICK = 56
"""Tick of the stream at local row 0."""
PAGE_HALO = 64
"""Rows copied from the previous page."""
PAGE_TAIL = 72
"""Local row behind the newest row that is complete without a row behind it << 32 | kept final observations, at the end of the page,
growing down. Complete so is a row that ended its episode: one tick later, where the next row is the final observation."""
COMPLETE_SHIFT, TAIL_MASK = 32, (1 << 32) - 1
PAGE_PREVIOUS = 80
"""Page before this one in the stream + 1, or 0."""
PAGE_PREVIOUS_GENERATION = 88
PAGE_UPDATES = 96
"""Leaf priorities stored by learners in this generation, and deaths: a learner that counts fewer of its own sums the page anew."""
PAGE_ARENA = 104
"""Bytes of ragged values that belong to rows of this page; a statistic."""
PAGE_PAST = 112
"""Own rows of this page's earlier generations << 16 | the low bits of the generation whose claimer added them up."""
PAST_SHIFT, PAST_MASK = 16, (1 << 16) - 1
PAGE_EPOCH = 120
"""Resets of the table before the page was opened: a page of an earlier epoch has no rows any more."""

# --- side line of a page: what readers write
SIDE_CLAIM = 0
"""Of a queue's page, one word:  low bits of the generation << 44 | position << 12 | consumer
    consumer    participant that has claimed rows of the page + 1, or 0
    position    local row up to which rows are claimed; without a consumer, up to which they are acknowledged
"""
SIDE_ACKED = 8
"""Local row up to which rows have been acknowledged. The store of it is the acknowledgement; the claim is ended after it."""
SIDE_RETURNED = 16
"""A claim that was given back, or whose consumer died, as it was in SIDE_CLAIM: its rows may have been delivered before."""
SIDE_GONE = 24
"""Own rows that have been deleted, or sampled as often as they may be, while the page still has them << 16 | the low bits of
the generation that the page was opened in: a late count never reaches another generation's rows."""
SIDE_REOPENED = 40
"""How often the page was opened again in this generation, by writers that filled it up (conduit.store.ingest.first_page)."""
SIDE_BOOTSTRAP = 32
"""Written by the page's owner: committed rows << 32 | local row + 1 of the observations that follow the last of them, or 0.
It counts only where the page has just as many rows: its writer may have died before it committed them."""
CONSUMER_MASK = 4095
POSITION_SHIFT, POSITION_MASK = 12, (1 << 32) - 1
TAG_SHIFT, TAG_MASK = 44, (1 << 19) - 1

# --- table control: lines
TABLE_TICKET = 0
TABLE_DATA = 1 * LINE
"""Eventcount: readers wait here for rows. At +8 the waiters flag."""
TABLE_SPACE = 2 * LINE
"""Eventcount: writers wait here for a page."""
TABLE_STREAMS = 3 * LINE
TABLE_SHRUNK = 3 * LINE + 8
"""How often rows have gone (evicted, deleted, reset); whoever remembers a table's size asks whether it still is the same."""
TABLE_SEATS = 3 * LINE + 16
"""Seat lines that have ever been used, from the first on: only these are looked at."""
TABLE_RECOVERED = 3 * LINE + 24
"""Pages taken back from dead writers."""
TABLE_CUT = 3 * LINE + 32
"""1 while pages may be CUT (PAGE_ENDED): no writer has opened a page since the table was restored."""
TABLE_USED = 3 * LINE + 40
"""Pages that have ever been claimed, and all before them: only these have rows."""
TABLE_LOST = 3 * LINE + 48
"""Writers whose process died and for which no other has come since (store.segment.writer_counts)."""
TABLE_RECENT_LEAF = 4 * LINE
"""Largest leaf priority of the current span of updates; at +8 that of the span before, at +16 updates in this span."""
TABLE_CLIPPED = 4 * LINE + 24
"""Priorities that were too small for their table and stored as the least; at +8 those that were too large."""
TABLE_EPOCH = 5 * LINE
"""Resets << 1 | 1 while the table is frozen and takes no rows. This line is read often and stored rarely."""
TABLE_LIMITS = 6 * LINE
"""A count of changes of the limits; 0: those that were declared. Behind it two copies of (spi, min_size, min_diff, max_diff),
float64, of which its lowest bit chooses the one in force."""
LIMITS_BYTES = 32
TABLE_BASE_INSERTED = 7 * LINE
"""What counts began from (a restored checkpoint): added to the inserts, samples and deletes counted since."""
TABLE_BASE_SAMPLED = 7 * LINE + 8
TABLE_BASE_DELETED = 7 * LINE + 16
"""Statistics alone use it: the limits' number of deletes is inserts less the rows that are there."""
TABLE_DELIVERED_AGAIN = 7 * LINE + 24
"""Claims of dead consumers that were given back."""
TABLE_UNSETTLED = 7 * LINE + 32
"""Above 0 where a participant died while it counted deliveries or deleted rows, until SIDE_GONE is counted anew (store.pages.settling)."""
TABLE_CONTROL_BYTES = 8 * LINE

# --- control line of a weights slot: the latest version, then
POLICY_EVENT = 64
"""Eventcount: readers wait here for a version."""

# --- seat line of a table: what one participant has taken of the table's limits; cumulative over the seat's holders
SEAT_RESERVED = 0
"""Samples reserved."""
SEAT_DELIVERED = 8
"""Samples delivered; recovery sets SEAT_RESERVED to it."""
SEAT_GRANTED = 16
"""Rows granted to writers."""
SEAT_INSERTED = 24
"""Rows published of those; recovery sets SEAT_GRANTED to it."""
SEAT_STARTED = 32
"""How often it has begun to count deliveries, or to delete rows."""
SEAT_ENDED = 40
"""How often it has ended that; recovery sets it to SEAT_STARTED."""

SEAT_WEIGHING, WEIGHING_MARKS = 48, 2
"""Page + 1 of a row that has gone and is about to weigh nothing, or 0: a mark for each of the threads that come at once."""
SEAT_UPDATING = 64
"""How many of the seat's marks (VIEW_MARKS) are those of an update of priorities that is going on."""
SEAT_WRITERS = 72
"""Writers that the seat's holder has open; stored by it, and by who recovers it (store.segment.writer_counts)."""
UPDATING_MARKS = 256

# --- table descriptor: private to a process, int64 words, handed to kernels by address
VIEW_PAGES = 0
"""Address of page block 0."""
VIEW_COUNT = 8
VIEW_ROWS = 16
"""R: rows per page."""
VIEW_HAZARDS = 24
VIEW_HAZARD_COUNT = 32
VIEW_CONTROL = 40
VIEW_PAGE_BASE = 48
"""Number of page 0 among all pages of the segment; hazards name pages by it."""
VIEW_COLUMNS = 56
"""Address of (base address, row bytes) pairs of the schema's columns."""
VIEW_COLUMN_COUNT = 64
VIEW_META = 72
VIEW_TERMINATED = 80
VIEW_TRUNCATED = 88
VIEW_HISTORY = 96
"""max_stack - 1: ticks of history every anchor has in its page."""
VIEW_FUTURE = 104
"""Ticks of future that every anchor has in its page."""
VIEW_PRIORITY = 112
"""Address of the leaf priorities, uint32 [rows], or 0."""
VIEW_SIDES = 120
"""Address of the side line of page 0."""
VIEW_SEATS = 128
"""Address of the table's seat lines, one for each participant."""
VIEW_SEAT_COUNT = 136
VIEW_SAMPLED = 144
"""Address of the rows' counts of deliveries, int64 [rows], or 0."""
VIEW_MAX_SAMPLED = 152
VIEW_QUEUE = 160
"""1: a queue."""
VIEW_ROLLOUT = 168
"""Ticks after which a queue's page is complete, or 0."""
VIEW_LIMITS = 176
"""Address of the declared limits, four float64, or 0 for a table without."""
VIEW_KEEP = 184
"""Rows that an eviction leaves as long as another page is free; 0: a free page always goes first."""
VIEW_MARKS = 192
"""Address of the marks of updates, uint32 [seats, UPDATING_MARKS], in a table with priorities, else 0: page + 1 of each row that is
about to get a priority. No writer takes such a page."""
VIEW_REOPENS = 200
"""1: a page that a stream ended in is filled up by the next writer."""
VIEW_FIRST_GENERATION = 208
"""The generation that the table's pages had before they were ever claimed (store.pages.row_ids)."""
VIEW_WORDS = 27

# --- row id:  low bits of the generation << 40 | physical row
ROW_BITS = 40
"""2^40 rows, and a generation that repeats after 2^23 reuses of a page."""
ROW_MASK = (1 << ROW_BITS) - 1
GENERATION_MASK = (1 << (63 - ROW_BITS)) - 1

# --- meta, 16 bytes a row: int32 version | int32 step | uint32 episode | uint32 link << 6 | flags
META_BYTES = 16
TERMINATED, TRUNCATED, FIRST, FINAL, KEPT, DELETED = 1, 2, 4, 8, 16, 32
"""KEPT: the next observation is a kept final one in the page's tail. DELETED: the row begins no window any more."""
LINK_SHIFT, FLAG_MASK = 6, 63
EPISODE_MASK = (1 << 32) - 1
"""Episodes of a stream are numbered from 0; behind 2^32 - 1 comes 0 again."""
LAST_STEP, AFTER_LAST_STEP = (1 << 31) - 1, 1 << 30
"""Steps of an episode are numbered from 0; in an episode of more than 2^31, 2^30 comes behind 2^31 - 1, and again."""
LAST_VERSION = (1 << 31) - 1
"""The largest policy version that a row carries: it stands for itself and all later ones."""

# --- count of a row's deliveries, one word:  generation the page was opened in << 33 | gone << 32 | taken << 16 | delivered
MOST_DELIVERIES = (1 << 16) - 1
"""The largest max_times_sampled."""
ONE_TAKEN = 1 << 16
"""Taken: by batches that have been handed out, or are being made. Delivered: those that have been."""
HAS_GONE = 1 << 32
"""The row has been counted in SIDE_GONE; or, of a copy, so was the row it was copied from."""
COUNT_TAG_SHIFT, COUNT_TAG_MASK = 33, (1 << 30) - 1

# --- writer state: private to a process, int64 words
WRITER_TABLE = 0
WRITER_PAGE = 8
"""Page being filled, or -1."""
WRITER_BLOCK = 16
WRITER_BASE = 24
"""Physical row of the page's row 0."""
WRITER_LOCAL = 32
"""Next local row to fill."""
WRITER_ENVS = 40
WRITER_VERSION = 48
WRITER_TAIL = 56
WRITER_RESERVE = 64
"""Tail rows that one tick may need: N where final observations are handed over, and N where it may end a rollout."""
WRITER_NEXT_STEP = 72
"""1: the row after an ended one is its final observation (Gymnasium's NEXT_STEP)."""
WRITER_ENV_STATE = 80
"""Address of int64 [N, 3]: phase, episode, step; ENV_BYTES each."""
ENV_BYTES = 24
WRITER_EPISODES = 88
WRITER_STREAM = 96
WRITER_TICK = 104
WRITER_OWNER = 112
WRITER_COUNTER = 120
"""Address of this participant's count of rows written."""
WRITER_PUBLISH_EVERY = 128
WRITER_UNPUBLISHED = 136
WRITER_STRICT = 144
"""1: a row that ends its episode must have its final observation staged."""
WRITER_KEPT = 152
"""Tail rows that belong to committed rows; those beyond it are staged."""
WRITER_BUSY = 160
"""Not 0 while something may be staged that is not committed: the number of the form of writing in progress (a step, a rollout, the
unchecked handle), or 1 of a call. A call that was interrupted leaves it, and the next one discards what was staged."""
WRITER_FIELDS = 168
"""Address of the field descriptions of conduit.store.ingest.field_specs."""
WRITER_FIELD_COUNT = 176
WRITER_OBJECTS = 184
"""Address of the table of known objects of conduit.store.ingest.field_specs."""
WRITER_REFUSED = 192
"""Place + 1 of the row for which the unchecked handle's last commit was refused, or 0."""
WRITER_CLOSED = 200
"""Address of the header's word that says that the engine has closed."""
WRITER_PRIORITIES_GIVEN = 208
"""1: the next commit takes the leaf priorities that are in place, instead of the one for new rows."""
WRITER_ARENAS = 216
"""Address of the arenas of the ragged fields (ARENA_*), back to back."""
WRITER_ARENA_COUNT = 224
WRITER_ROWS = 232
"""Rows of a page."""
WRITER_LIMIT = 240
"""Rows of the page that this writer may fill, tail included: those of one rollout, or more than there are."""
WRITER_LAST = 248
"""Page that was finished before there was a next one + 1 (queues), or 0; and its generation."""
WRITER_LAST_GENERATION = 256
WRITER_FINISHES = 264
"""1: the commit that fills a page finishes it, so that a writer that pauses then keeps no page (queues)."""
WRITER_EPOCH = 272
"""TABLE_EPOCH as the page was opened, without its lowest bit."""
WRITER_SEAT = 280
"""Address of this participant's seat line, where the table has a limiter, else 0."""
WRITER_GRANTED = 288
"""Rows granted and not published yet."""
WRITER_BEYOND = 296
"""1: the unchecked handle has no row to commit, until it asks for one."""
WRITER_FINAL = 304
"""Address of the description of what `final` takes (as of a field), or 0 where only the exact path knows."""
WRITER_ENDS = 312
"""1: the page is finished with the next commit, since the observations behind a rollout are staged."""
WRITER_COMPLETE = 320
"""Local row behind the newest committed row that is complete (PAGE_TAIL)."""
WRITER_FIRST_TICK = 328
"""Tick of the stream at the writer's own first one: above 0 where it went on in a page of an ended stream."""
WRITER_TURNS = 336
"""Pages that `append` may still turn in its compiled call; 0 leaves the next turn to the exact path, which looks after the dead too."""
WRITER_WORDS = 43

# --- arena of a ragged field, as a writer sees it: private to a process, int64 words
ARENA_SPANS = 0
"""Address of the field's column: per row one word, start | length << 32, in items from the start of the page's arena."""
ARENA_VALUES = 8
"""Address of page 0's arena."""
ARENA_PAGE_BYTES = 16
"""Bytes from one page's arena to the next page's."""
ARENA_ITEM = 24
"""Bytes of one item: a step along the first axis."""
ARENA_ITEMS = 32
"""Items that an arena holds."""
ARENA_USED = 40
"""Items taken in the writer's page, staged ones included."""
ARENA_KEPT = 48
"""Items that belong to committed rows."""
ARENA_BYTES = 56
SPAN_BYTES = 8
SPAN_SHIFT, SPAN_MASK = 32, (1 << 32) - 1

# --- a process's seat: private to it, int64 words
PROCESS_LOCK = 0
"""Descriptor that the segment's locks are taken through, or -1: they have been given back."""
PROCESS_NUMBER = 8
"""Participant number, or -1: nothing of the segment is this process's to give back."""
PROCESS_HAZARDS = 16
"""Address of its hazards."""
PROCESS_SLOTS = 24
"""For each hazard 1 while a lease, a claim or a call uses it, else 0."""
HAZARDS_PER_PARTICIPANT = 16
PROCESS_WORDS = 3 + HAZARDS_PER_PARTICIPANT

# --- a hold on a page: private to a process, int64 words
HOLD_TABLE = 0
"""Address of the table descriptor."""
HOLD_SLOT = 8
"""Number of the hazard that holds the page + 1, or 0: nothing is held."""
HOLD_ROWS = 16
"""Rows committed when it was taken; then the generation, the rows per tick, and the halo's rows."""
HOLD_GENERATION, HOLD_ENVS, HOLD_HALO = 24, 32, 40
HOLD_WORDS = 6

RUNNING, STARTING, AWAITING_FINAL = 0, 1, 2
"""Phases of an environment in a writer: in an episode; next row is its first; next row is a final observation."""
