"""Engine names: which file a name leads to, for named shared memory and for memfds.

Shared memory has its name in the file system. A memfd has none: its owner leaves a note, in a folder of this user alone,
of the /proc path where it can be opened for as long as the owner lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import posix_ipc

from conduit.errors import AccessDenied, BadSegment, ConfigError, EngineNotFound

Backing = Literal["shm", "memfd"]

SHM_DIRECTORY = Path("/dev/shm")  # noqa: S108 - where Linux shows POSIX shared memory
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


def note_path(name: str) -> Path:
    """Where a memfd engine of this name leaves its note."""
    return runtime_directory() / f"{name}.memfd"


def open_segment(name: str) -> int:
    """A fresh descriptor of the segment that has this engine name.

    Raises:
        EngineNotFound: The name leads nowhere.
        AccessDenied: It leads to what this user may not read and write.
        BadSegment: It leads to what is no file.
    """
    try:
        return int(posix_ipc.SharedMemory(shm_name(name)).fd)
    except posix_ipc.ExistentialError:
        pass
    except posix_ipc.PermissionsError as error:
        raise AccessDenied(
            f"Expected read and write access to engine {name!r} ({SHM_DIRECTORY}{shm_name(name)}), got permission denied: "
            "engines are private to the user that created them"
        ) from error
    except ValueError as error:
        raise BadSegment(
            f"Expected a file at {SHM_DIRECTORY}{shm_name(name)}, got something else: remove it, or choose another name"
        ) from error
    try:
        path = note_path(name).read_text()
        # the process number may be another process's by now
        if str(Path(path).readlink()) != f"/memfd:{shm_name(name)[1:]} (deleted)":
            raise FileNotFoundError(path)
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        raise EngineNotFound(
            f"Expected a running engine named {name!r}, found none for this user ({SHM_DIRECTORY}{shm_name(name)}): "
            "create it with conduit.Engine.create, or wait for it with attach(..., timeout=seconds)"
        ) from None


def leads_to(name: str, fd: int) -> bool:
    """True when the name leads to the file behind `fd`."""
    try:
        found = open_segment(name)
    except EngineNotFound:
        return False
    try:
        return os.path.samestat(os.fstat(found), os.fstat(fd))
    finally:
        os.close(found)


def unlink_segment(name: str) -> None:
    """Remove the name, whatever it leads to."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(shm_name(name))
    with contextlib.suppress(FileNotFoundError):
        note_path(name).unlink()


@contextlib.contextmanager
def alone_with_notes() -> Iterator[None]:
    """Keep other processes from making or removing the notes of memfd engines, which are made in two steps."""
    fd = os.open(runtime_directory(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def exists(name: str) -> bool:
    """True when the name leads to a segment, living or dead."""
    try:
        os.close(open_segment(name))
    except EngineNotFound:
        return False
    return True


def note_memfd(name: str, path: str) -> bool:
    """Leave word of where a memfd can be opened; False when a running engine has the name."""
    directory = runtime_directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise AccessDenied(f"Expected {directory} to belong to this user; remove it or set XDG_RUNTIME_DIR")
    with alone_with_notes():
        if exists(name):
            return False
        note_path(name).write_text(path)
    return True


def find() -> Iterator[tuple[str, Backing]]:
    """Names of this user's engines, living and dead, with their backing."""
    prefix = f"cdt.{os.getuid()}."
    for entry in sorted(SHM_DIRECTORY.glob(prefix + "*")):
        if entry.is_file():  # False when it has gone meanwhile
            yield entry.name.removeprefix(prefix), "shm"
    for entry in sorted(runtime_directory().glob("*.memfd")):
        yield entry.name.removesuffix(".memfd"), "memfd"
