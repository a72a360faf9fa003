"""Engine names: the file of a name, for named shared memory and for memfds.

Shared memory has its name in the file system. A memfd has no name there: its owner writes a note, in a folder that only this user can
open. The note has the /proc path by which the memfd can be opened as long as the owner lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Literal

import posix_ipc

from conduit.clock import Deadline
from conduit.errors import AccessDenied, BadSegment, Busy, ConfigError, EngineNotFound
from conduit.forking import LockFile
from conduit.store.segment.locks import open_file

Backing = Literal["shm", "memfd"]

SHM_DIRECTORY = Path("/dev/shm")  # noqa: S108 - where Linux shows POSIX shared memory
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_PROC_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_PATIENCE = 10.0


def shm_name(name: str) -> str:
    """POSIX name of an engine's segment, `/cdt.<uid>.<name>`.

    Raises:
        ConfigError: The name has characters other than letters, digits, dot, dash and underscore, or over 100 of them.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigError(f"Expected an engine name of 1 to 100 letters, digits, '.', '-' or '_', got {name!r}")
    return f"/cdt.{os.getuid()}.{name}"


def runtime_directory() -> Path:
    """The folder of the notes of memfd engines, which only this user can open."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - the folder made in it is 0700 and checked
    return Path(base) / f"conduit-{os.getuid()}"


def note_path(name: str) -> Path:
    """The path of the note of a memfd engine."""
    return runtime_directory() / f"{name}.memfd"


def open_segment(name: str, flags: int = os.O_RDWR) -> int:
    """A new descriptor of the segment of this name, after a check that it is this user's file and no other user may open it.

    Args:
        name: Engine name.
        flags: os.O_RDWR, or os.O_RDONLY for a look.

    Raises:
        EngineNotFound: There is no engine of this name.
        AccessDenied: This user may not read and write the file, it is another user's, or other users may open it.
        BadSegment: The name is that of a folder, a symbolic link or a pipe.
    """
    path = SHM_DIRECTORY / shm_name(name)[1:]
    try:
        return _open_private(path, flags, f"engine {name!r}")
    except FileNotFoundError:
        pass
    try:
        return _open_memfd(name, flags)
    except FileNotFoundError:
        raise EngineNotFound(
            f"Expected a running engine named {name!r}, found none for this user ({path}): "
            "create it with conduit.Engine.create, or wait for it with attach(..., timeout=seconds)"
        ) from None


def _open_private(path: Path, flags: int, what: str, closed: int = 0o077, *, follow: bool = False) -> int:
    """Open a regular file of this user whose mode has none of the bits `closed`; does not wait for the other end of a pipe.

    Raises:
        FileNotFoundError, AccessDenied, BadSegment: See `open_segment`.
    """
    kept = os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = open_file(path, flags | kept)
    except NotADirectoryError as error:
        raise FileNotFoundError(path) from error
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise AccessDenied(
            f"Expected read and write access to {what} ({path}), got permission denied: "
            "engines are private to the user that created them"
        ) from error
    except OSError as error:  # a symbolic link, a folder, a socket
        raise _no_file(path, what) from error
    try:
        _check_private(os.fstat(fd), path, what, closed)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _no_file(path: Path, what: str) -> BadSegment:
    return BadSegment(f"Expected a file at {path} for {what}, got something else: remove it, or choose another name")


def _check_private(status: os.stat_result, path: Path, what: str, closed: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _no_file(path, what)
    if status.st_uid != os.geteuid():
        raise AccessDenied(
            f"Expected {path} of {what} to belong to user {os.geteuid()}, got user {status.st_uid}'s: engines are private to the "
            "user that created them; have it removed, or choose another name"
        )
    if status.st_mode & closed:
        raise AccessDenied(
            f"Expected {path} of {what} to be closed to other users (mode 0600), got {status.st_mode & 0o777:04o}: another user "
            f"may have written into it; remove it, or `chmod 600 {path}` if you know that nobody has"
        )


def _open_memfd(name: str, flags: int) -> int:
    """A descriptor of the memfd that an engine's note names.

    Raises:
        FileNotFoundError: There is no note, or its process is gone.
        AccessDenied, BadSegment: Other users may open the note, its folder or the memfd, or one of them is another user's.
    """
    note = note_path(name)
    try:
        note.lstat()
    except OSError as error:  # no note, or another user's folder, which has no engine of this user
        raise FileNotFoundError(note) from error
    _check_directory(note.parent)
    fd = _open_private(note, os.O_RDONLY, f"the note of engine {name!r}", 0o022)
    try:
        path = os.read(fd, 4096).decode(errors="replace")
    finally:
        os.close(fd)
    if _PROC_PATH.fullmatch(path) is None or not _is_memfd(Path(path), name):
        raise FileNotFoundError(path)
    try:
        found = _open_private(Path(path), flags, f"engine {name!r}", follow=True)
    except (BadSegment, FileNotFoundError):
        raise FileNotFoundError(path) from None
    # another process may have the pid by now
    if not _is_memfd(Path(f"/proc/self/fd/{found}"), name):
        os.close(found)
        raise FileNotFoundError(path)
    return found


def _is_memfd(path: Path, name: str) -> bool:
    try:
        return str(path.readlink()) == f"/memfd:{shm_name(name)[1:]} (deleted)"
    except OSError:
        return False


def _check_directory(directory: Path) -> None:
    """Check that the folder of notes belongs to this user alone.

    Raises:
        AccessDenied: It does not.
    """
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise AccessDenied(
            f"Expected the folder {directory}, closed to others (mode 0700), to belong to this user; remove it or set "
            f"XDG_RUNTIME_DIR: got one of user {status.st_uid}, mode {status.st_mode & 0o777:04o}"
        )


def status_of(name: str) -> os.stat_result | None:
    """The file status of the entry of this name, without any check of its access rights; None if there is none."""
    try:
        return (SHM_DIRECTORY / shm_name(name)[1:]).lstat()
    except FileNotFoundError:
        pass
    try:
        fd = open_segment(name, os.O_RDONLY)
    except (EngineNotFound, AccessDenied, BadSegment):
        return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def leads_to(name: str, fd: int) -> bool:
    """True if the name is that of the file open as `fd`."""
    found = status_of(name)
    return found is not None and os.path.samestat(found, os.fstat(fd))


def unlink_segment(name: str) -> None:
    """Remove the name, of any kind of file."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(shm_name(name))
    with contextlib.suppress(FileNotFoundError):
        note_path(name).unlink()


