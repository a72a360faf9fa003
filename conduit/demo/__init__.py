"""`conduit demo`: DQN on CartPole-v1, with actors in their own processes, and a learner that publishes weights to them.

The modules, by process and purpose:

    settings   hyperparameters; the report of an actor
    network    the Q network in numpy, environments, greedy evaluation; no torch
    actor      the process of one actor
    crew       launches actors, reads their reports, kills actors that hang
    agent      the Q network in torch, and its update
    learner    the main loop
    record     the history of a run, and its result
    display    a live table, lines, or nothing
    plot       the picture

Importing this package loads neither torch nor gymnasium, rich or matplotlib.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

from conduit.demo.display import choose
from conduit.demo.learner import Interrupt, Learner
from conduit.demo.plot import check_place, draw
from conduit.demo.record import DemoResult
from conduit.demo.settings import Settings
from conduit.errors import ConfigError, MissingExtra
from conduit.numbers import at_least, real

__all__ = ["DemoResult", "Settings", "run"]


def run(
    *,
    seed: int = 0,
    actors: int = 2,
    envs: int = 8,
    minutes: float = 3.0,
    plot: str | Path | None = "conduit-demo.png",
    display: bool = True,
    json: bool = False,
    name: str | None = None,
    settings: Settings | None = None,
) -> DemoResult:
    """Train DQN on CartPole-v1 until it is solved: two evaluations of 20 episodes in a row with a mean return of 475.

    Ctrl-C ends it early and in order. An actor that dies is started again. Afterwards no process and no segment is left.

    Args:
        seed: Of weights, environments, exploration and batches, at least 0.
        actors: Actor processes.
        envs: Environments per actor.
        minutes: When to give up.
        plot: Where the picture goes; None for none.
        display: Show the run on standard output: a live table on a terminal, lines elsewhere; the verdict at the end.
        json: Print the result on standard output, as one JSON object; what `display` shows goes to standard error.
        name: Engine name; None takes one with this process's id.
        settings: Other hyperparameters; `actors` and `envs` take the place of its own.

    Raises:
        ConfigError: An argument is out of range, or `plot` cannot be written there.
        MissingExtra: A package of the extra `demo` is not installed.
        ActorError: An actor died too often.
        ConduitError: The engine cannot be made, such as for want of shared memory.
    """
    for what, value, least in (("actors", actors, 1), ("envs", envs, 1), ("seed", seed, 0)):
        at_least(what, value, least)
    if not (real(minutes) or 0) > 0:
        raise ConfigError(f"Expected minutes above 0, got {minutes!r}")
    for package in ("gymnasium", "torch", *(["matplotlib"] if plot is not None else [])):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(f"Expected {package} to be installed: pip install 'conduit-rl[demo]'")
    if plot is not None:
        check_place(Path(plot))

    shown = choose(shown=display, stream=sys.stderr if json else sys.stdout)
    with Interrupt() as interrupt:
        learner = Learner(
            name or f"demo-{os.getpid()}",
            replace(settings or Settings(), actors=actors, envs=envs),
            seed,
            minutes * 60,
            shown,
            interrupt,
        )
        with shown:
            result = learner.run()
        if plot is not None and learner.history.episodes:
            draw(learner.history, result, Path(plot))
            result = replace(result, plot=str(plot))
    if display:
        print(result.verdict, file=sys.stderr if json else sys.stdout)
    if json:
        print(result.to_json())
    return result
