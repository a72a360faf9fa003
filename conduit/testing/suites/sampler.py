"""Conformance suite of the contract *sampler*: calls the sampler's function as the compiled call does, and checks the rows that it chose."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from conduit.contracts.sampler import Sampler
from conduit.errors import ConfigError
from conduit.kernels.cpu import job as jobs
from conduit.kernels.cpu.window_job import describe_window
from conduit.kernels.cpu.windows import AGES, WINDOW_AGES, WINDOW_FOLLOWING
from conduit.kernels.spec.make_plan import make_plan
from conduit.plane.engine import Engine
from conduit.plane.ingest.writer import Writer
from conduit.store.format import words as w
from conduit.store.tables.view import TableView
from conduit.testing.suites.contract import SCHEMA, TABLE, Array, ContractTests, observation

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)
SIZE = 24
_POISON = -0x5A5A
_CAPACITY, _PAGE = 400, 50


class Draws:
    """A job for draws of transitions of one step, as a batch of SIZE samples has it.

    Attributes:
        rows, following, pages, generations: int64 [SIZE], what a draw has chosen.
    """

    def __init__(self, view: TableView) -> None:
        # flags are in every schema: nothing else is gathered, and no reward summed up
        self.plan = make_plan(SCHEMA, SIZE, fields=("terminated",))
        self.rows, self.following, self.pages, self.generations, self._entries, self._slots = np.zeros(
            (6, SIZE), np.int64
        )
        self._ages = np.zeros(AGES, np.int64)
        addresses = {WINDOW_FOLLOWING: self.following.ctypes.data, WINDOW_AGES: self._ages.ctypes.data}
        self._window, self._sums = describe_window(self.plan, view.address, (0, 0), [], addresses)
        self.job = np.zeros(jobs.JOB_WORDS, np.int64)
        for offset, value in (
            (jobs.JOB_TABLE, view.address),
            (jobs.JOB_BATCH, SIZE),
            (jobs.JOB_BLOCK, SIZE),
            (jobs.JOB_WINDOW, self._window.ctypes.data),
            (jobs.JOB_ROWS, self.rows.ctypes.data),
            (jobs.JOB_FOLLOWING, self.following.ctypes.data),
            (jobs.JOB_PAGES, self.pages.ctypes.data),
            (jobs.JOB_GENERATIONS, self.generations.ctypes.data),
            (jobs.JOB_ENTRIES, self._entries.ctypes.data),
            (jobs.JOB_SLOTS, self._slots.ctypes.data),
        ):
            self.job[offset // 8] = value

    def draw(self, sampler: Sampler, slots: Sequence[int] = range(SIZE), attempt: int = 0) -> int:
        """Draw some slots; those of the others hold what no draw writes."""
        for array in (self.rows, self.following, self.pages, self.generations):
            array[:] = _POISON
        listed = np.array(slots, np.int64)
        draw = FUNCTION(sampler.function)
        found: int = draw(sampler.state, self.job.ctypes.data, listed.ctypes.data, len(listed), attempt)
        return found


class SamplerTests(ContractTests):
    """Any sampler of transitions passes this.

    Attributes:
        options: Of the table.
        made: Arrays that `finish` fills in, {name: dtype}.
        is_random: Whether another batch and another seed give other rows.
        has_least: Whether it is told how many rows are the least.
    """

    options: dict[str, Any] = {}
    made: dict[str, str] = {}
    is_random = True
    has_least = True

    def make(self, view: TableView, seed: int, least: int) -> Sampler:
        """The sampler under test, of SIZE samples a batch, that does not draw from fewer than `least` rows."""
        raise NotImplementedError

    def prepare(self, sampler: Sampler) -> None:
        """What its loader does before a draw."""

    def opened(self, rows: int = 120) -> tuple[Engine, TableView, Writer]:
        """An engine, its table, and a writer that has written some rows and goes on."""
        engine = self.engine(_CAPACITY, page_rows=_PAGE, **self.options)
        writer: Writer = self.enter(engine.writer(TABLE, keep_final=False))
        _put(writer, rows)
        return engine, engine._views[TABLE], writer

    def draw(self, sampler: Sampler, draws: Draws, number: int = 0, **how: Any) -> int:
        """Draw batch `number`."""
        sampler.batch = number
        self.prepare(sampler)
        return draws.draw(sampler, **how)

    def test_each_row_that_it_draws_begins_a_window(self) -> None:
        _, view, writer = self.opened(0)
        sampler, draws = self.make(view, 1, 1), Draws(view)
        end = 0
        for rows in (20, 35, 50, 300, 7):
            _put(writer, rows, end)
            end += rows
            for number in range(8):
                assert self.draw(sampler, draws, number) == SIZE
                _check(view, draws, range(SIZE), end)

    def test_deleted_rows_are_not_drawn(self) -> None:
        engine, view, _ = self.opened()
        sampler, draws = self.make(view, 1, 1), Draws(view)
        assert self.draw(sampler, draws) == SIZE
        chosen = np.unique(draws.rows)
        engine.table(TABLE).delete(view_ids(view, chosen))
        for number in range(8):
            found = self.draw(sampler, draws, number)
            if found == SIZE:
                again = np.intersect1d(draws.rows, chosen)
                assert len(again) == 0, f"deleted rows {again.tolist()} were drawn"
            else:
                assert found == -1, f"{found} of {SIZE} slots"

    def test_where_no_row_begins_a_window_there_is_nothing_to_draw(self) -> None:
        for rows in (0, 1):
            _, view, _ = self.opened(rows)
            found = self.draw(self.make(view, 1, 1), Draws(view))
            assert found == -1, f"drew {found} slots of {rows} rows"

    def test_it_does_not_draw_from_fewer_rows_than_the_least(self) -> None:
        if not self.has_least:
            return
        _, view, writer = self.opened(20)
        sampler, draws = self.make(view, 1, 100), Draws(view)
        found = self.draw(sampler, draws)
        assert found == -1, f"drew {found} slots of 20 rows, 100 are the least"
        _put(writer, 130, 20)
        assert self.draw(sampler, draws) == SIZE

    def test_a_repeated_draw_is_the_same_draw(self) -> None:
        _, view, _ = self.opened()
        sampler, draws = self.make(view, 5, 1), Draws(view)
        found = {}
        for number in (3, 0, 1):
            self.draw(sampler, draws, number)
            found[number] = draws.rows.copy()
        for one in (sampler, self.make(view, 5, 1)):
            for number, rows in found.items():
                self.draw(one, draws, number)
                assert np.array_equal(draws.rows, rows), f"another draw of batch {number}"
        if self.is_random:
            assert not np.array_equal(found[0], found[1]), "batches 0 and 1 are the same"
            self.draw(self.make(view, 6, 1), draws)
            assert not np.array_equal(draws.rows, found[0]), "seeds 5 and 6 draw the same"

    def test_the_number_of_the_batch_lies_at_its_address_and_is_nobody_elses_to_change(self) -> None:
        _, view, _ = self.opened()
        sampler, draws = self.make(view, 1, 1), Draws(view)
        at = ctypes.c_int64.from_address(sampler.batch_at)
        for number in (0, 1, 7):
            self.draw(sampler, draws, number)
            assert (sampler.batch, at.value) == (number, number), f"batch {number} became {sampler.batch}, {at.value}"
        at.value = 3
        assert sampler.batch == 3

    def test_what_is_no_number_of_a_batch_is_refused(self) -> None:
        _, view, _ = self.opened()
        sampler = self.make(view, 1, 1)
        sampler.batch = 4
        for wrong in (-1, 1.5, "2", None, 1 << 63):
            try:
                sampler.batch = wrong  # type: ignore[assignment]
            except ConfigError:
                assert sampler.batch == 4, f"{wrong!r} changed the batch to {sampler.batch}"
            else:
                raise AssertionError(f"batch = {wrong!r} was taken")

    def test_only_the_slots_that_are_listed_are_filled(self) -> None:
        _, view, _ = self.opened()
        sampler, draws = self.make(view, 1, 1), Draws(view)
        for slots in ([3, 4, 9], [0], [SIZE - 1], list(range(7, SIZE))):
            assert self.draw(sampler, draws, slots=slots) == len(slots)
            _check(view, draws, slots, 120)
            others = [slot for slot in range(SIZE) if slot not in slots]
            for array in (draws.rows, draws.following, draws.pages, draws.generations):
                assert (array[others] == _POISON).all(), f"slots {slots} were listed, others were written"

    def test_slots_are_drawn_again_or_given_up_when_their_rows_were_overwritten(self) -> None:
        _, view, writer = self.opened()
        sampler, draws = self.make(view, 1, 1), Draws(view)
        assert self.draw(sampler, draws) == SIZE
        _put(writer, 3 * _CAPACITY, 120)
        found = draws.draw(sampler, [1, 5], attempt=1)
        assert found in (2, -1), f"{found} of 2 slots"
        if found == 2:
            _check(view, draws, [1, 5], 120 + 3 * _CAPACITY)

    def test_it_counts_what_it_chose_among(self) -> None:
        _, view, _ = self.opened()
        sampler, draws = self.make(view, 1, 1), Draws(view)
        assert self.draw(sampler, draws) == SIZE
        assert 1 <= sampler.candidates <= sampler.offered <= view.layout.rows, (
            f"{sampler.candidates}, {sampler.offered}"
        )

    def test_finish_fills_in_what_it_makes_and_nothing_else(self) -> None:
        _, view, _ = self.opened()
        sampler, draws = self.make(view, 1, 1), Draws(view)
        for first, count in ((0, None), (5, 9)):
            arrays: dict[str, Array] = {name: np.full(SIZE, np.nan, dtype) for name, dtype in self.made.items()}
            arrays["other"] = np.full(SIZE, 7.0)
            slots = range(first, SIZE if count is None else first + count)
            draws.job[jobs.JOB_FIRST // 8], draws.job[jobs.JOB_BATCH // 8] = slots.start, slots.stop
            assert self.draw(sampler, draws, slots=slots) == len(slots)
            sampler.finish(arrays) if count is None else sampler.finish(arrays, first, count)
            assert (arrays.pop("other") == 7.0).all(), "an array that is none of its own was written"
            for name, array in arrays.items():
                filled = np.flatnonzero(np.isfinite(array))
                assert filled.tolist() == list(slots), f"{name}: slots {filled.tolist()} instead of {slots}"

    def test_a_draw_leaves_the_table_as_it_is(self) -> None:
        _, view, _ = self.opened()
        sampler, draws = self.make(view, 1, 1), Draws(view)
        before = view.pages(), view.meta.copy(), {name: column.copy() for name, column in view.columns.items()}
        for number in range(4):
            self.draw(sampler, draws, number)
        assert np.array_equal(view.pages(), before[0]), "words of pages changed"
        assert np.array_equal(view.meta, before[1]), "meta changed"
        for name, column in before[2].items():
            assert np.array_equal(view.columns[name], column), f"{name} changed"

    def test_it_draws_beside_a_writer_that_overwrites_what_it_looks_at(self) -> None:
        _, view, writer = self.opened()
        sampler, draws = self.make(view, 1, 1), Draws(view)
        done = threading.Event()

        def write() -> None:
            end = 120
            while not done.is_set():
                _put(writer, 40, end)
                end += 40

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for number in range(300):
                found = self.draw(sampler, draws, number)
                assert found in (SIZE, -1), f"{found} of {SIZE} slots"
                if found == SIZE:
                    inside = (draws.rows >= 0) & (draws.rows < view.layout.rows)
                    assert inside.all(), f"rows {draws.rows.tolist()}"
                    assert np.array_equal(draws.pages, draws.rows // view.layout.page_rows)
                    assert np.array_equal(draws.following // view.layout.page_rows, draws.pages)
        finally:
            done.set()
            thread.join()


def _ends(n: Array | int) -> tuple[Any, Any]:
    """Whether row n is terminated, and whether it is truncated."""
    n = np.asarray(n)
    return n % 7 == 6, (n % 11 == 10) & (n % 7 != 6)


def _put(writer: Writer, rows: int, start: int = 0) -> None:
    """Append rows whose values follow from their numbers; those that are truncated come without the observation behind them."""
    for n in range(start, start + rows):
        terminated, truncated = _ends(n)
        writer.append(
            obs=observation(n), action=n, reward=float(n), terminated=bool(terminated), truncated=bool(truncated)
        )


def view_ids(view: TableView, rows: Array) -> Array:
    """Ids of rows by their places, int64."""
    states = view.pages()[rows // view.layout.page_rows, w.PAGE_STATE // 8]
    ids: Array = (states >> w.GENERATION_SHIFT << w.ROW_BITS) | rows
    return ids


def _check(view: TableView, draws: Draws, slots: Sequence[int], end: int) -> None:
    """See that each slot has a row of those numbered below `end` that begins a window, and what lies behind it."""
    places = list(slots)
    rows, following = draws.rows[places], draws.following[places]
    assert ((rows >= 0) & (rows < view.layout.rows)).all(), f"rows {rows.tolist()}"
    pages = rows // view.layout.page_rows
    assert np.array_equal(draws.pages[places], pages), f"pages {draws.pages[places].tolist()} of {rows.tolist()}"
    words = view.pages()[pages]
    assert np.isin(words[:, w.PAGE_STATE // 8] & w.KIND_MASK, (w.OPEN, w.SEALED)).all(), "of a page that is free"
    generations = words[:, w.PAGE_STATE // 8] >> w.GENERATION_SHIFT
    assert np.array_equal(draws.generations[places], generations), "of another generation"
    local = rows % view.layout.page_rows
    assert (local < words[:, w.PAGE_COMMITTED // 8]).all(), f"rows {rows.tolist()} are not committed"
    numbers = view.columns["action"][rows]
    terminated, truncated = _ends(numbers)
    begins = ~truncated & ((numbers < end - 1) | terminated)
    assert begins.all(), f"rows number {numbers[~begins].tolist()} of {end} begin no window"
    behind = view.columns["action"][following]
    expected = np.where(terminated, behind, numbers + 1)
    assert np.array_equal(behind, expected), f"{behind.tolist()} follow {numbers.tolist()}"
