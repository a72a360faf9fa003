"""HDF5: datasets as columns, named by their paths, in three forms.

    flat        datasets of one value per step, with the names of Conduit's columns, or with names that `columns=` maps
    D4RL's      the same, named observations, actions, rewards, terminals, timeouts, next_observations
    robomimic's a group for each episode, data/demo_<k>, of actions, rewards, dones, states, obs/<key>, next_obs/<key>

The names of the last two are built in, so that they need no mapping: `terminated` is D4RL's terminals and robomimic's dones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from conduit.errors import MissingExtra, SchemaError, SourceError
from conduit.field import Field, dtype_name
from conduit.offline.columns import Chunk, Kind, Part
from conduit.plane.deliver.steps import Array

_EPISODE = re.compile(r"demo_(\d+)")
_D4RL = {
    "obs": "observations",
    "next_obs": "next_observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminals",
    "truncated": "timeouts",
}
_ROBOMIMIC = {"action": "actions", "reward": "rewards", "terminated": "dones"}


def package() -> ModuleType:
    """The package.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingExtra("HDF5 needs h5py: pip install 'conduit-rl[offline]'") from error
    module: ModuleType = h5py
    return module


class Hdf5Part(Part):
    """One HDF5 file.

    Args:
        path: The file.
        key: The column of the flag "terminated"; the file has as many steps as this column has values.
    """

    def __init__(self, path: Path, key: str) -> None:
        h5py = package()
        self.path = path
        self.skipped = {}
        self.uneven = {}
        try:
            self._file = h5py.File(path, "r")
            demos = self._demos(h5py)
            if demos:
                self._groups = demos
                per_group = [dict(self._datasets(h5py, group)) for group in demos]
                self._read_groups(per_group)
            else:
                self._groups = [self._file]
                self._read_flat(dict(self._datasets(h5py, self._file)), key)
        except (OSError, RuntimeError, KeyError) as error:
            raise SourceError(
                f"Expected a readable HDF5 file, got {type(error).__name__}: {error} - file {path}"
            ) from error
        if not self.names:
            raise SourceError(
                f"Expected HDF5 datasets of one value per step, flat (observations, actions, rewards, terminals) or in groups "
                f"data/demo_<k>, got {self.skipped or 'none'} - file {path}"
            )

    def _demos(self, h5py: ModuleType) -> list[Any]:
        """The groups of robomimic's form, in the order of their numbers."""
        data = self._file.get("data")
        if not isinstance(data, h5py.Group):
            return []
        found = {int(match[1]): data[name] for name in data if (match := _EPISODE.fullmatch(name))}
        return [found[number] for number in sorted(found)]

    def _datasets(self, h5py: ModuleType, group: Any, below: str = "") -> Iterator[tuple[str, Any]]:
        """Every dataset below a group, with its path; broken links are left out."""
        for name in group:
            item = group.get(name)
            if isinstance(item, h5py.Group):
                yield from self._datasets(h5py, item, f"{below}{name}/")
            elif isinstance(item, h5py.Dataset):
                yield f"{below}{name}", item

    def _read_flat(self, found: Mapping[str, Any], key: str) -> None:
        self.aliases = {wanted: column for wanted, column in _D4RL.items() if column in found and wanted not in found}
        readable = self._readable(found)
        key = key if key in readable else self.aliases.get("terminated", "")
        counts = {name: item.shape[0] for name, item in readable.items()}
        self.rows = counts[key] if key in counts else max(counts.values(), key=list(counts.values()).count, default=0)
        self.uneven = {name: count for name, count in counts.items() if count != self.rows}
        self.skipped |= {name: f"{count} values for {self.rows} steps" for name, count in self.uneven.items()}
        self.names = tuple(name for name in readable if name not in self.skipped)
        self._kinds = {name: _kind(readable[name]) for name in self.names}
        self._stops = [self.rows]

    def _read_groups(self, found: list[dict[str, Any]]) -> None:
        # `obs/eef_pos` is the field obs.eef_pos; its next observation is called next_obs.eef_pos
        self.aliases = dict(_ROBOMIMIC)
        for name in found[0]:
            if name.startswith(("obs/", "next_obs/")):
                self.aliases[name.replace("/", ".")] = name
        first = self._readable(found[0])
        self._stops, kinds = [], {name: _kind(item) for name, item in first.items()}
        for group, datasets in zip(self._groups, found, strict=True):
            if "actions" not in datasets:
                raise SourceError(
                    f"Expected the dataset 'actions' in {group.name} of {self.path}, got {sorted(datasets)}"
                )
            count = datasets["actions"].shape[0]
            self._stops.append((self._stops[-1] if self._stops else 0) + count)
            for name in [name for name in kinds if name not in self.skipped]:
                item = datasets.get(name)
                if (
                    item is None
                    or not item.shape
                    or item.shape[0] != count
                    or _problem(item)
                    or _kind(item) != kinds[name]
                ):
                    got = "nothing" if item is None else f"{item.dtype} {item.shape}"
                    self.skipped[name] = f"{got} in {group.name}, where {count} values of {kinds[name]} are to be"
        self.rows = self._stops[-1]
        self.names = tuple(name for name in kinds if name not in self.skipped)
        self._kinds = kinds
        self.begins = np.zeros(self.rows, bool)
        self.begins[[0, *(stop for stop in self._stops[:-1] if stop < self.rows)]] = self.rows > 0

    def _readable(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Datasets that a field can be read from; the others go to `skipped`."""
        self.skipped |= {name: problem for name, item in found.items() if (problem := _problem(item))}
        return {name: item for name, item in found.items() if name not in self.skipped}

    def kind(self, name: str, field: Field | None) -> Kind:
        """Dtype and shape of a column's values; see `Part.kind`."""
        return self._kinds[name]

    def whole(self, name: str) -> Array:
        """All values of a column of scalars."""
        return self._take(name, 0, self.rows)

    def mean_length(self, name: str) -> float:
        """Never called: HDF5 files have no ragged columns."""
        raise NotImplementedError

    def read(self, columns: Mapping[str, Kind], finals: Mapping[str, Kind], rows: int) -> Iterator[Chunk]:
        """The columns, at most `rows` rows at a time."""
        for start in range(0, self.rows, rows):
            stop = min(self.rows, start + rows)
            yield Chunk({name: self._take(name, start, stop) for name in columns}, np.zeros(0, np.int64), {})

    def _take(self, name: str, start: int, stop: int) -> Array:
        """Values of the rows [start, stop), from all groups that have some of them."""
        pieces, begin = [], 0
        for group, end in zip(self._groups, self._stops, strict=True):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                try:
                    pieces.append(np.asarray(group[name][low - begin : high - begin]))
                except (OSError, RuntimeError, KeyError) as error:
                    raise SourceError(
                        f"Expected readable values, got {type(error).__name__}: {error} - column {name!r} of {self.path}"
                    ) from error
            begin = end
        kind = self._kinds[name]
        return np.concatenate(pieces) if pieces else np.zeros((0, *kind.shape), kind.dtype)


def _problem(item: Any) -> str | None:
    """Why no field can be read from a dataset, or None."""
    if item.shape is None:
        return "an empty dataset"
    try:
        dtype_name(item.dtype)
    except SchemaError as error:
        return f"`{item.dtype}` ({error})"
    return None if item.shape else f"a single {item.dtype}, and not one value per step"


def _kind(item: Any) -> Kind:
    return Kind(dtype_name(item.dtype), tuple(item.shape[1:]))
