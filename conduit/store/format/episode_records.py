"""The layout of a table's ring of records, one record for each of the newest episodes that ended."""

from __future__ import annotations

import numpy as np

from conduit.field import Field
from conduit.native.memory import CACHE_LINE
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.format.sizes import align

RECORDS = 1024
"""Number of records in a table's ring."""
RECORD_CHECK, RECORD_TIME, RECORD_STREAM, RECORD_ENV, RECORD_EPISODE, RECORD_LENGTH, RECORD_RETURNS = range(0, 56, 8)
"""Words of a record: the check; nanoseconds since the epoch; the stream; environment << 2 | truncated << 1 | terminated; number of the
episode in the stream << 32 | policy version of its last step; steps; and the sums of the rewards, float64, one for each element."""


def summed(schema: Schema) -> tuple[Field, ...]:
    """The rewards that a record has sums of: all rewards that are not ragged."""
    return tuple(schema[name] for name in schema.reward_names if not schema[name].ragged)


def elements(schema: Schema) -> tuple[str, ...]:
    """Names of the sums: a scalar reward's own name, otherwise `reward[0]` and so on for its elements."""
    return tuple(
        field.name if field.shape == () else f"{field.name}[{', '.join(map(str, place))}]"
        for field in summed(schema)
        for place in np.ndindex(field.shape)
    )


def record_bytes(schema: Schema) -> int:
    """Bytes of a record."""
    return align(RECORD_RETURNS + 8 * len(elements(schema)), CACHE_LINE)


def ring_bytes(schema: Schema) -> int:
    """Bytes of a table's ring: a cache line with the number of episodes that ended, and the records."""
    return w.LINE + RECORDS * record_bytes(schema)
