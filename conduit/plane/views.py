"""Names that lead to arrays: `row.obs.camera`, `row["obs.camera"]` and `row["obs"]["camera"]` are one and the same.

A parent of several names (`obs` of `obs.camera` and `obs.pose`) leads to a `Nested`. An unknown name raises `UnknownName`, which is a
KeyError and an AttributeError, so that `in`, `get` and `hasattr` work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from conduit.errors import FieldError, UnknownName
from conduit.nesting import Nesting, hint, with_parents
from conduit.plane.habits import explained

Array = np.ndarray[Any, Any]

Get = Callable[[str], Any]
Put = Callable[[str, Any], None]


def find(path: object, names: Collection[str], get: Get, put: Put | None = None) -> Any:
    """The array of a name, or a `Nested` for a parent of other names.

    Args:
        path: The dotted name.
        names: The names of all arrays.
        get: Returns the array of a name.
        put: Assigns to a name; None if nothing can be assigned.

    Raises:
        UnknownName: There is no such name; the message has the nearest one.
    """
    if path in names:
        return get(str(path))
    if any(name.startswith(f"{path}.") for name in names):
        return Nested(str(path), names, get, put)
    raise UnknownName(f"Expected the name of an array, got {path!r}{hint(path, with_parents(names))}", at=str(path))


def spread(path: str, names: Collection[str], value: Any) -> Mapping[str, Any]:
    """A nested value for all names below a parent, as {dotted name: value}.

    Raises:
        FieldError: A key is missing or unknown, or a dict or tuple was expected.
    """
    above = path.rpartition(".")[0]
    start = len(above) + 1 if above else 0
    below = [name[start:] for name in names if name.startswith(f"{path}.")]
    return {path[:start] + name: part for name, part in Nesting(below).flatten_inner(value).items()}


def attributes(names: Collection[str]) -> list[str]:
    """The names, or their first parts, that attribute access reaches: for `dir`."""
    return [name for name in dict.fromkeys(one.partition(".")[0] for one in names) if name.isidentifier()]


class Nested(Mapping[str, Any]):
    """The parts of a parent: by attribute (`obs.camera`), by name (`obs["camera"]`, `obs["pose.0"]`), and by index for a tuple.

    A part with the name of a mapping's method (keys, values, items, get) is reached by name only.
    """

    __slots__ = ("_get", "_names", "_path", "_put")

    def __init__(self, path: str, names: Collection[str], get: Get, put: Put | None) -> None:
        for name, value in (("_path", path), ("_names", names), ("_get", get), ("_put", put)):
            object.__setattr__(self, name, value)

    def _below(self) -> list[str]:
        return [name.removeprefix(f"{self._path}.") for name in self._names if name.startswith(f"{self._path}.")]

    def __getitem__(self, part: object) -> Any:
        return find(f"{self._path}.{part}", self._names, self._get, self._put)

    def __getattr__(self, part: str) -> Any:
        if part.startswith("_"):
            raise AttributeError(part)
        return self[part]

    def __setitem__(self, part: object, value: Any) -> None:
        if self._put is None:
            path = f"{self._path}.{part}"
            raise FieldError("Expected no assignment: these arrays are there to be read", at=path)
        self._put(f"{self._path}.{part}", value)

    def __setattr__(self, part: str, value: Any) -> None:
        self[part] = value

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.partition(".")[0] for name in self._below()))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *attributes(self._below())]

    def _ipython_key_completions_(self) -> list[str]:
        return self._below()

    def __repr__(self) -> str:
        return f"Nested({self._path}: {', '.join(self._below())})"


class Arrays(Mapping[str, Any]):
    """A mapping of dotted names to arrays, which attributes reach too; subclasses define `self[name]`."""

    __slots__ = ()

    def _find(self, name: object) -> Any:
        return find(name, tuple(self), self.__getitem__)

    def __contains__(self, name: object) -> bool:
        return any(one == name or one.startswith(f"{name}.") for one in self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._find(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *attributes(tuple(self))]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


class Views:
    """Arrays by attribute or by dotted name; subclasses define `_names` and `_view`."""

    __slots__ = ()

    def _view(self, name: str) -> Any:
        raise NotImplementedError

    def _names(self) -> tuple[str, ...]:
        raise NotImplementedError

    def _putter(self) -> Put | None:
        """The function that assigns to a name; None if nothing can be assigned."""
        return None

    def __getitem__(self, name: str) -> Any:
        if name in self._names():
            return self._view(name)
        try:
            return find(name, self._names(), self._view, self._putter())
        except UnknownName as error:
            raise explained(error, (name,)) from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *attributes(self._names())]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._names())
