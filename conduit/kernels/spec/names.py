"""The names of a batch's arrays, and the check that a schema has the roles that a window needs.

All arrays of a batch have different names: a column of a window, sampler or batch transform never replaces a stored field.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from conduit.errors import ConfigError, SchemaError
from conduit.kernels.spec.transforms import FLOATS
from conduit.kernels.spec.windows import Transition, Window
from conduit.schema import Schema


def shown(schema: Schema, rename: Mapping[str, str] | None) -> Schema:
    """The schema with the names that its fields have in batches.

    Raises:
        ConfigError: `rename` has an unknown name, or its names do not make a schema.
    """
    if rename is None:
        return schema
    try:
        return schema.renamed(rename)
    except SchemaError as error:
        raise ConfigError(f"{error} - at rename") from error


def clash(name: str, field: str | None, what: str, other: str = "") -> ConfigError:
    """The error for two arrays of one name in a batch.

    Args:
        name: The name.
        field: The stored field of this name, by its name in the schema, or None.
        what: The other array of this name, as text.
        other: If `field` is None, the origin of the first array, as text.
    """
    if field is None:
        return ConfigError(f"Expected each name in a batch once, got {other} and {what}: rename a field - at `{name}`")
    return ConfigError(
        f"Expected each name in a batch once, got the stored field `{field}` and {what}: deliver the stored one under another "
        f"name, rename={{{field!r}: 'stored_{field.rpartition('.')[2]}'}}, or leave it out by fields=(...) - at `{name}`"
    )


def check_roles(schema: Schema, window: Window, named: Collection[str] | None) -> None:
    """Refuse a window that needs an observation or a reward if no field of the schema has that role.

    Without a reward, n-step windows are accepted only if it is clear that the caller wants no return: `fields=` is given, and its only
    floats are observations and `action`.

    Args:
        schema: The table's schema.
        window: The window.
        named: Fields that `fields=` lists, by their names in the schema, or None if it is not given.

    Raises:
        ConfigError: The schema lacks a role that the window needs.
    """
    declare = "in conduit.Field(...) or Schema.from_example(...)"
    if not schema.observation_names:
        needs = ""
        if not isinstance(window, Transition):
            needs = "next_obs=True" if window.next_obs else ""
        elif window.stack > 1:
            needs = f"stack={window.stack}"
        elif window.newest == "bootstrap":
            needs = "newest='bootstrap'"
        elif named is None:
            needs = "a Transition, which comes with what follows it"
        if needs:
            ways = ", or list what is wanted by fields=(...)" if needs.startswith("a ") else ""
            raise ConfigError(
                f"Expected an observation for {needs}, got none among {list(schema.names)}: declare it by observation=, "
                f"{declare}{ways}"
            )
    if schema.reward_names or not isinstance(window, Transition) or window.n_step == 1:
        return
    rest = schema.fields if named is None else [schema[name] for name in named]
    rest = [item for item in rest if not item.observation and item.dtype in FLOATS]
    unclear = [item.name for item in rest if item.name.partition(".")[0] != "action"]
    if named is None or unclear:
        raise ConfigError(
            f"Expected a reward to sum up over n_step={window.n_step} steps, got none among {list(schema.names)}: declare it "
            f"by reward=, {declare}, or leave out by fields=(...) what could be one{f', {unclear}' if unclear else ''}"
        )
