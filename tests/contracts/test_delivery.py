"""The deliveries there are, one that reads the newest rows by a scan, and broken ones that the suite must catch."""

import time

import numpy as np
import pytest

import conduit
from conduit.clock import Deadline
from conduit.contracts.delivery import Delivery
from conduit.errors import Closed, DataTimeout
from conduit.testing.suites.contract import TABLE, failures
from conduit.testing.suites.delivery import DeliveryTests

OPTIONS = {"batch_size": 8, "format": "numpy", "min_rows": 40, "timeout": 5.0}


class TestLoader(DeliveryTests):
    def open(self, engine):
        return engine.loader(TABLE, **OPTIONS)


class TestTorchLoader(DeliveryTests):
    def open(self, engine):
        pytest.importorskip("torch")
        return engine.loader(TABLE, **OPTIONS | {"format": "torch"})


class TestEpochLoader(DeliveryTests):
    def open(self, engine):
        return engine.loader(TABLE, sampling=conduit.Shuffled(), **OPTIONS)


class Newest(Delivery):
    """Hands out the newest steps of a table as they were written, oldest first; knows no loader."""

    def __init__(self, engine, size, least):
        self.engine, self.size, self.least, self.is_open = engine, size, least, True

    def attempt(self):
        parts = [steps.columns for steps in self.engine.table(TABLE).scan()]
        if sum(len(part["action"]) for part in parts) < self.least:
            return None
        newest = {name: np.concatenate([part[name] for part in parts])[-self.size :] for name in parts[0]}
        return {name: np.array(value) for name, value in newest.items()}

    def next(self, timeout=None):
        deadline = Deadline(5.0 if timeout is None else timeout)
        if not self.is_open:
            raise Closed("Expected an open delivery, got one that was closed")
        while (batch := self.attempt()) is None:
            if deadline.passed():
                raise DataTimeout(f"Expected {self.least} rows within {timeout} s")
            time.sleep(0.005)
        return batch

    def close(self):
        self.is_open = False


class TestNewest(DeliveryTests):
    def open(self, engine):
        return Newest(engine, 8, 40)


class Reusing(Newest):
    """Has one set of arrays for all batches."""

    memory = None

    def next(self, timeout=None):
        batch = super().next(timeout)
        self.memory = self.memory or batch
        for name, value in batch.items():
            self.memory[name][:] = value
        return self.memory


class Patient(Newest):
    """Looks at no timeout that it is given."""

    def next(self, timeout=None):
        return super().next(None if timeout is None or timeout >= 0 else timeout)


class Tearing(Newest):
    """Takes observations and actions from two looks at the table."""

    def attempt(self):
        first = super().attempt()
        return first and {**first, "obs": np.roll(first["obs"], 1, axis=0)}


class Open(Newest):
    """Delivers on behind its close."""

    def close(self):
        pass


class Forgetful(Newest):
    """Gives up for good when a wait was in vain."""

    def next(self, timeout=None):
        try:
            return super().next(timeout)
        except DataTimeout:
            self.least = 1 << 60
            raise


@pytest.mark.parametrize(
    ("broken", "test", "why"),
    [
        (Reusing, "test_a_batch_that_is_held_does_not_change", "of a held batch changed behind later batches"),
        (Patient, "test_a_wait_that_is_in_vain_ends_at_its_deadline", "timeout=0.0 took 5."),
        (Tearing, "test_each_row_of_a_batch_is_one_that_was_written", "torn observations of [52, 53"),
        (Open, "test_close_is_idempotent_and_nothing_is_delivered_behind_it", "behind close: {"),
        (Open, "test_leaving_its_context_closes_it", "behind the block: {"),
        (Forgetful, "test_a_wait_that_was_in_vain_takes_nothing_from_the_next_one", "DataTimeout"),
    ],
    ids=["reusing", "patient", "tearing", "open", "open behind its context", "forgetful"],
)
def test_the_suite_catches_a_delivery_that_breaks_its_contract(broken, test, why):
    class Broken(DeliveryTests):
        def open(self, engine):
            return broken(engine, 8, 40)

    assert why in failures(Broken, test)[test]
