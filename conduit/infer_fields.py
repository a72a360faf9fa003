"""Fields that are inferred: from an example, one row's values, or from the spaces of a Gymnasium environment.

Dicts and tuples are walked down to values with a dtype and a shape; a field's name is the path, `obs.camera` or `obs.0`. Gymnasium is
imported only to read spaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from conduit.errors import MissingExtra, SchemaError
from conduit.field import KEY, Field
from conduit.nesting import hint, with_parents


def fields_of_example(
    example: Mapping[str, Any], observation: str | Iterable[str] | None, reward: str | Iterable[str] | None
) -> list[Field]:
    """The fields of one row's values, with their roles; arguments and errors are those of `Schema.from_example`."""
    if not isinstance(example, Mapping):
        raise SchemaError(f"Expected a mapping of names to values, got `{type(example).__name__}`")
    fields = [item for key, value in example.items() for item in _fields_of_value(key, value)]
    observed = _below("obs" if observation is None else observation, fields, observation is not None, "observations")
    # a field called `reward` is the reward without a declaration
    rewards = set() if reward is None else _below(reward, fields, True, "rewards")
    return [replace(f, observation=f.name in observed, reward=f.name in rewards) for f in fields]


def fields_of_spaces(observation_space: object, action_space: object, reward: object | None) -> list[Field]:
    """The fields of an environment's rows, with their roles; arguments and errors are those of `Schema.from_spaces`."""
    fields = [*_fields_of_space("obs", observation_space, True), *_fields_of_space("action", action_space, False)]
    if hasattr(reward, "contains"):
        fields += [replace(item, casting="same_kind") for item in _fields_of_space("reward", reward, False)]
    elif reward is not None:
        fields.append(Field("reward", reward, (), casting="same_kind"))
    return fields


def _below(roots: str | Iterable[str], fields: list[Field], must: bool, what: str) -> set[str]:
    """The names of the fields that are one of the roots, or below one.

    Raises:
        SchemaError: A root is required and missing.
    """
    found: set[str] = set()
    for root in (roots,) if isinstance(roots, str) else tuple(roots):
        names = {f.name for f in fields if f.name == root or f.name.startswith(f"{root}.")}
        if must and not names:
            raise SchemaError(
                f"Expected names of {what}, got {root!r}{hint(root, with_parents(f.name for f in fields))}"
            )
        found |= names
    return found


def _joined(path: str, key: object) -> str:
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise SchemaError(
            f"Expected a key of letters, digits and `_`, not starting with a digit, got {key!r}: rename it",
            at=path,
        )
    return f"{path}.{key}"


def _fields_of_value(path: str, value: Any) -> list[Field]:
    if isinstance(value, bool | int | float) and not isinstance(value, np.generic):
        dtype = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float32"
        return [Field(path, dtype, (), casting="same_kind")]
    if isinstance(value, Mapping):
        parts = [(_joined(path, key), part) for key, part in value.items()]
    elif isinstance(value, tuple):
        parts = [(f"{path}.{place}", part) for place, part in enumerate(value)]
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        return [Field(path, value.dtype, tuple(value.shape))]
    else:
        raise SchemaError(
            "Expected an array, a bool, int or float, or a dict or tuple of them, got "
            f"`{type(value).__name__}`: make it an array",
            at=path,
        )
    if not parts:
        raise SchemaError(f"Expected a `{type(value).__name__}` with parts, got an empty one", at=path)
    return [item for name, part in parts for item in _fields_of_value(name, part)]


_WRAP = "store numbers of fixed shape, by a wrapper of the environment whose space says so, or by `Schema([Field(...), ...])`"
_REMEDIES = {
    "Sequence": "values of varying length are a ragged field, `Schema([..., Field({path!r}, dtype, (max_length, ...), "
    "ragged=True{role})])`",
    "Text": "store the characters' numbers as a ragged field, `Schema([..., Field({path!r}, 'uint8', (max_length,), "
    "ragged=True{role})])`, and write `np.frombuffer(text.encode(), np.uint8)`",
    "Graph": "store its arrays as ragged fields, `Schema([..., Field('{path}.nodes', dtype, (max_nodes, ...), ragged=True{role}), "
    "Field('{path}.edges', ...), Field('{path}.edge_links', 'int64', (max_edges, 2), ragged=True{role})])`",
    "OneOf": "store which of its spaces it is and a value of each, `spaces.Tuple((spaces.Discrete(n), space_0, ...))`, by a "
    "wrapper of the environment, or as fields by `Schema([...])`",
}
"""Remedies for spaces whose values have no fixed shape, by the name of the space."""


def _fields_of_space(path: str, space: object, observation: bool) -> list[Field]:
    try:
        from gymnasium import spaces
    except ImportError as error:
        raise MissingExtra("`Schema.from_spaces` needs Gymnasium: pip install 'conduit-rl[gym]'") from error
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return [Field(path, space.dtype, space.shape or (), observation)]
    if isinstance(space, spaces.Dict):
        parts = [(_joined(path, key), part) for key, part in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        parts = [(f"{path}.{place}", part) for place, part in enumerate(space.spaces)]
    else:
        kind = type(space)
        remedy = next((text for name, text in _REMEDIES.items() if isinstance(space, getattr(spaces, name, ()))), _WRAP)
        raise SchemaError(
            "Expected a Gymnasium Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple space, got "
            f"`{kind.__module__}.{kind.__qualname__}`: {remedy.format(path=path, role=', observation=True' if observation else '')}",
            at=path,
        )
    if not parts:
        raise SchemaError(f"Expected a space with parts, got an empty `{type(space).__name__}`", at=path)
    return [item for name, part in parts for item in _fields_of_space(name, part, observation)]
