"""`conduit import` and `conduit export`: load files and datasets into a table of a running engine, and save a table to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conduit.cli.output import counted, rate
from conduit.cli.progress import bar
from conduit.errors import ConfigError
from conduit.offline import Loaded, Saved, load, save, save_minari
from conduit.plane.attach import attach

FORMATS = ("npz", "parquet", "minari")


def bring(name: str, table: str, source: str, columns: Sequence[str], *, freeze: bool = False, quiet: bool) -> Loaded:
    """Load a source into a table, with a progress bar.

    Args:
        name: The engine.
        table: Its table.
        source: A path, or the id of a local Minari dataset.
        columns: "field=column" for each column with another name.
        freeze: Make the table read-only afterwards.
        quiet: Show no bar.

    Raises:
        ConfigError: An entry of `columns` is not such a pair.
    """
    pairs: dict[str, str] = {}
    for text in columns:
        field, equals, column = text.partition("=")
        if not (field and equals and column):
            raise ConfigError(f"Expected --column field=column, got {text!r}")
        if field in pairs:
            raise ConfigError(f"Expected each field once, got --column {field}={pairs[field]} and --column {text}")
        pairs[field] = column
    with attach(name, on_owner_exit="stay") as client, bar(f"into {table}", shown=not quiet) as tell:
        return load(client, table, source, columns=pairs or None, progress=tell, freeze=freeze)


def take(name: str, table: str, path: str, format_: str, *, quiet: bool) -> Saved:
    """Save a table, with a progress bar.

    Args:
        name: The engine.
        table: Its table.
        path: A new directory, or the id of a new Minari dataset.
        format_: One of FORMATS.
        quiet: Show no bar.

    Raises:
        ConfigError: The format is unknown.
    """
    if format_ not in FORMATS:
        raise ConfigError(f"Expected --format {', '.join(FORMATS)}, got {format_!r}")
    with attach(name, on_owner_exit="stay") as client, bar(f"out of {table}", shown=not quiet) as tell:
        if format_ == "minari":
            return save_minari(client, table, path, progress=tell)
        return save(client, table, Path(path), format="npz" if format_ == "npz" else "parquet", progress=tell)


def told_of_loaded(table: str, loaded: Loaded) -> str:
    """The report of an import: one line, and one more for ignored columns, with a description of those that no field can hold."""
    speed = rate(loaded.rows / loaded.seconds if loaded.seconds else None)
    text = f"{counted(loaded.rows, 'step')} of {counted(loaded.episodes, 'episode')} now in {table} ({speed})\n"
    if loaded.ignored:
        notes = {name: f" ({loaded.skipped[name]})" for name in loaded.skipped}
        text += f"not taken: {', '.join(name + notes.get(name, '') for name in loaded.ignored)}\n"
    return text


def told_of_saved(path: str, saved: Saved) -> str:
    """The report of an export: one line, and one more for rows that were left out."""
    files = f" in {counted(saved.files, 'file')}" if saved.files else ""
    text = f"{counted(saved.rows, 'step')} of {counted(saved.episodes, 'episode')} now at {path}{files}\n"
    if saved.missing:
        text += f"overwritten before they could be read: {counted(saved.missing, 'row')}\n"
    if saved.left_out:
        text += f"left out, since what follows is not known: {counted(saved.left_out, 'last step')}\n"
    return text
