"""Rate limiters: Reverb's formula at its boundaries, both sides' waits and words, changes while they are in force, and deaths."""

import itertools
import math
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit
from conduit.errors import Busy, ConfigError, DataTimeout, SpaceTimeout
from conduit.store.tables.limit_checks import Gate, check_batch, check_rows, limits_of
from conduit.testing.puppets import Puppet, attach

INF = math.inf
OBS = np.zeros(4, np.float32)


def put(writer, count=1):
    for _ in range(count):
        writer.append(obs=OBS, action=1, reward=1.0)


def gate_of(engine):
    return Gate(engine._views["replay"], 1, 0)


def take(engine, count=1):
    """Sample `count` if the limiter allows it; whether it did."""
    gate = gate_of(engine)
    if not gate.reserve(count):
        return False
    gate.deliver()
    return True


def offer(writer, count=1):
    """Insert `count` rows as far as the limiter allows it; how many."""
    for done in range(count):
        try:
            put(writer)
        except Busy:
            return done
    return count


@pytest.fixture
def limited(make):
    def create(limiter, **options):
        engine = make(limiter=limiter, **options)
        return engine, engine.writer("replay", keep_final=False, on_full="raise")

    return create


# -- Reverb's cases


def test_nothing_is_sampled_before_min_size_rows_and_everything_after(limited):
    engine, writer = limited(conduit.MinSize(3))
    for _ in range(3):
        assert not take(engine)
        put(writer)
    assert take(engine, 1000)
    assert offer(writer, 50) == 50


def test_rows_up_to_min_size_are_let_in_whatever_the_ratio(limited):
    # range 0 to 2, and yet 5 rows come before the first sample
    engine, writer = limited(conduit.SampleToInsertRatio(1.0, 5, (0.0, 2.0)))
    assert offer(writer, 9) == 5
    assert not take(engine, 6)
    assert [take(engine) for _ in range(5)] == [True] * 5
    assert not take(engine)
    assert offer(writer, 9) == 2


@pytest.mark.parametrize(("spi", "size", "low", "high"), [(1, 1, 0, 2), (2, 4, 0, 8), (0.5, 2, -1, 3), (4, 3, 2, 20)])
def test_both_sides_stop_exactly_at_their_bounds(limited, spi, size, low, high):
    engine, writer = limited(conduit.SampleToInsertRatio(spi, size, (low, high)))
    inserted, sampled = 0, 0
    for _ in range(4):
        more = offer(writer, 100)
        inserted += more
        assert inserted <= size or inserted * spi - sampled <= high
        assert inserted + 1 > size
        assert (inserted + 1) * spi - sampled > high
        while take(engine):
            sampled += 1
        assert inserted * spi - sampled >= low
        assert inserted * spi - sampled - 1 < low
    counts = engine.table("replay").limiter.counts
    assert (counts.inserted, counts.sampled, counts.reserved, counts.granted) == (inserted, sampled, 0, 0)


def test_a_queue_lets_out_what_came_in_and_holds_no_more_than_its_size(limited):
    engine, writer = limited(conduit.Limits(1.0, 1, 0.0, 3))
    assert not take(engine)
    assert offer(writer, 5) == 3
    assert take(engine, 2)
    assert not take(engine, 2)
    assert take(engine, 1)
    assert not take(engine)
    assert offer(writer, 5) == 3


def test_samples_of_several_are_allowed_whole_or_not_at_all(limited):
    engine, writer = limited(conduit.SampleToInsertRatio(1.0, 1, (0.0, 10.0)))
    put(writer, 5)
    assert not take(engine, 6)
    assert engine.table("replay").limiter.counts.sampled == 0
    assert take(engine, 5)


def test_rows_that_have_gone_count_as_deleted_and_let_others_in_below_min_size(limited):
    engine, writer = limited(conduit.SampleToInsertRatio(1.0, 20, (-1000.0, 21.0)))
    assert offer(writer, 50) == 21
    engine.table("replay").reset()
    assert offer(writer, 50) == 20
    counts = engine.table("replay").limiter.counts
    assert (counts.inserted, counts.deleted, counts.size) == (41, 21, 20)


