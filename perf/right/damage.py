"""Restores, forks, other users' files, destructors, publishers and damaged segments: what came out wrong, and is right now."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import conduit
from perf.bars import Bar

_SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "float32", (4,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32"),
    ]
)


def _append(writer: conduit.Writer, rows: int, every: int) -> None:
    for step in range(rows):
        writer.append(
            obs=np.full(4, step, np.float32), action=step, reward=float(step), terminated=step % every == every - 1
        )


def _restores() -> Iterator[Bar]:
    """A6 the next batches of a restored engine."""
    loaders: dict[str, dict[str, object]] = {
        "uniform": {},
        "prioritised": {"sampling": conduit.Prioritised()},
        "3 steps": {"window": conduit.Transition(n_step=3)},
        "3 steps, short ones too": {"window": conduit.Transition(n_step=3, newest="bootstrap")},
    }
    table = conduit.Table(_SCHEMA, 1_000, page_rows=64, max_n_step=3, priorities=conduit.Priorities())

    def draw(engine: conduit.Client) -> dict[str, np.ndarray]:
        found = {}
        for name, options in loaders.items():
            with engine.loader("replay", batch_size=32, format="numpy", **options) as loader:  # type: ignore[arg-type]
                found[name] = loader.next().ids.copy()
        return found

    with (
        tempfile.TemporaryDirectory() as folder,
        conduit.Engine.create("bar-restores", {"replay": table}) as engine,
        engine.writer("replay", keep_final=False) as one,
        engine.writer("replay", keep_final=False) as other,
    ):
        _append(one, 300, 10)
        _append(other, 40, 7)
        engine.checkpoint(Path(folder))
        expected = draw(engine)
        with conduit.Engine.restore(Path(folder), "bar-restores-again") as again:
            found = draw(again)
    for name in loaders:
        differ = int((found[name] != expected[name]).sum())
        yield Bar(f"A6 next batch after a restore, writers open, {name}", f"{differ} of 32 differ", "0", differ == 0)


GROUPS: tuple[Callable[[], Iterator[Bar]], ...] = (_restores,)
