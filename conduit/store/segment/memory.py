"""How much memory a new segment may take: the least of the limits of the machine, the control groups and the memory file system.

A segment reserves all its memory. If that is more than there is, the kernel's OOM killer ends some process, not always the one that
reserved. So a segment that is too large is refused before any memory is touched. Memory that the page cache could release counts as
free. All numbers are read from files below one folder, so that tests can use folders of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from conduit.store.segment.names import SHM_DIRECTORY, Backing

_UNLIMITED = 1 << 60
"""Control groups of version 1 have a number near 2^63 if there is no limit."""
_ENLARGE = 'enlarge it (docker run --shm-size=..., mount -o remount,size=... /dev/shm), or use backing="memfd"'


class Bound(NamedTuple):
    """A limit on memory: free bytes, what sets the limit, and how to raise it."""

    free: int
    name: str
    remedy: str


def available(backing: Backing, root: Path = Path("/")) -> Bound | None:
    """The least limit for a segment of this backing, or None if no limit can be read.

    Args:
        backing: Where its memory comes from.
        root: Folder below which /proc and /sys lie.
    """
    found = [*_machine(root), *_control_groups(root)]
    if backing == "shm":
        found += shared_memory()
    return min(found, default=None)


def shared_memory() -> Iterator[Bound]:
    """The free bytes of the memory file system; one without a size reports 0 blocks and sets no limit."""
    try:
        space = os.statvfs(SHM_DIRECTORY)
    except OSError:
        return
    if space.f_blocks:
        yield Bound(space.f_bavail * space.f_frsize, str(SHM_DIRECTORY), f"run `conduit clean`, {_ENLARGE}")


def _machine(root: Path) -> Iterator[Bound]:
    words = _words(root / "proc/meminfo")
    if "MemAvailable" in words:
        # the number is in KiB, whatever unit the line has
        yield Bound(
            words["MemAvailable"] << 10,
            "this machine's memory (MemAvailable)",
            "end other processes, run `conduit clean`, or take a machine with more",
        )


def _control_groups(root: Path) -> Iterator[Bound]:
    """The limits of this process's control groups and of all their parents."""
    mounts = list(_mounts(root))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            kind, files = "cgroup2", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            kind, files = "cgroup", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        for mount, top in mounts:
            if mount[0] == kind:
                yield from _groups_of(root / mount[1].relative_to("/"), _below(path, top), *files)


def _mounts(root: Path) -> Iterator[tuple[tuple[str, PurePosixPath], str]]:
    """((file system, mount point), mounted group) of the control groups that may have memory limits."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, behind = line.partition(" - ")
        fields, system = before.split(), behind.split()
        if len(fields) < 5 or len(system) < 3:
            continue
        if system[0] == "cgroup2" or (system[0] == "cgroup" and "memory" in system[2].split(",")):
            yield (system[0], PurePosixPath(fields[4])), fields[3]


def _below(path: str, top: str) -> PurePosixPath:
    """A group's path below the mounted group; the mounted group itself if the path is not visible, as in a container."""
    try:
        return PurePosixPath(path).relative_to(top)
    except ValueError:
        return PurePosixPath()


def _groups_of(mount: Path, place: PurePosixPath, limit: str, usage: str, prefix: str) -> Iterator[Bound]:
    for group in (place, *place.parents):
        folder = mount / group
        most, used = _number(folder / limit), _number(folder / usage)
        if most is None or used is None or most >= _UNLIMITED:
            continue
        words = _words(folder / "memory.stat")
        cached = sum(words.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
        yield Bound(
            max(0, most - used + min(cached, used)),
            f"the memory limit of a control group ({limit} of {group if group.parts else '/'})",
            "raise the limit (docker run --memory=..., Kubernetes: resources.limits.memory, systemd: MemoryMax=)",
        )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _words(path: Path) -> dict[str, int]:
    """{name: number} of a file with a name and a number on each line."""
    found = {}
    for line in _text(path).splitlines():
        name, *rest = line.replace(":", " ").split()[:2] or [""]
        if rest and rest[0].isdecimal():
            found[name] = int(rest[0])
    return found
