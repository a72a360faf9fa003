"""What a wait in vain says of the writers: how many there are, and how many of them live."""

import gc

import numpy as np
import pytest

import conduit
from conduit.errors import DataTimeout
from conduit.plane.deliver.lacking import who_writes
from conduit.testing.puppets import Puppet, attach

SCHEMA = conduit.Schema([conduit.Field("x", "int64", observation=True)])
TABLES = {
    "replay": conduit.Table(SCHEMA, 1000),
    "limited": conduit.Table(SCHEMA, 1000, limiter=conduit.SampleToInsertRatio(1.0, 100, 10.0)),
    "queue": conduit.Table.queue(SCHEMA, 1000),
}


@pytest.fixture
def engine(engine_name):
    with conduit.Engine.create(
        engine_name, TABLES, policies={"policy": {"w": np.zeros(1)}}, max_participants=8
    ) as made:
        yield made


def write(own, table, count=1, rows=1):
    """Open writers and write with them."""
    own.writers = [own.client.writer(table) for _ in range(count)]
    for writer in own.writers:
        for number in range(rows):
            writer.append(x=number)


def said(engine, table):
    """What a wait of its kind says when it has been in vain."""
    if table == "queue":
        consumer = engine.consumer(table, format="numpy", timeout=0.0)
        while (claim := consumer.poll()) is not None:
            claim.ack()
        wait = consumer.next
    else:
        wait = engine.loader(table, batch_size=10, format="numpy", timeout=0.0).next
    with pytest.raises(DataTimeout) as told:
        wait()
    return str(told.value)


@pytest.mark.parametrize("table", TABLES)
def test_a_wait_in_vain_says_how_many_writers_live_whoever_has_looked_after_the_dead(engine, table):
    assert "no writer is open" in said(engine, table)
    with Puppet() as one, Puppet() as other:
        for puppet in (one, other):
            puppet.do(attach, engine.name)
            puppet.do(write, table)
        assert "2 of 2 writers alive" in said(engine, table)
        one.kill()
        assert "1 of 2 writers alive" in said(engine, table)
        other.kill()
        assert "0 of 2 writers alive" in said(engine, table)
        engine.recover()
        assert "0 of 2 writers alive" in said(engine, table)


def test_a_writer_that_comes_stands_for_one_that_died(engine):
    view = engine._views["replay"]
    with Puppet() as one:
        one.do(attach, engine.name)
        one.do(write, "replay", 3)
        assert who_writes(view) == "3 of 3 writers alive"
        one.kill()
    engine.recover()
    assert who_writes(view) == "0 of 3 writers alive"
    writers = []
    for alive in (1, 2, 3):
        writers.append(engine.writer("replay"))
        assert who_writes(view) == f"{alive} of 3 writers alive"
    writers.append(engine.writer("replay"))
    assert who_writes(view) == "4 of 4 writers alive"
    assert who_writes(engine._views["queue"]) == "no writer is open"
    for writer in writers:
        writer.close()
    assert who_writes(view) == "no writer is open"


def test_writers_that_are_closed_or_dropped_or_whose_client_closes_are_none_that_died(engine):
    view = engine._views["replay"]
    client = conduit.attach(engine.name)
    kept = [client.writer("replay"), client.writer("replay")]
    kept[0].close()
    kept[0].close()
    assert who_writes(view) == "1 of 1 writer alive"
    client.writer("replay")
    gc.collect()
    client.writer("replay").close()
    assert who_writes(view) == "1 of 1 writer alive"
    client.close()
    engine.recover()
    assert who_writes(view) == "no writer is open"
    with conduit.attach(engine.name):  # it has the seat
        assert who_writes(view) == "no writer is open"


def test_a_seat_that_is_taken_again_has_no_writers_of_its_last_holder(engine):
    with Puppet() as one:
        number = one.do(attach, engine.name)
        one.do(write, "replay", 2)
        one.kill()
    with conduit.attach(engine.name) as client:
        assert client._participants.number == number
        assert who_writes(engine._views["replay"]) == "0 of 2 writers alive"


def test_a_mixed_loader_says_it_of_the_table_that_lacks_rows(engine):
    with engine.writer("replay") as writer:
        for number in range(200):
            writer.append(x=number)
    loader = engine.mixed_loader({"replay": 0.5, "limited": 0.5}, batch_size=10, format="numpy", timeout=0.0)
    with pytest.raises(DataTimeout, match=r"'limited'.*no writer is open"):
        loader.next()


def test_a_restored_engine_has_neither_writers_nor_lost_ones(engine, engine_name, tmp_path):
    with Puppet() as one:
        one.do(attach, engine.name)
        one.do(write, "replay", 2)
        one.kill()
    engine.recover()
    assert who_writes(engine._views["replay"]) == "0 of 2 writers alive"
    engine.checkpoint(tmp_path)
    with conduit.Engine.restore(tmp_path, f"{engine_name}-again", limiter="keep") as again:
        assert who_writes(again._views["replay"]) == "no writer is open"


def test_rows_that_no_window_begins_at_are_told_with_the_writers(engine):
    with Puppet() as one:
        one.do(attach, engine.name)
        one.do(write, "replay", 1, 1)
        one.kill()
    loader = engine.loader("replay", batch_size=1, format="numpy", timeout=0.0, max_staleness=0, policy=engine.policy())
    engine.policy().publish({"w": np.zeros(1)})
    with pytest.raises(DataTimeout, match=r"refused as older.*0 of 1 writer alive"):
        loader.next()


def test_threads_writers_are_counted_once_each(engine):
    writers = [engine.writer("replay") for _ in range(5)]
    for writer in writers:
        writer.append(x=np.int64(1))
    assert who_writes(engine._views["replay"]) == "5 of 5 writers alive"
