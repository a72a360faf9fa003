"""The error about an actor's death, for its owner."""

from __future__ import annotations

from signal import SIGKILL, Signals

from conduit.errors import ActorError
from conduit.launching.report import TERMINATED, Report


class RemoteTraceback(Exception):
    """The cause of an `ActorError`, so that the actor's own traceback is printed with it."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def make_error(
    index: int, attempt: int, pid: int, exitcode: int, report: Report | None, what: str, *, restarted: bool
) -> ActorError:
    """The error about one death.

    Args:
        index: The actor's index.
        attempt: How often it had been started before.
        pid: Its process id.
        exitcode: As in `ActorError`.
        report: The report that its process wrote, or None.
        what: The event and its consequence, as the end of a sentence.
        restarted: As in `ActorError`.
    """
    error = ActorError(
        f"Actor {index} (pid {pid}) {what}",
        index=index,
        attempt=attempt,
        pid=pid,
        exitcode=exitcode,
        traceback=report.traceback if report else "",
        restarted=restarted,
    )
    if report:
        error.__cause__ = RemoteTraceback(report.traceback)
    return error


def again(error: ActorError) -> ActorError:
    """A copy of an error, to raise it again: an exception object collects the frames of every raise."""
    copy = ActorError(*error.args)
    vars(copy).update(vars(error))
    copy.__cause__ = error.__cause__
    return copy


def describe(exitcode: int, report: Report | None, *, killed: bool) -> str:
    """How a process ended, as text; `killed` says whether Conduit killed it."""
    if report and report.stage == "main":
        return (
            f"could not import the program's main module, which raised {report.error}. Every actor imports it, so put the code that starts the "
            "job under `if __name__ == '__main__':`"
        )
    if report and report.stage == "load":
        return f"could not load its function and arguments: {report.error}"
    if report:
        return f"raised {report.error}"
    if exitcode == -SIGKILL and killed:
        return f"was killed by its owner (exit code {exitcode})"
    if exitcode == -SIGKILL:
        return (
            f"was killed by SIGKILL (exit code {exitcode}), which Conduit did not send: as the kernel does when memory runs out "
            "(`dmesg`, or memory.events of its cgroup, says so)"
        )
    if exitcode < 0:
        return f"was killed by {_signal(-exitcode)} (exit code {exitcode})"
    if exitcode == TERMINATED:
        return f"was told to end by SIGTERM, which Conduit did not send (exit code {exitcode})"
    return f"ended with exit code {exitcode} and no exception"


def _signal(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
