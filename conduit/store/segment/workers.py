"""A few threads that make calls for another thread, which an exception such as KeyboardInterrupt may interrupt at any moment.

The standard library's executor uses condition variables written in Python. A thread that is interrupted inside one keeps its lock;
then the worker with the result hangs, and so does every thread that waits for the workers. Here both sides use only locks and queues
that are built into the interpreter.
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
        """Make the call; called in a worker."""
        try:
            self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._error = error
        self._done.release()

    def drop(self) -> None:
        """Cancel the call; a thread that waits for its result gets an error."""
        self._error = RuntimeError("Expected workers that make this call, they were ended before")
        self._done.release()

    def result(self) -> T:
        """Wait for the call and return its result; may be called once.

        Raises:
            BaseException: The call's exception.
        """
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self._result[0]


class Workers:
    """Threads that make calls in the order of submission. A context manager: at its end, calls that have begun are finished.

    Args:
        count: Number of threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._running: list[None] = []
        self._ended: list[None] = []
        # for an interrupt at the end of the `with` block
        when_gone(self, functools.partial(self._jobs.put, None))

    def submit(self, call: Callable[[], T]) -> Job[T]:
        """Submit a call."""
        job = Job(call)
        self._jobs.put(job)
        return job

    def end(self) -> None:
        """Wait for the calls that have begun; the others are cancelled. Idempotent."""
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.drop()
        self._jobs.put(None)
        # a worker that begins only now finds only the end marker
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
        jobs.put(None)  # the end marker for the other workers
        ended.append(None)
