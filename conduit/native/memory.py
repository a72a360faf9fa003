"""What kernels do to memory by its address: plain and atomic loads and stores, copies, and waiting for a word to change.

Every function takes addresses as int64. A Python object is handed to a kernel as its address and nothing more (`address_of`, `data_of`):
an address as a Python int costs 13 ns to convert. A kernel must not create, change or release the object; the caller keeps it alive.

The atomic ones lower to LLVM atomics of the stated order and so to the right
instruction of the machine: on x86-64 an acquire load or a release store is a plain `mov`, compare-and-swap is `lock
cmpxchg`; on aarch64 they are `ldar`, `stlr`, `casal` or an exclusive loop. docs/memory-model.md says where each one is
used and why its order is enough.

Large copies go past the caches (`copy_rows`). A store that misses the caches first reads the line that it is about to overwrite. A tick
of many environments with large observations is larger than the caches that the writer shares with a learner, and is read much later:
it is stored past them, which saves that reading.

Processes wait by eventcounts, without asking again and again, and without missing a change. An event is two words: a count that every
change raises (`wake`), and a flag that says that somebody may be asleep (`announce`, `wait`). Who changes something makes no system call
while nobody waits; docs/memory-model.md has the argument.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from conduit.native.jit import External, cgutils, inner, intrinsic, ir, kernel, types

CACHE_LINE = 64
"""Bytes."""
STREAM_FROM = 128 << 10
"""Bytes of a piece that is stored past the caches."""
_AHEAD = 4096
ARRAY_DATA = 16
"""Offset of the data pointer in an array (numpy's public `PyArrayObject_fields`)."""
_WAIT, _WAKE = 0, 1
_ALL = 1 << 30


def _pointer(builder: Any, address: Any, bits: int = 64) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


def _pointer_to(builder: Any, address: Any, type_: Any) -> Any:
    return builder.inttoptr(address, type_.as_pointer())


def _atomic_load(order: str) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load_atomic(_pointer(builder, args[0]), order, 8)

        return types.int64(types.int64), codegen

    return load


def _atomic_store(order: str) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store_atomic(args[1], _pointer(builder, args[0]), order, 8)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store


def _read_modify_write(operation: str, bits: int = 64) -> Any:
    @intrinsic
    def modify(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = args[1] if bits == 64 else builder.trunc(args[1], ir.IntType(bits))
            before = builder.atomic_rmw(operation, _pointer(builder, args[0], bits), value, "acq_rel")
            return before if bits == 64 else builder.zext(before, ir.IntType(64))

        return types.int64(types.int64, types.int64), codegen

    return modify


def _fence(order: str) -> Any:
    @intrinsic
    def fence(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.fence(order)
            return context.get_dummy_value()

        return types.void(), codegen

    return fence


load_relaxed = _atomic_load("monotonic")
load_acquire = _atomic_load("acquire")
store_relaxed = _atomic_store("monotonic")
store_release = _atomic_store("release")
fetch_add = _read_modify_write("add")
fetch_add_u32 = _read_modify_write("add", 32)
exchange = _read_modify_write("xchg")
fence_acquire = _fence("acquire")
fence_release = _fence("release")
fence_full = _fence("seq_cst")


@intrinsic
def compare_and_swap(typingctx: Any, address: Any, expected: Any, new: Any) -> Any:
    """Strong compare-and-swap (acquire-release); returns the word found there: success means it equals `expected`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        result = builder.cmpxchg(_pointer(builder, args[0]), args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(result, 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


def _peek(bits: int, signed: bool = False) -> Any:
    """Plain load of an integer, widened to int64."""

    @intrinsic
    def peek(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(_pointer(builder, args[0], bits))
            if bits == 64:
                return value
            return builder.sext(value, ir.IntType(64)) if signed else builder.zext(value, ir.IntType(64))

        return types.int64(types.int64), codegen

    return peek


def _poke(bits: int) -> Any:
    """Plain store of the low bits of an int64."""

    @intrinsic
    def poke(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = args[1] if bits == 64 else builder.trunc(args[1], ir.IntType(bits))
            builder.store(value, _pointer(builder, args[0], bits))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return poke


peek_u8, poke_u8 = _peek(8), _poke(8)
peek_i32 = _peek(32, signed=True)
peek_u32, poke_u32 = _peek(32), _poke(32)
peek_i64, poke_i64 = _peek(64), _poke(64)
poke_u16 = _poke(16)


@intrinsic
def words_at(typingctx: Any, address: Any) -> Any:
    """int64 at an address, to be indexed: loops over such pointers become vector ones, loops over addresses do not."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _pointer(builder, args[0])

    return types.CPointer(types.int64)(types.int64), codegen


@intrinsic
def peek_f64(typingctx: Any, address: Any) -> Any:
    """Plain load of a float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer_to(builder, args[0], ir.DoubleType()))

    return types.float64(types.int64), codegen


@intrinsic
def peek_f32(typingctx: Any, address: Any) -> Any:
    """Plain load of a float32, widened to float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.load(_pointer_to(builder, args[0], ir.FloatType())), ir.DoubleType())

    return types.float64(types.int64), codegen


@intrinsic
def poke_f64(typingctx: Any, address: Any, value: Any) -> Any:
    """Plain store of a float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer_to(builder, args[0], ir.DoubleType()))
        return context.get_dummy_value()

    return types.void(types.int64, types.float64), codegen


@intrinsic
def poke_f32(typingctx: Any, address: Any, value: Any) -> Any:
    """Plain store of a float64 rounded to float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow = builder.fptrunc(args[1], ir.FloatType())
        builder.store(narrow, _pointer_to(builder, args[0], ir.FloatType()))
        return context.get_dummy_value()

    return types.void(types.int64, types.float64), codegen


@intrinsic
def copy_bytes(typingctx: Any, destination: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes between addresses that do not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.raw_memcpy(builder, _pointer(builder, args[0], 8), _pointer(builder, args[1], 8), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def move_bytes(typingctx: Any, destination: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes between addresses that may overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.raw_memmove(builder, _pointer(builder, args[0], 8), _pointer(builder, args[1], 8), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def zero_bytes(typingctx: Any, destination: Any, count: Any) -> Any:
    """Set `count` bytes to 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.memset(builder, _pointer(builder, args[0], 8), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at `address`; a hint that never faults."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [_pointer(builder, args[0], 8), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def stream_64_bytes(typingctx: Any, destination: Any, source: Any) -> Any:
    """Copy 64 bytes past the caches (non-temporal); `destination` is a multiple of 64.

    No order among other stores: `fence_full` has to come between it and the store that publishes what was copied.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(8), 64)
        value = builder.load(_pointer_to(builder, args[1], line), align=1)
        store = builder.store(value, _pointer_to(builder, args[0], line), align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _caller(arity: int) -> Any:
    signature = types.int64(types.int64, *([types.int64] * arity))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word] * arity)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), list(args[1:]))

    return signature, codegen


@intrinsic
def call_4(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call the C function at address `function` with four int64; returns its int64."""
    return _caller(4)


@intrinsic
def call_5(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """Call the C function at address `function` with five int64; returns its int64."""
    return _caller(5)


_syscall: Any = External("syscall", "int64(int64, int64, int64, int64, int64, int64, int64)")
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
"""Number of the futex system call on this machine; -1 where it is not known."""

syscall: Callable[..., int] = _syscall


@intrinsic
def address_of(typingctx: Any, value: Any) -> Any:
    """Address of the object itself, as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    return types.int64(value), codegen


@inner
def data_of(array):
    """Address of an array's first element; the object must be a numpy array."""
    return peek_i64(address_of(array) + ARRAY_DATA)


@inner
def _stream(target, source, count):
    """Copy past the caches."""
    at = min(-target & (CACHE_LINE - 1), count)
    copy_bytes(target, source, at)
    while at + 4 * CACHE_LINE <= count:
        for part in range(at, at + 4 * CACHE_LINE, CACHE_LINE):
            prefetch(source + part + _AHEAD)
            stream_64_bytes(target + part, source + part)
        at += 4 * CACHE_LINE
    copy_bytes(target + at, source + at, count - at)


@inner
def copy_rows(target, stride, source, size, count):
    """Copy `count` rows of `size` bytes, close together at `source`, to rows `stride` bytes apart."""
    if stride == size:
        size, count = size * count, 1
    if size * count < STREAM_FROM:
        for row in range(count):
            copy_bytes(target + stride * row, source + size * row, size)
        return
    for row in range(count):
        _stream(target + stride * row, source + size * row, size)
    fence_full()  # before the store that publishes the rows


@inner
def wake(event):
    """Tell every waiter of an eventcount that something changed; no system call when nobody waits."""
    fetch_add(event, 1)
    fence_full()
    if load_relaxed(event + 8) != 0 and exchange(event + 8, 0) != 0:
        syscall(FUTEX, event, _WAKE, _ALL, 0, 0, 0)


@kernel("int64(int64)")
def announce(event):
    """Say that somebody is about to wait; before the look at the condition, so that what comes after it wakes us."""
    store_relaxed(event + 8, 1)
    fence_full()
    return 0


@kernel("int64(int64, int64, int64)", nogil=True)
def wait(event, seen, timespec):
    """Sleep until the eventcount moves on from `seen` or the time is over; wakes early without harm.

    Args:
        event: Address of the eventcount.
        seen: Its value before the caller looked at the condition it waits for.
        timespec: Address of int64 [2]: seconds, nanoseconds.
    """
    if load_acquire(event) != seen:
        return 0
    return syscall(FUTEX, event, _WAIT, seen & 0xFFFFFFFF, timespec, 0, 0)
