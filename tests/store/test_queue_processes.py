"""A queue among processes that die, stop and wait."""

import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import conduit
from conduit.errors import Busy, DataTimeout, Forked, SpaceTimeout
from conduit.store.format import words as w
from conduit.testing import rows
from conduit.testing.invariants import check_nothing_leaked, hazards, kinds
from conduit.testing.puppets import Puppet, attach
from conduit.testing.queueing import CONSUMERS, PRODUCERS

SECONDS = float(os.environ.get("CONDUIT_TORTURE_SECONDS", "120"))
SEED = int(os.environ.get("CONDUIT_TORTURE_SEED", "1"))


@pytest.mark.parametrize("seconds", [8.0, pytest.param(SECONDS, marks=pytest.mark.torture, id="long")])
def test_every_row_is_acknowledged_once_whoever_is_killed(engine_name, seconds):
    command = [sys.executable, "-m", "conduit.testing.queueing", "--name", engine_name]
    done = subprocess.run(
        [*command, "--seconds", str(seconds), "--seed", str(SEED)],
        capture_output=True,
        text=True,
        timeout=seconds + 120,
        check=False,
    )
    print(done.stdout)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert report["kills"].keys() == {role.__name__ for role in (*CONSUMERS, *PRODUCERS)}
    # some consumers died between delivery and acknowledgement, and what they held came again
    for count in ("written", "acknowledged", "open", "again", "claims"):
        assert report[count] > 0, count


@pytest.fixture
def engine(engine_name):
    # ten rows a page, and room for a final observation
    table = conduit.Table.queue(rows.SCHEMA, capacity=27, page_rows=11)
    with conduit.Engine.create(engine_name, {"replay": table}) as made:
        assert made._views["replay"].layout.pages == 4
        yield made


def append(writer, first, count):
    for number in range(first, first + count):
        writer.append(obs=np.full(rows.WORDS, number), action=number, reward=0.0)


def consume(own, acknowledge):
    """Claim one page; returns its actions."""
    if not hasattr(own, "consumer"):
        own.consumer = own.client.consumer("replay", format="numpy")
    own.claim = own.consumer.next(timeout=5.0)
    actions = own.claim["action"][:, 0].tolist()
    if acknowledge:
        own.claim.ack()
    return actions


@pytest.mark.parametrize("acknowledge", [False, True])
def test_a_consumer_killed_before_its_acknowledgement_has_its_rows_delivered_again_and_not_after_it(
    engine, acknowledge
):
    writer = engine.writer("replay", keep_final=False)
    append(writer, 0, 10)
    with Puppet() as consumer:
        consumer.do(attach, engine.name)
        assert consumer.do(consume, acknowledge) == list(range(10))
        mine = engine.consumer("replay", format="numpy")
        assert mine.poll() is None
        consumer.kill()
    engine.recover()
    assert engine._views["replay"].delivered_again == (not acknowledge)
    claim = mine.poll()
    if acknowledge:
        assert claim is None
    else:
        assert claim["action"][:, 0].tolist() == list(range(10))
        assert claim.delivered_before
        claim.ack()
        assert mine.poll() is None


def test_the_death_of_a_consumer_is_noticed_by_one_that_waits_within_a_second(engine):
    append(engine.writer("replay", keep_final=False), 0, 10)
    with Puppet() as consumer:
        consumer.do(attach, engine.name)
        consumer.do(consume, False)
        killer = threading.Timer(0.2, consumer.kill)
        killer.start()
        begun = time.monotonic()
        with engine.consumer("replay", format="numpy").next(timeout=10.0) as claim:
            assert claim.delivered_before
        assert time.monotonic() - begun < 1.5
        killer.join()


def test_a_stopped_consumer_is_neither_robbed_nor_are_its_rows_delivered_again(engine):
    append(engine.writer("replay", keep_final=False), 0, 10)
    with Puppet() as consumer:
        consumer.do(attach, engine.name)
        consumer.do(consume, False)
        consumer.stop()
        engine.recover()
        with pytest.raises(
            DataTimeout, match=r"0 rows wait to be claimed; claimed and not acknowledged by: process \d+"
        ):
            engine.consumer("replay", format="numpy").next(timeout=0.7)
        consumer.go_on()
        consumer.do(acknowledge_now)
    engine.recover()
    assert engine.consumer("replay", format="numpy").poll() is None
    assert engine._views["replay"].delivered_again == 0


def acknowledge_now(own):
    own.claim.ack()


def test_a_full_queue_makes_its_writer_wait_with_a_deadline_that_says_who_holds_what(engine):
    writer = engine.writer("replay", keep_final=False, timeout=0.1)
    append(writer, 0, 40)
    with pytest.raises(SpaceTimeout, match=r"4 pages of 11 rows are full: 40 rows wait to be claimed; none is claimed"):
        append(writer, 40, 1)
    with Puppet() as consumer:
        consumer.do(attach, engine.name)
        consumer.do(consume, False)
        with pytest.raises(SpaceTimeout, match=rf"30 rows wait .* by: process {consumer.pid} \(.*\) 10\. Start"):
            append(writer, 40, 1)
        eager = engine.writer("replay", keep_final=False, on_full="raise")
        with pytest.raises(Busy, match="Expected room in queue 'replay'"):
            append(eager, 0, 1)
        # what is acknowledged makes room once nothing of it is in use any more
        consumer.do(acknowledge_now)
        with pytest.raises(SpaceTimeout):
            append(writer, 40, 1)
        consumer.do(drop)
        append(writer, 40, 1)


