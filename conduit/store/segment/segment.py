"""A named piece of shared memory: create, attach, find, remove.

Creation is all or nothing. The name is created exclusively, and the magic word is written last. The memory is allocated in full before
use, so a full memory file system is an error here and never a bus error later. Segments are not registered with Python's resource
tracker, which would delete a segment that other processes still use. The backing is POSIX shared memory with a name, or a memfd. A
memfd is not limited by a small /dev/shm, and lives as long as a process holds it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import time
import uuid
from collections.abc import Generator

import numpy as np

from conduit.errors import (
    AccessDenied,
    BadSegment,
    ConfigError,
    EngineNotFound,
    NoSpace,
)
from conduit.store.format import words as w
from conduit.store.format.layout import (
    HEADER_BYTES,
    HEADER_CLOSED,
    HEADER_DIGEST,
    HEADER_MAGIC,
    HEADER_PID,
    HEADER_SIZE,
    HEADER_SPEC,
    HEADER_TERM,
    HEADER_TIME,
    HEADER_UUID,
    HEADER_VERSION,
    MAGIC,
    VERSION,
    SegmentLayout,
    SegmentSpec,
    lay_out,
    read_spec,
)
from conduit.store.segment.allocation import allocate, check_room
from conduit.store.segment.leftovers import free_name, is_unfinished
from conduit.store.segment.locks import LOCK_CREATOR, Locks, open_file, try_lock
from conduit.store.segment.names import (
    SHM_DIRECTORY,
    Backing,
    note_memfd,
    open_segment,
    shm_name,
    status_of,
    unlink_segment,
)


class Segment:
    """A mapped segment of this process.

    Attributes:
        name: Engine name.
        layout: The offset of everything in it.
        root: uint8 [size], the mapping. Every array is a view of it, so the mapping lives as long as any array.
        words: The mapping as int64 words.
        base: Address of the first byte.
        seat: int64 words (words.PROCESS_*), in which kernels note what this process holds of the segment.
    """

    def __init__(self, name: str, backing: Backing, fd: int, locks: Locks, layout: SegmentLayout) -> None:
        self._locks = locks
        self.seat = locks.seat
        self.name = name
        self.backing = backing
        self.layout = layout
        self._anchor = -1
        status = os.fstat(fd)
        self.identity = (status.st_dev, status.st_ino)
        # np.frombuffer exports the mapping's buffer, which keeps it mapped; views made with ndarray(buffer=) would not
        self.root = np.frombuffer(mmap.mmap(fd, layout.size), np.uint8)
        self.base = self.root.ctypes.data
        self.words = self.root.view(np.int64).data

    def array(
        self, offset: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """A view into the segment."""
        return np.ndarray(shape, dtype, buffer=self.root, offset=offset, strides=strides)

    @property
    def created_ns(self) -> int:
        """When the segment was created, nanoseconds since the epoch."""
        return self.words[HEADER_TIME // 8]

    @property
    def closed(self) -> bool:
        """True once its engine has closed it."""
        return self.words[HEADER_CLOSED // 8] != 0

    @property
    def term(self) -> int:
        """How many owners it had before the present one."""
        return self.words[HEADER_TERM // 8]

    @property
    def closed_address(self) -> int:
        """Address of the word that `closed` reads."""
        return self.base + HEADER_CLOSED

    def mark_closed(self) -> None:
        """Tell all attached processes that the engine is gone for good."""
        self.words[HEADER_CLOSED // 8] = 1

    def take_over(self) -> None:
        """Make this process the owner. If the last owner died in the middle of a close, the close is undone."""
        self.words[HEADER_PID // 8] = os.getpid()
        # only a change of the term matters, and a damaged word may be the largest number
        self.words[HEADER_TERM // 8] = (self.words[HEADER_TERM // 8] + 1) & 0x7FFFFFFF
        self.words[HEADER_CLOSED // 8] = 0

    def is_current(self) -> bool:
        """False if the name now belongs to another segment, or to none."""
        status = status_of(self.name)
        return status is not None and (status.st_dev, status.st_ino) == self.identity

    def unlink(self) -> None:
        """Remove the name, if it still is this segment's; the memory is freed with its last user."""
        if self.is_current():
            unlink_segment(self.name)
        if self._anchor >= 0:
            os.close(self._anchor)
            self._anchor = -1

    def keep(self, fd: int) -> None:
        """Take over the descriptor that gives a memfd its name; it is closed with `unlink`."""
        self._anchor = fd

    @property
    def lock_fd(self) -> int:
        """The descriptor that locks are taken through, or -1 (Locks.fd)."""
        return self._locks.fd

    def release_locks(self) -> None:
        """Close the lock descriptor, which releases every lock of this handle. Idempotent."""
        self._locks.close()


