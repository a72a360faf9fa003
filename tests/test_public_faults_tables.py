"""Public faults of other replay libraries in limits, queues, checkpoints and memory: what must hold instead, by name.

Each test's docstring names the reports that it comes from. Queues that run over or starve are in store/test_queue_processes.py
and plane/test_queues.py, Reverb's boundary cases in plane/test_limiter.py, damaged checkpoints in plane/test_checkpoint.py.
"""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import conduit
from conduit import offline
from conduit.errors import Busy, DataTimeout, SpaceTimeout
from conduit.store.format import words as w

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = conduit.Schema([conduit.Field("obs", "int64", observation=True), conduit.Field("n", "int64")])


def put(engine, rows, table="t", **options):
    with engine.writer(table, keep_final=False, **options) as writer:
        for n in range(rows):
            writer.append(obs=np.int64(n), n=n, terminated=n % 10 == 9)


def create(name, **options):
    return conduit.Engine.create(name, {"t": conduit.Table(SCHEMA, 1000, page_rows=50, **options)})


def test_a_writer_that_is_over_the_limit_waits_or_is_told_as_it_asked_for(engine_name):
    """reverb#82: whether an insert over the ratio blocks or goes on was a question that had to be asked."""
    with create(engine_name, limiter=conduit.SampleToInsertRatio(1.0, 5, (0.0, 10.0))) as engine:
        put(engine, 10)
        with pytest.raises(SpaceTimeout, match=r"more samples? free"):
            put(engine, 1, timeout=0.05)
        with pytest.raises(Busy, match=r"more samples? free"):
            put(engine, 1, on_full="raise")
        assert engine.table("t").limiter.counts.inserted == 10


def test_a_learner_that_may_not_sample_says_why_within_its_deadline(engine_name):
    """acme#207, acme#233: learners that hung in `next` although the table held enough rows."""
    with create(engine_name, limiter=conduit.SampleToInsertRatio(0.5, 10, (-5.0, 100.0))) as engine:
        put(engine, 40)
        with engine.loader("t", batch_size=20, format="numpy") as loader:
            loader.next()
            begun = time.monotonic()
            with pytest.raises(DataTimeout, match=r"blocked by min_diff.* more inserted rows free it"):
                loader.next(timeout=0.05)
            assert time.monotonic() - begun < 5
            # what a loop that takes turns can ask before it asks for a batch
            assert "sampling is blocked" in engine.table("t").limiter.explain(samples=20)
            put(engine, 40)
            loader.next(timeout=20.0)


def test_offline_data_goes_in_before_the_limit_counts(engine_name, tmp_path):
    """reverb#134: a table to be filled from a dataset first needed a limiter that could not be set later."""
    with create(f"{engine_name}-0") as engine:
        put(engine, 300)
        offline.save(engine, "t", tmp_path / "data", format="npz")
    with create(engine_name, limiter=conduit.MinSize(1)) as engine:
        offline.load(engine, "t", tmp_path / "data")
        counts = engine.table("t").limiter.counts
        assert counts.inserted == 300
        engine.table("t").limiter.change(conduit.SampleToInsertRatio(1.0, 300, (200.0, 400.0)))
        with engine.loader("t", batch_size=50, format="numpy") as loader:
            loader.next()
            loader.next()
            with pytest.raises(DataTimeout, match="blocked by min_diff"):
                loader.next(timeout=0.0)


@pytest.mark.parametrize("policy", ["keep", "reset", "rebase"])
def test_a_restored_table_never_stalls_without_a_word(engine_name, tmp_path, policy):
    """reverb#64, #103, #118: sampling or inserting hung after a restore, since counters or limits of the old run came along."""
    limiter = conduit.SampleToInsertRatio(4.0, 20, (40.0, 400.0))
    with create(engine_name, limiter=limiter) as engine:
        put(engine, 50)
        with engine.loader("t", batch_size=40, format="numpy") as loader:
            for _ in range(4):
                loader.next()
        assert "sampling is blocked" in engine.table("t").limiter.explain(samples=1)
        engine.checkpoint(tmp_path)
    with conduit.Engine.restore(tmp_path, f"{engine_name}-again", limiter=policy) as engine:
        said = engine.restored.tables["t"].waits
        with engine.loader("t", batch_size=40, format="numpy") as loader:
            if policy == "keep":
                assert "sampling waits for" in said
                with pytest.raises(DataTimeout, match=r"more inserted rows? free"):
                    loader.next(timeout=0.05)
            else:
                assert said == ""
                loader.next(timeout=0.0)