def drop(own):
    del own.claim


def test_a_writer_that_waits_goes_on_as_soon_as_a_consumer_is_done(engine):
    writer = engine.writer("replay", keep_final=False, timeout=10.0)
    append(writer, 0, 40)
    with Puppet() as consumer:
        consumer.do(attach, engine.name)
        consumer.do(consume, False)
        timer = threading.Timer(0.1, lambda: (consumer.do(acknowledge_now), consumer.do(drop)))
        begun = time.monotonic()
        timer.start()
        append(writer, 40, 1)
        assert 0.09 < time.monotonic() - begun < 1.0
        timer.join()


def test_writers_never_run_ahead_of_consumers_by_more_than_the_queue_holds(engine):
    # reverb#55 and #92: without back-pressure the memory of what is on its way grows without bound
    with Puppet() as producer:
        producer.do(attach, engine.name)
        producer.tell(produce, 400)
        consumer = engine.consumer("replay", format="numpy", timeout=10.0)
        view = engine._views["replay"]
        got = 0
        while got < 400:
            claim = consumer.next()
            assert view.rows_written() - got <= 40
            assert claim["action"][0, 0] == got
            got += claim.ticks
            claim.ack()
            del claim
        producer.answer()


def produce(own, count):
    own.writer = own.client.writer("replay", keep_final=False, timeout=10.0)
    append(own.writer, 0, count)


def test_a_killed_producer_s_rows_come_in_order_and_its_unfinished_rollout_as_it_is(engine_name):
    table = conduit.Table.queue(rows.SCHEMA, capacity=80, rollout_length=8)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine, Puppet() as producer:
        producer.do(attach, engine.name)
        producer.do(produce, 21)
        consumer = engine.consumer("replay", format="numpy")
        first = consumer.next()
        assert first.complete
        second = consumer.next()
        assert consumer.poll() is None, "the third is not finished"
        producer.kill()
        third = consumer.next(timeout=2.0)
        assert not third.complete
        assert third.bootstrap is None
        found = [claim["action"][:, 0].tolist() for claim in (first, second, third)]
        assert found == [list(range(8)), list(range(8, 16)), list(range(16, 21))]


def test_a_killed_consumer_s_arrays_hold_no_page_back(engine):
    view = engine._views["replay"]
    writer = engine.writer("replay", keep_final=False, timeout=5.0)
    append(writer, 0, 40)
    with Puppet() as consumer:
        consumer.do(attach, engine.name)
        for _ in range(4):
            consumer.do(consume_and_keep)
        assert np.count_nonzero(hazards(view)) == 4
        consumer.kill()
    append(writer, 40, 10)
    assert not hazards(view).any()


def consume_and_keep(own):
    consume(own, True)
    own.kept = [*getattr(own, "kept", []), own.claim["obs"]]


def test_a_forked_child_can_neither_claim_nor_end_its_parents_claims(engine):
    append(engine.writer("replay", keep_final=False), 0, 20)
    consumer = engine.consumer("replay", format="numpy")
    claim = consumer.next()
    pid = os.fork()
    if pid == 0:
        refused = 0
        for call in (consumer.poll, claim.ack):
            try:
                call()
            except Forked:
                refused += 1
        consumer.close()
        del claim, consumer
        os._exit(0 if refused == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert engine.consumer("replay", format="numpy").poll()["action"][0, 0] == 10, (
        "the first page is still the parent's"
    )
    claim.ack()


def test_a_client_that_leaves_gives_back_what_it_holds(engine):
    append(engine.writer("replay", keep_final=False), 0, 10)
    client = conduit.attach(engine.name)
    claim = client.consumer("replay", format="numpy").next()
    client.close()
    again = engine.consumer("replay", format="numpy").poll()
    assert again.delivered_before
    again.ack()
    with pytest.raises(conduit.errors.Closed):
        claim.ack()
    del claim, again
    view = engine._views["replay"]
    assert np.isin(kinds(view), (w.FREE, w.SEALED, 2)).all()


def test_many_consumers_share_a_queue_and_nothing_comes_twice(engine):
    with Puppet() as producer, Puppet() as one, Puppet() as other:
        for puppet in (producer, one, other):
            puppet.do(attach, engine.name)
        producer.tell(produce, 600)
        one.tell(consume_all, 250)
        other.tell(consume_all, 250)
        found = [puppet.answer() for puppet in (one, other)]
        for own in found:
            assert own == sorted(own), "one consumer sees a stream in its order"
        rest = consume_some(engine, 600 - sum(map(len, found)))
        producer.answer()
        assert sorted([*found[0], *found[1], *rest]) == list(range(600))
    engine.recover()
    check_nothing_leaked(engine._views["replay"])


def consume_all(own, least):
    return consume_some(own.client, least)


def consume_some(client, least):
    found = []
    consumer = client.consumer("replay", format="numpy", timeout=10.0)
    while len(found) < least:
        with consumer.next(max_ticks=3) as claim:
            found += claim["action"][:, 0].tolist()
        del claim
    return found
