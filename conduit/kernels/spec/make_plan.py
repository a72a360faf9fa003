"""Makes a plan from a schema, a window and transforms; refuses combinations that do not fit, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from conduit.errors import ConfigError
from conduit.field import Field
from conduit.kernels.spec.conversion import Conversion, conversions
from conduit.kernels.spec.names import check_roles, clash, shown
from conduit.kernels.spec.plan import FLAGS, NEXT, STORED, Computed, Output, Plan, Return, Rows
from conduit.kernels.spec.ragged import Layout, Ragged, layouts, ragged_output
from conduit.kernels.spec.transforms import Pipeline, Transform
from conduit.kernels.spec.windows import Episode, Rollout, Sequence, Transition, Window, has_next, lanes
from conduit.nesting import check_known
from conduit.numbers import at_least
from conduit.schema import Schema


def _computed(window: Window) -> dict[str, Computed]:
    """All columns that a window can make from flags, by name."""
    axes = lanes(window)
    made = {flag: Computed(flag, "bool", axes) for flag in FLAGS}
    if isinstance(window, Transition):
        if window.n_step > 1:
            made["discount"] = Computed("discount", "float32", ())
            made["n_steps"] = Computed("n_steps", "int64", ())
        return made
    made |= {name: Computed(name, "bool", axes) for name in ("is_first", "mask")}
    if isinstance(window, Sequence):
        made["loss_mask"] = Computed("loss_mask", "bool", axes)
    if not isinstance(window, Rollout):
        made["lengths"] = Computed("lengths", "int64", ())
    return made


def _source(field: Field, window: Window, *, follows: bool) -> tuple[Rows, tuple[int, ...]]:
    """Rows and lanes of a field's output, or of its next observation's."""
    if not isinstance(window, Transition):
        return "following_lanes" if follows else "lanes", lanes(window)
    if field.observation and window.stack > 1:
        return "following_stack" if follows else "stack", (window.stack,)
    return "following" if follows else "anchor", ()


def make_plan(
    schema: Schema,
    batch_size: int,
    window: Window | None = None,
    transform: Mapping[str, Pipeline] | None = None,
    fields: Iterable[str] | None = None,
    extra: tuple[Computed, ...] = (),
    ragged: Layout | Mapping[str, Layout] = "pad",
    rename: Mapping[str, str] | None = None,
) -> Plan:
    """Compile a plan for a schema.

    Args:
        schema: The table's schema.
        batch_size: Samples per batch, at least 1.
        window: What a sample is built from; default 1-step transitions.
        transform: {field: step or tuple of steps}. An observation's steps also apply to the next observation; a reward's steps apply to
            every single reward that a return sums up. A parent ("obs" for "obs.camera") stands for all fields below it that are not
            named themselves.
        extra: Arrays that the sampler makes, always delivered.
        fields: Outputs to deliver, in this order; None for all: fields, next observations (of transitions, and of windows with
            next_obs), and the window's columns.
        ragged: The layout of ragged fields (conduit.kernels.spec.ragged), for all of them or {field: layout}. A field's masks, lengths
            and so on are delivered right after its values.
        rename: {field, or parent: name in the batch}; `fields` uses the new names, `transform` and `ragged` the schema's names.

    Raises:
        ConfigError: An unknown name, size, window or cast, one name for two outputs, or a window that needs a role that no field has.
    """
    batch_size = at_least("a batch_size", batch_size, 1)
    if transform is not None and not isinstance(transform, Mapping):
        raise ConfigError(f"Expected a mapping of fields to transforms, got {type(transform).__name__} - at transform")
    if isinstance(fields, str) or not (fields is None or isinstance(fields, Iterable)):
        raise ConfigError(f"Expected a list of outputs, got {fields!r} - at fields")
    window = Transition() if window is None else window
    if not isinstance(window, Transition | Sequence | Episode | Rollout):
        raise ConfigError(f"Expected a window (Transition, Sequence, Episode, Rollout), got {type(window).__name__}")
    chosen = conversions(schema, transform or {})
    visible = shown(schema, rename)
    stored = dict(zip(visible.names, schema.fields, strict=True))
    made = _computed(window)
    following = [NEXT + name for name in visible.observation_names] if has_next(window) else []
    every = [*stored, *following, *made]
    wanted = every if fields is None else list(fields)
    for name in wanted:
        if name not in every:
            _check_following(name, visible, window)
        if name in stored and name in made:
            raise clash(name, stored[name].name, f"the window's `{name}`")
    check_known(wanted, every, "outputs", "fields")
    if len(set(wanted)) != len(wanted) or not wanted:
        raise ConfigError(f"Expected each output once and at least one, got {wanted}")
    check_roles(schema, window, None if fields is None else {stored[name].name for name in wanted if name in stored})
    rewards = visible.reward_names
    sums = rewards if isinstance(window, Transition) and window.n_step > 1 else ()
    chosen_layouts = layouts(schema, ragged)
    outputs, computed, uneven, returns = [], [], [], []
    for name in wanted:
        if name in made:
            computed.append(made[name])
            continue
        if name in sums:
            returns.append(Return(name, stored[name], _summand(chosen.get(stored[name].name), stored[name])))
            continue
        follows = name not in stored
        field = stored[name.removeprefix(NEXT) if follows else name]
        rows, axes = _source(field, window, follows=follows)
        done = chosen.get(field.name, Conversion(Transform(field.dtype)))
        if field.ragged:
            uneven.append(ragged_output(name, field, rows, chosen_layouts[field.name], done, batch_size))
            continue
        outputs.append(
            Output(name, field, rows, axes, done.transform, done.classes, done.normalize, done.shift, done.start)
        )
        if done.normalize is not None and done.normalize.update and not follows:
            outputs.append(Output(STORED + name, field, rows, axes, Transform(field.dtype)))
    parts = {item.name: item.parts for item in uneven}
    names = (*(part for name in wanted for part in parts.get(name, (name,))), *(item.name for item in extra))
    if len(set(names)) != len(names):
        raise _twice(names, wanted, stored, uneven, extra)
    _check_parents(names, stored)
    return Plan(
        batch_size,
        window,
        tuple(outputs),
        (*computed, *extra),
        names,
        tuple(returns),
        tuple(uneven),
        tuple(name for name in names if name in rewards),
    )


def _check_following(name: object, visible: Schema, window: Window) -> None:
    """Refuse the name of a next observation that the batch cannot have, although its field exists.

    Raises:
        ConfigError: The name is such a name.
    """
    field = str(name).removeprefix(NEXT)
    if field == name or field not in visible:
        return
    if not has_next(window):
        raise ConfigError(
            f"Expected {name!r} only of a window that reads next observations: open it with next_obs=True - at fields"
        )
    raise ConfigError(
        f"Expected the next one of an observation, got {name!r}: declare {field!r} with observation=True, in conduit.Field or "
        "Schema.from_example - at fields"
    )


def _check_parents(names: tuple[str, ...], stored: Mapping[str, Field]) -> None:
    """Refuse a derived array that has the name of a parent of stored fields: `Batch.nest` could return only one of the two.

    Raises:
        ConfigError: There is such an array.
    """
    for name in names:
        below = name.partition(".")[0]
        if below != name and below in names:
            field = stored.get(name) or stored[name.removeprefix(NEXT)]
            raise clash(below, field.name.partition(".")[0], f"the derived `{below}`")


def _twice(
    names: tuple[str, ...],
    wanted: list[str],
    stored: Mapping[str, Field],
    uneven: list[Ragged],
    extra: tuple[Computed, ...],
) -> ConfigError:
    """The error for a batch in which a name would stand for two arrays."""
    name = next(name for name in names if names.count(name) > 1)
    owners = [f"what comes with the ragged `{item.name}`" for item in uneven if name in item.parts[1:]]
    owners += [f"the `{name}` that the loader adds" for item in extra if item.name == name]
    owners += [f"`{name}`" for one in wanted if one == name and one not in stored]
    return clash(name, stored[name].name if name in wanted and name in stored else None, owners[0], owners[-1])


def _summand(done: Conversion | None, field: Field) -> Transform:
    """The transform of each reward that a return sums up.

    Raises:
        ConfigError: A return cannot sum up this field, or values after this conversion.
    """
    if field.dtype not in ("float32", "float64") or field.ragged:
        remedy = "leave it out by fields=(...)" if field.ragged else "store it as 'float32', with casting='same_kind'"
        raise ConfigError(
            f"Expected `float32` or `float64` as reward of n-step returns, got {field}: {remedy} - at `{field.name}`"
        )
    if done is None:
        return Transform(field.dtype)
    if done.normalize is not None or done.classes or done.transform.dtype not in ("float32", "float64"):
        raise ConfigError(
            f"Expected rewards of n-step returns to be scaled or clipped, to `float32` or `float64`, got {done}: use "
            f"n_step=1, or divide by a fixed number - at transform[{field.name!r}]"
        )
    return done.transform
