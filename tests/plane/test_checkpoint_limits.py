"""What limiters, deletes, resets and counts of deliveries are after a restore, by what the restored engine then does."""

import numpy as np
import pytest

import conduit
from conduit.errors import DataTimeout, Frozen, SpaceTimeout

SCHEMA = conduit.Schema([conduit.Field("obs", "float32", (2,), observation=True), conduit.Field("action", "int64")])
RATIO = conduit.SampleToInsertRatio(samples_per_insert=2, min_size=10, error_buffer=40)


def engine_of(name, **options):
    options.setdefault("capacity", 500)
    return conduit.Engine.create(name, {"replay": conduit.Table(SCHEMA, page_rows=50, **options)})


def put(engine, count, start=0):
    with engine.writer("replay", keep_final=False, timeout=0.05) as writer:
        for k in range(start, start + count):
            writer.append(obs=np.zeros(2, np.float32), action=k)


def draw(engine, batches, size=8):
    """The actions of so many batches."""
    with engine.loader("replay", batch_size=size, format="numpy", timeout=0.05, min_rows=1) as loader:
        return {int(action) for _ in range(batches) for action in loader.next()["action"]}


def draw_all(engine):
    """Draw until the limiter forbids it; returns the batches."""
    with engine.loader("replay", batch_size=8, format="numpy", timeout=0.05, min_rows=1) as loader:
        for count in range(1000):
            try:
                loader.next()
            except DataTimeout:
                return count
    raise AssertionError("nothing stops it")


def numbers(engine):
    found = engine.table("replay").limiter.counts
    return found.inserted, found.sampled, found.deleted, found.size


def test_a_limiter_goes_on_exactly_where_it_was_or_begins_anew_or_in_the_middle(engine_name, tmp_path):
    with engine_of(engine_name, limiter=RATIO, capacity=30) as engine:
        done = 0
        for _ in range(40):  # more than the table holds
            put(engine, 8, done)
            done += 8
            if done > 10:
                draw(engine, 2)
        before = numbers(engine)
        assert before[0] == 320
        assert before[2] > 0
        engine.checkpoint(tmp_path)
    again = f"{engine_name}-again"
    with conduit.Engine.restore(tmp_path, again, limiter="keep") as engine:
        assert numbers(engine) == before
        allowed = 8 * draw_all(engine)
        inserted, sampled, *_ = numbers(engine)
        assert inserted * 2 - sampled - 8 < RATIO.limits().min_diff <= inserted * 2 - sampled
        assert sampled == before[1] + allowed
    with conduit.Engine.restore(tmp_path, again, limiter="reset") as engine:
        assert numbers(engine) == (before[3], 0, 0, before[3])
        report = engine.restored.tables["replay"]
        assert (report.inserted, report.sampled, report.deleted) == (before[3], 0, 0)
        if report.waits:  # says so, and is right
            assert "inserting waits" in report.waits
            with pytest.raises(SpaceTimeout):
                put(engine, 1)
    with conduit.Engine.restore(tmp_path, again, limiter="rebase") as engine:
        assert numbers(engine)[::2] == before[::2]
        assert engine.restored.tables["replay"].waits == ""
        draw(engine, 1)
        put(engine, 4)


def test_limits_that_were_changed_live_are_in_force_after_a_restore(engine_name, tmp_path):
    with engine_of(engine_name, limiter=RATIO) as engine:
        put(engine, 20)
        engine.table("replay").limiter.change(conduit.MinSize(25))
        engine.checkpoint(tmp_path)
    with conduit.Engine.restore(tmp_path, limiter="keep") as engine:
        assert engine.table("replay").limiter.limits == conduit.MinSize(25).limits()
        assert engine.restored.tables["replay"].waits.startswith("sampling waits for 5 more rows")
        with pytest.raises(DataTimeout):
            draw(engine, 1)
        put(engine, 5)
        draw(engine, 1)


def test_deleted_rows_stay_deleted_and_a_reset_stays_a_reset(engine_name, tmp_path):
    with engine_of(engine_name, priorities=conduit.Priorities()) as engine:
        put(engine, 100)
        with engine.loader("replay", batch_size=256, format="numpy", min_rows=1) as loader:
            batch = loader.next()
            ids = np.unique(batch.ids[batch["action"] % 2 == 0])
            gone = set(batch["action"][np.isin(batch.ids, ids)].tolist())
        assert engine.table("replay").delete(ids) == len(ids) > 20
        first = engine.checkpoint(tmp_path)
        engine.table("replay").reset()
        put(engine, 30, start=1000)
        second = engine.checkpoint(tmp_path)
    with conduit.Engine.restore(first) as engine:
        assert not draw(engine, 50) & gone
    with conduit.Engine.restore(second) as engine:
        found = draw(engine, 20)
        assert found
        assert min(found) >= 1000
        put(engine, 30, start=2000)
        assert min(draw(engine, 20)) >= 1000


def test_a_row_is_not_delivered_more_often_than_it_may_be_over_a_restore(engine_name, tmp_path):
    with engine_of(engine_name, max_times_sampled=2) as engine:
        put(engine, 21)
        draw(engine, 2, size=10)
        engine.checkpoint(tmp_path)
    with conduit.Engine.restore(tmp_path) as engine:
        draw(engine, 2, size=10)  # 20 rows that have a successor, twice each
        with pytest.raises(DataTimeout):
            draw(engine, 1, size=1)


def test_a_frozen_table_is_frozen_after_a_restore(engine_name, tmp_path):
    with engine_of(engine_name) as engine:
        put(engine, 20)
        engine.table("replay").freeze()
        engine.checkpoint(tmp_path)
    with conduit.Engine.restore(tmp_path) as engine:
        with pytest.raises(Frozen):
            put(engine, 1)
        draw(engine, 1)
        engine.table("replay").thaw()
        put(engine, 1)
