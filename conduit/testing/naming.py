"""Tests that a field may have any name: rows are written with such a field, and read back through every kind of delivery.

The names are taken from the words of the code itself, since these could clash. A field's values must come back bit by bit, or Conduit must
refuse the name with an error that says so; if a loader refuses it, `rename` must help.
"""

from __future__ import annotations

import keyword
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import conduit
from conduit.errors import ConfigError, SchemaError

ROWS = 14
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PREFIXES = ("", "", "", "next_", "_", "final.", "obs.", "reward.", "bootstrap_", "x.")
_SUFFIXES = ("", "", "", "_mask", "_lengths", "_cu_seqlens", "_position_ids", ".0", ".x", ".offsets", ".rows")
_OTHER = "renamed"

LIKELY = (
    *(
        "ids",
        "versions",
        "episodes",
        "steps",
        "discount",
        "n_steps",
        "mask",
        "is_first",
        "loss_mask",
        "lengths",
        "weights",
    ),
    *(
        "probabilities",
        "source",
        "advantages",
        "returns",
        "targets",
        "advantage_mask",
        "returns_to_go",
        "relabelled",
        "reward",
    ),
    *(
        "obs",
        "obs_mask",
        "x_mask",
        "x_lengths",
        "final",
        "terminated",
        "truncated",
        "meta",
        "priority",
        "bootstrap",
        "sampled",
    ),
    *(
        "bootstrap_obs",
        "bootstrap_x",
        "self",
        "commit",
        "reserve",
        "abort",
        "release",
        "keys",
        "items",
        "shape",
        "ticks",
        "row",
    ),
    *(
        "rows",
        "set_final",
        "close",
        "state",
        "shift",
        "stack",
        "used",
        "ended",
        "cut",
        "next_obs",
        "_x",
        "_ids",
        "lambda",
    ),
    *(
        "mask.x",
        "mask.0",
        "discount.x",
        "lengths.x",
        "weights.x",
        "advantages.x",
        "returns.0",
        "x.x",
        "ids.x",
        "next_obs.x",
    ),
    *("following", "anchor", "lanes", "values", "get", "nest", "transform", "columns", "fields", "rename", "renamed2"),
)
"""Names that stand for something, or once stood, where fields are written and delivered."""


def words() -> list[str]:
    """Every identifier and word of Conduit's sources, sorted."""
    root = Path(conduit.__file__).parent
    found: set[str] = set()
    for path in root.rglob("*.py"):
        found.update(_WORD.findall(path.read_text()))
    return sorted(found)


