"""`Writer.append`, generated for a schema: its keyword arguments are the schema's fields.

The generated method only packs its arguments into a tuple and hands it to one compiled call (conduit.store.objects), which
checks, stores and commits. Whatever that call does not recognise goes to the exact path, which converts it or raises the
error that users read. The method lives on a subclass of Writer made once per schema, so that it has a real signature.
"""

from __future__ import annotations

from collections.abc import Callable

from conduit.plane.values import MISSING
from conduit.schema import Schema


def generate_append(schema: Schema) -> Callable[..., None]:
    """The method `append(self, *, <fields>, terminated=False, truncated=False, final=None)` for writers of a schema."""
    flat = not any("." in name for name in schema.names)
    if flat:
        arguments = "".join(f"{name}=missing, " for name in schema.names)
        values = "".join(f"{name}, " for name in schema.names)
        head = ["if rest: self._schema.flatten(rest)"]
    else:
        arguments = ""
        values = "".join(f"flat[{name!r}], " for name in schema.names)
        head = ["flat = self._schema.flatten(rest)"]
    lines = [
        f"def append(self, *, {arguments}terminated=False, truncated=False, final=None, **rest):",
        *head,
        f"values = ({values}terminated, truncated)",
        "if final is not None or self._append(self._words, values) < -1:",
        "    self._append_exactly(values, final)",
    ]
    scope = {"missing": MISSING}
    exec("\n    ".join(lines), scope)  # noqa: S102 - made of the schema's checked names only
    method: Callable[..., None] = scope["append"]
    method.__doc__ = "Write and commit one step; see Writer.append."
    return method
