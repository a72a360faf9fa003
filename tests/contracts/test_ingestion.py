"""The ingestions there are, one that counts bytes, and broken ones that the suite must catch."""

import itertools
import time

import pytest

import conduit
from conduit.contracts.ingestion import Ingestion, ticks_of
from conduit.errors import ConfigError
from conduit.plane.ingest.policy import CommitPerStep
from conduit.testing.suites.contract import ROW_BYTES, failures
from conduit.testing.suites.ingestion import IngestionTests


class CommitBytes(Ingestion):
    """Publishes once about so many bytes are committed."""

    def __init__(self, size, row_bytes):
        self.size, self.row_bytes = size, row_bytes

    def publish_every(self, table, num_envs):
        return max(1, self.size // (self.row_bytes * num_envs))


class TestCommitPerStep(IngestionTests):
    def make(self):
        return CommitPerStep()


class TestCommitEvery(IngestionTests):
    def make(self):
        return conduit.CommitEvery(8)


class TestCommitBytes(IngestionTests):
    def make(self):
        return CommitBytes(400, ROW_BYTES)


class RoundedDown(CommitBytes):
    """Ticks of more bytes than that give none."""

    def publish_every(self, table, num_envs):
        return self.size // (self.row_bytes * num_envs)


class Growing(Ingestion):
    """Holds more and more back, the longer it is asked."""

    def __init__(self):
        self.count = itertools.count(1)

    def publish_every(self, table, num_envs):
        return next(self.count)


class Sleepy(Ingestion):
    def publish_every(self, table, num_envs):
        time.sleep(0.15)
        return 1


@pytest.mark.parametrize(
    ("broken", "test", "why"),
    [
        (
            lambda: RoundedDown(400, ROW_BYTES),
            "test_it_answers_each_question_with_ticks_of_at_least_one",
            "at least 1 tick for table 'replay', got 0",
        ),
        (Growing, "test_the_same_question_has_the_same_answer", "asked twice: [1, 2"),
        (Growing, "test_threads_may_ask_at_the_same_time", "another answer beside other threads"),
        (Sleepy, "test_a_question_does_not_block", "10 questions took 1."),
    ],
    ids=["rounded down", "growing", "growing beside threads", "sleepy"],
)
def test_the_suite_catches_an_ingestion_that_breaks_its_contract(broken, test, why):
    class Broken(IngestionTests):
        def make(self):
            return broken()

    assert why in failures(Broken, test)[test]


@pytest.mark.parametrize("answer", [0, -1, 1.5, "2", None, True])
def test_an_answer_that_is_no_number_of_ticks_is_refused_and_names_the_policy(answer):
    class Bursts(Ingestion):
        def publish_every(self, table, num_envs):
            return answer

    with pytest.raises(ConfigError, match=r"Bursts.publish_every.*at least 1.*'replay'"):
        ticks_of(Bursts(), "replay", 1)