def test_the_counts_that_stopped_a_reverb_server_for_ever_are_explained_and_freed_by_one_insert(limited):
    # deepmind/reverb#118: 100073 inserts, spi 256, 25503488 samples: exactly at min_diff, and a batch of 1024 is not allowed
    engine, writer = limited(conduit.SampleToInsertRatio(256.0, 1, (0.0, 1e9)), capacity=400)
    put(writer, 4)
    assert take(engine, 4 * 256)
    assert not take(engine)
    text = engine.table("replay").limiter.explain(samples=1024)
    assert "min_diff" in text
    assert "4 more inserted rows free it" in text
    put(writer, 4)
    assert take(engine, 1024)
    assert not take(engine)


def test_a_batch_is_charged_when_it_is_handed_out_and_a_cancelled_one_never(limited):
    # deepmind/reverb#27: 64 were counted when 2 had been read
    engine, writer = limited(conduit.SampleToInsertRatio(1.0, 1, (0.0, 100.0)))
    put(writer, 64)
    gate, other = gate_of(engine), gate_of(engine)
    counts = lambda: engine.table("replay").limiter.counts  # noqa: E731
    assert gate.reserve(32)
    assert (counts().sampled, counts().reserved) == (0, 32)
    assert other.reserve(32)
    assert not gate.reserve(32)
    gate.cancel()
    other.cancel()
    other.cancel()
    assert (counts().sampled, counts().reserved) == (0, 0)
    assert gate.reserve(16)
    assert gate.reserve(16)
    gate.deliver()
    assert (counts().sampled, counts().reserved) == (32, 0)


# -- loaders and writers


def test_a_loader_keeps_step_with_its_writer_to_the_row(limited):
    engine, writer = limited(conduit.SampleToInsertRatio(2.0, 8, 16.0))
    with engine.loader("replay", batch_size=4, format="numpy", timeout=0.0) as loader:
        with pytest.raises(DataTimeout, match=r"0 of 8 rows are there .*; 8 more inserted rows free it"):
            loader.next()
        inserted = offer(writer, 100)
        assert inserted == 16
        got = 0
        for _ in range(3):
            while True:
                try:
                    loader.next()
                except DataTimeout as error:
                    assert "min_diff" in str(error)  # noqa: PT017
                    break
                got += 4
            assert inserted * 2 - got == 0
            inserted += offer(writer, 100)
            assert inserted * 2 - got == 32
        assert loader.stats.rows == got


def test_a_failed_batch_is_not_charged(limited):
    engine, writer = limited(conduit.SampleToInsertRatio(1.0, 1, (0.0, 100.0)))
    put(writer, 20)

    def fail(_batch):
        raise RuntimeError("no")

    steps = [conduit.apply(fail)]
    loader = engine.loader("replay", batch_size=4, format="numpy", batch_transforms=steps)
    with pytest.raises(RuntimeError):
        loader.next()
    counts = engine.table("replay").limiter.counts
    assert (counts.sampled, counts.reserved) == (0, 0)


def test_a_timed_out_loader_has_reserved_nothing(limited):
    engine, writer = limited(conduit.MinSize(1))
    put(writer)  # a row without successor: the limiter allows it, and there is nothing to draw
    with (
        engine.loader("replay", batch_size=4, format="numpy") as loader,
        pytest.raises(DataTimeout, match="sampleable"),
    ):
        loader.next(timeout=0.05)
    assert engine.table("replay").limiter.counts.reserved == 0


