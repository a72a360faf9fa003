"""Whether an engine that is there is the one that is asked for."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from conduit.errors import ConfigError, SchemaMismatch
from conduit.schema import Schema
from conduit.store.format.layout import SegmentSpec

_DERIVED = ("pages", "page_rows", "keep")
"""Of a table, what a capacity comes to."""


def check_same(name: str, there: SegmentSpec, asked: SegmentSpec) -> None:
    """Refuse to go on with an engine that was made of something else than what is asked for.

    Raises:
        SchemaMismatch: A table's schema differs; names the first differing field.
        ConfigError: Anything else does; names it.
    """
    remedy = "; ask for what is there, or begin anew with replace=True"
    for kind in ("tables", "policies"):
        has, wants = sorted(getattr(there, kind)), sorted(getattr(asked, kind))
        if has != wants:
            raise ConfigError(f"Expected the {kind} that engine {name!r} has there, {has}, got {wants}{remedy}")
    for table in asked.tables:
        difference = Schema.from_document(asked.tables[table].schema).difference(
            Schema.from_document(there.tables[table].schema)
        )
        if difference is not None:
            raise SchemaMismatch(
                f"Expected the schema that table {table!r} of engine {name!r} has there, got another: {difference}{remedy}"
            )
    mine, theirs = (_flat(json.loads(json.dumps(dataclasses.asdict(spec)))) for spec in (asked, there))
    # what was declared before what follows from it
    for what in sorted({*mine, *theirs}, key=lambda path: (path.split(".")[-1] in _DERIVED, path)):
        if mine.get(what) != theirs.get(what):
            raise ConfigError(
                f"Expected {what} {theirs.get(what)!r}, as engine {name!r} has it there, got {mine.get(what)!r}{remedy}"
            )


def _flat(document: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, by their paths."""
    if not isinstance(document, dict) or not document:
        return {path: document}
    return {
        key: value
        for name, below in document.items()
        for key, value in _flat(below, f"{path}.{name}" if path else str(name)).items()
    }
