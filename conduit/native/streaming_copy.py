"""Copying what a caller hands over to where rows lie: large pieces past the caches.

A store that misses the caches first reads the line that it is about to overwrite. A tick of many environments with large
observations is larger than the caches that the writer shares with a learner, and is read much later: it is stored past them,
which saves that reading.
"""

from __future__ import annotations

from conduit.native.jit import inner
from conduit.native.memory import CACHE_LINE, copy_bytes, fence_full, prefetch, stream_64_bytes

STREAM_FROM = 128 << 10
"""Bytes of a piece that is stored past the caches."""
_AHEAD = 4096


@inner
def _stream(target, source, count):
    """Copy past the caches."""
    at = min(-target & (CACHE_LINE - 1), count)
    copy_bytes(target, source, at)
    while at + 4 * CACHE_LINE <= count:
        for part in range(at, at + 4 * CACHE_LINE, CACHE_LINE):
            prefetch(source + part + _AHEAD)
            stream_64_bytes(target + part, source + part)
        at += 4 * CACHE_LINE
    copy_bytes(target + at, source + at, count - at)


@inner
def copy_rows(target, stride, source, size, count):
    """Copy `count` rows of `size` bytes, close together at `source`, to rows `stride` bytes apart."""
    if stride == size:
        size, count = size * count, 1
    if size * count < STREAM_FROM:
        for row in range(count):
            copy_bytes(target + stride * row, source + size * row, size)
        return
    for row in range(count):
        _stream(target + stride * row, source + size * row, size)
    fence_full()  # before the store that publishes the rows
