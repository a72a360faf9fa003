"""Conformance suite of the contract *delivery*."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from conduit.contracts.delivery import Delivery
from conduit.errors import Closed, ConfigError, WaitTimeout
from conduit.plane.engine import Engine
from conduit.testing.suites.contract import TABLE, Array, ContractTests, observation, put

_PATIENCE = 5.0


class DeliveryTests(ContractTests):
    """Any delivery of rows of one table passes this; each batch has `obs`, `action` and `reward`."""

    def open(self, engine: Engine) -> Delivery[Mapping[str, Any]]:
        """The delivery under test, from the table `replay` of an engine, of few rows a batch; it delivers once 40 rows are there."""
        raise NotImplementedError

    def opened(self, rows: int = 60) -> tuple[Engine, Delivery[Mapping[str, Any]]]:
        """An engine with some rows, and a delivery."""
        engine = self.engine(2_000)
        if rows:
            with engine.writer(TABLE) as writer:
                put(writer, rows)
        return engine, self.enter(self.open(engine))

    def test_each_row_of_a_batch_is_one_that_was_written(self) -> None:
        _, delivery = self.opened()
        for _ in range(20):
            numbers = check_batch(delivery.next(timeout=_PATIENCE))
            assert ((numbers >= 0) & (numbers < 60)).all(), f"rows {numbers.tolist()} of 60"

    def test_it_is_an_iterator_of_batches(self) -> None:
        _, delivery = self.opened()
        assert iter(delivery) is delivery
        for count, batch in enumerate(delivery):
            check_batch(batch)
            if count == 2:
                break

    def test_rows_that_are_written_later_are_delivered_later(self) -> None:
        engine, delivery = self.opened()
        check_batch(delivery.next(timeout=_PATIENCE))
        with engine.writer(TABLE) as writer:
            put(writer, 600, 1_000)
        end = time.monotonic() + _PATIENCE
        while not (check_batch(delivery.next(timeout=_PATIENCE)) >= 1_000).any():
            assert time.monotonic() < end, "no row that was written behind the first batch"

    def test_a_wait_that_is_in_vain_ends_at_its_deadline(self) -> None:
        _, delivery = self.opened(0)
        for timeout in (0.0, 0.3):
            begun = time.monotonic()
            error = raised(lambda timeout=timeout: delivery.next(timeout=timeout))  # type: ignore[misc]
            took = time.monotonic() - begun
            assert isinstance(error, WaitTimeout), f"timeout={timeout} ended with {error!r}"
            assert timeout <= took < timeout + _PATIENCE, f"timeout={timeout} took {took:.3f} s"

    def test_a_wait_that_was_in_vain_takes_nothing_from_the_next_one(self) -> None:
        engine, delivery = self.opened(0)
        for _ in range(3):
            assert isinstance(raised(lambda: delivery.next(timeout=0)), WaitTimeout)
        with engine.writer(TABLE) as writer:
            put(writer, 60)
            numbers = check_batch(delivery.next(timeout=_PATIENCE))
        assert len(numbers) > 0

    def test_a_wait_ends_when_rows_come(self) -> None:
        engine, delivery = self.opened(0)

        def write() -> None:
            time.sleep(0.2)
            with engine.writer(TABLE) as writer:
                put(writer, 60)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            check_batch(delivery.next(timeout=6 * _PATIENCE))
        finally:
            thread.join()

    def test_a_timeout_that_is_none_is_refused(self) -> None:
        _, delivery = self.opened(0)
        for wrong in (-1, float("nan"), "soon"):
            error = raised(lambda wrong=wrong: delivery.next(timeout=wrong))  # type: ignore[misc]
            assert isinstance(error, ConfigError), f"timeout={wrong!r} ended with {error!r}"

    def test_a_batch_that_is_held_does_not_change(self) -> None:
        engine, delivery = self.opened()
        held = delivery.next(timeout=_PATIENCE)
        before = {name: np.asarray(value).copy() for name, value in held.items()}
        with engine.writer(TABLE) as writer:
            put(writer, 4_000, 100)  # every page is written anew
        for _ in range(20):
            delivery.next(timeout=_PATIENCE)
        check_same(held, before, "behind later batches")
        delivery.close()
        check_same(held, before, "behind close")

    def test_what_was_made_of_a_batch_outlives_it(self) -> None:
        _, delivery = self.opened()
        actions = delivery.next(timeout=_PATIENCE)["action"][1:]
        before = np.asarray(actions).copy()
        for _ in range(20):
            delivery.next(timeout=_PATIENCE)
        assert np.array_equal(np.asarray(actions), before), f"{before.tolist()} became {np.asarray(actions).tolist()}"

    def test_close_is_idempotent_and_nothing_is_delivered_behind_it(self) -> None:
        _, delivery = self.opened()
        delivery.next(timeout=_PATIENCE)
        delivery.close()
        delivery.close()
        error = raised(lambda: delivery.next(timeout=0))
        assert isinstance(error, Closed), f"behind close: {error!r}"

    def test_leaving_its_context_closes_it(self) -> None:
        _, delivery = self.opened()
        with delivery as entered:
            assert entered is delivery
        error = raised(lambda: delivery.next(timeout=0))
        assert isinstance(error, Closed), f"behind the block: {error!r}"

    def test_it_may_be_handed_to_another_thread(self) -> None:
        _, delivery = self.opened()
        found: list[Any] = [delivery.next(timeout=_PATIENCE)]
        thread = threading.Thread(target=lambda: found.append(raised(lambda: delivery.next(timeout=_PATIENCE))))
        thread.start()
        thread.join()
        for batch in found:
            check_batch(batch)

    def test_it_is_closed_when_its_engine_is(self) -> None:
        engine, delivery = self.opened()
        delivery.next(timeout=_PATIENCE)
        engine.close()
        error = raised(lambda: delivery.next(timeout=0))
        assert isinstance(error, Closed), f"behind the engine's close: {error!r}"


def raised(call: Callable[[], object]) -> object:
    """What a call raises, or what it returns."""
    try:
        return call()
    except Exception as error:
        return error


def check_batch(batch: Any) -> Array:
    """See that each row of a batch is whole; returns the numbers of the rows."""
    assert isinstance(batch, Mapping), f"expected a mapping, got {batch!r}"
    numbers = np.asarray(batch["action"]).copy()
    assert numbers.ndim == 1, f"action {numbers.shape}"
    assert np.array_equal(np.asarray(batch["obs"]), observation(numbers)), f"torn observations of {numbers.tolist()}"
    assert np.array_equal(np.asarray(batch["reward"]), numbers), f"torn rewards of {numbers.tolist()}"
    return numbers


def check_same(batch: Mapping[str, Any], before: Mapping[str, Array], when: str) -> None:
    """See that a batch still holds what it held."""
    for name, value in _arrays(batch):
        assert np.array_equal(value, before[name]), f"{name} of a held batch changed {when}"


def _arrays(batch: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    for name, value in batch.items():
        yield name, np.asarray(value)
