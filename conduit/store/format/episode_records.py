"""The ring of records that a table keeps of the episodes that ended: how many there are, and what lies where in one."""

from __future__ import annotations

import numpy as np

from conduit.field import Field
from conduit.native.memory import CACHE_LINE
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.format.sizes import align

RECORDS = 1024
"""Records of a table's ring: the newest episodes that ended."""
RECORD_CHECK, RECORD_TIME, RECORD_STREAM, RECORD_ENV, RECORD_EPISODE, RECORD_LENGTH, RECORD_RETURNS = range(0, 56, 8)
"""Words of a record: the check; nanoseconds since the epoch; the stream; environment << 2 | truncated << 1 | terminated; number of the
episode in the stream << 32 | policy version of its last step; steps; and the sums of the rewards, float64, one for each element."""


def summed(schema: Schema) -> tuple[Field, ...]:
    """The rewards that are summed up: all but ragged ones."""
    return tuple(schema[name] for name in schema.reward_names if not schema[name].ragged)


def elements(schema: Schema) -> tuple[str, ...]:
    """Names of the sums: of a reward that is a number its own, of others `reward[0]` and so on."""
    return tuple(
        field.name if field.shape == () else f"{field.name}[{', '.join(map(str, place))}]"
        for field in summed(schema)
        for place in np.ndindex(field.shape)
    )


def record_bytes(schema: Schema) -> int:
    """Bytes of a record."""
    return align(RECORD_RETURNS + 8 * len(elements(schema)), CACHE_LINE)


def ring_bytes(schema: Schema) -> int:
    """Bytes of a table's ring: a line with the tickets that were taken, and the records."""
    return w.LINE + RECORDS * record_bytes(schema)
