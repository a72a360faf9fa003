"""Contract *delivery*: which batch a learner gets next, and when it is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Self, TypeVar

Delivered_co = TypeVar("Delivered_co", bound=Mapping[str, Any], covariant=True)
"""What a delivery hands out: names to arrays whose first axis is the sample."""


class Delivery(ABC, Generic[Delivered_co]):
    """An iterator of batches with a deadline.

    A batch is a mapping of names to arrays. It stays valid and unchanged as long as anything that was made from it is alive, also
    after later calls of `next` and after `close`.

    A delivery belongs to one thread at a time: another thread may take it over, and calls of `next` must not overlap. Other deliveries,
    and other threads, may work on the same table meanwhile.
    """

    @abstractmethod
    def next(self, timeout: float | None = None) -> Delivered_co:
        """The next batch.

        Blocks until there is one, at most until the deadline. It is atomic: it returns a whole batch or raises. A call that raises
        a deadline's error takes nothing away from later calls, which go on where this one would have. A batch with a value that
        a transform refuses is passed over, so that it does not come again.

        Args:
            timeout: Seconds to wait at most, from 0, which means to try once; None for the delivery's own.

        Raises:
            WaitTimeout: No batch by the deadline: one of its children says why.
            FieldError: A stored value that a transform cannot take.
            Exhausted: A finite delivery has handed out its last batch; iterating ends there.
            Closed: The delivery, or what it draws from, is closed.
            ConfigError: A timeout that is negative or no number.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the delivery holds; batches that are still held stay valid.

        Does not wait for other processes. Idempotent. Later calls of `next` raise Closed.
        """

    def __iter__(self) -> Iterator[Delivered_co]:
        return self

    def __next__(self) -> Delivered_co:
        """The next batch, as `next` gives it; a finite delivery raises StopIteration behind its last one."""
        return self.next()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
