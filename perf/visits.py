"""`python -m perf.visits`: the modules that a row visits, from `append` to `next` and from `Engine.checkpoint` to `Engine.restore`.

A reader who follows a row opens these modules. What is counted, of `conduit` alone:

* Python: the module of each frame that is entered while the calls run, in any thread, seen by `sys.setprofile`. The calls ran before, so
  what they do only once (import, look up kernels, generate `append`) is left out. A generated method counts for the module that made it.
* Kernels: the module of each kernel that is called from such a frame, and of each function of kernels that it can reach. These are
  found by following names: those that a function's code loads, those of its closure, and, where it calls through a pointer, the
  callbacks of as many arguments that were asked for while the writer, the loader or the engine was made. Branches that this row does
  not take are followed too, so a page that is turned, a limiter and a recovery are in the count.
* Constants are not followed: a module that only names words or flags is not visited.
* A checkpoint, and a restore, do much that is no row's: a segment is made, names and locks are taken. So both run with few rows and with
  many, and what counts is each chain of calls that ran more often with many, with the calls that lead to it.

The way goes down the layers when no call goes to a room that stands further up in tests/test_layers.py, and a room is entered twice when a
chain of calls leaves it and comes back. Returning to a caller is no visit.
"""

from __future__ import annotations

import argparse
import dis
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Self

import numpy as np

import conduit
from conduit.native.compile.declare import Declared, Intrinsic
from perf.compare import ROOT
from tests.test_layers import RANK, member_of

MOST = {"append to next": 22, "checkpoint to restore": 12}
"""Modules that each way may visit."""
_GENERATED = "conduit.plane.ingest.append_method"
_JIT = "conduit.native.jit"


Chain = tuple[Any, ...]
"""Calls, the outermost first: modules of Python frames; a kernel's function, always last."""


@dataclass(slots=True)
class Way:
    """What was visited.

    Attributes:
        modules: In order of their first visit.
        kernels: Those of them that were visited by kernels.
        again: Chains of rooms in which one is entered a second time.
        up: Calls to a room that stands above the caller's.
    """

    modules: list[str] = field(default_factory=list)
    kernels: set[str] = field(default_factory=set)
    again: set[tuple[str, ...]] = field(default_factory=set)
    up: set[tuple[str, str]] = field(default_factory=set)


class Tracer:
    """Follows the calls of this process from when it is entered on."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, Declared]] = {}
        self._callbacks: list[FunctionType] = []
        self._stacks = threading.local()
        self._counts: Counter[Chain] | None = None

    def __enter__(self) -> Self:
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def counted(self, *calls: Callable[[], object]) -> Counter[Chain]:
        """How often each chain of calls ran, in the order in which they first did."""
        found = self._counts = Counter()
        try:
            for call in calls:
                call()
        finally:
            self._counts = None
        return found

    def way(self, chains: Iterable[Chain]) -> Way:
        """What these chains, and kernels at their ends, visit."""
        way, seen = Way(), set[tuple[Any, tuple[str, ...]]]()
        for chain in chains:
            rooms: tuple[str, ...] = ()
            for call in chain:
                if isinstance(call, str):
                    rooms = _enter(way, rooms, call)
                else:
                    self._follow(way, seen, rooms, call)
        return way

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            stack = self._stack()
            module = _module_of_frame(frame)
            stack.append(stack[-1] if module is None else (*stack[-1], module))
            if module is not None and self._counts is not None:
                self._counts[stack[-1]] += 1
        elif event == "return":
            stack = self._stack()
            if len(stack) > 1:
                stack.pop()
            self._note(frame, argument)
        elif event == "c_call" and self._counts is not None and (found := self._entries.get(id(argument))) is not None:
            self._counts[*self._stack()[-1], found[1].function] += 1

    def _stack(self) -> list[Chain]:
        """Chains of this thread's frames, the outermost first."""
        if not hasattr(self._stacks, "chains"):
            self._stacks.chains = [()]
        chains: list[Chain] = self._stacks.chains
        return chains

    def _note(self, frame: FrameType, result: Any) -> None:
        """Remember kernels and callbacks as they are handed out."""
        if frame.f_globals.get("__name__") == _JIT:
            if frame.f_code.co_name == "entry" and result is not None:
                self._entries[id(result)] = result, frame.f_locals["known"]
            elif frame.f_code.co_name == "address":
                self._callbacks.append(frame.f_locals["function"])

    def _follow(self, way: Way, seen: set[tuple[Any, tuple[str, ...]]], rooms: tuple[str, ...], function: Any) -> None:
        """Visit a kernel's function and all that it can reach."""
        rooms = _enter(way, rooms, function.__module__)
        way.kernels.add(function.__module__)
        if (function, rooms) in seen:
            return
        seen.add((function, rooms))
        for callee in callees(function):
            if isinstance(callee, Declared):
                self._follow(way, seen, rooms, callee.function)
                continue
            _enter(way, rooms, callee.function.__module__)
            way.kernels.add(callee.function.__module__)
            name = callee.function.__name__
            for callback in self._callbacks if name.startswith("call_") else ():
                if callback.__code__.co_argcount == int(name.removeprefix("call_")):
                    self._follow(way, seen, rooms, callback)


