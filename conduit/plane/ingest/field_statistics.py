"""How a writer adds its committed rows to its table's running statistics, page by page."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.errors import ConfigError
from conduit.kernels.reference.gather import from_bfloat16
from conduit.store.format import words as w
from conduit.store.tables.statistics import count_upto
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]


class Tally:
    """Adds a stream's rows to the statistics: when its page is full, at `flush` and at `close`.

    Every committed row is counted once; halo copies are not counted again. A row that is only an observation counts for the
    observations only. Kept final observations and values that are not finite are left out.

    Args:
        table: The writer's table.

    Raises:
        ConfigError: The table keeps no statistics.
    """

    def __init__(self, table: TableView) -> None:
        if not table.layout.statistics:
            raise ConfigError(
                f"Expected table {table.layout.name!r} to keep statistics: create it with statistics=(<field>, ...), or open "
                "the writer with statistics=False"
            )
        self._table = table
        self._ticks = np.zeros((len(table.layout.statistics), 1), np.int64)

    def take(self, words: memoryview[int], envs: int) -> None:
        """Count the rows that the stream has committed since the last call. Call it before its page is turned: they lie in that page.

        Args:
            words: The stream's words (words.WRITER_*).
            envs: Rows per tick.
        """
        ticks = words[w.WRITER_TICK // 8]
        if words[w.WRITER_PAGE // 8] < 0 or self._table.segment.closed:
            return
        end = words[w.WRITER_BASE // 8] + words[w.WRITER_LOCAL // 8]
        for name, counted in zip(self._table.layout.statistics, self._ticks, strict=True):
            rows = slice(end - (ticks - int(counted[0])) * envs, end)
            if rows.start >= end:
                continue
            is_step = (self._table.meta["link"][rows] & w.FINAL) == 0
            field = self._table.layout.schema[name]
            array = self._table.columns[name][rows]
            array = array if field.observation else array[is_step]
            array = from_bfloat16(array) if field.dtype == "bfloat16" else array
            if array.dtype.kind == "f":
                array = array[np.isfinite(array).reshape(len(array), -1).all(1)]
            count_upto(self._table, name, array, counted, ticks)
