"""Threads that make calls, and whoever waits for them being taken out of it."""

import sys
import time

import pytest

from conduit.store.segment.workers import Workers


def threads():
    return len(sys._current_frames())


def test_calls_are_made_and_their_results_and_errors_come_back():
    def divide(by):
        return 6 // by

    with Workers(3) as workers:
        jobs = [workers.submit(lambda by=by: divide(by)) for by in (1, 2, 3, 0)]
        assert [job.result() for job in jobs[:3]] == [6, 3, 2]
        with pytest.raises(ZeroDivisionError):
            jobs[3].result()


def test_the_end_waits_for_calls_under_way_and_drops_the_others():
    done = []
    before = threads()
    with Workers(1) as workers:
        slow = workers.submit(lambda: (time.sleep(0.1), done.append("slow")))
        later = workers.submit(lambda: done.append("later"))
        time.sleep(0.02)
    assert done == ["slow"]
    slow.result()
    with pytest.raises(RuntimeError, match="ended before"):
        later.result()
    time.sleep(0.05)
    assert threads() == before


def test_workers_that_are_dropped_end():
    before = threads()
    workers = Workers(3)
    workers.__enter__()
    workers.submit(lambda: None).result()
    del workers
    time.sleep(0.1)
    assert threads() == before
