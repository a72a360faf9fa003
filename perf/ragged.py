"""A packed batch of ragged rows against a memcpy of the bytes that it delivers."""

from __future__ import annotations

import contextlib
import ctypes
import os
from itertools import count, cycle, pairwise

import numpy as np

import conduit
from perf.measure import Method, Spread, compare, ratio_text, time_text
from perf.rooflines import memcpy

LONGEST, SHORTEST, BATCH = 4000, 200, 64
_BUFFERS = 3
_numbers = count()


def packing(stack: contextlib.ExitStack, rows: int = 8192) -> tuple[Method, Method, int]:
    """Packed batches of 64 int32 rows of 200 to 4,000 tokens, as torch tensors, and a memcpy of their bytes.

    Their bytes are the values, `cu_seqlens` and `position_ids`. The memcpy reads as many bytes in one piece from random places of
    the same table (which is larger than any cache) and writes to as many buffers in turn as the loader has.

    Args:
        stack: Closes the engine.
        rows: Rows of the table.

    Returns:
        A batch, the memcpy, and its bytes.
    """
    schema = conduit.Schema(
        [conduit.Field("tokens", "int32", (LONGEST,), ragged=True), conduit.Field("reward", "float32")]
    )
    table = conduit.Table(schema, capacity=rows, mean_lengths={"tokens": (SHORTEST + LONGEST) / 2})
    rng = np.random.default_rng(0)
    name = f"perf-ragged-{os.getpid()}-{next(_numbers)}"
    engine = stack.enter_context(conduit.Engine.create(name, {"replay": table}))
    with engine.writer("replay") as writer:
        for length in rng.integers(SHORTEST, LONGEST + 1, rows):
            first = rng.integers(0, 1 << 20)
            writer.append(tokens=np.arange(first, first + length, dtype=np.int32), reward=np.float32(0))
    # responses have no next observation: what is wanted of them is listed
    outputs = ("tokens", "reward", "terminated", "truncated")
    loader = stack.enter_context(
        engine.loader("replay", batch_size=BATCH, ragged="pack", buffers=_BUFFERS, fields=outputs)
    )
    for _ in range(20):
        _check(loader.next())
    held: list[conduit.Batch | None] = [None]
    stack.callback(held.clear)

    def batch() -> None:
        held[0] = loader.next()

    size = int(np.mean([sum(loader.next()[name].nbytes for name in _PARTS) for _ in range(200)]))
    return Method("packed batch", batch), _memcpy_from(engine._views["replay"].arenas["tokens"], size), size


def packed_batch_ratio(seconds: float = 8.0) -> tuple[float, str]:
    """Time of a packed batch over that of a memcpy of its bytes (`packing`).

    The text also tells of a memcpy that repeats one copy, whose source is in the cache. All run interleaved, burst by burst.

    Args:
        seconds: Cap of the measurement.

    Returns:
        The median ratio, and its spread with both times as text.
    """
    with contextlib.ExitStack() as stack:
        batch, copy, size = packing(stack)
        result = compare(
            [batch, copy, memcpy(size, "repeated memcpy")],
            clock="thread",
            seconds=seconds,
            precision=0.005,
            least_rounds=200,
        )
    ratio, cached = (
        Spread.of(result.costs["packed batch"] / result.costs[name]) for name in ("memcpy", "repeated memcpy")
    )
    return ratio.median, (
        f"{ratio_text(ratio)}; batch {time_text(result.cost('packed batch'))}, memcpy of {size / 1e6:.2f} MB "
        f"{time_text(result.cost('memcpy'))}; {ratio_text(cached)} of a memcpy that finds its source in the cache"
    )


def _memcpy_from(arenas: np.ndarray, size: int) -> Method:
    """A memcpy of `size` bytes from a random place of the values in a random page that has been filled."""
    targets = [np.zeros(size, np.uint8) for _ in range(_BUFFERS)]
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    copy.restype = ctypes.c_void_p
    rng = np.random.default_rng(1)
    ends = {page: int(np.flatnonzero(arena)[-1]) for page, arena in enumerate(arenas) if arena.any()}
    filled = [page for page, end in ends.items() if end > size // 4]
    arguments = cycle(
        [
            (
                targets[i % _BUFFERS].ctypes.data,
                arenas[page].ctypes.data + 4 * int(share * (ends[page] - size // 4)),
                size,
            )
            for i, (page, share) in enumerate(zip(rng.choice(filled, 999).tolist(), rng.random(999), strict=True))
        ]
    )

    def run(_keep: object = (arenas, targets)) -> None:
        copy(*next(arguments))

    run()
    if not targets[0].any():
        raise AssertionError("memcpy did not copy")
    return Method("memcpy", run)


_PARTS = ("tokens", "tokens_cu_seqlens", "tokens_position_ids")


def _check(batch: conduit.Batch) -> None:
    """Raise unless every row counts up by one from its first token, in its place."""
    tokens, starts, places = (batch[name].numpy() for name in _PARTS)
    if not SHORTEST * BATCH <= len(tokens) == starts[-1] == len(places):
        raise AssertionError("the batch's parts do not fit each other")
    for start, end in pairwise(starts):
        places_in = np.arange(end - start)
        counts = np.array_equal(tokens[start:end] - tokens[start], places_in)
        if not (counts and np.array_equal(places[start:end], places_in)):
            raise AssertionError("a row is not what was written")


if __name__ == "__main__":
    print(packed_batch_ratio()[1])
