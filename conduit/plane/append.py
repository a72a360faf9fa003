"""`Writer.append`, generated for a schema: its keyword arguments are the schema's fields.

The generated method only packs its arguments into a tuple and hands it to one compiled call (conduit.store.objects), which
checks, stores and commits. Whatever that call does not recognise goes to the exact path, which converts it or raises the
error that users read. The method lives on a subclass of Writer made once per schema, so that it has a real signature.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable

from conduit.plane.values import MISSING
from conduit.schema import Schema


def generate_append(schema: Schema, *, rollouts: bool) -> Callable[..., None]:
    """The method `append(self, *, <fields>, terminated, truncated, final, priority)` for writers of a schema.

    A schema with a field named "priority" has no such argument; its new rows get the table's own priority.

    Args:
        schema: The table's.
        rollouts: The method takes the observations behind a rollout as well, `bootstrap`.
    """
    # names of fields never begin with "_", so the method's own ones do
    plain = not any("." in name or keyword.iskeyword(name) for name in schema.names)
    if plain:
        arguments = "".join(f"{name}=_missing, " for name in schema.names)
        values = "".join(f"{name}, " for name in schema.names)
        head = ["if _rest: _self._schema.flatten(_rest)"]
    else:
        arguments = ""
        values = "".join(f"_flat[{name!r}], " for name in schema.names)
        head = ["_flat = _self._schema.flatten(_rest)"]
    given = "None" if "priority" in schema.names else "priority"
    option = "" if given == "None" else "priority=None, "
    test = "" if given == "None" else "priority is not None or "
    if rollouts and "bootstrap" not in schema.names:
        option, test, given = f"{option}bootstrap=None, ", f"{test}bootstrap is not None or ", f"{given}, bootstrap"
    lines = [
        f"def append(_self, *, {arguments}terminated=False, truncated=False, final=None, {option}**_rest):",
        *head,
        f"_values = ({values}terminated, truncated, final)",
        f"if {test}_self._append(_self._words, _values) < -1:",
        f"    _self._append_exactly(_values, {given})",
    ]
    scope = {"_missing": MISSING}
    exec("\n    ".join(lines), scope)  # noqa: S102 - made of the schema's checked names only
    method: Callable[..., None] = scope["append"]
    method.__doc__ = "Write and commit one step; see Writer.append."
    return method
