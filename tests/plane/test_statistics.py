"""Running statistics in shared memory: several processes update, none is lost, every reading belongs together."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import conduit
from conduit.errors import Closed, ConfigError, FieldError

ROOT = Path(__file__).parents[2]

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs.state", "float32", (3,), observation=True),
        conduit.Field("obs.camera", "uint8", (2, 2), observation=True),
        conduit.Field("brain", "bfloat16"),
        conduit.Field("reward", "float32", casting="same_kind"),
        conduit.Field("done", "bool"),
    ]
)
ALL = ("obs", "brain", "reward")


@pytest.fixture
def engine(make):
    return make(SCHEMA, statistics=ALL, num_envs=2)


def run(*codes):
    """Python programs at the same time; each must end well. Returns what they print."""
    head = "import sys, os, time, numpy as np, conduit\n"
    crew = [
        subprocess.Popen([sys.executable, "-c", head + code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for code in codes
    ]
    printed = [process.communicate(timeout=120)[0] for process in crew]
    assert [process.returncode for process in crew] == [0] * len(crew)
    return printed


def test_a_parents_name_stands_for_all_numbers_below_it(engine):
    assert engine.table("replay").statistics.fields == ("obs.state", "obs.camera", "brain", "reward")


def test_nothing_has_been_added_at_first(engine):
    read = engine.table("replay").statistics.read("obs.state")
    assert read.count == 0
    np.testing.assert_array_equal(read.mean, np.zeros(3))
    np.testing.assert_array_equal(read.variance, np.zeros(3))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    offset=st.sampled_from([0.0, 1e6]),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_mean_and_variance_are_those_of_all_values(make, data, offset, sizes):
    engine = make(SCHEMA, statistics=ALL)
    parts = [data.draw(hnp.arrays(np.float64, (size, 3), elements=st.floats(-100, 100))) + offset for size in sizes]
    with conduit.attach(engine.name) as other:
        for i, part in enumerate(parts):
            (engine, other)[i % 2].table("replay").statistics.update({"obs.state": part})
        read = other.table("replay").statistics.read("obs.state")
    engine.close()
    whole = np.concatenate(parts)
    assert read.count == len(whole)
    if len(whole):
        np.testing.assert_allclose(read.mean, whole.mean(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(read.variance, whole.var(0), rtol=1e-6, atol=1e-9 * max(1.0, offset))


def test_values_may_have_any_leading_axes_and_be_tensors(engine):
    statistics = engine.table("replay").statistics
    statistics.update(reward=1.0)
    statistics.update(reward=torch.tensor([2.0, 3.0], requires_grad=True))
    statistics.update(reward=np.full((2, 3), 4))
    statistics.update({"obs.camera": torch.full((5, 2, 2), 7, dtype=torch.uint8)})
    statistics.update(brain=torch.tensor([1.5], dtype=torch.bfloat16))
    read = statistics.read("reward")
    assert (read.count, float(read.mean)) == (9, pytest.approx(30 / 9))
    np.testing.assert_array_equal(statistics.read("obs.camera").mean, np.full((2, 2), 7.0))
    assert float(statistics.read("brain").mean) == 1.5


@pytest.mark.parametrize(
    ("values", "at"),
    [
        ({"reward": [1.0], "obs.state": np.zeros((2, 2))}, "obs.state"),
        ({"reward": [1.0], "obs.state": [1.0, np.nan, 0.0]}, "obs.state"),
        ({"reward": [np.inf]}, "reward"),
        ({"reward": ["one"]}, "reward"),
    ],
)
def test_a_refused_update_adds_nothing(engine, values, at):
    statistics = engine.table("replay").statistics
    with pytest.raises(FieldError) as info:
        statistics.update(values)
    assert info.value.at == at
    assert statistics.read("reward").count == 0


def test_a_field_without_statistics_is_named_with_the_remedy(engine):
    with pytest.raises(ConfigError, match=r"statistics=\('done',\)"):
        engine.table("replay").statistics.update(done=True)
    with pytest.raises(ConfigError, match="'nothing'"):
        engine.table("replay").statistics.read("nothing")


@pytest.mark.parametrize(("names", "message"), [(("ob",), "'ob'"), (("done",), "numbers"), ("reward", "tuple")])
def test_statistics_that_mean_nothing_are_refused_at_the_table(names, message):
    with pytest.raises(ConfigError, match=message):
        conduit.Table(SCHEMA, 1000, statistics=names)


def test_a_closed_engine_takes_no_update(make):
    engine = make(SCHEMA, statistics=ALL)
    client = conduit.attach(engine.name)
    statistics = client.table("replay").statistics
    engine.close()
    with pytest.raises(Closed):
        statistics.update(reward=1.0)
    client.close()
    with pytest.raises(Closed):
        statistics.read("reward")


# -- several processes

UPDATES = """
with conduit.attach({name!r}, timeout=10) as client:
    statistics = client.table("replay").statistics
    rng = np.random.default_rng({seed})
    for _ in range(400):
        statistics.update(reward=rng.normal({seed}, 2, rng.integers(1, 6)))
