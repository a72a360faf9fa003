"""The base of the suites: engines with rows whose values can be checked, and a runner."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from typing import Any

import numpy as np

from conduit.field import Field
from conduit.plane.engine import Engine
from conduit.plane.ingest.writer import Writer
from conduit.schema import Schema
from conduit.store.format.table_spec import Table

Array = np.ndarray[Any, Any]

SCHEMA = Schema([Field("obs", "float32", (3,), observation=True), Field("action", "int64"), Field("reward", "float64")])
ROW_BYTES = SCHEMA.row_bytes
TABLE = "replay"

_numbers = itertools.count()


def observation(n: Array | float) -> Array:
    """Observations of rows n, float32 [*n.shape, 3]."""
    values: Array = (np.asarray(n, np.float64)[..., None] + np.array([0, 0.125, 0.25])).astype(np.float32)
    return values


def put(writer: Writer, ticks: int, start: int = 0) -> int:
    """Append ticks whose values follow from the numbers of their rows, from `start` on; returns the number behind the last row."""
    envs = writer.num_envs
    lanes = envs or 1
    for first in range(start, start + ticks * lanes, lanes):
        n: Any = first if envs is None else np.arange(first, first + lanes)
        writer.append(obs=observation(n), action=n, reward=n * 1.0)
    return start + ticks * lanes


class ContractTests:
    """Base of the suites: what a test opens by `enter` is closed behind it."""

    def setup_method(self) -> None:
        """Begin a test."""
        self._opened = ExitStack()

    def teardown_method(self) -> None:
        """Close what the test has opened."""
        self._opened.close()

    def enter(self, opened: Any) -> Any:
        """Enter a context that ends with the test."""
        return self._opened.enter_context(opened)

    def engine(self, capacity: int = 4_000, **options: Any) -> Engine:
        """An engine with one table, `replay`, of SCHEMA."""
        name = f"suite-{os.getpid()}-{next(_numbers)}"
        engine: Engine = self.enter(Engine.create(name, {TABLE: Table(SCHEMA, capacity, **options)}))
        return engine


def failures(suite: type[ContractTests], *only: str) -> dict[str, str]:
    """Run tests of a suite.

    Args:
        suite: A subclass that has what it tests.
        only: Names of tests; none of them for every test.

    Returns:
        {name of the test: the error's type and text} of those that fail.
    """
    found = {}
    for name in only or [name for name in dir(suite) if name.startswith("test_")]:
        one = suite()
        one.setup_method()
        try:
            getattr(one, name)()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        finally:
            one.teardown_method()
    return found
