"""What limiters may be declared, by Reverb's formula."""

import math
import os

import pytest

import conduit
from conduit.errors import ConfigError


@pytest.mark.parametrize(
    ("spi", "size", "buffer", "message"),
    [
        (0.0, 1, 10.0, "above 0"),
        (-1.0, 1, 10.0, "above 0"),
        (math.nan, 1, 10.0, "above 0"),
        (math.inf, 1, 10.0, "above 0"),
        (1.0, 0, 10.0, "min_size of at least 1"),
        (1.0, 10, 0.5, "at least 2 wide"),
        (8.0, 10, 7.9, "at least 16 wide"),
        (1.0, 10, (5.0, 6.0), "at least 2 wide"),
        (1.0, 10, (11.0, 20.0), "begins at most at"),
        (1.0, 10, math.nan, "number or a pair"),
        (1.0, 10, (0.0, math.nan), "numbers as limits"),
    ],
    ids=str,
)
def test_limits_that_can_only_block_are_refused_with_their_numbers(spi, size, buffer, message):
    with pytest.raises(ConfigError, match=message):
        conduit.SampleToInsertRatio(spi, size, buffer)


def test_the_narrowest_range_is_accepted():
    limits = conduit.SampleToInsertRatio(8.0, 10, 8.0).limits()
    assert (limits.min_diff, limits.max_diff) == (72.0, 88.0)
    assert conduit.SampleToInsertRatio(1.0, 10, (10.0, 12.0)).limits().min_diff == 10.0


def test_a_minimum_size_limits_nothing_else():
    assert conduit.MinSize(5).limits() == conduit.Limits(1.0, 5, -math.inf, math.inf)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ConfigError):
            conduit.MinSize(bad)


SCHEMA = conduit.Schema([conduit.Field("x", "float32")])


def test_the_four_numbers_themselves_are_a_limiter():
    limits = conduit.Limits(1.0, 1, 0.0, 7)
    with conduit.Engine.create(
        f"limits-{os.getpid()}", {"t": conduit.Table.replay(SCHEMA, 100, limiter=limits)}
    ) as engine:
        assert engine.table("t").limiter.limits == limits
        engine.table("t").limiter.change(conduit.Limits(2.0, 3, -4.0, 8.5))
        assert engine.table("t").limiter.limits == conduit.Limits(2.0, 3, -4.0, 8.5)
        with pytest.raises(ConfigError, match="at least 4"):
            engine.table("t").limiter.change(conduit.Limits(2.0, 3, -4.0, -1.5))
        assert engine.table("t").limiter.limits.max_diff == 8.5


@pytest.mark.parametrize(
    ("spi", "low", "high", "is_accepted"),
    [
        (1.0, 0.0, 1.0, True),  # a row in, a row out
        (1.0, 0.0, 0.0, False),
        (1.0, 0.0, 1.5, False),  # no whole numbers: half of it is less than a row
        (2.0, 0.0, 3.0, True),
        (2.0, 0.0, 2.0, False),
        (0.3, 0.0, 2.0, True),
        (0.3, 0.0, 1.0, False),  # 0.9 after three rows: no sample, and a fourth row would make it 1.2
        (1.0, 5.0, -5.0, False),
        (1.0, -math.inf, math.inf, True),
        (1.0, math.inf, math.inf, False),
    ],
    ids=str,
)
def test_a_range_in_which_neither_side_could_go_on_is_refused_by_the_table(spi, low, high, is_accepted):
    limits = conduit.Limits(spi, 1, low, high)
    if is_accepted:
        assert conduit.Table(SCHEMA, 100, limiter=limits).limiter == limits
    else:
        with pytest.raises(ConfigError, match="would wait for each other"):
            conduit.Table(SCHEMA, 100, limiter=limits)


# a queue is a kind of table, not a limiter
def test_the_two_kinds_of_table_are_made_by_their_names():
    replay = conduit.Table.replay(SCHEMA, 100, max_length=3, writers=2)
    assert replay == conduit.Table(SCHEMA, 100, max_length=3, writers=2)
    queue = conduit.Table.queue(SCHEMA, "1 MiB", rollout_length=8, num_envs=2)
    assert queue == conduit.Table(SCHEMA, "1 MiB", kind="queue", rollout_length=8, num_envs=2)
    with pytest.raises(TypeError, match="limiter"):
        conduit.Table.queue(SCHEMA, 100, limiter=conduit.MinSize(1))
