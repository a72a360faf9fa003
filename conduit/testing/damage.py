"""Copies of whole segments with damaged words, and everything that a process may do in them.

    python -m conduit.testing.damage --copies 10000 --seed 1

Whatever values the words of a segment have, a process that works in it must neither crash nor hang, and must raise only Conduit's errors.
A process that is killed in the middle of its work makes each segment once. Then a worker goes through the copies. It is forked when
everything is compiled, and forked again after a copy that it did not survive.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from conduit.store.format import words as w
from conduit.store.format.layout import HEADER_BYTES, HEADER_DIGEST, SegmentLayout
from conduit.store.segment.names import SHM_DIRECTORY, open_segment, shm_name
from conduit.store.segment.segment import read_layout
from conduit.testing.puppets import ended, forked
from conduit.testing.wreckage import be_killed_in, refused, tables, work_in

PATIENCE = 20.0
"""Seconds that the work in one copy may take before it is a hang; undamaged, it takes hundredths."""
_MAKING = 120.0
"""Seconds that the maker of a segment may take; it may have to compile."""
_MEMORY = 6 << 30


@dataclass(frozen=True, slots=True)
class Sample:
    """A segment whose processes are dead.

    Attributes:
        kind: Which of `tables`.
        content: Its bytes.
        regions: (weight, first byte, one behind the last) of what is damaged.
    """

    kind: str
    content: bytes
    regions: tuple[tuple[int, int, int], ...]


def _regions(layout: SegmentLayout) -> Iterator[tuple[int, int, int]]:
    yield 1, 16, HEADER_BYTES
    yield 1, HEADER_BYTES, HEADER_BYTES + len(layout.encoded)
    yield 2, layout.participants, layout.hazards
    yield 1, layout.hazards, layout.loaders
    yield 2, layout.loaders, layout.loaders + 4 * w.LINE
    for policy in layout.policies.values():
        yield 1, policy.control, policy.copies[0]
        yield 1, policy.copies[0], policy.copies[-1] + policy.copy_bytes
    for table in layout.tables.values():
        yield 10, table.blocks, table.blocks + table.pages * w.LINE
        yield 5, table.sides, table.sides + table.pages * w.LINE
        yield 4, table.control, table.control + w.TABLE_CONTROL_BYTES
        yield 1, table.seats, table.seats + 4 * w.LINE
        yield 6, table.meta, table.meta + table.rows * w.META_BYTES
        yield 1, table.priority, table.end
        for name in table.arenas:
            yield 4, table.columns[name], table.columns[name] + 8 * table.rows
        for at in table.statistics.values():
            yield 1, at, at + 4 * w.LINE


def samples() -> list[Sample]:
    """Make the segments; nothing is left in shared memory."""
    found = []
    for kind in tables():
        name = f"damage-{os.getpid()}-{kind}"
        path = SHM_DIRECTORY / shm_name(name)[1:]
        try:
            if ended(forked(lambda name=name, kind=kind: be_killed_in(name, kind)), _MAKING) != -signal.SIGKILL:  # type: ignore[misc]
                raise RuntimeError(f"expected the maker of {kind} to be killed in the end")
            fd = open_segment(name)
            layout = read_layout(fd, name)
            os.close(fd)
            found.append(Sample(kind, path.read_bytes(), tuple(_regions(layout))))
        finally:
            path.unlink(missing_ok=True)
    return found


_VALUES = (
    0,
    1,
    2,
    -1,
    -2,
    63,
    1 << 20,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 48,
    1 << 62,
    -(1 << 62),
    (1 << 63) - 1,
    -(1 << 63),
)


def _other(rng: random.Random, word: int) -> int:
    """Another word: one of odd values, random bits, a bit flipped, or a neighbour of what is there."""
    how = rng.randrange(6)
    if how == 0:
        return rng.choice(_VALUES)
    if how == 1:
        return rng.getrandbits(64)
    if how == 2:
        return word ^ (1 << rng.randrange(64))
    if how == 3:
        return word + rng.choice((-2, -1, 1, 2, 1000))
    if how == 4:
        return rng.randrange(300)
    half = rng.choice((0, 32))  # one half of the word, as of a row's meta or a span
    return (word & ~(0xFFFFFFFF << half)) | (rng.choice((0, 1, 0xFFFFFFFF, 0x7FFFFFFF, rng.getrandbits(32))) << half)


def damaged(sample: Sample, seed: int) -> bytes:
    """A copy of a sample with 1 to 40 words changed; seed -1 changes none."""
    content = bytearray(sample.content)
    if seed < 0:
        return bytes(content)
    rng = random.Random(f"{sample.kind} {seed}")
    weights = [weight for weight, _, _ in sample.regions]
    for _ in range(rng.choice((1, 1, 1, 2, 4, 12, 40))):
        ((_, begin, end),) = rng.choices(sample.regions, weights)
        if begin >= end:
            continue
        at = begin // 8 * 8 + 8 * rng.randrange(max(1, (end - begin) // 8))
        if at + 8 > len(content) or at == HEADER_DIGEST:
            continue
        word = int.from_bytes(content[at : at + 8], "little")
        content[at : at + 8] = struct.pack("<Q", _other(rng, word) & (1 << 64) - 1)
    return bytes(content)


@dataclass(frozen=True, slots=True)
class Failure:
    """A copy that did harm: `what` is "signal 11", "hang", or the traceback of an error that is none of Conduit's."""

    kind: str
    seed: int
    what: str


