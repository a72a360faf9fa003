"""The checks that `conduit doctor` makes of the machine: memory, limits, kernel, compiler, and a small engine at work."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

import conduit
from conduit.cli.output import counted, size
from conduit.errors import ConduitError
from conduit.plane.observe import inspect, machine
from conduit.plane.observe.machine import Outcome

_MIB = 1 << 20
_DOCKER_SHM = 64 * _MIB
_LITTLE_FREE = 256 * _MIB
_FEW_FILES = 256
_ENLARGE = (
    "docker run --shm-size=8g (compose: shm_size: 8gb); Kubernetes: an emptyDir with medium: Memory on /dev/shm; "
    'elsewhere: mount -o remount,size=8G /dev/shm; or create engines with backing="memfd"'
)
_KEEP = "name a folder that can be written, on a disk that stays: export NUMBA_CACHE_DIR=..."
_CORE = (
    "numpy",
    "numba",
    "msgspec",
    "posix-ipc",
    "typer",
    "rich",
    "xxhash",
    "torch",
    "triton",
    "gymnasium",
    "matplotlib",
)

Status = Literal["ok", "warning", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check.

    Attributes:
        group: machine, shared memory, kernel, compiler, engine or packages.
        name: Name of the check; unique.
        status: "ok"; "warning": it works, with a limit that users will notice; "missing"; "broken": it does not work.
        required: Whether Conduit needs it.
        found: The finding, as text.
        remedy: How to fix it, or None.
        details: The finding as numbers, for JSON.
    """

    group: str
    name: str
    status: Status
    required: bool
    found: str
    remedy: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def fatal(self) -> bool:
        """Whether Conduit does not work on this machine because of it."""
        return self.required and self.status in ("missing", "broken")


def versions() -> dict[str, str | None]:
    """Versions of Conduit, Python and the packages it works with; None for packages that are not installed."""
    found: dict[str, str | None] = {"conduit": conduit.__version__, "python": platform.python_version()}
    for name in _CORE:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def of_machine() -> Iterator[Check]:
    """System, processors, memory, limits."""
    system = f"{platform.system()} {platform.release()} on {platform.machine()}, Python {platform.python_version()}"
    known = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    remedy = None if known else "Conduit runs on Linux, on x86_64 and aarch64"
    yield Check("machine", "system", "ok" if known else "broken", True, system, remedy)

    cpus = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    found = counted(cpus, "processor") + (f", a container quota of {quota:g}" if quota is not None else "")
    few = min(cpus, quota or cpus) < 2
    remedy = "actors and learner take turns on one processor: give the job at least 2" if few else None
    yield Check(
        "machine", "processors", "warning" if few else "ok", False, found, remedy, {"usable": cpus, "quota": quota}
    )

    available, limit = _available_memory(), _memory_limit()
    found = f"{size(available)} available, "
    found += f"container limit {size(limit)}, shared memory included" if limit else "no container limit"
    yield Check("machine", "memory", "ok", False, found, None, {"available": available, "container_limit": limit})
    yield _limits()


def _limits() -> Check:
    soft = {
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
        "file_size": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
        "address_space": resource.getrlimit(resource.RLIMIT_AS)[0],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }
    limits = {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}
    remedies = []
    if limits["open_files"] is not None and limits["open_files"] < _FEW_FILES:
        remedies.append("raise the number of open files: ulimit -n 1024")
    if limits["file_size"] is not None:
        remedies.append("no engine can be larger than the file size: ulimit -f unlimited")
    if limits["address_space"] is not None:
        remedies.append("an engine counts as address space of each process attached: ulimit -v unlimited")
    counts = {name: "any" if value is None else f"{value:,}" for name, value in limits.items()}
    sizes = {name: "any" if value is None else size(value) for name, value in limits.items()}
    found = (
        f"open files {counts['open_files']}, processes {counts['processes']}, file size {sizes['file_size']}, "
        f"address space {sizes['address_space']}, locked memory {sizes['locked_memory']}"
    )
    return Check(
        "machine", "limits", "warning" if remedies else "ok", False, found, "; ".join(remedies) or None, dict(limits)
    )


