"""A named piece of shared memory: create, attach, find, remove.

Creation is all or nothing: the name is made exclusively, the memory is allocated in full before use (a full memory file
system is an error here and never a bus error later), the magic word is written last. Nothing registers with Python's
resource tracker, which would delete a segment that others still use. Backing is POSIX shared memory by name, or a memfd,
which a small /dev/shm does not bound and which lives as long as a process that holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import posix_ipc

from conduit.errors import (
    AccessDenied,
    BadSegment,
    ConfigError,
    EngineExists,
    EngineNotFound,
    Leftover,
    NoSpace,
)
from conduit.store.layout import HEADER_BYTES, MAGIC, VERSION, SegmentLayout, SegmentSpec, lay_out

Backing = Literal["shm", "memfd"]

SHM_DIRECTORY = Path("/dev/shm")  # noqa: S108 - where Linux shows POSIX shared memory
LOCK_BASE = 1 << 40
"""First lock byte; lock bytes lie far beyond the end of any segment. Byte LOCK_BASE + p belongs to participant p."""
LOCK_SPAN = 1 << 20
LOCK_PUBLISHERS = 1 << 16
"""Lock byte LOCK_BASE + LOCK_PUBLISHERS + i is held by the publisher of weights slot i."""
LOCK_CREATOR = LOCK_SPAN - 1

HEADER_MAGIC, HEADER_VERSION, HEADER_SIZE, HEADER_SPEC, HEADER_UUID, HEADER_PID, HEADER_TIME = 0, 8, 16, 24, 32, 48, 56
HEADER_CLOSED, HEADER_DIGEST = 64, 72
"""Byte offsets of the header's words: `closed` is 1 once the engine has closed, `digest` covers the specification."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def shm_name(name: str) -> str:
    """POSIX name of an engine's segment, `/cdt.<uid>.<name>`.

    Raises:
        ConfigError: The name has characters other than letters, digits, dot, dash and underscore, or over 100 of them.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigError(f"Expected an engine name of 1 to 100 letters, digits, '.', '-' or '_', got {name!r}")
    return f"/cdt.{os.getuid()}.{name}"


def runtime_directory() -> Path:
    """Where memfd engines leave word of themselves, for this user alone."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - the folder made in it is 0700 and checked
    return Path(base) / f"conduit-{os.getuid()}"


def try_lock(fd: int, byte: int, length: int = 1) -> bool:
    """Take the write lock on lock byte(s); False when another open file description holds one of them."""
    return _set_lock(fd, fcntl.F_WRLCK, byte, length)


def unlock(fd: int, byte: int, length: int = 1) -> None:
    """Give lock byte(s) back."""
    _set_lock(fd, fcntl.F_UNLCK, byte, length)


def _set_lock(fd: int, kind: int, byte: int, length: int) -> bool:
    # open file description locks: a plain POSIX lock would be lost when the process closes any descriptor of the file
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, LOCK_BASE + byte, length, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def held(fd: int, byte: int = 0, length: int = LOCK_SPAN) -> bool:
    """True when somebody else holds any of these lock bytes."""
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LOCK_BASE + byte, length, 0)
    answer = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request))
    return bool(answer[0] != fcntl.F_UNLCK)


