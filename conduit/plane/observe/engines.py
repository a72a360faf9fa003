"""The list of this user's engines, living and dead, and the removal of engines that no process holds."""

from __future__ import annotations

import os
import stat
import struct

from conduit.errors import ConduitError, ConfigError, EngineNotFound
from conduit.plane.observe.status import Cleaned
from conduit.store.format.layout import MAGIC
from conduit.store.segment.leftovers import remove_if_dead
from conduit.store.segment.names import SHM_DIRECTORY, Backing, find, note_path, open_segment, shm_name


def engines() -> list[str]:
    """Sorted names of this user's engines, living and dead. Files that are not Conduit's are left out."""
    return sorted({name for name, _ in find() if _is_file(name)})


def clean(name: str | None = None) -> list[Cleaned]:
    """Remove segments that no live process holds.

    A process holds a segment as long as it is the owner or is attached, however idle it is. A file under an engine's name that is not
    Conduit's stays.

    Args:
        name: One engine; None for all engines of this user.

    Returns:
        One entry for each engine that was examined.

    Raises:
        ConfigError: The name cannot be an engine's.
        EngineNotFound: There is no engine of this name.
    """
    if name is not None:
        backing_of(name)
    return [_clean(one) for one in (engines() if name is None else [name])]


def _clean(name: str) -> Cleaned:
    try:
        if backing_of(name) == "shm" and _is_foreign(name):
            path = SHM_DIRECTORY / shm_name(name)[1:]
            return Cleaned(name, False, f"not a Conduit segment; if it can go, remove {path} yourself")
        return Cleaned(name, *remove_if_dead(name))
    except (ConduitError, OSError, ValueError) as error:
        return Cleaned(name, False, str(error))


def not_found(name: str) -> EngineNotFound:
    """The error for a name that no engine has."""
    return EngineNotFound(
        f"Expected an engine named {name!r}, found none for this user ({SHM_DIRECTORY}{shm_name(name)}): "
        "`conduit status` lists those that are there"
    )


def backing_of(name: str) -> Backing:
    """The backing of a name: "shm" for any entry in shared memory, "memfd" for the note of a memfd.

    Raises:
        ConfigError: The name cannot be an engine's.
        EngineNotFound: There is no entry of this name.
    """
    if os.path.lexists(SHM_DIRECTORY / shm_name(name)[1:]):
        return "shm"
    if os.path.lexists(note_path(name)):
        return "memfd"
    raise not_found(name)


def is_there(name: str) -> bool:
    """Whether there is an entry of this name."""
    try:
        backing_of(name)
    except (EngineNotFound, ConfigError):
        return False
    return True


def _is_file(name: str) -> bool:
    """Whether a name's entry in shared memory, or its note, is a regular file."""
    try:
        path = SHM_DIRECTORY / shm_name(name)[1:] if backing_of(name) == "shm" else note_path(name)
        return stat.S_ISREG(path.lstat().st_mode)
    except (EngineNotFound, ConfigError, OSError):
        return False


def _is_foreign(name: str) -> bool:
    """Whether a file begins with neither Conduit's magic word nor the zeros of a creator that did not finish."""
    fd = open_segment(name, os.O_RDONLY)
    try:
        start = os.pread(fd, 8, 0)
    finally:
        os.close(fd)
    return start.strip(b"\0") != b"" and start != struct.pack("<q", MAGIC)