def _enter(way: Way, rooms: tuple[str, ...], module: str) -> tuple[str, ...]:
    """The rooms of a chain of calls, after one to a module."""
    if module not in way.modules:
        way.modules.append(module)
    room = member_of(module) or module
    if rooms and rooms[-1] == room:
        return rooms
    longer = (*rooms, room)
    if room in rooms:
        way.again.add(longer[len(rooms) - 1 - rooms[::-1].index(room) :])
    if rooms and RANK.get(room, len(RANK)) > RANK.get(rooms[-1], len(RANK)):
        way.up.add((rooms[-1], room))
    return longer


def grown(few: Mapping[Chain, int], many: Mapping[Chain, int]) -> list[Chain]:
    """Chains that ran more often with many rows, and what leads to them, in their order."""
    wanted = {chain[:end] for chain in many if many[chain] > few.get(chain, 0) for end in range(1, len(chain) + 1)}
    return [chain for chain in many if chain in wanted]


def _module_of_frame(frame: FrameType) -> str | None:
    """The module of Conduit that a frame's code is of; None for others."""
    name = frame.f_globals.get("__name__")
    if name is None and frame.f_code.co_name == "append":
        return _GENERATED
    return name if isinstance(name, str) and name.partition(".")[0] == "conduit" else None


def callees(function: FunctionType) -> Iterator[Declared | Intrinsic]:
    """What the code of a kernel's function refers to and kernels can call."""
    scope = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        scope[name] = cell.cell_contents
    yield from dict.fromkeys(_referred(function.__code__, scope))


def _referred(code: CodeType, scope: dict[str, Any]) -> Iterator[Declared | Intrinsic]:
    value: Any = None
    for step in dis.get_instructions(code):
        if step.opname in {"LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"}:
            value = scope.get(step.argval)
        elif step.opname in {"LOAD_ATTR", "LOAD_METHOD"} and isinstance(value, ModuleType):
            value = getattr(value, step.argval, None)
        else:
            value = None
        yield from _kernels_in(value)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _referred(constant, scope)


def _kernels_in(value: Any) -> Iterator[Declared | Intrinsic]:
    if isinstance(value, Declared | Intrinsic):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _kernels_in(one)


def measured() -> dict[str, Way]:
    """Both ways, in this process, which has run nothing of Conduit yet."""
    example = {"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0}
    table = conduit.Table(conduit.Schema.from_example(example), capacity=4096, page_rows=256)
    name = f"visits-{os.getpid()}"
    with Tracer() as tracer, tempfile.TemporaryDirectory() as folder:
        with (
            conduit.Engine.create(name, {"replay": table}) as engine,
            engine.writer("replay", keep_final=False) as writer,
            engine.loader("replay", batch_size=32, seed=0) as loader,
        ):

            def append() -> None:
                writer.append(**example, terminated=False)

            def fill(rows: int) -> None:
                for _ in range(rows):
                    append()

            number = itertools.count()

            def both() -> Counter[Chain]:
                path = Path(folder, str(next(number)))
                made = tracer.counted(lambda: engine.checkpoint(path))
                again: list[conduit.Engine] = []
                made += tracer.counted(lambda: again.append(conduit.Engine.restore(path, name=f"{name}-again")))
                again[0].close()
                return made

            fill(400)
            for _ in range(3):
                loader.next()
            step = tracer.counted(append, loader.next)
            both()
            few = both()
            fill(3000)
            many = both()
        return {"append to next": tracer.way(step), "checkpoint to restore": tracer.way(grown(few, many))}


def in_a_fresh_process() -> dict[str, Any]:
    """What `--json` prints: {way: {"modules": [...], "kernels": [...], "again": [[...]], "up": [[...]]}}."""
    done = subprocess.run(
        [sys.executable, "-m", "perf.visits", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return dict(json.loads(done.stdout))


def main(arguments: list[str] | None = None) -> int:
    """Prints both ways; 1 if one is longer than it may be, goes up, or enters a room twice."""
    parser = argparse.ArgumentParser(prog="python -m perf.visits", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    found = measured()
    if asked.json:
        print(
            json.dumps(
                {
                    name: {
                        "modules": way.modules,
                        "kernels": sorted(way.kernels),
                        "again": sorted(way.again),
                        "up": sorted(way.up),
                    }
                    for name, way in found.items()
                }
            )
        )
        return 0
    short = False
    for name, way in found.items():
        ok = len(way.modules) <= MOST[name] and not way.again and not way.up
        short = short or not ok
        print(f"# {name}: {len(way.modules)} modules, at most {MOST[name]}: {'ok' if ok else 'SHORT'}")
        for module in way.modules:
            print(f"{module}{' (kernels)' if module in way.kernels else ''}")
        for chain in sorted(way.again):
            print(f"entered twice: {' > '.join(chain)}")
        for source, target in sorted(way.up):
            print(f"up: {source} > {target}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
