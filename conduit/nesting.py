"""How nested dicts and tuples map to dotted names, and back.

The nesting is in the names alone: a part made of digits is a position in a tuple, any other part is a key of a dict.
Keys are checked, values are passed through untouched. Names come checked from :mod:`conduit.schema`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from conduit.errors import ConfigError, FieldError, SchemaError

_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class _Branch:
    """An inner node: a dict or a tuple of nodes. A leaf is the dotted name itself."""

    path: str
    is_tuple: bool
    children: dict[str, _Branch | str]


_Node: TypeAlias = _Branch | str


class Nesting:
    """The nesting of a set of dotted names.

    Invariants: no name is also the parent of another; the positions of a tuple count 0, 1, 2 without a gap.
    ``nest(flatten(x)) == x`` for every x of this nesting.

    Args:
        names: Dotted names, each once.

    Raises:
        SchemaError: An invariant does not hold.
    """

    __slots__ = ("_names", "_roots")

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)
        raw: dict[str, Any] = {}
        for name in self._names:
            *parents, last = name.split(".")
            inner = raw
            for depth, part in enumerate(parents):
                inner = inner.setdefault(part, {})
                if not isinstance(inner, dict):
                    parent = ".".join(parents[: depth + 1])
                    raise SchemaError(f"`{parent}` is a field and cannot also hold others: rename one", at=name)
            if last in inner:
                raise SchemaError("A field cannot also hold others: rename one", at=name)
            inner[last] = name
        self._roots: dict[str, _Node] = {key: _node(key, value) for key, value in raw.items()}

    def flatten(self, nested: object) -> Mapping[str, Any]:
        """Turn a mapping whose keys are nested, dotted, or both into {dotted name: value}.

        A dict that is already flat is returned itself.

        Raises:
            FieldError: A key is missing, unknown or given twice, or a dict or tuple was expected; names the path.
        """
        if type(nested) is dict and nested.keys() == self._names.keys():
            return nested
        if type(nested) is not dict and not isinstance(nested, Mapping):
            raise FieldError(f"Expected a mapping of {listed(self._names)}, got `{type(nested).__name__}`")
        flat: dict[str, Any] = {}
        for key, value in nested.items():
            _spread(self._roots.get(key) or self._found(key), value, flat)
        if len(flat) < len(self._names):
            lacking = next(name for name in self._names if name not in flat)
            raise FieldError(f"Expected all of {listed(self._names)}, got only {listed(flat)}", at=lacking)
        return flat

    def flatten_inner(self, value: object) -> Mapping[str, Any]:
        """Like :meth:`flatten`, but if there is a single top-level name, ``value`` is the value of that name."""
        if len(self._roots) > 1 or (type(value) is dict and value.keys() == self._names.keys()):
            return self.flatten(value)
        flat: dict[str, Any] = {}
        for root in self._roots.values():
            _spread(root, value, flat)
        return flat

    def nest(self, flat: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """The nested form of the names that ``flat`` has, each looked up with ``prefix`` in front.

        Raises:
            FieldError: A tuple lacks a part.
        """
        parts = ((prefix + key, _gathered(node, flat, prefix)) for key, node in self._roots.items())
        return {key: part for key, part in parts if part is not _ABSENT}

    def _found(self, path: object) -> _Node:
        node: _Node | None = None
        children = self._roots
        for part in path.split(".") if isinstance(path, str) else ():
            node = children.get(part)
            children = node.children if isinstance(node, _Branch) else {}
        if node is None:
            raise FieldError(f"Expected a field of the schema, got {path!r}{hint(path, self._names)}", at=str(path))
        return node


def listed(names: Iterable[object]) -> str:
    """Names as text for a message."""
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def hint(name: object, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known name, or all of them."""
    known = tuple(names)
    lowered = {one.casefold(): one for one in reversed(known)}
    near = difflib.get_close_matches(str(name).casefold(), lowered, 1)
    if near:
        return f": did you mean `{lowered[near[0]]}`?"
    return f", and there is only {listed(known)}" if known else ", and there is none"


