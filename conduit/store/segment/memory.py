"""How much memory a new segment may take: the least of what the machine, the control groups and the memory file system leave.

Memory that is reserved is memory that is used, and a segment beyond what is there ends in the kernel's killer, which takes some
process, not always the one that asked. So it is refused before anything is touched. What the page cache could give back counts
as free everywhere. All is read from files below one folder, so that tests have machines of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from conduit.store.segment.names import SHM_DIRECTORY, Backing

_UNLIMITED = 1 << 60
"""Control groups of version 1 say a number near 2^63 where there is no limit."""
_ENLARGE = 'enlarge it (docker run --shm-size=..., mount -o remount,size=... /dev/shm), or use backing="memfd"'


class Bound(NamedTuple):
    """A bound of memory: free bytes, what sets it, and how to raise it."""

    free: int
    name: str
    remedy: str


def available(backing: Backing, root: Path = Path("/")) -> Bound | None:
    """The least bound of a segment of this backing, or None where nothing says any.

    Args:
        backing: Where its memory comes from.
        root: Folder below which /proc and /sys lie.
    """
    found = [*_machine(root), *_control_groups(root)]
    if backing == "shm":
        found += shared_memory()
    return min(found, default=None)


def shared_memory() -> Iterator[Bound]:
    """What is free in the memory file system; one without a size, which says 0 blocks, bounds nothing."""
    try:
        space = os.statvfs(SHM_DIRECTORY)
    except OSError:
        return
    if space.f_blocks:
        yield Bound(space.f_bavail * space.f_frsize, str(SHM_DIRECTORY), f"run `conduit clean`, {_ENLARGE}")


def _machine(root: Path) -> Iterator[Bound]:
    words = _words(root / "proc/meminfo")
    if "MemAvailable" in words:
        # in KiB, whatever the line says
        yield Bound(
            words["MemAvailable"] << 10,
            "this machine's memory (MemAvailable)",
            "end other processes, run `conduit clean`, or take a machine with more",
        )


def _control_groups(root: Path) -> Iterator[Bound]:
    """The limits of the groups that this process is in, up their trees."""
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
    """((file system, mount point), the group that is mounted there) of the control groups that may have memory limits."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, behind = line.partition(" - ")
        fields, system = before.split(), behind.split()
        if len(fields) < 5 or len(system) < 3:
            continue
        if system[0] == "cgroup2" or (system[0] == "cgroup" and "memory" in system[2].split(",")):
            yield (system[0], PurePosixPath(fields[4])), fields[3]


def _below(path: str, top: str) -> PurePosixPath:
    """A group's place below what is mounted; the top where it is not seen from here, as in a container."""
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
    """{name: number} of a file with one on each line."""
    found = {}
    for line in _text(path).splitlines():
        name, *rest = line.replace(":", " ").split()[:2] or [""]
        if rest and rest[0].isdecimal():
            found[name] = int(rest[0])
    return found
