"""Contract *sampler*: which windows a batch is made of.

A draw runs inside the compiled call that makes a batch, without the interpreter lock. So the part of a sampler that draws is a C
function, reached by its address, and everything that it reads lies in memory at an address. The Python part numbers the batches and
completes what was drawn.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

import numpy as np


class Sampler(Protocol):
    """Chooses the windows of a batch.

    The function is `draw(state, job, slots, count, attempt) -> int`, int64 all of them, called as C does:

    * `state` is the sampler's `state`; `job` the address of the words of a job (conduit.kernels.cpu.job, JOB_*); `slots` the
      address of `count` slot numbers, int64, at least one; `attempt` is 0, and 1 and so on when slots are drawn again since their rows
      were overwritten between the draw and the check.
    * It returns `count` when all listed slots are drawn. Of each one the job's row, page and generation are filled in, and its window
      is resolved: the job's window has the address of a resolver (conduit.kernels.cpu.windows, WINDOW_RESOLVE), which reads the job's
      row and entry, a description of the page, and writes the rows that the window reads, or refuses a row that no window begins at.
    * It returns -1 when there is nothing to draw, when there are fewer rows than the least that was asked for, and, where each row has
      its turn, when one whose turn it is has gone. What it has written by then is undefined, and nobody reads it.
    * It writes no slot that is not listed, and changes neither the table nor `batch`.
    * It neither blocks nor waits for a writer. Rows may be overwritten while it looks at them; it need not see that. Whoever called it
      checks that each page is still of the generation which was filled in, after the rows were copied, and draws those slots again.
    * It chooses only rows that are committed, not deleted, and begin a window. Which of them, and how likely, is the sampler's matter.
    * A draw follows from the sampler's settings, the number of the batch, the slots, the attempt and the rows that are there: a
      repeated draw is the same draw.

    A sampler belongs to one loader and, like it, to one thread at a time.

    Attributes:
        function: Address of the C function; constant.
        state: Address of what it is given as `state`; constant, as long as the sampler is alive.
        batch_at: Address of `batch`, int64; constant.
        batch: Number of the batch that is drawn next, from 0. The loader advances it, never the sampler. It can be set, to repeat or
            skip batches; anything but a whole number from 0 raises ConfigError.
        candidates: Rows that the last draw chose among.
        offered: Rows that the last draw looked at, those included that begin no window; at least `candidates`.
    """

    function: int
    state: int

    @property
    @abstractmethod
    def batch_at(self) -> int:
        """Address of `batch`."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Number of the batch that is drawn next."""

    @batch.setter
    def batch(self, number: int) -> None: ...

    @property
    @abstractmethod
    def candidates(self) -> int:
        """Rows that the last draw chose among."""

    @property
    @abstractmethod
    def offered(self) -> int:
        """Rows that the last draw looked at."""

    def finish(self, arrays: dict[str, np.ndarray[Any, Any]], first: int = 0, count: int | None = None) -> None:
        """Fill in what the sampler adds to the batch that was drawn last, such as importance weights; nothing else is touched.

        Called once behind each draw that found its rows, before anything else is drawn. Does not block.

        Args:
            arrays: {name: array [batch_size, ...]} of the batch. The same object in each call for the same memory.
            first: First slot that was drawn.
            count: How many slots were drawn; None for all from `first` on.
        """
