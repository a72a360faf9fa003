"""Machine code of every kernel for three GPUs that need not be there: registers, stack, shared memory, widths of memory accesses.

Run as `python -m pytest tests/gpu/aot`. The tables in docs/kernels.md are written with CONDUIT_WRITE_TABLES=1, by the release of
Triton that constraints.txt pins; another release may use a register more or less, and is held to the bounds alone.
"""

import functools
import os
import re
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from conduit.kernels import gpu
from tests.gpu.aot.catalogue import CASES
from tests.gpu.aot.compiling import TARGETS, compiled, read

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- written by tests/gpu/aot -->\n", "<!-- end -->"


@functools.cache
def code(case, target):
    launch = next(one for one in CASES if one.name == case).launch
    return read(compiled(launch, target))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"sm_{target}")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_keeps_to_its_bounds(case, target):
    made = code(case.name, target)
    assert made.stack == made.local == 0
    assert made.registers <= case.registers
    assert case.shared or made.shared == 0
    if case.wide:
        assert made.loads.get(128, 0) + made.stores.get(128, 0) > 0


def test_every_kernel_that_is_launched_is_in_the_catalogue():
    launched = {case.launch.kernel.__name__ for case in CASES}
    sources = [path.read_text() for path in Path(gpu.__file__).parent.glob("*.py")]
    assert launched == {name for text in sources for name in re.findall(r"\blaunch\(\s*(_\w+),", text)}


class AbsentGpu:
    """What Triton's launcher asks a driver for before it compiles."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_launcher_takes_the_same_arguments_and_compiles_the_same(case):
    launch = case.launch
    # for the rest of this process: there is no driver to go back to
    driver.set_active(AbsentGpu())
    made = launch.kernel.run(*launch.args, grid=(launch.grid,), warmup=True, **launch.meta, **launch.options)
    assert made.asm["ptx"] == compiled(launch, 90).asm["ptx"]


def _widths(found):
    return ", ".join(f"{count} x {bits}" for bits, count in reversed(found.items())) or "-"


def table():
    lines = [
        f"With Triton {triton.__version__}; loads and stores in bits, of sm_90.",
        "",
        "| launch | warps | registers, sm_80 / 90 / 100 | at most | shared | loads | stores |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in CASES:
        each = [code(case.name, target) for target in TARGETS]
        registers = " / ".join(str(made.registers) for made in each)
        made = each[1]
        lines.append(
            f"| {case.name} | {case.launch.options['num_warps']} | {registers} | {case.registers} | {made.shared} | "
            f"{_widths(made.loads)} | {_widths(made.stores)} |"
        )
    return "\n".join(lines) + "\n"


def test_the_documented_tables_are_those_of_this_code():
    pinned = re.search(r"^triton==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    if triton.__version__ != pinned:
        pytest.skip(f"the tables are those of Triton {pinned}, this is {triton.__version__}")
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    new = before + BEGIN + table() + END + after
    if os.environ.get("CONDUIT_WRITE_TABLES") == "1":
        PAGE.write_text(new)
    assert PAGE.read_text() == new, "write them with CONDUIT_WRITE_TABLES=1 python -m pytest tests/gpu/aot"