def with_parents(names: Iterable[str]) -> list[str]:
    """Dotted names, each after its parents, which may stand for it: `obs`, `obs.camera`."""
    parts = (name.split(".") for name in names)
    return list(dict.fromkeys(".".join(one[:depth]) for one in parts for depth in range(1, len(one) + 1)))


def check_known(given: object, known: Iterable[str], what: str, at: str) -> None:
    """Refuse unknown names.

    Args:
        given: Names, or a mapping from names.
        known: The known names.
        what: What the names belong to, in the plural, for the error.
        at: The option that has them, for the error.

    Raises:
        ConfigError: `given` is not a collection of names, or a name is unknown; the message has the nearest known one.
    """
    names = tuple(known)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"Expected a collection of {what}, got {given!r} - at {at}")
    for name in given:
        if name not in names:
            raise ConfigError(f"Expected {what}, got {name!r}{hint(name, names)} - at {at}")


def _node(path: str, raw: dict[str, Any] | str) -> _Node:
    if isinstance(raw, str):
        return raw
    positions = sorted(int(key) for key in raw if key.isdigit())
    if positions and positions != list(range(len(raw))):
        raise SchemaError(
            f"Expected the parts of a tuple to count from 0 without a gap, and all or none of them to be observations, "
            f"got {listed(raw)}",
            at=path,
        )
    keys = [str(place) for place in positions] or list(raw)
    return _Branch(path, bool(positions), {key: _node(f"{path}.{key}", raw[key]) for key in keys})


def _spread(node: _Node, value: Any, flat: dict[str, Any]) -> None:
    """Write the leaves of ``value`` into ``flat``. Every nested row goes through here, so plain dicts are tested first."""
    if isinstance(node, str):
        if node in flat:
            raise FieldError("Expected each field once, got it both nested and by its dotted name", at=node)
        flat[node] = value
        return
    children = node.children
    if node.is_tuple:
        if not isinstance(value, tuple | list) or len(value) != len(children):
            came = f" of {len(value)}" if isinstance(value, tuple | list) else ""
            expected = f"Expected a tuple of {len(children)}"
            raise FieldError(f"{expected}, got a `{type(value).__name__}`{came}", at=node.path)
        for child, part in zip(children.values(), value, strict=True):
            _spread(child, part, flat)
        return
    if type(value) is not dict and not isinstance(value, Mapping):
        raise FieldError(f"Expected a dict of {listed(children)}, got `{type(value).__name__}`", at=node.path)
    if value.keys() != children.keys():
        wrong = next((key for key in value if key not in children), None)
        near = "" if wrong is None else hint(wrong, children)
        wrong = next(key for key in children if key not in value) if wrong is None else wrong
        raise FieldError(f"Expected {listed(children)}, got {listed(value)}{near}", at=f"{node.path}.{wrong}")
    for key, child in children.items():
        _spread(child, value[key], flat)


def _gathered(node: _Node, flat: Mapping[str, Any], prefix: str) -> Any:
    """Read the nested value of a node from ``flat``; ``_ABSENT`` if ``flat`` has none of its leaves."""
    if isinstance(node, str):
        return flat.get(prefix + node, _ABSENT)
    parts = {key: _gathered(child, flat, prefix) for key, child in node.children.items()}
    present = {key: part for key, part in parts.items() if part is not _ABSENT}
    if not present:
        return _ABSENT
    if not node.is_tuple:
        return present
    if len(present) < len(parts):
        lacking = next(key for key in parts if key not in present)
        raise FieldError(
            f"Expected every part of a tuple, got only {listed(present)}: add it, or use the dotted names",
            at=f"{prefix}{node.path}.{lacking}",
        )
    return tuple(parts.values())