class Segment:
    """A mapped segment of this process.

    Attributes:
        name: Engine name.
        layout: Where everything lies.
        root: uint8 [size], the mapping; every array is a view of it, so the mapping lives as long as any of them.
        words: The mapping as int64 words.
        base: Address of the first byte.
        lock_fd: A descriptor that is never mapped; liveness locks are taken on it (a mapping would keep the lock alive
            in forked children).
    """

    def __init__(self, name: str, backing: Backing, fd: int, lock_fd: int, layout: SegmentLayout) -> None:
        self.name = name
        self.backing = backing
        self.layout = layout
        self.lock_fd = lock_fd
        status = os.fstat(fd)
        self.identity = (status.st_dev, status.st_ino)
        # one reference by frombuffer counts as an export of the mapping; views made with ndarray(buffer=) would not
        self.root = np.frombuffer(mmap.mmap(fd, layout.size), np.uint8)
        self.base = self.root.ctypes.data
        self.words = memoryview(self.root.view(np.int64))

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None = None) -> np.ndarray:  # type: ignore[type-arg]
        """A view into the segment."""
        return np.ndarray(shape, dtype, buffer=self.root, offset=offset, strides=strides)  # type: ignore[arg-type]

    @property
    def created_ns(self) -> int:
        """When the segment was created, nanoseconds since the epoch."""
        return self.words[HEADER_TIME // 8]

    @property
    def closed(self) -> bool:
        """True once its engine has closed it."""
        return self.words[HEADER_CLOSED // 8] != 0

    def mark_closed(self) -> None:
        """Tell all attached processes that the engine is gone for good."""
        self.words[HEADER_CLOSED // 8] = 1

    def is_current(self) -> bool:
        """False when the name now leads to another segment or to none."""
        try:
            fd = _open(self.name)
        except EngineNotFound:
            return False
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        return (status.st_dev, status.st_ino) == self.identity

    def unlink(self) -> None:
        """Remove the name, if it still is this segment's; the memory goes with its last user."""
        if self.is_current():
            _unlink(self.name)

    def release_locks(self) -> None:
        """Close the lock descriptor: every lock of this handle is given back."""
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def _pointer_path(name: str) -> Path:
    return runtime_directory() / f"{name}.memfd"


def _open(name: str) -> int:
    """A fresh descriptor of the segment that has this engine name."""
    try:
        return int(posix_ipc.SharedMemory(shm_name(name)).fd)
    except posix_ipc.ExistentialError:
        pass
    except posix_ipc.PermissionsError as error:
        raise AccessDenied(
            f"Expected read and write access to engine {name!r} ({SHM_DIRECTORY}{shm_name(name)}), got permission denied: "
            "engines are private to the user that created them"
        ) from error
    try:
        path = _pointer_path(name).read_text()
        # the process number may be another process's by now
        if os.readlink(path) != f"/memfd:{shm_name(name)[1:]} (deleted)":
            raise FileNotFoundError(path)
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise EngineNotFound(
            f"Expected a running engine named {name!r}, found none for this user ({SHM_DIRECTORY}{shm_name(name)}): "
            "create it with conduit.Engine.create, or wait for it with attach(..., timeout=seconds)"
        ) from error


def _unlink(name: str) -> None:
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(shm_name(name))
    with contextlib.suppress(FileNotFoundError):
        _pointer_path(name).unlink()


def _exists(name: str) -> bool:
    try:
        os.close(_open(name))
    except EngineNotFound:
        return False
    return True


def _refuse_existing(name: str) -> None:
    fd = _open(name)
    try:
        alive = held(fd)
    finally:
        os.close(fd)
    if alive:
        raise EngineExists(
            f"Expected the name {name!r} to be free, but an engine of this name is running: "
            "attach to it with conduit.attach, or choose another name"
        )
    raise Leftover(
        f"Expected the name {name!r} to be free, but an engine of this name died and left its segment: "
        f"go on with it by conduit.Engine.adopt({name!r}), or remove it by `conduit clean {name}`"
    )


def _allocate(fd: int, size: int, name: str, backing: Backing) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        space = os.fstatvfs(fd)
        free = space.f_bavail * space.f_frsize
        where = str(SHM_DIRECTORY) if backing == "shm" else "memory"
        raise NoSpace(
            f"Expected {size:,} bytes free in {where} for engine {name!r}, got {free:,}: lower the capacity, "
            "run `conduit clean`, enlarge it (docker run --shm-size=..., mount -o remount,size=... /dev/shm), "
            'or use backing="memfd"'
        ) from error


def create(name: str, spec: SegmentSpec, backing: Backing = "shm") -> Segment:
    """Create a segment of zeroed, fully allocated memory.

    Raises:
        EngineExists, Leftover: The name is taken by a living or by a dead engine.
        NoSpace: The memory is not there; nothing is left behind.
        ConfigError: Bad name or backing.
    """
    shm_name(name)
    if backing not in ("shm", "memfd"):
        raise ConfigError(f"Expected backing 'shm' or 'memfd', got {backing!r}")
    layout = lay_out(spec)
    while True:
        if _exists(name):
            _refuse_existing(name)
        fd, lock_fd = _create_files(name, backing)
        if fd < 0:
            continue
        try:
            _allocate(fd, layout.size, name, backing)
            segment = Segment(name, backing, fd, lock_fd, layout)
        except BaseException:
            _unlink(name)
            os.close(lock_fd)
            if backing == "shm":
                os.close(fd)
            raise
        if backing == "shm":
            os.close(fd)
        _write_header(segment)
        return segment


def _create_files(name: str, backing: Backing) -> tuple[int, int]:
    """Descriptors (data, lock) of a new empty segment, the creator's lock held; (-1, -1) when another process interfered."""
    if backing == "memfd":
        fd = os.memfd_create(shm_name(name)[1:], os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        lock_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try_lock(lock_fd, LOCK_CREATOR)
        pointer = _pointer_path(name)
        pointer.parent.mkdir(mode=0o700, exist_ok=True)
        if pointer.parent.stat().st_uid != os.getuid():
            raise AccessDenied(f"Expected {pointer.parent} to belong to this user; remove it or set XDG_RUNTIME_DIR")
        pointer.write_text(path)
        return fd, lock_fd
    try:
        # no size here: with one, an existing segment would be resized under its users
        fd = posix_ipc.SharedMemory(shm_name(name), posix_ipc.O_CREX, size=0, mode=0o600).fd
        lock_fd = posix_ipc.SharedMemory(shm_name(name)).fd
    except (posix_ipc.ExistentialError, posix_ipc.PermissionsError):
        return -1, -1
    # `clean` may take a segment that nobody has locked yet: then begin again
    if try_lock(lock_fd, LOCK_CREATOR) and os.fstat(fd).st_nlink > 0:
        return fd, lock_fd
    os.close(fd)
    os.close(lock_fd)
    return -1, -1


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
    fd = _open(name)
    try:
        layout = read_layout(fd, name)
        backing: Backing = "shm" if (SHM_DIRECTORY / shm_name(name)[1:]).exists() else "memfd"
        lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return Segment(name, backing, fd, lock_fd, layout)
        except BaseException:
            os.close(lock_fd)
            raise
    finally:
        os.close(fd)


def read_layout(fd: int, name: str) -> SegmentLayout:
    """Check a segment's header and compute its layout."""
    size = os.fstat(fd).st_size
    header = os.pread(fd, HEADER_BYTES, 0)
    where = f"segment of engine {name!r}"
    if size < HEADER_BYTES or not any(header):
        if held(fd, LOCK_CREATOR, 1):
            raise EngineNotFound(f"Expected a running engine named {name!r}, but it is only being created: try again")
        raise BadSegment(
            f"Expected a whole {where}, got {size} bytes without a header: its creator died; run `conduit clean {name}`"
        )
    magic, version, total, length = struct.unpack_from("<4q", header)
    if magic != MAGIC:
        raise BadSegment(f"Expected a Conduit segment, got another file's content in the {where}: choose another name")
    if version != VERSION:
        raise BadSegment(
            f"Expected layout version {VERSION} in the {where}, got {version}: "
            "run the same version of Conduit in all processes"
        )
    encoded = os.pread(fd, length, HEADER_BYTES)
    try:
        layout = lay_out(msgspec.json.decode(encoded, type=SegmentSpec))
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadSegment(f"Expected a readable specification in the {where}: {error}") from error
    (digest,) = struct.unpack_from("<q", header, HEADER_DIGEST)
    if digest != _digest(encoded) or layout.size != total:
        raise BadSegment(f"Expected the specification that the {where} was made with, got a damaged one")
    if size < total:
        raise BadSegment(f"Expected {total:,} bytes in the {where}, got {size:,}: it was truncated; run `conduit clean`")
    return layout


def find() -> Iterator[tuple[str, Backing]]:
    """Names of this user's engines, living and dead, with their backing."""
    prefix = f"cdt.{os.getuid()}."
    for entry in sorted(SHM_DIRECTORY.glob(prefix + "*")):
        if stat.S_ISREG(entry.stat().st_mode):
            yield entry.name.removeprefix(prefix), "shm"
    for entry in sorted(runtime_directory().glob("*.memfd")):
        yield entry.name.removesuffix(".memfd"), "memfd"


def remove_if_dead(name: str) -> tuple[bool, str]:
    """Remove a segment that no live process holds.

    Returns:
        Whether it was removed, and why or why not.
    """
    try:
        fd = _open(name)
    except EngineNotFound:
        if _pointer_path(name).exists():
            _pointer_path(name).unlink()
            return True, "its memfd went with the process that made it; only the note of it was left"
        return False, "no such engine"
    try:
        # holding every lock byte means that nobody lives in it and nobody can join while the name goes
        if not try_lock(fd, 0, LOCK_SPAN):
            return False, "a live process holds it"
        size = os.fstat(fd).st_size
        _unlink(name)
        return True, f"no live process holds it; {size:,} bytes freed"
    finally:
        os.close(fd)
