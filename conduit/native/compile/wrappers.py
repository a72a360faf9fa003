"""LLVM code around compiled kernels: what Python calls, and what other kernels call through a pointer.

A kernel's machine code is `int32 f(result*, exception**, arguments...)`, as numba makes it. Python calls it by `METH_FASTCALL`, with
functions of CPython's stable ABI only, so that one library serves every release. Integers and floats are converted as numba converts
them. Kernels raise nothing; a status that says otherwise is a SystemError, and ends the process in a callback, which has nobody to tell.
"""

from __future__ import annotations

from collections.abc import Sequence

_FAST_CALL = 0x80

_LLVM = {"int64": "i64", "float64": "double", "object": "i64"}
"""Types of arguments in LLVM."""

_PYTHON = """
@PyExc_TypeError = external global ptr
@PyExc_SystemError = external global ptr
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyNumber_Long(ptr)
declare double @PyFloat_AsDouble(ptr)
declare ptr @PyErr_Occurred()
declare void @PyErr_Clear()
declare ptr @PyErr_Format(ptr, ptr, ...)
declare void @Py_DecRef(ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)

define internal i64 @as_integer(ptr %object) noinline cold {
  call void @PyErr_Clear()
  %whole = call ptr @PyNumber_Long(ptr %object)
  %none = icmp eq ptr %whole, null
  br i1 %none, label %failed, label %converted
converted:
  %value = call i64 @PyLong_AsLongLong(ptr %whole)
  call void @Py_DecRef(ptr %whole)
  ret i64 %value
failed:
  ret i64 -1
}
"""


def _text(name: str, value: str) -> str:
    data = value.encode() + b"\0"
    body = "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02x}" for byte in data)
    return f'@"{name}" = private unnamed_addr constant [{len(data)} x i8] c"{body}"\n'


def _native(symbol: str, kinds: Sequence[str]) -> str:
    return f'declare i32 @"{symbol}"({", ".join(["ptr", "ptr", *(_LLVM[kind] for kind in kinds)])})\n'


def _call(symbol: str, kinds: Sequence[str]) -> str:
    arguments = "".join(f", {_LLVM[kind]} %a{i}" for i, kind in enumerate(kinds))
    return f'  %status = call i32 @"{symbol}"(ptr %result, ptr %exception{arguments})\n'


def _take(i: int, kind: str) -> str:
    """Code that converts argument i; it is in the block take<i> and goes on to take<i + 1>."""
    begin = f"take{i}:\n  %p{i} = getelementptr ptr, ptr %arguments, i64 {i}\n  %o{i} = load ptr, ptr %p{i}\n"
    go_on = f"take{i + 1}"
    if kind == "object":
        return begin + f"  %a{i} = ptrtoint ptr %o{i} to i64\n  br label %{go_on}\n"
    if kind == "float64":
        return (
            begin
            + f"  %a{i} = call double @PyFloat_AsDouble(ptr %o{i})\n"
            + f"  %odd{i} = fcmp oeq double %a{i}, -1.0\n"
            + f"  br i1 %odd{i}, label %look{i}, label %{go_on}\n"
            + f"look{i}:\n  %e{i} = call ptr @PyErr_Occurred()\n  %good{i} = icmp eq ptr %e{i}, null\n"
            + f"  br i1 %good{i}, label %{go_on}, label %failed\n"
        )
    return (
        begin
        + f"  %f{i} = call i64 @PyLong_AsLongLong(ptr %o{i})\n"
        + f"  %odd{i} = icmp eq i64 %f{i}, -1\n"
        + f"  br i1 %odd{i}, label %look{i}, label %taken{i}\n"
        + f"look{i}:\n  %e{i} = call ptr @PyErr_Occurred()\n  %good{i} = icmp eq ptr %e{i}, null\n"
        + f"  br i1 %good{i}, label %taken{i}, label %other{i}\n"
        + f"other{i}:\n  %s{i} = call i64 @as_integer(ptr %o{i})\n  %d{i} = call ptr @PyErr_Occurred()\n"
        + f"  %fine{i} = icmp eq ptr %d{i}, null\n  br i1 %fine{i}, label %taken{i}, label %failed\n"
        + f"taken{i}:\n  %a{i} = phi i64 [ %f{i}, %take{i} ], [ %f{i}, %look{i} ], [ %s{i}, %other{i} ]\n"
        + f"  br label %{go_on}\n"
    )


