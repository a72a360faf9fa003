"""The samplers there are, one in plain Python that draws the newest rows first, and broken ones that the suite must catch."""

import ctypes

import numpy as np
import pytest

import conduit
from conduit.errors import ConfigError
from conduit.kernels.cpu import job as jobs
from conduit.kernels.cpu.windows import ENTRY_BYTES, ENTRY_GENERATION, ENTRY_PAGE, WINDOW_RESOLVE
from conduit.numbers import whole
from conduit.sampling.anchors import list_anchors
from conduit.sampling.candidates import empty_list
from conduit.sampling.prioritized import WEIGHTS, PrioritizedSampler
from conduit.sampling.shuffled import ShuffledSampler
from conduit.sampling.uniform import UNIFORM_PAGES, UNIFORM_SNAPSHOT, UNIFORM_WORDS, Uniform
from conduit.store.format import words as w
from conduit.testing.suites.contract import failures
from conduit.testing.suites.sampler import FUNCTION, SIZE, Draws, SamplerTests

WINDOW = conduit.Transition()


class TestUniform(SamplerTests):
    def make(self, view, seed, least):
        return Uniform(seed, view.layout.pages, least)


class PrioritizedTests(SamplerTests):
    options = {"priorities": conduit.Priorities()}
    made = {item.name: item.dtype for item in WEIGHTS}
    rule = conduit.Prioritized()

    def make(self, view, seed, least):
        layout = view.layout
        return PrioritizedSampler(
            self.rule,
            layout.table.priorities,
            layout.name,
            view.address,
            view.seat_line(),
            (layout.pages, layout.page_rows),
            SIZE,
            seed,
            least,
        )


class TestPrioritized(PrioritizedTests):
    pass


class TestIndependentDrawsByPriority(PrioritizedTests):
    rule = conduit.Prioritized(stratified=False, normalize="buffer")


class TestShuffled(SamplerTests):
    has_least = False  # its loader waits for them before an epoch

    def make(self, view, seed, least):
        return ShuffledSampler(view, WINDOW, seed, SIZE, (0, 1))

    def prepare(self, sampler):
        sampler.begin()
        place = sampler.place * SIZE
        if sampler.take(place, SIZE) < SIZE:
            sampler.take(0, SIZE)

    def test_where_no_row_begins_a_window_there_is_nothing_to_draw(self):
        for rows in (0, 1):
            _, view, _ = self.opened(rows)
            sampler = self.make(view, 1, 1)
            assert (sampler.begin(), sampler.take(0, SIZE)) == (0, 0)


def words_at(address, count):
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


