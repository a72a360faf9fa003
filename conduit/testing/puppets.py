"""Processes that execute calls from a test, one at a time, and can be stopped and killed in between.

    with Puppet("spawn") as puppet:
        puppet.do(attach, "cartpole")
        assert puppet.do(write_rows, 100) == 100

A call names a function that can be imported, which gets the puppet's own namespace, then the arguments. Its exceptions are raised in the
test. The functions below are used by many tests.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, Literal, Self

import numpy as np

from conduit.native.jit import entry
from conduit.plane import attach as attaching
from conduit.plane.engine import Engine
from conduit.store.format.table_spec import Table
from conduit.store.segment.owner_watch import OnOwnerExit
from conduit.testing import rows

Method = Literal["fork", "spawn", "forkserver"]


def forked(work: Callable[[], object]) -> int:
    """The process number of a forked child that does some work: it ends with 0, or with 1 where that raises."""
    sys.stdout.flush()  # or the child would say it too
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def ended(pid: int, seconds: float) -> int | None:
    """The exit status of a child, below 0 the number of the signal that ended it; None when it had to be killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _serve(connection: Connection) -> None:
    own = SimpleNamespace()
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        if function is None:
            return
        try:
            answer = True, function(own, *arguments)
        except BaseException as error:
            answer = False, error
        connection.send(answer)


class Puppet:
    """A process of ours.

    Args:
        method: How it is made.
        timeout: Seconds that an answer may take.

    Attributes:
        pid: Its process number.
    """

    def __init__(self, method: Method = "fork", timeout: float = 60.0) -> None:
        context = multiprocessing.get_context(method)
        self._connection, theirs = context.Pipe()
        self._timeout = timeout
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin a call; `answer` ends it."""
        self._connection.send((function, arguments))

    def answer(self) -> Any:
        """What the call returned; raises what it raised.

        Raises:
            TimeoutError: No answer in time. EOFError: the process is dead.
        """
        if not self._connection.poll(self._timeout):
            raise TimeoutError(f"Expected an answer of process {self.pid} within {self._timeout} s, got none")
        good, value = self._connection.recv()
        if not good:
            raise value
        return value

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function(namespace, *arguments)` in the process and wait for its answer."""
        self.tell(function, *arguments)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and see it dead."""
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> int:
        """Let it come to its normal end; returns the exit status."""
        self._connection.send((None, ()))  # closing is not enough: later forks hold our end of the pipe as well
        self._process.join(self._timeout)
        status = self._process.exitcode
        if status is None:
            self.kill()
            raise TimeoutError(f"Expected process {self.pid} to end within {self._timeout} s")
        return int(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self.kill()


# -- what puppets do


def create(own: SimpleNamespace, name: str, table: Table, backing: str = "shm") -> None:
    """Create an engine with one table, "replay"."""
    own.client = Engine.create(name, {"replay": table}, backing=backing)  # type: ignore[arg-type]


def attach(own: SimpleNamespace, name: str, on_owner_exit: OnOwnerExit = "raise") -> int:
    """Attach to an engine; returns the participant number."""
    own.client = attaching.attach(name, on_owner_exit=on_owner_exit)
    return own.client._participants.number  # type: ignore[no-any-return]


def write_rows(own: SimpleNamespace, count: int, environment: int = 0) -> int:
    """Append `count` more proving rows of one environment; returns the number of rows written in all."""
    if not hasattr(own, "writer"):
        own.writer, own.number = own.client.writer("replay", keep_final=False), 0
    obs = np.zeros(rows.WORDS, np.int64)
    write, action, reward = entry(rows.write_observation), entry(rows.action_of), entry(rows.reward_of)
    for number in range(own.number, own.number + count):
        end = write(obs.ctypes.data, environment, number)
        own.writer.append(
            obs=obs,
            action=action(environment, number),
            reward=reward(environment, number),
            terminated=end == 1,
            truncated=end == 2,
        )
    own.number += count
    return int(own.number)


def count_torn(own: SimpleNamespace, batches: int, batch_size: int = 64, seed: int = 0) -> int:
    """Load batches and count the rows that are not exactly what one step wrote."""
    torn = np.zeros(batch_size, np.uint8)
    bad = 0
    names = ("obs", "action", "reward", "terminated", "truncated")
    with own.client.loader("replay", batch_size=batch_size, seed=seed, format="numpy", timeout=30.0) as loader:
        for _ in range(batches):
            batch = loader.next()
            addresses = [batch[name].ctypes.data for name in names]
            bad += entry(rows.find_torn_rows)(*addresses, batch_size, torn.ctypes.data)
    return bad


def lease(own: SimpleNamespace, page: int) -> int:
    """Lease a page and keep it; returns its generation."""
    own.lease = own.client._views["replay"].lease(page)
    return int(own.lease.generation)


def detach(own: SimpleNamespace) -> None:
    """Close the client."""
    own.client.close()
