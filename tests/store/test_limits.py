"""What limiters may be declared, by Reverb's formula."""

import math

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


def test_a_minimum_size_limits_nothing_else_and_a_queue_is_a_ratio_of_one():
    assert conduit.MinSize(5).limits() == conduit.store.format.limit_specs.Limits(1.0, 5, -math.inf, math.inf)
    assert conduit.Queue(7).limits() == conduit.store.format.limit_specs.Limits(1.0, 1, 0.0, 7.0)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ConfigError):
            conduit.Queue(bad)
        with pytest.raises(ConfigError):
            conduit.MinSize(bad)
