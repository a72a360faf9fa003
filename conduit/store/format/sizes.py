"""Sizes in bytes: parsing texts such as "2 GiB", rounding offsets up, and the stride from one row of a field to the next."""

from __future__ import annotations

import re

from conduit.errors import CapacityError
from conduit.field import Field
from conduit.native.memory import CACHE_LINE
from conduit.store.format import words as w

MOST_BYTES = 1 << 62
"""Upper limit of any size: sums of a few such numbers still fit 64 bits."""

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = _DECIMAL | {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def align(offset: int, to: int = w.LINE) -> int:
    """`offset` rounded up to a multiple of `to`."""
    return -(-offset // to) * to


def parse_bytes(text: str) -> int:
    """Bytes of a text such as "2 GiB", "512MB" or "4096 B".

    Raises:
        CapacityError: The text is not a size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise CapacityError(f"Expected a size such as '2 GiB' or '500 MB', or an int for rows, got {text!r}")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size > MOST_BYTES:
        raise CapacityError(f"Expected a size of at most {MOST_BYTES:,} bytes, got {text!r}")
    return int(size)


def row_stride(field: Field) -> int:
    """Bytes from one row of a field to the next. A ragged field has one word per row; its values lie in an arena.

    A large row begins at a multiple of 64 bytes. It then spans no more pieces of 128 bytes than if it began at a multiple of 128. Rows
    whose size is a multiple of 64 are contiguous, so that the rows of a tick are one copy.
    """
    if field.ragged:
        return w.SPAN_BYTES
    return field.row_bytes if field.row_bytes < w.LINE else align(field.row_bytes, CACHE_LINE)
