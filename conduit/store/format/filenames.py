"""File names in a checkpoint for names of tables, fields, policies and the caller's own bytes."""

from __future__ import annotations

from urllib.parse import quote

from conduit.errors import ConfigError

_MOST_BYTES = 255
"""The longest file name that file systems allow."""


def safe(name: str) -> str:
    """A name as a file name: letters, digits, `_`, `.`, `-` and `~` stay; other bytes, and a dot at the start, become %XX."""
    quoted = quote(name, safe="")
    return "%2E" + quoted[1:] if quoted.startswith(".") else quoted


def check_name(name: str, kind: str, suffix: str = ".npy") -> None:
    """Refuse a name that cannot be the name of a checkpoint's file.

    Args:
        name: The name.
        kind: What the name belongs to, such as "table", for the error.
        suffix: The suffix of the file.

    Raises:
        ConfigError: The name is too long, or cannot be encoded as UTF-8.
    """
    try:
        size = len(safe(name)) + len(suffix)
    except UnicodeEncodeError:
        raise ConfigError(f"Expected the name of a {kind} as text that can be written as UTF-8, got {name!r}") from None
    if size > _MOST_BYTES:
        raise ConfigError(
            f"Expected a name of at most {_MOST_BYTES - len(suffix)} bytes for a {kind} (its checkpoints have a file of that name; "
            f"letters and digits take one byte, others three for each of their bytes in UTF-8), got {size - len(suffix)}: "
            f"{name[:30]!r}{'...' if len(name) > 30 else ''}"
        )
