"""Kernels on a GPU: what can be shown without one, and the rows that need one.

Without a GPU: every kernel against its reference in Triton's interpreter, and the machine code that it becomes for three GPUs. Rows
that need a GPU are short until they have been run on one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from perf.bars import Bar, unmeasured

TITLE = "GPU kernels: equality and machine code, without a GPU"

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"gather": 32, "frames": 32, "n-step": 64, "GAE": 64, "priority: draw": 64}
"""Registers per thread, at most, by the beginning of a launch's name."""


def interpreted() -> Iterator[Bar]:
    """The interpreter suite."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu/interpret", "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        timeout=600,
        check=False,
    )
    took = time.perf_counter() - started
    counts = re.findall(r"\d+ (?:passed|failed|error|skipped)", done.stdout.splitlines()[-1] if done.stdout else "")
    yield Bar(
        "every kernel equals its reference in the interpreter",
        f"{', '.join(counts) or 'did not run'}, {took:.0f} s",
        "all pass",
        ok=done.returncode == 0,
        notes=() if done.returncode == 0 else tuple(done.stdout.splitlines()[-5:]),
    )


def compiled() -> Iterator[Bar]:
    """Machine code for sm_80, sm_90 and sm_100."""
    from tests.gpu.aot.catalogue import CASES
    from tests.gpu.aot.compiling import TARGETS, read
    from tests.gpu.aot.compiling import compiled as compile_for

    made = {case.name: [read(compile_for(case.launch, target)) for target in TARGETS] for case in CASES}
    every = [code for codes in made.values() for code in codes]
    spilled = sum(code.stack > 0 or code.local > 0 for code in every)
    kernels = f"{len(CASES)} launches x {len(TARGETS)} GPUs"
    yield Bar("stack and local memory", f"{spilled} of {kernels} use some", "0 bytes everywhere", ok=spilled == 0)
    for family, limit in LIMITS.items():
        most = max(code.registers for name, codes in made.items() if name.startswith(family) for code in codes)
        yield Bar(f"registers of {family}", f"at most {most}", f"<= {limit}", ok=most <= limit)
    wide = [case.name for case in CASES if case.wide]
    narrow = [name for name in wide for code in made[name] if 128 not in code.loads | code.stores]
    yield Bar(
        "128-bit loads or stores where rows are multiples of 16 bytes",
        f"{len(wide) - len(set(narrow))} of {len(wide)} launches",
        "all",
        ok=not narrow,
    )
    shared = [name for name, codes in made.items() if name.startswith("gather") and any(code.shared for code in codes)]
    yield Bar("shared memory in gathers", f"{len(shared)} use some", "none", ok=not shared)


def on_a_gpu() -> Iterator[Bar]:
    """Rows that need a CUDA device."""
    reason = "not run: needs a CUDA device"
    for name, bar in (
        ("Atari batch of 512 to bfloat16 from device memory, share of a copy", ">= 0.75"),
        ("the same, against torch eager indexing", ">= 3x"),
        ("the same from registered host memory, share of a host-to-device copy", ">= 0.80"),
        ("deduplicated frames from host memory, against stacked storage", ">= 1.5x"),
        ("prioritized draw and update of 4096, 2^20 rows, against torch cumsum and searchsorted", ">= 5x"),
        ("GAE 128 x 4096, against a torch loop", ">= 50x"),
        ("loader end to end: share of a training step that the learner waits", "< 3 %"),
    ):
        yield unmeasured(name, bar, reason)


GROUPS = (interpreted, compiled, on_a_gpu)
