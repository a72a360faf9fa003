"""`conduit status --watch`: the same lines again and again, in place on a terminal, one block below the other elsewhere."""

from __future__ import annotations

import time

from conduit.cli import looking
from conduit.cli.output import console, draw, write_line
from conduit.cli.status import drawn


def watch(name: str | None, every: float, *, everything: bool, json: bool) -> None:
    """Show engines until Ctrl-C, or until the engine named is gone.

    Args:
        name: One engine, or None for all.
        every: Seconds between two looks; rates are over that time.
        everything: As for `conduit.cli.status.drawn`.
        json: One JSON document a line instead.

    Raises:
        EngineNotFound: Nothing has this name.
    """
    looks = looking.watch(name, every)
    if json:
        for seen in looks:
            write_line(looking.as_json(seen, every))
        return
    screen = console()
    if screen.is_terminal:
        from rich.live import Live

        with Live(console=screen, auto_refresh=False) as live:
            for seen in looks:
                if seen or name is None:
                    live.update(drawn(seen, everything=everything), refresh=True)
    else:
        for seen in looks:
            if seen or name is None:
                draw(time.strftime("%H:%M:%S"), drawn(seen, everything=everything), "")
    draw(f"{name} is gone.")
