"""Conformance suite of the contract *ingestion*."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from conduit.contracts.ingestion import Ingestion, ticks_of
from conduit.plane.engine import Engine
from conduit.testing.suites.contract import TABLE, ContractTests, put

QUESTIONS = tuple((table, num_envs) for num_envs in (1, 2, 7, 64, 1_000) for table in (TABLE, "other"))


class IngestionTests(ContractTests):
    """Any ingestion passes this."""

    def make(self) -> Ingestion:
        """The ingestion under test; for tables whose rows have `suites.contract.ROW_BYTES` bytes, if that matters to it."""
        raise NotImplementedError

    def test_it_answers_each_question_with_ticks_of_at_least_one(self) -> None:
        policy = self.make()
        for table, num_envs in QUESTIONS:
            assert ticks_of(policy, table, num_envs) >= 1

    def test_the_same_question_has_the_same_answer(self) -> None:
        policy = self.make()
        first = [policy.publish_every(*question) for question in QUESTIONS]
        again = [policy.publish_every(*question) for question in reversed(QUESTIONS)]
        assert first == again[::-1], f"asked twice: {first}, then {again[::-1]}"

    def test_threads_may_ask_at_the_same_time(self) -> None:
        policy = self.make()
        expected = [policy.publish_every(*question) for question in QUESTIONS]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda question: policy.publish_every(*question), QUESTIONS * 50))
        assert answers == expected * 50, "another answer beside other threads"

    def test_a_question_does_not_block(self) -> None:
        policy = self.make()
        begun = time.monotonic()
        for question in QUESTIONS:
            policy.publish_every(*question)
        took = time.monotonic() - begun
        assert took < 1.0, f"{len(QUESTIONS)} questions took {took:.1f} s"

    def test_rows_become_visible_by_so_many_ticks(self) -> None:
        for envs in (None, 3):
            lanes = envs or 1
            engine = self.engine()
            writer = engine.writer(TABLE, **_of(envs), ingestion=self.make())
            every = ticks_of(self.make(), TABLE, lanes)
            row = 0
            # behind that a page's turn publishes too
            for ticks in range(1, min(2 * every + 2, _page_rows(engine) // lanes)):
                row = put(writer, 1, row)
                expected = ticks // every * every * lanes
                seen = _visible(engine)
                assert seen == expected, f"{seen} of {ticks * lanes} rows are visible, by {every} ticks"

    def test_what_is_held_back_is_published_by_flush_and_close(self) -> None:
        for end in ("flush", "close"):
            for envs in (None, 3):
                engine = self.engine()
                writer = engine.writer(TABLE, **_of(envs), ingestion=self.make())
                rows = put(writer, 7)
                getattr(writer, end)()
                assert _visible(engine) == rows, f"{_visible(engine)} of {rows} rows behind {end}"

    def test_rows_come_out_whole_and_in_order_across_pages(self) -> None:
        engine = self.engine(600, page_rows=60)
        with engine.writer(TABLE, ingestion=self.make()) as writer:
            rows = put(writer, 300)
        read = [n for steps in engine.table(TABLE).scan() for n in steps.columns["action"].tolist()]
        assert read == list(range(rows)), f"{len(read)} of {rows} rows, in another order or others"


def _of(envs: int | None) -> dict[str, Any]:
    return {} if envs is None else {"num_envs": envs, "autoreset": "next_step"}


def _visible(engine: Engine) -> int:
    return engine._views[TABLE].rows_visible()


def _page_rows(engine: Engine) -> int:
    return engine._views[TABLE].layout.page_rows