@contextlib.contextmanager
def alone_with_notes() -> Generator[None]:
    """Keep other processes from creating or removing notes of memfd engines, which takes two steps each.

    Raises:
        Busy: Other processes did so all the time.
    """
    folder = LockFile(runtime_directory(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        deadline = Deadline(_PATIENCE)
        while not _try_flock(folder.fd):
            if deadline.passed():
                raise Busy(
                    f"Expected to lock {runtime_directory()} within {_PATIENCE:g} s, another process holds it: try again"
                )
            time.sleep(0.001)
        yield
    finally:
        folder.close()


def _try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def exists(name: str) -> bool:
    """True if there is a segment of this name, with a living or a dead owner."""
    try:
        os.close(open_segment(name))
    except EngineNotFound:
        return False
    return True


def note_memfd(name: str, path: str) -> bool:
    """Write the note that says where a memfd can be opened; False if a running engine has the name."""
    directory = runtime_directory()
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    _check_directory(directory)
    with alone_with_notes():
        if exists(name):
            return False
        note = note_path(name)
        note.unlink(missing_ok=True)
        fd = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)  # the umask may have removed bits
            os.write(fd, path.encode())
        finally:
            os.close(fd)
    return True


def find() -> Iterator[tuple[str, Backing]]:
    """Names of this user's engines, living and dead, with their backing."""
    prefix = f"cdt.{os.getuid()}."
    for entry in sorted(SHM_DIRECTORY.glob(prefix + "*")):
        if entry.is_file():  # False if it was removed meanwhile
            yield entry.name.removeprefix(prefix), "shm"
    for entry in sorted(runtime_directory().glob("*.memfd")):
        yield entry.name.removesuffix(".memfd"), "memfd"
