"""Returns and lengths of episodes that ended: a ring of records in each table, which writers fill as they commit the ends.

Nothing is added up step by step. A step that ends its episode has the episode's rewards read back from its rows in the page, in the
order of time; what lies in earlier pages was added up when each of them was left (`carry`). So a sum is that of the stored rewards
in float64, one after the other, whatever becomes of the rows later.

A record is claimed by a ticket, one fetch-and-add, and belongs to it by a check word over all of its words and the ticket. A reader
takes a record only when its check is right: one that is being written, that a killed writer left half done, or that two writers
filled at once since one of them slept through a whole turn of the ring, is none. Records are made before their rows are published:
whoever sees the end of an episode finds its record, or finds that it was overwritten.
"""

from __future__ import annotations

import math
import platform
from typing import Any

import numpy as np

from conduit.native.descriptors import fill
from conduit.native.jit import inner, kernel
from conduit.native.memory import (
    fetch_add,
    load_acquire,
    peek_f32,
    peek_f64,
    peek_i32,
    peek_i64,
    peek_u8,
    peek_u32,
    poke_f64,
    poke_i64,
    poke_u8,
    poke_u32,
    store_release,
    syscall,
)
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.format.episode_records import (
    RECORD_CHECK,
    RECORD_ENV,
    RECORD_EPISODE,
    RECORD_LENGTH,
    RECORD_RETURNS,
    RECORD_STREAM,
    RECORD_TIME,
    RECORDS,
    record_bytes,
    summed,
)

Array = np.ndarray[Any, Any]

WRITER_REPORTS = 8 * w.WRITER_WORDS
"""Of a writer's state, behind the words of store.format.words: address of what follows, or 0."""
WRITER_WORDS = w.WRITER_WORDS + 1

(
    REPORT_RING,
    REPORT_BYTES,
    REPORT_COUNT,
    REPORT_SOURCES,
    REPORT_CARRIED,
    REPORT_OWN,
    REPORT_SECONDS,
    REPORT_NANOS,
    REPORT_SCRATCH,
) = range(0, 72, 8)
"""What a writer has to report by: private to a process, int64 words. The table's ring and the bytes of a record; elements of rewards;
where they lie (REWARD_*, back to back); their sums up to the page, float64 [environments, elements]; the page's local row from which on rows
are this writer's and no copies; and room for a time and for a number."""
REPORT_WORDS = 9
REWARD_SOURCE, REWARD_STRIDE, REWARD_KIND = 0, 8, 16
"""An element of a reward: address in row 0, bytes from row to row, and how it is read."""
REWARD_BYTES = 24

_KINDS = {
    name: number
    for number, name in enumerate(
        "float32 float64 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool bfloat16 float16".split()  # noqa: SIM905
    )
}
(_F32, _F64, _I64, _I32, _I16, _I8, _U64, _U32, _U16, _U8, _BOOL, _BF16, _F16) = range(13)
_CLOCK = {"x86_64": 228, "aarch64": 113}.get(platform.machine(), -1)
"""Number of clock_gettime among the system calls."""
_FACTOR = -7046029254386353131


class Reports:
    """What one writer reports by; its memory lives as long as this.

    Args:
        ring: Address of the table's ring.
        schema: The table's.
        columns: {field: array [rows, *shape]}.
        envs: The writer's environments.
    """

    def __init__(self, ring: int, schema: Schema, columns: dict[str, Array], envs: int) -> None:
        sources = []
        for field in summed(schema):
            column = columns[field.name]
            for place in range(math.prod(field.shape)):
                at = column.ctypes.data + place * column.dtype.itemsize
                sources.append((at, column.strides[0], _KINDS[field.dtype]))
        self._sources = np.array(sources, np.int64).reshape(-1, 3)
        self._carried = np.zeros((envs, len(sources)), np.float64)
        self._words = np.zeros(REPORT_WORDS, np.int64)
        fill(
            self._words,
            {
                REPORT_RING: ring,
                REPORT_BYTES: record_bytes(schema),
                REPORT_COUNT: len(sources),
                REPORT_SOURCES: self._sources.ctypes.data,
                REPORT_CARRIED: self._carried.ctypes.data,
            },
        )
        self.address: int = self._words.ctypes.data


@inner
def _half(bits):
    sign = -1.0 if bits & 0x8000 else 1.0
    exponent, rest = (bits >> 10) & 31, bits & 1023
    if exponent == 31:
        return math.nan if rest != 0 else sign * math.inf
    if exponent == 0:
        return sign * rest * 2.0**-24
    value = sign * (1024 + rest) * 2.0**-25
    for _ in range(exponent):
        value *= 2.0
    return value


@inner
def _number(at, kind, scratch):
    """One stored number as float64; `scratch` is room for a word."""
    if kind == _F32:
        return np.float64(peek_f32(at))
    if kind == _F64:
        return peek_f64(at)
    if kind == _I64:
        return np.float64(peek_i64(at))
    if kind == _I32:
        return np.float64(peek_i32(at))
    if kind == _U64:
        high = (peek_i64(at) >> 1) & 0x7FFFFFFFFFFFFFFF
        return np.float64(peek_i64(at)) if peek_i64(at) >= 0 else 2.0 * high + (peek_i64(at) & 1)
    if kind == _U32:
        return np.float64(peek_u32(at))
    low = peek_u8(at)
    if kind == _U8 or kind == _BOOL:
        return np.float64(low)
    if kind == _I8:
        return np.float64(low - 256 if low > 127 else low)
    both = low | (peek_u8(at + 1) << 8)
    if kind == _U16:
        return np.float64(both)
    if kind == _I16:
        return np.float64(both - 65536 if both > 32767 else both)
    if kind == _BF16:
        poke_u32(scratch, both << 16)
        return np.float64(peek_f32(scratch))
    return _half(both)


