"""What a loader does when every one of its buffers is still in use: who holds them, and what may be done about it."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

from conduit.errors import BuffersBusy, ConfigError
from conduit.plane.deliver.buffers import Buffer

OnBusy = Literal["allocate", "error", "wait"]

_REMEDY = "drop batches, or batch.release() them, when you are done, batch.clone() what you keep, or open the loader with more buffers"


def check_on_busy(given: object) -> None:
    """Refuse what is no OnBusy.

    Raises:
        ConfigError: It is none.
    """
    if given not in get_args(OnBusy):
        raise ConfigError(f"Expected on_busy 'allocate', 'error' or 'wait', got {given!r}")


def _holders(buffers: Sequence[Buffer]) -> str:
    """What of the buffers' batches is still referred to."""
    kinds = Counter(
        "a whole batch" if set(buffer.names) <= set(held) else f"{', '.join(f'`{name}`' for name in held)} of a batch"
        for buffer, held in ((buffer, buffer.held() or ["some array"]) for buffer in buffers)
    )
    return ", ".join(kind if count == 1 else f"{count} times {kind}" for kind, count in kinds.items())


def refused(buffers: Sequence[Buffer]) -> BuffersBusy:
    """The error of a loader that hands out no more."""
    return BuffersBusy(
        f"Expected at most {len(buffers) - 1} batches of this loader to be in use, got all {len(buffers)} buffers in use (held: "
        f"{_holders(buffers)}): {_REMEDY}"
    )


def warn_of_copies(table: str, buffers: Sequence[Buffer]) -> None:
    """Say why batches get memory of their own from now on."""
    # the level of the first caller that is none of Conduit's, however it came here
    level, frame = 1, sys._getframe()  # noqa: SLF001 - there is no other door to it
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("conduit."):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"All {len(buffers)} buffers of a loader of table {table!r} are in use (held: {_holders(buffers)}), so each batch gets "
        f"memory of its own. That costs time, and only the machine's memory limits it. To reuse the buffers, {_REMEDY}; a notebook "
        "keeps everything that it displayed, in Out. This loader warns only once; on_busy='error' raises an error instead",
        RuntimeWarning,
        stacklevel=level,
    )
