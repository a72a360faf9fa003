"""Sampling while writers overwrite: what is handed out was committed whole, and what was overwritten is drawn again."""

import multiprocessing
import threading
import time

import numpy as np
import pytest

import conduit
from conduit import Field, Schema
from conduit.errors import DataTimeout
from conduit.native.jit import entry
from conduit.store.pages import protocol

SCHEMA = Schema(
    [
        Field("obs", "int64", (40,), observation=True),
        Field("small", "int32", observation=True),
        Field("pixels", "uint8", (300,), observation=True),
        Field("reward", "float64"),
    ]
)


def row(k):
    """Every value of row k follows from k."""
    return {
        "obs": np.arange(k, k + 40, dtype=np.int64),
        "small": k,
        "pixels": np.full(300, k % 251, np.uint8),
        "reward": k / 2,
    }


def write_flat_out(name, seconds, begun, enough):
    """A writer that never pauses, in a table of a few small pages, until `enough` is set or the seconds are over."""
    with conduit.attach(name) as client, client.writer("replay", autoreset="disabled") as writer:
        k = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end and not enough.is_set():
            for _ in range(50):
                given = row(k)
                ended = k % 13 == 12
                final = {name: value for name, value in row(k + 1).items() if name != "reward"}
                writer.append(**given, truncated=ended, final=final if ended else None)
                k += 1
            begun.set()


def torn(batch):
    """Rows of a batch whose values do not all follow from their number."""
    k = batch["small"].astype(np.int64)
    after = k + 1
    wrong = batch["next_small"] != after
    for name, values in (("obs", k), ("next_obs", after)):
        wrong |= (batch[name] != values[:, None] + np.arange(40)).any(1)
    for name, values in (("pixels", k), ("next_pixels", after)):
        wrong |= (batch[name] != (values % 251)[:, None]).any(1)
    wrong |= batch["reward"] != k / 2
    wrong |= batch["truncated"] != (k % 13 == 12)
    wrong |= batch.steps != k % 13
    return int(wrong.sum())


@pytest.mark.parametrize("method", ["thread", "spawn"])
@pytest.mark.parametrize("max_stack", [1, 3])
def test_no_torn_row_is_handed_out_while_a_writer_runs_flat_out(make, method, max_stack):
    engine = make(SCHEMA, capacity=40, page_rows=14, max_stack=max_stack)
    if method == "thread":
        begun, enough, kind = threading.Event(), threading.Event(), threading.Thread
    else:
        context = multiprocessing.get_context(method)
        begun, enough, kind = context.Event(), context.Event(), context.Process
    writer = kind(target=write_flat_out, args=(engine.name, 60, begun, enough))
    writer.start()
    assert begun.wait(60)
    loader = engine.loader("replay", batch_size=2048, min_rows=8, format="numpy", timeout=10)
    batches = wrong = 0
    last = -1
    started = time.monotonic()
    # on a busy machine it takes longer until a writer comes in between
    while (passed := time.monotonic() - started) < 1 or (passed < 30 and (batches <= 20 or not loader.stats.redrawn)):
        batch = loader.next()
        wrong += torn(batch)
        batches += 1
        last = max(last, int(batch["small"].max()))
        del batch
    enough.set()
    writer.join(60)
    assert wrong == 0
    assert batches > 20
    assert last > 500
    # the control: the writer did overwrite rows between their draw and their check
    redrawn = loader.stats.redrawn
    assert redrawn > 0
    loader.close()
    assert loader.stats.redrawn == redrawn


def test_what_a_batch_holds_does_not_change_when_its_rows_are_overwritten(make):
    engine = make(SCHEMA, capacity=40, page_rows=14)
    writer = engine.writer("replay", autoreset="disabled", keep_final=False)
    for k in range(60):
        writer.append(**row(k))
    loader = engine.loader("replay", batch_size=64, min_rows=1, format="numpy")
    batch = loader.next()
    copies = {name: value.copy() for name, value in batch.items()}
    for k in range(60, 400):
        writer.append(**row(k))
    for name, value in copies.items():
        np.testing.assert_array_equal(batch[name], value)
    assert not loader.valid(batch.ids).any()


def test_a_table_whose_rows_are_all_evicted_is_waited_for_again(make):
    engine = make(SCHEMA, capacity=40, page_rows=14)
    view = engine._views["replay"]
    writer = engine.writer("replay", keep_final=False)
    for k in range(60):
        writer.append(**row(k))
    loader = engine.loader("replay", batch_size=8, min_rows=1, timeout=0)
    loader.next()
    writer.close()
    # a writer that dies in the middle of its claims takes pages with it: nothing is left to draw
    dead = conduit.attach(engine.name)
    while entry(protocol.claim)(dead._views["replay"].address, dead._participants.number, 0) >= 0:
        pass
    with pytest.raises(DataTimeout):
        loader.next()
    dead._participants.forget()
    assert engine.recover() == view.layout.pages
    with engine.writer("replay", keep_final=False) as fresh:
        for k in range(5):
            fresh.append(**row(k))
    assert set(loader.next()["small"].tolist()) <= {0, 1, 2, 3}