class NewestFirst:
    """Goes back from the newest row that begins a window: slot k of batch b takes the (b * SIZE + k)-th, and begins anew at the end."""

    def __init__(self, view, seed, least):
        self.view, self.least = view, least
        self.number = np.zeros(1, np.int64)
        self.state = self.batch_at = self.number.ctypes.data
        self.callback = FUNCTION(self.draw)
        self.function = ctypes.cast(self.callback, ctypes.c_void_p).value
        self.candidates = self.offered = 0
        self.pages = empty_list(view.layout.pages)

    @property
    def batch(self):
        return int(self.number[0])

    @batch.setter
    def batch(self, number):
        value = whole(number)
        if value is None or not 0 <= value < 1 << 63:
            raise ConfigError(f"Expected the number of a batch, from 0, got {number!r}")
        self.number[0] = value

    def finish(self, arrays, first=0, count=None):
        pass

    def anchors(self):
        """Rows that begin a window, newest first, and addresses of the descriptions of all pages."""
        state = np.zeros(UNIFORM_WORDS, np.int64)
        state[UNIFORM_SNAPSHOT // 8] = self.pages.ctypes.data
        rows = list_anchors(self.view, WINDOW, state)
        described = {}
        for k in range(int(state[UNIFORM_PAGES // 8])):
            described[int(self.pages[k, ENTRY_PAGE // 8])] = self.pages.ctypes.data + ENTRY_BYTES * k
        ticks = self.view.pages()[:, w.PAGE_TICK // 8]
        size = self.view.layout.page_rows
        return rows[np.argsort(-(ticks[rows // size] + rows % size), kind="stable")], described

    def choose(self, rows, slot):
        return int(rows[(self.batch * SIZE + slot) % len(rows)])

    def draw(self, state, job, slots, count, attempt):
        rows, described = self.anchors()
        self.candidates = self.offered = len(rows)
        if len(rows) < max(1, self.least):
            return -1
        words = words_at(job, jobs.JOB_WORDS)
        row_at, page_at, generation_at, entry_at = (
            words_at(int(words[offset // 8]), SIZE)
            for offset in (jobs.JOB_ROWS, jobs.JOB_PAGES, jobs.JOB_GENERATIONS, jobs.JOB_ENTRIES)
        )
        window = int(words[jobs.JOB_WINDOW // 8])
        resolve = FUNCTION(int(words_at(window + WINDOW_RESOLVE, 1)[0]))
        listed = words_at(slots, count).tolist()
        for i, slot in enumerate(listed):
            row_at[slot] = row = self.choose(rows, slot)
            page = row // self.view.layout.page_rows
            page_at[slot], entry_at[slot] = page, described[page]
            resolved = resolve(window, job, slots + 8 * i, 1, 0)
            generation_at[slot] = words_at(described[page] + ENTRY_GENERATION, 1)[0]
            if resolved < 1:
                return -1  # it has been overwritten meanwhile
        return count


class NewestFirstTests(SamplerTests):
    is_random = False
    kind = NewestFirst

    def make(self, view, seed, least):
        return self.kind(view, seed, least)


class TestNewestFirst(NewestFirstTests):
    def test_the_first_slot_has_the_newest_row_that_begins_a_window(self):
        _, view, _ = self.opened()
        draws = Draws(view)
        assert self.draw(self.make(view, 0, 1), draws) == SIZE
        assert view.columns["action"][draws.rows[:3]].tolist() == [118, 117, 116]


class Hasty(NewestFirst):
    """Takes the newest rows that are committed, whatever follows them, and asks no resolver."""

    def draw(self, state, job, slots, count, attempt):
        found = super().draw(state, job, slots, count, attempt)
        if found > 0:
            words = words_at(job, jobs.JOB_WORDS)
            words_at(int(words[jobs.JOB_ROWS // 8]), SIZE)[words_at(slots, count)] += 1
        return found


class Stale(NewestFirst):
    """Lists rows once, and draws on what it has listed."""

    kept = None

    def anchors(self):
        self.kept = self.kept or super().anchors()
        return self.kept

    def draw(self, state, job, slots, count, attempt):
        super().draw(state, job, slots, count, attempt)
        return count


class Restless(NewestFirst):
    """Draws from a generator that goes on."""

    rng = np.random.default_rng(0)

    def choose(self, rows, slot):
        return int(self.rng.choice(rows))


class Advancing(NewestFirst):
    """Advances the number of the batch itself."""

    def draw(self, state, job, slots, count, attempt):
        found = super().draw(state, job, slots, count, attempt)
        self.number += 1
        return found


class Greedy(NewestFirst):
    """Draws from however few rows there are."""

    def __init__(self, view, seed, least):
        super().__init__(view, seed, 1)


class Sloppy(NewestFirst):
    """Fills the slots from 0 on, as many as are listed."""

    def draw(self, state, job, slots, count, attempt):
        first = np.arange(count)
        return super().draw(state, job, first.ctypes.data, count, attempt)


class Careless(NewestFirst):
    """Fills in all slots, and an array of somebody else."""

    def finish(self, arrays, first=0, count=None):
        for array in arrays.values():
            array[:] = 1


@pytest.mark.parametrize(
    ("broken", "test", "why"),
    [
        (Hasty, "test_each_row_that_it_draws_begins_a_window", "of 20 begin no window"),
        (Stale, "test_deleted_rows_are_not_drawn", "deleted rows ["),
        (Restless, "test_a_repeated_draw_is_the_same_draw", "another draw of batch 3"),
        (
            Advancing,
            "test_the_number_of_the_batch_lies_at_its_address_and_is_nobody_elses_to_change",
            "batch 0 became 1, 1",
        ),
        (Greedy, "test_it_does_not_draw_from_fewer_rows_than_the_least", "drew 24 slots of 20 rows, 100 are the least"),
        (Sloppy, "test_only_the_slots_that_are_listed_are_filled", "AssertionError: rows [-23130"),
        (
            Careless,
            "test_finish_fills_in_what_it_makes_and_nothing_else",
            "an array that is none of its own was written",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_suite_catches_a_sampler_that_breaks_its_contract(broken, test, why):
    class Broken(NewestFirstTests):
        kind = broken

    assert why in failures(Broken, test)[test]