@inner
def _total(writer, reports, element, env, last):
    """Sum of a reward's element over the episode of environment `env` up to physical row `last`."""
    envs = peek_i64(writer + w.WRITER_ENVS)
    metas = peek_i64(peek_i64(writer + w.WRITER_TABLE) + w.VIEW_META)
    own = peek_i64(writer + w.WRITER_BASE) + peek_i64(reports + REPORT_OWN) + env
    # the steps of an episode lie one tick apart
    row = last - peek_i32(metas + w.META_BYTES * last + 4) * envs
    total = 0.0
    if row < own:
        row = own
        total = peek_f64(peek_i64(reports + REPORT_CARRIED) + 8 * (peek_i64(reports + REPORT_COUNT) * env + element))
    source = peek_i64(reports + REPORT_SOURCES) + REWARD_BYTES * element
    at, stride, kind = (
        peek_i64(source + REWARD_SOURCE),
        peek_i64(source + REWARD_STRIDE),
        peek_i64(source + REWARD_KIND),
    )
    if kind == _F32:
        for one in range(row, last + 1, envs):
            total += peek_f32(at + stride * one)
    elif kind == _F64:
        for one in range(row, last + 1, envs):
            total += peek_f64(at + stride * one)
    else:
        for one in range(row, last + 1, envs):
            total += _number(at + stride * one, kind, reports + REPORT_SCRATCH)
    return total


@inner
def enter_page(writer, own):
    """The writer goes on in a page of which rows from local row `own` on are its own."""
    reports = peek_i64(writer + WRITER_REPORTS)
    if reports != 0:
        poke_i64(reports + REPORT_OWN, own)


@inner
def carry(writer):
    """Add up the rewards of the episodes that go on, before the writer leaves its page."""
    reports = peek_i64(writer + WRITER_REPORTS)
    if reports == 0 or peek_i64(writer + w.WRITER_LOCAL) <= peek_i64(reports + REPORT_OWN):
        return
    envs, count = peek_i64(writer + w.WRITER_ENVS), peek_i64(reports + REPORT_COUNT)
    for env in range(envs):
        if peek_i64(peek_i64(writer + w.WRITER_ENV_STATE) + w.ENV_BYTES * env) == w.RUNNING:
            last = peek_i64(writer + w.WRITER_BASE) + peek_i64(writer + w.WRITER_LOCAL) - envs + env
            for element in range(count):
                total = _total(writer, reports, element, env, last)
                poke_f64(peek_i64(reports + REPORT_CARRIED) + 8 * (count * env + element), total)


@inner
def _check(record, size, ticket):
    """What the check word of a record must be."""
    mixed = ticket + 1
    for offset in range(8, size, 8):
        mixed = (mixed ^ peek_i64(record + offset)) * _FACTOR
        mixed ^= mixed >> 29
    return mixed


@inner
def report_ends(writer, first, count):
    """Record the episodes that end with `count` rows from physical row `first` on, which are being committed."""
    reports = peek_i64(writer + WRITER_REPORTS)
    if reports == 0:
        return
    envs, ring, size = (
        peek_i64(writer + w.WRITER_ENVS),
        peek_i64(reports + REPORT_RING),
        peek_i64(reports + REPORT_BYTES),
    )
    metas = peek_i64(peek_i64(writer + w.WRITER_TABLE) + w.VIEW_META)
    syscall(_CLOCK, 0, reports + REPORT_SECONDS, 0, 0, 0, 0)
    now = peek_i64(reports + REPORT_SECONDS) * 1000000000 + peek_i64(reports + REPORT_NANOS)
    for i in range(count):
        meta = metas + w.META_BYTES * (first + i)
        ended = peek_u32(meta + 12) & (w.TERMINATED | w.TRUNCATED)
        if ended == 0:
            continue
        env = i % envs
        ticket = fetch_add(ring, 1)
        record = ring + w.LINE + size * (ticket % RECORDS)
        poke_i64(record + RECORD_CHECK, 0)
        poke_i64(record + RECORD_TIME, now)
        poke_i64(record + RECORD_STREAM, peek_i64(writer + w.WRITER_STREAM))
        poke_i64(record + RECORD_ENV, (env << 2) | ended)
        poke_i64(record + RECORD_EPISODE, (peek_u32(meta + 8) << 32) | peek_u32(meta))
        poke_i64(record + RECORD_LENGTH, peek_i32(meta + 4) + 1)
        for element in range(peek_i64(reports + REPORT_COUNT)):
            poke_f64(record + RECORD_RETURNS + 8 * element, _total(writer, reports, element, env, first + i))
        store_release(record + RECORD_CHECK, _check(record, size, ticket))


@kernel("int64(int64, int64, int64, int64, int64, int64)", nogil=True)
def read_records(ring, size, tickets, count, out, found):
    """Copy the records of listed tickets that are there.

    Args:
        ring: Address of a table's ring, or of a copy of it.
        size: Bytes of a record.
        tickets: Address of int64 [count].
        count: Tickets.
        out: Address of int64 [count, size / 8].
        found: Address of bool [count]: whether the record was there, whole.

    Returns:
        Tickets taken so far, looked at after the records: what has been overwritten meanwhile is known by it.
    """
    for i in range(count):
        ticket = peek_i64(tickets + 8 * i)
        record = ring + w.LINE + size * (ticket % RECORDS)
        copy = out + size * i
        poke_i64(copy, load_acquire(record))
        for offset in range(8, size, 8):
            poke_i64(copy + offset, peek_i64(record + offset))
        poke_u8(found + i, peek_i64(copy) == _check(copy, size, ticket))
    return load_acquire(ring)