"""


def values_of(seed):
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.normal(seed, 2, rng.integers(1, 6)) for _ in range(400)])


def test_updates_of_several_processes_and_threads_are_all_there(engine):
    statistics = engine.table("replay").statistics

    def update(seed):
        rng = np.random.default_rng(seed)
        for _ in range(400):
            statistics.update(reward=rng.normal(seed, 2, rng.integers(1, 6)))

    threads = [threading.Thread(target=update, args=(seed,)) for seed in (10, 11)]
    for thread in threads:
        thread.start()
    run(*[UPDATES.format(name=engine.name, seed=seed) for seed in (20, 21)])
    for thread in threads:
        thread.join()
    whole = np.concatenate([values_of(seed) for seed in (10, 11, 20, 21)])
    read = statistics.read("reward")
    assert read.count == len(whole)
    assert float(read.mean) == pytest.approx(whole.mean(), rel=1e-12)
    assert float(read.variance) == pytest.approx(whole.var(), rel=1e-12)


WIDE = conduit.Schema([conduit.Field("wide", "float32", (20_000,)), conduit.Field("stop", "float32")])


@pytest.fixture
def wide(engine_name):
    """A table with a field that takes long to read and to update."""
    table = conduit.Table(WIDE, 64, page_rows=16, statistics=("wide", "stop"))
    with conduit.Engine.create(engine_name, {"replay": table}, max_participants=6) as engine:
        yield engine


def test_threads_of_one_client_take_turns_at_its_seat(wide):
    """Long updates of many elements, of which none is lost and each is whole."""
    statistics = wide.table("replay").statistics
    pair = np.ones((2, 20_000))
    pair[1] = -1

    def add():
        for _ in range(40):
            statistics.update(wide=pair)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = statistics.read("wide")
        assert (found.mean == 0).all()
        assert (found.variance == (1 if found.count else 0)).all()
    assert statistics.read("wide").count == 320


DROPPED = """
import faulthandler, gc, sys
import numpy as np
import conduit

faulthandler.dump_traceback_later(60, exit=True)
schema = conduit.Schema([conduit.Field("obs", "float32", (4,), observation=True), conduit.Field("action", "int64")])
table = conduit.Table(schema, 4_000, page_rows=16, statistics=("obs", "action"))
with conduit.Engine.create(sys.argv[1], {"replay": table}) as engine:
    statistics = engine.table("replay").statistics

    def drop(rows):
        writer = engine.writer("replay", keep_final=False, statistics=True)
        for row in range(rows):
            writer.append(obs=np.full(4, row, np.float32), action=row)
        box = [writer]
        box.append(box)  # only a collection finds it

    added = 0
    for turn, threshold in enumerate((1, 3, 700)):
        for rows in range(1, 9):
            drop(rows)
            gc.set_threshold(threshold)
            statistics.update(obs=np.ones((3, 4), np.float32), action=np.ones(2, np.int64))
            gc.set_threshold(700)
            gc.collect()
            updates = 8 * turn + rows
            # what a writer that was dropped had not counted yet is counted whole or not at all
            added += rows
            assert 0 <= statistics.read("obs").count - 3 * updates <= added
            assert 0 <= statistics.read("action").count - 2 * updates <= added
print("whole")
"""


def test_a_collection_in_the_middle_of_an_update_may_finalise_a_writer_that_counts(engine_name):
    command = [sys.executable, "-c", DROPPED, engine_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\n", "")


PAIRS = """
pair = np.ones((2, 20_000))
pair[1] = -1
with conduit.attach({name!r}, timeout=10) as client:
    statistics = client.table("replay").statistics
    print("ready", flush=True)
    # after every update the mean is 0 and the variance 1, exactly
    while not statistics.read("stop").count:
        statistics.update(wide=pair)
