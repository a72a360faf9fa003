"""Minari datasets. An episode of T steps has T + 1 observations there, so the last step's next observation is known.

Observations and actions become `obs` and `action`, nested like their spaces. Rewards keep their stored dtype. Seeds, options and infos
are left out.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from conduit.errors import ConduitError, ConfigError, MissingExtra, SchemaError, SourceError
from conduit.field import Field, dtype_name
from conduit.nesting import check_known, hint
from conduit.offline.columns import Kind, behind, fits, joined
from conduit.offline.source import Description, Source
from conduit.plane.deliver.scan import Scan
from conduit.plane.deliver.steps import Array, Steps
from conduit.schema import Schema

_ROWS = 1 << 13


def package() -> ModuleType:
    """Minari, after a check for the package that it reads its files with.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        import h5py  # noqa: F401 - Minari looks for it late
        import minari
    except ImportError as error:
        raise MissingExtra("Minari datasets need minari and h5py: pip install 'conduit-rl[offline]'") from error
    module: ModuleType = minari
    return module


class MinariSource(Source):
    """A dataset as a source; its first episode is read to find its columns.

    Args:
        source: minari.MinariDataset, the path of one, or the id of a local one. Nothing is downloaded.
        schema: The schema that it must fit, or None.
        columns: {field: its name in the dataset}, for names that differ.

    Raises:
        ConfigError: `columns` has a name that is not in the schema.
        SourceError: There is no such dataset, it is empty, or it does not fit.
    """

    def __init__(self, source: Any, schema: Schema | None, columns: Mapping[str, str]) -> None:
        self._dataset, name = _opened(source)
        if len(self._dataset) == 0 or self._dataset.total_steps == 0:
            raise SourceError(f"Expected a dataset with steps, got none in {name}")
        self._name = name
        self._stored = dict(columns)
        episode = next(iter(self._dataset.iterate_episodes()))
        paths, skipped = _columns(episode)
        self._check_names(paths, skipped, schema)
        first = self._named(paths)
        self._schema = schema or _schema_of(first, paths, self._stored, name)
        self._check(first, skipped, "its first episode")
        rows, episodes = int(self._dataset.total_steps), len(self._dataset)
        ignored = {name for name in first if name not in self._schema.names} | skipped.keys()
        self.description = Description(
            name,
            "minari",
            self._schema,
            rows,
            episodes,
            episodes,
            {},
            tuple(sorted(ignored - {"terminated", "truncated"})),
            skipped,
        )

    def _check_names(self, paths: Mapping[str, Array], skipped: Mapping[str, str], schema: Schema | None) -> None:
        for wanted, path in self._stored.items():
            if path in ("terminated", "truncated") or wanted in ("terminated", "truncated"):
                raise ConfigError(
                    f"Expected no other flags than a Minari dataset's own, got {wanted!r}: {path!r} - at columns"
                )
            if path not in paths and path not in skipped:
                there = sorted({*paths, *skipped} - {"terminated", "truncated"})
                raise SourceError(
                    f"Expected a value of {self._name}, got {path!r}{hint(path, there)} - at columns[{wanted!r}]"
                )
        if schema is not None:
            check_known(self._stored, schema.names, "fields of the schema", "columns")

    def _named(self, paths: Mapping[str, Array]) -> dict[str, Array]:
        """Values by the names of their fields, or by their own names if `columns` does not map them."""
        columns = {path: array for path, array in paths.items() if path not in self._stored.values()}
        return columns | {wanted: paths[path] for wanted, path in self._stored.items() if path in paths}

    def _check(self, columns: Mapping[str, Array], skipped: Mapping[str, str], where: str) -> None:
        for field in self._schema.fields:
            if field.name not in columns:
                names = sorted(columns.keys() - {"terminated", "truncated"})
                path = self._stored.get(field.name, field.name)
                got = skipped.get(path) or f"nothing of the name{hint(path, names)}"
                raise SourceError(
                    f"Expected a value for the field {field.name!r} ({field}), got {got}; name what has it by "
                    f"columns={{{field.name!r}: ...}} - in {where} of {self._name}"
                )
            kind = _kind(field.name, columns[field.name], self._name)
            if field.ragged or not fits(kind, field):
                raise SourceError(f"Expected {field}, got {kind} - {field.name!r} of {where} in {self._name}")

    def steps(self) -> Iterator[Steps]:
        """All episodes, several at a time; see `Source.steps`."""
        waiting: list[Steps] = []
        for episode in self._dataset.iterate_episodes():
            paths, skipped = _columns(episode)
            columns = self._named(paths)
            self._check(columns, skipped, f"episode {episode.id}")
            waiting.append(self._of_episode(columns, int(episode.id)))
            if sum(map(len, waiting)) >= _ROWS:
                yield joined(waiting)
                waiting = []
        if waiting:
            yield joined(waiting)

    def _of_episode(self, columns: Mapping[str, Array], number: int) -> Steps:
        terminated, truncated = columns["terminated"].astype(bool), columns["truncated"].astype(bool)
        count = len(terminated)
        seen = {name: columns[name] for name in self._schema.observation_names}
        for name in self._schema.names:
            expected = (count, count + 1) if name in seen else (count,)
            if len(columns[name]) not in expected:
                raise SourceError(
                    f"Expected {expected[-1]} values for {count} steps, got {len(columns[name])} - {name!r} of episode "
                    f"{number} in {self._name}"
                )
        known = bool(seen) and all(len(values) == count + 1 for values in seen.values())
        ended = terminated | truncated
        if known and count and not ended[-1]:
            # the data end here, the task does not
            truncated = truncated.copy()
            truncated[-1] = ended[-1] = True
        places = np.flatnonzero(ended)
        if not known:
            places = places[places < count - 1]
        return Steps(
            {name: columns[name][:count] for name in self._schema.names},
            terminated,
            truncated,
            behind(True, ended) if count else ended,
            places,
            {name: values[places + 1] for name, values in seen.items()},
        )


