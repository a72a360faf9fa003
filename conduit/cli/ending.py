"""How commands end: every outcome is an exit code and at most one line on standard error, never a traceback.

    0    done
    1    the answer is no
    2    an error, or arguments that make no sense
    130  interrupted
    141  the reader of the output has gone; shells show this code for a process that SIGPIPE ended

An error that is neither Conduit's nor the operating system's is a defect; CONDUIT_TRACEBACK=1 shows its traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TextIO

from conduit.errors import ConduitError


def ended(work: Callable[[], int]) -> int:
    """Do the work of a command and flush its output; returns the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the descriptor was closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - as long as the process
    warnings.showwarning = _warned
    try:
        code = work()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 141
    except SystemExit:
        raise
    except Exception as error:  # noqa: BLE001 - a person is told, whatever it is
        code = 2
        _complain(_in_a_line(error))
        if os.environ.get("CONDUIT_TRACEBACK"):
            traceback.print_exc()
    _see_out()
    return code


def _in_a_line(error: BaseException) -> str:
    if isinstance(error, ConduitError):
        text = str(error)
    elif callable(told := getattr(error, "format_message", None)):  # typer's, of arguments
        text = _of_arguments(error, str(told()))
    elif isinstance(error, OSError):
        where = [f" - {one}" for one in (error.filename, error.filename2) if one is not None]
        text = (error.strerror or str(error) or type(error).__name__) + "".join(where)
    elif isinstance(error, MemoryError):
        text = "Expected more memory than this process may have"
    else:
        text = f"{type(error).__name__}: {error} (this is a defect of Conduit; CONDUIT_TRACEBACK=1 shows where)"
    return " ".join(text.split())


def _of_arguments(error: Any, text: str) -> str:
    command = getattr(getattr(error, "ctx", None), "command_path", "conduit")
    return f"{text} See `{command} --help`."


def _warned(
    message: Warning | str,
    category: type[Warning],  # noqa: ARG001 - the hook's signature
    filename: str,  # noqa: ARG001
    lineno: int,  # noqa: ARG001
    file: TextIO | None = None,  # noqa: ARG001
    line: str | None = None,  # noqa: ARG001
) -> None:
    text = " ".join(f"warning: {message}".split())
    if text not in _told:
        _told.add(text)
        _complain(text)


_told: set[str] = set()
"""Warnings that were shown; each is shown once, wherever it comes from."""


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"conduit: {text}\n")
        sys.stderr.flush()


def _see_out() -> None:
    """Flush the output; drop output that cannot be written, so that the interpreter does not try again at exit and print an error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
