"""Callers' inputs: numbers and arrays of other libraries, misspelt names, files that Conduit did not write."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import conduit
from conduit import offline
from perf.bars import Bar


class _Foreign:
    """An array of bfloat16 as JAX hands it over: dtype, shape and `__array__`."""

    def __init__(self, values: list[float]) -> None:
        self._values = np.asarray(values, ml_dtypes.bfloat16)
        self.dtype, self.shape = self._values.dtype, self._values.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._values if dtype is None else self._values.astype(dtype)


def _equal(name: str, measured: object, right: object) -> Bar:
    return Bar(name, str(measured), str(right), str(measured) == str(right))


def _numbers() -> Iterator[Bar]:
    """A16 numbers and arrays of other libraries."""
    n = np.int64
    schema = conduit.Schema(
        [conduit.Field("obs", "bfloat16", (2,), observation=True), conduit.Field("reward", "bfloat16")]
    )
    table = conduit.Table(schema, capacity=n(100))
    yield _equal("A16 np.int64(100) as capacity", repr(table.capacity), "100")
    with conduit.Engine.create("bar-numbers", {"t": table}) as engine:
        with engine.writer("t") as writer:
            for _ in range(80):
                writer.append(obs=_Foreign([1.5, -2.5]), reward=ml_dtypes.bfloat16(0.25))
        with engine.loader("t", batch_size=n(64)) as loader:
            batch = loader.next()
    yield _equal("A16 np.int64(64) as batch_size", len(batch["reward"]), 64)
    yield _equal("A16 a foreign bfloat16 array", batch["obs"][0].tolist(), [1.5, -2.5])
    yield _equal("A16 an ml_dtypes scalar", batch["reward"][0].item(), 0.25)


def _names() -> Iterator[Bar]:
    """A12 names that nobody looked at."""
    schema = conduit.Schema(
        [conduit.Field("obs", "float32", (2,), observation=True), conduit.Field("reward", "float32")]
    )
    asked: dict[str, Callable[[conduit.Client], object]] = {
        "transform={'rewards': ...}": lambda e: e.loader("t", batch_size=1, transform={"rewards": conduit.scale(2.0)}),
        "min_rows={'repaly': ...} of a mix": lambda e: e.mixed_loader(
            {"replay": 1.0}, batch_size=1, min_rows={"repaly": 1}
        ),
        "a policy's array 'wieght'": lambda e: e.policy().publish({"wieght": np.zeros(1)}),
    }
    policies = {"policy": {"weight": np.zeros(1)}}
    tables = {name: conduit.Table(schema, capacity=100) for name in ("t", "replay")}
    with conduit.Engine.create("bar-names", tables, policies=policies) as engine:
        for name, ask in asked.items():
            try:
                ask(engine)
                found = "taken"
            except conduit.errors.ConduitError as error:
                found = "refused, the nearest named" if "did you mean" in str(error) else "refused"
            yield _equal(f"A12 {name}", found, "refused, the nearest named")


def _steps(rows: int) -> dict[str, Any]:
    return {
        "obs": np.arange(2 * rows, dtype=np.float32).reshape(rows, 2),
        "reward": np.ones(rows, np.float32),
        "terminated": np.zeros(rows, bool),
    }


_SCHEMA = conduit.Schema([conduit.Field("obs", "float32", (2,), observation=True), conduit.Field("reward", "float32")])


def _loaded(source: Path, columns: dict[str, str] | None = None) -> str:
    with conduit.Engine.create("bar-sources", {"t": conduit.Table(_SCHEMA, capacity=100)}) as engine:
        try:
            loaded = offline.load(engine, "t", source, columns=columns)
        except conduit.errors.ConduitError as error:
            return "refused, the nearest named" if "did you mean" in str(error) else f"refused: {error}"
        return f"{loaded.rows} steps, {loaded.episodes} episodes"


def _sources() -> Iterator[Bar]:
    """A12, A13 sources of other origin."""
    import h5py
    import pyarrow as pa
    import pyarrow.parquet as pq

    timeouts = np.isin(np.arange(12), (5, 11))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.npz"
        np.savez(source, **_steps(12), timeouts=timeouts)
        yield _equal(
            "A12 columns={'truncate': ...}", _loaded(source, {"truncate": "timeouts"}), "refused, the nearest named"
        )
        yield _equal(
            "A12 columns={'truncated': ...}", _loaded(source, {"truncated": "timeouts"}), "12 steps, 2 episodes"
        )
        extras = {
            "string": np.array(["a"] * 12),
            "object": np.array([{}] * 12, object),
            "0-d": np.float32(1),
            "per-episode": np.zeros(1),
        }
        for name, value in extras.items():
            np.savez(source, **_steps(12), extra=value)
            yield _equal(f"A13 npz with a {name} column", _loaded(source), "12 steps, 1 episodes")
        source = Path(folder) / "a.parquet"
        plain = {name: pa.array(value.tolist()) for name, value in _steps(12).items()}
        plain["obs"] = pa.array(_steps(12)["obs"].tolist(), pa.list_(pa.float32()))
        plain["reward"] = pa.array(_steps(12)["reward"])
        columns = {
            "list<float> of one length": {},
            "struct": {"extra": pa.array([{"a": 1}] * 12)},
            "timestamp": {"extra": pa.array([0] * 12, pa.timestamp("s"))},
            "null": {"extra": pa.nulls(12)},
        }
        for name, more in columns.items():
            pq.write_table(pa.table({**plain, **more}), source)
            yield _equal(f"A13 Parquet with a {name} column", _loaded(source), "12 steps, 1 episodes")
        odd = {"obs": "obs/état .x"}
        pq.write_table(pa.table({odd.get(name, name): value for name, value in plain.items()}), source)
        yield _equal("A13 a column of an odd name, mapped", _loaded(source, odd), "12 steps, 1 episodes")
        with h5py.File(Path(folder) / "a.hdf5", "w") as file:
            names = {"observations": "obs", "rewards": "reward", "terminals": "terminated"}
            for name, ours in names.items():
                file[name] = _steps(12)[ours]
            file["timeouts"] = timeouts
        yield _equal("A13 HDF5, D4RL's form", _loaded(Path(folder) / "a.hdf5"), "12 steps, 2 episodes")
        with h5py.File(Path(folder) / "b.hdf5", "w") as file:
            for demo in range(3):
                for name, value in (
                    ("actions", np.zeros(4)),
                    ("rewards", np.zeros(4, np.float32)),
                    ("dones", np.arange(4) == 3),
                ):
                    file[f"data/demo_{demo}/{name}"] = value
                file[f"data/demo_{demo}/obs/state"] = np.zeros((4, 2), np.float32)
        found = _loaded(Path(folder) / "b.hdf5", {"obs": "obs/state"})
        yield _equal("A13 HDF5, robomimic's form", found, "12 steps, 3 episodes")
        (Path(folder) / "a.csv").touch()
        found = _loaded(Path(folder) / "a.csv")
        known = all(kind in found for kind in ("npz", "parquet", "hdf5", "Minari"))
        yield _equal("A13 a file of an unknown kind names the known ones", known, True)


GROUPS: tuple[Callable[[], Iterator[Bar]], ...] = (_numbers, _names, _sources)
