"""An exception may come between any two bytecodes, from Ctrl-C or another signal's handler: nothing is lost, torn, kept or wedged."""

import gc
import random
import signal
import sys
import time

import pytest

import conduit
from conduit.errors import Closed, FieldError, Frozen
from conduit.testing import interrupting
from conduit.testing.interrupted.scenario import check_rows, values
from conduit.testing.interruptions import SCENARIOS

STRIDES = {
    "AppendExactly": 7,
    "WriteSteps": 5,
    "WriteRollouts": 5,
    "Extend": 5,
    "OpenWriters": 7,
    "Load": 17,
    "Read": 3,
    "Attach": 101,
    "Create": 101,
    "Checkpoint": 301,
}
"""Operations with many points are interrupted at every so many of them, from another one on each time; `perf.bars right` at all."""


@pytest.fixture
def scenario(engine_name):
    made = []

    def make(name):
        made.append(SCENARIOS[name](engine_name))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_operation_that_is_interrupted_anywhere_is_done_or_not_and_its_objects_go_on(scenario, name):
    one = scenario(name)
    every = STRIDES.get(name, 1)
    swept = interrupting.sweep(one.operate, one.check, every=every, first=random.randrange(every))
    assert swept.bad == []
    assert swept.raised > 0.7 * swept.points > 5


class Alarm(Exception):
    """Raised by a signal's handler."""


@pytest.mark.parametrize("name", ["Append", "AppendExactly", "WriteSteps", "Limited", "Produce", "Consume", "Read"])
def test_what_a_handler_raises_at_random_moments_leaves_nothing_behind(scenario, name):
    one = scenario(name)
    one.operate()
    one.check()
    begun = time.perf_counter()
    one.operate()
    lasts = time.perf_counter() - begun
    one.check()
    rng = random.Random(1)
    came = 0

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        for _ in range(150):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1.5 * lasts))
                one.operate()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                came += 1
            one.check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        signal.signal(signal.SIGALRM, before)
    assert came > 20


@pytest.fixture
def writer(engine_name):
    from conduit.testing.interrupted.scenario import SCHEMA

    with conduit.Engine.create(engine_name, {"t": conduit.Table(SCHEMA, capacity=120, page_rows=24)}) as engine:
        yield engine.writer("t")


def fill(step, n):
    step.obs, step.action[...], step.reward[...] = values(n)["obs"], n, n


def test_a_step_whose_commit_is_refused_by_a_freeze_is_discarded_and_the_writer_goes_on(writer, engine_name):
    client = conduit.attach(engine_name)
    with pytest.raises(Frozen), writer.step() as step:  # noqa: PT012 - what leaving the block does is the test
        fill(step, 0)
        client.table("t").freeze()
    client.table("t").thaw()
    writer.append(**values(1))
    assert check_rows(client._views["t"]) == [1]
    client.close()


def test_a_rollout_whose_commit_is_refused_by_a_freeze_is_discarded_with_its_block(writer, engine_name):
    client = conduit.attach(engine_name)
    with pytest.raises(Frozen), writer.rollout(2) as rollout:  # noqa: PT012 - the same
        rollout.obs[:], rollout.action[:], rollout.reward[:] = 7, 7, 7
        client.table("t").freeze()
    client.table("t").thaw()
    writer.append(**values(1))
    assert check_rows(client._views["t"]) == [1]
    client.close()


def test_a_rollout_that_is_kept_can_be_committed_after_a_thaw(writer, engine_name):
    client = conduit.attach(engine_name)
    rollout = writer.rollout(1)
    rollout.obs[0], rollout.action[0], rollout.reward[0] = values(5)["obs"], 5, 5
    client.table("t").freeze()
    with pytest.raises(Frozen):
        rollout.commit()
    client.table("t").thaw()
    with pytest.raises(Closed, match="the rollout in progress"):
        writer.append(**values(6))
    rollout.commit()
    writer.append(**values(7))
    assert check_rows(client._views["t"]) == [5, 7]
    client.close()


@pytest.mark.parametrize("form", ["step", "rollout", "unchecked"])
def test_a_form_that_is_dropped_is_discarded(writer, engine_name, form):
    if form == "step":
        block = writer.step()
        block.__enter__().terminated = True
        with pytest.raises(Closed, match="the step in progress"):
            writer.append(**values(0))
        del block
    elif form == "rollout":
        rollout = writer.rollout(4)
        rollout.terminated[:] = True
        del rollout
    else:
        unchecked = writer.unchecked()
        unchecked.terminated[unchecked.row] = True
        commit = unchecked.commit
        rows = unchecked.rows
        del unchecked
        assert commit() >= rows
    writer.append(**values(1))
    client = conduit.attach(engine_name)
    assert check_rows(client._views["t"]) == [1]
    client.close()


def test_what_a_limiter_granted_to_a_form_that_is_dropped_is_given_back(engine_name):
    from conduit.testing.interrupted.scenario import SCHEMA

    table = conduit.Table(
        SCHEMA, capacity=120, page_rows=24, limiter=conduit.SampleToInsertRatio(1.0, 8, error_buffer=64.0)
    )
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        writer = engine.writer("t")
        rollout = writer.rollout(6)
        assert engine.table("t").limiter.counts.granted == 6
        del rollout
        assert engine.table("t").limiter.counts.granted == 0


def test_a_refused_append_leaves_no_flag_behind(writer, engine_name):
    with pytest.raises(FieldError, match="final observation"):
        writer.append(**values(0) | {"terminated": True})
    writer.append(**values(1))
    client = conduit.attach(engine_name)
    assert check_rows(client._views["t"]) == [1]
    client.close()


def test_a_second_commit_of_a_rollout_commits_nothing(writer, engine_name):
    rollout = writer.rollout(1)
    rollout.obs[0], rollout.action[0], rollout.reward[0] = values(5)["obs"], 5, 5
    rollout.commit()
    with pytest.raises(Closed, match="committed or discarded"):
        rollout.commit()
    client = conduit.attach(engine_name)
    assert check_rows(client._views["t"]) == [5]
    client.close()


def test_objects_that_were_never_finished_are_safe_to_destroy():
    for kind in (
        conduit.Writer,
        conduit.Loader,
        conduit.typing.Consumer,
        conduit.typing.Claim,
        conduit.Engine,
        conduit.typing.PolicySlot,
    ):
        half = object.__new__(kind)
        del half
    from conduit.plane.device.registration import Registration
    from conduit.plane.device.row_sources import Registered
    from conduit.plane.ingest.stream import Stream
    from conduit.store.tables.loader_cursors import NamedLoader
    from conduit.store.tables.view import Lease

    for kind in (Stream, Lease, NamedLoader, Registration, Registered):
        half = object.__new__(kind)
        del half
    gc.collect()