def of_shared_memory() -> Iterator[Check]:
    """Size and free space of /dev/shm, and what dead engines left in it."""
    where = inspect.SHM_DIRECTORY
    try:
        space = os.statvfs(where)
    except OSError as error:
        yield Check("shared memory", str(where), "broken", True, f"cannot be used: {error.strerror}", _ENLARGE)
        return
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    found = f"{size(total)}, {size(free)} free"
    details = {"bytes": total, "free": free}
    if not os.access(where, os.W_OK | os.X_OK):
        remedy = f'chmod 1777 {where}, or create engines with backing="memfd"'
        yield Check("shared memory", str(where), "broken", True, f"{found}; not writable", remedy, details)
    elif total <= _DOCKER_SHM:
        found += ": a container's default" if total == _DOCKER_SHM else ": small"
        yield Check("shared memory", str(where), "warning", True, found, _ENLARGE, details)
    elif free < _LITTLE_FREE:
        yield Check("shared memory", str(where), "warning", True, found, f"conduit clean; {_ENLARGE}", details)
    else:
        yield Check("shared memory", str(where), "ok", True, found, None, details)
    yield _room()
    yield _leftovers()


def _room() -> Check:
    """How large an engine can be now, and what limits it; `Engine.create` refuses a larger one."""
    least, other = machine.room_for("shm"), machine.room_for("memfd")
    bounds = (("shm", least), ("memfd", other))
    details = {name: {"bytes": one.free, "bound": one.name} for name, one in bounds if one is not None}
    if least is None:
        return Check("shared memory", "room", "ok", False, "nothing says how much memory is free", None, details)
    found = f"engines of up to {size(least.free)}, as far as {least.name} goes"
    if least.free < _LITTLE_FREE:
        return Check("shared memory", "room", "warning", False, found, least.remedy, details)
    return Check("shared memory", "room", "ok", False, found, None, details)


def _leftovers() -> Check:
    dead = []
    for name in inspect.engines():
        try:
            one = inspect.inspect(name)
        except ConduitError:
            continue
        if not one.in_use and one.state in ("dead", "damaged"):
            dead.append(one)
    names, total = [one.name for one in dead], sum(one.bytes for one in dead)
    details = {"engines": names, "bytes": total}
    if not dead:
        return Check("shared memory", "leftovers", "ok", False, "none", None, details)
    found = f"{counted(len(dead), 'engine')} that nobody holds, {size(total)}: "
    found += ", ".join(names[:3]) + (", ..." if len(dead) > 3 else "")
    return Check("shared memory", "leftovers", "warning", False, found, "conduit clean", details)


def of_kernel() -> Iterator[Check]:
    """The features of the operating system that an engine needs."""
    yield _tried("kernel", "locks", True, machine.liveness_locks, "a kernel of 3.15 or newer, and no filter on fcntl")
    yield _tried("kernel", "memfd", False, machine.memfd, 'without it only backing="shm" can be used')


def of_compiler() -> Iterator[Check]:
    """Where kernels come from; if numba compiles them, also numba, its cache and the atomic instructions; the futex call."""
    yield _tried("compiler", "kernels", True, machine.kernels, "unset CONDUIT_KERNELS and CONDUIT_KERNELS_LIBRARY")
    if machine.has_library():
        yield _tried("compiler", "futex", True, machine.futex, "allow the futex system call in the container's filter")
        return
    cache = machine.compiles()
    remedy = "unset NUMBA_DISABLE_JIT" if "NUMBA_DISABLE_JIT" in cache.found else "another numba: pip install -U numba"
    status: Status = "ok" if cache.works else "broken"
    yield Check("compiler", "numba", status, True, cache.found, None if cache.works else remedy)
    if cache.works:
        yield _tried("compiler", "atomics", True, machine.atomic_instructions, "another numba: pip install -U numba")
        yield _tried("compiler", "futex", True, machine.futex, "allow the futex system call in the container's filter")


