"""Reserving a segment's memory in full, before or after it is filled."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator

from conduit.errors import NoSpace
from conduit.store.segment.memory import Bound, available, shared_memory
from conduit.store.segment.names import Backing


def check_room(size: int, name: str, backing: Backing) -> None:
    """Refuse a segment that is larger than the free memory; no memory has been touched yet.

    Raises:
        NoSpace: The segment is larger.
    """
    bound = available(backing)
    if bound is not None and size > bound.free:
        raise _no_space(size, name, bound)


def _no_space(size: int, name: str, bound: Bound) -> NoSpace:
    return NoSpace(
        f"Expected {size:,} bytes free in {bound.name} for engine {name!r}, got {bound.free:,}: lower the capacity, {bound.remedy}"
    )


def _not_reserved(fd: int, size: int, name: str, backing: Backing) -> NoSpace:
    """The error if another process took the memory meanwhile."""
    found = list(shared_memory()) if backing == "shm" else []
    space = os.fstatvfs(fd)
    return _no_space(
        size, name, found[0] if found else Bound(space.f_bavail * space.f_frsize, "memory", "or try again")
    )


def allocate(fd: int, size: int, name: str, backing: Backing) -> None:
    """Reserve all memory of a file.

    Raises:
        NoSpace: There is too little memory.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise _not_reserved(fd, size, name, backing) from error


@contextlib.contextmanager
def allocated_behind(fd: int, size: int, name: str, backing: Backing) -> Generator[None]:
    """Reserve the memory of a file, whose size is set already, after the block's writes.

    The kernel clears memory that it reserves, but not memory that a write fills completely; and clearing at the same time as the writes
    would delay them. So the block writes first, and then the rest is reserved. The block may only write through a descriptor, which
    raises an error if the file system is full; touching mapped memory that is not reserved yet may be a bus error.

    Args:
        fd: Descriptor of the file.
        size: Bytes.
        name: Engine name, for the error.
        backing: As for `allocate`.

    Raises:
        NoSpace: There is too little memory.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _not_reserved(fd, size, name, backing) from error
    allocate(fd, size, name, backing)