def test_a_restore_of_rows_with_a_number_of_deliveries_ends_and_keeps_it(engine_name, tmp_path):
    """reverb#147, #124: loading a checkpoint of a table with max_times_sampled never ended."""
    with create(engine_name, max_times_sampled=2, limiter=conduit.MinSize(1)) as engine:
        put(engine, 200)
        with engine.loader("t", batch_size=50, format="numpy") as loader:
            loader.next()
        sampled = engine._views["t"].sampled.copy()
        engine.checkpoint(tmp_path)
    with conduit.Engine.restore(tmp_path, f"{engine_name}-again", limiter="keep") as engine:
        np.testing.assert_array_equal(engine._views["t"].sampled & w.MOST_DELIVERIES, sampled & w.MOST_DELIVERIES)
        with engine.loader("t", batch_size=50, format="numpy") as loader:
            loader.next(timeout=10.0)


def test_rows_and_priorities_of_a_checkpoint_can_be_looked_at_without_restoring_it(engine_name, tmp_path):
    """reverb#124: the rows of highest priority could only be seen by restoring a server that then hung."""
    table = conduit.Table(SCHEMA, 1000, page_rows=50, priorities=conduit.Priorities(alpha=1.0, eps=0.0))
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        with engine.writer("t", keep_final=False) as writer:
            for n in range(100):
                writer.append(obs=np.int64(n), n=n, priority=1000.0 if n in (17, 42) else 1.0)
        path = engine.checkpoint(tmp_path)
    numbers = np.load(path / "tables/t/columns/n.npy")
    priorities = np.load(path / "tables/t/priority.npy")
    assert set(numbers[np.argsort(priorities)[-2:]].tolist()) == {17, 42}


def test_nothing_in_a_checkpoint_is_pickled(engine_name, tmp_path):
    """SB3#238: a buffer of more than 4 GiB could not be pickled."""
    with create(engine_name) as engine:
        put(engine, 30)
        path = engine.checkpoint(tmp_path, extra={"agent": b"bytes"})
    for file in path.rglob("*.npy"):
        np.load(file, allow_pickle=False)


def test_a_checkpoint_takes_little_memory_beside_the_table(engine_name, tmp_path):
    """tianshou#260: saving a buffer of 2.5 GB took 17 GB of memory."""
    program = """
        import resource, sys
        import numpy as np
        import conduit

        schema = conduit.Schema([conduit.Field("obs", "uint8", (84, 84), observation=True)])
        with conduit.Engine.create(sys.argv[1], {"t": conduit.Table(schema, "300 MiB", num_envs=64)}) as engine:
            with engine.writer("t", num_envs=64, autoreset="next_step") as writer:
                frames = np.zeros((64, 84, 84), np.uint8)
                for _ in range(600):
                    writer.append(obs=frames)
            engine.checkpoint(sys.argv[2] + "/first")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with engine.writer("t", num_envs=64, autoreset="next_step") as writer:
                writer.append(obs=frames)
            made = engine.checkpoint(sys.argv[2] + "/second")
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            stored = sum(file.stat().st_size for file in made.rglob("*.npy"))
        print(stored // 2**20, (after - before) // 2**10)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), engine_name, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
        check=True,
    )
    stored, grown = map(int, done.stdout.split())
    assert stored > 200
    assert grown < 60


def test_a_writer_that_runs_ahead_of_its_queue_is_held_back_and_memory_stays(engine_name):
    """reverb#92, tianshou#225: producers that ran ahead of their consumer filled the memory."""
    table = conduit.Table.queue(SCHEMA, 200, page_rows=40)
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        pages = engine._views["t"].layout.pages
        with pytest.raises(SpaceTimeout, match="queue"):
            put(engine, 10_000, timeout=0.05)
        assert engine._views["t"].rows_visible() <= pages * 40
        # and goes on as soon as somebody takes
        with engine.consumer("t", format="numpy") as consumer, engine.writer("t", timeout=20.0) as writer:
            thread = threading.Thread(target=lambda: [writer.append(obs=np.int64(n), n=n) for n in range(100)])
            thread.start()
            taken = 0
            while taken < pages * 40:
                with consumer.next(timeout=20.0) as claim:
                    taken += claim.ticks
            thread.join(20)
            assert not thread.is_alive()
