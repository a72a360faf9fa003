"""The placement there is, one that looks for room, and broken ones that the suite must catch."""

import itertools

import pytest

from conduit.contracts.placement import Placement, Pool, Request
from conduit.plane.ingest.placement import HostPlacement
from conduit.testing.suites.contract import failures
from conduit.testing.suites.placement import PlacementTests


class Spread(Placement):
    """Parts streams among pools by their capacities: the larger a pool, the more streams it has."""

    def choose(self, request, pools):
        ordered = sorted(pools, key=lambda pool: (-pool.capacity, pool.name))
        return ordered[(request.stream * 7 + 3) % 10 // 5 % len(ordered)]


class TestHostPlacement(PlacementTests):
    def make(self):
        return HostPlacement()


class TestSpread(PlacementTests):
    def make(self):
        return Spread()

    def test_it_uses_more_than_one_pool(self):
        pools = (Pool("a", "host", "cpu", 10), Pool("b", "host", "cpu", 20))
        assert {Spread().choose(Request("replay", n, 1, 8), pools).name for n in range(10)} == {"a", "b"}


class RoundRobin(Placement):
    """Counts its questions instead of streams."""

    def __init__(self):
        self.count = itertools.count()

    def choose(self, request, pools):
        return pools[next(self.count) % len(pools)]


class Faithful(Placement):
    """Stays with the pool that it chose first, whether it is on offer or not."""

    def __init__(self):
        self.first = None

    def choose(self, request, pools):
        self.first = self.first or pools[0]
        return self.first


class Sorting(Placement):
    """Sorts the caller's list."""

    def choose(self, request, pools):
        if isinstance(pools, list):
            pools.sort(key=lambda pool: pool.capacity)
        return max(pools, key=lambda pool: pool.capacity)


@pytest.mark.parametrize(
    ("broken", "test", "why"),
    [
        (
            RoundRobin,
            "test_the_same_question_has_the_same_answer",
            "among ['host', 'far', 'small']: far, asked again small",
        ),
        (
            Faithful,
            "test_it_chooses_one_of_the_pools_on_offer",
            "Faithful.choose to return one of ['far', 'small'] for table 'replay', got Pool(name='host'",
        ),
        (Sorting, "test_it_leaves_what_it_is_given_as_it_is", "the pools are now ['small', 'host', 'far']"),
    ],
    ids=["round robin", "faithful", "sorting"],
)
def test_the_suite_catches_a_placement_that_breaks_its_contract(broken, test, why):
    class Broken(PlacementTests):
        def make(self):
            return broken()

    assert why in failures(Broken, test)[test]
