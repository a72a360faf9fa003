"""The emitted instructions are the machine's atomic ones, and two processes that use them lose nothing."""

import os
import platform
import re
import subprocess
import sys
from mmap import mmap

import numba
import numpy as np
import pytest

from conduit.native import memory as atomics
from conduit.native.jit import inner
from conduit.native.memory import (
    compare_and_swap,
    copy_bytes,
    exchange,
    fence_acquire,
    fence_full,
    fetch_add,
    load_acquire,
    load_relaxed,
    peek_f64,
    peek_i32,
    peek_i64,
    peek_u8,
    peek_u32,
    poke_f32,
    poke_f64,
    poke_i64,
    poke_u8,
    poke_u16,
    poke_u32,
    store_relaxed,
    store_release,
    zero_bytes,
)
from conduit.store.format import words as w
from conduit.store.pages import protocol, recovery

X86 = platform.machine() == "x86_64"
ARM = platform.machine() == "aarch64"
known_machine = pytest.mark.skipif(
    not (X86 or ARM), reason=f"the instructions of {platform.machine()} are not known here"
)

INSTRUCTIONS = {
    # operation: (signature, x86-64, aarch64)
    "compare_and_swap": ("int64(int64, int64, int64)", r"lock\s+cmpxchgq", r"casal|ldaxr"),
    "fetch_add": ("int64(int64, int64)", r"lock\s+(xadd|add|inc)q", r"(ld|st)add\w*|ldaxr"),
    "exchange": ("int64(int64, int64)", r"xchgq\s+%\w+, \d*\(%\w+\)", r"swpal|ldaxr"),
    "fence_full": ("int64()", r"mfence|lock\s+or", r"dmb\s+ish\b"),
    "load_acquire": ("int64(int64)", r"movq\s+\(%\w+\), %\w+", r"ldar|ldapr"),
    "store_release": ("int64(int64, int64)", r"movq\s+%\w+, \(%\w+\)", r"stlr"),
}
"""What each operation must come down to. On x86-64 any load acquires and any store releases."""


def assembly(function, signature: str) -> str:
    """The machine code of a function alone, without the wrappers that Python calls."""
    compiled = numba.njit(signature)(function)
    (text,) = compiled.inspect_asm().values()
    name = compiled.overloads[compiled.signatures[0]].fndesc.llvm_func_name
    return re.split(rf"^{re.escape(name)}:$", text, flags=re.MULTILINE)[1].split(".size")[0].split(".Lfunc_end")[0]


@known_machine
@pytest.mark.parametrize("operation", INSTRUCTIONS)
def test_each_atomic_operation_is_the_machines_own_instruction(operation):
    signature, x86, arm = INSTRUCTIONS[operation]
    arguments = ", ".join("abc"[: signature.count("int64") - 1])
    scope = {"operation": getattr(atomics, operation)}
    returns = "return " if operation not in {"fence_full", "store_release"} else ""
    exec(f"def use({arguments}):\n    {returns}operation({arguments})\n    return 0", scope)
    assert re.search(x86 if X86 else arm, assembly(scope["use"], signature))


@pytest.mark.skipif(not X86, reason="on x86-64 an acquire fence only holds the compiler back")
def test_an_acquire_fence_costs_nothing_and_keeps_the_compiler_from_moving_loads():
    def twice(address):
        first = peek_i64(address)
        fence_acquire()
        return first + peek_i64(address)

    def once(address):
        return peek_i64(address) + peek_i64(address)

    loads = r"(?:movq|addq)\s+\(%\w+\), %\w+"
    assert len(re.findall(loads, assembly(twice, "int64(int64)"))) == 2
    assert len(re.findall(loads, assembly(once, "int64(int64)"))) == 1
    assert not re.search(r"mfence|lock", assembly(twice, "int64(int64)"))


@known_machine
@pytest.mark.parametrize(
    ("kernel", "arity", "atomic"),
    [
        (protocol.claim, 3, ["compare_and_swap", "fence_full"]),
        (protocol._add_up, 3, ["fence_full", "fetch_add"]),
        (protocol.lease, 4, ["fence_full"]),
        (protocol.seal, 3, ["fetch_add", "exchange"]),
        (recovery.recover, 2, ["compare_and_swap"]),
    ],
    ids=["claim", "what a claim adds up", "lease", "seal", "recover"],
)
def test_the_protocols_kernels_hold_the_atomic_instructions_they_rest_on(kernel, arity, atomic):
    text = assembly(kernel.function, f"({', '.join(['int64'] * arity)})")
    for operation in atomic:
        assert re.search(INSTRUCTIONS[operation][1 if X86 else 2], text), operation


# -- meaning


@pytest.fixture
def words() -> np.ndarray:
    return np.array([5, 7, -1, 0], np.int64)


