"""The command `conduit`: demo, status, import, export, checkpoint, checkpoints, clean, doctor, warm, bench.

    ending    how every command ends: an exit code, and one line where it is an error
    output    numbers and sizes as text, JSON, the console
    looking   looks at engines, with rates
    status    what engines look like
    watching  the same again and again
    doctor    what this machine offers and lacks
    checks    the checks that the doctor makes of the machine
    packages  those of other packages
    warm      kernels compiled before they are needed
    offline   tables from and to files and datasets
    checkpoints  checkpoints made and looked at
    progress  a bar for what takes long
    bench     how fast it is here

Each command imports what it needs when it runs. With `--json` standard output holds one JSON document and nothing else;
its keys are documented in docs/cli.md and stay. Exit codes: 0 done; 1 the answer is no (each command says which question);
2 an error, in one line on standard error; 130 interrupted; 141 nobody reads the output any more.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from conduit.cli.ending import ended
from conduit.cli.output import say

app = typer.Typer(
    name="conduit",
    help="Conduit: an experience data plane for reinforcement learning.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_WATCH_EVERY = 2.0


def _path(text: str) -> Path:
    if not text:
        raise typer.BadParameter("Expected a path, got ''")
    return Path(text)


Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --version: as JSON.")] = False,
) -> None:
    """Show the version, or the help when no command is given."""
    if version:
        _version(json)
        raise typer.Exit
    if context.invoked_subcommand is None:
        say(context.get_help() + "\n")
        raise typer.Exit(2)


def _version(json: bool) -> None:
    import conduit
    from conduit.cli.output import write_json

    if json:
        from conduit.cli.checks import versions

        write_json(versions())
    else:
        say(f"conduit {conduit.__version__}\n")


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Of weights, environments, exploration and batches.")] = 0,
    actors: Annotated[int, typer.Option(min=1, help="Actor processes.")] = 2,
    envs: Annotated[int, typer.Option(min=1, help="Environments per actor.")] = 8,
    minutes: Annotated[float, typer.Option(help="When to give up.")] = 3.0,
    plot: Annotated[Path, typer.Option(parser=_path, metavar="FILE", help="Where the picture of the run goes.")] = Path(
        "conduit-demo.png"
    ),
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Save no picture; matplotlib is not needed then.")] = False,
    no_display: Annotated[
        bool, typer.Option("--no-display", help="Show nothing while it runs, nor the verdict.")
    ] = False,
    json: Json = False,
) -> None:
    """Train DQN on CartPole-v1 with actors in their own processes.

    Exit code 0 when it is solved, 1 when it is not within the time.
    """
    from conduit.demo import run

    result = run(
        seed=seed,
        actors=actors,
        envs=envs,
        minutes=minutes,
        plot=None if no_plot else plot,
        display=not no_display,
        json=json,
    )
    raise typer.Exit(130 if result.interrupted else 0 if result.solved else 1)


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="Engine; all of this user without.", show_default=False)] = None,
    interval: Annotated[
        float, typer.Option(min=0.0, max=3600.0, help="Seconds to measure rates over; 0: no rates.")
    ] = 0.5,
    everything: Annotated[
        bool, typer.Option("--all", "-v", help="Each table's pages, memory and fields, and each participant.")
    ] = False,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="[SECONDS]",
            min=0.05,
            max=3600.0,
            help=f"Look again and again until Ctrl-C, every {_WATCH_EVERY:g} seconds unless told otherwise.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show engines: rows, capacity, writers alive and dead, rows per second, what limiters hold back.

    Looking takes no seat in an engine and changes nothing.
    """
    from conduit.cli.looking import as_json, look
    from conduit.cli.output import write_json
    from conduit.cli.status import show

    if watch is not None:
        from conduit.cli.watching import watch as go_on

        go_on(name, watch, everything=everything, json=json)
    elif json:
        write_json(as_json(look(name, interval), interval))
    else:
        show(look(name, interval), everything=everything)


@app.command()
def checkpoint(
    name: Annotated[str, typer.Argument(help="A running engine.")],
    path: Annotated[Path, typer.Argument(parser=_path, metavar="FOLDER", help="Folder of numbered checkpoints.")],
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints to keep there, the new one included.")] = 2,
    json: Json = False,
) -> None:
    """Write a checkpoint of a running engine while everybody goes on."""
    from conduit.cli.checkpoints import as_json, make, told
    from conduit.cli.output import write_json

    made = make(name, path, keep, quiet=json)
    if json:
        write_json(as_json([made])[0])
    else:
        say(told(made))


@app.command()
def checkpoints(
    path: Annotated[
        Path, typer.Argument(parser=_path, metavar="PATH", help="A checkpoint, or a folder of checkpoints.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its digest.")] = False,
    json: Json = False,
) -> None:
    """List checkpoints, oldest first.

    Exit code 1 when one of them cannot be used.
    """
    from conduit.cli.checkpoints import as_json, look, show
    from conduit.cli.output import write_json

    found = look(path, verify=verify, quiet=json)
    if json:
        write_json({"checkpoints": as_json(found)})
    else:
        show(found, verified=verify)
    raise typer.Exit(1 if any(one.problem for one in found) else 0)