def create(name: str, spec: SegmentSpec, backing: Backing = "shm", *, replace: bool = False) -> Segment:
    """Create a segment of fully allocated memory, zeroed.

    Args and errors are those of `making`.
    """
    with making(name, spec, backing, replace=replace) as segment:
        layout = segment.layout
        allocate(segment.lock_fd, layout.size, name, backing)
        for table in layout.tables.values():
            states = segment.array(table.blocks, (table.pages, w.LINE // 8), np.dtype(np.int64))[:, w.PAGE_STATE // 8]
            states[:] = (table.first_generation << w.GENERATION_SHIFT) | w.FREE
    return segment


@contextlib.contextmanager
def making(name: str, spec: SegmentSpec, backing: Backing = "shm", *, replace: bool = False) -> Generator[Segment]:
    """A new segment, which the block allocates (store.segment.allocation) and fills. No process can attach before the block ends.

    If the block raises, nothing is left behind.

    Args:
        name: Engine name.
        spec: The segment's specification.
        backing: Where its memory comes from.
        replace: Replace a segment whose owner is dead.

    Raises:
        EngineExists: An engine of this name has a living owner.
        Leftover: An engine of this name has a dead owner, and `replace` is False.
        NoSpace: There is too little memory; nothing is left behind.
        ConfigError: Bad name or backing.
    """
    shm_name(name)
    if backing not in ("shm", "memfd"):
        raise ConfigError(f"Expected backing 'shm' or 'memfd', got {backing!r}")
    layout = lay_out(spec)
    while True:
        free_name(name, backing, layout.size, replace=replace)
        check_room(layout.size, name, backing)
        fd, locks = _create_files(name, backing)
        if fd >= 0:
            break
    try:
        os.ftruncate(fd, layout.size)
        segment = Segment(name, backing, fd, locks, layout)
        yield segment
        _write_header(segment)
        if backing == "memfd":
            segment.keep(fd)
        else:
            fd, data = -1, fd
            os.close(data)
    except BaseException:
        unlink_segment(name)
        locks.close()
        if fd >= 0:
            os.close(fd)
        raise


def _create_files(name: str, backing: Backing) -> tuple[int, Locks]:
    """A descriptor of a new empty segment, and its locks, the creator's held; -1 when another process interfered."""
    locks = Locks()
    if backing == "memfd":
        fd = os.memfd_create(shm_name(name)[1:], os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        try:
            os.fchmod(fd, 0o600)
            locks.open(path)
            try_lock(locks.fd, LOCK_CREATOR)
            if note_memfd(name, path):
                return fd, locks
        except BaseException:
            os.close(fd)
            locks.close()
            raise
        os.close(fd)
        locks.close()
        return -1, locks
    try:
        fd = open_file(SHM_DIRECTORY / shm_name(name)[1:], os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except (FileExistsError, FileNotFoundError) as error:
        if not SHM_DIRECTORY.is_dir():
            raise NoSpace(
                f'Expected a memory file system at {SHM_DIRECTORY}, found none: mount one, or use backing="memfd"'
            ) from error
        return -1, locks
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise AccessDenied(
            f"Expected to be allowed to create {SHM_DIRECTORY}{shm_name(name)}, got {error}: "
            f'make {SHM_DIRECTORY} writable for this user, or use backing="memfd"'
        ) from error
    try:
        os.fchmod(fd, 0o600)  # the umask may have removed bits
        locks.open(f"/proc/self/fd/{fd}")
        # `clean` may remove a segment that is not locked yet: then begin again
        if try_lock(locks.fd, LOCK_CREATOR) and os.fstat(fd).st_nlink > 0:
            return fd, locks
    except BaseException:
        unlink_segment(name)
        os.close(fd)
        locks.close()
        raise
    os.close(fd)
    locks.close()
    return -1, locks


def _digest(encoded: bytes) -> int:
    return int.from_bytes(uuid.uuid5(uuid.NAMESPACE_OID, encoded.hex()).bytes[:7], "little")


def _write_header(segment: Segment) -> None:
    encoded = segment.layout.encoded
    segment.root[HEADER_BYTES : HEADER_BYTES + len(encoded)] = np.frombuffer(encoded, np.uint8)
    segment.root[HEADER_UUID : HEADER_UUID + 16] = np.frombuffer(uuid.uuid4().bytes, np.uint8)
    words = segment.words
    words[HEADER_VERSION // 8] = VERSION
    words[HEADER_SIZE // 8] = segment.layout.size
    words[HEADER_SPEC // 8] = len(encoded)
    words[HEADER_PID // 8] = os.getpid()
    words[HEADER_TIME // 8] = time.time_ns()
    words[HEADER_DIGEST // 8] = _digest(encoded)
    words[HEADER_MAGIC // 8] = MAGIC


def attach(name: str) -> Segment:
    """Map an existing segment.

    Raises:
        EngineNotFound: No such name (or its creator has not finished).
        AccessDenied: It belongs to another user.
        BadSegment: Truncated, foreign, or of another layout version.
    """
    fd = open_segment(name)
    try:
        layout = read_layout(fd, name)
        backing: Backing = "shm" if (SHM_DIRECTORY / shm_name(name)[1:]).exists() else "memfd"
        locks = Locks()
        try:
            locks.open(f"/proc/self/fd/{fd}")
            return Segment(name, backing, fd, locks, layout)
        except BaseException:
            locks.close()
            raise
    finally:
        os.close(fd)


def read_layout(fd: int, name: str) -> SegmentLayout:
    """Check a segment's header and compute its layout."""
    size = os.fstat(fd).st_size
    header = os.pread(fd, HEADER_BYTES, 0)
    where = f"segment of engine {name!r}"
    if header[:8] in (b"", bytes(8)):
        if not is_unfinished(fd):
            raise EngineNotFound(f"Expected a running engine named {name!r}, but it is only being created: try again")
        raise BadSegment(
            f"Expected a whole {where}, got {size} bytes without a header: its creator died; run `conduit clean {name}`"
        )
    if size < HEADER_BYTES:
        raise BadSegment(f"Expected a whole {where}, got {size} bytes: it was truncated; run `conduit clean {name}`")
    magic, version, total, length = struct.unpack_from("<4q", header)
    if magic != MAGIC:
        raise BadSegment(f"Expected a Conduit segment, got another file's content in the {where}: choose another name")
    if version != VERSION:
        raise BadSegment(
            f"Expected layout version {VERSION} in the {where}, got {version}: "
            "run the same version of Conduit in all processes"
        )
    (digest,) = struct.unpack_from("<q", header, HEADER_DIGEST)
    encoded = os.pread(fd, length, HEADER_BYTES) if 0 < length <= size - HEADER_BYTES else b""
    if digest != _digest(encoded):
        raise BadSegment(
            f"Expected the specification that the {where} was made with, got a damaged one: run `conduit clean {name}`"
        )
    try:
        layout = lay_out(read_spec(encoded))
    except (ValueError, TypeError, KeyError) as error:
        raise BadSegment(f"Expected a readable specification in the {where}: {error}") from error
    if layout.size != total:
        raise BadSegment(
            f"Expected a size of {layout.size:,} bytes in the header of the {where}, got {total:,}: "
            f"it is damaged; run `conduit clean {name}`"
        )
    if size < total:
        raise BadSegment(
            f"Expected {total:,} bytes in the {where}, got {size:,}: it was truncated; run `conduit clean {name}`"
        )
    return layout
