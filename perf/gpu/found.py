"""The result of a measurement; standard library only, so that the parent process of perf/gpu_check.py can read it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Found:
    """One row of the table.

    Attributes:
        name: What was measured.
        device_us: Time on the device: of a CUDA graph of several launches where the work can be captured, divided by them.
        call_us: Time of a call, launch costs included, when many are made without waiting in between.
        bytes: Read and written, as counted by hand; 0 where no rate is of interest.
        rate: GB/s of these bytes.
        share: Of the rate of a device copy (or, for work that crosses the bus, of a copy from the host).
        launches: Kernels per call.
        others: {method: microseconds of a call}.
        note: Why something is missing.
    """

    name: str
    device_us: float | None = None
    call_us: float | None = None
    bytes: int = 0
    rate: float | None = None
    share: float | None = None
    launches: int | None = None
    others: dict[str, float] = field(default_factory=dict)
    note: str = ""
