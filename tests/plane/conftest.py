"""Engines with one table `replay`, and a check that a refused call leaves a table unchanged."""

from contextlib import ExitStack

import numpy as np
import pytest

import conduit
from conduit.store.format import words as w

CARTPOLE = conduit.Schema(
    [
        conduit.Field("obs", "float32", (4,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32", casting="same_kind"),
    ]
)


@pytest.fixture
def make(engine_name):
    """Create an engine: `make(schema, capacity=1000, **options of its table)`; it is closed after the test."""
    with ExitStack() as stack:
        made = 0

        def create(schema=CARTPOLE, capacity=1000, policies=None, **options):
            nonlocal made
            made += 1
            tables = {"replay": conduit.Table(schema, capacity, **options)}
            return stack.enter_context(conduit.Engine.create(f"{engine_name}-{made}", tables, policies=policies))

        yield create


class Snapshot:
    """The state of a table that readers can see, and the flags with which the next row starts."""

    def __init__(self, engine, table="replay"):
        self.view = engine._views[table]
        self.pages = self.view.pages()
        live = np.isin(self.pages[:, 0] & w.KIND_MASK, (w.OPEN, w.SEALED))
        committed = np.where(live, self.pages[:, w.PAGE_COMMITTED // 8], 0)
        local = np.arange(self.view.layout.rows) % self.view.layout.page_rows
        self.visible = local < np.repeat(committed, self.view.layout.page_rows)
        self.columns = {name: column[self.visible].copy() for name, column in self.view.columns.items()}
        self.flags = [array.copy() for array in (self.view.terminated, self.view.truncated, self.view.meta)]
        self.counts = (self.view.rows_written(), self.view.rows_evicted, self.view.rows_visible())

    def check(self, engine):
        now = Snapshot(engine, self.view.layout.name)
        np.testing.assert_array_equal(now.pages, self.pages)
        assert now.counts == self.counts
        for name, column in self.columns.items():
            np.testing.assert_array_equal(now.columns[name], column)
        for array, before in zip(now.flags, self.flags, strict=True):
            np.testing.assert_array_equal(array, before)


@pytest.fixture
def unchanged():
    """A context manager over an engine; after its block the table must be as it was before."""

    class Unchanged:
        def __init__(self, engine):
            self.engine = engine

        def __enter__(self):
            self.before = Snapshot(self.engine)

        def __exit__(self, *_):
            self.before.check(self.engine)

    return Unchanged


@pytest.fixture(params=["compiled", "exact"])
def path(request, monkeypatch):
    """Both ways through `append`: the compiled call, and the exact path that everything takes where it is not supported."""
    if request.param == "exact":
        from conduit.native import cpython_abi

        monkeypatch.setattr(cpython_abi, "is_supported", lambda: False)
    return request.param
