"""How much memory an engine may take, and that one which is larger is refused before anything is touched."""

import os
import time
from pathlib import Path

import pytest

import conduit
from conduit.errors import NoSpace
from conduit.plane.observe import inspect
from conduit.store.segment import memory
from conduit.store.segment.memory import available
from conduit.testing import rows

GIB = 1 << 30
MOUNTS_V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNTS_V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


def machine(root, files, mounts=MOUNTS_V2, groups="0::/\n", free=20 * GIB):
    """Files of a machine of our own below `root`."""
    written = {
        "proc/meminfo": f"MemTotal:       99999999 kB\nMemFree: 1 kB\nMemAvailable:   {free >> 10} kB\n",
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mounts,
    } | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in written.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_limits_what_the_machine_has_available_counts(tmp_path):
    bound = available("memfd", machine(tmp_path, {"memory.max": "max\n", "memory.current": "5\n"}))
    assert (bound.free, bound.name) == (20 * GIB, "this machine's memory (MemAvailable)")


@pytest.mark.parametrize(
    ("limits", "free", "group"),
    [
        ({"a/b": (8, 3)}, 5, "a/b"),
        ({"a/b": (8, 3), "a": (9, 7)}, 2, "a"),
        ({"a/b": (8, 3), "a": (9, 7), "": (10, 9.5)}, 0.5, "/"),
        ({"a/b": (8, 3), "other": (1, 1)}, 5, "a/b"),
        ({"a/b": (8, 9)}, 0, "a/b"),
    ],
)
def test_the_least_limit_up_the_tree_of_a_control_group_counts(tmp_path, limits, free, group):
    files = {}
    for place, (most, used) in limits.items():
        files[f"{place}/memory.max"] = f"{int(most * GIB)}\n"
        files[f"{place}/memory.current"] = f"{int(used * GIB)}\n"
    bound = available("memfd", machine(tmp_path, files, groups="1:cpu:/x\n0::/a/b\n"))
    assert bound.free == free * GIB
    assert bound.name == f"the memory limit of a control group (memory.max of {group})"
    assert "docker run --memory=" in bound.remedy


def test_what_the_page_cache_can_give_back_is_free(tmp_path):
    files = {
        "memory.max": f"{8 * GIB}",
        "memory.current": f"{7 * GIB}",
        "memory.stat": f"anon {2 * GIB}\nfile {5 * GIB}\nshmem {GIB}\ninactive_file {3 * GIB}\nactive_file {GIB}\n",
    }
    assert available("memfd", machine(tmp_path, files)).free == 5 * GIB


@pytest.mark.parametrize(
    ("top", "group", "folder"), [("/", "/docker/x", "memory/docker/x"), ("/docker/x", "/docker/x", "memory")]
)
def test_limits_of_control_groups_of_version_1_count(tmp_path, top, group, folder):
    files = {
        f"{folder}/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{folder}/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"{folder}/memory.stat": f"cache 5\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    } | ({"memory/memory.usage_in_bytes": "1\n"} if top == "/" else {})
    if folder == "memory":
        files["memory/memory.limit_in_bytes"] = f"{4 * GIB}\n"
    root = machine(tmp_path, files, mounts=MOUNTS_V1.format(top=top), groups=f"4:memory:{group}\n0::/\n")
    bound = available("memfd", root)
    assert bound.free == 2 * GIB
    assert "memory.limit_in_bytes" in bound.name


def test_a_group_that_is_not_seen_from_inside_a_container_is_the_top_that_is(tmp_path):
    files = {"memory.max": f"{2 * GIB}", "memory.current": "0"}
    root = machine(tmp_path, files, groups="0::/../../elsewhere\n")
    assert available("memfd", root).free == 2 * GIB


def test_free_shared_memory_bounds_engines_that_lie_in_it_and_no_others(tmp_path, monkeypatch):
    root = machine(tmp_path, {})
    space = os.statvfs("/dev/shm")
    sizes = {"f_bavail": 7, "f_blocks": 9}

    class Space:
        f_frsize = space.f_frsize

        def __getattr__(self, name):
            return sizes[name]

    monkeypatch.setattr(memory.os, "statvfs", lambda path: Space())
    assert available("shm", root).free == 7 * space.f_frsize
    assert available("memfd", root).free == 20 * GIB
    sizes |= {"f_bavail": 0, "f_blocks": 0}  # a tmpfs without a size has no bound
    assert available("shm", root).free == 20 * GIB


def test_files_that_are_missing_or_say_nothing_bound_nothing(tmp_path):
    assert available("memfd", tmp_path) is None
    root = machine(tmp_path, {"memory.max": "", "memory.current": "x"}, mounts="1 2\n - \n", groups="nothing\n\n::\n")
    assert available("memfd", root).free == 20 * GIB


@pytest.mark.parametrize("backing", ["memfd", "shm"])
def test_an_engine_larger_than_memory_is_refused_at_once_and_nothing_is_touched(engine_name, backing):
    table = conduit.Table(rows.SCHEMA, "4 TiB")
    files = len(list(Path("/proc/self/fd").iterdir()))
    began = time.monotonic()
    with pytest.raises(
        NoSpace, match=r"Expected 4,39\d.* bytes free in .*, got [\d,]+: lower the capacity, "
    ) as caught:
        conduit.Engine.create(engine_name, {"replay": table}, backing=backing)
    assert time.monotonic() - began < 1.0
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert engine_name not in inspect.engines()
    assert not [one for one in Path("/dev/shm").iterdir() if engine_name in one.name]
    bound = available(backing)
    assert bound.name in str(caught.value)
    assert bound.remedy in str(caught.value)


def test_a_checkpoint_that_no_longer_fits_is_refused_before_its_rows_are_read(engine_name, tmp_path, monkeypatch):
    with conduit.Engine.create(engine_name, {"replay": conduit.Table(rows.SCHEMA, 100)}) as engine:
        engine.checkpoint(tmp_path)
    monkeypatch.setattr(
        "conduit.store.segment.allocation.available", lambda backing: memory.Bound(1000, "here", "buy more")
    )
    read = []
    with pytest.raises(NoSpace, match=r"bytes free in here .* got 1,000: lower the capacity, buy more"):
        conduit.Engine.restore(tmp_path, f"{engine_name}-again", progress=lambda *done: read.append(done))
    assert read == []
    assert f"{engine_name}-again" not in inspect.engines()
