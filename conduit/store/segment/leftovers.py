"""Taken names: whether the owner of the engine of a name lives, and which process may take the name after a dead owner.

The owner's lock (store.segment.locks) says whether the owner lives. It also decides between processes that want the name at the same
moment: a process that adopts or replaces a dead owner's segment first takes this lock. Errors, `conduit status` and `conduit clean` use
the texts of this module.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Literal

from conduit.errors import BadSegment, EngineExists, EngineNotFound, Leftover
from conduit.forking import LockFile
from conduit.store.format.layout import HEADER_CLOSED, HEADER_MAGIC, MAGIC, VERSION
from conduit.store.segment.allocation import check_room
from conduit.store.segment.locks import LOCK_CREATOR, LOCK_SPAN, held, try_lock
from conduit.store.segment.names import (
    Backing,
    alone_with_notes,
    exists,
    leads_to,
    note_path,
    open_segment,
    unlink_segment,
)

Fate = Literal["running", "orphaned", "dead"]
"""running   its owner lives
orphaned  its owner is dead, other processes are attached
dead      no live process holds it
"""

GRACE = 0.1
"""Seconds to wait for a segment without lock and header: its creator may be between creating and locking it."""

_WORDS: dict[Fate, str] = {
    "running": "its owner is alive",
    "orphaned": "its owner is dead, and other processes are attached to it",
    "dead": "its owner is dead, and no process is attached to it",
}


def fate_of(fd: int) -> Fate:
    """Whether the owner of an open segment lives, and whether processes are attached; `fd` must hold no lock of the segment."""
    if held(fd, LOCK_CREATOR, 1):
        return "running"
    return "orphaned" if held(fd) else "dead"


def told(name: str, fate: Fate) -> str:
    """The fate of an engine and its remedy, as part of a sentence."""
    return f"{_WORDS[fate]}; {_remedy(name, fate)}"


def _remedy(name: str, fate: Fate) -> str:
    if fate == "running":
        return f"attach to it with conduit.attach({name!r}), or choose another name"
    ways = (
        f"go on with it by conduit.Engine.adopt({name!r}) or conduit.Engine.create({name!r}, ..., exist_ok=True), or put a new "
        "engine in its place by replace=True"
    )
    return f"{ways}, or remove it by `conduit clean {name}`" if fate == "dead" else ways


def has_header(fd: int) -> bool:
    """Whether the segment has the magic word, which its creator writes last."""
    return os.pread(fd, 8, HEADER_MAGIC) not in (b"", bytes(8))


def is_unfinished(fd: int) -> bool:
    """True if a segment has no header and its creator is dead."""
    end = time.monotonic() + GRACE
    while not has_header(fd) and not held(fd):
        if time.monotonic() > end:
            return True
        time.sleep(GRACE / 100)
    return False


def free_name(name: str, backing: Backing, size: int, *, replace: bool) -> None:
    """Make sure that a name is free. An unfinished segment of a dead creator has no rows and is removed.

    Args:
        name: Engine name.
        backing: Backing of the new segment.
        size: Bytes of the new segment.
        replace: Remove a segment whose owner is dead.

    Raises:
        EngineExists: An engine of this name has a living owner.
        Leftover: An engine of this name has a dead owner, and `replace` is False.
        NoSpace: There is no room for the new segment even without the old one, which stays.
        BadSegment: A file that is not Conduit's has the name.
    """
    end = time.monotonic() + GRACE
    while True:
        try:
            fd = open_segment(name)
        except EngineNotFound:
            return
        try:
            begun, fate = has_header(fd), fate_of(fd)
        finally:
            os.close(fd)
        if begun and replace and fate != "running":
            _replace(name, backing, size)
            continue
        if begun or time.monotonic() > end:
            break
        time.sleep(GRACE / 100)  # another process is creating or removing it, which ends soon
    if not begun and remove_if_dead(name)[0]:
        return
    kind = EngineExists if fate == "running" else Leftover
    raise kind(f"Expected the name {name!r} to be free, but an engine has it: {told(name, fate)}")


def _replace(name: str, backing: Backing, size: int) -> None:
    """Take the name from a segment whose owner is dead, unless another process is faster; its attached clients raise Closed."""
    try:
        fd = open_segment(name)
    except EngineNotFound:
        return
    try:
        lock = LockFile(f"/proc/self/fd/{fd}")
    except BaseException:
        os.close(fd)
        raise
    try:
        if not try_lock(lock.fd, LOCK_CREATOR) or not leads_to(name, fd):
            return
        magic, version = struct.unpack("<2q", os.pread(fd, 16, HEADER_MAGIC).ljust(16, b"\0"))
        if magic != MAGIC:
            raise BadSegment(
                f"Expected a Conduit segment under the name {name!r}, got another file's content: choose another name"
            )
        stays = held(fd, 0, LOCK_CREATOR)
        check_room(size if stays else max(0, size - os.fstat(fd).st_size), name, backing)
        if version == VERSION:
            os.pwrite(fd, struct.pack("<q", 1), HEADER_CLOSED)
        unlink_segment(name)
    finally:
        os.close(fd)
        lock.close()


def remove_if_dead(name: str) -> tuple[bool, str]:
    """Remove a segment that no live process holds.

    Returns:
        Whether it was removed, and why or why not.
    """
    try:
        fd = open_segment(name)
    except EngineNotFound:
        if not note_path(name).exists():
            return False, "no such engine"
        with alone_with_notes():
            if exists(name):
                return False, _WORDS["running"]
            note_path(name).unlink(missing_ok=True)
        return True, "its memfd went with the process that made it; only the note of it was left"
    try:
        lock = LockFile(f"/proc/self/fd/{fd}")
    except BaseException:
        os.close(fd)
        raise
    try:
        # while this process holds every lock byte, no process is attached and none can attach, so the name can go
        if not try_lock(lock.fd, 0, LOCK_SPAN):
            return False, _WORDS["running"] if fate_of(fd) == "running" else told(name, "orphaned")
        # another `clean` may have removed the segment, and a new engine may have the name; its locks are on another file
        if not leads_to(name, fd):
            return False, "it was removed meanwhile"
        size = os.fstat(fd).st_size
        unlink_segment(name)
        return True, f"{_WORDS['dead']}; {size:,} bytes freed"
    finally:
        os.close(fd)
        lock.close()
