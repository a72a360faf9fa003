"""The sizes of a field's running statistics, and the check which fields can have them (conduit.store.tables.statistics)."""

from __future__ import annotations

import numpy as np

from conduit.errors import ConfigError
from conduit.field import Field
from conduit.nesting import hint, with_parents
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.format.sizes import align


def copy_bytes_of(field: Field) -> int:
    """Bytes of one copy of a field's (count, mean, M2) per element, float64, padded."""
    return align(8 * (1 + 2 * int(np.prod(field.shape, dtype=np.int64))))


def seat_bytes(field: Field) -> int:
    """Bytes of one participant's statistics of a field: a cache line with a version, then two copies."""
    return w.LINE + 2 * copy_bytes_of(field)


def measured(schema: Schema, names: object) -> tuple[str, ...]:
    """The fields that a table's `statistics` name, in the schema's order.

    Raises:
        ConfigError: It is not a tuple of names, a name is not in the schema, or a field cannot have statistics.
    """
    if not isinstance(names, tuple | list):
        raise ConfigError(f"Expected a tuple of field names as statistics, got {names!r}")
    found: set[str] = set()
    for name in names:
        below = [field for field in schema.fields if field.name == name or field.name.startswith(f"{name}.")]
        if not below:
            raise ConfigError(
                f"Expected fields of the schema, got {name!r}{hint(name, with_parents(schema.names))} - at statistics"
            )
        for field in below:
            if field.dtype == "bool" or field.ragged:
                raise ConfigError(
                    f"Expected numbers of a fixed shape, got {field}: leave it out - at statistics[{field.name!r}]"
                )
            found.add(field.name)
    return tuple(name for name in schema.names if name in found)
