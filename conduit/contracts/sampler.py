"""Contract *sampler*: which windows a batch is made of.

A draw runs inside the compiled call that makes a batch, without the interpreter lock. So the part of a sampler that draws is a C
function, called by its address, and all that it reads lies in memory at fixed addresses. The Python part keeps the number of the
batch and completes a drawn batch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

import numpy as np


class Sampler(Protocol):
    """Chooses the windows of a batch.

    The C function is `draw(state, job, slots, count, attempt) -> int`; all arguments and the result are int64:

    * `state` is the sampler's `state`. `job` is the address of the words of a job (conduit.kernels.cpu.job, JOB_*). `slots` is the
      address of `count` slot numbers, int64, at least one; a slot is a sample's place in the batch. `attempt` is 0; when slots are
      drawn again, since their rows were overwritten between the draw and the check, it is 1, 2 and so on.
    * It returns `count` when all listed slots are drawn. Of each one the job's row, page and generation are filled in, and its window
      is resolved: the job's window has the address of a resolver (conduit.kernels.cpu.windows, WINDOW_RESOLVE), which reads the job's
      row and entry, a description of the page, and writes the rows that the window reads, or refuses a row that no window begins at.
    * It returns -1 when there is nothing to draw, when there are fewer rows than the loader's minimum, and, for a sampler that draws
      in a fixed order, when the row that is next has gone. The contents of the slots are undefined then, and nothing reads them.
    * It writes no slot that is not listed, and changes neither the table nor `batch`.
    * It neither blocks nor waits for a writer. A writer may overwrite rows while the function looks at them, and the function need not
      notice: after the rows were copied, the caller checks that each page still has the generation that was filled in, and draws
      the other slots again.
    * It chooses only rows that are committed, not deleted, and begin a window. The sampler decides with which probability.
    * A draw depends only on the sampler's settings, the number of the batch, the slots, the attempt and the table's rows. So a
      repeated draw gives the same rows.

    A sampler belongs to one loader and, like it, to one thread at a time.

    Attributes:
        function: Address of the C function; constant.
        state: The function's argument `state`, an address; constant, and valid as long as the sampler is alive.
        batch_at: Address of `batch`, int64; constant.
        batch: Number of the batch that is drawn next, from 0. The loader advances it, never the sampler. It can be set, to repeat or
            skip batches; anything but an integer of at least 0 raises ConfigError.
        candidates: Number of rows that the last draw chose among.
        offered: Number of rows that the last draw looked at, including rows that begin no window; at least `candidates`.
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
        """Fill in the sampler's own columns of the last batch, such as importance weights; no other column changes.

        Called once after each draw that found its rows, before anything else is drawn. Does not block.

        Args:
            arrays: {name: array [batch_size, ...]} of the batch; the same object whenever the memory is the same.
            first: First slot that was drawn.
            count: How many slots were drawn; None for all from `first` on.
        """