@app.command()
def clean(
    name: Annotated[str | None, typer.Argument(help="Engine; all of this user without.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Remove what dead engines left, never what a live process holds.

    Exit code 1 when an engine was named and could not be removed.
    """
    from conduit.cli.output import write_json
    from conduit.cli.status import show_cleaned
    from conduit.plane.observe.inspect import clean as remove

    done = remove(name)
    if json:
        write_json({"engines": done})
    else:
        show_cleaned(done)
    raise typer.Exit(1 if name is not None and not done[0].removed else 0)


@app.command("import")
def import_(
    name: Annotated[str, typer.Argument(help="A running engine.")],
    table: Annotated[str, typer.Argument(help="Its table.")],
    source: Annotated[
        str, typer.Argument(help="Directory or file of npz, Parquet or HDF5, or a local Minari dataset.")
    ],
    column: Annotated[
        list[str] | None, typer.Option(help="field=column, where the names differ; several times.")
    ] = None,
    freeze: Annotated[bool, typer.Option("--freeze", help="Make the table read-only afterwards.")] = False,
    json: Json = False,
) -> None:
    """Load offline data into a table; what does not fit is refused before anything is written."""
    from conduit.cli.offline import bring, told_of_loaded
    from conduit.cli.output import write_json

    loaded = bring(name, table, source, column or [], freeze=freeze, quiet=json)
    if json:
        write_json(loaded)
    else:
        say(told_of_loaded(table, loaded))


@app.command()
def export(
    name: Annotated[str, typer.Argument(help="A running engine.")],
    table: Annotated[str, typer.Argument(help="Its table.")],
    path: Annotated[str, typer.Argument(help="A new directory, or the id of a new Minari dataset.")],
    format: Annotated[str, typer.Option(help="npz, parquet or minari.")] = "npz",  # noqa: A002 - the option's name
    json: Json = False,
) -> None:
    """Save all steps of a table, while writers go on; the directory appears when it is complete."""
    from conduit.cli.offline import take, told_of_saved
    from conduit.cli.output import write_json

    saved = take(name, table, path, format, quiet=json)
    if json:
        write_json(saved)
    else:
        say(told_of_saved(path, saved))


@app.command()
def doctor(json: Json = False) -> None:
    """Try out what this machine offers: memory, limits, kernel, compiler, packages.

    Exit code 1 when something that Conduit requires does not work.
    """
    from conduit.cli.doctor import as_json, examine, healthy, show
    from conduit.cli.output import write_json

    checks = examine(quiet=json)
    if json:
        write_json(as_json(checks))
    else:
        show(checks)
    raise typer.Exit(0 if healthy(checks) else 1)


@app.command()
def warm(
    all_: Annotated[
        bool, typer.Option("--all", help="Also every conversion of every dtype, which takes minutes.")
    ] = False,
    json: Json = False,
) -> None:
    """Compile the kernels that are not compiled yet, so that no program waits for them.

    Nothing is to be done where they come compiled with the package. Exit code 1 when they could not be kept.
    """
    from conduit.cli.output import write_json
    from conduit.cli.warm import as_json, told, warmed

    done = warmed(every=all_, quiet=json)
    if json:
        write_json(as_json(done))
    else:
        sys.stdout.write(told(done))
    raise typer.Exit(0 if done.kept else 1)


@app.command()
def bench(
    seconds: Annotated[
        float, typer.Option(min=0.0, max=600.0, help="How long to measure; making the tables comes on top.")
    ] = 20.0,
    json: Json = False,
) -> None:
    """Measure Conduit beside a plain numpy ring, by turns.

    Exit code 1 when a row is slower than expected.
    """
    import time

    from conduit.cli.bench import as_json, measure, progress, show
    from conduit.cli.output import write_json

    begun = time.monotonic()
    with progress() as told:
        results = measure(seconds, told)
    spent = round(time.monotonic() - begun, 1)
    if json:
        write_json(as_json(results, spent))
    else:
        show(results, spent)
    raise typer.Exit(1 if any(one.verdict == "slow" for one in results) else 0)


def main() -> None:
    """Run the command line."""
    run(None)


def run(on_interrupt: Callable[[int, FrameType | None], Any] | None) -> None:
    """Run the command line and leave the process.

    Args:
        on_interrupt: The handler of SIGINT from here on; None keeps the one that there is.
    """

    def work() -> int:
        if on_interrupt is not None:
            signal.signal(signal.SIGINT, on_interrupt)
        return _run(sys.argv[1:])

    sys.exit(ended(work))


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("conduit", _spelt_out(arguments)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0


def _spelt_out(arguments: list[str]) -> list[str]:
    """`--watch` with the number of seconds that it has without one: options of typer take a value always or never."""
    spelt = []
    for one, after in zip(arguments, [*arguments[1:], ""], strict=True):
        alone = one == "--watch" and not _is_number(after)
        spelt.append(f"--watch={_WATCH_EVERY}" if alone else one)
    return spelt


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
