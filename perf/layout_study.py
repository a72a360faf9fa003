"""Packed records or one array per field for small fields: measured, independent of the store.

`python -m perf.layout_study` lays the same rows out in shared memory (memfd, as the store's pages are: 4 KiB pages) in
several ways and prints, as a markdown table, the cost of what the plane does with them:

* learner-ready gather of random rows, with the next observation taken from another row of the same table,
* one row written from Python (cached views), bare and with the system columns,
* a slab of 64 rows written from Python.

Layouts:

* `fields`: one array per field and per system column (`terminated`, `truncated`, `meta`);
* `fields, flags in meta`: the same arrays, but a gather reads both end flags from the 16 bytes of `meta` that it must
  read anyway, so it touches two lines per row less;
* `records`: all fields and system columns of a row in one packed record (stride rounded to 8 bytes);
* `records 64`: the stride rounded up to a multiple of 64 bytes, and records start on cache lines.

Every gather is one nogil numba pass over a descriptor table, as the loader's is; rows and lines ahead are prefetched.
Every result is compared with numpy before anything is timed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from perf.measure import Comparison, Method, compare

TABLE_BYTES = 400 << 20
AHEAD = 16
LINK = 64


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the studied row: dtype, elements per row, whether the next row's value is delivered too."""

    name: str
    dtype: str
    width: int
    followed: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of this column."""
        return np.dtype(self.dtype).itemsize * self.width


@dataclass(frozen=True, slots=True)
class StudiedRow:
    """The fields of a row; system columns are added to each."""

    name: str
    columns: tuple[Column, ...]


SYSTEM = (Column("terminated", "u1", 1), Column("truncated", "u1", 1), Column("meta", "i4", 4))
CARTPOLE = StudiedRow(
    "CartPole, 28 B", (Column("obs", "f4", 4, followed=True), Column("action", "i8", 1), Column("reward", "f4", 1))
)
STEP_97 = StudiedRow(
    "5 fields, 97 B",
    (
        Column("obs", "f4", 10, followed=True),
        Column("goal", "f4", 10),
        Column("action", "i8", 1),
        Column("reward", "f8", 1),
    ),
)


def _pointer(kind: types.Type) -> Callable[[int], object]:
    pointer = types.CPointer(kind)

    @intrinsic
    def at(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(pointer))

        return pointer(types.int64), codegen

    return at


_u8 = _pointer(types.uint8)
_u32 = _pointer(types.uint32)
_u64 = _pointer(types.uint64)


@intrinsic
def _prefetch(typingctx, address):
    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(nogil=True)
def _gather_columns(plan, index, count, ahead):
    """Column after column; plan row: source, stride, destination, bytes, row shift."""
    for f in range(plan.shape[0]):
        source, stride, destination, size, shift = plan[f, 0], plan[f, 1], plan[f, 2], plan[f, 3], plan[f, 4]
        for k in range(min(ahead, count)):
            _prefetch(source + stride * (index[k] + shift))
        last_byte = size - 1
        if size == 1:
            out = _u8(destination)
            for k in range(count):
                if k + ahead < count:
                    _prefetch(source + stride * (index[k + ahead] + shift))
                out[k] = _u8(source + stride * (index[k] + shift))[0]
        elif size == 4:
            out4 = _u32(destination)
            for k in range(count):
                if k + ahead < count:
                    _prefetch(source + stride * (index[k + ahead] + shift))
                out4[k] = _u32(source + stride * (index[k] + shift))[0]
        elif size == 8:
            out8 = _u64(destination)
            for k in range(count):
                if k + ahead < count:
                    _prefetch(source + stride * (index[k + ahead] + shift))
                out8[k] = _u64(source + stride * (index[k] + shift))[0]
        else:
            words = size >> 3
            for k in range(count):
                if k + ahead < count:
                    line = source + stride * (index[k + ahead] + shift)
                    _prefetch(line)
                    _prefetch(line + last_byte)
                row = _u64(source + stride * (index[k] + shift))
                to = _u64(destination + size * k)
                for i in range(words):
                    to[i] = row[i]


@njit(nogil=True)
def _gather_rows(plan, lines, index, count, ahead):
    """Row after row, all columns of a row together; lines row: address for row 0, stride, row shift."""
    columns, touched = plan.shape[0], lines.shape[0]
    for k in range(-ahead, count):
        if k + ahead < count:
            coming = index[k + ahead]
            for f in range(touched):
                _prefetch(lines[f, 0] + lines[f, 1] * (coming + lines[f, 2]))
        if k < 0:
            continue
        here = index[k]
        for f in range(columns):
            size = plan[f, 3]
            row = plan[f, 0] + plan[f, 1] * (here + plan[f, 4])
            to = plan[f, 2] + size * k
            if size == 1:
                _u8(to)[0] = _u8(row)[0]
            elif size == 4:
                _u32(to)[0] = _u32(row)[0]
            else:
                a, b = _u64(row), _u64(to)
                for i in range(size >> 3):
                    b[i] = a[i]


@njit(nogil=True)
def _split_flags(meta, terminated, truncated, count):
    words = _u32(meta)
    first, second = _u8(terminated), _u8(truncated)
    for k in range(count):
        flags = words[4 * k + 3]
        first[k] = flags & 1
        second[k] = (flags >> 1) & 1


def _ends(size: int, stride: int) -> tuple[int, ...]:
    """Offsets that touch every line of a piece of `size` <= 128 bytes: both ends where it may cross a line."""
    return (0,) if 64 % stride == 0 and size <= stride else (0, size - 1)


class Laid:
    """The columns of `row` in one layout, in a memfd mapping that is filled with random rows.

    Attributes:
        views: Column name to its whole-table array [rows] or [rows, width], a view into the mapping.
        rows: Rows in the table; `rows * (field and system bytes)` is about `TABLE_BYTES`.
    """

    def __init__(self, row: StudiedRow, stride: int | None, seed: int) -> None:
        columns = row.columns + SYSTEM
        packed = sum(c.row_bytes for c in columns)
        self.rows = TABLE_BYTES // packed
        self.columns = columns
        self.stride = stride
        if stride is None:
            offsets, at = {}, 0
            for c in columns:
                offsets[c.name] = at
                at += -(-self.rows * c.row_bytes // 128) * 128
            total = at
        else:
            offsets, at = {}, 0
            for c in sorted(columns, key=lambda c: -np.dtype(c.dtype).itemsize):
                offsets[c.name] = at
                at += c.row_bytes
            total = self.rows * stride
        fd = os.memfd_create("layout-study")
        try:
            os.posix_fallocate(fd, 0, total)
            self.base = np.frombuffer(mmap.mmap(fd, total), np.uint8)
        finally:
            os.close(fd)
        self.views: dict[str, NDArray[np.generic]] = {}
        rng = np.random.default_rng(seed)
        for c in columns:
            dtype = np.dtype(c.dtype)
            shape = (self.rows,) if c.width == 1 else (self.rows, c.width)
            strides = (stride or c.row_bytes,) if c.width == 1 else (stride or c.row_bytes, dtype.itemsize)
            view: NDArray[np.generic] = np.ndarray(shape, dtype, self.base.data, offsets[c.name], strides)
            if c.name in ("terminated", "truncated"):
                view[:] = rng.integers(0, 2, shape, np.uint8)
            else:
                view[:] = rng.integers(0, 1 << 20, shape).astype(dtype)
            self.views[c.name] = view
        flags = self.views["meta"][:, 3].astype(np.int64) & ~3
        flags |= self.views["terminated"].astype(np.int64) | (self.views["truncated"].astype(np.int64) << 1)
        self.views["meta"][:, 3] = flags.astype(np.int32)

    def plan(
        self, batch: int, *, flags_in_meta: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, NDArray[np.generic]]]:
        """Descriptor rows for a batch, the lines to prefetch per row, and the poisoned output arrays by name."""
        outputs: dict[str, NDArray[np.generic]] = {}
        lines = []
        for c in self.columns:
            view = self.views[c.name]
            address, stride = view.__array_interface__["data"][0], view.strides[0]
            for name, shift in ((c.name, 0), ("next_" + c.name, LINK)) if c.followed else ((c.name, 0),):
                out = np.empty((batch, *view.shape[1:]), view.dtype)
                out.view(np.uint8).fill(0xA5)
                outputs[name] = out
                if not (flags_in_meta and c.name in ("terminated", "truncated")):
                    lines.append((address, stride, out.ctypes.data, c.row_bytes, shift))
        if self.stride is None:
            touched = [(a + at, stride, shift) for a, stride, _, size, shift in lines for at in _ends(size, stride)]
        else:
            start = self.base.ctypes.data
            touched = [(start + at, self.stride, 0) for at in _ends(self.stride, self.stride)]
            touched += [
                (a + at, self.stride, LINK)
                for a, _, _, size, shift in lines
                if shift
                for at in _ends(size, self.stride)
            ]
        return np.array(lines, np.int64), np.array(touched, np.int64), outputs


LAYOUTS = ("fields", "fields, flags in meta", "records", "records 64")


def gather_study(row: StudiedRow, laid: dict[str, Laid], batch: int, seconds: float) -> Comparison:
    """Times every layout under both loop orders; the unit is one batch."""
    rng = np.random.default_rng()
    methods = []
    for layout in LAYOUTS:
        for order in ("by column", "by row"):
            flags_in_meta = "flags" in layout
            table = laid[layout]
            plan, lines, outputs = table.plan(batch, flags_in_meta=flags_in_meta)
            index = np.zeros(batch, np.int64)
            ends = [outputs[n].ctypes.data for n in ("meta", "terminated", "truncated")]

            def run(
                plan=plan, lines=lines, index=index, order=order, ends=ends, flags=flags_in_meta, keep=outputs
            ) -> None:
                if order == "by row":
                    _gather_rows(plan, lines, index, batch, AHEAD)
                else:
                    _gather_columns(plan, index, batch, AHEAD)
                if flags:
                    _split_flags(*ends, batch)

            def prepare(index=index, rows=table.rows) -> None:
                index[:] = rng.integers(0, rows - LINK, batch)

            prepare()
            run()
            for c in table.columns:
                np.testing.assert_array_equal(outputs[c.name], table.views[c.name][index])
                if c.followed:
                    np.testing.assert_array_equal(outputs["next_" + c.name], table.views[c.name][index + LINK])
            methods.append(Method(f"{layout} {order}", run, prepare))
    return compare(methods, seconds=seconds, least_rounds=60, most_rounds=4000, precision=0.005)


def write_study(row: StudiedRow, laid: dict[str, Laid], lanes: int, seconds: float) -> Comparison:
    """Times Python assignments of `lanes` rows (1 or a slab) through cached views; the unit is one call."""
    steps = 512 if lanes == 1 else 256
    rng = np.random.default_rng()
    names = [c.name for c in row.columns] + ["terminated"]
    methods = []
    for layout in ("fields", "records", "records 64"):
        table = laid[layout]
        views = [table.views[n] for n in names]
        shapes = [(lanes, *v.shape[1:]) for v in views]
        data = [[rng.integers(0, 2, s).astype(v.dtype) for v, s in zip(views, shapes, strict=True)] for _ in range(64)]
        if lanes == 1:
            data = [[x[0] if x.ndim > 1 else x[0].item() for x in values] for values in data]
        cursor = [0]

        def run(views=tuple(views), data=data, cursor=cursor, rows=table.rows) -> None:
            i = cursor[0]
            for step in range(steps):
                values = data[step & 63]
                if lanes == 1:
                    for view, value in zip(views, values, strict=True):
                        view[i] = value
                else:
                    for view, value in zip(views, values, strict=True):
                        view[i : i + lanes] = value
                i += lanes
                if i + lanes > rows:
                    i = 0
            cursor[0] = i

        run()
        for view, value in zip(views, data[(steps - 1) & 63], strict=True):
            np.testing.assert_array_equal(
                view[cursor[0] - lanes : cursor[0]], np.asarray(value).reshape((lanes, *view.shape[1:]))
            )
        methods.append(Method(layout, run, units=steps))
    return compare(methods, seconds=seconds, least_rounds=40, precision=0.005)


def study(seconds: float) -> str:
    """Runs everything, `seconds` of wall time per table cell group, and returns markdown."""
    lines = [
        f"Table of {TABLE_BYTES >> 20} MiB in a memfd (4 KiB pages), random rows, prefetch {AHEAD} rows ahead, next observation "
        f"{LINK} rows further. CPU time, methods interleaved, median (and share of `fields by column`, median of paired ratios: "
        "above 1 is faster).",
        "",
    ]
    for row in (CARTPOLE, STEP_97):
        size = sum(c.row_bytes for c in row.columns + SYSTEM)
        packed = -(-size // 8) * 8
        laid = {
            "fields": Laid(row, None, 1),
            "records": Laid(row, packed, 1),
            "records 64": Laid(row, -(-size // 64) * 64, 1),
        }
        laid["fields, flags in meta"] = laid["fields"]
        lines += [
            f"**{row.name}** (+ 18 B system columns = {size} B; record {packed} B / {-(-size // 64) * 64} B)",
            "",
            "| layout, loop order | gather 256, us | | gather 4096, us | |",
            "|---|---|---|---|---|",
        ]
        gathers = [gather_study(row, laid, batch, seconds) for batch in (256, 4096)]
        for layout in LAYOUTS:
            for order in ("by column", "by row"):
                name = f"{layout} {order}"
                cells = []
                for result in gathers:
                    speed = result.speed(name, "fields by column")
                    cells.append(f"{result.cost(name).median / 1e3:.1f}")
                    cells.append(f"{speed.median:.2f} ({speed.q25:.2f}-{speed.q75:.2f})")
                lines.append(f"| {layout}, {order} | " + " | ".join(cells) + " |")
        lines += ["", "| layout | 1 row from Python, ns | | slab of 64, us | |", "|---|---|---|---|---|"]
        writes = [write_study(row, laid, lanes, seconds) for lanes in (1, 64)]
        for layout in ("fields", "records", "records 64"):
            cells = []
            for result, scale in zip(writes, (1.0, 1e3), strict=True):
                speed = result.speed(layout, "fields")
                cells.append(f"{result.cost(layout).median / scale:.3g}")
                cells.append(f"{speed.median:.2f} ({speed.q25:.2f}-{speed.q75:.2f})")
            lines.append(f"| {layout} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints the study."""
    parser = argparse.ArgumentParser(prog="python -m perf.layout_study", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="cap in seconds for each group of interleaved methods"
    )
    print(study(parser.parse_args(arguments).seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
