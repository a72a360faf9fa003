"""The function and its arguments as bytes, pickled once for all starts.

The call of `launch` pickles them, and refuses values that cannot be pickled. As with multiprocessing's spawn, the arguments may include
pipes, queues, locks and events of a spawn context. Their descriptors are duplicated, so that the caller may close its own ends.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_start_method, process, resource_tracker
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from conduit.errors import ConfigError


class Descriptor:
    """A descriptor that the processes inherit with the same number."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        """The descriptor, in the process that inherited it."""
        return self._fd


class _Inheritance:
    """Stands for the process being spawned, which multiprocessing's objects ask for while they are pickled."""

    DupFd = Descriptor

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(os.dup(fd))
        return self.fds[-1]


class Payload:
    """The data that every process of a launch reads; `close` frees it.

    Args:
        function: The actor function.
        args: Its arguments after the first.
        kwargs: Its keyword arguments.

    Attributes:
        fd: A file in memory: the pickled module path, the preparation of a process, and (function, args, kwargs).
        inherited: Descriptors that a process must inherit.

    Raises:
        ConfigError: A part cannot be pickled, or a new process could not find it again; names the part.
    """

    def __init__(self, function: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        inheritance = _Inheritance()
        # Keeps locks and queues among the arguments alive, which the bytes only name, until after the last restart.
        self._kept = (args, kwargs)
        self.inherited = inheritance.fds
        self.fd = -1
        try:
            content = _dump((function, tuple(args), dict(kwargs)), inheritance, _what(function, args, kwargs))
            _check_importable(function, content)
            preparation = _preparation()
            tracker = getattr(resource_tracker._resource_tracker, "_fd", None)  # noqa: SLF001 - as spawn does: one for all
            if tracker is not None:
                preparation["tracker"] = inheritance.duplicate_for_child(tracker)
            head = pickle.dumps(preparation["sys_path"]) + _dump(preparation, inheritance, "what spawn prepares")
            self.fd = os.memfd_create("conduit-launch")
            with open(self.fd, "wb", closefd=False) as file:
                file.write(head)
                file.write(content)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close its descriptors; idempotent."""
        fds, self.inherited[:] = [fd for fd in (self.fd, *self.inherited) if fd >= 0], ()
        self.fd = -1
        for fd in fds:
            os.close(fd)


def load(file: mmap.mmap) -> tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]:
    """The actor function and its arguments, in its process."""
    found: tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]] = pickle.load(file)  # noqa: S301 - the owner wrote it
    return found


def _dump(value: object, inheritance: _Inheritance, what: str) -> bytes:
    content = io.BytesIO()
    set_spawning_popen(inheritance)  # type: ignore[arg-type]  # it has what is asked of one
    try:
        ForkingPickler(content, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        raise ConfigError(
            f"Expected {what} to be picklable, since actors run in new processes, got {type(error).__name__}: {error}. "
            "A function must be defined at the top level of a module; hand over names and numbers, and open engines, "
            "environments and files in the actor"
        ) from error
    finally:
        set_spawning_popen(None)
    return content.getvalue()


def _what(function: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The first part that cannot be pickled by itself, as text."""
    named = [(f"the function {_name(function)}", function)]
    named += [(f"args[{i}], a {type(value).__name__},", value) for i, value in enumerate(args)]
    named += [(f"kwargs[{key!r}], a {type(value).__name__},", value) for key, value in kwargs.items()]
    for what, value in named:
        trial = _Inheritance()
        try:
            _dump(value, trial, what)
        except ConfigError:
            return what
        finally:
            for fd in trial.fds:
                os.close(fd)
    return "the function and its arguments"


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))


def _check_importable(function: Callable[..., object], content: bytes) -> None:
    if b"__main__" in content and not _main():
        raise ConfigError(
            f"Expected a function that a new process can import, got {_name(function)}, or an argument, from `__main__`, which is "
            "no file here (a notebook, an interactive session, `python -c`): write it to a module, in a notebook with "
            "`%%writefile actors.py` above it, and import it from there"
        )


def _preparation() -> dict[str, Any]:
    """The preparation that makes a new process like this one, for `multiprocessing.spawn.prepare`."""
    here = _origin()
    found: dict[str, Any] = {
        "sys_path": [here if entry == "" else entry for entry in sys.path],
        "sys_argv": list(sys.argv),
        "orig_dir": here,
        "dir": str(Path.cwd()),
        "authkey": process.current_process().authkey,
    }
    with contextlib.suppress(ValueError):
        if method := get_start_method(allow_none=True):
            found["start_method"] = method
    return found | _main()


def _main() -> dict[str, str]:
    """How a new process finds this one's main module; empty if that is not a file."""
    main = sys.modules["__main__"]
    name, path = getattr(getattr(main, "__spec__", None), "name", None), getattr(main, "__file__", None)
    if name is not None:
        return {"init_main_from_name": name}
    whole = os.path.normpath(Path(_origin()) / path) if path is not None else ""
    return {"init_main_from_path": whole} if Path(whole).is_file() else {}


def _origin() -> str:
    return getattr(process, "ORIGINAL_DIR", None) or str(Path.cwd())
