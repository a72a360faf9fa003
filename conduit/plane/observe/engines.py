"""This user's engines by name, living and dead, and the removal of those that nobody holds any more."""

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
    """Names of this user's engines, living and dead, sorted. Other files under such names are not listed."""
    return sorted({name for name, _ in find() if _is_file(name)})


def clean(name: str | None = None) -> list[Cleaned]:
    """Remove segments that no live process holds.

    A process holds a segment while it is its owner or is attached, however idle. A file that is not Conduit's, and lies
    under an engine's name, is left alone.

    Args:
        name: One engine; None for all of this user.

    Returns:
        One entry for each engine looked at.

    Raises:
        ConfigError: This cannot be an engine's name.
        EngineNotFound: Nothing has this name.
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
    """What to raise where nothing has this name."""
    return EngineNotFound(
        f"Expected an engine named {name!r}, found none for this user ({SHM_DIRECTORY}{shm_name(name)}): "
        "`conduit status` lists those that are there"
    )


def backing_of(name: str) -> Backing:
    """Where a name leads to: something in shared memory, of whatever kind, or the note of a memfd.

    Raises:
        ConfigError: This cannot be an engine's name.
        EngineNotFound: Nothing has it.
    """
    if os.path.lexists(SHM_DIRECTORY / shm_name(name)[1:]):
        return "shm"
    if os.path.lexists(note_path(name)):
        return "memfd"
    raise not_found(name)


def is_there(name: str) -> bool:
    """Whether something has this name."""
    try:
        backing_of(name)
    except (EngineNotFound, ConfigError):
        return False
    return True


def _is_file(name: str) -> bool:
    """Whether a name leads to a file, or to a note that is one: others are not listed."""
    try:
        path = SHM_DIRECTORY / shm_name(name)[1:] if backing_of(name) == "shm" else note_path(name)
        return stat.S_ISREG(path.lstat().st_mode)
    except (EngineNotFound, ConfigError, OSError):
        return False


def _is_foreign(name: str) -> bool:
    """Whether a file begins with something else than our magic, or the zeros of a creator that did not finish."""
    fd = open_segment(name, os.O_RDONLY)
    try:
        start = os.pread(fd, 8, 0)
    finally:
        os.close(fd)
    return start.strip(b"\0") != b"" and start != struct.pack("<q", MAGIC)
