"""Compares the specification of an existing engine with the requested one, for `exist_ok`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from conduit.errors import ConfigError, SchemaMismatch
from conduit.schema import Schema
from conduit.store.format.layout import SegmentSpec

_DERIVED = ("pages", "page_rows", "keep")
"""Entries of a table that follow from its capacity and other options."""


def check_same(name: str, there: SegmentSpec, asked: SegmentSpec) -> None:
    """Refuse an existing engine that was made from another specification.

    Raises:
        SchemaMismatch: A table's schema differs; names the first differing field.
        ConfigError: Another entry differs; names it.
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
    # declared entries before derived ones, so that the error names the cause
    for what in sorted({*mine, *theirs}, key=lambda path: (path.split(".")[-1] in _DERIVED, path)):
        if mine.get(what) != theirs.get(what):
            raise ConfigError(
                f"Expected {what} {theirs.get(what)!r}, as engine {name!r} has it there, got {mine.get(what)!r}{remedy}"
            )


def _flat(document: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, {path: leaf}."""
    if not isinstance(document, dict) or not document:
        return {path: document}
    return {
        key: value
        for name, below in document.items()
        for key, value in _flat(below, f"{path}.{name}" if path else str(name)).items()
    }