"""


def test_a_reading_always_belongs_together_even_after_a_kill(wide):
    statistics = wide.table("replay").statistics
    head = "import numpy as np, conduit\n"
    for _ in range(2):
        crew = [
            subprocess.Popen(
                [sys.executable, "-c", head + PAIRS.format(name=wide.name)], stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            for _ in range(2)
        ]
        for process in crew:
            assert process.stdout.readline() == "ready\n"
        read = statistics.read("wide")
        before = read.count
        # for a second, and until they have added something: a process whose kernels are in no cache compiles them first
        now = time.monotonic()
        while time.monotonic() < now + 1.0 or (read.count < before + 40 and time.monotonic() < now + 60.0):
            read = statistics.read("wide")
            assert read.count % 2 == 0
            assert (read.mean == 0).all()
            assert read.count == 0 or (read.variance == 1).all()
        for process in crew:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
        read = statistics.read("wide")
        assert read.count > before
        assert (read.mean == 0).all()
        assert (read.variance == 1).all()
    # the next owner of a seat goes on from what it holds
    before = statistics.read("wide").count
    for _ in range(3):
        with conduit.attach(wide.name) as client:
            client.table("replay").statistics.update(wide=np.zeros((4, 20_000)))
    assert statistics.read("wide").count == before + 12


# -- writers and loaders


def step(rng, envs=2):
    return {
        "obs": {
            "state": rng.normal(3, 2, (envs, 3)).astype(np.float32),
            "camera": rng.integers(0, 256, (envs, 2, 2), np.uint8),
        },
        "brain": torch.full((envs,), 1.5, dtype=torch.bfloat16),
        "reward": rng.normal(size=envs).astype(np.float32),
        "done": np.zeros(envs, bool),
    }


def fill(engine, ticks, **options):
    rng = np.random.default_rng(4)
    with engine.writer("replay", num_envs=2, autoreset="next_step", **options) as writer:
        closing = np.zeros(2, bool)
        for _ in range(ticks):
            terminated, truncated = (rng.random(2) < 0.1) & ~closing, (rng.random(2) < 0.1) & ~closing
            writer.append(**step(rng), terminated=terminated, truncated=truncated)
            closing = terminated | truncated
    return engine._views["replay"]


def check(read, values):
    assert read.count == len(values)
    np.testing.assert_allclose(read.mean, values.mean(0), rtol=1e-9)
    np.testing.assert_allclose(read.variance, values.var(0), rtol=1e-9)


@pytest.mark.parametrize("pages", [None, 64])
def test_a_writer_counts_every_committed_row_once(make, pages):
    engine = make(SCHEMA, 20000, statistics=ALL, num_envs=2, max_n_step=3, max_stack=2, page_rows=pages)
    rng = np.random.default_rng(4)
    steps, finals = [], []
    final = np.zeros(2, bool)
    with engine.writer("replay", num_envs=2, autoreset="next_step", statistics=True) as writer:
        for _ in range(300):
            row, terminated = step(rng), (rng.random(2) < 0.1) & ~final
            writer.append(**row, terminated=terminated)
            steps.append(row)
            finals.append(final)
            final = terminated
        writer.flush()
        statistics = engine.table("replay").statistics
        assert statistics.read("reward").count > 0
        assert statistics.read("obs.state").count == 600
    states = np.concatenate([row["obs"]["state"] for row in steps]).astype(np.float64)
    rewards = np.concatenate([row["reward"][~final] for row, final in zip(steps, finals, strict=True)])
    check(statistics.read("obs.state"), states)
    check(statistics.read("reward"), rewards.astype(np.float64))
    assert float(statistics.read("brain").mean) == 1.5


def test_a_writer_leaves_out_what_is_not_finite(engine):
    rng = np.random.default_rng(4)
    with engine.writer("replay", num_envs=2, autoreset="next_step", statistics=True) as writer:
        row = step(rng)
        row["reward"][0] = np.nan
        writer.append(**row)
    read = engine.table("replay").statistics.read("reward")
    assert (read.count, float(read.mean)) == (1, pytest.approx(float(row["reward"][1])))


def test_a_writer_of_rollouts_counts_them_too(engine):
    with engine.writer("replay", num_envs=2, autoreset="next_step", statistics=True) as writer:
        with writer.rollout(5) as rollout:
            rollout.reward[:] = 2.0
            rollout.commit()
        with writer.step() as row:
            row.reward[:] = 4.0
    assert engine.table("replay").statistics.read("reward").count == 12


def test_writers_that_cannot_count_are_refused(engine, make):
    with engine.writer("replay", statistics=True) as writer, pytest.raises(ConfigError, match="unchecked"):
        writer.unchecked()
    with pytest.raises(ConfigError, match="statistics"):
        make(SCHEMA).writer("replay", statistics=True)


def test_a_loader_delivers_with_the_statistics_of_now(engine):
    view = fill(engine, 100)
    statistics = engine.table("replay").statistics
    transform = {"obs.state": (conduit.normalize(eps=0.5), conduit.clip(-1, 1)), "obs.camera": conduit.normalize()}
    loader = engine.loader("replay", batch_size=32, format="numpy", transform=transform)
    rng = np.random.default_rng(0)
    for _ in range(3):
        statistics.update({"obs.state": rng.normal(3, 2, (50, 3)), "obs.camera": rng.integers(0, 256, (9, 2, 2))})
        batch = loader.next()
        read = statistics.read("obs.state")
        rows = view.columns["obs.state"][batch.ids & (2**40 - 1)].astype(np.float64)
        wanted = np.clip((rows - read.mean) * (1 / np.sqrt(read.variance + 0.5)), -1, 1)
        np.testing.assert_array_equal(batch["obs.state"], wanted.astype(np.float32))
        following = view.columns["obs.state"][loader._maker.scratch.index["following"]].astype(np.float64)
        wanted = np.clip((following - read.mean) * (1 / np.sqrt(read.variance + 0.5)), -1, 1)
        np.testing.assert_array_equal(batch["next_obs.state"], wanted.astype(np.float32))
        read = statistics.read("obs.camera")
        rows = view.columns["obs.camera"][batch.ids & (2**40 - 1)]
        wanted = (rows - read.mean) * (1 / np.sqrt(read.variance + 1e-8))
        np.testing.assert_array_equal(batch["obs.camera"], wanted.astype(np.float32))


@pytest.mark.parametrize("window", [None, conduit.Sequence(4)], ids=["transitions", "sequences"])
def test_a_loader_can_add_what_it_delivers(make, window):
    engine = make(SCHEMA, statistics=ALL, num_envs=2, max_length=4)
    view = fill(engine, 100)
    transform = {"obs.state": conduit.normalize(update=True)}
    loader = engine.loader("replay", batch_size=16, window=window, format="numpy", transform=transform)
    values = []
    for _ in range(3):
        batch = loader.next()
        assert "_obs.state" not in batch
        index = loader._maker.scratch.index["anchor" if window is None else "lanes"]
        values.append(view.columns["obs.state"][index[index >= 0]].astype(np.float64))
    check(engine.table("replay").statistics.read("obs.state"), np.concatenate(values))


def test_a_plan_that_normalizes_can_be_sent(engine):
    plan = engine.loader("replay", batch_size=4, transform={"obs": conduit.normalize(update=True)}).plan
    assert pickle.loads(pickle.dumps(plan)).fingerprint == plan.fingerprint


def test_an_adopted_or_attached_engine_has_the_same_statistics(engine):
    engine.table("replay").statistics.update(reward=[1.0, 3.0])
    (printed,) = run(
        f"client = conduit.attach({engine.name!r})\n"
        'read = client.table("replay").statistics.read("reward")\nprint(read.count, float(read.mean), float(read.variance))'
    )
    assert printed.split() == ["2", "2.0", "1.0"]


def test_a_dropped_client_gives_its_seat_back_at_once(engine):
    client = conduit.attach(engine.name)
    client.table("replay").statistics.update(reward=1.0)
    seats = len(engine._participants.list())
    lock = client._segment.lock_fd
    gc.disable()
    try:
        del client
        with pytest.raises(OSError):
            os.fstat(lock)
    finally:
        gc.enable()
    assert sum(seat.alive for seat in engine._participants.list()) == seats - 1