@pytest.mark.parametrize("form", ["append", "exact", "step", "rollout", "unchecked", "ragged"])
def test_every_form_of_writing_is_stopped_by_the_limiter_and_goes_on_after_a_sample(make, form):
    schema = None
    if form == "ragged":
        schema = conduit.Schema([conduit.Field("obs", "float32", (9, 2), ragged=True)])
    engine = make(*([schema] if schema else []), limiter=conduit.SampleToInsertRatio(1.0, 1, (0.0, 6.0)))
    writer = engine.writer("replay", keep_final=False, on_full="raise")
    unchecked = writer.unchecked() if form == "unchecked" else None

    def write():
        if form == "append":
            put(writer)
        elif form == "exact":
            writer.append(obs=[0, 1, 2, 3], action=1, reward=1.0)
        elif form == "ragged":
            writer.append(obs=np.zeros((3, 2), np.float32))
        elif form == "step":
            with writer.step() as row:
                row.obs[:] = 1
        elif form == "rollout":
            with writer.rollout(2) as rollout:
                rollout.obs[:] = 1
        else:
            row = unchecked.row
            unchecked.obs[row] = 1
            unchecked.commit()

    rows = 2 if form == "rollout" else 1
    for _ in range(6 // rows):
        write()
    counts = engine.table("replay").limiter.counts
    # an unchecked handle asks for its next row as soon as it has committed one, and is refused here
    assert (counts.inserted, counts.granted) == (6, 0)
    with pytest.raises(Busy, match=rf"let {rows} rows in.*max_diff.*{rows} more sample"):
        write()
    if form == "unchecked":
        assert unchecked.commit() >= unchecked.rows
    counts = engine.table("replay").limiter.counts
    assert (counts.inserted, counts.granted) == (6, 0)
    assert take(engine, rows)
    write()
    counts = engine.table("replay").limiter.counts
    assert (counts.inserted, counts.granted) == (6 + rows, 0)


def test_a_step_that_is_given_up_gives_its_grant_back(limited):
    engine, writer = limited(conduit.Limits(1.0, 1, 0.0, 3))
    counts = lambda: engine.table("replay").limiter.counts  # noqa: E731
    put(writer, 1)
    step = writer.step()
    step.__enter__()
    assert counts().granted == 1
    step.__exit__(RuntimeError, None, None)
    assert counts().granted == 0
    rollout = writer.rollout(2)
    assert counts().granted == 2
    other = engine.writer("replay", keep_final=False, on_full="raise")
    assert offer(other) == 0
    rollout.abort()
    assert counts().granted == 0
    assert offer(other, 5) == 2
    with pytest.raises(conduit.errors.FieldError):
        writer.append(obs=OBS, action="left", reward=1.0)
    assert counts().granted == 0


def test_rows_that_are_held_back_are_granted_and_published_before_their_writer_waits(limited):
    engine, _ = limited(conduit.Limits(1.0, 1, 0.0, 5))
    writer = engine.writer("replay", keep_final=False, on_full="raise", ingestion=conduit.CommitEvery(4))
    put(writer, 3)
    counts = engine.table("replay").limiter.counts
    assert (counts.inserted, counts.granted) == (0, 3)
    assert offer(writer, 9) == 2
    counts = engine.table("replay").limiter.counts
    assert (counts.inserted, counts.granted) == (5, 0)
    assert take(engine, 5)


def test_a_waiting_writer_is_woken_by_a_sample_and_a_waiting_loader_by_a_row(make):
    engine = make(limiter=conduit.SampleToInsertRatio(1.0, 4, (0.0, 16.0)))
    with conduit.attach(engine.name) as client:
        slow = client.writer("replay", keep_final=False, timeout=20.0)
        put(slow, 16)
        begun, ended = time.monotonic(), []

        def write():
            put(slow, 8)
            ended.append(time.monotonic())

        thread = threading.Thread(target=write)
        thread.start()
        time.sleep(0.05)
        assert not ended
        with engine.loader("replay", batch_size=8, format="numpy", timeout=20.0) as loader:
            loader.next()
            thread.join(20)
            assert ended[0] - begun < 5
            loader.next()
            loader.next()
            timer = threading.Timer(0.05, put, (slow, 8))
            timer.start()
            loader.next()
            timer.join()
    assert engine.table("replay").limiter.counts.sampled == 32


def test_a_writer_that_waits_in_vain_says_what_would_free_it(make):
    engine = make(limiter=conduit.SampleToInsertRatio(4.0, 2, (0.0, 9.0)))
    writer = engine.writer("replay", keep_final=False, timeout=0.03)
    put(writer, 2)
    with pytest.raises(
        SpaceTimeout, match=r"\(inserted \+ 1\) .* = 3 \* 4 - 0 = 12 is above 9; 3 more samples free it"
    ):
        put(writer)


def test_a_mixed_loader_is_charged_in_each_table_for_its_part(make, engine_name):
    schema = make().table("replay").schema
    tables = {
        "one": conduit.Table(schema, 400, limiter=conduit.Limits(1.0, 1, 0.0, 30)),
        "two": conduit.Table(schema, 400, limiter=conduit.Limits(1.0, 1, 0.0, 30)),
    }
    with conduit.Engine.create(f"{engine_name}-mix", tables) as engine:
        for name in tables:
            put(engine.writer(name, keep_final=False), 20)
        with engine.mixed_loader({"one": 0.75, "two": 0.25}, batch_size=8, format="numpy") as loader:
            loader.next()
            loader.next()
            sampled = [engine.table(name).limiter.counts.sampled for name in tables]
            assert sampled == [12, 4]
            loader.next()
            with pytest.raises(DataTimeout, match=r"'one'.*min_diff"):
                loader.next(timeout=0.0)
        counts = [engine.table(name).limiter.counts for name in tables]
        assert [(one.sampled, one.reserved) for one in counts] == [(18, 0), (6, 0)]


# -- refusals


def test_what_would_come_to_a_deadlock_is_refused_with_its_numbers(make):
    engine = make(limiter=conduit.SampleToInsertRatio(1.0, 4, (0.0, 8.0)))
    with pytest.raises(ConfigError, match=r"batch_size of at most 4 .* got 5"):
        engine.loader("replay", batch_size=5, format="numpy")
    with pytest.raises(ConfigError, match=r"at most 4 rows at once .* got 5"):
        engine.writer("replay", num_envs=5, autoreset="next_step")
    with pytest.raises(ConfigError, match=r"at most 4 rows at once .* got 5"):
        engine.writer("replay").rollout(5)
    with pytest.raises(ConfigError, match="to have a limiter"):
        _ = make().table("replay").limiter
    with pytest.raises(ConfigError, match="min_size of at most"):
        conduit.Table(engine.table("replay").schema, 100, limiter=conduit.MinSize(10_000))
    with pytest.raises(ConfigError, match="no limiter for kind='queue'"):
        conduit.Table(engine.table("replay").schema, 100, kind="queue", limiter=conduit.Limits(1.0, 1, 0.0, 3))
    with pytest.raises(ConfigError, match=r"windows of at most 1 ticks .* got 2"):
        make(limiter=conduit.Limits(1.0, 1, 0.0, 1)).loader("replay", batch_size=1, format="numpy")


@settings(max_examples=150)
@given(
    st.integers(1, 9), st.integers(1, 6), st.integers(-4, 4), st.integers(2, 40), st.integers(1, 40), st.integers(1, 9)
)
def test_a_batch_and_a_tick_that_are_accepted_never_wait_for_each_other(spi, size, low, wide, batch, rows):
    wide = max(wide, 2 * spi)
    low = min(low, spi * size)
    limits = conduit.SampleToInsertRatio(float(spi), size, (float(low), float(low + wide))).limits()
    try:
        check_batch(limits, batch, "t")
        check_rows(limits, rows, "t", "")
    except ConfigError:
        assert 2 * max(batch, rows * spi) > wide + 1  # not refused without need
        return
    # from every state that single rows and samples can reach, one side goes on
    for difference in range(low, low + wide + 1):
        can_sample = difference - batch >= low
        can_insert = difference + rows * spi <= low + wide
        assert can_sample or can_insert


# -- changes


def test_limits_change_at_once_for_everybody(make):
    engine = make(limiter=conduit.Limits(1.0, 1, 0.0, 4))
    writer = engine.writer("replay", keep_final=False, timeout=20.0)
    put(writer, 4)
    with conduit.attach(engine.name) as other:
        thread = threading.Thread(target=put, args=(writer, 4))
        thread.start()
        time.sleep(0.03)
        other.table("replay").limiter.change(conduit.Limits(1.0, 1, 0.0, 8))
        thread.join(20)
        assert other.table("replay").limiter.counts.inserted == 8
        for size in (3, 5, 7):
            engine.table("replay").limiter.change(conduit.Limits(1.0, 1, 0.0, size))
            assert limits_of(other._views["replay"]).max_diff == size
    for bad in (None, 3, conduit.MinSize(10**6)):
        with pytest.raises(ConfigError):
            engine.table("replay").limiter.change(bad)
    assert engine.table("replay").limiter.limits.max_diff == 7


def test_limits_are_read_whole_while_they_change(make):
    engine = make(capacity=4000, limiter=conduit.Limits(1.0, 1, 0.0, 1000))
    view, stop = engine._views["replay"], threading.Event()
    seen = set()

    def read():
        while not stop.is_set():
            limits = limits_of(view)
            seen.add((limits.samples_per_insert, limits.min_size, limits.min_diff, limits.max_diff))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for number in range(1, 400):
            time.sleep(0.001 if number % 10 == 0 else 0)
            engine.table("replay").limiter.change(
                conduit.SampleToInsertRatio(float(number), number, (0.0, 10.0 * number))
            )
    finally:
        stop.set()
        thread.join()
    assert all(limits == (1, 1, 0, 1000) or limits == (n := limits[0], n, 0, 10 * n) for limits in seen)
    assert len(seen) > 1


# -- the formula as a model


@settings(max_examples=40)
@given(
    st.sampled_from([(1.0, 1, 0.0, 8.0), (2.0, 6, 3.0, 20.0), (0.5, 4, -2.0, 4.0), (1.0, 12, -INF, INF)]),
    st.lists(
        st.tuples(st.sampled_from(["insert", "sample", "change"]), st.integers(0, 2), st.integers(1, 5)), max_size=60
    ),
)
def test_any_order_of_inserts_and_samples_obeys_the_formula(numbers, steps):
    spi, size, low, high = numbers
    limiter = conduit.MinSize(size) if high == INF else conduit.SampleToInsertRatio(spi, size, (low, high))
    schema = conduit.Schema(
        [
            conduit.Field("obs", "float32", (4,)),
            conduit.Field("action", "int64"),
            conduit.Field("reward", "float32", casting="same_kind"),
        ]
    )
    with conduit.Engine.create(
        f"t{os.getpid()}-model", {"replay": conduit.Table(schema, 24, page_rows=6, limiter=limiter)}, max_participants=4
    ) as engine:
        writers = [engine.writer("replay", on_full="raise") for _ in range(3)]
        inserted = sampled = 0
        for what, who, count in steps:
            deleted = engine.table("replay").limiter.counts.deleted
            if what == "change" and high != INF:
                high = low + max(2 * max(1, spi), 4 * count)
                engine.table("replay").limiter.change(conduit.SampleToInsertRatio(spi, size, (low, high)))
            elif what == "insert":
                allowed = inserted + 1 - deleted <= size or (inserted + 1) * spi - sampled <= high
                assert offer(writers[who]) == allowed
                inserted += allowed
            elif what == "sample":
                allowed = inserted - deleted >= size and inserted * spi - sampled - count >= low
                assert take(engine, count) == allowed
                sampled += count * allowed
            counts = engine.table("replay").limiter.counts
            assert (counts.inserted, counts.sampled) == (inserted, sampled)


# -- processes


def hold_a_reservation(own, count):
    own.gate = Gate(own.client._views["replay"], 1, 0)
    return own.gate.reserve(count)


def hold_a_grant(own, ticks):
    own.rollout = own.client.writer("replay", keep_final=False).rollout(ticks)


def test_what_a_killed_process_had_reserved_is_free_again(make):
    engine = make(limiter=conduit.Limits(1.0, 1, 0.0, 8))
    writer = engine.writer("replay", keep_final=False, on_full="raise")
    counts = lambda: engine.table("replay").limiter.counts  # noqa: E731
    with Puppet() as puppet:
        puppet.do(attach, engine.name)
        puppet.do(hold_a_grant, 4)
        assert counts().granted == 4
        assert offer(writer, 6) == 4
        puppet.kill()
        engine.recover()
        assert counts().granted == 0
        assert offer(writer, 6) == 4
    with Puppet() as puppet:
        puppet.do(attach, engine.name)
        assert puppet.do(hold_a_reservation, 7)
        assert counts().reserved == 7
        assert not take(engine, 2)
        puppet.kill()
        # whoever waits for a batch looks after the dead by himself
        with engine.loader("replay", batch_size=4, format="numpy") as loader:
            for _ in range(2):
                loader.next(timeout=20.0)
    assert (counts().sampled, counts().reserved) == (8, 0)


def _work(name, role, seed):
    try:
        with conduit.attach(name) as client:
            if role == "writer":
                with client.writer("replay", num_envs=2, autoreset="next_step", timeout=20.0) as writer:
                    obs, ones = np.zeros((2, 4), np.float32), np.ones(2)
                    while True:
                        writer.append(obs=obs, action=ones.astype(np.int64), reward=ones.astype(np.float32))
            else:
                with client.loader("replay", batch_size=8, format="numpy", timeout=20.0, seed=seed) as loader:
                    while True:
                        loader.next()
    finally:
        os._exit(1)


def test_many_processes_never_pass_the_limits_and_nobody_starves_while_some_are_killed(make):
    spi, low, high = 4.0, 0.0, 60.0
    engine = make(capacity=600, page_rows=40, limiter=conduit.SampleToInsertRatio(spi, 20, (low, high)), num_envs=2)
    chance = random.Random(5)
    roles = ["writer", "writer", "loader", "loader"]

    def start(place):
        pid = os.fork()
        if pid == 0:
            _work(engine.name, roles[place], place)
        return pid

    # compiled before the processes are forked
    with (
        engine.writer("replay", num_envs=2, autoreset="next_step") as writer,
        engine.loader("replay", batch_size=8, format="numpy") as loader,
    ):
        for _ in range(10):
            writer.append(obs=np.zeros((2, 4), np.float32), action=np.ones(2, np.int64), reward=np.ones(2, np.float32))
        loader.next()
    pids = [start(place) for place in range(4)]
    progress = []
    try:
        deadline = time.monotonic() + 60
        for look in itertools.count():
            # on a busy machine the processes need longer for their first steps
            if look >= 24 and (min(progress[-1]) > 40 or time.monotonic() > deadline):
                break
            time.sleep(0.06)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            for pid in pids:  # stopped for certain: the state is T
                while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                    time.sleep(0.0005)
            counts = engine.table("replay").limiter.counts
            difference = counts.inserted * spi - counts.sampled
            assert low <= difference <= high, counts
            assert difference - counts.reserved >= low or counts.reserved > 0
            progress.append((counts.inserted, counts.sampled))
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            if look % 4 == 3:
                place = chance.randrange(4)
                os.kill(pids[place], signal.SIGKILL)
                os.waitpid(pids[place], 0)
                pids[place] = start(place)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    engine.recover()
    counts = engine.table("replay").limiter.counts
    assert (counts.granted, counts.reserved) == (0, 0)
    assert min(progress[-1]) > 40


def test_the_status_tells_inserts_samples_and_what_blocks(limited):
    from conduit.plane.observe import inspect

    engine, writer = limited(conduit.Limits(1.0, 1, 0.0, 4))
    put(writer, 4)
    assert take(engine, 3)
    table = inspect.inspect(engine.name).tables[0]
    assert table.limiter is not None
    assert (table.limiter.inserted, table.limiter.sampled, table.limiter.deleted) == (4, 3, 0)
    assert table.limiter.max_diff == 4
    assert table.limiter.sampling is None
    assert table.limiter.inserting is None
    take(engine)
    assert "min_diff" in inspect.inspect(engine.name).tables[0].limiter.sampling
    put(writer, 4)
    assert "max_diff" in inspect.inspect(engine.name).tables[0].limiter.inserting
