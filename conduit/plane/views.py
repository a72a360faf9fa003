"""Names that lead to arrays: `row.obs.camera`, `row["obs.camera"]` and `row["obs"]["camera"]` are one and the same.

What several names lie below (`obs` of `obs.camera` and `obs.pose`) is handed out as `Nested`. A name that leads nowhere raises
`UnknownName`, which is a KeyError and an AttributeError, so that `in`, `get` and `hasattr` answer.
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
    """What a name leads to: its array, or `Nested` where other names lie below it.

    Args:
        path: The name, dotted.
        names: All names that lead to arrays.
        get: Gives the array of one of them.
        put: Assigns to one of them, or None where nothing can be assigned.

    Raises:
        UnknownName: It leads nowhere; the message has the nearest name.
    """
    if path in names:
        return get(str(path))
    if any(name.startswith(f"{path}.") for name in names):
        return Nested(str(path), names, get, put)
    raise UnknownName(f"Expected the name of an array, got {path!r}{hint(path, with_parents(names))}", at=str(path))


def spread(path: str, names: Collection[str], value: Any) -> Mapping[str, Any]:
    """A nested value for everything below a name, as {dotted name: value}.

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
    """What lies below a name: its parts by attribute (`obs.camera`), by name (`obs["camera"]`, `obs["pose.0"]`), of a tuple by place.

    A part that is called as a method of a mapping (keys, values, items, get) is reached by name.
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
    """A mapping of dotted names to arrays, which are reached by attribute as well; `self[name]` comes from whoever inherits."""

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
    """Arrays by attribute or by dotted name, of something that knows its names."""

    __slots__ = ()

    def _view(self, name: str) -> Any:
        raise NotImplementedError

    def _names(self) -> tuple[str, ...]:
        raise NotImplementedError

    def _putter(self) -> Put | None:
        """What assigns to a name, or None where nothing can be assigned."""
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
