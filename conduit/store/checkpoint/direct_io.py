"""Reading and writing files without the page cache (O_DIRECT): in aligned blocks, with a header of one memory page.

If a file system does not support O_DIRECT, reads and writes go through the page cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from conduit.errors import CheckpointError, ConduitError, NoSpace

Array = np.ndarray[Any, Any]

HEADER = 4096
"""Bytes of a file's header: a multiple of the block size that O_DIRECT requires."""

BLOCK = 8 << 20

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def header_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The header of a `.npy` file (version 1.0), padded to HEADER bytes."""
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    text = repr(described).encode().ljust(HEADER - 11) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def unwritable(error: OSError, where: Path) -> OSError | CheckpointError:
    """The exception for a failed write: NoSpace if the disk is full, the error itself if this process lacks a resource."""
    if error.errno in _SHORT or isinstance(error, ConduitError):
        return error
    if error.errno not in _FULL:
        return CheckpointError(
            f"Expected to be able to write a checkpoint in {where}, got {error}: name a folder on a disk that this user may write to"
        )
    space = os.statvfs(where)
    return NoSpace(
        f"Expected room for a checkpoint in {where}, got {space.f_bavail * space.f_frsize:,} bytes free when it was full: "
        "free some, or keep fewer checkpoints; those that were there are as they were"
    )


def unreadable(error: OSError, path: Path) -> OSError | CheckpointError:
    """The exception for a failed read: CheckpointError, or the error itself if this process lacks a resource."""
    if error.errno in _SHORT:
        return error
    return CheckpointError(
        f"Expected to read {path}, got {error}: it is not used; see to the disk and the file's permissions, or restore an older "
        "checkpoint"
    )


def open_direct(path: Path, flags: int) -> int:
    """Open a file, with O_DIRECT if its file system supports that; returns the descriptor."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, (flags & ~os.O_EXCL) | os.O_CLOEXEC, 0o644)


def through_the_cache(fd: int) -> None:
    """Make later reads and writes of the descriptor go through the page cache."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def write_all(fd: int, data: Any, offset: int) -> None:
    """Write bytes at their offset, without the page cache if the descriptor has O_DIRECT and the file system allows it."""
    view = memoryview(data)
    while view:
        try:
            done = os.pwrite(fd, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise
            through_the_cache(fd)
            continue
        view, offset = view[done:], offset + done


def read_all(fd: int, view: memoryview, offset: int, path: Path) -> int:
    """Read until the view is full or the file ends; returns the bytes read.

    Raises:
        CheckpointError: The file cannot be read.
    """
    total = 0
    while total < len(view):
        try:
            done = os.preadv(fd, [view[total:]], offset + total)
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise unreadable(error, path) from error
            through_the_cache(fd)
            continue
        if done == 0:
            break
        total += done
    return total


class Blocks:
    """Blocks of memory with the alignment of O_DIRECT. They are reused, and only the filled part of a block is touched."""

    def __init__(self) -> None:
        self._free: list[Array] = []

    def take(self) -> Array:
        """A block, uint8 [BLOCK], with its previous contents."""
        return self._free.pop() if self._free else np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8)

    def give(self, block: Array) -> None:
        """Give a block back, for reuse."""
        self._free.append(block)
