"""How many rows can be drawn, exactly, batch after batch, for those who draw uniformly and know only how many are offered."""

from __future__ import annotations

from conduit.native.jit import entry, kernel
from conduit.sampling.candidates import empty_list
from conduit.sampling.marks import empty_marks
from conduit.sampling.sum_tree import refresh
from conduit.store.tables.view import TableView


@kernel("int64(int64, int64, int64, int64)", nogil=True)
def count_drawable(tree, window, table, entries):
    """How many rows can be drawn now; the addresses are those of `refresh`."""
    _, _, candidates, _ = refresh(tree, window, table, entries)
    return candidates


class Drawable:
    """The rows of a table that can be drawn for one kind of window; each is looked at once, as long as it stays as it is.

    Args:
        table: The table.
    """

    def __init__(self, table: TableView) -> None:
        self._table = table
        self._marks = empty_marks(table.layout.pages, table.layout.page_rows)
        self._entries = empty_list(table.layout.pages)
        self._count = entry(count_drawable)

    def count(self, window: int) -> int:
        """How many they are; `window` is the address of its words (kernels.cpu.windows.WINDOW_*), of the same kind at every call."""
        return self._count(self._marks.ctypes.data, window, self._table.address, self._entries.ctypes.data)