def _go_through(made: list[Sample], seeds: range, report: int) -> None:
    """The worker: one line of JSON before each copy, and one for what it raised."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    warnings.simplefilter("ignore")
    for seed in seeds:
        sample = made[seed % len(made)]
        name = f"damage-{os.getpid()}"
        path = SHM_DIRECTORY / shm_name(name)[1:]
        os.write(report, json.dumps([seed, path.name, ""]).encode() + b"\n")
        path.write_bytes(damaged(sample, seed))
        path.chmod(0o600)
        try:
            for text in work_in(name, sample.kind):
                os.write(report, json.dumps([seed, path.name, text[-6000:]]).encode() + b"\n")
        finally:
            path.unlink(missing_ok=True)
    os.write(report, b"end\n")


def _lines(fd: int, patience: float) -> Iterator[bytes]:
    """Lines of a pipe; ends where none comes for a while or the writer is gone."""
    rest = b""
    while True:
        if not select.select([fd], [], [], patience)[0]:
            return
        more = os.read(fd, 1 << 16)
        if not more:
            return
        *lines, rest = (rest + more).split(b"\n")
        yield from lines


def _watch(made: list[Sample], seeds: range, found: list[Failure], patience: float) -> int:
    """Let a worker go through copies; returns the first seed that it did not come to."""
    reading, writing = os.pipe()
    pid = forked(lambda: _go_through(made, seeds, writing))
    os.close(writing)
    seed, path, is_whole = seeds.start, "", False
    for line in _lines(reading, patience):
        if line == b"end":
            is_whole = True
            break
        seed, path, text = json.loads(line)
        if text:
            found.append(Failure(made[seed % len(made)].kind, seed, text))
    os.close(reading)
    code = ended(pid, patience if is_whole else 0.2)
    if is_whole:
        return seeds.stop
    for left in SHM_DIRECTORY.glob(f"{path}*") if path else ():
        left.unlink(missing_ok=True)
    what = "hang" if code is None else f"signal {-code}" if code < 0 else f"exit {code}"
    found.append(Failure(made[seed % len(made)].kind, seed, what))
    return seed + 1


def check_undamaged(sample: Sample) -> None:
    """Do everything in a whole copy, which compiles everything that workers then have.

    Raises:
        RuntimeError: Something was raised.
    """
    name = f"damage-{os.getpid()}"
    path = SHM_DIRECTORY / shm_name(name)[1:]
    path.write_bytes(sample.content)
    path.chmod(0o600)
    refused.clear()
    try:
        raised = work_in(name, sample.kind)
    finally:
        path.unlink(missing_ok=True)
    if raised or refused:
        raise RuntimeError(
            "\n".join([f"expected to work in whole segment {sample.kind!r}", *raised, *map(repr, refused)])
        )


def run(
    copies: int, seed: int = 0, *, patience: float = PATIENCE, progress: Callable[[int], None] | None = None
) -> list[Failure]:
    """Go through damaged copies; returns those that did harm.

    Args:
        copies: How many.
        seed: The first one's; each has the next.
        patience: Seconds before a copy counts as a hang.
        progress: Called with the copies done.

    Raises:
        RuntimeError: An undamaged copy is refused.
    """
    made = samples()
    found: list[Failure] = []
    for sample in made:
        check_undamaged(sample)
    at = seed
    while at < seed + copies:
        at = _watch(made, range(at, min(at + 200, seed + copies)), found, patience)
        if progress is not None:
            progress(at - seed)
    return found


def main() -> int:
    """Go through copies and print what did harm."""
    parser = argparse.ArgumentParser(prog="python -m conduit.testing.damage")
    parser.add_argument("--copies", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=PATIENCE)
    asked = parser.parse_args()
    begun = time.monotonic()
    found = run(
        asked.copies,
        asked.seed,
        patience=asked.patience,
        progress=lambda done: print(f"{done} copies, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True),
    )
    for failure in found:
        print(f"{failure.kind} {failure.seed}: {failure.what}")
    print(f"{len(found)} failures")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
