"""Schemas: the fields of a table's rows, their dtypes and shapes, and how nested values map to them.

A :class:`Schema` is an ordered tuple of :class:`Field`. Nested values (dicts and tuples, as Gymnasium's spaces nest)
are stored flat under dotted names, ``obs.camera`` or ``obs.0``, and are given back nested. The nesting follows from
the names alone: a part made of digits is a position in a tuple, any other part is a key of a dict. So it does not matter whether a schema
was made by hand, from spaces or from JSON: two schemas are equal if their fields are.

Two roles decide how windows treat fields: observations have a next observation, rewards are summed up. ``Field(observation=True)`` and
``Field(reward=True)`` declare them. One role is assumed: if no field is declared to be a reward, a field called ``reward``, or the
fields below a parent ``reward.``, are rewards. ``str(schema)`` and ``conduit status`` show the roles.

Invariants: names are unique, no name is both a field and the parent of one, the positions of a tuple count 0, 1, 2
without a gap, and every row has the same number of bytes (a row holds the position of a ragged value, which lies elsewhere). The
fingerprint covers the order of the fields too, since the memory layout follows it. The trade-off: the same fields in another order are
another schema.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from conduit.errors import FieldError, SchemaError
from conduit.field import Field
from conduit.infer_fields import fields_of_example, fields_of_spaces
from conduit.nesting import Nesting, hint, with_parents

_FORMAT = 1
_KEYS: Mapping[str, type] = {
    "name": str,
    "dtype": str,
    "shape": list,
    "observation": bool,
    "casting": str,
    "ragged": bool,
    "reward": bool,
}
"""Keys of a field in a document and the types of their values; the first three are required."""


def _refuse_unless(fits: bool, expected: str, found: object, at: str) -> None:
    if not fits:
        raise SchemaError(f"Expected a schema in JSON: {expected}, got {found!r}", at=at)


def _read_field(entry: Any, at: str) -> Field:
    """Read a field from a document."""
    _refuse_unless(isinstance(entry, dict), "an object for each field", entry, at)
    for key in entry:
        _refuse_unless(key in _KEYS, f"only the keys {', '.join(_KEYS)}{hint(key, _KEYS)}", key, at)
    for key in ("name", "dtype", "shape"):
        _refuse_unless(key in entry, f"the key {key!r}", sorted(entry), at)
    for key, value in entry.items():
        _refuse_unless(type(value) is _KEYS[key], f"`{_KEYS[key].__name__}` as {key!r}", value, at)
    sizes = entry["shape"]
    _refuse_unless(all(type(size) is int for size in sizes), "a list of `int` as 'shape'", sizes, at)
    return Field(**entry)


@dataclass(frozen=True, slots=True, init=False)
class Schema:
    """The fields of a table's rows, in order. Immutable; equal when the fields are equal; picklable.

    Attributes:
        fields: The fields in the order given.
        names: Their dotted names, in the same order.
        observation_names: The names of the fields that are observations, in the same order.
        reward_names: The names of the fields that are rewards, in the same order: the declared ones, or, if there are none,
            ``reward``, or the fields below ``reward.``.
        ragged_names: The names of the fields that are ragged, in the same order.
        row_bytes: Bytes of one row's fields, without padding and without the system columns; ragged ones at their longest.
        fingerprint: 16 hexadecimal characters: the head of the sha256 of :meth:`to_json`.
    """

    fields: tuple[Field, ...]
    names: tuple[str, ...] = field(compare=False, repr=False)
    observation_names: tuple[str, ...] = field(compare=False)
    reward_names: tuple[str, ...] = field(compare=False)
    ragged_names: tuple[str, ...] = field(compare=False, repr=False)
    row_bytes: int = field(compare=False, repr=False)
    fingerprint: str = field(compare=False, repr=False)
    _by_name: dict[str, Field] = field(compare=False, repr=False)
    _nesting: Nesting = field(compare=False, repr=False)
    _observations: Nesting = field(compare=False, repr=False)

    def __init__(self, fields: Iterable[Field]) -> None:
        """Build a schema by hand.

        Args:
            fields: At least one field.

        Raises:
            SchemaError: There is no field, a name occurs twice, a name is also the parent of another, or a tuple has a gap.
        """
        if isinstance(fields, Mapping):
            raise SchemaError("Expected fields, got a mapping: use `Schema.from_example` for a row of values")
        if not isinstance(fields, Iterable):
            raise SchemaError(f"Expected fields, such as [conduit.Field(...)], got {fields!r}")
        given = tuple(fields)
        by_name: dict[str, Field] = {}
        for item in given:
            if not isinstance(item, Field):
                raise SchemaError(f"Expected a `Field`, got {item!r} of type `{type(item).__name__}`")
            if item.name in by_name:
                raise SchemaError("Expected each field once, got two of the same name: rename one", at=item.name)
            by_name[item.name] = item
        if not by_name:
            raise SchemaError("Expected at least one field, got none")
        observed = tuple(item.name for item in given if item.observation)
        rewards = tuple(item.name for item in given if item.reward)
        for name, value in (
            ("fields", given),
            ("names", tuple(by_name)),
            ("observation_names", observed),
            ("reward_names", rewards or tuple(item.name for item in given if _is_called_reward(item))),
            ("ragged_names", tuple(item.name for item in given if item.ragged)),
            ("row_bytes", sum(item.row_bytes for item in given)),
            ("_by_name", by_name),
            ("_nesting", Nesting(by_name)),
            ("_observations", Nesting(observed)),
        ):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "fingerprint", hashlib.sha256(self.to_json()).hexdigest()[:16])

    @classmethod
    def from_spaces(cls, observation_space: object, action_space: object, reward: object | None = "float32") -> Schema:
        """Describe the rows of a Gymnasium environment: ``obs``, ``action`` and ``reward``.

        Box, Discrete, MultiDiscrete and MultiBinary become fields of the space's own dtype and shape; Dict and Tuple
        nest to any depth. A Discrete is a scalar; values that do not begin at 0 stay as they are (``conduit.one_hot`` takes
        ``start``). ``obs`` is the observation and ``reward`` the reward, which is written with ``casting="same_kind"``, since
        environments return it as float64.

        Args:
            observation_space: The space of one environment (``single_observation_space`` of a vector environment).
            action_space: The action space of one environment.
            reward: Dtype of a scalar reward, the space of several (Box, or Dict and Tuple of them), or None to leave it out.

        Raises:
            SchemaError: A space is of another kind, or its key, dtype or shape cannot be stored; names the path.
            MissingExtra: Gymnasium is not installed.
        """
        return cls(fields_of_spaces(observation_space, action_space, reward))

    @classmethod
    def from_example(
        cls,
        example: Mapping[str, Any],
        observation: str | Iterable[str] | None = None,
        reward: str | Iterable[str] | None = None,
    ) -> Schema:
        """Describe rows by one row of one environment: no leading axis, no ``terminated`` and ``truncated``.

        numpy and torch arrays and scalars give their own dtype and shape. Python's bool, int and float become bool,
        int64 and float32 scalars with ``casting="same_kind"``, as they carry no size of their own. Dicts and tuples
        nest; a list is refused, since it could be either an array or a tuple.

        Args:
            example: Names, nested or dotted, to values.
            observation: Names, of fields or of their parents, that are observations; by default ``obs`` if present.
            reward: Names, of fields or of their parents, that are rewards; by default ``reward`` if present.

        Raises:
            SchemaError: A value, key, dtype or shape cannot be stored, or a name in ``observation`` or ``reward`` is unknown.
        """
        return cls(fields_of_example(example, observation, reward))

    @classmethod
    def from_json(cls, document: bytes | bytearray | memoryview | str) -> Schema:
        """Read what :meth:`to_json` wrote.

        Raises:
            SchemaError: It is not such a document, this version does not know its format, or a field is not valid.
        """
        try:
            read = json.loads(bytes(document) if isinstance(document, memoryview) else document)
        except ValueError as error:
            raise SchemaError(f"Expected a schema in JSON: {error}") from error
        return cls.from_document(read)

    @classmethod
    def from_document(cls, document: Any) -> Schema:
        """Make a schema from a document of :meth:`to_document`.

        Raises:
            SchemaError: As :meth:`from_json`.
        """
        _refuse_unless(isinstance(document, dict), "an object", document, "schema")
        form = document.get("format")
        _refuse_unless(type(form) is int, "an `int` as 'format'", form, "schema")
        if form != _FORMAT:
            raise SchemaError(
                f"Expected a schema of format {_FORMAT}, got format {form}: use one version of conduit-rl in all processes"
            )
        for key in document:
            _refuse_unless(key in ("format", "fields"), "only the keys format, fields", key, "schema")
        entries = document.get("fields")
        _refuse_unless(isinstance(entries, list), "a list as 'fields'", entries, "schema")
        return cls(_read_field(entry, f"fields[{k}]") for k, entry in enumerate(entries))

    def to_json(self) -> bytes:
        """Write the schema as canonical JSON: the same bytes for equal schemas, on any machine."""
        return json.dumps(self.to_document(), separators=(",", ":"), ensure_ascii=False).encode()

    def to_document(self) -> dict[str, Any]:
        """The schema as a document that JSON can represent.

        Keys with their default value are left out, so that a key of a later version does not change the fingerprints of existing schemas.
        """
        fields: list[dict[str, object]] = []
        for item in self.fields:
            entry: dict[str, object] = {"name": item.name, "dtype": item.dtype, "shape": list(item.shape)}
            if item.observation:
                entry["observation"] = True
            if item.casting != "no":
                entry["casting"] = item.casting
            if item.ragged:
                entry["ragged"] = True
            if item.reward:
                entry["reward"] = True
            fields.append(entry)
        return {"format": _FORMAT, "fields": fields}

    def difference(self, other: Schema) -> str | None:
        """The first difference from another schema, with both sides, as text; None if the schemas are equal."""
        for mine in self.fields:
            theirs = other._by_name.get(mine.name)
            if theirs is None:
                return f"`{mine.name}` is {mine} in this schema and missing in the other"
            if mine != theirs:
                return f"`{mine.name}` is {mine} in this schema and {theirs} in the other"
        for theirs in other.fields:
            if theirs.name not in self._by_name:
                return f"`{theirs.name}` is missing in this schema and {theirs} in the other"
        for place, (a, b) in enumerate(zip(self.names, other.names, strict=True)):
            if a != b:
                return f"the order differs: field {place} is `{a}` in this schema and `{b}` in the other"
        return None

    def flatten(self, nested: Mapping[str, Any]) -> Mapping[str, Any]:
        """Turn one row's nested values into dotted names to values.

        Keys may be nested, dotted, or both. Values are passed through as they are: only keys are checked here.

        Args:
            nested: All fields and nothing else. A dict that is already flat is returned itself, at once.

        Returns:
            {dotted name: value} of all fields, in no particular order.

        Raises:
            FieldError: A key is missing, unknown or given twice, or a dict or tuple was expected; names the path.
        """
        if type(nested) is dict and nested.keys() == self._by_name.keys():
            return nested
        return self._nesting.flatten(nested)

    def flatten_observation(self, value: Any) -> Mapping[str, Any]:
        """Turn a nested observation alone, as a writer's ``final`` has it, into dotted names to values.

        Args:
            value: The value of the observation's name: an array for ``obs``, ``{"camera": ...}`` for ``obs.camera``. If observations
                have several top-level names, a mapping of those names. Dotted names are accepted too.

        Returns:
            {dotted name: value} of all observation fields, in no particular order.

        Raises:
            FieldError: As :meth:`flatten`, or the schema has no observations.
        """
        if not self.observation_names:
            raise FieldError("Expected no observation, got one: no field of the schema has `observation=True`")
        return self._observations.flatten_inner(value)

    def nest(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Turn dotted names to values back into nested dicts and tuples.

        Args:
            flat: Any of the fields, of ``next_<observation>``, ``terminated`` and ``truncated``. Parts of a dict may
                be left out; a tuple needs all of its parts or none.

        Returns:
            Nested values; a name without a dot keeps its value as it is.

        Raises:
            FieldError: A name is not one of these, or a tuple lacks a part.
        """
        ends = {name: flat[name] for name in ("terminated", "truncated") if name in flat}
        following = {f"next_{name}" for name in self.observation_names}
        for name in flat:
            if name not in self._by_name and name not in following and name not in ends:
                raise FieldError(f"Expected names of the schema, got {name!r}{hint(name, self.names)}", at=str(name))
        return self._nesting.nest(flat) | self._observations.nest(flat, "next_") | ends

    def renamed(self, rename: Mapping[str, str]) -> Schema:
        """This schema with other names for some fields, in the same order and with the same roles.

        Args:
            rename: {name of a field, or of a parent for all fields below it: the new name}.

        Raises:
            SchemaError: A name is unknown, or the new names do not make a schema.
        """
        if not isinstance(rename, Mapping) or not all(isinstance(new, str) for new in rename.values()):
            raise SchemaError(f"Expected {{name of a field: name in its place}}, got {rename!r}")
        names = {name: name for name in self.names}
        # longer, more specific names come later and replace their parents' renaming
        for old, new in sorted(rename.items(), key=lambda pair: str(pair[0]).count(".")):
            found = [name for name in self.names if name == old or name.startswith(f"{old}.")]
            if not found:
                raise SchemaError(f"Expected a field of the schema, got {old!r}{hint(old, with_parents(self.names))}")
            for name in found:
                names[name] = new + name[len(old) :]
        return Schema(replace(f, name=names[f.name], reward=f.name in self.reward_names) for f in self.fields)

    def __str__(self) -> str:
        """One line per field: name, dtype, shape, roles."""
        lines = []
        for item in self.fields:
            guessed = ", reward (by its name)" if item.name in self.reward_names and not item.reward else ""
            lines.append(f"{item.name}: {item}{guessed}")
        return "\n".join(lines)

    def __getitem__(self, name: str) -> Field:
        found = self._by_name.get(name)
        if found is None:
            raise FieldError(f"Expected a field of the schema, got {name!r}{hint(name, self.names)}")
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __reduce__(self) -> tuple[type[Schema], tuple[tuple[Field, ...]]]:
        return Schema, (self.fields,)


def _is_called_reward(item: Field) -> bool:
    return not item.observation and (item.name == "reward" or item.name.startswith("reward."))
