"""A progress bar on standard error during long work; nothing if standard error is not a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator


@contextlib.contextmanager
def bar(what: str, *, shown: bool = True) -> Generator[Callable[[int, int], None]]:
    """A progress bar during the block; call the yielded function with the amount done and the total.

    Args:
        what: What is being done, in a few words.
        shown: False shows nothing, whatever standard error is.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, emoji=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(what, total=None)

        def tell(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield tell
