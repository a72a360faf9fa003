"""What people hand over: numbers and arrays of other libraries, names that are misspelt, sources of other origin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

import conduit
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
        "min_rows={'rt': ...} of a mix": lambda e: e.mix({"tr": 1.0}, batch_size=1, min_rows={"rt": 1}),
        "a policy's array 'wieght'": lambda e: e.policy().publish({"wieght": np.zeros(1)}),
    }
    policies = {"policy": {"weight": np.zeros(1)}}
    tables = {name: conduit.Table(schema, capacity=100) for name in ("t", "tr")}
    with conduit.Engine.create("bar-names", tables, policies=policies) as engine:
        for name, ask in asked.items():
            try:
                ask(engine)
                found = "taken"
            except conduit.errors.ConduitError as error:
                found = "refused, the nearest named" if "did you mean" in str(error) else "refused"
            yield _equal(f"A12 {name}", found, "refused, the nearest named")


GROUPS: tuple[Callable[[], Iterator[Bar]], ...] = (_numbers, _names)
