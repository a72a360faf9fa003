"""Numbers and sizes as people read them, JSON as machines do, and drawing."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def say(text: str) -> None:
    """Write to standard output, at once.

    Raises:
        OSError: It cannot be written; names it.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def write_json(document: Any) -> None:
    """Write one JSON document, indented, to standard output; dataclasses become objects."""
    say(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def write_line(document: Any) -> None:
    """Write one JSON document on a line of its own: one of several."""
    say(msgspec.json.encode(document).decode() + "\n")


def console(file: TextIO | None = None) -> Console:
    """What standard output, or a file, is to rich: 80 columns wide, without colours, where it is no terminal."""
    from rich.console import Console

    return Console(file=file, highlight=False, emoji=False)


def draw(*parts: RenderableType) -> None:
    """Print to standard output; without blanks at lines' ends where that is no terminal."""
    screen = console()
    if screen.is_terminal:
        screen.print(*parts, sep="\n")
        return
    text = io.StringIO()
    console(text).print(*parts, sep="\n")
    say("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


def size(count: float) -> str:
    """Bytes in a binary unit: `12.4 MiB`; whole below 1 KiB."""
    power = 0
    while count >= 1023.95 and power < len(_UNITS) - 1:
        count /= 1024
        power += 1
    return f"{count:.1f} {_UNITS[power]}" if power else f"{count:.0f} B"


def rate(per_second: float | None, unit: str = "") -> str:
    """A rate: `12,340/s`, `0.4/s`; a dash where it was not measured."""
    if per_second is None:
        return "-"
    digits = 1 if 0 < per_second < 10 else 0
    return f"{per_second:,.{digits}f}{unit}/s"


def duration(seconds: float) -> str:
    """A time span in its two largest units: `4 s`, `3 min 12 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = max(0, int(seconds))
    for length, unit, below, lesser in (
        (_DAY, "d", _HOUR, "h"),
        (_HOUR, "h", _MINUTE, "min"),
        (_MINUTE, "min", 1, "s"),
    ):
        if whole >= length:
            return f"{whole // length} {unit} {whole % length // below} {lesser}"
    return f"{whole} s"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """`1 page`, `2 pages`, `1,000 pages`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
