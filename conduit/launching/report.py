"""What a process that played an actor leaves as the reason of its end.

It is a JSON document in a file in memory, which the owner reads when the process is gone, so nobody waits for the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import asdict, dataclass

TERMINATED = 128 + signal.SIGTERM
"""Exit status of an actor that SIGTERM ended; the function's `with` blocks were left."""


@dataclass(frozen=True, slots=True)
class Report:
    """What ended an actor function that did not return.

    Attributes:
        stage: "main" and "load" before the function was called, while the owner's main module was imported and while the
            function was unpickled; "run" in it; "stop" where it gave up waiting after it had been told to stop.
        error: The exception's type and message, as its traceback ends.
        traceback: The formatted traceback.
    """

    stage: str
    error: str
    traceback: str

    @classmethod
    def read(cls, fd: int) -> Report | None:
        """What stands in a report's file, or None where nothing does."""
        with contextlib.suppress(ValueError):  # killed while it wrote
            return cls(**json.loads(os.pread(fd, os.fstat(fd).st_size, 0)))
        return None

    def write(self, fd: int) -> None:
        """Leave it for the owner."""
        content = json.dumps(asdict(self)).encode()
        done = 0
        while done < len(content):
            done += os.pwrite(fd, content[done:], done)
