"""`Writer.append`, generated for a schema: its keyword arguments are the schema's fields.

The generated method only packs its arguments into a tuple and passes it to one compiled call (conduit.store.ingest.append_objects), which
checks, stores and commits. Values that this call does not recognize go to the exact path (conduit.plane.ingest.exact), which converts
them or raises the error that users read. The method lives on a subclass of Writer, made once per schema, so that it has a real signature.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping
from typing import Any

from conduit.errors import FieldError
from conduit.plane.habits import explained
from conduit.plane.ingest.validate import MISSING
from conduit.schema import Schema


def generate_append(schema: Schema, *, rollouts: bool, vector: bool) -> Callable[..., None]:
    """The method `append(self, *, <fields>, terminated, truncated, final, priority)` for writers of a schema.

    If the schema has a field named "priority", the argument is that field; new rows then get the table's own priority.

    Args:
        schema: The table's schema.
        rollouts: Whether the method also takes `bootstrap`, the observations after a rollout.
        vector: Whether values have a leading axis of environments; only the text of `help` depends on it.
    """
    # field names never begin with "_"; the method's own names do, so the two never clash
    plain = not any("." in name or keyword.iskeyword(name) for name in schema.names)
    flat = [
        "try:",
        "    _flat = _self._schema.flatten(_rest)",
        "except _FieldError as _error:",
        "    raise _explained(_error, _rest) from None",
    ]
    if plain:
        arguments = "".join(f"{name}=_missing, " for name in schema.names)
        values = "".join(f"{name}, " for name in schema.names)
        head = ["if _rest:", *(f"    {line}" for line in flat)]
    else:
        arguments = ""
        values = "".join(f"_flat[{name!r}], " for name in schema.names)
        head = flat
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
        f"    _self._exactly.append(_values, {given})",
    ]
    scope: dict[str, Any] = {"_missing": MISSING, "_FieldError": FieldError, "_explained": _explainer(schema)}
    exec("\n    ".join(lines), scope)  # noqa: S102 - made of the schema's checked names only
    method: Callable[..., None] = scope["append"]
    options = ["terminated", "truncated", "final", *(item.partition("=")[0] for item in option.split(", ") if item)]
    method.__doc__ = _documentation(schema, options, vector)
    method.__signature__ = _signature(schema, options)  # type: ignore[attr-defined]
    return method


def _explainer(schema: Schema) -> Callable[[FieldError, Mapping[str, Any]], FieldError]:
    """The function that extends an error about unknown names, if other libraries use such a name (conduit.plane.habits)."""
    known = {part for name in schema.names for part in (name, name.partition(".")[0])}
    return lambda error, given: explained(error, (name for name in given if name not in known))


def _documentation(schema: Schema, options: list[str], vector: bool) -> str:
    """The text of `help(writer.append)`: the fields, with dtypes, shapes and roles."""
    lead, flag = (("num_envs",), "bool, or bool [num_envs]") if vector else ((), "bool")
    lines = ["Write and commit one step; `Writer.append` has all that there is to it.", "", "Args:"]
    for field in schema.fields:
        length = (f"length up to {field.max_length}",) if field.ragged else ()
        axes = ", ".join(map(str, (*(() if field.ragged else lead), *length, *field.shape[len(length) :])))
        role = ", observation" if field.observation else ", reward" if field.name in schema.reward_names else ""
        each = ", a list of num_envs such arrays" if field.ragged and vector else ""
        lines.append(f"    {field.name}: {field.dtype} [{axes}]{each}{role}.")
    told = {
        "terminated": f"{flag}: the episode ended, and nothing follows.",
        "truncated": f"{flag}: the episode was cut off, by a limit of time for instance.",
        "final": "The observation after the last step of an episode that ended; not with autoreset 'next_step'.",
        "priority": f"Real{' [num_envs]' if vector else ''}, in a table with priorities.",
        "bootstrap": "The observation behind a rollout, which ends it.",
    }
    return "\n".join([*lines, *(f"    {name}: {told[name]}" for name in options)])


def _signature(schema: Schema, options: list[str]) -> inspect.Signature:
    """The method's arguments: the fields, or the parents of nested fields, and the options."""
    only = inspect.Parameter.KEYWORD_ONLY
    roots = dict.fromkeys(name.partition(".")[0] for name in schema.names)
    shown = [name for name in roots if not keyword.iskeyword(name) and name not in options]
    parameters = [inspect.Parameter("_self", inspect.Parameter.POSITIONAL_ONLY)]
    parameters += [inspect.Parameter(name, only) for name in shown]
    flags = ("terminated", "truncated")
    parameters += [inspect.Parameter(name, only, default=False if name in flags else None) for name in options]
    if len(shown) < len(roots):
        rest = "fields" if "fields" not in roots else "_fields"
        parameters.append(inspect.Parameter(rest, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)
