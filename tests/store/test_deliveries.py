"""Where rows may be delivered so often only: never once more, and exactly accounted, whoever overwrites, is killed or is stopped."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import conduit
from conduit.errors import ConfigError, DataTimeout, FieldError
from conduit.native.jit import entry
from conduit.store.format import words as w
from conduit.store.pages import protocol
from conduit.testing.deliveries import recount

SECONDS = float(os.environ.get("CONDUIT_TORTURE_SECONDS", "600"))
SEED = int(os.environ.get("CONDUIT_TORTURE_SEED", "1"))
SCHEMA = conduit.Schema([conduit.Field("obs", "int64", (), observation=True), conduit.Field("reward", "float32")])


def torture(name, seconds, sampling, *options):
    command = [sys.executable, "-m", "conduit.testing.deliveries", "--name", name, "--seed", str(SEED)]
    done = subprocess.run(
        [*command, "--seconds", str(seconds), "--sampling", sampling, *options],
        capture_output=True,
        text=True,
        timeout=seconds + 120,
        check=False,
    )
    print(done.stdout)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert report["above"] == 0
    # the control: rows were used up, batches failed, rows were deleted
    for count in ("rows", "batches", "deleted", "used_up", "deliveries"):
        assert report[count] > 0, count
    return report


@pytest.mark.parametrize("sampling", ["uniform", "prioritized"])
@pytest.mark.parametrize("seconds", [4.0, pytest.param(SECONDS, marks=pytest.mark.torture, id="long")])
def test_no_row_is_delivered_more_often_than_it_may_be_whoever_is_killed(engine_name, sampling, seconds):
    report = torture(engine_name, seconds, sampling, "--kills")
    assert report["kills"] > 0
    assert report["stops"] > 0


@pytest.mark.parametrize("sampling", ["uniform", "prioritized"])
def test_what_was_delivered_is_what_is_counted_of_every_row_that_is_left(engine_name, sampling):
    assert torture(engine_name, 4.0, sampling)["failed"] >= 0


@pytest.fixture
def make(engine_name):
    engines = []

    def create(**options):
        table = conduit.Table(SCHEMA, **({"capacity": 300, "page_rows": 40, "max_times_sampled": 2} | options))
        engines.append(conduit.Engine.create(engine_name, {"replay": table}))
        return engines[-1]

    yield create
    for engine in engines:
        engine.close()


def put(writer, numbers):
    for number in numbers:
        writer.append(obs=number, reward=1.0)


def ids_by_number(batch):
    return dict(zip(batch["obs"].tolist(), batch.ids.tolist(), strict=True))


def counts_of(view):
    return (view.sampled >> 16) & w.MOST_DELIVERIES, view.sampled & w.MOST_DELIVERIES


def test_a_batch_whose_transform_fails_is_given_back(make):
    engine = make(max_times_sampled=1)
    with engine.writer("replay") as writer:
        put(writer, range(30))
        writer.append(obs=30, reward=np.nan)
        put(writer, range(31, 40))
    transform = {"reward": conduit.scale(1.0, dtype="float32")}
    view = engine._views["replay"]

    def fail(batch):
        raise FieldError("no", at="reward")

    with engine.loader("replay", batch_size=20, transform=transform, format="numpy", min_rows=1) as loader:
        loader._maker._finish = lambda *_: fail(None)
        for _ in range(3):
            with pytest.raises(FieldError):
                loader.next(timeout=0.0)
            taken, delivered = counts_of(view)
            assert taken.sum() == delivered.sum() == 0
            loader._ring._turn = 0
        loader._maker._finish = loader.sampler.finish
        loader.next(timeout=0.0)
    taken, delivered = counts_of(view)
    assert taken.sum() == delivered.sum() == 20
    assert recount(view) == []


def test_a_mixture_that_cannot_be_filled_gives_back_what_it_took_of_the_other_tables(engine_name):
    table = conduit.Table(SCHEMA, 300, page_rows=40, max_times_sampled=1)
    with conduit.Engine.create(engine_name, {"one": table, "two": table}) as engine:
        with engine.writer("one") as writer:
            put(writer, range(20))
        with engine.writer("two") as writer:
            put(writer, range(5))
        view = engine._views["one"]
        with engine.mixed_loader({"one": 1.0, "two": 1.0}, batch_size=20, format="numpy", min_rows=1) as loader:
            for _ in range(3):
                with pytest.raises(DataTimeout):
                    loader.next(timeout=0.0)
                assert counts_of(view)[0].sum() == 0
            with engine.writer("two") as writer:
                put(writer, range(20))
            loader.next(timeout=0.0)
            assert counts_of(view)[1].sum() == 10


def test_a_page_that_was_given_back_because_of_a_lease_keeps_exact_counts(make):
    """Its generation is raised, its rows are there: the last delivery of each counts it as gone."""
    engine = make(max_times_sampled=1)
    view = engine._views["replay"]
    with engine.writer("replay") as writer:
        put(writer, range(100))
    with engine.loader("replay", batch_size=9, format="numpy", min_rows=1) as loader:
        leases = [view.lease(page) for page in range(2)]
        for _ in range(20):
            page = entry(protocol.claim)(view.address, engine._participants.number, 1)
            if page >= 0:
                entry(protocol.free)(view.address, page)
        for lease in leases:
            lease.end()
        taken = 0
        while True:
            try:
                taken += len(loader.next(timeout=0.0).ids)
            except DataTimeout:
                break
    assert taken > 9
    assert recount(view) == []
    assert view.counts().size <= 9 + 2 * (view.layout.pages - 2)


def test_a_row_and_its_copy_go_once(make):
    """Deleted by the id of its copy first, then by its own: one row is gone."""
    engine = make(max_times_sampled=None, max_n_step=3)
    view = engine._views["replay"]
    with engine.writer("replay") as writer, engine.loader("replay", batch_size=512, format="numpy", min_rows=1) as one:
        put(writer, range(30))
        old = {}
        for number in range(30, 50):
            put(writer, [number])
            old = ids_by_number(one.next()) | old
        new = ids_by_number(one.next())
        twice = [number for number in old if number in new and old[number] != new[number]]
        assert twice
        size = view.counts().size
        for number in twice:
            assert engine.table("replay").delete([new[number]]) == 1
            engine.table("replay").delete([old[number]])
        assert view.counts().size == size - len(twice)


def test_an_absurd_number_of_deliveries_is_refused():
    with pytest.raises(ConfigError, match="max_times_sampled of at most 65535, got 65536"):
        conduit.Table(SCHEMA, 100, max_times_sampled=65536)
    assert w.HAS_GONE > w.MOST_DELIVERIES * w.ONE_TAKEN
