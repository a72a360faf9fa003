"""The report that an actor's process writes about the reason for its end.

It is a JSON document in a file in memory, which the owner reads when the process is gone. So neither process waits for the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import asdict, dataclass

TERMINATED = 128 + signal.SIGTERM
"""Exit status of an actor that SIGTERM ended; the function's `with` blocks have ended."""


@dataclass(frozen=True, slots=True)
class Report:
    """The exception that ended an actor function.

    Attributes:
        stage: "main" while the owner's main module was imported, "load" while the function was unpickled, "run" in the function,
            "stop" if a wait gave up after the actor had been told to stop.
        error: The exception's type and message, as in the last line of a traceback.
        traceback: The formatted traceback.
    """

    stage: str
    error: str
    traceback: str

    @classmethod
    def read(cls, fd: int) -> Report | None:
        """The report in a file, or None if there is none."""
        with contextlib.suppress(ValueError):  # the process was killed while it wrote
            return cls(**json.loads(os.pread(fd, os.fstat(fd).st_size, 0)))
        return None

    def write(self, fd: int) -> None:
        """Write the report for the owner."""
        content = json.dumps(asdict(self)).encode()
        done = 0
        while done < len(content):
            done += os.pwrite(fd, content[done:], done)
