"""References for the goals of checkpoints: plain writes and reads of the same disk, and a writer that measures its pauses.

`python -m perf.checkpoints ENGINE ENVS` is that writer: it appends flat out, and for each line on stdin says, as JSON, the longest
time between two commits since the line before, and the longest one less the time in it that the writer waited for a core.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 16 << 20


def plain_write(path: Path, size: int, *, direct: bool) -> float:
    """Seconds that `dd bs=16M conv=fsync` (with `oflag=direct`) takes for `size` bytes, random ones; the file is removed."""
    block = mmap.mmap(-1, BLOCK)
    block[:] = np.random.default_rng().bytes(BLOCK)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags)
    try:
        started = time.perf_counter()
        for _ in range(size // BLOCK):
            assert os.write(fd, block) == BLOCK
        os.fsync(fd)
        return time.perf_counter() - started
    finally:
        os.close(fd)
        path.unlink()


def forget(files: list[Path]) -> None:
    """Let the page cache forget the files."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm_memory(size: int) -> None:
    """Write so many bytes of shared memory and free them, so that a virtual machine's host has given them.

    To reserve them would not do: memory is touched when it is cleared, which is at its first use.
    """
    fd = os.memfd_create("perf-warm")
    block = bytes(BLOCK)
    try:
        for place in range(0, size, BLOCK):
            os.pwrite(fd, block, place)
    finally:
        os.close(fd)


def plain_read(files: list[Path], *, direct: bool) -> float:
    """Seconds that reading the files takes into one buffer of 16 MiB, from the disk."""
    forget(files)
    block = mmap.mmap(-1, BLOCK)
    started = time.perf_counter()
    for file in files:
        fd = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            while os.readv(fd, [block]) == BLOCK:
                pass
        finally:
            os.close(fd)
    return time.perf_counter() - started


def write_flat_out(engine: str, envs: int) -> None:
    """The writer."""
    import conduit

    with (
        conduit.attach(engine, timeout=30.0) as client,
        client.writer("replay", num_envs=envs, autoreset="next_step") as writer,
    ):
        rng = np.random.default_rng()
        ticks: list[dict[str, Any]] = [
            {
                "obs": rng.integers(0, 256, (envs, 84, 84), np.uint8),
                "action": np.zeros(envs, np.int64),
                "reward": np.zeros(envs, np.float32),
                "terminated": np.zeros(envs, bool),
            }
            for _ in range(8)
        ]
        append, now = writer.append, time.perf_counter_ns
        scheduled = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

        def waited() -> int:
            return int(os.pread(scheduled, 64, 0).split()[1])

        number = longest = longest_held = 0
        before, waited_before = now(), waited()
        while True:
            append(**ticks[number & 7])
            after, waited_after = now(), waited()
            longest = max(longest, after - before)
            longest_held = max(longest_held, after - before - (waited_after - waited_before))
            before, waited_before = after, waited_after
            number += 1
            if number % 16 == 0 and select.select([sys.stdin], [], [], 0)[0]:
                if not sys.stdin.readline():
                    return
                print(json.dumps({"longest_ns": longest, "held_ns": longest_held}), flush=True)
                longest = longest_held = 0
                before, waited_before = now(), waited()


if __name__ == "__main__":
    write_flat_out(sys.argv[1], int(sys.argv[2]))