def method(name: str, symbol: str, kinds: Sequence[str], *, nogil: bool) -> str:
    """Code of the `PyMethodDef` "method NAME" of a kernel that returns an int64.

    Args:
        name: The kernel's.
        symbol: Of its machine code.
        kinds: Types of its arguments: int64, float64, object.
        nogil: Whether the interpreter lock is released while it runs.
    """
    count = len(kinds)
    release = "  %thread = call ptr @PyEval_SaveThread()\n" if nogil else ""
    restore = "  call void @PyEval_RestoreThread(ptr %thread)\n" if nogil else ""
    return (
        _PYTHON
        + _native(symbol, kinds)
        + _text("name", name.rpartition(".")[2])
        + _text("arity", f"Expected {count} arguments of kernel {name}, got %zd")
        + _text("status", f"kernel {name} ended with status %d")
        + f'@"method {name}" = global {{ ptr, ptr, i32, ptr }} {{ ptr @name, ptr @call, i32 {_FAST_CALL}, ptr null }}\n'
        + "define internal ptr @call(ptr %self, ptr %arguments, i64 %count) {\n"
        + "  %result = alloca i64\n  %exception = alloca ptr\n"
        + f"  %fits = icmp eq i64 %count, {count}\n  br i1 %fits, label %take0, label %refused\n"
        + "refused:\n  %type = load ptr, ptr @PyExc_TypeError\n"
        + "  %r = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %type, ptr @arity, i64 %count)\n  ret ptr null\n"
        + "".join(_take(i, kind) for i, kind in enumerate(kinds))
        + f"take{count}:\n"
        + release
        + _call(symbol, kinds)
        + restore
        + "  %well = icmp eq i32 %status, 0\n  br i1 %well, label %done, label %raised\n"
        + "done:\n  %value = load i64, ptr %result\n  %number = call ptr @PyLong_FromLongLong(i64 %value)\n"
        + "  ret ptr %number\n"
        + "raised:\n  %error = load ptr, ptr @PyExc_SystemError\n"
        + "  %s = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %error, ptr @status, i32 %status)\n  ret ptr null\n"
        + "failed:\n  ret ptr null\n}\n"
    )


def callback(name: str, text: str, symbol: str, kinds: Sequence[str]) -> str:
    """Code of the C function "address NAME" around machine code that returns an int64.

    Args:
        name: Of the symbol.
        text: What people call the function.
        symbol: Of its machine code.
        kinds: Types of its arguments.
    """
    arguments = ", ".join(f"{_LLVM[kind]} %a{i}" for i, kind in enumerate(kinds))
    return (
        "declare void @Py_FatalError(ptr) noreturn\n"
        + _native(symbol, kinds)
        + _text("raised", f"conduit: {text} raised an error")
        + f'define i64 @"address {name}"({arguments}) {{\n'
        + "  %result = alloca i64\n  %exception = alloca ptr\n"
        + _call(symbol, kinds)
        + "  %well = icmp eq i32 %status, 0\n  br i1 %well, label %done, label %failed\n"
        + "done:\n  %value = load i64, ptr %result\n  ret i64 %value\n"
        + "failed:\n  call void @Py_FatalError(ptr @raised)\n  unreachable\n}\n"
    )


def facts(text: str) -> str:
    """Code of the pointer "conduit.facts" to a text."""
    return _text("text", text) + '@"conduit.facts" = global ptr @text\n'
