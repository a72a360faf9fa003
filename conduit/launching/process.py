"""One process of an actor: a fresh interpreter in a process group of its own, from its start until nothing is left of it.

The group makes Ctrl-C, which a terminal sends to its foreground group, the owner's alone, and lets what the actor started itself
end with it. The kernel kills the process when the thread that started it is gone (PR_SET_PDEATHSIG), so whatever becomes of the
owner, it does not stay; it looks for its parent once, since that may have died before.
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
"""Nothing but the standard library is imported before the owner's module path is there."""


class Process:
    """A process that plays an actor.

    Args:
        payload: What it reads.
        stop: Descriptor by which it is told to stop.
        index: Which actor.
        count: Of how many.
        attempt: How often it was started before.
        env: Environment variables beside this process's.
        stdout, stderr: As of `subprocess.Popen`.

    Attributes:
        pid: Process id.
        killed: Whether `kill` was called.
        fd: Becomes readable when it ends; None where the kernel has no such descriptor, and it must be asked.

    Raises:
        OSError: It cannot be started.
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
        """Whether it is gone; whatever is left of its group is killed then, while its number is still its own."""
        with self._gone:
            if self._process.returncode is not None:
                return True
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self._signal(signal.SIGKILL)
            return self._process.poll() is not None

    def terminate(self) -> None:
        """Have it leave its blocks and end. What it started hears nothing: ending that is its own to do."""
        self._process.terminate()

    def resume(self) -> None:
        """Let it go on, and what it started, if that was stopped (SIGSTOP)."""
        self._to_all(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, and what it started."""
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
        """Its exit status, or minus the number of the signal that ended it. To be asked when it has ended."""
        return int(self._process.returncode)

    def report(self) -> Report | None:
        """What it left as the reason of its end."""
        return Report.read(self._report)

    def close(self) -> None:
        """Close its descriptors, once it has ended."""
        os.close(self._report)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
