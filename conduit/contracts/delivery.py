"""Contract *delivery*: which batch a learner gets next, and when it is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Self, TypeVar

Delivered_co = TypeVar("Delivered_co", bound=Mapping[str, Any], covariant=True)
"""The type of a delivery's batches: a mapping of names to arrays whose first axis is the sample."""


class Delivery(ABC, Generic[Delivered_co]):
    """An iterator of batches with a deadline.

    A batch is a mapping of names to arrays. It stays valid and unchanged as long as anything that was made from it is alive, even
    after later calls of `next` and after `close`.

    One thread at a time uses a delivery: another thread may take it over, but calls of `next` must not overlap. Other deliveries
    and other threads may use the same table meanwhile.
    """

    @abstractmethod
    def next(self, timeout: float | None = None) -> Delivered_co:
        """The next batch.

        Blocks until there is one, at most until the deadline. It is atomic: it returns a whole batch or raises. A call that raises
        WaitTimeout loses no batch: the next call returns the batch that this one waited for. If a transform refuses a value of a
        batch, the call raises FieldError, and the next call goes on with the batch after it.

        Args:
            timeout: Seconds to wait at most; 0 tries once; None takes the delivery's own timeout.

        Raises:
            WaitTimeout: There was no batch by the deadline; a subclass says why.
            FieldError: A transform refused a stored value.
            Exhausted: A finite delivery has handed out its last batch; iterating ends there.
            Closed: The delivery, or its client or engine, is closed.
            ConfigError: The timeout is negative or not a number.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back the delivery's resources; batches that the caller still holds stay valid.

        Does not wait for other processes. Idempotent. Later calls of `next` raise Closed.
        """

    def __iter__(self) -> Iterator[Delivered_co]:
        return self

    def __next__(self) -> Delivered_co:
        """The next batch, as from `next`; a finite delivery raises StopIteration after its last batch."""
        return self.next()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
