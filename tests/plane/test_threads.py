"""Several writers and loaders of one process, each in its own thread; and writers that wait for a page."""

import threading
import time

import numpy as np
import pytest

import conduit
from conduit import Field, Schema
from conduit.errors import SpaceTimeout

SCHEMA = Schema(
    [
        Field("obs", "int64", (30,), observation=True),
        Field("writer", "int32"),
        Field("reward", "float32"),
    ]
)


def row(writer, k):
    return {"obs": np.arange(k, k + 30), "writer": writer, "reward": float(k)}


def run(*targets):
    """Run functions in threads; re-raise the first error of any."""
    errors = []

    def guarded(target):
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("wide", [False, True], ids=["small rows", "rows copied without the interpreter lock"])
def test_writers_and_loaders_in_threads_of_one_client_do_not_disturb_each_other(make, wide):
    schema = Schema([*SCHEMA.fields, Field("pixels", "uint8", (1 << 17,))]) if wide else SCHEMA
    extra = [{"pixels": np.full(1 << 17, number, np.uint8)} if wide else {} for number in range(3)]
    # windows of two ticks, so that no writer goes on in the last page of one that has ended, with its episodes' numbers
    engine = make(schema, capacity=200, page_rows=20, max_length=2)
    client = conduit.attach(engine.name)
    ticks, done = (300 if wide else 3000), threading.Event()

    def write(number):
        with client.writer("replay", autoreset="disabled") as writer:
            for k in range(ticks):
                ended = k % 11 == 10
                writer.append(
                    **row(number, k),
                    **extra[number],
                    terminated=ended,
                    final=np.arange(k + 1, k + 31) if ended else None,
                )

    def read(seed):
        with client.loader("replay", batch_size=128, min_rows=20, format="numpy", seed=seed) as loader:
            while not done.is_set():
                batch = loader.next()
                k = batch["reward"].astype(np.int64)
                np.testing.assert_array_equal(batch["obs"], k[:, None] + np.arange(30))
                np.testing.assert_array_equal(batch["next_obs"], batch["obs"] + 1)
                np.testing.assert_array_equal(batch["terminated"], k % 11 == 10)
                np.testing.assert_array_equal(batch.episodes & 0xFFFFFFFF, k // 11)
                if wide:
                    np.testing.assert_array_equal(
                        batch["pixels"][:, ::4097], np.repeat(batch["writer"][:, None], 32, 1)
                    )

    def write_all():
        try:
            run(*(lambda number=number: write(number) for number in range(3)))
        finally:
            done.set()

    run(write_all, lambda: read(1), lambda: read(2))
    view = engine._views["replay"]
    assert view.rows_written() == 3 * ticks
    assert view.rows_written() - view.rows_evicted == view.rows_visible()
    client.close()


@pytest.fixture
def full(make):
    """An engine whose pages are all taken: one leased, the others being written; (engine, writers, lease)."""
    engine = make(SCHEMA, capacity=20, page_rows=8, max_length=2)
    view = engine._views["replay"]
    first = engine.writer("replay")
    first.append(**row(0, 0))
    first.close()
    lease = view.lease(0)
    client = conduit.attach(engine.name)
    writers = [client.writer("replay") for _ in range(view.layout.pages - 1)]
    for writer in writers:
        writer.append(**row(0, 0))
    yield engine, client, writers, lease
    lease.end()
    if client._participants.seated:
        client.close()


@pytest.mark.parametrize("event", ["a lease ends", "a writer closes", "a writer's process dies"])
def test_a_writer_that_waits_for_a_page_goes_on_when(full, event):
    engine, client, writers, lease = full
    events = {
        "a lease ends": lease.end,
        "a writer closes": writers[0].close,
        "a writer's process dies": client._participants.forget,
    }
    waiting = engine.writer("replay", timeout=20)
    timer = threading.Timer(0.1, events[event])
    timer.start()
    begun = time.monotonic()
    waiting.append(**row(1, 7))
    took = time.monotonic() - begun
    timer.join()
    assert 0.05 < took < 5
    assert engine.loader("replay", batch_size=1, min_rows=1, timeout=0, fields=["writer"]).plan
    assert engine._views["replay"].columns["writer"].max() == 1


def test_a_writer_waits_for_a_page_no_longer_than_it_was_told(full):
    engine, *_ = full
    waiting = engine.writer("replay", timeout=0.1)
    begun = time.monotonic()
    with pytest.raises(SpaceTimeout, match=r"waited 0\.1 s"):
        waiting.append(**row(1, 7))
    assert 0.1 <= time.monotonic() - begun < 5
