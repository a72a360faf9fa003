"""What a table can be asked."""

import numpy as np
import pytest

import conduit
from conduit.errors import Closed, ConfigError, Frozen
from tests.plane.conftest import CARTPOLE

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
    assert (table.name, table.kind, table.schema) == ("replay", "replay", CARTPOLE)
    (status,) = conduit_status(engine).tables
    assert (table.nbytes, table.capacity) == (status.bytes, status.capacity)
    ids = engine.loader("replay", batch_size=1, format="numpy").next().ids
    table.delete(ids)
    assert (len(table), table.sampleable()) == (9, 8)
    table.reset()
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
    engine = make(limiter=conduit.MinSize(1))
    with pytest.raises(ConfigError, match="did you mean `replay`"):
        engine.table("replya")
    table = engine.table("replay")
    engine.close()
    for ask in (
        lambda: len(table),
        lambda: table.rows,
        lambda: table.counts,
        table.sampleable,
        table.episodes,
        table.scan,
        table.reset,
        table.freeze,
        table.thaw,
        lambda: table.delete([0]),
        lambda: table.limiter.counts,
        lambda: table.limiter.change(conduit.MinSize(2)),
    ):
        with pytest.raises(Closed):
            ask()


def test_what_one_client_does_to_a_table_holds_for_all_of_them(make):
    engine = make(limiter=conduit.MinSize(1), statistics=("reward",))
    mine = engine.table("replay")
    with engine.writer("replay", statistics=True) as writer, conduit.attach(engine.name) as client:
        theirs = client.table("replay")
        for _ in range(5):
            writer.append(obs=OBS, action=1, reward=0.5)
        writer.flush()
        assert theirs.statistics.read("reward").count == mine.counts.inserted == 5
        theirs.limiter.change(conduit.MinSize(3))
        assert mine.limiter.limits.min_size == 3
        assert sum(len(steps) for steps in theirs.scan()) == 5
        theirs.freeze()
        for refused in (
            lambda: writer.append(obs=OBS, action=1, reward=0.5),
            mine.reset,
            lambda: mine.delete([0]),
        ):
            with pytest.raises(Frozen):
                refused()
        mine.thaw()
        writer.append(obs=OBS, action=1, reward=0.5, terminated=True, final=OBS)
        assert theirs.episodes().returns.tolist() == [3.0]
        theirs.reset()
        assert len(mine) == 0


def test_a_queue_s_rows_are_neither_deleted_nor_reset_and_a_table_without_a_limiter_has_none(make):
    table = make(kind="queue").table("replay")
    for refused in (table.reset, lambda: table.delete([0])):
        with pytest.raises(ConfigError, match="'replay' is a queue: its rows go when they are acknowledged"):
            refused()
    with pytest.raises(ConfigError, match="Expected table 'replay' to have a limiter"):
        _ = table.limiter
