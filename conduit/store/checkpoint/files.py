"""The files of a checkpoint: `.npy` with a header of one memory page, written and read in large blocks without the page cache.

A file is written in sequence, a block at a time: the caller's thread fills and hashes blocks, and a few other threads write them.
The header, which has the number of rows, is written last. The digest of a file is XXH3-128 of the bytes after the header, followed by
the header.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import xxhash

from conduit.errors import CheckpointError
from conduit.store.checkpoint.direct_io import (
    BLOCK,
    HEADER,
    Blocks,
    header_of,
    open_direct,
    read_all,
    through_the_cache,
    unreadable,
    write_all,
)
from conduit.store.segment.workers import Job, Workers

Array = np.ndarray[Any, Any]

_THREADS = 4
_AHEAD = 6


class FileEntry(msgspec.Struct, frozen=True):
    """A file as the manifest lists it.

    Attributes:
        size: Bytes.
        digest: XXH3-128 of the bytes after the header, followed by the header; 32 hex digits.
    """

    size: int
    digest: str


def as_bytes(array: Array) -> Array:
    """The bytes of a contiguous array, uint8 [n]."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class OutFile:
    """A file that is being written; from `FileSet.create`."""

    def __init__(self, files: FileSet, path: Path, name: str) -> None:
        self._files = files
        self.name = name
        self.fd = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self.written = 0
        self._block: Array | None = None
        self._filled = 0
        self._hash = xxhash.xxh3_128()
        self._header = b""

    def append(self, data: Array) -> None:
        """Add bytes, uint8 [n]; they are copied before it returns."""
        at = 0
        while at < len(data):
            if self._block is None:
                self._block = self._files.blocks.take()
            count = min(len(data) - at, BLOCK - self._filled)
            self._block[self._filled : self._filled + count] = data[at : at + count]
            self._filled += count
            at += count
            self._flush()

    def _flush(self) -> None:
        """Write the block in the background if it is full."""
        if self._block is not None and self._filled == BLOCK:
            self._hash.update(self._block.data)
            self._files.submit(self.fd, self._block, HEADER + self.written)
            self.written += BLOCK
            self._block, self._filled = None, 0

    def append_rows(self, rows: Array) -> None:
        """Add rows, uint8 [n, bytes], which need not be contiguous."""
        if rows.flags.c_contiguous:
            self.append(rows.reshape(-1))
            return
        size = rows.shape[1]
        at = 0
        while at < len(rows):
            whole = min(len(rows) - at, (BLOCK - self._filled) // size)
            if whole == 0 or self._block is None:
                self.append(rows[at])  # the row crosses the block's end, or begins a new block
                at += 1
                continue
            target = self._block[self._filled : self._filled + whole * size].reshape(whole, size)
            target[...] = rows[at : at + whole]
            self._filled += whole * size
            at += whole
            self._flush()

    def describe(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Set the dtype and shape of all that was appended, for the header."""
        self._header = header_of(dtype, shape)

    def finish(self) -> FileEntry:
        """Write the rest and the header, and sync the file to the disk; all earlier blocks must have been written."""
        through_the_cache(self.fd)
        size = HEADER + self.written + self._filled
        if self._block is not None:
            rest = self._block[: self._filled]
            self._hash.update(rest.data)
            write_all(self.fd, rest, HEADER + self.written)
            self._files.blocks.give(self._block)
            self._block = None
        self._hash.update(self._header)
        write_all(self.fd, self._header, 0)
        os.fsync(self.fd)
        self.close()
        return FileEntry(size, self._hash.hexdigest())

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class FileSet:
    """Files being written below one folder; a context manager.

    Attributes:
        entries: {name below the folder: entry} of the finished files.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blocks = Blocks()
        self.entries: dict[str, FileEntry] = {}
        self._open: list[OutFile] = []
        self._pending: deque[tuple[Job[None], Array]] = deque()
        self._workers = Workers(_THREADS)

    def create(self, name: str) -> OutFile:
        """A new file of this name below the folder."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = OutFile(self, path, name)
        self._open.append(file)
        return file

    def write(self, name: str, array: Array) -> None:
        """A new file that holds `array`."""
        file = self.create(name)
        file.append(as_bytes(array))
        file.describe(array.dtype, array.shape)

    def submit(self, fd: int, block: Array, offset: int) -> None:
        """Write a full block in the background; if too many writes are pending, wait for the earliest first."""
        while len(self._pending) >= _AHEAD:
            self._retire()
        self._pending.append((self._workers.submit(functools.partial(write_all, fd, block, offset)), block))

    def _retire(self) -> None:
        job, block = self._pending.popleft()
        job.result()
        self.blocks.give(block)

    def finish(self) -> None:
        """Finish all files that are open."""
        while self._pending:
            self._retire()
        jobs = [self._workers.submit(file.finish) for file in self._open]
        for file, job in zip(self._open, jobs, strict=True):
            self.entries[file.name] = job.result()
        self._open = []

    def __enter__(self) -> Self:
        self._workers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.end()
        for file in self._open:
            file.close()


Sink = Callable[[int, Array], None]
"""Called with an offset after the header and the bytes there, uint8 [n]; several threads call it at the same time."""


class FileReader:
    """Reads a checkpoint's files and checks them on the way; a context manager.

    Args:
        root: The checkpoint's folder.
        entries: {name below the folder: entry}, from the manifest.
        progress: Called with the bytes done and the total bytes.
    """

    def __init__(
        self, root: Path, entries: dict[str, FileEntry], progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.root = root
        self._entries = entries
        self._progress = progress
        self._total = sum(entry.size for entry in entries.values())
        self._done = 0
        self._blocks = Blocks()
        self._workers = Workers(_THREADS)
        self.unread = set(entries)

    def read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """The array in a file.

        Raises:
            CheckpointError: The file is missing, truncated, damaged, or has another dtype or shape.
        """
        out = np.empty(shape, dtype)
        target = out.reshape(-1).view(np.uint8)

        def put(place: int, data: Array) -> None:
            target[place : place + len(data)] = data

        self.stream(name, dtype, shape, put)
        return out

    def stream(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], sink: Sink | None) -> None:
        """Pass a file's bytes to `sink`, block by block; see `read`. The digest is checked at the end, before this returns."""
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"Expected {name} in the manifest of {self.root}, it is not listed: {DAMAGED}")
        self.unread.discard(name)
        header = header_of(dtype, shape)
        expected = HEADER + math.prod(shape) * dtype.itemsize
        self._check_stored(name, entry, header if expected == entry.size else None, sink)

    def verify(self, name: str) -> None:
        """Check a file's size and digest, of any dtype and shape; raises as `read`."""
        self._check_stored(name, self._entries[name], b"", None)

    def _check_stored(self, name: str, entry: FileEntry, header: bytes | None, sink: Sink | None) -> None:
        path = self.root / name
        if header is None:
            raise CheckpointError(
                f"Expected {path} to hold what its table needs, the manifest lists {entry.size:,} bytes: {DAMAGED}"
            )
        try:
            fd = open_direct(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise CheckpointError(f"Expected the file {path}, it is missing: {DAMAGED}") from error
        except OSError as error:
            raise unreadable(error, path) from error
        try:
            size = os.fstat(fd).st_size
            if size != entry.size:
                raise CheckpointError(f"Expected {entry.size:,} bytes in {path}, got {size:,}: {DAMAGED}")
            found = self._blocks.take()
            got = found[: read_all(fd, found.data[:HEADER], 0, path)].tobytes()
            self._blocks.give(found)
            digest = xxhash.xxh3_128()
            for block, count in self._read_blocks(fd, size, sink, path):
                digest.update(block[:count].data)
                self._count(count)
            digest.update(got)
            self._count(HEADER)
        finally:
            os.close(fd)
        if digest.hexdigest() != entry.digest:
            raise CheckpointError(f"Expected the digest {entry.digest} of {path}, got {digest.hexdigest()}: {DAMAGED}")
        if header and got != header:
            raise CheckpointError(f"Expected {path} to begin with the header that its table needs: {DAMAGED}")

    def _count(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _read_blocks(self, fd: int, size: int, sink: Sink | None, path: Path) -> Iterator[tuple[Array, int]]:
        """A file's blocks in order, while other threads read later blocks and pass them to the sink."""

        def fetch(block: Array, place: int) -> int:
            want = min(BLOCK, size - HEADER - place)
            # O_DIRECT reads whole sectors only; the end of the file shortens the last read
            count = min(want, read_all(fd, block.data[: -(-want // HEADER) * HEADER], HEADER + place, path))
            if sink is not None:
                sink(place, block[:count])
            return count

        pending: deque[tuple[Job[int], Array]] = deque()
        try:
            for place in _ahead(range(0, size - HEADER, BLOCK)):
                if place is not None:
                    block = self._blocks.take()
                    pending.append((self._workers.submit(functools.partial(fetch, block, place)), block))
                if pending and (place is None or len(pending) > _AHEAD):
                    job, block = pending.popleft()
                    yield block, job.result()
                    self._blocks.give(block)
        finally:
            for job, _ in pending:
                with contextlib.suppress(Exception):
                    job.result()

    def __enter__(self) -> Self:
        self._workers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.end()


def _ahead(places: Iterable[int]) -> Iterator[int | None]:
    """The places, then one None for each block that may still be pending."""
    yield from places
    for _ in range(_AHEAD + 1):
        yield None


DAMAGED = "it is damaged and is not used; restore an older checkpoint"
