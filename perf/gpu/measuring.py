"""Times on a device, and what a measurement found."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from conduit.kernels.gpu.launch import recorded
from perf.gpu.found import Found
from perf.gpu.running import Clock

Work = Callable[[], object]

_PER_GRAPH = 10


class OutOfTime(Exception):
    """The script's own deadline has passed."""


class Bench:
    """Measures on one device.

    Args:
        device: What torch calls it.
        interpret: Run everything once, for whether it runs; the times mean nothing.
        clock: The deadline.

    Attributes:
        copy_rate: GB/s read and written by a device copy.
        bus_rate: GB/s of a copy from pinned host memory.
    """

    def __init__(self, device: str, *, interpret: bool, clock: Clock) -> None:
        self.device = device
        self.interpret = interpret
        self.clock = clock
        self.copy_rate = self.bus_rate = 0.0
        self.found: list[Found] = []

    def check(self, needed: float = 0.0) -> None:
        """Refuse what would end after the deadline.

        Raises:
            OutOfTime: Fewer than `needed` seconds are left.
        """
        if self.clock.left < needed:
            raise OutOfTime

    def size(self, real: int, tiny: int) -> int:
        """A size of a workload."""
        return tiny if self.interpret else real

    def sync(self) -> None:
        """Wait for the device."""
        if not self.interpret:
            torch.cuda.synchronize()

    def call_us(self, work: Work, seconds: float = 0.3) -> float:
        """Microseconds of a call, many without waiting; the median of several rounds."""
        if self.interpret:
            begun = time.perf_counter()
            work()
            return 1e6 * (time.perf_counter() - begun)
        for _ in range(3):
            work()
        self.sync()
        begun = time.perf_counter()
        work()
        self.sync()
        once = max(time.perf_counter() - begun, 1e-6)
        count = int(min(max(seconds / 5 / once, 1), 300))
        rounds = []
        for _ in range(5):
            self.check()
            begun = time.perf_counter()
            for _ in range(count):
                work()
            self.sync()
            rounds.append((time.perf_counter() - begun) / count)
        return 1e6 * statistics.median(rounds)

    def device_us(self, work: Work) -> float | None:
        """Microseconds on the device, by events around launches of a graph; None where the work cannot be captured."""
        if self.interpret:
            return None
        try:
            beside = torch.cuda.Stream()
            with torch.cuda.stream(beside):
                work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(_PER_GRAPH):
                    work()
        except RuntimeError as error:
            print(f"  cannot be captured: {error}")
            torch.cuda.synchronize()
            return None
        rounds = []
        graph.replay()
        for _ in range(15):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            rounds.append(1e3 * begin.elapsed_time(end) / _PER_GRAPH)
        return statistics.median(rounds)

    def measure(
        self,
        name: str,
        work: Work,
        *,
        moved: int = 0,
        over_bus: bool = False,
        check: Callable[[], None] | None = None,
        others: dict[str, Work] | None = None,
        compiled: Callable[[], Any] | None = None,
        capture: bool = True,
    ) -> Found:
        """Measure one thing, after it was shown right.

        Args:
            name: What it is.
            work: One call.
            moved: Bytes that a call reads and writes.
            over_bus: Compare with copies from the host.
            check: Raises AssertionError when the work's result is wrong; called after one call.
            others: Other ways to do the same.
            compiled: torch's way as a function, for torch.compile.
            capture: Whether it can be captured in a graph.
        """
        self.check(5.0)
        print(f"  {name} ...", flush=True)
        with recorded() as launches:
            work()
        work()
        self.sync()
        if check is not None:
            check()
        found = Found(name, bytes=moved, launches=len(launches) or None)
        self.found.append(found)
        found.device_us = self.device_us(work) if capture else None
        found.call_us = self.call_us(work)
        for label, other in (others or {}).items():
            self.check()
            found.others[label] = self.call_us(other)
        if compiled is not None:
            self._compile(found, compiled)
        best = found.device_us or found.call_us
        if moved and best:
            found.rate = moved / best / 1e3
            against = self.bus_rate if over_bus else self.copy_rate
            found.share = found.rate / against if against else None
        return found

    def _compile(self, found: Found, function: Callable[[], Any]) -> None:
        if self.interpret:
            found.others["torch.compile"] = self.call_us(function)
            found.note = "not compiled in the interpreter"
            return
        if self.clock.left < 45:
            found.note = "no time left for torch.compile"
            return
        try:
            found.others["torch.compile"] = self.call_us(torch.compile(function))
        except OutOfTime:
            raise
        except Exception as error:  # noqa: BLE001 - a compiler on a machine that is not known may fail in any way
            found.note = f"torch.compile failed: {type(error).__name__}"

    def rates(self) -> None:
        """Measure copies: on the device, and from pinned memory."""
        size = self.size(1 << 30, 1 << 12)
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        found = self.measure("device copy", lambda: target.copy_(source), moved=2 * size)
        assert torch.equal(source, target)
        self.copy_rate, found.share = found.rate or 0.0, 1.0
        size = self.size(1 << 28, 1 << 12)
        host = torch.randint(0, 256, (size,), dtype=torch.uint8)
        host = host if self.interpret else host.pin_memory()
        target = torch.zeros(size, dtype=torch.uint8, device=self.device)
        found = self.measure("copy from pinned host memory", lambda: target.copy_(host, non_blocking=True), moved=size)
        assert torch.equal(target.cpu(), host)
        self.bus_rate, found.share = found.rate or 0.0, 1.0


def close(have: torch.Tensor, want: torch.Tensor, name: str = "") -> None:
    """Check two results; bfloat16 and float16 to a unit in the last place, since the interpreter truncates."""
    loose = have.dtype in (torch.bfloat16, torch.float16)
    torch.testing.assert_close(
        have.float(),
        want.to(have.device).float(),
        rtol=1e-2 if loose else 1e-5,
        atol=1e-5,
        msg=lambda text: f"{name}: {text}",
    )
