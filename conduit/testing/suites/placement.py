"""Conformance suite of the contract *placement*."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

from conduit.contracts.placement import Placement, Pool, Request, place
from conduit.testing.suites.contract import ROW_BYTES, TABLE, ContractTests, put

POOLS = (
    Pool("host", "host", "cpu", 1 << 30),
    Pool("far", "host", "cpu", 1 << 36),
    Pool("small", "host", "cpu", 1 << 16),
)
REQUESTS = tuple(
    Request(TABLE, stream, num_envs, row_bytes)
    for stream, num_envs, row_bytes in itertools.product((0, 1, 2, 17), (1, 64), (ROW_BYTES, 28_224))
)
OFFERS = (POOLS, POOLS[::-1], POOLS[1:], POOLS[:1], POOLS[2:])


class PlacementTests(ContractTests):
    """Any placement passes this."""

    def make(self) -> Placement:
        """The placement under test."""
        raise NotImplementedError

    def test_it_chooses_one_of_the_pools_on_offer(self) -> None:
        policy = self.make()
        for pools, request in itertools.product(OFFERS, REQUESTS):
            place(policy, request, pools)

    def test_the_same_question_has_the_same_answer(self) -> None:
        policy = self.make()
        asked = list(itertools.product(OFFERS, REQUESTS))
        first = [policy.choose(request, pools) for pools, request in asked]
        again = [policy.choose(request, pools) for pools, request in reversed(asked)][::-1]
        for (pools, request), one, other in zip(asked, first, again, strict=True):
            assert one == other, f"{request} among {[p.name for p in pools]}: {one.name}, asked again {other.name}"

    def test_it_leaves_what_it_is_given_as_it_is(self) -> None:
        policy = self.make()
        for pools in OFFERS:
            given = list(pools)
            for request in REQUESTS:
                policy.choose(request, given)
                assert given == list(pools), f"the pools are now {[pool.name for pool in given]}"

    def test_threads_may_ask_at_the_same_time(self) -> None:
        policy = self.make()
        asked = list(itertools.product(OFFERS, REQUESTS))
        expected = [policy.choose(request, pools) for pools, request in asked]
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda question: policy.choose(question[1], question[0]), asked * 20))
        assert answers == expected * 20, "another answer beside other threads"

    def test_a_question_does_not_block(self) -> None:
        policy = self.make()
        begun = time.monotonic()
        for request in REQUESTS:
            policy.choose(request, POOLS)
        took = time.monotonic() - begun
        assert took < 1.0, f"{len(REQUESTS)} questions took {took:.1f} s"

    def test_rows_of_streams_that_it_places_are_read_as_they_were_written(self) -> None:
        engine = self.engine()
        policy = self.make()
        with engine.writer(TABLE, placement=policy) as one, engine.writer(TABLE, placement=policy) as other:
            put(other, 50, put(one, 50))
        read = sorted(n for steps in engine.table(TABLE).scan() for n in steps.columns["action"].tolist())
        assert read == list(range(100)), f"{len(read)} of 100 rows"
