"""What a table can be asked."""

import numpy as np
import pytest

import conduit
from conduit.errors import Closed, ConfigError

OBS = np.zeros(4, np.float32)


def test_a_table_says_how_many_rows_it_holds_and_how_many_could_be_drawn(make):
    engine = make()
    table = engine.table("replay")
    assert (len(table), table.rows, table.sampleable(), bool(table)) == (0, 0, 0, True)
    with engine.writer("replay") as writer:
        for _ in range(10):
            writer.append(obs=OBS, action=1, reward=0.5)
        # the newest row waits for what follows it
        assert (len(table), table.rows, table.sampleable()) == (10, 10, 9)
    assert table.counts.inserted == 10
    assert (table.name, table.kind, table.schema) == ("replay", "replay", engine.schema("replay"))
    (status,) = conduit_status(engine).tables
    assert (table.nbytes, table.capacity) == (status.bytes, status.capacity)
    ids = engine.loader("replay", batch_size=1, format="numpy").next().ids
    engine.delete("replay", ids)
    assert (len(table), table.sampleable()) == (9, 8)
    engine.reset("replay")
    assert (len(table), table.sampleable()) == (0, 0)


def conduit_status(engine):
    from conduit.plane.observe.inspect import inspect

    return inspect(engine.name)


def test_a_queue_holds_what_is_not_acknowledged_and_offers_what_nobody_has_claimed(make):
    engine = make(kind="queue")
    table = engine.table("replay")
    writer = engine.writer("replay")
    for _ in range(6):
        writer.append(obs=OBS, action=1, reward=0.5)
    assert (len(table), table.sampleable()) == (6, 6)
    claim = engine.consumer("replay", format="numpy").next(max_ticks=4)
    assert (len(table), table.sampleable()) == (6, 2)
    claim.ack()
    assert (len(table), table.sampleable()) == (2, 2)
    with pytest.raises(ConfigError, match="Expected no window for queue 'replay'"):
        table.sampleable(conduit.Transition())


def test_a_table_that_is_not_there_is_named_with_the_nearest_one_and_a_closed_client_answers_nothing(make):
    engine = make()
    with pytest.raises(ConfigError, match="did you mean `replay`"):
        engine.table("replya")
    table = engine.table("replay")
    engine.close()
    for ask in (lambda: len(table), lambda: table.rows, lambda: table.counts, table.sampleable):
        with pytest.raises(Closed):
            ask()