def _opened(source: Any) -> tuple[Any, str]:
    minari = package()
    if isinstance(source, minari.MinariDataset):
        return source, f"dataset {source.spec.dataset_id!r}"
    name = f"dataset {str(source)!r}"
    try:
        if isinstance(source, os.PathLike):
            path = Path(source)
            return minari.MinariDataset(path / "data" if (path / "data").is_dir() else path), name
        if isinstance(source, str):
            return minari.load_dataset(source), name
    # for a damaged dataset, Minari may raise any exception
    except Exception as error:
        raise SourceError(
            f"Expected a path, or the id of a local Minari dataset (`minari list local`), got {str(source)!r}: {error}"
        ) from error
    raise SourceError(f"Expected a path, a Minari dataset or its id, got {type(source).__name__}")


def _columns(episode: Any) -> tuple[dict[str, Array], dict[str, str]]:
    """An episode's values by dotted name, and {name: description} of values that are not arrays of numbers.

    Observations have one row more than there are steps.
    """
    columns = {
        "reward": np.asarray(episode.rewards),
        "terminated": np.asarray(episode.terminations),
        "truncated": np.asarray(episode.truncations),
    }
    skipped = {}
    for key, value in (("obs", episode.observations), ("action", episode.actions)):
        for path, array in _flat(key, value):
            if isinstance(array, np.ndarray) and array.dtype.kind in "biuf" and array.dtype.isnative:
                columns[path] = array
            else:
                inner = f" of {type(array[0]).__name__}" if isinstance(array, list | tuple) and array else ""
                skipped[path] = (
                    f"`{array.dtype}`" if isinstance(array, np.ndarray) else f"{type(array).__name__}{inner}"
                )
    return columns, skipped


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(f"{path}.{key}", part)
    elif isinstance(value, tuple):
        for place, part in enumerate(value):
            yield from _flat(f"{path}.{place}", part)
    else:
        yield path, value


def _kind(path: str, array: Array, name: str) -> Kind:
    try:
        return Kind(dtype_name(array.dtype), array.shape[1:])
    except SchemaError as error:
        raise SourceError(f"{error} - {path!r} of {name}") from error