def names(count: int, seed: int) -> list[str]:
    """Names of fields: words as they are, behind and in front of what the code adds to names, and dotted."""
    chance = random.Random(seed)
    known = words()
    chosen = dict.fromkeys((*LIKELY, *keyword.kwlist)[:count])
    chosen |= dict.fromkeys(chance.sample(known, min(max(0, count - len(chosen)) // 2, len(known))))
    while len(chosen) < count:
        chosen[f"{chance.choice(_PREFIXES)}{chance.choice(known)}{chance.choice(_SUFFIXES)}"] = None
    return list(chosen)


def try_name(engine: str, name: str, width: int) -> str:
    """Write and read rows with a field of a name.

    Args:
        engine: Name of the engine to create.
        name: The field's.
        width: Elements of its value.

    Returns:
        "refused" where no schema takes the name, "renamed" where a loader wanted another one in the batch, else "right".

    Raises:
        AssertionError: What came back is not what was written, or an error does not name the field.
    """
    try:
        tables = _tables(name, width)
    except SchemaError as error:
        _expect(name[:20] in str(error), f"the field {name!r} in the error, got: {error}")
        return "refused"
    renamed = False
    with conduit.Engine.create(engine, tables) as made:
        for kind in ("plain", "seen", "ragged"):
            writer = _fill(made, kind, name, width)
            for options in _loaders(kind, name):
                renamed |= _read(made, kind, name, width, options)
            writer.close()
        renamed |= _consume(made, name, width)
    return "renamed" if renamed else "right"


def _expect(fits: bool, what: str) -> None:
    if not fits:
        raise AssertionError(f"Expected {what}")


def _tables(name: str, width: int) -> dict[str, Any]:
    root = name.partition(".")[0]
    beside = [
        conduit.Field("obs" if root != "obs" else "sight", "float32", (3,), observation=True),
        conduit.Field("reward" if root != "reward" else "gain", "float32", reward=True),
    ]
    options: dict[str, Any] = {"max_n_step": 2, "max_length": 4, "max_stack": 2, "priorities": conduit.Priorities()}
    unstacked: dict[str, Any] = {**options, "max_stack": 1}
    plain = conduit.Schema([conduit.Field(name, "float32", (width,)), *beside])
    seen = conduit.Schema([conduit.Field(name, "float32", (width,), observation=True), *beside])
    ragged = conduit.Schema([conduit.Field(name, "int32", (5,), ragged=True), *beside])
    return {
        "plain": conduit.Table(plain, 100, statistics=(name,), **options),
        "seen": conduit.Table(seen, 100, statistics=(name,), **options),
        "ragged": conduit.Table(ragged, 100, **unstacked),
        "queue": conduit.Table.queue(seen, 100, rollout_length=4, num_envs=1),
    }


def _value(t: int, width: int) -> Any:
    return np.full(width, 1.5 * t + 20.5, np.float32) + np.arange(width, dtype=np.float32)


def _tokens(t: int) -> Any:
    return np.arange(t % 6, dtype=np.int32) + 100 * t


def _row(schema: conduit.Schema, name: str, width: int, t: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for field in schema:
        if field.name == name:
            row[name] = _tokens(t) if field.ragged else _value(t, width)
        else:
            row[field.name] = np.full(field.shape, t, np.float32) if field.shape else np.float32(t)
    return row


def _fill(engine: conduit.Engine, table: str, name: str, width: int) -> conduit.Writer:
    """Rows by each form of writing, all of one episode of a stream that goes on as long as the writer is kept."""
    schema = engine.table(table).schema
    writer = engine.writer(table)
    for t in range(ROWS):
        row = _row(schema, name, width, t)
        form = None if t % 3 else _opened(writer.step)
        if form is None:
            writer.append(**row)
            continue
        with form as step:
            for field, value in row.items():
                step[field] = value
    return writer


def _opened(form: Any, *arguments: Any) -> Any:
    """A form of writing, or None where it says that it has something of a field's name itself."""
    try:
        return form(*arguments)
    except ConfigError as error:
        _expect(
            "Expected no field with the name of an attribute of the" in str(error),
            f"a form's own name in the error, got: {error}",
        )
        return None


def _loaders(kind: str, name: str) -> Iterator[dict[str, Any]]:
    """Options of loaders that read a table in different ways."""
    prioritized = {"sampling": conduit.Prioritized()}
    yield {}
    yield {"window": conduit.Transition(n_step=2, gamma=0.5), **prioritized}
    if kind == "ragged":
        yield {"ragged": "pack"}
        return
    yield {"window": conduit.Transition(stack=2), "transform": {name: conduit.normalize(update=True)}}
    yield {"window": conduit.Sequence(4, next_obs=False), "batch_transforms": (conduit.returns_to_go(),)}
    reward = "reward" if name.partition(".")[0] != "reward" else "gain"
    yield {"window": conduit.Rollout(4, 1), "batch_transforms": (conduit.gae(values=reward),)}


def _read(engine: conduit.Engine, table: str, name: str, width: int, options: dict[str, Any]) -> bool:
    """Compare batches of a loader with what was written; True where the name had to be another one in the batch."""
    given: dict[str, Any] = {"batch_size": 6, "min_rows": 1, "format": "numpy", "seed": 1, "timeout": 5.0, **options}
    shown, renamed = name, False
    try:
        loader = engine.loader(table, **given)
    except ConfigError as error:
        _expect(name.partition(".")[0] in str(error), f"{name!r} in the error, got: {error}")
        _expect("rename=" in str(error), f"a remedy in the error, got: {error}")
        shown, renamed = _OTHER, True
        loader = engine.loader(table, rename={name: _OTHER}, **given)
    with loader:
        for _ in range(2):
            _check(loader.next(), engine.table(table).schema[name], shown, width, options)
    return renamed


def _check(batch: Any, field: conduit.Field, name: str, width: int, options: dict[str, Any]) -> None:
    window = options.get("window", conduit.Transition())
    ahead = window.n_step if isinstance(window, conduit.Transition) else 0
    steps = batch.steps
    assert ((steps >= 0) & (steps < ROWS)).all(), f"steps {steps}"
    assert (batch.versions == 0).all()
    if "transform" in options:
        assert batch[name].shape == (6, *((2,) if field.observation else ()), width)
        return
    lanes = (4,) if isinstance(window, conduit.Sequence) else (4, 1) if isinstance(window, conduit.Rollout) else ()
    for slot, step in enumerate(steps.tolist()):
        if field.ragged:
            wanted = _tokens(step)
            if options.get("ragged") == "pack":
                begin, end = batch[f"{name}_cu_seqlens"][slot : slot + 2].tolist()
                got = batch[name][begin:end]
            else:
                got = batch[name][slot, : batch[f"{name}_lengths"][slot]]
            assert np.array_equal(got, wanted), f"row {step}: {got} instead of {wanted}"
        elif lanes:
            got = batch[name][slot].reshape(4, width)
            known = isinstance(window, conduit.Sequence)
            for lane in range(int(batch["lengths"][slot]) if known else 4):
                assert np.array_equal(got[lane], _value(step + lane, width)), f"row {step}, lane {lane}"
        else:
            assert np.array_equal(batch[name][slot], _value(step, width)), f"row {step}: {batch[name][slot]}"
            if field.observation:
                assert np.array_equal(batch[f"next_{name}"][slot], _value(step + ahead, width)), f"row behind {step}"
    if ahead == 2:
        assert (batch["discount"] == np.float32(0.25)).all()
        assert (batch["n_steps"] == 2).all()
        assert np.array_equal(batch[batch.reward_names[0]], (steps + 0.5 * (steps + 1)).astype(np.float32))
        assert (batch["weights"] > 0).all()
    nested: Any = batch.nest()
    for part in name.split("."):
        nested = nested[int(part) if isinstance(nested, tuple) else part]
    assert nested is batch[name]


def _consume(engine: conduit.Engine, name: str, width: int) -> bool:
    """The same through a queue: a rollout is written, a claim and its batch are read."""
    schema = engine.table("queue").schema
    with engine.writer("queue", num_envs=1, autoreset="next_step") as writer:
        rows = [_row(schema, name, width, t) for t in range(4)]
        form = _opened(writer.rollout, 4)
        if form is not None:
            with form as slab:
                for t, row in enumerate(rows):
                    for field, value in row.items():
                        slab[field][t, 0] = value
        else:
            for row in rows:
                writer.append(**{field: value[None] for field, value in row.items()})
    renamed, shown = False, name
    with engine.consumer("queue", format="numpy") as consumer:
        claim = consumer.next(1.0)
        for t in range(4):
            assert np.array_equal(claim[name][t, 0], _value(t, width)), f"row {t} of a claim"
        try:
            claim.batch()
        except ConfigError as error:
            _expect("rename=" in str(error) and name in str(error), f"a remedy in the error, got: {error}")
            shown, renamed = _OTHER, True
        claim.give_back()
        del claim
    options: dict[str, Any] = {"rename": {name: _OTHER}} if renamed else {}
    with engine.consumer("queue", format="numpy", **options) as consumer, consumer.next(1.0) as claim:
        batch = claim.batch()
        assert np.array_equal(batch[shown][0, :, 0], np.stack([_value(t, width) for t in range(4)]))
        assert batch["mask"].all()
        assert batch["is_first"][0, 0, 0]
        assert (claim.steps[:, 0] == np.arange(4)).all()
        del batch
    return renamed