@numba.njit("int64(int64, int64, int64)")
def swap(address, expected, new):
    return compare_and_swap(address, expected, new)


@numba.njit("int64(int64, int64)")
def add(address, value):
    return fetch_add(address, value)


@numba.njit("int64(int64, int64)")
def put(address, value):
    return exchange(address, value)


def test_compare_and_swap_returns_what_it_found_and_stores_only_on_a_match(words):
    at = words.ctypes.data
    assert swap(at, 4, 9) == 5
    assert words[0] == 5
    assert swap(at, 5, 9) == 5
    assert words[0] == 9
    assert swap(at + 16, -1, -(2**63)) == -1
    assert words.tolist() == [9, 7, -(2**63), 0]


def test_fetch_add_and_exchange_return_the_word_before(words):
    at = words.ctypes.data
    assert (add(at + 8, -10), words[1]) == (7, -3)
    assert (put(at + 24, 2**62), words[3]) == (0, 2**62)
    assert words[[0, 2]].tolist() == [5, -1]


def test_loads_and_stores_touch_exactly_their_bytes():
    @numba.njit("int64(int64)")
    def exercise(at):
        store_relaxed(at, -1)
        store_release(at + 8, load_relaxed(at) - 1)
        poke_u8(at + 16, 0x1FF)
        poke_u16(at + 18, 0x12345)
        poke_u32(at + 20, -1)
        poke_i64(at + 24, peek_i32(at + 20))
        poke_f64(at + 32, 0.1)
        poke_f32(at + 40, 0.1)
        copy_bytes(at + 48, at + 32, 7)
        zero_bytes(at + 56, 3)
        fence_full()
        return load_acquire(at + 8) + peek_u8(at + 16) + peek_u32(at + 20)

    memory = np.full(64, 0xAA, np.uint8)
    assert exercise(memory.ctypes.data) == -2 + 0xFF + 0xFFFFFFFF
    expected = np.full(64, 0xAA, np.uint8)
    expected[0:16].view(np.int64)[:] = -1, -2
    expected[16] = 0xFF
    expected[18:20].view(np.uint16)[0] = 0x2345
    expected[20:32] = 0xFF
    expected[32:40].view(np.float64)[0] = 0.1
    expected[40:44].view(np.float32)[0] = 0.1
    expected[48:55] = expected[32:39]
    expected[56:59] = 0
    assert memory.tolist() == expected.tolist()


def test_a_double_is_read_as_it_lies():
    @numba.njit("float64(int64)")
    def read(at):
        return peek_f64(at)

    values = np.array([0.1, -np.inf, 5e-324])
    assert [read(values.ctypes.data + 8 * i) for i in range(3)] == values.tolist()


# -- two processes

ROUNDS = 400_000
MOST_RACES = 200


@inner
def add_plainly(at):
    """The control: a load, a while, a store."""
    seen = load_relaxed(at)
    for _ in range(20):  # long enough that the machine does not make one instruction of the three
        seen += load_relaxed(at + 8)
    store_relaxed(at, seen + 1)


@numba.njit("int64(int64, int64)", nogil=True)
def add_atomically(at, rounds):
    for _ in range(rounds):
        fetch_add(at, 1)
        add_plainly(at + w.LINE)
    return 0


@numba.njit("int64(int64, int64)", nogil=True)
def add_by_swapping(at, rounds):
    for _ in range(rounds):
        seen = load_relaxed(at)
        while True:
            found = compare_and_swap(at, seen, seen + 1)
            if found == seen:
                break
            seen = found
        add_plainly(at + w.LINE)
    return 0


def race(work, words: np.ndarray) -> None:
    """Run `work` in two processes that begin together; the third line of `words` counts them in."""
    address, start = words.ctypes.data, words[2 * w.LINE // 8 :]
    start[0] = 0
    pid = os.fork()
    add(start.ctypes.data, 1)
    while start[0] < 2:
        pass
    work(address, ROUNDS)
    if pid == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("work", [add_atomically, add_by_swapping], ids=["fetch_add", "compare_and_swap"])
def test_two_processes_lose_nothing_where_plain_increments_are_lost(work):
    words = np.frombuffer(mmap(-1, 4096), np.int64)
    for races in range(1, MOST_RACES + 1):
        race(work, words)
        assert words[0] == 2 * ROUNDS * races
        if words[w.LINE // 8] < 2 * ROUNDS * races:
            return
    pytest.skip(f"two processes never ran at the same time in {MOST_RACES} races")


def test_importing_the_atomics_imports_no_compiler():
    script = "import sys; import conduit.store.pages.protocol; assert not {'numba', 'llvmlite'} & set(sys.modules); print('ok')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("ok\n", "")