def _schema_of(
    columns: Mapping[str, Array], paths: Mapping[str, Array], stored: Mapping[str, str], name: str
) -> Schema:
    fields = []
    for path in [*paths, *stored]:
        if path not in columns or path in ("terminated", "truncated", "reward"):
            continue
        kind = _kind(path, columns[path], name)
        observed = stored.get(path, path).partition(".")[0] == "obs"
        try:
            fields.append(Field(path, kind.dtype, kind.shape, observation=observed))
        except SchemaError as error:
            raise SourceError(
                f"{error}: give it a field's name by columns={{'<field>': {path!r}}} - {path!r} of {name}"
            ) from error
    try:
        if "reward" in columns:
            kind = _kind("reward", columns["reward"], name)
            fields.append(Field("reward", kind.dtype, kind.shape))
        return Schema(fields)
    except SchemaError as error:
        raise SourceError(f"{error} - in {name}") from error


def check_schema(schema: Schema) -> None:
    """Refuse a table that Minari's episodes cannot hold.

    Raises:
        ConfigError: The table has fields other than observations, actions and a reward, or ragged fields.
    """
    roots = {name.partition(".")[0] for name in schema.names}
    fits_ = roots == {"obs", "action", "reward"} and schema["reward"].shape == () if "reward" in schema else False
    if not fits_ or schema.ragged_names:
        raise ConfigError(
            f"Expected the fields `obs`, `action` and `reward` (a scalar), none of them ragged, got {list(schema.names)}: "
            "export to npz or Parquet"
        )


def spaces_of(schema: Schema, root: str) -> Any:
    """The widest Gymnasium space of a field, or of all fields below a parent."""
    from gymnasium import spaces

    def box(field: Field) -> Any:
        dtype = field.numpy_dtype
        if dtype.kind == "f":
            return spaces.Box(-np.inf, np.inf, field.shape, dtype.type)
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        return spaces.Box(low, high, field.shape, dtype.type)

    def space(value: Any) -> Any:
        if isinstance(value, dict):
            return spaces.Dict({key: space(part) for key, part in value.items()})
        if isinstance(value, tuple):
            return spaces.Tuple([space(part) for part in value])
        return value

    names = [name for name in schema.names if name == root or name.startswith(f"{root}.")]
    return space(schema.nest({name: box(schema[name]) for name in names})[root])


def episodes_of(scan: Scan) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole episodes of a scan in Minari's form, and how many steps of each were left out.

    A terminated step without a final observation gets its own observation as the next one, as in batches. Any other last step without a
    known next observation is left out: its observation becomes the next observation of the step before.
    """
    waiting: list[Steps] = []
    for steps in scan:
        for start, stop in itertools.pairwise(sorted({0, *np.flatnonzero(steps.starts).tolist(), len(steps)})):
            if steps.starts[start] and waiting:
                yield _episode(scan.schema, joined(waiting))
                waiting = []
            waiting.append(steps.part(start, stop))
    if waiting:
        yield _episode(scan.schema, joined(waiting))


def _episode(schema: Schema, steps: Steps) -> tuple[dict[str, Any], int]:
    count = len(steps)
    known = len(steps.places) > 0
    kept = count if known or steps.terminated[-1] else count - 1
    observations = {}
    for name in schema.observation_names:
        values = steps.columns[name]
        last = steps.finals[name][-1:] if known else values[-1:]
        observations[name] = np.concatenate([values[:kept], last])
    actions = {name: steps.columns[name][:kept] for name in schema.names if name.partition(".")[0] == "action"}
    return {
        "observations": schema.nest(observations)["obs"],
        "actions": schema.nest(actions)["action"],
        "rewards": steps.columns["reward"][:kept],
        "terminations": steps.terminated[:kept],
        "truncations": steps.truncated[:kept],
    }, count - kept


def create(dataset_id: str, episodes: Iterator[Any], **options: Any) -> None:
    """Make a dataset from episode buffers.

    Raises:
        SourceError: Minari refuses the dataset, for instance because the id is taken.
    """
    minari = package()
    try:
        with warnings.catch_warnings():
            # the caller decides about the dataset's metadata
            warnings.filterwarnings("ignore", message=".*(is set to None|env_spec is None).*", category=UserWarning)
            minari.create_dataset_from_buffers(dataset_id, episodes, jpeg_encoding=False, **options)
    except ConduitError:
        raise
    except (ValueError, TypeError, AssertionError, OSError) as error:
        raise SourceError(f"Expected Minari to take the dataset {dataset_id!r}: {error}") from error
