"""`Writer.append`, compiled for a schema: straight-line assignments instead of a loop over fields.

A call has a budget of a few hundred nanoseconds, most of which would go into looking up what is the same for every call.
So the function is generated once per writer, as `dataclasses` generates `__init__`. What makes the fast path also a
checked one: assigning to a slice of a memoryview raises unless format and size are exactly the field's. Whatever it
refuses goes to `values.checked`, which converts it or raises the error that users read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from conduit.field import Field
from conduit.jit import entry
from conduit.plane.values import MISSING, flag
from conduit.schema import Schema
from conduit.store import writing
from conduit.store.table import TableView

_SCALARS = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"}
"""Dtypes that a memoryview stores from a Python number with the right checks; bool and 16-bit floats it does not."""


def _assignments(field: Field, index: int, num_envs: int | None, scope: dict[str, Any], table: TableView) -> str:
    """Statement that stores argument `v<index>` at physical row `row`, or raises TypeError, ValueError, OverflowError."""
    column = table.columns[field.name]
    value, view = f"v{index}", f"c{index}"
    contiguous = column.flags.c_contiguous
    width = int(np.prod(field.shape, dtype=np.int64))
    if field.shape == () and num_envs is None and field.dtype in _SCALARS:
        scope[view] = memoryview(column)
        return f"{view}[row] = {value}"
    if field.dtype != "bfloat16" and field.dtype != "float16" and contiguous:
        if field.shape == () and num_envs is not None:
            scope[view] = memoryview(column)
            return f"{view}[row:row + {num_envs}] = {value}"
        if len(field.shape) == 1 and num_envs is None:
            scope[view] = memoryview(column.reshape(-1))
            return f"{view}[row * {width}:row * {width} + {width}] = {value}"
    scope[view] = column
    scope[f"d{index}"] = column.dtype
    shape = field.shape if num_envs is None else (num_envs, *field.shape)
    target = "row" if num_envs is None else f"row:row + {num_envs}"
    if field.dtype == "bfloat16":  # uint16 arrays are not bfloat16 values, although they look like its bits
        return "raise TypeError"
    test = f"{value}.__class__ is ndarray and {value}.dtype == d{index} and {value}.shape == {shape}"
    return f"if not ({test}): raise TypeError\n        {view}[{target}] = {value}"


def compile_append(schema: Schema, table: TableView, num_envs: int | None) -> Callable[..., None]:
    """The `append` method for writers of one table and number of environments.

    Args:
        schema: The table's.
        table: Its view in this process.
        num_envs: None for a single environment.

    Returns:
        `append(writer, **fields, terminated=False, truncated=False, final=None)`.
    """
    scope: dict[str, Any] = {"ndarray": np.ndarray, "commit": entry(writing.commit_tick), "t": memoryview(table.terminated), "u": memoryview(table.truncated)}
    arguments = [f"v{i}" for i in range(len(schema.fields))]
    body = [_assignments(field, i, num_envs, scope, table) for i, field in enumerate(schema.fields)]
    if num_envs is None:
        flags = [
            f"if {flag} is not False: {view}[row] = {flag} if {flag} is True else one_flag({flag}, {flag!r})"
            for flag, view in (("terminated", "t"), ("truncated", "u"))
        ]
    else:
        flags = [
            f"if {flag} is not False: {view}[row:row + {num_envs}] = {flag}"
            for flag, view in (("terminated", "t"), ("truncated", "u"))
        ]
    flat = not any("." in name for name in schema.names)
    if flat:
        signature = "".join(f"{name}=missing, " for name in schema.names)
        unpack = [f"if rest: unknown(rest)", f"{', '.join(arguments)}, = {', '.join(schema.names)},"]
    else:
        signature = ""
        unpack = ["flat = flatten(rest)", *(f"v{i} = flat[{name!r}]" for i, name in enumerate(schema.names))]
    scope |= {"missing": MISSING, "unknown": schema.flatten, "flatten": schema.flatten, "one_flag": flag}
    lines = [
        f"def append(self, *, {signature}terminated=False, truncated=False, final=None, **rest):",
        *(f"    {line}" for line in unpack),
        "    row = self._next",
        "    if row < 0: row = self._here()",
        "    try:",
        *(f"        {line}" for line in body + flags),
        "    except refusals:",
        f"        self._store(row, ({', '.join(arguments)},), terminated, truncated)",
        "    if final is not None: self._stage_finals(row, final)",
        "    row = commit(self._address)",
        "    if row < -1: self._refuse(row)",
        "    self._next = row",
    ]
    scope["refusals"] = (TypeError, ValueError, OverflowError, AttributeError)
    exec("\n".join(lines), scope)  # noqa: S102 - generated from the schema's checked names only
    return scope["append"]  # type: ignore[no-any-return]

