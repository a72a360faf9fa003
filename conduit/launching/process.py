"""One process of an actor: a new interpreter in a process group of its own, from its start to the end of the group.

A terminal sends Ctrl-C to its foreground group, so with a group of its own only the owner gets it. Processes that the actor started end
with the group. The kernel kills the process when the thread that started it is gone (PR_SET_PDEATHSIG), so it never outlives its owner,
however that ends. The process checks its parent once, since the parent may have died before the process asked for that signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from conduit.launching.payload import Payload
from conduit.launching.report import Report

_BOOTSTRAP = (
    "import ctypes, os, sys; "
    "ctypes.CDLL(None).prctl(1, 9); "
    "owner, plan, *rest = map(int, sys.argv[1:]); "
    "os.getppid() == owner or os._exit(1); "
    "import mmap, pickle; "
    "plan = mmap.mmap(plan, 0, access=mmap.ACCESS_READ); "
    "sys.path[:] = pickle.load(plan); "
    "from conduit.launching.child import main; "
    "main(plan, *rest)"
)
"""Imports only the standard library until the owner's module path is set."""


class Process:
    """The process of an actor.

    Args:
        payload: The function and arguments that it reads.
        stop: Descriptor that tells it to stop.
        index: The actor's index.
        count: Number of actors.
        attempt: How often the actor was started before.
        env: Environment variables beside this process's.
        stdout, stderr: As in `subprocess.Popen`.

    Attributes:
        pid: Process id.
        killed: Whether `kill` was called.
        fd: Becomes readable when the process ends; None if the kernel has no such descriptor, and must be polled.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(
        self,
        payload: Payload,
        stop: int,
        index: int,
        count: int,
        attempt: int,
        *,
        env: Mapping[str, str],
        stdout: Any,
        stderr: Any,
    ) -> None:
        self._report = os.memfd_create("conduit-report")
        self.killed = False
        self.fd: int | None = None
        try:
            numbers = (os.getpid(), payload.fd, self._report, stop, index, count, attempt)
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter and this package
                [
                    sys.executable,
                    *(flag for flag in subprocess._args_from_interpreter_flags() if flag != "-P"),  # type: ignore[attr-defined] # noqa: SLF001 - as spawn does
                    "-Pc",
                    _BOOTSTRAP,
                    *map(str, numbers),
                ],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(payload.fd, self._report, stop, *payload.inherited),
                env=os.environ | env,
                process_group=0,
            )
        except BaseException:
            os.close(self._report)
            raise
        self.pid = self._process.pid
        self._gone = threading.Lock()
        with contextlib.suppress(OSError):
            self.fd = os.pidfd_open(self.pid)

    def ended(self) -> bool:
        """Whether the process has ended. If so, the rest of its group is killed, while no other process can have its number."""
        with self._gone:
            if self._process.returncode is not None:
                return True
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self._signal(signal.SIGKILL)
            return self._process.poll() is not None

    def terminate(self) -> None:
        """Send SIGTERM, which ends its `with` blocks. Only this process gets it; it has to end the processes that it started."""
        self._process.terminate()

    def resume(self) -> None:
        """Continue its process group, if it was stopped (SIGSTOP)."""
        self._to_all(signal.SIGCONT)

    def kill(self) -> None:
        """Kill its process group."""
        self.killed = True
        self._to_all(signal.SIGKILL)

    def _to_all(self, number: int) -> None:
        with self._gone:
            if self._process.returncode is None:
                self._signal(number)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    @property
    def exitcode(self) -> int:
        """Its exit status, or minus the number of the signal that ended it; call it only after the process has ended."""
        return int(self._process.returncode)

    def report(self) -> Report | None:
        """The report that it wrote about its end, or None."""
        return Report.read(self._report)

    def close(self) -> None:
        """Close its descriptors, once it has ended."""
        os.close(self._report)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
