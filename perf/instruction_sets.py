"""The rows that processors without AVX-512 were slower in, compiled for two instruction sets and measured by turns.

`python -m perf.instruction_sets` prints each row's speed at x86-64-v3 over that at x86-64-v4; `--sets` names others. Each set has a
process of its own (perf.sides), in which numba compiles for it, and each row is a ratio over plain work of numpy or memcpy in that
process, which are built as they are: so what is left of two ratios is Conduit's. Hand-overs are times. `--parts` says what
the rows are made of here: the call from Python, the compiled delivery, and in it the draw.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conduit.kernels.cpu import job as cpu
from conduit.native.jit import entry, kernel
from conduit.native.memory import call_5, peek_i64, poke_i64
from conduit.plane.deliver import fill
from perf import gate, subjects
from perf.bars import Bar, at_least, unmeasured
from perf.bars.tables import hand_over_times
from perf.baselines import StepRing
from perf.gate import HotPath, least, loader_of, taking
from perf.measure import Spread
from perf.peers.cases import HUMANOID
from perf.ragged import packing
from perf.sides import Side, by_turns
from perf.workloads import CARTPOLE, SLAB_28KB

conduit = subjects.conduit

SETS = ("x86-64-v3", "x86-64-v4")
"""What is compared, the narrower one first: LLVM's names."""
NEEDS: Mapping[str, tuple[str, ...]] = {
    "x86-64-v2": ("sse4_2", "popcnt"),
    "x86-64-v3": ("avx2", "bmi2", "fma"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
"""Flags of /proc/cpuinfo without which a set's code does not run."""
BAR = 0.85
ROUNDS = 5
_TRANSITION = ("obs", "next_obs", "action", "reward", "terminated", "truncated")
_STEPS = conduit.Transition(n_step=5, gamma=0.99)


def _small(stack: contextlib.ExitStack) -> Any:
    return loader_of(stack, CARTPOLE, 256, format="torch")


def _several_steps(stack: contextlib.ExitStack) -> Any:
    fields = ["obs", "action", "reward", "next_obs", "terminated", "discount"]
    return loader_of(stack, CARTPOLE, 256, table={"max_n_step": 5}, window=_STEPS, fields=fields)


def _prioritized(stack: contextlib.ExitStack) -> Any:
    table = {"priorities": conduit.Priorities(alpha=0.6, eps=1e-6)}
    return loader_of(stack, CARTPOLE, 256, table=table, sampling=conduit.Prioritized())


def _humanoid(stack: contextlib.ExitStack) -> Any:
    return loader_of(stack, HUMANOID, 256, format="torch", transform={"obs": conduit.cast("float32")})


LOADERS: Mapping[str, Callable[[contextlib.ExitStack], Any]] = {
    "batch of 256 small rows": _small,
    "prioritized sample of 256": _prioritized,
    "n-step(5) alone, 256": _several_steps,
    "batch of 256, 376 float64 to float32": _humanoid,
}


def _small_batch(stack: contextlib.ExitStack) -> HotPath:
    loader = _small(stack)

    def run() -> None:
        for _ in range(16):
            batch = loader.next()
            _ = [batch[name] for name in _TRANSITION]

    return HotPath(run, taking(CARTPOLE, 256, 16, scale=False))


def _n_step(stack: contextlib.ExitStack) -> HotPath:
    rng = np.random.default_rng(4)
    small = CARTPOLE.sized(1 << 17)
    client, _ = stack.enter_context(subjects.engine(small))
    log = subjects.fill(stack.enter_context(subjects.filler(client, small)), small, rng, rows=small.rows * 15 // 16)
    ring = StepRing(small, log, _STEPS.n_step, _STEPS.gamma)
    loader = _several_steps(stack)

    def run() -> None:
        for _ in range(16):
            loader.next()

    def plain() -> None:
        for _ in range(4):
            ring.sample(rng)

    return HotPath(run, plain)


def _packed(stack: contextlib.ExitStack) -> HotPath:
    batch, copy, _ = packing(stack, 4096)
    return HotPath(lambda: [batch.run() for _ in range(4)], lambda: [copy.run() for _ in range(4)])


def _doubles(stack: contextlib.ExitStack) -> HotPath:
    loader = _humanoid(stack)

    def run() -> None:
        for _ in range(4):
            loader.next()

    return HotPath(run, taking(HUMANOID, 256, 2, scale=False))


def _pixel_steps(stack: contextlib.ExitStack) -> HotPath:
    path = gate.writing(SLAB_28KB, 8, 1 << 11)(stack)
    for _ in range(8):
        path.run()  # once round the table: memory is slow when it is touched first
    return path


def _hand_over(way: str) -> float:
    times, _, _ = hand_over_times(80)
    return float(np.median(times[way])) / 1e3


PATHS: Mapping[str, gate.Build] = {
    "batch of 256 small rows": _small_batch,
    "prioritized sample of 256": functools.partial(gate.prioritized_sample, rows=CARTPOLE.rows),
    "update of 256 priorities": functools.partial(gate.prioritized_update, rows=CARTPOLE.rows),
    "n-step(5) alone, 256": _n_step,
    "packed batch of 64 ragged rows": _packed,
    "batch of 256, 376 float64 to float32": _doubles,
    "64 pixel steps a call": _pixel_steps,
}
FIGURES: Mapping[str, Callable[[], float]] = {
    **{name: functools.partial(least, build) for name, build in PATHS.items()},
    "hand-over of a 128 x 64 rollout, polled": functools.partial(_hand_over, "polled"),
    "hand-over of a 128 x 64 rollout, slept": functools.partial(_hand_over, "slept"),
}
"""For perf.sides."""


def lacking(name: str) -> str | None:
    """Why code for a set does not run on this processor; None if it does."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    missing = [flag for flag in NEEDS[name] if flag not in flags]
    return f"this processor does not run {name}: it has no {', '.join(missing)}" if missing else None


def compared(
    sets: tuple[str, str] = SETS, rounds: int = ROUNDS
) -> Iterator[tuple[str, dict[str, np.ndarray[Any, Any]]]]:
    """Each row with its costs by set, one for each round.

    Raises:
        LookupError: A set's code does not run here.
    """
    for name in sets:
        reason = lacking(name)
        if reason is not None:
            raise LookupError(reason)
    with contextlib.ExitStack() as stack:
        # compiled here, and with no features by name: those of the set
        plain = {"CONDUIT_KERNELS": "compile", "NUMBA_CPU_FEATURES": ""}
        held = {name: plain | {"NUMBA_CPU_NAME": name} for name in sets}
        sides = {name: stack.enter_context(Side(__spec__.name, environment=held[name])) for name in sets}
        yield from by_turns(sides, iter(FIGURES), rounds)


def rows(sets: tuple[str, str] = SETS, rounds: int = ROUNDS) -> Iterator[Bar]:
    """Each row at the narrower set: its speed over that at the wider one."""
    narrow, wide = sets
    try:
        for name, found in compared(sets, rounds):
            share = Spread.of(found[wide] / found[narrow])
            costs = ", ".join(f"{one} {np.median(values):.3g}" for one, values in found.items())
            unit = "us" if name.startswith("hand-over") else "of plain work in the same process"
            yield at_least(f"{name}, at {narrow}", share, BAR, f" of its speed at {wide}", f"costs, {unit}: {costs}")
    except LookupError as error:
        yield unmeasured(f"the rows above at {narrow}", f">= {BAR}x of their speed at {wide}", str(error))


@kernel("int64(int64)", nogil=True)
def _draw(job):  # type: ignore[no-untyped-def]
    """The draws of a delivery, and nothing else of it."""
    slots, batch, step = peek_i64(job + cpu.JOB_SLOTS), peek_i64(job + cpu.JOB_BATCH), peek_i64(job + cpu.JOB_BLOCK)
    for start in range(0, batch, step):
        count = min(step, batch - start)
        for i in range(count):
            poke_i64(slots + 8 * i, start + i)
        call_5(peek_i64(job + cpu.JOB_DRAW), peek_i64(job + cpu.JOB_DRAW_STATE), job, slots, count, 0)
    return batch


def parts(name: str, seconds: float = 2.0) -> dict[str, float]:
    """Microseconds of a loader's row: `next`, the compiled delivery in it, and the draws in that; of the fastest bursts."""
    with contextlib.ExitStack() as stack:
        loader = LOADERS[name](stack)
        job = loader._ring.buffers[0].job_address
        deliver = entry(fill.fill)

        def delivered(call: Callable[[int], object]) -> Callable[[], None]:
            def run() -> None:
                loader.sampler.batch += 1  # other rows each time
                call(job)

            return run

        ways: dict[str, Callable[[], object]] = {
            "next": loader.next,
            "delivery": delivered(deliver),
            "draw": delivered(entry(_draw)),
        }
        found = dict.fromkeys(ways, float("inf"))
        for way in ways.values():
            way()  # compiled by then
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for one, run in ways.items():
                begun = time.perf_counter()
                for _ in range(8):
                    run()
                found[one] = min(found[one], (time.perf_counter() - begun) / 8 * 1e6)
        return found


def main(arguments: list[str] | None = None) -> int:
    """Prints the rows; 1 if one is short."""
    parser = argparse.ArgumentParser(prog="python -m perf.instruction_sets", description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs=2, default=SETS, choices=tuple(NEEDS), metavar=("NARROW", "WIDE"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--parts", action="store_true", help="what the loaders' rows are made of, as they are compiled here"
    )
    asked = parser.parse_args(arguments)
    if asked.parts:
        for name in LOADERS:
            took = parts(name)
            print(
                f"{name}: {took['next']:.1f} us, Python {took['next'] - took['delivery']:.1f}, draw {took['draw']:.1f}, "
                f"gather and checks {took['delivery'] - took['draw']:.1f}"
            )
        return 0
    short = 0
    for bar in rows(tuple(asked.sets), asked.rounds):
        print(bar, flush=True)
        short += not bar.ok
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
