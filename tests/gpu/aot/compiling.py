"""Compiles what a wrapper would launch, for a GPU that is not there, and reads the machine code.

A launch is recorded with CPU tensors and specialised as Triton's launcher does it: pointers and integers that are multiples of
16 say so, 1 and None are constants. ptxas, cuobjdump and nvdisasm come with the triton wheel.
"""

import collections
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = (80, 90, 100)
_POINTERS = {
    "torch.uint8": "*u8",
    "torch.int8": "*i8",
    "torch.int32": "*i32",
    "torch.uint32": "*u32",
    "torch.int64": "*i64",
    "torch.float16": "*fp16",
    "torch.bfloat16": "*bf16",
    "torch.float32": "*fp32",
    "torch.float64": "*fp64",
}
_DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Code:
    """What a kernel became on one target.

    Attributes:
        registers: Per thread.
        stack, local: Bytes per thread.
        shared: Bytes per program.
        loads, stores: {bits: instructions} from and to global memory.
    """

    registers: int
    stack: int
    local: int
    shared: int
    loads: dict[int, int]
    stores: dict[int, int]


def _specialise(value, place, special, constants, attributes):
    """The type of an argument in a signature; its constants and hints are noted under its place."""
    if isinstance(value, tuple):
        return tuple(_specialise(one, (*place, i), special, constants, attributes) for i, one in enumerate(value))
    if hasattr(value, "data_ptr"):
        if value.data_ptr() % 16 == 0:
            attributes[place] = _DIVISIBLE
        return _POINTERS[str(value.dtype)]
    if isinstance(value, float):
        return "fp32"
    if value is None or (special and value == 1):
        constants[place] = value
        return "constexpr"
    if special and value % 16 == 0:
        attributes[place] = _DIVISIBLE
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compiled(launch, target):
    """Compile a recorded launch for compute capability `target`; Triton's kernel object."""
    signature, constants, attributes = {}, {}, {}
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.meta
    assert sorted(values) == sorted(launch.kernel.arg_names), "a launch gives every argument"
    for i, parameter in enumerate(launch.kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            constants[(i,)] = value
            signature[parameter.name] = "constexpr"
        else:
            special = not parameter.do_not_specialize
            signature[parameter.name] = _specialise(value, (i,), special, constants, attributes)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=launch.options)


def _tool(name, *arguments):
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def _widths(sass, instruction):
    found = collections.Counter()
    for suffixes in re.findall(rf"\b{instruction}((?:\.\w+)*)", sass):
        bits = re.search(r"\.(64|128|256)\b", suffixes)
        small = re.search(r"\.[US](8|16)\b", suffixes)
        found[int(bits[1]) if bits else int(small[1]) if small else 32] += 1
    return dict(sorted(found.items()))


def read(kernel):
    """The figures of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = _tool("cuobjdump", "-res-usage", cubin.name)
        sass = _tool("nvdisasm", cubin.name)
    registers, stack, static, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage).groups()
    )
    assert not re.search(r"\b(LDL|STL)\b", sass)
    shared = max(static, kernel.metadata.shared, 1 if re.search(r"\b(LDS|STS)\b", sass) else 0)
    return Code(registers, stack, local, shared, _widths(sass, "LDG"), _widths(sass, "STG"))
