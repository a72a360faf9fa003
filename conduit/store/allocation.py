"""Reserving a segment's memory in full, before or after it is filled."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from conduit.errors import NoSpace
from conduit.store.names import SHM_DIRECTORY, Backing


def _no_space(fd: int, size: int, name: str, backing: Backing) -> NoSpace:
    space = os.fstatvfs(fd)
    free = space.f_bavail * space.f_frsize
    where = str(SHM_DIRECTORY) if backing == "shm" else "memory"
    return NoSpace(
        f"Expected {size:,} bytes free in {where} for engine {name!r}, got {free:,}: lower the capacity, "
        "run `conduit clean`, enlarge it (docker run --shm-size=..., mount -o remount,size=... /dev/shm), "
        'or use backing="memfd"'
    )


def allocate(fd: int, size: int, name: str, backing: Backing) -> None:
    """Reserve all memory of a file.

    Raises:
        NoSpace: It is not there.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise _no_space(fd, size, name, backing) from error


def fill_and_allocate(fd: int, size: int, name: str, backing: Backing, fill: Iterator[None]) -> None:
    """Reserve the memory of a file, which has its size, after the first step of `fill`.

    Memory that a write brings into being is not cleared first, and who clears it beside the writes keeps them waiting. So the
    writes come first, and what they left is reserved then.

    Args:
        fd: Of the file.
        size: Bytes.
        name: Engine name, for the error.
        backing: As for `allocate`.
        fill: Fills the segment in two steps. Up to its `yield` it may only write through a descriptor, which a full file system
            refuses; to touch memory that is not reserved yet is a bus error. Behind it, it may touch all.

    Raises:
        NoSpace: The memory is not there.
    """
    space = os.fstatvfs(fd)
    if backing == "shm" and space.f_bavail * space.f_frsize < size:
        raise _no_space(fd, size, name, backing)
    try:
        next(fill)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _no_space(fd, size, name, backing) from error
    allocate(fd, size, name, backing)
    for _ in fill:
        pass
