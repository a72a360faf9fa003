"""Reserving a segment's memory in full, at once or while it is being filled."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from conduit.errors import NoSpace
from conduit.store.names import SHM_DIRECTORY, Backing

_STEP = 32 << 20


def allocate(fd: int, size: int, name: str, backing: Backing, stop: threading.Event | None = None) -> None:
    """Reserve all memory of a file; in steps where others write to it meanwhile, until `stop`.

    Raises:
        NoSpace: It is not there.
    """
    try:
        if stop is None:
            os.posix_fallocate(fd, 0, size)
            return
        # one call would keep those who write to the file out for as long as it takes
        for start in range(0, size, _STEP):
            if stop.is_set():
                return
            os.posix_fallocate(fd, start, min(_STEP, size - start))
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


def fill_while_allocating(fd: int, size: int, name: str, backing: Backing, fill: Iterator[None]) -> None:
    """Reserve the memory of a file, which has its size, while the first step of `fill` runs.

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
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="conduit-allocate") as pool:
        allocation = pool.submit(allocate, fd, size, name, backing, stop)
        try:
            next(fill)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                allocation.result()  # says it with what is needed and what to do
            stop.set()
            raise
        allocation.result()
    for _ in fill:
        pass