def of_engine() -> Iterator[Check]:
    """A small engine of each backing: written to, read from, and closed; then where its kernels came from."""
    began = time.perf_counter()
    yield _tried("engine", "shm backing", True, lambda: trial("shm"), "see the checks above that are not ok")
    yield _tried("engine", "memfd backing", False, lambda: trial("memfd"), "set XDG_RUNTIME_DIR to a folder of yours")
    seconds = time.perf_counter() - began
    cache = machine.kernel_cache()
    if cache.library and not cache.loaded + cache.compiled:
        found = f"not needed: kernels come from {cache.library}"
        details = {"library": cache.library, "folder": None, "loaded": 0, "compiled": 0, "seconds": round(seconds, 3)}
        yield Check("engine", "kernel cache", "ok", False, found, None, details)
        return
    if not cache.folders:
        found = f"kept nowhere: every process compiles its kernels anew, here in {seconds:.1f} s"
        nothing = {"library": cache.library, "folder": None, "loaded": 0, "compiled": 0, "seconds": round(seconds, 3)}
        yield Check("engine", "kernel cache", "warning", False, found, _KEEP, nothing)
        return
    where = os.path.commonpath(cache.folders)
    found = f"{counted(cache.loaded, 'kernel')} loaded from {where}"
    if cache.compiled:
        found = f"{cache.compiled} of {counted(cache.compiled + cache.loaded, 'kernel')} compiled now, in {seconds:.1f} s; kept in {where}"
    details = {
        "library": cache.library,
        "folder": where,
        "loaded": cache.loaded,
        "compiled": cache.compiled,
        "seconds": round(seconds, 3),
    }
    yield Check("engine", "kernel cache", "ok", False, found, None, details)


def trial(backing: Literal["shm", "memfd"]) -> Outcome:
    """Write 128 rows into an engine of our own and read a batch of transitions and a set of weights back."""
    schema = conduit.Schema.from_example({"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0})
    table = conduit.Table.replay(schema, capacity=1024, num_envs=4)
    name, weights = f"doctor-{os.getpid()}-{backing}", {"w": np.arange(8, dtype=np.float32)}
    with conduit.Engine.create(name, {"trial": table}, policies={"policy": weights}, backing=backing) as engine:
        with engine.writer("trial", num_envs=4, autoreset="next_step") as writer:
            for tick in range(32):
                writer.append(
                    obs=np.full((4, 4), tick, np.float32),
                    action=np.zeros(4, np.int64),
                    reward=np.ones(4, np.float32),
                    terminated=np.zeros(4, bool),
                    truncated=np.zeros(4, bool),
                )
        with engine.loader("trial", batch_size=64, format="numpy", timeout=10.0) as loader:
            batch = loader.next()
            right = bool(np.all(batch["next_obs"] == batch["obs"] + 1))
        slot = engine.policy("policy")
        slot.publish(weights)
        polled = slot.poll()
        right = right and polled is not None and bool(np.array_equal(polled.arrays["w"], weights["w"]))
    if not right:
        return Outcome(False, "what was read is not what was written")
    return Outcome(True, "created, written, read back and closed")


def _tried(group: str, name: str, required: bool, attempt: Callable[[], Outcome], remedy: str) -> Check:
    try:
        outcome = attempt()
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the machine is what the doctor has to report
        outcome = Outcome(False, f"{type(error).__name__}: {error}")
    return Check(
        group, name, "ok" if outcome.works else "broken", required, outcome.found, None if outcome.works else remedy
    )


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _memory_limit() -> int | None:
    """The container's limit in bytes, the tightest of the groups above this process, or None."""
    texts = [*_cgroup("memory.max"), *_texts(Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))]
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def _cpu_quota() -> float | None:
    """Processors' worth of time that the container may use, or None."""
    quotas = []
    for text in _cgroup("cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup(name: str) -> Iterator[str]:
    """The contents of a control file of this process's group and of all above it (cgroup v2)."""
    root = Path("/sys/fs/cgroup")
    for line in (text for one in _texts(Path("/proc/self/cgroup")) for text in one.splitlines()):
        if line.startswith("0::/"):
            group = root / line.removeprefix("0::/")
            while True:
                yield from _texts(group / name)
                if group == root:
                    return
                group = group.parent


def _texts(path: Path) -> Iterator[str]:
    try:
        yield path.read_text().strip()
    except OSError:
        return
