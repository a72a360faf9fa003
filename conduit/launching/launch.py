"""`conduit.launch`: actors in processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conduit.errors import ActorError, ConfigError
from conduit.launching.actors import Actors
from conduit.numbers import at_least, whole, within

_PATIENCE = 30.0
"""Seconds to wait for the thread's end; the thread's own deadlines are shorter."""


def launch(
    function: Callable[..., object],
    count: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    restarts: int = 3,
    per: float = 60.0,
    grace: float = 5.0,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    on_death: Callable[[ActorError], object] | None = None,
) -> Actors:
    """Start `count` processes that each call `function(actor, *args, **kwargs)`, and start them again if they die.

    Each is a fresh interpreter, as with multiprocessing's spawn. It imports the program's main module under another name than
    `__main__`, so put the code that starts the job under `if __name__ == "__main__":`. An actor that dies, by an exception, a signal or an
    exit with a status other than 0, is started again; an actor whose function returns is done.

    Whatever happens to this process, its actors do not outlive it: they end within a moment even when it is killed. Ctrl-C in a terminal
    reaches only this process.

    Args:
        function: Called with a `conduit.Actor`, which knows its index and whether it is to stop, and `args` and `kwargs`. It must be
            defined at the top level of a module.
        count: How many.
        args: Handed over by pickle. Pipes, queues and locks of a spawn context of multiprocessing may be among them.
        kwargs: Likewise.
        restarts: How often one actor may be started again in `per` seconds; the death after that is its last. 0 for never.
        per: Seconds, see `restarts`.
        grace: Seconds that actors have to return once they are told to.
        env: Environment variables for the actors beside this process's, such as {"OMP_NUM_THREADS": "1"}.
        stdout: Where they print: None for where this process prints, else a file, a descriptor or `subprocess.DEVNULL`.
        stderr: Likewise; also `subprocess.STDOUT`.
        on_death: Called with an `ActorError` at each death, in a thread that looks after nothing else meanwhile. None logs it, with
            the actor's traceback, to the logger "conduit.launch"; without other settings of logging that is standard error.

    Returns:
        The actors, to be used as a context manager.

    Raises:
        ConfigError: An argument is out of range; the function or an argument cannot be pickled, or not be found by a new process; or
            this process is itself still importing its main module.
        OSError: A process cannot be started; none is left then.
    """
    # imported here: a process that only writes does not need them
    from multiprocessing import process

    from conduit.launching.crew import Crew, Options
    from conduit.launching.payload import Payload
    from conduit.plane.attach import tell_role

    if not callable(function):
        raise ConfigError(f"Expected a function, got {function!r}")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise ConfigError(f'Expected args as a tuple, such as args=("engine",), got {args!r}')
    for name, given in (("kwargs", kwargs), ("env", env)):
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"Expected {name} as a mapping or None, got {given!r}")
    for name, given in (("stdout", stdout), ("stderr", stderr)):
        if given is not None and whole(given) is None and not hasattr(given, "fileno"):
            raise ConfigError(f"Expected {name} as a file, a descriptor or None, got {given!r}")
    if on_death is not None and not callable(on_death):
        raise ConfigError(f"Expected on_death as a function or None, got {on_death!r}")
    if getattr(process.current_process(), "_inheriting", False):
        raise ConfigError(
            "Expected launch to be called by the program, got a call while a new process imports the program's main module: "
            "put the code that starts the job under `if __name__ == '__main__':`"
        )
    options = Options(
        count=at_least("count", count, 1),
        restarts=at_least("restarts", restarts, 0),
        per=within("per", per, 0.0, float("inf")),
        grace=within("grace", grace, 0.0, float("inf")),
        env=dict(env or {}),
        stdout=stdout,
        stderr=stderr,
        on_death=on_death,
    )
    crew = Crew(Payload(function, args, kwargs or {}), options)
    try:
        crew.start()
        tell_role("launcher")
        return Actors(crew, getattr(function, "__qualname__", repr(function)))
    except BaseException:
        crew.abort()
        crew.thread.join(_PATIENCE)
        crew.close()
        raise
