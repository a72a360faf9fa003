"""The code of an actor's process: it prepares the process like its owner's, runs the actor function, and reports its error."""

from __future__ import annotations

import mmap
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import traceback
from multiprocessing import process, resource_tracker
from types import FrameType
from typing import Any

from conduit import alarms
from conduit.errors import Closed, WaitTimeout
from conduit.launching.actor import Actor
from conduit.launching.payload import load
from conduit.launching.report import TERMINATED, Report


def main(plan: mmap.mmap, report_fd: int, stop_fd: int, index: int, count: int, attempt: int) -> None:
    """Run the actor function in this process; exit with status 1 if it raises.

    Args:
        plan: The payload, after the module path.
        report_fd: Descriptor for the report.
        stop_fd: Becomes readable when the owner tells the actor to stop, or is gone.
        index: The actor's index.
        count: Number of actors.
        attempt: How often the actor was started before.
    """
    signal.signal(signal.SIGTERM, _terminate)
    # Line buffering: a reader of the file or pipe sees each line when it is written.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for fd in (report_fd, stop_fd):
        os.set_inheritable(fd, False)
    actor = Actor(index, count, attempt, stop=stop_fd)
    stage = "main"
    try:
        me = process.current_process()
        me.name = f"Actor-{index}"
        # Makes multiprocessing and `launch` refuse to start processes while the main module is being imported.
        me._inheriting = True  # type: ignore[attr-defined] # noqa: SLF001 - spawn's own word for it
        try:
            preparation: dict[str, Any] = pickle.load(plan)  # noqa: S301 - the owner wrote it
            if (tracker := preparation.pop("tracker", None)) is not None:
                resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined] # noqa: SLF001 - as spawn does
            multiprocessing.spawn.prepare(preparation)
            stage = "load"
            function, args, kwargs = load(plan)
        finally:
            del me._inheriting  # type: ignore[attr-defined] # noqa: SLF001
        stage = "run"
        alarms.add(lambda: _give_up_waiting(actor))
        function(actor, *args, **kwargs)
    except BaseException as error:
        if isinstance(error, SystemExit) and (error.code == TERMINATED or (stage == "run" and error.code in (None, 0))):
            raise
        given_up = stage == "run" and actor.stopping and isinstance(error, WaitTimeout | Closed)
        said = traceback.format_exception_only(error)[-1].strip()
        Report("stop" if given_up else stage, said, _formatted(error)).write(report_fd)
        sys.exit(1)


def _give_up_waiting(actor: Actor) -> None:
    """The alarm (conduit.alarms): an actor that is told to stop ends its waits."""
    if actor.stopping:
        raise Closed("The actor was told to stop, so it does not wait any longer")


def _terminate(_number: int, _frame: FrameType | None) -> None:
    # the owner sends it again, which must not cut short what is being left
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)


def _formatted(error: BaseException) -> str:
    """The traceback, beginning with the actor function, without this module's frames."""
    shown = traceback.TracebackException.from_exception(error)
    while shown.stack and shown.stack[0].filename == __file__:
        del shown.stack[0]
    return "".join(shown.format())
