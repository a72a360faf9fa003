"""A few threads that make calls for another one, which an exception may take out of waiting at any moment.

The standard library's executor keeps results under conditions written in Python: who is interrupted inside one keeps its lock, and
the worker that has the result hangs, and with it whoever waits for the workers. Here both sides meet in the interpreter's own locks and
queues only.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import queue
import time
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from conduit.native.finish import when_gone

T = TypeVar("T")

_MOMENT = 0.0002


class Job(Generic[T]):
    """A call that a worker makes."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._done = _thread.allocate_lock()
        self._done.acquire()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def make(self) -> None:
        """In a worker: make the call."""
        try:
            self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._error = error
        self._done.release()

    def drop(self) -> None:
        """It is not made any more; whoever waits for it is told."""
        self._error = RuntimeError("Expected workers that make this call, they were ended before")
        self._done.release()

    def result(self) -> T:
        """What the call returned, as soon as it has; to be asked once.

        Raises:
            BaseException: What the call raised.
        """
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self._result[0]


class Workers:
    """Threads that make calls, first come, first served; a context manager: they run in its block, and end with the calls under way.

    Args:
        count: Threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._running: list[None] = []
        self._ended: list[None] = []
        # for a block that was interrupted as it was being left
        when_gone(self, functools.partial(self._jobs.put, None))

    def submit(self, call: Callable[[], T]) -> Job[T]:
        """Have a call made."""
        job = Job(call)
        self._jobs.put(job)
        return job

    def end(self) -> None:
        """Wait for the calls under way; those that nobody has begun are not made. Idempotent."""
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.drop()
        self._jobs.put(None)
        # one that begins only now finds nothing but the end
        while len(self._ended) < len(self._running):
            time.sleep(_MOMENT)

    def __enter__(self) -> Self:
        try:
            for _ in range(self._count):
                _thread.start_new_thread(_work, (self._jobs, self._running, self._ended))
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _work(jobs: queue.SimpleQueue[Job[Any] | None], running: list[None], ended: list[None]) -> None:
    running.append(None)
    try:
        while (job := jobs.get()) is not None:
            job.make()
    finally:
        jobs.put(None)  # the end of the others
        ended.append(None)
